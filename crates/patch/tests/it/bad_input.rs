//! Invalid input: one clear error that names the input, exit 3, and an unchanged target.

use nix::sys::ptrace;
use nix::unistd::Pid;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use stillpoint_patch_tests::cli::{Run, Stillpoint, binary};
use stillpoint_patch_tests::server::{ChildGuard, bound_command};
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::{
    Kind, Maps, Phase, Program, Snapshot, Victim, apply, assert_refused, residue, revert, soak, status,
};
use stillpoint_patch_tests::wait;

fn quiet_victim() -> (Program, Victim) {
    let program = Program::build("victim");
    let victim = program.start(&["2"]);
    (program, victim)
}

/// Applies `file` and asserts that it is refused.
#[track_caller]
fn refused(victim: &mut Victim, file: &Path, thing: &str) {
    let before = victim.snapshot();
    assert_refused(&apply(file, victim.pid()).run(), thing);
    before.assert_untouched(victim.pid());
    victim.assert_running();
}

#[test]
fn a_patch_for_another_build() {
    let (_program, mut victim) = quiet_victim();
    let other = Program::build_as("victim", Kind::Pie, &["-O1"], &[]);
    refused(&mut victim, &other.patch(2), "build-id");
    victim.assert_settled(1);
}

#[test]
fn a_patch_that_was_damaged() {
    let (program, mut victim) = quiet_victim();
    let good = fs::read(program.patch(2)).expect("read the patch");
    let path = program.dir().join("damaged.patch");
    let mut damaged = |bytes: &[u8]| {
        fs::write(&path, bytes).expect("write a damaged patch");
        refused(&mut victim, &path, "damaged.patch");
    };
    let step = if soak() { 1 } else { good.len() / 4 };
    for at in (0..40).step_by(if soak() { 1 } else { 10 }).chain((40..good.len()).step_by(step)) {
        let mut flipped = good.clone();
        flipped[at] ^= 1 << (at % 8);
        damaged(&flipped);
        damaged(&good[..at]);
    }
    let mut longer = good.clone();
    longer.push(0);
    damaged(&longer);
}

#[test]
fn a_patch_file_that_is_none() {
    let (program, mut victim) = quiet_victim();
    refused(&mut victim, &program.dir().join("vanished.patch"), "vanished.patch");
    refused(&mut victim, program.dir(), &program.dir().display().to_string());
    let empty = program.dir().join("empty.patch");
    File::create(&empty).expect("make an empty file");
    refused(&mut victim, &empty, "empty.patch");
    refused(&mut victim, program.elf(), "victim");
    let huge = program.dir().join("huge.patch");
    File::create(&huge).and_then(|file| file.set_len(1 << 40)).expect("make a huge file");
    refused(&mut victim, &huge, "huge.patch");
    // A file without end and without length.
    refused(&mut victim, Path::new("/dev/zero"), "/dev/zero");
    victim.assert_settled(1);
}

#[test]
fn a_target_file_of_another_architecture() {
    let program = Program::build("victim");
    let mut bytes = fs::read(program.elf()).expect("read the program");
    // e_machine: AArch64.
    bytes[18..20].copy_from_slice(&183u16.to_le_bytes());
    fs::write(program.elf(), &bytes).expect("write the program");
    let output = program.dir().join("other.patch");
    assert_refused(&program.builder(2, &output).run(), "is not an x86-64 ELF file");
    assert!(!output.exists(), "a patch was written all the same");
}

/// Asserts that all commands with a process id refuse `pid`.
#[track_caller]
fn refused_target(patch: &Path, pid: i32, thing: &str) {
    for tool in [apply(patch, pid), revert(pid), status(pid)] {
        assert_refused(&tool.run(), thing);
    }
}

#[test]
fn a_process_that_is_none_or_has_ended() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let mut child = Command::new("true").spawn().expect("start true");
    let pid = child.id() as i32;
    wait::until("true to end", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("read the state");
        stat.contains(") Z ").then_some(())
    });
    refused_target(&patch, pid, "zombie");
    child.wait().expect("reap the child");
    refused_target(&patch, pid, &pid.to_string());
    // A kernel thread.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|comm| comm.trim() == "kthreadd") {
        refused_target(&patch, 2, "kernel thread");
    }
}

