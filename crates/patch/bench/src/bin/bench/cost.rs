//! Cost of a call of a patched function after the transition.

use crate::results::{Section, number};
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Stdio};
use stillpoint_patch_bench::operation::Spread;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::server::{ChildGuard, bound_command};
use stillpoint_patch_tests::victim::Program;

/// The program that measures the time of its own calls.
struct TimedProgram {
    target: ChildGuard,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

#[derive(Serialize)]
struct Cost {
    code: &'static str,
    one_function_ns: Spread,
    many_functions_ns: Spread,
}

/// Measures calls as shipped, patched, and after a revert, alternating `rounds` times.
pub(crate) fn cost(program: &Program, patch: &Path, rounds: usize) -> Section {
    let codes = ["as shipped", "patched", "reverted"];
    let mut one = [Vec::new(), Vec::new(), Vec::new()];
    let mut many = one.clone();
    for _ in 0..rounds {
        // A process without a patch is new each time; the two other states alternate in it.
        let mut timed = TimedProgram::start(program);
        for (i, _) in codes.iter().enumerate() {
            if i == 1 {
                Stillpoint::new().args(["patch", "apply"]).arg(patch).arg("--pid").arg(timed.target.pid()).succeed();
            } else if i == 2 {
                Stillpoint::new().args(["patch", "revert", "--pid"]).arg(timed.target.pid()).succeed();
            }
            let (a, b) = timed.ask();
            one[i].push(a);
            many[i].push(b);
        }
    }
    let title = format!("A call, nanoseconds: median (min to max) of {rounds} runs");
    let mut section = Section::new("cost", title, &["code", "one hot function", "64 functions in turn"]);
    let cell =
        |spread: &Spread| format!("{} ({} to {})", number(spread.median), number(spread.min), number(spread.max));
    let costs: Vec<Cost> = codes
        .into_iter()
        .zip(one.into_iter().zip(many))
        .map(|(code, (a, b))| Cost { code, one_function_ns: Spread::of(a), many_functions_ns: Spread::of(b) })
        .collect();
    for cost in &costs {
        section.rows.push(vec![cost.code.into(), cell(&cost.one_function_ns), cell(&cost.many_functions_ns)]);
    }
    section.raw(&costs);
    section
}

impl TimedProgram {
    fn start(program: &Program) -> TimedProgram {
        let mut command = bound_command(program.elf());
        command.arg("cost").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut target = ChildGuard::from_child(command.spawn().expect("start the program"));
        let input = target.child().stdin.take().expect("standard input is a pipe");
        let output = BufReader::new(target.child().stdout.take().expect("standard output is a pipe"));
        TimedProgram { target, input, output }
    }

    /// Returns nanoseconds per call of one function, and of 64 in turn.
    fn ask(&mut self) -> (f64, f64) {
        self.input.write_all(b"\n").expect("ask the program");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("read from the program");
        let mut numbers = line.split_whitespace().map(|word| word.parse().expect("the program prints numbers"));
        let mut next = || numbers.next().expect("the program prints two numbers");
        (next(), next())
    }
}
