//! Compilation and execution of the tests' C programs, and communication with them.
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod step;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use stillpoint_patch_tracee::{Pid, Process, Tid};

static PROGRAMS: AtomicU32 = AtomicU32::new(0);
static COMPILER: Mutex<()> = Mutex::new(());

/// Compiles `programs/tracee/NAME.c`.
pub fn compile(name: &str, flags: &[&str]) -> PathBuf {
    let _one_at_a_time = COMPILER.lock().unwrap_or_else(|poison| poison.into_inner());
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("programs/tracee").join(format!("{name}.c"));
    // Each test has its own file and removes it at the end.
    let number = PROGRAMS.fetch_add(1, Ordering::Relaxed);
    let output = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{}.{number}", std::process::id()));
    let status = Command::new("cc")
        .args(["-O2", "-g", "-pthread", "-Wall", "-Wno-unused-result", "-Wno-return-type", "-Wno-array-bounds", "-o"])
        .arg(&output)
        .arg(&source)
        .args(flags)
        .status()
        .expect("cc runs");
    assert!(status.success(), "{name}.c compiles");
    output
}

/// A running test program; killed when dropped.
pub struct Target {
    pub child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Values of its first line: pairs of name and hexadecimal or decimal value.
    pub ready: HashMap<String, u64>,
    path: PathBuf,
}

impl Target {
    pub fn start(name: &str) -> Target {
        Target::start_with(name, &[], &[])
    }

    pub fn start_with(name: &str, flags: &[&str], args: &[&str]) -> Target {
        let path = compile(name, flags);
        let mut command = Command::new(&path);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a first line");
        assert!(line.starts_with("ready"), "{name} said: {line}");
        let ready = pairs(&line);
        Target { input: child.stdin.take(), child, output, ready, path }
    }

    pub fn pid(&self) -> Pid {
        Pid(self.child.id() as i32)
    }

    pub fn process(&self) -> Process {
        Process::open(self.pid()).expect("the process can be opened")
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.input.as_mut().expect("input open"), "{line}").expect("the program reads");
    }

    /// Sends `report` and reads the numbers of the reply.
    pub fn report(&mut self) -> HashMap<String, u64> {
        self.say("report");
        self.line()
    }

    pub fn line(&mut self) -> HashMap<String, u64> {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the program answers");
        assert!(!line.is_empty(), "the program ended");
        pairs(&line)
    }

    /// Closes its input and expects it to exit with 0.
    pub fn finish(mut self) {
        self.input.take();
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}");
    }

    /// Expects of `waiters` that every kind of thread makes another round, and that none has ever found an error.
    pub fn expect_progress(&mut self) {
        assert_eq!(self.expect_progress_but_interrupts(), 0);
    }

    /// Expects progress, and returns the number of interrupts of its epoll_wait.
    pub fn expect_progress_but_interrupts(&mut self) -> u64 {
        self.expect_progress_while(|| {})
    }

    /// Expects progress, and runs `between` between the reports.
    pub fn expect_progress_while(&mut self, mut between: impl FnMut()) -> u64 {
        const KINDS: [&str; 5] = ["epoll", "read", "sleep", "futex", "compute"];
        let before = self.report();
        let gone_round = |r: &HashMap<String, u64>| KINDS.iter().all(|kind| r[*kind] > before[*kind] + 1);
        let after = self.await_report("every thread goes on", |r| {
            between();
            gone_round(r)
        });
        assert_eq!(after["faults"], 0);
        after["interrupted"]
    }

    /// Requests reports until the numbers are as wanted.
    pub fn await_report(
        &mut self,
        what: &str,
        mut wanted: impl FnMut(&HashMap<String, u64>) -> bool,
    ) -> HashMap<String, u64> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let report = self.report();
            if wanted(&report) {
                return report;
            }
            assert!(Instant::now() < deadline, "{what}: {report:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn pairs(line: &str) -> HashMap<String, u64> {
    let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "ready").collect();
    let number = |word: &str| match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).expect("a number"),
        None => word.parse::<i64>().expect("a number") as u64,
    };
    words.chunks_exact(2).map(|pair| (pair[0].to_owned(), number(pair[1]))).collect()
}

/// Waits until `condition` holds.
pub fn await_that(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the thread that waits in a system call.
pub fn thread_in(process: &Process, nr: i64) -> Tid {
    let mut found = None;
    await_that(&format!("a thread in system call {nr}"), || {
        let threads = process.threads().expect("threads");
        let waits = |tid: &Tid| process.activity(*tid).is_ok_and(|a| a.waits_in.is_some_and(|w| w.0 == nr as u64));
        found = threads.iter().map(|t| t.tid).find(waits);
        found.is_some()
    });
    found.expect("found")
}
