//! Targets in containers, chroots and sandboxes, whose files have other paths; callers without rights.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use stillpoint_patch_tests::cli::{Run, Stillpoint, binary};
use stillpoint_patch_tests::server::bound_command;
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::{Kind, Phase, Program, Victim, apply, assert_refused, revert, status};

/// Applies and reverts twice: the second time starts from the remains of the first.
#[track_caller]
fn there_and_back(victim: &mut Victim, patch: &Path) {
    for _ in 0..2 {
        victim.announce(Phase::Over(1, 2));
        apply(patch, victim.pid()).succeed();
        victim.assert_settled(2);
        status(victim.pid()).succeed();
        victim.announce(Phase::Over(2, 1));
        revert(victim.pid()).succeed();
        victim.assert_settled(1);
        victim.assert_pristine();
    }
}

/// Makes a shell that runs `script` and then becomes the program: `$0` is the program, `$@` its arguments.
fn shell(namespaces: &[&str], script: &str, program: &Path) -> Command {
    let mut command = bound_command(Path::new("unshare"));
    command.args(namespaces).args(["--", "sh", "-ec", script]).arg(program);
    command
}

fn namespaces_available() -> bool {
    Command::new("unshare").args(["--pid", "--mount", "--fork", "true"]).status().is_ok_and(|status| status.success())
}

#[test]
fn another_pid_and_mount_namespace() {
    if !namespaces_available() {
        skip!("this machine does not let us make namespaces");
    }
    let program = Program::build("victim");
    let patch = program.patch(2);
    // The path of the program exists in its own mount namespace only.
    let script = "mount --bind \"${0%/*}\" /mnt && shift 0 && exec /mnt/\"${0##*/}\" \"$@\"";
    let wrap = |elf: &Path| shell(&["--pid", "--mount", "--fork", "--mount-proc", "--kill-child"], script, elf);
    let mut victim = program.start_in(wrap, &["4"]);
    let inside = fs::read_to_string(format!("/proc/{}/status", victim.pid())).expect("read the status");
    assert!(inside.lines().any(|line| line.starts_with("NSpid:") && line.ends_with("\t1")), "{inside}");
    there_and_back(&mut victim, &patch);
}

#[test]
fn another_root_directory() {
    if !namespaces_available() {
        skip!("this machine does not let us make namespaces");
    }
    let program = Program::build("victim");
    let patch = program.patch(2);
    let root = program.dir().join("root");
    copy_with_libraries(program.elf(), &root);
    let temporary = std::env::temp_dir();
    fs::create_dir_all(root.join(temporary.strip_prefix("/").expect("an absolute path"))).expect("make a directory");
    // The page that the victim shares with us stays at its path.
    let script = format!(
        "mount --bind {temporary} {root}{temporary} && exec chroot {root} /victim \"$@\"",
        temporary = temporary.display(),
        root = root.display()
    );
    let mut victim = program.start_in(|elf| shell(&["--mount"], &script, elf), &["4"]);
    there_and_back(&mut victim, &patch);
}

/// Copies the program to `root/NAME`, and all its libraries to their usual places below `root`.
fn copy_with_libraries(elf: &Path, root: &Path) {
    fs::create_dir_all(root).expect("make a root directory");
    fs::copy(elf, root.join(elf.file_name().expect("a file name"))).expect("copy the program");
    let output = Command::new("ldd").arg(elf).output().expect("run ldd");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for library in text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from) {
        let copy = root.join(library.strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(copy.parent().expect("a directory")).expect("make a directory");
        fs::copy(&library, &copy).unwrap_or_else(|e| panic!("copy {}: {e}", library.display()));
    }
}

#[test]
fn the_executable_was_deleted() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let mut victim = program.start(&["4"]);
    fs::remove_file(program.elf()).expect("delete the program");
    there_and_back(&mut victim, &patch);
}

