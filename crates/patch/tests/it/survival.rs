//! Patches that survive a restart: programs patched before their first instruction, and units that start this way.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use stillpoint_patch_tests::cli::{Stillpoint, binary};
use stillpoint_patch_tests::control_group::ControlGroup;
use stillpoint_patch_tests::packages::{self, Binary};
use stillpoint_patch_tests::server::{ChildGuard, Server};
use stillpoint_patch_tests::shipped_program::older;
use stillpoint_patch_tests::victim::{Kind, Program, apply, assert_refused, residue, soak, status};
use stillpoint_patch_tests::{effects, skip, wait};
use stillpoint_testing::soak::rounds;
use tempfile::TempDir;

/// Makes the command `stillpoint patch exec --patches PATCHES... OPTIONS... --`.
fn exec(patches: &[&Path], options: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(["patch", "exec"]);
    for patch in patches {
        command.arg("--patches").arg(patch);
    }
    command.args(options).arg("--");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the program's exit code, which is the version that answered.
#[track_caller]
fn version(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{}\n{}", output.status, text(&output.stderr)))
}

#[track_caller]
fn run(mut command: Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("run {command:?}: {e}"))
}

#[test]
fn a_program_is_patched_before_its_first_instruction_and_sees_no_other_difference() {
    for kind in [Kind::Pie, Kind::Executable] {
        let program = Program::build_as("heritage", kind, &[], &[]);
        let patch = program.patch(2);
        // Process state as a service manager sets it: a mask, ignored and blocked signals, descriptors, limits, a nice
        // value.
        let outer = "umask 027; trap '' PIPE USR1; ulimit -n 300; exec 7</dev/null; exec nice -n 3 \"$@\"";
        let told = |prefix: Option<Command>| {
            let mut command = Command::new("sh");
            command.args(["-c", outer, "sh"]);
            if let Some(prefix) = prefix {
                command.arg(prefix.get_program()).args(prefix.get_args());
            }
            command.arg(program.elf()).args(["one", "", "three  words"]).env("ODD", "a=b\nc");
            run(command)
        };
        let (plain, patched) = (told(None), told(Some(exec(&[&patch], &[]))));
        assert_eq!((version(&plain), version(&patched)), (1, 2), "{}", text(&patched.stderr));
        assert_eq!(text(&plain.stdout), text(&patched.stdout));
        assert!(text(&plain.stdout).contains("entry as stated: 1\nchildren: -1"), "{}", text(&plain.stdout));
    }
}

/// Checks that SIGPIPE is ignored only if it was before, and that closed standard descriptors stay closed.
#[test]
fn what_the_runtime_of_the_tool_changes_is_undone() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let told = |prefix: Option<Command>| {
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" <&-", "sh"]);
        if let Some(prefix) = prefix {
            command.arg(prefix.get_program()).args(prefix.get_args());
        }
        text(
            &run({
                command.arg(program.elf());
                command
            })
            .stdout,
        )
    };
    let plain = told(None);
    assert!(!plain.contains("descriptor 0:"), "{plain}");
    assert_eq!(plain, told(Some(exec(&[&patch], &[]))));
}

#[test]
fn several_patches_are_applied_in_order_and_a_directory_in_the_order_of_names() {
    let program = Program::build("heritage");
    let second = program.patch(2);
    let third = program.patch_on_top(&second, 2, 3);
    let mut both = exec(&[&second, &third], &[]);
    assert_eq!(version(&run_with(&mut both, program.elf())), 3);
    let directory = TempDir::with_prefix("stillpoint-patches-").expect("make a directory");
    fs::copy(&third, directory.path().join("b.patch")).expect("copy");
    fs::copy(&second, directory.path().join("a.patch")).expect("copy");
    fs::write(directory.path().join("README"), "no patch").expect("write");
    let mut all = exec(&[directory.path()], &[]);
    assert_eq!(version(&run_with(&mut all, program.elf())), 3);
    // A file that users other than root may write is not trusted.
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).expect("chmod");
    let output = run_with(&mut exec(&[directory.path()], &[]), program.elf());
    assert_eq!(version(&output), 1);
    assert!(text(&output.stderr).contains("others can write to it"), "{}", text(&output.stderr));
}

#[track_caller]
fn run_with(command: &mut Command, program: &Path) -> Output {
    command.arg(program).output().unwrap_or_else(|e| panic!("run {command:?}: {e}"))
}

/// Runs a wrapper that executes the program in its own process; the patch is not for the wrapper's own name.
#[test]
fn script_wrappers_lead_to_the_program() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let elf = program.elf().display();
    let script = program.dir().join("wrapper");
    fs::write(&script, format!("#!/bin/sh\nexec {elf} \"$@\"\n")).expect("write the wrapper");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("chmod");
    let shell = format!("true; (true); exec {elf}");
    let twice = format!("exec {elf}");
    let wrappers: [&[&str]; 3] =
        [&[script.to_str().expect("a name")], &["sh", "-c", &shell], &["nice", "-n", "1", "sh", "-c", &twice]];
    for words in wrappers {
        let plain = run({
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            command
        });
        let mut command = exec(&[&patch], &[]);
        command.args(words);
        let output = run(command);
        assert_eq!((version(&plain), version(&output)), (1, 2), "{}", text(&output.stderr));
        assert_eq!(text(&plain.stdout), text(&output.stdout), "{words:?}");
    }
    // A wrapper that never starts the program runs unchanged, and the tool reports it.
    let mut never = exec(&[&patch], &["--wait", "300ms"]);
    never.args(["sh", "-c", "sleep 1; exit 7"]);
    let output = run(never);
    assert_eq!(version(&output), 7);
    assert!(text(&output.stderr).contains("is not the program that heritage-1-2 is for"), "{}", text(&output.stderr));
}