#[test]
fn a_process_that_is_traced_already() {
    let (program, mut victim) = quiet_victim();
    let patch = program.patch(2);
    let pid = Pid::from_raw(victim.pid());
    // The tracer is a thread: its end also ends its hold of the target.
    std::thread::scope(|scope| {
        let trace = || {
            ptrace::seize(pid, ptrace::Options::empty()).expect("seize the victim");
            let before = Snapshot::of(pid.as_raw());
            let runs = [apply(&patch, pid.as_raw()), revert(pid.as_raw())].map(|tool| tool.run());
            (before, Snapshot::of(pid.as_raw()), runs, nix::unistd::gettid())
        };
        let (before, after, runs, tracer) = scope.spawn(trace).join().expect("the tracer does not panic");
        assert!(before == after, "the target was touched");
        for run in runs {
            assert_refused(&run, "traced");
            assert!(run.stderr.contains(&tracer.to_string()), "the tracer is not named\n{run}");
        }
    });
    wait::until("the tracer's claim to end", || residue(victim.pid()).is_empty().then_some(()));
    victim.assert_settled(1);
}

#[test]
fn a_static_program() {
    let program = Program::build_as("victim", Kind::Executable, &[], &["-static"]);
    let dynamic = Program::build("victim");
    let mut victim = program.start(&["2"]);
    let before = victim.snapshot();
    assert_refused(&apply(&dynamic.patch(2), victim.pid()).run(), "static");
    before.assert_untouched(victim.pid());
    victim.assert_settled(1);
}

/// Writes a 32-bit program that waits without end; no compiler for it is needed.
fn program_of_32_bits(path: &Path) {
    // 1: mov $29, %eax (pause); int $0x80; jmp 1b
    let code = [0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7];
    let base: u32 = 0x0804_8000;
    let mut elf = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let size = 52 + 32 + code.len() as u32;
    let half = |elf: &mut Vec<u8>, values: &[u16]| values.iter().for_each(|v| elf.extend(v.to_le_bytes()));
    let word = |elf: &mut Vec<u8>, values: &[u32]| values.iter().for_each(|v| elf.extend(v.to_le_bytes()));
    half(&mut elf, &[2, 3]); // ET_EXEC, EM_386
    word(&mut elf, &[1, base + 52 + 32, 52, 0, 0]);
    half(&mut elf, &[52, 32, 1, 40, 0, 0]);
    word(&mut elf, &[1, 0, base, base, size, size, 5, 0x1000]); // PT_LOAD, r-x
    elf.extend(code);
    fs::write(path, elf).expect("write a program of 32 bits");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("make it executable");
}

#[test]
fn a_program_of_32_bits() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let path = program.dir().join("small");
    program_of_32_bits(&path);
    let mut command = bound_command(&path);
    let Ok(child) = command.stdin(Stdio::null()).spawn() else { skip!("this kernel runs no programs of 32 bits") };
    let mut small = ChildGuard::from_child(child);
    let runs = wait::within(wait::WAIT_TIMEOUT, || {
        if small.ended().is_some() {
            return Some(false);
        }
        let exe = fs::read_link(format!("/proc/{}/exe", small.pid())).ok()?;
        (exe == path).then_some(true)
    });
    if runs != Some(true) {
        skip!("this kernel runs no programs of 32 bits");
    }
    refused_target(&patch, small.pid(), "32-bit");
    assert!(small.ended().is_none(), "the target ended");
    assert!(residue(small.pid()).is_empty());
}

