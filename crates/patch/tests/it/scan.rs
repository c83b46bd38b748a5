//! `stillpoint patch scan` on real processes, in a private copy of the root file system with two versions of a package of ours.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{fs, thread, time::Duration};
use stillpoint_host::cache::default_root;
use stillpoint_patch_tests::cli::{Stillpoint, binary};
use stillpoint_patch_tests::server::bound_command;
use stillpoint_patch_tests::skip;

const CHANGELOG: &str = "\
sp-demo (1-2) stable; urgency=high

  * CVE-2026-11111: bound the length

 -- A <a@b.invalid>  Fri, 03 Apr 2026 14:29:32 +0200

sp-demo (1-1) stable; urgency=low

  * First.

 -- A <a@b.invalid>  Mon, 02 Jan 2023 13:06:21 +0100
";

/// Makes a package with one program, whose time is that of its version in the changelog.
fn package(dir: &Path, version: &str, date: &str) -> PathBuf {
    let tree = dir.join(format!("tree-{version}"));
    let (bin, doc) = (tree.join("usr/bin"), tree.join("usr/share/doc/sp-demo"));
    for made in [&bin, &doc, &tree.join("DEBIAN")] {
        fs::create_dir_all(made).expect("make a directory");
    }
    let fields = "Architecture: amd64\nMaintainer: A <a@b.invalid>\nDescription: x\n";
    fs::write(tree.join("DEBIAN/control"), format!("Package: sp-demo\nVersion: {version}\n{fields}")).expect("write");
    fs::write(doc.join("changelog.Debian"), CHANGELOG).expect("write the changelog");
    let (source, program) = (dir.join("demo.c"), bin.join("sp-demo"));
    let text =
        format!("#include <unistd.h>\nconst char version[] = \"{version}\";\nint main(void) {{ for (;;) pause(); }}\n");
    fs::write(&source, text).expect("write the source");
    run(Command::new("cc").args(["-o"]).args([&program, &source]));
    run(Command::new("touch").args(["-d", date]).arg(&program));
    let deb = dir.join(format!("sp-demo_{version}_amd64.deb"));
    run(Command::new("dpkg-deb").args(["--root-owner-group", "-Znone", "--build"]).args([&tree, &deb]));
    deb
}

pub(super) fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Private copy of the root file system, in which packages can be installed.
pub(super) struct Machine {
    shell: Child,
    dir: tempfile::TempDir,
}

impl Machine {
    /// Makes the copy; `None` if this machine does not let us.
    pub(super) fn start() -> Option<Machine> {
        let dir = tempfile::tempdir().expect("make a directory");
        // an overlay's upper directory cannot be located on another overlay
        let script = "mount -t tmpfs none \"$0\" && mkdir \"$0/up\" \"$0/work\" \"$0/root\" \
             && mount -t overlay none -o \"lowerdir=/,upperdir=$0/up,workdir=$0/work\" \"$0/root\" \
             && for name in proc dev tmp; do mount --rbind /$name \"$0/root/$name\"; done \
             && mkdir -p \"$1\" \"$0/root$1\" && mount --rbind \"$1\" \"$0/root$1\" && touch \"$0/root/run/ready\" \
             && exec sleep 600";
        let mut shell = bound_command(Path::new("unshare"));
        // what is compiled is kept
        let cache = default_root().expect("a cache");
        shell.args(["--mount", "sh", "-ec", script]).arg(dir.path()).arg(cache).stderr(Stdio::null());
        let shell = shell.spawn().expect("start unshare");
        let mut machine = Machine { shell, dir };
        for _ in 0..600 {
            if machine.root().join("run/ready").exists() {
                return Some(machine);
            }
            if machine.shell.try_wait().expect("look at the shell").is_some() {
                return None;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("the copy of the root file system does not become ready");
    }

    fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}/root", self.shell.id(), self.dir.path().display()))
    }