#[test]
fn a_forking_daemon_is_patched_before_it_forks() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let told = program.dir().join("told");
    let mut command = exec(&[&patch], &[]);
    command.arg(program.elf()).arg("--daemon").arg(&told);
    let output = run(command);
    assert_eq!(version(&output), 0, "{}", text(&output.stderr));
    let line = wait::until("the daemon to tell", || fs::read_to_string(&told).ok().filter(|t| t.ends_with('\n')));
    let (version, pid) = line.trim().split_once(' ').expect("two numbers");
    let pid: i32 = pid.parse().expect("a number");
    assert_eq!((version, residue(pid)), ("2", Vec::new()));
    let found = status(pid).json().succeed().stdout;
    assert!(found.contains("heritage-1-2"), "{found}");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).expect("end the daemon");
}

/// ELF file of a 32-bit program that exits with 42.
const SMALL: [u8; 96] = {
    let mut file = [0; 96];
    let head: [u8; 84] = [
        0x7f, b'E', b'L', b'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 3, 0, 1, 0, 0, 0, 0x54, 0x80, 4, 8, 52, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 52, 0, 32, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 4, 8, 0,
        0x80, 4, 8, 96, 0, 0, 0, 96, 0, 0, 0, 5, 0, 0, 0, 0, 0x10, 0, 0,
    ];
    let code: [u8; 12] = [0xb8, 1, 0, 0, 0, 0xbb, 42, 0, 0, 0, 0xcd, 0x80];
    let mut i = 0;
    while i < 84 {
        file[i] = head[i];
        i += 1;
    }
    while i < 96 {
        file[i] = code[i - 84];
        i += 1;
    }
    file
};

#[test]
fn programs_that_cannot_be_patched_run_unpatched_and_it_is_said() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let fixed = Program::build_as("heritage", Kind::Executable, &[], &["-static"]);
    let output = run_with(&mut exec(&[&patch], &[]), fixed.elf());
    assert_eq!(version(&output), 1);
    assert!(text(&output.stderr).contains("runs unpatched: it is a static program"), "{}", text(&output.stderr));
    let small = program.dir().join("small");
    fs::write(&small, SMALL).expect("write a program");
    fs::set_permissions(&small, fs::Permissions::from_mode(0o755)).expect("chmod");
    if Command::new(&small).status().is_ok_and(|status| status.code() == Some(42)) {
        let output = run_with(&mut exec(&[&patch], &[]), &small);
        assert_eq!(version(&output), 42, "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("32-bit"), "{}", text(&output.stderr));
    } else {
        println!("this kernel runs no 32-bit programs");
    }
    let output = run_with(&mut exec(&[&patch], &[]), Path::new("/nonexistent/program"));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("execute /nonexistent/program"), "{}", text(&output.stderr));
}

/// Upgrades the package: the patch is for the build before.
#[test]
fn a_patch_for_another_build_is_dropped_by_name_and_the_program_runs() {
    let older = Program::build("heritage");
    let patch = older.patch(2);
    let newer = Program::build_as("heritage", Kind::Pie, &["-O1"], &[]);
    let mine = newer.patch(3);
    let output = run_with(&mut exec(&[&patch], &[]), newer.elf());
    assert_eq!(version(&output), 1);
    let said = text(&output.stderr);
    assert!(said.contains("heritage-1-2 dropped") && said.contains("the package was upgraded"), "{said}");
    // The others are active.
    let output = run_with(&mut exec(&[&patch, &mine], &[]), newer.elf());
    assert_eq!(version(&output), 3, "{}", text(&output.stderr));
    // The same for a damaged and a missing patch.
    let bad = newer.dir().join("bad.patch");
    fs::write(&bad, "no patch").expect("write");
    let output = run_with(&mut exec(&[&bad, Path::new("/nonexistent/x"), &mine], &[]), newer.elf());
    assert_eq!(version(&output), 3, "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr).matches("warning: dropped").count(), 2, "{}", text(&output.stderr));
}

#[test]
fn strict_runs_the_program_with_all_patches_or_not_at_all() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let other = Program::build_as("heritage", Kind::Pie, &["-O1"], &[]).patch(3);
    assert_eq!(version(&run_with(&mut exec(&[&patch], &["--strict"]), program.elf())), 2);
    for patches in [&[&other as &Path][..], &[&patch, &other], &[&patch, Path::new("/nonexistent/x")]] {
        let output = run_with(&mut exec(patches, &["--strict"]), program.elf());
        assert_eq!(version(&output), 3, "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "", "it ran");
    }
    let fixed = Program::build_as("heritage", Kind::Executable, &[], &["-static"]);
    let output = run_with(&mut exec(&[&patch], &["--strict"]), fixed.elf());
    assert_eq!((output.status.signal(), text(&output.stdout)), (Some(9), String::new()), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("is not started: it is a static program"), "{}", text(&output.stderr));
}

#[test]
fn unsigned_patches_are_dropped_where_signed_ones_are_asked_for() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let keys = TempDir::with_prefix("stillpoint-keys-").expect("make a directory");
    Stillpoint::new().args(["patch", "key", "generate", "--output"]).arg(keys.path()).succeed();
    let secret = fs::read_dir(keys.path()).expect("list").flatten().map(|entry| entry.path());
    let secret = secret.into_iter().find(|path| path.extension().is_some_and(|e| e == "key")).expect("a key");
    let trusted = keys.path().display().to_string();
    let options = ["--policy", "signed", "--keys", &trusted];
    let output = run_with(&mut exec(&[&patch], &options), program.elf());
    assert_eq!(version(&output), 1);
    assert!(text(&output.stderr).contains("dropped"), "{}", text(&output.stderr));
    let signed = program.patch_with(2, &["--sign", &secret.display().to_string()]);
    let output = run_with(&mut exec(&[&signed], &options), program.elf());
    assert_eq!(version(&output), 2, "{}", text(&output.stderr));
}

