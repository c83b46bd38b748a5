//! Patches for a library in all processes of the machine that map it: selection, waves, reports and exit codes.

use nix::sys::ptrace;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_patch_tests::cli::{Run, Stillpoint, binary};
use stillpoint_patch_tests::control_group::ControlGroup;
use stillpoint_patch_tests::server::bound_command;
use stillpoint_patch_tests::victim::{Kind, Phase, Program, Victim, apply, residue, soak, status};
use stillpoint_patch_tests::{skip, wait};

/// A library, and two programs that use it. Tests of this module work on the whole machine, so one runs at a time.
struct Shared {
    library: Program,
    programs: [Program; 2],
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Shared {
    fn build() -> Shared {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = Program::build_as("library", Kind::Library, &[], &[]).strip();
        let directory = library.dir().display().to_string();
        let flags = [format!("-L{directory}"), "-llibrary".to_owned(), format!("-Wl,-rpath,{directory}")];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let programs = [Kind::Pie, Kind::Executable].map(|kind| Program::build_as("caller", kind, &[], &flags));
        Shared { library, programs, _alone: alone }
    }

    /// Starts processes of both programs in turns.
    fn start(&self, count: usize) -> Vec<Victim> {
        (0..count).map(|number| self.programs[number % 2].start(&[])).collect()
    }

    fn path(&self) -> &Path {
        self.library.elf()
    }

    /// Replaces the file of the library by that of another build.
    fn replace_on_disk(&self) {
        let other = Program::build_as("library", Kind::Library, &["-O1"], &[]);
        let copy = self.library.dir().join("newer.so");
        std::fs::copy(other.elf(), &copy).expect("copy the other build");
        std::fs::rename(&copy, self.path()).expect("replace the library");
    }

    fn call(&self, command: &str) -> Stillpoint {
        Stillpoint::new().args(["patch", command, "--library"]).arg(self.path())
    }
}

/// Makes a call that selects by the build-id of the patch alone.
fn apply_to_all(patch: &Path) -> Stillpoint {
    Stillpoint::new().args(["patch", "apply", "--all"]).arg(patch)
}

fn announce(victims: &[Victim], phase: Phase) {
    victims.iter().for_each(|victim| victim.announce(phase));
}

#[track_caller]
fn assert_settled(victims: &mut [Victim], version: u8) {
    for victim in victims {
        victim.assert_settled(version);
        let residue = residue(victim.pid());
        assert!(residue.is_empty(), "{residue:#?}");
    }
}

/// Returns the outcome that the call reports for a process, with its reason.
#[track_caller]
fn outcome(run: &Run, pid: i32) -> (String, String) {
    let lines = run.json();
    let mut of_pid = lines.iter().filter(|line| line["event"] == "process" && line["pid"] == pid);
    let line = of_pid.next().unwrap_or_else(|| panic!("process {pid} is not reported\n{run}"));
    assert!(of_pid.next().is_none(), "process {pid} is reported twice\n{run}");
    let text = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
    (text("outcome"), text("reason"))
}

#[test]
fn all_processes_of_two_programs_there_and_back() {
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    let mut victims = shared.start(6);
    // each selects the same processes: by path, by name, by the build of the patch
    let by_name = || {
        let name = shared.path().file_name().expect("a name");
        Stillpoint::new().args(["patch", "apply", "--library"]).arg(name).arg(&patch)
    };
    for (number, call) in [shared.call("apply").arg(&patch), by_name(), apply_to_all(&patch)].into_iter().enumerate() {
        let dry = call.clone().arg("--dry-run").json().succeed();
        assert!(victims.iter().all(|victim| outcome(&dry, victim.pid()).0 == "possible"), "{dry}");
        announce(&victims, Phase::Over(1, 2));
        let run = call.clone().args(["--at-once", "2", "--pause", "1ms"]).json().succeed();
        assert!(victims.iter().all(|victim| outcome(&run, victim.pid()).0 == "done"), "{run}");
        assert_settled(&mut victims, 2);
        // the second call has nothing left to do, and says so
        let again = call.json().succeed();
        assert!(victims.iter().all(|victim| outcome(&again, victim.pid()).0 == "already"), "{again}");
        let shown = shared.call("status").succeed();
        assert_eq!(shown.stdout.matches("library-1-2").count(), 6, "{shown}");

        announce(&victims, Phase::Over(2, 1));
        let revert = match number {
            0 => shared.call("revert"),
            1 => shared.call("revert").arg("--all"),
            _ => Stillpoint::new().args(["patch", "revert", "library-1-2", "--all"]),
        };
        let run = revert.json().succeed();
        assert!(victims.iter().all(|victim| outcome(&run, victim.pid()).0 == "done"), "{run}");
        assert_settled(&mut victims, 1);
    }
    let text = shared.call("check").arg(&patch).succeed().stdout;
    assert_eq!(text.matches("fits process").count(), 6, "{text}");
}

#[test]
fn without_a_process_nothing_is_touched() {
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    for call in [shared.call("apply").arg(&patch), apply_to_all(&patch), shared.call("check").arg(&patch)] {
        let run = call.run();
        assert_eq!(run.code, Some(3), "{run}");
        assert!(run.stderr.contains("no process maps") && run.stderr.contains("nothing was touched"), "{run}");
    }
    for (words, why) in [
        (&["apply", "--all", "--pid", "1"][..], "--all"),
        (&["apply", "--containers", "--pid", "1"], "--containers"),
        (&["apply", "--library", "x", "--exe", "y"], "--exe"),
        (&["revert", "--all"], "NAME"),
        (&["revert", "fix", "--all", "--pid", "1"], "NAME"),
    ] {
        let call = Stillpoint::new().arg("patch").args(words.iter().copied());
        let run = if words[0] == "apply" { call.arg(&patch).run() } else { call.run() };
        assert_eq!(run.code, Some(2), "{run}");
        assert!(run.stderr.contains(why), "{run}");
    }
}

/// Upgrades the package while processes run: those of before need the patch, those of after run the build on disk, and need none.
#[test]
fn a_process_of_after_an_upgrade_is_named_and_needs_no_patch() {
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    let mut old = shared.start(2);
    shared.replace_on_disk();
    let mut new = shared.start(1);
    for (call, expected) in [(shared.call("apply").arg(&patch), "done"), (apply_to_all(&patch), "already")] {
        if expected == "done" {
            announce(&old, Phase::Over(1, 2));
        }
        let run = call.json().succeed();
        assert!(old.iter().all(|victim| outcome(&run, victim.pid()).0 == expected), "{run}");
        let (outcome, reason) = outcome(&run, new[0].pid());
        assert!(outcome == "other-build" && reason.contains("another build"), "{run}");
        assert!(
            run.stderr.contains("on disk now") && run.stderr.contains(&format!("{} (caller)", new[0].pid())),
            "{run}"
        );
        assert_settled(&mut old, 2);
        assert_settled(&mut new, 1);
    }
    // the file on disk is another one, and the patch is still found by its path
    announce(&old, Phase::Over(2, 1));
    shared.call("revert").succeed();
    assert_settled(&mut old, 1);
}

/// Leaves a process with a build of before the one that the patch is for: the call says that it is not patched.
#[test]
fn a_process_with_an_older_build_is_named_and_counts() {
    let shared = Shared::build();
    let later = shared.library.dir().join("later.so");
    std::fs::copy(shared.path(), &later).expect("keep the library");
    shared.replace_on_disk();
    let mut older = shared.start(1);
    std::fs::rename(&later, shared.path()).expect("install the library again");
    let patch = shared.library.patch(2);
    let mut present = shared.start(2);
    announce(&present, Phase::Over(1, 2));
    for (expected, code) in [("done", 4), ("already", 3)] {
        let run = shared.call("apply").arg(&patch).json().run();
        assert!(present.iter().all(|victim| outcome(&run, victim.pid()).0 == expected), "{run}");
        assert_eq!((outcome(&run, older[0].pid()).0.as_str(), run.code), ("other-build", Some(code)), "{run}");
        let named = format!("process {} (caller) is not patched: it maps another build", older[0].pid());
        assert!(run.stderr.contains(&named), "{run}");
    }
    assert_settled(&mut present, 2);
    assert_settled(&mut older, 1);
}

/// Holds a process with the debugger's system call, on a thread of its own: the kernel binds a tracee to it.
fn while_traced<T>(pid: i32, work: impl FnOnce() -> T) -> T {
    let pid = nix::unistd::Pid::from_raw(pid);
    ptrace::seize(pid, ptrace::Options::empty()).expect("trace the process");
    let result = work();
    ptrace::interrupt(pid).expect("stop the process");
    nix::sys::wait::waitpid(pid, None).expect("wait for the stop");
    ptrace::detach(pid, None).expect("end tracing");
    result
}

#[test]
fn a_second_call_finishes_what_a_debugger_kept_away() {
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    let mut victims = shared.start(4);
    let held = victims[1].pid();
    announce(&victims, Phase::Over(1, 2));
    let run = while_traced(held, || shared.call("apply").arg(&patch).json().run());
    assert_eq!(run.code, Some(4), "{run}");
    for victim in &victims {
        let (outcome, reason) = outcome(&run, victim.pid());
        let expected = if victim.pid() == held { "refused" } else { "done" };
        assert!(outcome == expected && (outcome == "done" || reason.contains("already traced")), "{run}");
    }
    assert!(run.stderr.contains(&format!("process {held} (caller) is not patched")), "{run}");
    let run = shared.call("apply").arg(&patch).json().succeed();
    for victim in &victims {
        let expected = if victim.pid() == held { "done" } else { "already" };
        assert_eq!(outcome(&run, victim.pid()).0, expected, "{run}");
    }
    assert_settled(&mut victims, 2);
}

#[test]
fn a_frozen_process_is_refused_at_once_and_patched_when_it_is_thawed() {
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    let name = format!("stillpoint-frozen-{}", std::process::id());
    let Some(group) = ControlGroup::make(&name) else { skip!("control groups cannot be made here") };
    let freezer = group.path().join("cgroup.freeze");
    if !freezer.exists() {
        skip!("this kernel freezes no control groups of version 2");
    }
    let mut victims = shared.start(1);
    victims.push(shared.programs[0].start_in(|elf| group.command(elf), &[]));
    announce(&victims, Phase::Over(1, 2));
    std::fs::write(&freezer, "1").expect("freeze the group");
    let events = group.path().join("cgroup.events");
    wait::until("the group to freeze", || {
        std::fs::read_to_string(&events).expect("read its events").contains("frozen 1").then_some(())
    });
    let begun = Instant::now();
    let run = shared.call("apply").arg(&patch).json().run();
    let elapsed = begun.elapsed();
    std::fs::write(&freezer, "0").expect("thaw the group");
    assert_eq!(run.code, Some(4), "{run}");
    let (outcome, reason) = outcome(&run, victims[1].pid());
    assert!(outcome == "refused" && reason.contains("frozen"), "{run}");
    assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
    shared.call("apply").arg(&patch).succeed();
    assert_settled(&mut victims, 2);
}

/// Starts processes that map the library and end again while the patch is applied and reverted.
#[test]
fn processes_that_start_and_end_meanwhile() {
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    let mut victims = shared.start(3);
    let (is_over, started) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let brief = || {
            while !is_over.load(Ordering::Relaxed) {
                let mut victim = shared.programs[0].start(&[]);
                victim.announce(Phase::Either(1, 2));
                victim.stop();
                started.fetch_add(1, Ordering::Relaxed);
                wait::until("a process to end", || victim.process().ended());
                victim.assert_consistent();
            }
        };
        scope.spawn(brief);
        scope.spawn(brief);
        for _ in 0..if soak() { 50 } else { 3 } {
            let before = started.load(Ordering::Relaxed);
            wait::until("processes to start", || (started.load(Ordering::Relaxed) > before).then_some(()));
            announce(&victims, Phase::Over(1, 2));
            shared.call("apply").arg(&patch).succeed();
            assert_settled(&mut victims, 2);
            announce(&victims, Phase::Over(2, 1));
            shared.call("revert").succeed();
            assert_settled(&mut victims, 1);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn containers_are_left_out_by_name_and_included_on_request() {
    let made = Command::new("unshare").args(["--pid", "--mount", "--fork", "true"]).status();
    if !made.is_ok_and(|status| status.success()) {
        skip!("this machine does not let us make namespaces");
    }
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    let wrap = |namespaces: &[&str], elf: &Path| {
        let mut command = bound_command(Path::new("unshare"));
        command.args(namespaces).arg("--").arg(elf);
        command
    };
    let mut host = shared.start(1);
    // as systemd does for a service with PrivateTmp=: the same root, and no container
    host.push(shared.programs[0].start_in(|elf| wrap(&["--mount"], elf), &[]));
    let in_container = |elf: &Path| wrap(&["--pid", "--mount", "--fork", "--mount-proc", "--kill-child"], elf);
    let mut container = vec![shared.programs[1].start_in(in_container, &[])];
    let pid = container[0].pid();
    announce(&host, Phase::Over(1, 2));
    let run = shared.call("apply").arg(&patch).json().succeed();
    assert!(host.iter().all(|victim| outcome(&run, victim.pid()).0 == "done"), "{run}");
    assert_eq!(outcome(&run, pid).0, "left-out", "{run}");
    assert!(run.stderr.contains("--containers") && run.stderr.contains(&format!("{pid} (caller)")), "{run}");
    assert_settled(&mut host, 2);
    assert_settled(&mut container, 1);
    assert!(!status(pid).succeed().stdout.contains("library-1-2"));

    announce(&container, Phase::Over(1, 2));
    let run = shared.call("apply").arg("--containers").arg(&patch).json().succeed();
    assert_eq!(outcome(&run, pid).0, "done", "{run}");
    let named = run.json().into_iter().any(|line| line["pid"] == pid && line["container"].is_string());
    assert!(named && run.stderr.contains("container "), "{run}");
    assert_settled(&mut container, 2);
    shared.call("revert").arg("--containers").succeed();
}

/// Runs the tool below a tracer that maps the library: to stop the tracer would stop the tool.
#[test]
fn the_tracer_of_the_tool_is_refused() {
    let shared = Shared::build();
    let patch = shared.library.patch(2);
    let (source, program) = (shared.library.dir().join("tracer.c"), shared.library.dir().join("tracer"));
    std::fs::write(&source, TRACER).expect("write a tracer");
    let directory = shared.library.dir().display();
    let libraries = [format!("-L{directory}"), "-llibrary".to_owned(), format!("-Wl,-rpath,{directory}")];
    let made = Command::new("gcc").arg("-o").args([&program, &source]).args(libraries).status();
    assert!(made.expect("start gcc").success());
    let mut victims = shared.start(1);
    announce(&victims, Phase::Over(1, 2));
    let mut call = Command::new(&program);
    call.arg(binary()).args(["--json", "patch", "apply", "--library"]).args([shared.path(), &patch]);
    let output = call.output().expect("run the tool below a tracer");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(4), "{stdout}\n{stderr}");
    assert!(stdout.contains("traces this command") && stderr.contains("(tracer) is not patched"), "{stdout}\n{stderr}");
    assert_settled(&mut victims, 2);
}

/// A debugger in small: runs a program, traced, and returns its exit code.
const TRACER: &str = r#"
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
long library_answer(long x);
int main(int argc, char **argv) {
  if (library_answer(1) == 0 || argc < 2) return 99;
  pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, 0, 0);
    execv(argv[1], argv + 1);
    _exit(98);
  }
  int status;
  while (waitpid(child, &status, 0) == child && !WIFEXITED(status) && !WIFSIGNALED(status)) {
    int signal = WSTOPSIG(status) == 5 ? 0 : WSTOPSIG(status);
    ptrace(PTRACE_CONT, child, 0, signal);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 97;
}
"#;

/// Patches one program in the same call by its executable's build: a patch need not be for a library.
#[test]
fn the_build_of_an_executable_is_found_in_all_directories() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let copy: PathBuf = program.dir().join("elsewhere/victim");
    std::fs::create_dir(copy.parent().expect("a directory")).expect("make a directory");
    std::fs::copy(program.elf(), &copy).expect("copy the program");
    let mut victims = vec![program.start(&["2"])];
    victims.push(program.start_in(|_| bound_command(&copy), &["2"]));
    announce(&victims, Phase::Over(1, 2));
    let run = apply_to_all(&patch).json().succeed();
    assert!(victims.iter().all(|victim| outcome(&run, victim.pid()).0 == "done"), "{run}");
    assert_settled(&mut victims, 2);
    announce(&victims, Phase::Over(2, 1));
    Stillpoint::new().args(["patch", "revert", "victim-1-2", "--all"]).succeed();
    assert_settled(&mut victims, 1);
    // one by its number: the other one is named until it has the patch, too
    announce(&victims[..1], Phase::Over(1, 2));
    let run = apply(&patch, victims[0].pid()).succeed();
    let note = format!("1 other processes map this build without victim-1-2 (processes {})", victims[1].pid());
    assert!(run.stderr.contains(&note), "{run}");
    assert_settled(&mut victims[..1], 2);
    announce(&victims[1..], Phase::Over(1, 2));
    let run = apply(&patch, victims[1].pid()).succeed();
    assert!(!run.stderr.contains("without victim-1-2"), "{run}");
    assert_settled(&mut victims, 2);
}
