//! Kills the tool at every relevant instant: the target continues, the next call finishes or undoes, no residue is
//! left.

use std::path::Path;
use std::time::Instant;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::kill_injection::{KillInstant, RunResult, run, sample};
use stillpoint_patch_tests::victim::{Phase, Program, Victim, apply, revert, soak, status};
use stillpoint_testing::random::Random;

/// Kills of each test without `STILLPOINT_SOAK=1`, which kills after every system call.
const KILLS: usize = 16;

/// Operation of the killed tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Apply,
    Revert,
    /// An apply that must abort because a thread does not leave a patched function.
    Abort,
}

struct Case<'a> {
    operation: Operation,
    patch: &'a Path,
    victim: Victim,
}

impl Case<'_> {
    /// Returns the call that is killed.
    fn tool(&self) -> Stillpoint {
        let pid = self.victim.pid();
        match self.operation {
            Operation::Apply => apply(self.patch, pid),
            Operation::Revert => revert(pid),
            Operation::Abort => apply(self.patch, pid).args(["--timeout", "30ms"]),
        }
    }

    /// Prepares the victim for the operation.
    #[track_caller]
    fn prepare(&mut self) {
        if self.operation == Operation::Revert {
            self.victim.announce(Phase::Over(1, 2));
            apply(self.patch, self.victim.pid()).succeed();
            self.victim.assert_settled(2);
        }
        self.victim.announce(match self.operation {
            Operation::Apply => Phase::Over(1, 2),
            Operation::Revert => Phase::Over(2, 1),
            Operation::Abort => Phase::OverAndBack(1, 2),
        });
    }

    /// Kills once, and asserts all conditions.
    #[track_caller]
    fn kill(&mut self, moment: KillInstant, finish: bool) -> RunResult {
        self.prepare();
        let ending = run(&self.tool(), moment);
        println!("{:?}, {moment:?}: {ending}", self.operation);
        // State after the tool's death: every thread answers correctly, and none is stopped.
        self.victim.assert_answering();
        self.victim.assert_no_residue();
        self.recover(finish);
        ending
    }

    /// Asserts that the next call finishes (an apply in the end applies) or undoes (a revert in the end reverts).
    #[track_caller]
    fn recover(&mut self, finish: bool) {
        let pid = self.victim.pid();
        status(pid).succeed();
        self.victim.announce(Phase::Either(1, 2));
        self.victim.assert_no_residue();
        if finish && self.operation != Operation::Abort {
            apply(self.patch, pid).succeed();
            self.victim.assert_no_residue();
            self.victim.assert_settled(2);
            self.victim.announce(Phase::Over(2, 1));
        }
        revert(pid).succeed();
        self.victim.assert_settled(1);
        self.victim.assert_pristine();
    }
}

fn program(operation: Operation) -> Program {
    Program::build(if operation == Operation::Abort { "blocked" } else { "victim" })
}

fn victim(program: &Program, operation: Operation) -> Victim {
    if operation == Operation::Abort { program.start(&[]) } else { program.start(&["4", "300"]) }
}

/// Kills right after the Nth system call, for every N (a sample of them in a short run).
#[track_caller]
fn after_every_system_call(operation: Operation) {
    let program = program(operation);
    let patch = program.patch(2);
    let mut case = Case { operation, patch: &patch, victim: victim(&program, operation) };
    let whole = case.kill(KillInstant::Never, false);
    let expected = if operation == Operation::Abort { 4 } else { 0 };
    assert_eq!(whole.run.code, Some(expected), "{whole}");
    // Runs differ in length; with a number after the end of a run, the tool completes.
    let total = whole.syscalls;
    let mut killed = 0;
    for (i, n) in sample(total, KILLS).enumerate() {
        killed += usize::from(case.kill(KillInstant::AfterSyscalls(n), i % 2 == 0).killed);
    }
    println!("{operation:?}: killed {killed} times among {total} system calls");
    assert!(killed >= KILLS / 4, "only {killed} of the runs were killed before their end");
}

#[test]
fn killed_after_each_system_call_of_an_apply() {
    after_every_system_call(Operation::Apply);
}

#[test]
fn killed_after_each_system_call_of_a_revert() {
    after_every_system_call(Operation::Revert);
}

#[test]
fn killed_after_each_system_call_of_an_abort() {
    after_every_system_call(Operation::Abort);
}

/// Kills between system calls, and while the tool waits in one.
#[test]
fn killed_at_random_instants() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock is set");
        now.as_nanos() as u64
    });
    println!("SEED={seed}");
    let mut random = Random::new(seed);
    for operation in [Operation::Apply, Operation::Revert, Operation::Abort] {
        let program = program(operation);
        let patch = program.patch(2);
        let mut case = Case { operation, patch: &patch, victim: victim(&program, operation) };
        case.prepare();
        let start = Instant::now();
        case.tool().run();
        let whole = start.elapsed();
        case.recover(false);
        for i in 0..if soak() { 500 } else { 6 } {
            // A little after the end as well: the last instants are the most important.
            let instant = whole.mul_f64(random.unit() * 1.1);
            case.kill(KillInstant::AfterTime(instant), i % 2 == 0);
        }
    }
}

/// Kills in the middle, and then several times in the middle of the recovery.
#[test]
fn killed_while_it_recovers() {
    let program = program(Operation::Apply);
    let patch = program.patch(2);
    let mut case = Case { operation: Operation::Apply, patch: &patch, victim: victim(&program, Operation::Apply) };
    let total = case.kill(KillInstant::Never, false).syscalls;
    let shares = if soak() { 20 } else { 4 };
    for part in 1..shares {
        case.prepare();
        run(&case.tool(), KillInstant::AfterSyscalls(total * part / shares));
        case.victim.announce(Phase::Either(1, 2));
        for again in 1..shares {
            let next = if again % 2 == 0 { case.tool() } else { revert(case.victim.pid()) };
            run(&next, KillInstant::AfterSyscalls(total * again / shares));
            case.victim.assert_answering();
            case.victim.assert_no_residue();
        }
        case.recover(part % 2 == 0);
    }
}
