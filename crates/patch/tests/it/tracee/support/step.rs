//! Runs a tracer step by step and kills it before its Nth system call: the supervisor traces the tracer.

// `reap` waits for its threads, the leader included.
#![allow(clippy::zombie_processes, unreachable_pub, missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// Arguments of the tracer's `close` that mark the beginning and the end of counting.
pub const BEGIN: i32 = -7_770_001;
pub const END: i32 = -7_770_002;

const WNOTHREAD: i32 = 0x2000_0000;

pub enum Outcome {
    Killed,
    /// The tracer completed: it made fewer system calls.
    Completed,
}

/// Waits, in the tracer, for the supervisor, then marks the beginning.
pub fn begin() {
    println!("tracer ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the supervisor answers");
    // SAFETY: no such descriptor.
    unsafe { libc::close(BEGIN) };
}

/// Marks, in the tracer, the end.
pub fn end() {
    // SAFETY: no such descriptor.
    unsafe { libc::close(END) };
}

/// Runs the ignored test `scenario` of this test program as tracer of `pid`, and kills it before its `n`th system call.
pub fn run_killed(scenario: &str, environment: &[(&str, String)], n: usize) -> Outcome {
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", scenario]);
    command.envs(environment.iter().map(|(k, v)| (k, v)));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the tracer starts");
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("tracer ready") {
        line.clear();
        assert!(output.read_line(&mut line).expect("output") > 0, "the tracer ended before it was ready");
    }
    let pid = child.id() as i32;
    seize_all(pid);
    writeln!(child.stdin.as_mut().expect("piped"), "go").expect("the tracer reads");
    let outcome = step(pid, n);
    let _ = child.kill();
    reap(pid);
    outcome
}

/// Waits for each thread of the dead tracer: only then can its leader be waited for.
fn reap(pid: i32) {
    loop {
        let mut status = 0;
        // SAFETY: writes one int.
        let tid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | WNOTHREAD) };
        if tid < 0 || (tid == pid && !libc::WIFSTOPPED(status)) {
            return;
        }
    }
}

fn ptrace(request: u32, tid: i32, data: usize) -> i64 {
    // SAFETY: the requests used here take an integer, or the address of a structure that the caller keeps.
    unsafe { libc::ptrace(request, tid, 0usize, data) }
}

fn seize_all(pid: i32) {
    let options = (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL) as usize;
    for entry in std::fs::read_dir(format!("/proc/{pid}/task")).expect("the tracer lives").flatten() {
        let tid: i32 = entry.file_name().to_str().expect("a number").parse().expect("a number");
        assert_eq!(ptrace(libc::PTRACE_SEIZE, tid, options), 0, "seizing thread {tid} of the tracer");
        ptrace(libc::PTRACE_INTERRUPT, tid, 0);
    }
}

fn step(pid: i32, n: usize) -> Outcome {
    let (mut counting, mut count) = (false, 0);
    loop {
        let mut status = 0;
        // SAFETY: writes one int.
        let tid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | WNOTHREAD) };
        assert!(tid > 0, "waiting for the tracer");
        if !libc::WIFSTOPPED(status) {
            assert!(tid != pid, "the tracer ended by itself: {status:#x}");
            continue;
        }
        let signal = libc::WSTOPSIG(status);
        let mut forward = 0;
        if signal == libc::SIGTRAP | 0x80 {
            // SAFETY: plain data.
            let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
            ptrace(libc::PTRACE_GETREGS, tid, &raw mut registers as usize);
            let entry = registers.rax as i64 == -i64::from(libc::ENOSYS);
            let marker = if registers.orig_rax == libc::SYS_close as u64 { registers.rdi as i32 } else { 0 };
            match (entry, marker) {
                (true, END) => return Outcome::Completed,
                (true, BEGIN) => counting = true,
                (true, _) if counting => count += 1,
                _ => {}
            }
            if count == n {
                return Outcome::Killed;
            }
        } else if status >> 16 == 0 {
            forward = signal as usize;
        }
        ptrace(libc::PTRACE_SYSCALL, tid, forward);
    }
}
