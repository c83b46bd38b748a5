//! Stops of threads that no wait of a program detects: 32 kinds of wait, up to 100 rounds of probes a second.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_patch_tracee::{Pid, Process, Session, Stop, attach};

/// Limit of the duration of a time-out, as a multiple. A wait that is stopped after its end and before its thread runs
/// again may restart (`EINTR` has precedence over `EAGAIN`): on a busy machine that happens once, and sometimes twice.
/// A time-out that every stop restarted would never end.
const OVERRUN_FACTOR_MAX: f64 = 3.2;
/// Several of the program's time-outs, and ten seconds at least.
const DURATION: Duration = Duration::from_secs(12);
const ROUND_INTERVAL: Duration = Duration::from_millis(10);

struct Waits {
    child: Child,
    output: BufReader<ChildStdout>,
    _directory: tempfile::TempDir,
}

#[derive(Debug)]
struct Wait {
    name: String,
    timeout_ms: f64,
    returns: u64,
    interrupted: u64,
    unexpected: u64,
    worst_ms: f64,
}

impl Waits {
    fn start() -> Waits {
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join("eintr");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/eintr.c");
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-pthread", "-Wno-unused-result", "-o"]).arg(&program).arg(source);
        assert!(cc.status().expect("cc runs").success());
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a first line");
        assert!(line.starts_with("ready"), "{line}");
        Waits { child, output, _directory: directory }
    }

    fn report(&mut self) -> Vec<Wait> {
        writeln!(self.child.stdin.as_mut().expect("piped"), "report").expect("it reads");
        let mut waits = Vec::new();
        loop {
            let mut line = String::new();
            self.output.read_line(&mut line).expect("it answers");
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [name, timeout, returns, interrupted, unexpected, worst] = fields[..] else {
                assert_eq!(fields, ["end"]);
                return waits;
            };
            let number = |field: &str| field.parse::<u64>().expect("a number");
            waits.push(Wait {
                name: name.to_owned(),
                timeout_ms: number(timeout) as f64,
                returns: number(returns),
                interrupted: number(interrupted),
                unexpected: number(unexpected),
                worst_ms: number(worst) as f64,
            });
        }
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.child.stdin.take();
        let _ = self.child.wait();
    }
}

/// Makes one round of probes as the engine does; returns the number of stopped threads.
fn probe(session: &mut Session<'_>) -> usize {
    let mut stopped = 0;
    for tid in session.threads() {
        // Another stop would restart its time-out and show no new state.
        if session.idle_since_stop(tid).unwrap() {
            continue;
        }
        if let Stop::Stopped(mut thread) = session.stop(tid).unwrap() {
            thread.registers().unwrap();
            thread.resume().unwrap();
            stopped += 1;
        }
    }
    stopped
}

#[test]
fn a_hundred_rounds_of_probes_a_second_show_nowhere() {
    let mut program = Waits::start();
    let process = Process::open(Pid(program.child.id() as i32)).unwrap();
    let (rounds, stopped) = attach(&process, |session| {
        let end = Instant::now() + DURATION;
        let (mut rounds, mut stopped) = (0, 0);
        while Instant::now() < end {
            let next = Instant::now() + ROUND_INTERVAL;
            stopped += probe(session);
            rounds += 1;
            assert_eq!(session.pump(next).unwrap(), None);
        }
        (rounds, stopped)
    })
    .unwrap();
    println!("{rounds} rounds, {stopped} stops");
    // Each of the 32 threads at least once, the 14 that wait with a time-out once each time.
    assert!(stopped > 32 + 14, "{stopped}");

    let waits = program.report();
    assert_eq!(waits.len(), 32);
    for wait in &waits {
        println!("{}: {} returns, at most {} ms", wait.name, wait.returns, wait.worst_ms);
        assert_eq!((wait.interrupted, wait.unexpected), (0, 0), "{wait:?}");
        match wait.timeout_ms > 0.0 {
            true => assert!(wait.returns > 0 && wait.worst_ms <= wait.timeout_ms * OVERRUN_FACTOR_MAX, "{wait:?}"),
            false => assert_eq!(wait.returns, 0, "{wait:?}"),
        }
    }
}
