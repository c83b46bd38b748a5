//! Time until all threads have migrated, by their number and their activity; and the time for which each is stopped.

use crate::results::{Section, number};
use serde::Serialize;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use stillpoint_patch_bench::operation::{Operation, Spread, StopsUs};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::server::{ChildGuard, bound_command};
use stillpoint_patch_tests::victim::Program;

/// Threads that run and threads that sleep in `read`.
const CASES: [(u32, u32); 8] = [(1, 0), (1, 10), (1, 100), (1, 1000), (4, 0), (16, 0), (16, 100), (16, 1000)];

#[derive(Serialize)]
struct Case {
    running: u32,
    sleeping: u32,
    quiescence: &'static str,
    runs: usize,
    fell_back: usize,
    migrated_ms: Spread,
    command_ms: Spread,
    stopped_us: StopsUs,
}

/// Measures all cases.
pub(crate) fn threads(program: &Program, patch: &Path, runs: usize) -> Section {
    let mut section = Section::new(
        "threads",
        format!("Time until every thread runs the new code ({runs} applies and reverts each)"),
        &[
            "running",
            "in `read`",
            "way",
            "all over, ms: median (max)",
            "a thread probed, us: median, p99 (max)",
            "all stopped, us: median (max)",
        ],
    );
    let mut cases = Vec::new();
    for (running, sleeping) in CASES {
        for quiescence in ["probe", "stop"] {
            let case = measure(program, patch, running, sleeping, quiescence, runs);
            let StopsUs { probe, all, .. } = &case.stopped_us;
            section.rows.push(vec![
                running.to_string(),
                sleeping.to_string(),
                quiescence.into(),
                over(&case),
                format!("{}, {} ({})", number(probe.median), number(probe.p99), number(probe.max)),
                format!("{} ({})", number(all.median), number(all.max)),
            ]);
            cases.push(case);
        }
    }
    section.notes.push(format!(
        "`stop` stops all threads at once, checks all, and retries until no thread is in the code; after {CALL_TIMEOUT} it rolls back, and every thread is on the code it ran before."
    ));
    section.raw(&cases);
    section
}

/// Time-out of each call.
const CALL_TIMEOUT: &str = "3s";

fn over(case: &Case) -> String {
    let times = format!("{} ({})", number(case.migrated_ms.median), number(case.migrated_ms.max));
    match case.fell_back {
        0 => times,
        all if all == case.runs => format!("fell back, {all} of {all} times"),
        some => format!("{times}; fell back {some} of {} times", case.runs),
    }
}

fn measure(
    program: &Program,
    patch: &Path,
    running: u32,
    sleeping: u32,
    quiescence: &'static str,
    runs: usize,
) -> Case {
    let target = start(program, running, sleeping);
    let (mut migrated, mut command, mut operations) = (Vec::new(), Vec::new(), Vec::new());
    let (mut calls, mut fell_back) = (0, 0);
    for _ in 0..runs {
        let apply = Stillpoint::new().args(["patch", "apply"]).arg(patch);
        for call in [apply, Stillpoint::new().args(["patch", "revert"])] {
            let call = call.args(["--timeout", CALL_TIMEOUT, "--quiescence", quiescence, "--pid"]).arg(target.pid());
            let done = Operation::of(call);
            let fallback = done.run.code == Some(4);
            assert!(fallback || done.run.code == Some(0), "{}", done.run);
            calls += 1;
            fell_back += usize::from(fallback);
            migrated.extend(done.migrated_ns.map(|ns| ns as f64 / 1e6));
            command.push(done.elapsed_ns() as f64 / 1e6);
            operations.push(done);
            if fallback {
                break;
            }
        }
        // If a revert has fallen back, the next round still begins like all others.
        Stillpoint::new().args(["patch", "revert", "--all", "--pid"]).arg(target.pid()).succeed();
    }
    Case {
        running,
        sleeping,
        quiescence,
        runs: calls,
        fell_back,
        migrated_ms: Spread::of(migrated),
        command_ms: Spread::of(command),
        stopped_us: StopsUs::of(&operations),
    }
}

fn start(program: &Program, running: u32, sleeping: u32) -> ChildGuard {
    let mut command = bound_command(program.elf());
    command.args(["threads", &running.to_string(), &sleeping.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut target = ChildGuard::from_child(command.spawn().expect("start the program"));
    let stdout = target.child().stdout.take().expect("standard output is a pipe");
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).expect("read from the program");
    assert_eq!(line, "ready\n", "the program did not start its threads");
    target
}