/// Runs in a sandbox without ptrace: the call fails, or kills the caller.
#[test]
fn a_program_whose_sandbox_allows_no_helper_runs_unpatched() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let sandbox = Program::build("sandbox");
    let mut command = Command::new(sandbox.elf());
    let inner = exec(&[&patch], &[]);
    command.args(["--missing", "101"]).arg(inner.get_program()).args(inner.get_args()).arg(program.elf());
    let output = run(command);
    assert_eq!(version(&output), 1, "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("runs unpatched"), "{}", text(&output.stderr));
}

/// Returns the processes that run the tool for this program, the program's own among them until its exec.
fn helpers(token: &str) -> Vec<i32> {
    let pids = fs::read_dir("/proc").expect("list processes").flatten();
    let pids = pids.filter_map(|e| e.file_name().to_str().and_then(|n| n.parse::<i32>().ok()));
    let is_ours = |pid: &i32| {
        fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == binary().canonicalize().expect("the tool"))
            && fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| text(&line).contains(token))
    };
    pids.filter(is_ours).collect()
}

/// Kills the helper at any instant: the program runs without patches, or with all, or not at all.
#[test]
fn the_helper_dies_and_the_program_is_never_half_patched() {
    let program = Program::build("heritage");
    let second = program.patch(2);
    let third = program.patch_on_top(&second, 2, 3);
    let start = Instant::now();
    assert_eq!(version(&run_with(&mut exec(&[&second, &third], &[]), program.elf())), 3);
    let whole = start.elapsed();
    let rounds = if soak() { 2000 } else { 20 };
    let (mut ends, mut killed) = (std::collections::BTreeMap::<i32, u32>::new(), 0);
    for round in 0..rounds {
        let token = format!("round-{round}-of-{}", std::process::id());
        let mut command = exec(&[&second, &third], &[]);
        command.arg(program.elf()).arg(&token).stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let mut child = ChildGuard::from_child(command.spawn().expect("start the tool"));
        let own = child.pid();
        let end = Instant::now() + whole.mul_f64(f64::from(round) / f64::from(rounds) * 1.2);
        while Instant::now() < end {
            std::thread::yield_now();
        }
        for helper in helpers(&token).into_iter().filter(|pid| *pid != own) {
            let helper = nix::unistd::Pid::from_raw(helper);
            killed += u32::from(nix::sys::signal::kill(helper, nix::sys::signal::Signal::SIGKILL).is_ok());
        }
        let status = wait::until("the program to end", || child.ended());
        let code = status.code().unwrap_or_else(|| panic!("round {round}: {status}"));
        assert!([1, 3, 75].contains(&code), "round {round}: exit {code}");
        *ends.entry(code).or_default() += 1;
    }
    println!("killed {killed} of {rounds}; exit codes {ends:?}");
    assert!(killed > rounds / 8, "only {killed} helpers of {rounds} were killed");
}

/// Fixes that the oldest redis of the archive lacks; a request shows if each is active.
const DIFFS: [&str; 2] = ["CVE-2026-23631", "CVE-2026-25243"];

