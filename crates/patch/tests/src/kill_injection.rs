//! Runs the tool and kills it (SIGKILL) at a chosen instant: right after its Nth system call, or after some time.
//!
//! Between two system calls a program changes only its own memory, so "after the Nth system call, for every N" covers
//! every state in which a dead tool can leave its target. The obvious way to count, `strace -e inject`, cannot count
//! the calls of all threads together. So this module has a tracer of its own (`programs/kill_after.c`): the tool is a
//! tracee while it traces the victim, which the kernel allows.

use crate::cli::{Run, Stillpoint, binary};
use crate::victim::soak;
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use stillpoint_testing::recipes;

/// Instant of the kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillInstant {
    /// Kills right after this many system calls of the tool, all threads counted together.
    AfterSyscalls(u64),
    /// Kills right before it writes into the memory of another process for the Nth time. The number of system calls
    /// varies with the number of checks; the number of writes hardly does.
    BeforeWrite(u64),
    /// Kills after this time.
    AfterTime(Duration),
    /// Never kills: the tool runs to its end, and is counted.
    Never,
}

/// Result of the run.
#[derive(Debug)]
pub struct RunResult {
    /// Number of system calls that the tool completed (0 when it was not traced).
    pub syscalls: u64,
    /// Number of writes into the memory of another process, completed or about to begin (0 when it was not traced).
    pub writes: u64,
    /// Number of the last system call, for messages.
    pub last: Option<u64>,
    /// True if it was killed; false if it ended by itself before the instant.
    pub killed: bool,
    /// Output and exit code.
    pub run: Run,
}

impl fmt::Display for RunResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.killed { "killed" } else { "not killed" };
        let last = self.last.map_or_else(String::new, |nr| format!(" (last: number {nr})"));
        write!(f, "{how} after {} system calls{last}: {}", self.syscalls, self.run)
    }
}

/// Runs `tool` and kills it at `moment`. On return the tool and all its threads are gone, and no process is traced by
/// it.
#[track_caller]
pub fn run(tool: &Stillpoint, moment: KillInstant) -> RunResult {
    match moment {
        KillInstant::AfterTime(time) => timed(tool, time),
        KillInstant::AfterSyscalls(count) => traced(tool, "calls", count),
        KillInstant::BeforeWrite(count) => traced(tool, "writes", count),
        KillInstant::Never => traced(tool, "calls", u64::MAX),
    }
}

const SIGKILL: i32 = 9;

/// Files for standard output and error of the tool: no thread reads a pipe while it is traced.
struct CapturedOutput {
    stdout: File,
    stderr: File,
}

impl CapturedOutput {
    fn new() -> CapturedOutput {
        let file = || tempfile::tempfile().expect("make a file for the output");
        CapturedOutput { stdout: file(), stderr: file() }
    }

    fn share(file: &File) -> Stdio {
        file.try_clone().expect("share the output").into()
    }