#[test]
fn the_executable_was_replaced_by_another_version() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let mut victim = program.start(&["4"]);
    let newer = Program::build_as("victim", Kind::Pie, &["-O1"], &[]);
    let copy = program.dir().join("newer");
    fs::copy(newer.elf(), &copy).expect("copy the newer program");
    fs::rename(&copy, program.elf()).expect("replace the program");
    // The running file is patched, not the file now at its path.
    there_and_back(&mut victim, &patch);
    let mut other = program.start(&["4"]);
    let before = other.snapshot();
    assert_refused(&apply(&patch, other.pid()).run(), "build-id");
    before.assert_untouched(other.pid());
    other.assert_settled(1);
}

#[track_caller]
fn in_a_sandbox(options: &[&str]) {
    let sandbox = Program::build("sandbox");
    let probe = Command::new(sandbox.elf()).args(options).arg("true").status().expect("run the sandbox");
    if !probe.success() {
        skip!("this kernel does not offer {options:?} ({probe})");
    }
    let program = Program::build("victim");
    let patch = program.patch(2);
    let wrap = |elf: &Path| {
        let mut command = bound_command(sandbox.elf());
        command.args(options).arg(elf);
        command
    };
    let mut victim = program.start_in(wrap, &["4"]);
    let inside = fs::read_to_string(format!("/proc/{}/status", victim.pid())).expect("read the status");
    assert!(inside.lines().any(|line| line == "Seccomp:\t2"), "{inside}");
    there_and_back(&mut victim, &patch);
}

#[test]
fn memory_is_never_made_executable_by_order_of_the_kernel() {
    in_a_sandbox(&["--kernel-mdwe"]);
}

#[test]
fn memory_is_never_made_executable_by_a_filter() {
    in_a_sandbox(&["--filter-mdwe"]);
}

#[test]
fn membarrier_is_forbidden() {
    in_a_sandbox(&["--kernel-mdwe", "--no-membarrier"]);
}

/// Runs the tool as an unprivileged user.
fn as_nobody(tool: &Stillpoint) -> Run {
    let command = tool.command();
    let Output { status, stdout, stderr } = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(command.get_program())
        .args(command.get_args())
        .output()
        .expect("run setpriv");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Run { line: tool.to_string(), code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

/// Returns true if that user can read the binary and the test's files.
fn readable_by_nobody(files: &[&Path]) -> bool {
    files.iter().all(|file| {
        let mut test = Command::new("setpriv");
        test.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--", "test", "-r"]).arg(file);
        test.status().is_ok_and(|status| status.success())
    })
}

/// Makes the files readable for others: below a directory of `tempfile` only the owner can read them.
fn publish(files: &[&Path]) {
    use std::os::unix::fs::PermissionsExt;
    for file in files {
        let parent = file.parent().expect("a directory");
        fs::set_permissions(parent, fs::Permissions::from_mode(0o755)).expect("publish a directory");
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).expect("publish a file");
    }
}

#[test]
fn a_caller_without_rights_is_refused() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    publish(&[&patch]);
    if !readable_by_nobody(&[&patch, binary()]) {
        skip!("the user nobody cannot read {} or {}", binary().display(), patch.display());
    }
    let mut victim = program.start(&["4"]);
    let before = victim.snapshot();
    for tool in [apply(&patch, victim.pid()), revert(victim.pid()), status(victim.pid())] {
        assert_refused(&as_nobody(&tool), "permi");
    }
    before.assert_untouched(victim.pid());
    victim.assert_settled(1);
}

/// Works without root on the user's own processes, where the machine lets users trace those.
#[test]
fn a_user_patches_a_program_of_its_own() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    publish(&[&patch, program.elf()]);
    if !readable_by_nobody(&[&patch, program.elf(), binary()]) {
        skip!("the user nobody cannot read {} or {}", binary().display(), patch.display());
    }
    if fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() != "0") {
        skip!("this machine lets only root trace other processes");
    }
    let wrap = |elf: &Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(elf);
        command
    };
    let mut victim = program.start_in(wrap, &["4"]);
    victim.announce(Phase::Over(1, 2));
    let run = as_nobody(&apply(&patch, victim.pid()));
    assert_eq!(run.code, Some(0), "{run}");
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    let run = as_nobody(&revert(victim.pid()));
    assert_eq!(run.code, Some(0), "{run}");
    victim.assert_settled(1);
    victim.assert_pristine();
}