#[test]
fn redis_starts_with_its_patches_in_force_every_time() {
    let shipped = match older("redis", &["redis-server", "redis-tools"], "usr/bin/redis-server", &DIFFS) {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let tool = Binary { path: binary().to_owned(), libraries: shipped.binary.libraries.clone() };
    let starts = if soak() { 200 } else { 10 };
    for start in 0..starts {
        let mut server = Server::start(&tool, |port, dir| {
            let mut words: Vec<std::ffi::OsString> = ["patch", "exec", "--strict"].map(Into::into).into();
            for patch in &shipped.patches {
                words.extend(["--patches".into(), patch.into()]);
            }
            words.extend(["--".into(), (&shipped.binary.path).into(), "--port".into(), port.to_string().into()]);
            words.extend(["--bind", "127.0.0.1", "--save", "", "--enable-debug-command", "yes"].map(Into::into));
            words.extend(["--dir".into(), dir.into()]);
            words
        });
        // The first request of the process.
        for effect in effects::of_diff(DIFFS[1]) {
            let answer = effect.ask(server.port()).expect("redis answers");
            assert!(answer.fixed, "start {start} of {starts}: {}: {}", effect.request, answer.text);
        }
        assert_eq!(residue(server.pid()), Vec::<String>::new());
        server.assert_running();
    }
}

/// Makes a machine's root directory with one unit.
fn root_with_unit(unit: &str, lines: &str) -> TempDir {
    let root = TempDir::with_prefix("stillpoint-root-").expect("make a directory");
    let units = root.path().join("usr/lib/systemd/system");
    fs::create_dir_all(&units).expect("make directories");
    let text =
        format!("[Unit]\nDescription=x\n\n[Service]\nType=notify\n{lines}\n\n[Install]\nWantedBy=multi-user.target\n");
    fs::write(units.join(unit), text).expect("write the unit");
    root
}

fn below(root: &TempDir, words: &[&str]) -> Stillpoint {
    Stillpoint::new().arg("patch").args(words.iter().copied()).arg("--root").arg(root.path())
}

fn drop_in(root: &TempDir, unit: &str) -> PathBuf {
    root.path().join(format!("etc/systemd/system/{unit}.d/90-stillpoint.conf"))
}

#[test]
fn a_unit_starts_with_what_is_enabled_for_it() {
    let program = Program::build("heritage");
    let (second, elf) = (program.patch(2), program.elf().display().to_string());
    let third = program.patch_on_top(&second, 2, 3);
    let root = root_with_unit("sp-test.service", &format!("ExecStart=-{elf} one \\\n  'two words'\nUser=nobody"));
    let enable = |patch: &Path| below(&root, &["enable", "--unit", "sp-test"]).arg(patch);
    let path = drop_in(&root, "sp-test.service");

    let dry = enable(&second).arg("--dry-run").succeed().stdout;
    assert!(dry.contains("would enable heritage-1-2") && dry.contains("[Service]\nExecStart=\n"), "{dry}");
    assert!(!path.exists() && !root.path().join("var").exists(), "a dry run wrote something");

    enable(&second).succeed();
    let written = fs::read_to_string(&path).expect("a drop-in");
    let line = written.lines().last().expect("a line");
    let command = line.strip_prefix("ExecStart=-").unwrap_or_else(|| panic!("{written}"));
    assert!(command.ends_with(&format!(" -- {elf} one    'two words'")), "{command}");
    // Start as systemd would.
    let start = || {
        run({
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("exec {command}")]);
            shell
        })
    };
    let output = start();
    assert_eq!(version(&output), 2, "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("argument 2: two words"), "{}", text(&output.stdout));

    // A repeated enable changes nothing; a second patch follows the first, and the drop-in stays unchanged.
    let again = enable(&second).succeed().stdout;
    assert!(again.contains("is already enabled"), "{again}");
    enable(&third).succeed();
    assert_eq!(fs::read_to_string(&path).expect("a drop-in"), written);
    assert_eq!(version(&start()), 3);
    let listed = below(&root, &["enabled", "--json"]).succeed().json();
    let names: Vec<&str> = listed.iter().filter_map(|line| line["patch"].as_str()).collect();
    assert_eq!(names, ["heritage-1-2", "heritage-2-3"]);
    // Readable by the service's own user, independent of the umask of the caller that enabled it.
    let store = root.path().join("var/lib/stillpoint/enabled/sp-test.service");
    assert_eq!(fs::metadata(&store).expect("a directory").permissions().mode() & 0o777, 0o755);
    verify(&root, &path);

    below(&root, &["disable", "heritage-2-3"]).succeed();
    assert_eq!(version(&start()), 2);
    below(&root, &["disable", "--unit", "sp-test"]).succeed();
    assert!(!path.exists() && !store.exists(), "something is left");
    assert_eq!(version(&start()), 1);
    below(&root, &["disable", "--unit", "sp-test"]).succeed();
}

