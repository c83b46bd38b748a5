//! Runs the tool and kills it (SIGKILL) at a chosen instant: right after its Nth system call, or after some time.
//!
//! Between two system calls a program changes nothing but its own memory, so "after the Nth system call, for every N"
//! covers every state in which a tool that dies can leave its target. The obvious way to count, `strace -e inject`,
//! cannot be had for SIGKILL of one call at all threads together; this is a tracer of its own: the tool is a tracee
//! while it traces the victim, which the kernel allows.
//!
//! ```text
//! sh stops itself -> seized -> continued -> exec of the tool -> entry, exit, entry, exit ... -> SIGKILL at exit N
//! ```

use crate::cli::{Run, Stillpoint, binary};
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// When to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Right after this many system calls of the tool, all threads counted together.
    AfterSyscalls(u64),
    /// After this time.
    AfterTime(Duration),
    /// Never: let it run to its end, and count.
    Never,
}

/// How the run ended.
#[derive(Debug)]
pub struct Ending {
    /// System calls that the tool completed (0 when it was not traced).
    pub syscalls: u64,
    /// Number of the last one, for messages.
    pub last: Option<u64>,
    /// Whether it was killed, rather than having ended by itself before the moment came.
    pub killed: bool,
    /// What it printed, and its exit code.
    pub run: Run,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.killed { "killed" } else { "not killed" };
        let last = self.last.map_or_else(String::new, |nr| format!(" (last: number {nr})"));
        write!(f, "{how} after {} system calls{last}: {}", self.syscalls, self.run)
    }
}

