//! The helper of `patch exec` outside of a sandbox, and processes that request patches of other units.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use stillpoint_patch_tests::cli::{Stillpoint, binary};
use stillpoint_patch_tests::control_group::ControlGroup;
use stillpoint_patch_tests::server::{ChildGuard, bound_command};
use stillpoint_patch_tests::victim::Program;
use stillpoint_patch_tests::{skip, wait};
use tempfile::TempDir;

/// Id of a user without privileges.
const USER: &str = "65534";

/// A listening helper, and a unit in whose control group the test starts programs.
struct Helped {
    unit: String,
    group: ControlGroup,
    root: TempDir,
    helper: ChildGuard,
}

impl Helped {
    /// Starts a helper with a unit that starts `program`; `None` where control groups cannot be made.
    fn start(program: &Path) -> Option<Helped> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let unit = format!("sp-helped-{}-{}.service", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let group = ControlGroup::make(&format!("system.slice/{unit}"))?;
        let root = TempDir::with_prefix("stillpoint-root-").expect("make a directory");
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        let units = root.path().join("usr/lib/systemd/system");
        fs::create_dir_all(&units).expect("make directories");
        fs::write(units.join(&unit), format!("[Service]\nExecStart={}\n", program.display())).expect("write the unit");
        let mut helper = bound_command(binary());
        helper.args(["patch", "exec-helper", "--listen"]).arg(socket(&root)).arg("--root").arg(root.path());
        helper.stderr(File::create(log(&root)).expect("make a log"));
        let helper = ChildGuard::from_child(helper.spawn().expect("start the helper"));
        wait::until("the helper to listen", || socket(&root).exists().then_some(()));
        Some(Helped { unit, group, root, helper })
    }

    fn enable(&self, patch: &Path, options: &[&str]) {
        let command = Stillpoint::new().args(["patch", "enable", "--unit", &self.unit]).arg(patch);
        command.args(options.iter().copied()).arg("--root").arg(self.root.path()).succeed();
    }

    /// Runs a program in the unit's control group, or in the group that `enter` selects, through another program.
    fn run_by(&self, enter: &str, by: &[&str], program: &Path) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{enter} exec \"$@\""), "sh"]).args(by).arg(program);
        command.output().expect("run a shell")
    }

    /// Runs a program as the user, after an introduction of that kind.
    fn introduce(&self, introducer: &Program, kind: &str, program: &Path) -> Output {
        let by = [introducer.elf(), &socket(&self.root)].map(|path| path.display().to_string());
        self.run_by(&self.group.enter(), &[by[0].as_str(), by[1].as_str(), kind, USER], program)
    }

    /// Waits until the helper has logged this text.
    fn says(&self, text: &str) {
        wait::until(&format!("the helper to say {text:?}"), || {
            fs::read_to_string(log(&self.root)).is_ok_and(|said| said.contains(text)).then_some(())
        });
    }
}

fn socket(root: &TempDir) -> PathBuf {
    root.path().join("exec.sock")
}