    fn into_run(mut self, tool: &Stillpoint, status: Option<ExitStatus>) -> Run {
        let read = |file: &mut File| {
            let mut bytes = Vec::new();
            file.rewind().and_then(|()| file.read_to_end(&mut bytes)).expect("read the output");
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let code = status.and_then(|status| status.code());
        Run { line: tool.to_string(), code, stdout: read(&mut self.stdout), stderr: read(&mut self.stderr) }
    }
}

fn timed(tool: &Stillpoint, time: Duration) -> RunResult {
    let printed = CapturedOutput::new();
    let mut command = tool.command();
    command.stdout(CapturedOutput::share(&printed.stdout)).stderr(CapturedOutput::share(&printed.stderr));
    let mut child = command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", binary().display()));
    std::thread::sleep(time);
    child.kill().expect("kill the tool");
    let status = child.wait().expect("a child can be waited for");
    let killed = status.signal() == Some(SIGKILL);
    RunResult { syscalls: 0, writes: 0, last: None, killed, run: printed.into_run(tool, Some(status)) }
}

fn traced(tool: &Stillpoint, counted: &str, count: u64) -> RunResult {
    let printed = CapturedOutput::new();
    let report = tempfile::NamedTempFile::new().expect("make a file for the report");
    let tool_command = tool.command();
    let mut command = Command::new(killer());
    command
        .arg(report.path())
        .args([counted, &count.to_string()])
        .arg(tool_command.get_program())
        .args(tool_command.get_args());
    for (key, value) in tool_command.get_envs() {
        command.env(key, value.unwrap_or_default());
    }
    command
        .stdin(Stdio::null())
        .stdout(CapturedOutput::share(&printed.stdout))
        .stderr(CapturedOutput::share(&printed.stderr));
    let done = command.status().expect("run kill_after");
    let text = fs::read_to_string(report.path()).expect("read the report");
    let numbers: Vec<i64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [syscalls, writes, last, status] = numbers[..] else { panic!("kill_after: {done}, report {text:?}") };
    let status = ExitStatus::from_raw(status as i32);
    let killed = status.signal() == Some(SIGKILL);
    let last = u64::try_from(last).ok();
    RunResult {
        syscalls: syscalls as u64,
        writes: writes as u64,
        last,
        killed,
        run: printed.into_run(tool, Some(status)),
    }
}

/// Returns the path of `programs/kill_after.c`, compiled once for this test.
fn killer() -> &'static Path {
    static KILLER: OnceLock<PathBuf> = OnceLock::new();
    KILLER.get_or_init(|| {
        let source = crate::workspace_root().join("crates/patch/tests/programs/kill_after.c");
        let shelf = recipes::directory("programs", "own").unwrap_or_else(|why| panic!("{why}"));
        // Made under a name of this process: other tests may compile it at the same time.
        let made = shelf.join(format!("kill_after.{}", std::process::id()));
        let status = Command::new("gcc").args(["-O2", "-o"]).arg(&made).arg(&source).status().expect("run gcc");
        assert!(status.success(), "gcc {}: {status}", source.display());
        let program = shelf.join("kill_after");
        fs::rename(&made, &program).expect("name the program");
        program
    })
}

/// Returns `count` of the numbers 1 to `total`, spread over the whole; all of them in the long form.
pub fn sample(total: u64, count: usize) -> impl Iterator<Item = u64> {
    spread(total).take(if soak() { usize::MAX } else { count })
}

/// Returns the numbers 1 to `total`, each once, in an order in which each prefix is spread over the whole: a test that
/// runs out of time has sampled all parts.
fn spread(total: u64) -> impl Iterator<Item = u64> {
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
    fn a_sample_has_as_many_numbers_as_were_asked_for() {
        let sampled = |total, count| sample(total, count).collect::<Vec<u64>>();
        if !soak() {
            assert_eq!(sampled(1000, 4), spread(1000).take(4).collect::<Vec<_>>());
        }
        assert_eq!(sampled(3, 8).len(), 3);
    }

    #[test]
    fn kills_after_the_number_asked_for() {
        let tool = Stillpoint::new().arg("--version");
        let whole = run(&tool, KillInstant::Never);
        assert_eq!(whole.run.code, Some(0), "{whole}");
        assert!(!whole.killed && whole.syscalls > 10, "{whole}");
        for n in [0, 1, whole.syscalls / 2] {
            let cut = run(&tool, KillInstant::AfterSyscalls(n));
            assert!(cut.killed && cut.run.code.is_none(), "{cut}");
        }
        assert!(!run(&tool, KillInstant::AfterSyscalls(whole.syscalls + 1)).killed);
    }

    #[test]
    fn kills_after_a_time() {
        let ending = run(&Stillpoint::new().arg("--version"), KillInstant::AfterTime(Duration::ZERO));
        assert!(ending.killed || ending.run.code == Some(0), "{ending}");
    }
}