/// Enables a patch after its base: without the base a start would drop it, so a base stays while another patch needs
/// it.
#[test]
fn a_patch_is_enabled_behind_its_base() {
    let program = Program::build("heritage");
    let second = program.patch(2);
    let third = program.patch_on_top(&second, 2, 3);
    let root = || root_with_unit("sp-test.service", &format!("ExecStart={}", program.elf().display()));
    let enable = |root: &TempDir, patches: &[&Path]| {
        let call = below(root, &["enable", "--unit", "sp-test"]);
        patches.iter().fold(call, |call, patch| call.arg(*patch)).run()
    };
    let (one, two) = (root(), root());
    let alone = enable(&one, &[&third]);
    assert_refused(&alone, "patch heritage-2-3 is based on heritage-1-2.diff");
    assert!(alone.stderr.contains("\ntry: stillpoint patch enable FILE --unit sp-test.service"), "{alone}");
    let wrong_order = enable(&one, &[&third, &second]);
    assert_refused(&wrong_order, &format!("try: stillpoint patch enable {} {}", second.display(), third.display()));
    assert!(!one.path().join("var").exists() && !one.path().join("etc").exists(), "something was written");
    // The same diff, for another build of the program.
    let other = Program::build_as("heritage", Kind::Pie, &["-O1"], &[]);
    assert_eq!(enable(&two, &[&other.patch(2)]).code, Some(0));
    assert_refused(&enable(&two, &[&third]), "heritage-1-2.diff");

    assert_eq!(enable(&one, &[&second, &third]).code, Some(0));
    let disable = |names: &[&str]| below(&one, &["disable", "--unit", "sp-test"]).args(names.iter().copied()).run();
    let refused = disable(&["heritage-1-2"]);
    assert_refused(&refused, "heritage-2-3 is based on");
    assert!(refused.stderr.contains("try: stillpoint patch disable heritage-2-3 heritage-1-2"), "{refused}");
    assert_eq!(below(&one, &["enabled"]).succeed().stdout.lines().count(), 2);
    assert_eq!(disable(&["heritage-1-2", "heritage-2-3"]).code, Some(0));
}

/// Adds a vendor's later `ExecStart=`: it is followed once systemd reads its units again, and reported until then.
#[test]
fn a_unit_that_changes_is_followed() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let elf = program.elf().display();
    let root = root_with_unit("sp-test.service", &format!("ExecStart={elf} old"));
    let (path, unit) = (drop_in(&root, "sp-test.service"), root.path().join("usr/lib/systemd/system/sp-test.service"));
    let change = |to: &str| fs::write(&unit, format!("[Service]\nExecStart={elf} {to}\n")).expect("write the unit");
    let enable = |options: &[&str]| {
        below(&root, &["enable", "--unit", "sp-test"]).args(options.iter().copied()).arg(&patch).succeed();
    };
    let refresh = |options: &[&str]| below(&root, &["refresh"]).args(options.iter().copied()).succeed().stdout;
    let start = |drop_in: &Path| {
        let written = fs::read_to_string(drop_in).expect("a drop-in");
        let command = written.lines().last().and_then(|line| line.strip_prefix("ExecStart=")).expect("a command");
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec {command}")]);
        let output = run(shell);
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    enable(&[]);
    assert_eq!(refresh(&[]), "");
    assert!(!start(&path).2.contains("warning"));

    change("new");
    let (code, stdout, stderr) = start(&path);
    assert!(code == Some(2) && stdout.contains("argument 1: old"), "{stderr}");
    assert!(stderr.contains("old\" and is ") && stderr.contains("try: stillpoint patch refresh"), "{stderr}");
    // Write as systemd's generator does.
    let (early, written) = (root.path().join("run/systemd/generator.early"), fs::read(&path).expect("a drop-in"));
    refresh(&["--into", &early.display().to_string()]);
    assert_eq!(fs::read(&path).expect("a drop-in"), written);
    let (code, stdout, stderr) = start(&early.join("sp-test.service.d/90-stillpoint.conf"));
    assert!(code == Some(2) && stdout.contains("argument 1: new") && !stderr.contains("warning"), "{stderr}");
    fs::remove_dir_all(&early).expect("remove what was generated");

    enable(&["--strict"]);
    change("newer");
    let (code, stdout, stderr) = start(&path);
    assert_eq!((code, stdout.as_str()), (Some(3), ""), "{stderr}");
    let told = refresh(&[]);
    assert!(told.contains("newer") && told.contains("90-stillpoint.conf"), "{told}");
    let (code, stdout, stderr) = start(&path);
    assert!(code == Some(2) && stdout.contains("argument 1: newer"), "{stderr}");
}

/// Uses Debian's own unit of redis: it lists executable files, and restricts its system calls.
#[test]
fn the_unit_of_debians_redis_is_understood() {
    let binary = match packages::redis(None) {
        Ok(binary) => binary,
        Err(why) => skip!(why),
    };
    let package = binary.path.ancestors().nth(3).expect("it lies in usr/bin of its package");
    let unit = package.join("lib/systemd/system/redis-server.service");
    let text = fs::read_to_string(&unit).unwrap_or_else(|e| panic!("{}: {e}", unit.display()));
    let root = root_with_unit("redis-server.service", "");
    fs::write(root.path().join("usr/lib/systemd/system/redis-server.service"), &text).expect("write the unit");
    let program = Program::build("heritage");
    let enable = |loosen: &[&str]| {
        let call = below(&root, &["enable", "--unit", "redis-server", "--stillpoint", "/usr/bin/stillpoint"]);
        call.args(loosen.iter().copied()).arg(program.patch(2)).succeed()
    };
    let warned = enable(&[]).stderr;
    assert!(warned.contains("SystemCallFilter=@system-service") && warned.contains("--loosen-sandbox"), "{warned}");
    let path = drop_in(&root, "redis-server.service");
    let written = fs::read_to_string(&path).expect("a drop-in");
    let start = "--unit redis-server.service";
    assert!(written.contains(&format!("ExecStart=/usr/bin/stillpoint patch exec {start}")), "{written}");
    assert!(written.contains(" -- /usr/bin/redis-server /etc/redis/redis.conf --supervised systemd"), "{written}");
    assert!(
        written.contains("\nExecPaths=/usr/bin/stillpoint\n") && !written.contains("SystemCallFilter"),
        "{written}"
    );
    assert!(!enable(&["--loosen-sandbox"]).stderr.contains("warning"), "it warned of what it was told");
    let written = fs::read_to_string(&path).expect("a drop-in");
    assert!(written.ends_with("\nSystemCallFilter=@debug @resources\n"), "{written}");
}