#[test]
fn a_kernel_without_a_call_that_is_needed() {
    let (program, mut victim) = quiet_victim();
    let patch = program.patch(2);
    let sandbox = Program::build("sandbox");
    for (number, name) in [(434, "pidfd_open"), (101, "ptrace")] {
        let before = victim.snapshot();
        let tool = apply(&patch, victim.pid());
        let command = tool.command();
        let output = Command::new(sandbox.elf())
            .args(["--missing", &number.to_string()])
            .arg(binary())
            .args(command.get_args())
            .output()
            .expect("run the sandbox");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let run = Run {
            line: tool.to_string(),
            code: output.status.code(),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        };
        assert_refused(&run, name);
        before.assert_untouched(victim.pid());
        victim.assert_settled(1);
    }
}

/// Asserts that a dry run and a check report the same error as the operation itself.
#[test]
fn what_apply_cannot_do_a_dry_run_does_not_promise() {
    let (program, mut victim) = quiet_victim();
    let patch = program.patch(2);
    let sandbox = Program::build("sandbox");
    let looks = |pid| {
        let check = Stillpoint::new().args(["patch", "check"]).arg(&patch).arg("--pid").arg(pid);
        [apply(&patch, pid).arg("--dry-run"), check, apply(&patch, pid)]
    };
    // a tool without permission to trace
    let before = victim.snapshot();
    for tool in looks(victim.pid()) {
        let output = Command::new(sandbox.elf())
            .args(["--missing", "101"])
            .arg(binary())
            .args(tool.command().get_args())
            .output()
            .expect("run the sandbox");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert_refused(&Run { line: tool.to_string(), code: output.status.code(), stdout, stderr }, "ptrace");
    }
    before.assert_untouched(victim.pid());
    victim.assert_settled(1);
    // a target whose filter blocks the system call by which a thread returns from our calls: rt_sigreturn
    let wrap = |elf: &Path| {
        let mut command = bound_command(sandbox.elf());
        command.args(["--missing", "15"]).arg(elf);
        command
    };
    let mut victim = program.start_in(wrap, &["2"]);
    let before = victim.snapshot();
    for tool in looks(victim.pid()) {
        assert_refused(&tool.run(), "does not allow system call 15");
    }
    before.assert_untouched(victim.pid());
    victim.assert_settled(1);
}

/// Overwrites an entry, as a debugger or another tool might: the patch was not made for the new bytes.
#[test]
fn an_entry_that_was_changed_by_others() {
    let (program, mut victim) = quiet_victim();
    let patch = program.patch(2);
    let entry = address_of(&program, victim.pid(), "never_called");
    let memory = File::options().read(true).write(true).open(format!("/proc/{}/mem", victim.pid())).expect("open mem");
    let mut shipped = [0];
    memory.read_exact_at(&mut shipped, entry).expect("read the entry");
    memory.write_all_at(&[0xcc], entry).expect("set a breakpoint");
    refused(&mut victim, &patch, "never_called");
    memory.write_all_at(&shipped, entry).expect("take the breakpoint away");
    victim.announce(Phase::Over(1, 2));
    apply(&patch, victim.pid()).succeed();
    victim.assert_settled(2);
    // The reverse: another tool overwrites our jump. The revert changes nothing on top of that.
    let mut jump = [0];
    memory.read_exact_at(&mut jump, entry).expect("read the entry");
    memory.write_all_at(&[0xcc], entry).expect("set a breakpoint");
    let before = victim.snapshot();
    assert_refused(&revert(victim.pid()).run(), "never_called");
    before.assert_untouched(victim.pid());
    memory.write_all_at(&jump, entry).expect("take the breakpoint away");
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).succeed();
    victim.assert_settled(1);
    victim.assert_pristine();
}

/// Returns the address of a function of a position-independent program in a process.
fn address_of(program: &Program, pid: i32, function: &str) -> u64 {
    let symbols = Command::new("nm").arg(program.elf()).output().expect("run nm");
    let symbols = String::from_utf8_lossy(&symbols.stdout).into_owned();
    let line = symbols.lines().find(|line| line.ends_with(&format!(" T {function}"))).expect("the function is there");
    let stated = u64::from_str_radix(line.split(' ').next().expect("an address"), 16).expect("a number");
    let elf = program.elf().display().to_string();
    Maps::of(pid).0.iter().find(|m| m.path == elf).expect("the program is mapped").start + stated
}