    /// Makes a command that runs in the copy.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = bound_command(Path::new("nsenter"));
        let inside = self.dir.path().join("root");
        command.args(["--mount", "--target", &self.shell.id().to_string(), "chroot"]).arg(inside).arg(program);
        command
    }

    pub(super) fn install(&self, deb: &Path) {
        run(self.command(Path::new("dpkg")).arg("--install").arg(deb));
    }

    /// Runs stillpoint in the copy; returns the exit code and what was printed.
    pub(super) fn stillpoint(&self, arguments: &[&str]) -> (Option<i32>, String) {
        // `/tmp` is the same directory in the copy of the root
        let own = Path::new("/tmp").join(format!("stillpoint-scan-{}", std::process::id()));
        run(Command::new("cp").arg(binary()).arg(&own));
        let output = self.command(&own).args(arguments).output().expect("run stillpoint");
        fs::remove_file(&own).expect("remove the copy of the binary");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() != Some(2) || !errors.contains("Usage:"), "{errors}");
        (output.status.code(), format!("{}{errors}", String::from_utf8_lossy(&output.stdout)))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

/// Finds the state of a process's file; panics with the whole report if there is none.
#[track_caller]
fn finding(report: &str, pid: u32, name: &str) -> Value {
    let report: Value = report.lines().find_map(|line| serde_json::from_str(line).ok()).expect("a line of JSON");
    let has = |finding: &&Value| {
        let is_it = |process: &Value| process["pid"] == pid;
        finding["processes"].as_array().is_some_and(|all| all.iter().any(is_it))
            && finding["path"].as_str().is_some_and(|path| path.ends_with(name))
    };
    let found = report["findings"].as_array().and_then(|all| all.iter().find(has).cloned());
    found.unwrap_or_else(|| panic!("no {name} of process {pid} in {report:#}"))
}

#[test]
fn a_replaced_program_is_found_with_its_version_and_cves() {
    let Some(machine) = Machine::start() else { skip!("this machine lets us mount no overlay") };
    let dir = tempfile::tempdir_in("/tmp").expect("make a directory");
    let old = package(dir.path(), "1-1", "2023-01-02 12:06:21 UTC");
    let new = package(dir.path(), "1-2", "2026-04-03 12:29:32 UTC");
    machine.install(&old);
    let mut demo = machine.command(Path::new("/usr/bin/sp-demo")).spawn().expect("start the program");
    while fs::read_link(format!("/proc/{}/exe", demo.id())).is_ok_and(|exe| !exe.ends_with("sp-demo")) {
        thread::sleep(Duration::from_millis(10));
    }
    // no archive has the package: nothing is stated about it
    let (_, before) = machine.stillpoint(&["--json", "patch", "scan"]);
    let whole: Value = serde_json::from_str(before.lines().next().expect("a line")).expect("JSON");
    let unseen = whole["not_looked_at"].as_array().expect("a list");
    let is_ours = |one: &&Value| one["path"] == "/usr/bin/sp-demo";
    assert_eq!(
        unseen.iter().find(is_ours).map(|one| one["reason"].clone()),
        Some("not-in-archive".into()),
        "{whole:#}"
    );
    machine.install(&new);
    let (code, after) = machine.stillpoint(&["--json", "patch", "scan"]);
    let found = finding(&after, demo.id(), "/usr/bin/sp-demo");
    let wanted = [
        ("class", "replaced"),
        ("package", "sp-demo"),
        ("running", "1-1"),
        ("evidence", "changelog"),
        ("installed", "1-2"),
    ];
    for (name, value) in wanted {
        assert_eq!(found[name], value, "{found:#}");
    }
    assert_eq!(found["open_cves"], serde_json::json!(["CVE-2026-11111"]), "{found:#}");
    assert_eq!(code, Some(0), "{after}");
    let (code, line) = machine.stillpoint(&["patch", "scan", "--monitoring"]);
    assert!(
        code == Some(2) && line.starts_with("STILLPOINT CRITICAL - ") && line.contains("sp-demo"),
        "{code:?} {line}"
    );
    demo.kill().and_then(|()| demo.wait()).expect("end the program");
}