/// Checks the drop-in with systemd, where it is installed.
fn verify(root: &TempDir, drop_in: &Path) {
    let whole = root.path().join("whole.service");
    let command = fs::read_to_string(drop_in).expect("a drop-in");
    fs::write(&whole, format!("[Unit]\nDescription=x\n{command}")).expect("write");
    match Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&whole).output() {
        Ok(output) => {
            let said = text(&output.stderr);
            let about: Vec<&str> = said.lines().filter(|line| line.contains("whole.service")).collect();
            assert!(about.is_empty(), "systemd-analyze: {about:#?}\n{command}");
        }
        Err(error) => println!("systemd-analyze: {error}"),
    }
}

#[test]
fn what_cannot_be_enabled_is_refused_by_name() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let other = Program::build_as("heritage", Kind::Pie, &["-O1"], &[]);
    let line = |program: &Program| format!("ExecStart={}", program.elf().display());
    let root = root_with_unit("sp-test.service", &line(&other));
    let inside = root.path().join(other.elf().strip_prefix("/").expect("a full path"));
    fs::create_dir_all(inside.parent().expect("a directory")).expect("make directories");
    fs::copy(other.elf(), &inside).expect("copy the program");
    let enable = |unit: &str, patch: &Path| below(&root, &["enable", "--unit", unit]).arg(patch).run();
    assert_refused(&enable("sp-test", &patch), "another build");
    assert_refused(&enable("absent", &patch), "absent.service");
    assert_refused(&enable("../x", &patch), "../x");
    assert_refused(&enable("sp-test", Path::new("/nonexistent/x")), "/nonexistent/x");
    assert!(!root.path().join("var").exists() && !root.path().join("etc").exists(), "something was written");
    let root = root_with_unit("sp-test.service", &line(&program));
    let signed = below(&root, &["enable", "--unit", "sp-test", "--policy", "signed"]);
    assert_refused(&signed.arg("--keys").arg(root.path()).arg(&patch).run(), "key directory");
    assert!(!root.path().join("var").exists() && !root.path().join("etc").exists(), "something was written");
}

/// Changes the file between reads, as its owner may.
#[test]
fn what_is_enabled_is_what_was_verified() {
    let program = Program::build("heritage");
    let unsigned = program.patch(2);
    let keys = TempDir::with_prefix("stillpoint-keys-").expect("make a directory");
    Stillpoint::new().args(["patch", "key", "generate", "--output"]).arg(keys.path()).succeed();
    let secret = fs::read_dir(keys.path()).expect("list").flatten().map(|entry| entry.path());
    let secret = secret.into_iter().find(|path| path.extension().is_some_and(|e| e == "key")).expect("a key");
    let signed = program.dir().join("signed.patch");
    program.builder(2, &signed).arg("--sign").arg(&secret).succeed();
    let verified = fs::read(&signed).expect("the patch");
    let (raced, next) = (program.dir().join("raced.patch"), program.dir().join("next.patch"));
    fs::copy(&signed, &raced).expect("copy");
    let over = AtomicBool::new(false);
    let mut enabled = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for from in [&unsigned, &signed].into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                fs::hard_link(from, &next).and_then(|()| fs::rename(&next, &raced)).expect("exchange the file");
            }
        });
        let ends = Ended(&over);
        for round in 0..rounds(20, 300) {
            let root = root_with_unit("sp-test.service", &format!("ExecStart={}", program.elf().display()));
            let call = below(&root, &["enable", "--unit", "sp-test", "--policy", "signed"]);
            let run = call.arg("--keys").arg(keys.path()).arg(&raced).run();
            let store = root.path().join("var/lib/stillpoint/enabled/sp-test.service");
            let stored = fs::read_dir(store).into_iter().flatten().map(|entry| entry.expect("an entry").path());
            let stored: Vec<Vec<u8>> = stored.map(|path| fs::read(path).expect("read it")).collect();
            match run.code {
                Some(0) => assert!(stored.len() == 1 && stored[0] == verified, "round {round}: an unsigned one: {run}"),
                Some(3) => assert!(stored.is_empty() && run.stderr.contains("not signed"), "round {round}: {run}"),
                _ => panic!("round {round}: {run}"),
            }
            enabled += usize::from(run.code == Some(0));
        }
        drop(ends);
    });
    println!("{enabled} were enabled");
}