fn log(root: &TempDir) -> PathBuf {
    root.path().join("log")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the version of the program that ran, and true if the helper followed it.
#[track_caller]
fn told(output: &Output) -> (i32, bool) {
    let stdout = text(&output.stdout);
    let version = output.status.code().unwrap_or_else(|| panic!("{}\n{}", output.status, text(&output.stderr)));
    assert!(stdout.contains("followed: "), "{stdout}\n{}", text(&output.stderr));
    (version, stdout.contains("followed: 1"))
}

/// Makes a copy of a program with that mode and owner.
fn copy(program: &Program, directory: &TempDir, mode: u32, owner: u32) -> PathBuf {
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    let copy = directory.path().join("heritage");
    fs::copy(program.elf(), &copy).expect("copy a program");
    chown(&copy, Some(owner), Some(owner)).expect("chown");
    fs::set_permissions(&copy, fs::Permissions::from_mode(mode)).expect("chmod");
    copy
}

macro_rules! helped {
    ($program:expr) => {
        match Helped::start($program) {
            Some(helped) => helped,
            None => skip!("no control group can be made"),
        }
    };
}

/// Uses Debian's sandbox of redis (ptrace kills): the helper is a service of its own, and learns the unit from the
/// kernel.
#[test]
fn a_helper_outside_of_the_sandbox_patches_what_is_enabled_for_the_unit() {
    let (program, sandbox) = (Program::build("heritage"), Program::build("sandbox"));
    let mut helped = helped!(program.elf());
    helped.enable(&program.patch(2), &[]);
    let unit = helped.unit.clone();
    let Some(decoy) = ControlGroup::make(&format!("user.slice/user@1000.service/{unit}")) else {
        skip!("no control group can be made")
    };
    let [sandbox, tool, socket, root] =
        [sandbox.elf(), binary(), &socket(&helped.root), helped.root.path()].map(|path| path.display().to_string());
    let start = |helped: &Helped, enter: &str, options: &[&str]| {
        let mut by = vec![sandbox.as_str(), "--filter-mdwe", &tool, "patch", "exec", "--unit", &unit];
        by.extend(options);
        by.extend(["--helper", &socket, "--root", &root, "--"]);
        helped.run_by(enter, &by, program.elf())
    };
    let output = start(&helped, &helped.group.enter(), &["--strict"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    // A process in no unit's group gets no patches, for any unit that it names; a group with the unit's name is not the
    // unit's.
    for elsewhere in [String::new(), decoy.enter()] {
        let output = start(&helped, &elsewhere, &[]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("runs unpatched"), "{}", text(&output.stderr));
    }
    assert!(helped.helper.ended().is_none(), "the helper ended");
    helped.helper = ChildGuard::from_child(bound_command(Path::new("true")).spawn().expect("start another"));
    let output = start(&helped, &helped.group.enter(), &[]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
}

/// Runs a set-user-id program. The kernel honours the bit since the tracer is root: the program would run with our gate
/// in it, and with a descriptor closed that its caller chose.
#[test]
fn a_program_that_gains_privileges_is_let_go() {
    let (program, introducer) = (Program::build("heritage"), Program::build("introduce"));
    let directory = TempDir::with_prefix("stillpoint-setuid-").expect("make a directory");
    let elf = copy(&program, &directory, 0o4755, 0);
    let helped = helped!(&elf);
    helped.enable(&program.patch(2), &[]);
    let output = helped.introduce(&introducer, "right", &elf);
    assert_eq!(told(&output), (1, true), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains(&format!("Uid:\t{USER}\t0\t0\t0")),
        "no set-user-id: {}",
        text(&output.stdout)
    );
    helped.says("gained privileges");
    // the same file without the bit is patched for the same user
    fs::set_permissions(&elf, fs::Permissions::from_mode(0o755)).expect("chmod");
    let output = helped.introduce(&introducer, "right", &elf);
    assert_eq!(told(&output), (2, true), "{}", text(&output.stderr));
}

#[test]
fn a_process_that_introduces_itself_wrongly_is_not_followed() {
    let (program, introducer) = (Program::build("heritage"), Program::build("introduce"));
    let helped = helped!(program.elf());
    helped.enable(&program.patch(2), &[]);
    for kind in ["first", "standard"] {
        let output = helped.introduce(&introducer, kind, program.elf());
        assert_eq!(told(&output), (1, false), "{kind}: {}", text(&output.stderr));
        helped.says("does not introduce itself");
    }
    helped.says("a number above 2");
    let output = helped.introduce(&introducer, "right", program.elf());
    assert_eq!(told(&output), (2, true), "{}", text(&output.stderr));
}

#[test]
fn a_unit_that_nothing_is_enabled_for_gets_no_helper() {
    let (program, introducer) = (Program::build("heritage"), Program::build("introduce"));
    let helped = helped!(program.elf());
    let output = helped.introduce(&introducer, "right", program.elf());
    assert_eq!(told(&output), (1, false), "{}", text(&output.stderr));
    helped.says("none are enabled for it");
}

#[test]
fn a_program_in_a_file_that_its_user_can_change_is_not_patched() {
    let (program, introducer) = (Program::build("heritage"), Program::build("introduce"));
    let directory = TempDir::with_prefix("stillpoint-own-").expect("make a directory");
    let elf = copy(&program, &directory, 0o755, USER.parse().expect("a number"));
    let helped = helped!(program.elf());
    helped.enable(&program.patch(2), &[]);
    let output = helped.introduce(&introducer, "right", &elf);
    assert_eq!(told(&output), (1, true), "{}", text(&output.stderr));
    helped.says("others than root can change its program's file");
}

/// Uses the policy that root gave to `patch enable`, and not the one that the process states.
#[test]
fn a_unit_with_a_policy_gets_signed_patches_alone() {
    let (program, introducer) = (Program::build("heritage"), Program::build("introduce"));
    let helped = helped!(program.elf());
    let keys = TempDir::with_prefix("stillpoint-keys-").expect("make a directory");
    Stillpoint::new().args(["patch", "key", "generate", "--output"]).arg(keys.path()).succeed();
    let secret = fs::read_dir(keys.path()).expect("list").flatten().map(|entry| entry.path());
    let secret = secret.into_iter().find(|path| path.extension().is_some_and(|e| e == "key")).expect("a key");
    let signed = program.patch_with(2, &["--sign", &secret.display().to_string()]);
    helped.enable(&signed, &["--policy", "signed", "--keys", &keys.path().display().to_string()]);
    let output = helped.introduce(&introducer, "right", program.elf());
    assert_eq!(told(&output), (2, true), "{}", text(&output.stderr));
    let store = helped.root.path().join("var/lib/stillpoint/enabled").join(&helped.unit);
    let stored = fs::read_dir(&store).expect("list").flatten().next().expect("a patch").path();
    fs::copy(program.patch(2), &stored).expect("exchange a patch");
    let output = helped.introduce(&introducer, "right", program.elf());
    assert_eq!(told(&output), (1, false), "{}", text(&output.stderr));
    helped.says("dropped");
}