#[test]
fn processes_of_this_machine_are_found_and_those_of_others_are_counted() {
    let dir = tempfile::tempdir().expect("make a directory");
    let copy = dir.path().join("sleep");
    run(Command::new("cp").arg("/bin/sleep").arg(&copy));
    let mut deleted = bound_command(&copy).arg("60").spawn().expect("start it");
    let mut shipped = bound_command(Path::new("/bin/sleep")).arg("60").spawn().expect("start a program");
    while ![&deleted, &shipped]
        .iter()
        .all(|child| fs::read_link(format!("/proc/{}/exe", child.id())).is_ok_and(|exe| exe.ends_with("sleep")))
    {
        thread::sleep(Duration::from_millis(10));
    }
    fs::remove_file(&copy).expect("delete the program");
    let report = Stillpoint::new().json().args(["patch", "scan"]).succeed().stdout;
    let own = finding(&report, shipped.id(), "/bin/sleep");
    assert_eq!((own["package"].as_str(), own["evidence"].as_str()), (Some("coreutils"), Some("checksum")), "{own:#}");
    let gone = finding(&report, deleted.id(), "/sleep");
    assert_eq!((gone["class"].as_str(), gone["package"].as_str()), (Some("replaced"), None), "{gone:#}");
    let text = Stillpoint::new().args(["patch", "scan", "--prometheus"]).succeed().stdout;
    assert!(text.contains("# TYPE stillpoint_scan_processes gauge\n"), "{text}");
    // no file that is not the tracker's is taken for one
    let tracker = dir.path().join("tracker.json");
    fs::write(&tracker, "{\"coreutils\":{\"CVE-2026-1111\":{}}}").expect("write a file");
    let refused = Stillpoint::new().args(["patch", "scan", "--tracker"]).arg(&tracker).run();
    assert!(refused.code == Some(1) && refused.stderr.contains("tracker.json: missing field"), "{refused}");
    let refused = Stillpoint::new().args(["patch", "scan", "--monitoring", "--tracker"]).arg(&tracker).run();
    assert!(refused.code == Some(3) && refused.stdout.starts_with("STILLPOINT UNKNOWN - tracker file"), "{refused}");
    for child in [&mut deleted, &mut shipped] {
        child.kill().and_then(|()| child.wait()).expect("end the program");
    }
}

#[test]
fn a_program_of_no_package_is_refused_with_what_was_searched() {
    let dir = tempfile::tempdir().expect("make a directory");
    let copy = dir.path().join("own");
    run(Command::new("cp").arg("/bin/sleep").arg(&copy));
    // another build-id than any package has
    run(Command::new("objcopy").arg("--remove-section=.note.gnu.build-id").arg(&copy));
    let mut own = bound_command(&copy).arg("60").spawn().expect("start it");
    while fs::read_link(format!("/proc/{}/exe", own.id())).is_ok_and(|exe| exe != copy) {
        thread::sleep(Duration::from_millis(10));
    }
    let pid = own.id().to_string();
    let build = |arguments: &[&str]| {
        Stillpoint::new().args(["patch", "build", "--dry-run", "--pid", &pid]).args(arguments.iter().copied()).run()
    };
    let program = build(&[]);
    assert!(
        program.code == Some(3) && program.stderr.contains("own is from no package: no installed package has"),
        "{program}"
    );
    let library = build(&["--library", "libssl.so.3"]);
    assert!(library.code == Some(3) && library.stderr.contains("maps no library libssl.so.3; it maps /"), "{library}");
    own.kill().and_then(|()| own.wait()).expect("end the program");
    let ended = build(&[]);
    assert!(ended.code == Some(3) && ended.stderr.contains("has ended"), "{ended}");
}