/// Ends a thread when the test ends, also after a failure.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Checks the directory of enabled patches: they run in the service, with its rights.
#[test]
fn patches_are_enabled_where_root_alone_decides() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let root = root_with_unit("sp-test.service", &format!("ExecStart={}", program.elf().display()));
    let enable = || below(&root, &["enable", "--unit", "sp-test"]).arg(&patch);
    let state = root.path().join("var/lib/stillpoint");
    let (store, elsewhere) = (state.join("enabled/sp-test.service"), root.path().join("elsewhere"));
    let units = root.path().join("etc/systemd/system/sp-test.service.d");
    fs::create_dir(&elsewhere).expect("make a directory");
    for planted in [&store, &state.join("enabled"), &state, &units] {
        let _ = fs::remove_dir_all(planted);
        fs::create_dir_all(planted.parent().expect("a directory")).expect("make directories");
        symlink(&elsewhere, planted).expect("make a link");
        assert_refused(&enable().run(), "symbolic link");
        fs::remove_file(planted).expect("remove the link");
        fs::create_dir(planted).expect("make a directory");
        chown(planted, Some(65534), None).expect("give it away");
        assert_refused(&enable().run(), "belongs to uid 65534");
        fs::remove_dir_all(planted).expect("remove it");
    }
    assert_eq!(fs::read_dir(&elsewhere).expect("list it").count(), 0, "something was written");
    enable().succeed();
    let stored = store.join("0001-heritage-1-2.patch");
    let place = root.path().display().to_string();
    let options = ["--unit", "sp-test", "--root", &place, "--helper", "/nonexistent"];
    let read = || run_with(&mut exec(&[], &options), program.elf());
    assert_eq!(version(&read()), 2);
    // and so does the file that is read at a start
    let there = fs::read(&stored).expect("read it");
    chown(&stored, Some(65534), None).expect("give it away");
    let output = read();
    assert_eq!(version(&output), 1);
    assert!(text(&output.stderr).contains("dropped: ") && text(&output.stderr).contains("uid 65534"));
    fs::remove_file(&stored).expect("remove it");
    fs::write(elsewhere.join("x.patch"), there).expect("write it");
    symlink(elsewhere.join("x.patch"), &stored).expect("make a link");
    let output = read();
    assert_eq!(version(&output), 1);
    assert!(text(&output.stderr).contains("symbolic link"), "{}", text(&output.stderr));
}

/// Finds a service's processes by its control group; normally systemd makes it, here the test does.
#[test]
fn a_unit_is_patched_by_its_control_group() {
    let unit = format!("sp-test-{}.service", std::process::id());
    let Some(group) = ControlGroup::make(&format!("system.slice/{unit}/inner")) else {
        skip!("no control group can be made")
    };
    let program = Program::build("storm");
    let patch = program.patch(2);
    let mut victim = program.start_in(|elf| group.command(elf), &["idle"]);
    victim.announce(stillpoint_patch_tests::victim::Phase::Over(1, 2));
    Stillpoint::new()
        .args(["patch", "apply"])
        .arg(&patch)
        .arg("--unit")
        .arg(unit.trim_end_matches(".service"))
        .succeed();
    victim.assert_settled(2);
    let status = Stillpoint::new().args(["patch", "status", "--unit", &unit]).succeed().stdout;
    assert!(status.contains("storm-1-2"), "{status}");
    drop(victim);
    drop(group);
    assert_refused(&Stillpoint::new().args(["patch", "status", "--unit", &unit]).run(), &unit);
}

/// Starts a process in a control group; returns it with its id.
fn member(group: &ControlGroup) -> (ChildGuard, i32) {
    let child = group.command(Path::new("sleep")).arg("60").spawn().expect("start a process");
    let child = ChildGuard::from_child(child);
    let pid = child.pid();
    let comm = format!("/proc/{pid}/comm");
    wait::until("the process to be in its group", || {
        fs::read_to_string(&comm).is_ok_and(|name| name.trim() == "sleep").then_some(())
    });
    (child, pid)
}

/// Makes a group of the same name: users may make groups of any name in their own part of the tree.
#[test]
fn a_control_group_that_only_has_the_name_of_a_unit_is_not_taken() {
    let id = std::process::id();
    let name = format!("sp-decoy-{id}");
    let status = |unit: &str| Stillpoint::new().args(["patch", "status", "--json", "--unit", unit]).run();
    for (unit, decoy) in [
        (name.clone(), format!("user.slice/user-1000.slice/user@1000.service/app.slice/{name}.service")),
        (name.clone(), format!("{name}.slice/{name}.service")),
        (name.clone(), format!("system.slice/{name}-other.service/{name}.service")),
        (name.clone(), format!("{name}.service")),
        (format!("{name}@1"), format!("system.slice/{name}@1.service")),
        (format!("{name}@1"), format!("system.slice/system-{name}.slice/{name}@1.service")),
    ] {
        let Some(group) = ControlGroup::make(&decoy) else { skip!("no control group can be made") };
        let _member = member(&group);
        assert_refused(&status(&unit), &unit);
    }
    let escaped = name.replace('-', "\\x2d");
    for (unit, own) in [
        (name.clone(), format!("system.slice/{name}.service")),
        (format!("{name}@1-main"), format!("system.slice/system-{escaped}.slice/{name}@1-main.service")),
    ] {
        let groups = [own, format!("user.slice/{unit}.service"), format!("aaa-{name}.slice/{unit}.service")];
        let groups = groups.map(|path| ControlGroup::make(&path).expect("make a control group"));
        let members = groups.each_ref().map(member);
        let pids: Vec<_> = status(&unit).json().iter().map(|line| line["pid"].clone()).collect();
        assert_eq!(pids, [members[0].1], "{unit}");
    }
}