/// Runs `tool` and kills it at `moment`. When this returns the tool is gone, all its threads are, and so are its
/// claims on whatever it traced.
#[track_caller]
pub fn run(tool: &Stillpoint, moment: Moment) -> Ending {
    // Waiting for "any child of this thread" must see the tool's threads only, hence a thread of its own.
    let outcome = std::thread::scope(|scope| {
        scope
            .spawn(|| match moment {
                Moment::AfterTime(time) => timed(tool, time),
                Moment::AfterSyscalls(count) => traced(tool, count),
                Moment::Never => traced(tool, u64::MAX),
            })
            .join()
    });
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Standard output and error of the tool go to files: nobody reads a pipe while it is traced.
struct Printed {
    stdout: File,
    stderr: File,
}

impl Printed {
    fn new() -> Printed {
        let file = || tempfile::tempfile().expect("make a file for the output");
        Printed { stdout: file(), stderr: file() }
    }

    fn share(file: &File) -> Stdio {
        file.try_clone().expect("share the output").into()
    }

    fn into_run(mut self, tool: &Stillpoint, status: Option<ExitStatus>) -> Run {
        let read = |file: &mut File| {
            let mut bytes = Vec::new();
            std::io::Seek::rewind(file).and_then(|()| file.read_to_end(&mut bytes)).expect("read the output");
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let code = status.and_then(|status| status.code());
        Run { line: tool.to_string(), code, stdout: read(&mut self.stdout), stderr: read(&mut self.stderr) }
    }
}

fn timed(tool: &Stillpoint, time: Duration) -> Ending {
    let printed = Printed::new();
    let mut command = tool.command();
    command.stdout(Printed::share(&printed.stdout)).stderr(Printed::share(&printed.stderr));
    let mut child = command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", binary().display()));
    std::thread::sleep(time);
    child.kill().expect("kill the tool");
    let status = child.wait().expect("a child can be waited for");
    let killed = status.signal() == Some(Signal::SIGKILL as i32);
    Ending { syscalls: 0, last: None, killed, run: printed.into_run(tool, Some(status)) }
}

fn traced(tool: &Stillpoint, count: u64) -> Ending {
    let printed = Printed::new();
    // The shell becomes the tool; it stops first so that it can be seized before anything is counted.
    let command = tool.command();
    let mut shell = Command::new("sh");
    shell.args(["-c", "kill -STOP $$; exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        shell.env(key, value.unwrap_or_default());
    }
    shell.stdin(Stdio::null()).stdout(Printed::share(&printed.stdout)).stderr(Printed::share(&printed.stderr));
    let mut child = shell.spawn().expect("start a shell");
    let leader = Pid::from_raw(child.id() as i32);
    let stopped = waitpid(leader, Some(WaitPidFlag::WUNTRACED)).expect("wait for the shell");
    assert!(matches!(stopped, WaitStatus::Stopped(_, Signal::SIGSTOP)), "the shell did not stop: {stopped:?}");
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(leader, options).expect("seize the shell");
    kill(leader, Signal::SIGCONT).expect("continue the shell");
    let mut count = Count { leader, limit: count, ..Count::default() };
    let status = count.follow();
    // Reaped above, as every thread is; this only tells the handle.
    let _ = child.wait();
    let killed = status.is_some_and(|status| status.signal() == Some(Signal::SIGKILL as i32));
    Ending { syscalls: count.completed.unwrap_or(0), last: count.last, killed, run: printed.into_run(tool, status) }
}

/// Counts the system calls of all threads of one program.
#[derive(Debug)]
struct Count {
    leader: Pid,
    limit: u64,
    /// Whether the tool itself runs: the shell's own calls do not count.
    executed: bool,
    /// System calls completed; the exec that starts the tool is number 0.
    completed: Option<u64>,
    last: Option<u64>,
    /// Threads inside a system call.
    inside: HashMap<Pid, bool>,
}

impl Default for Count {
    fn default() -> Count {
        Count { leader: Pid::this(), limit: 0, executed: false, completed: None, last: None, inside: HashMap::new() }
    }
}

impl Count {
    /// Until every thread is gone; the leader's status.
    fn follow(&mut self) -> Option<ExitStatus> {
        let mut ended = None;
        loop {
            let stop = match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
                Ok(stop) => stop,
                Err(nix::Error::ECHILD) => return ended,
                Err(nix::Error::EINTR) => continue,
                Err(e) => panic!("wait for the tool: {e}"),
            };
            let (thread, signal) = match stop {
                WaitStatus::Exited(pid, code) => {
                    ended = if pid == self.leader { Some(ExitStatus::from_raw(code << 8)) } else { ended };
                    continue;
                }
                WaitStatus::Signaled(pid, signal, _) => {
                    ended = if pid == self.leader { Some(ExitStatus::from_raw(signal as i32)) } else { ended };
                    continue;
                }
                WaitStatus::PtraceSyscall(pid) => {
                    self.syscall(pid);
                    (pid, None)
                }
                WaitStatus::PtraceEvent(pid, _, event) => {
                    if event == ptrace::Event::PTRACE_EVENT_EXEC as i32 && pid == self.leader && !self.executed {
                        self.executed = true;
                        // The exec that starts the tool is the shell's call.
                        self.inside.insert(pid, true);
                    }
                    (pid, None)
                }
                WaitStatus::Stopped(pid, signal) => (pid, Some(signal)),
                other => panic!("unexpected: {other:?}"),
            };
            // ESRCH: it was killed between its stop and here.
            let _ = ptrace::syscall(thread, signal);
        }
    }

    fn syscall(&mut self, thread: Pid) {
        let inside = self.inside.entry(thread).or_insert(false);
        *inside = !*inside;
        if !self.executed {
            return;
        }
        if *inside {
            self.last = ptrace::getregs(thread).ok().map(|registers| registers.orig_rax).or(self.last);
            return;
        }
        let completed = self.completed.map_or(0, |n| n + 1);
        self.completed = Some(completed);
        if completed >= self.limit {
            let _ = kill(self.leader, Signal::SIGKILL);
        }
    }
}

/// The numbers 1 to `total`, every one once, in an order in which each beginning is spread over the whole: whoever runs
/// out of time has sampled all parts.
pub fn spread(total: u64) -> impl Iterator<Item = u64> {
    let bits = 64 - total.leading_zeros();
    (0..1u64 << bits).map(move |i| i.reverse_bits() >> (64 - bits)).map(|n| n + 1).filter(move |n| *n <= total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_yields_every_number_once_and_early_ones_far_apart() {
        for total in [1, 2, 3, 7, 8, 100] {
            let mut all: Vec<u64> = spread(total).collect();
            assert!(all.len() < 4 || all[0].abs_diff(all[1]) >= total / 4, "{all:?}");
            all.sort_unstable();
            assert_eq!(all, (1..=total).collect::<Vec<_>>());
        }
    }

    #[test]
    fn kills_after_the_number_asked_for() {
        let tool = Stillpoint::new().arg("--version");
        let whole = run(&tool, Moment::Never);
        assert_eq!(whole.run.code, Some(0), "{whole}");
        assert!(!whole.killed && whole.syscalls > 10, "{whole}");
        for n in [0, 1, whole.syscalls / 2] {
            let cut = run(&tool, Moment::AfterSyscalls(n));
            assert!(cut.killed && cut.run.code.is_none(), "{cut}");
        }
        assert!(!run(&tool, Moment::AfterSyscalls(whole.syscalls + 1)).killed);
    }

    #[test]
    fn kills_after_a_time() {
        let ending = run(&Stillpoint::new().arg("--version"), Moment::AfterTime(Duration::ZERO));
        assert!(ending.killed || ending.run.code == Some(0), "{ending}");
    }
}