/// Replies in systemd's place: where systemd runs, only its reply counts, if it can be the control group of a system
/// service.
#[test]
fn systemd_is_asked_and_its_reply_is_checked() {
    let name = format!("sp-asked-{}", std::process::id());
    let paths = [format!("{name}.slice/{name}.service"), format!("system.slice/{name}.service")];
    let [Some(own), Some(usual)] = paths.each_ref().map(|path| ControlGroup::make(path)) else {
        skip!("no control group can be made")
    };
    let (members, dir) =
        ([member(&own), member(&usual)], TempDir::with_prefix("sp-systemctl-").expect("make a directory"));
    let (program, reply) = (dir.path().join("systemctl"), dir.path().join("reply"));
    fs::write(&program, format!("#!/bin/sh\ncat {}\n", reply.display())).expect("write a program");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("chmod");
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").expect("a PATH"));
    let status = |state: &str, group: &str| {
        let text = format!("Id={name}.service\nLoadState=loaded\nActiveState={state}\nControlGroup={group}\n");
        fs::write(&reply, text).expect("write a reply");
        let booted = "mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", booted, "sh"]).arg(binary());
        command.args(["patch", "status", "--json", "--unit", &name]).env("PATH", &path);
        run(command)
    };
    let output = status("active", &format!("/{}", paths[0]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    assert!(lines.len() == 1 && lines[0].contains(&format!("\"pid\":{}", members[0].1)), "{lines:?}");
    let user = format!("/user.slice/user-1000.slice/user@1000.service/{name}.service");
    let own = format!("/{}", paths[0]);
    for (state, group, why) in [
        ("inactive", "", "not active"),
        ("failed", own.as_str(), "not active"),
        ("active", "", "no process"),
        ("active", user.as_str(), "not the control group of a system service"),
        ("active", "/system.slice/../x.service", "not the control group of a system service"),
        ("active", "/absent.slice/x.service", "not the control group of a system service"),
    ] {
        let output = status(state, group);
        let stderr = text(&output.stderr);
        assert!(output.status.code() == Some(3) && stderr.contains(why), "{state} {group}: {stderr}");
    }
}

#[test]
fn what_is_no_name_of_a_service_is_refused() {
    let long = "x".repeat(300);
    for name in ["", "..", "../redis", "system.slice/redis", "a\nb", "a b", "*", "user.slice", "redis@", &long] {
        let run = Stillpoint::new().args(["patch", "status", "--unit", name]).run();
        assert_refused(&run, "service");
        assert_eq!(run.stderr.lines().count(), 3, "{run}");
    }
}

#[test]
fn every_patched_process_is_listed_for_people_programs_and_prometheus() {
    let program = Program::build("storm");
    let patch = program.patch(2);
    let mut victim = program.start(&["idle"]);
    victim.announce(stillpoint_patch_tests::victim::Phase::Over(1, 2));
    apply(&patch, victim.pid()).succeed();
    victim.assert_settled(2);
    let list = |option: &[&str]| Stillpoint::new().args(["patch", "list"]).args(option.iter().copied()).succeed();
    let pid = victim.pid();
    assert!(list(&[]).stdout.lines().any(|line| line.starts_with(&format!("{pid} storm generation 1: storm-1-2"))));
    assert!(
        list(&["--json"]).json().iter().any(|line| line["pid"] == pid && line["patches"][0]["name"] == "storm-1-2")
    );
    let text = list(&["--prometheus"]).stdout;
    let labels = format!("{{pid=\"{pid}\",process=\"storm\"");
    let sample =
        text.lines().find(|line| line.starts_with(&format!("stillpoint_patch_generation{labels},patch=\"storm-1-2\"")));
    assert!(sample.is_some_and(|line| line.ends_with("\"} 1")), "{text}");
    assert!(text.contains(&format!("stillpoint_process_entries_damaged{labels}}} 0\n")), "{text}");
    assert_exposition(&text);
}

/// Asserts the rules of the text format: help and type before the samples of a name, each name's lines together,
/// numbers.
#[track_caller]
fn assert_exposition(text: &str) {
    let mut seen: Vec<String> = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        if line.starts_with('#') {
            assert!(matches!(words[1], "HELP" | "TYPE"), "{line}");
            if words[1] == "HELP" {
                assert!(!seen.iter().any(|name| name == words[2]), "{line}: a second time");
                seen.push(words[2].to_owned());
            } else {
                assert_eq!((seen.last().map(String::as_str), words[3]), (Some(words[2]), "gauge"));
            }
            continue;
        }
        let (name, value) = line.rsplit_once(' ').expect("a value");
        assert!(value.parse::<f64>().is_ok(), "{line}");
        assert_eq!(seen.last().map(String::as_str), name.split('{').next(), "{line}");
    }
    assert!(text.ends_with('\n'));
}
