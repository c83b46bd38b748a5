//! The tool is killed in every state of a barrier: threads that stand go on by themselves at the deadline at the latest,
//! no mode's promise is broken, and the next call completes or undoes.

use std::path::Path;
use std::time::Duration;
use stillpoint_e2e::cli::Stillpoint;
use stillpoint_e2e::kill_at::{Ending, Moment, run, sample};
use stillpoint_e2e::points::{in_mode, program};
use stillpoint_e2e::victim::{Phase, Victim, apply, revert, status};

/// Without `STILLPOINT_SOAK=1` each test samples for this long (and a few instants in any case).
const BUDGET: Duration = Duration::from_secs(15);
const AT_LEAST: usize = 6;
/// Long enough to gather on a busy machine; whoever stands when the tool is killed stands no longer than this.
const LIMIT: &str = "1500ms";

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Apply,
    Revert,
    /// An apply that hardly ever gathers everybody: it would, should no work be queued at that moment.
    Abort,
}

struct Case<'a> {
    operation: Operation,
    mode: &'a str,
    patch: &'a Path,
    victim: Victim,
}

impl Case<'_> {
    fn apply(&self, limit: &str) -> Stillpoint {
        in_mode(apply(self.patch, self.victim.pid()), self.mode, limit)
    }

    fn revert(&self) -> Stillpoint {
        in_mode(revert(self.victim.pid()), self.mode, "60s")
    }

    fn tool(&self) -> Stillpoint {
        match self.operation {
            Operation::Apply => self.apply(LIMIT),
            Operation::Revert => in_mode(revert(self.victim.pid()), self.mode, LIMIT),
            Operation::Abort => self.apply("100ms"),
        }
    }

    #[track_caller]
    fn prepare(&mut self) {
        if self.operation == Operation::Revert {
            self.victim.announce(Phase::Over(1, 2));
            self.apply("60s").succeed();
            self.victim.assert_settled(2);
        }
        self.victim.announce(match self.operation {
            Operation::Apply | Operation::Abort => Phase::OverAndBack(1, 2),
            Operation::Revert => Phase::OverAndBack(2, 1),
        });
    }

    /// Kills once, and asserts all that must hold.
    #[track_caller]
    fn kill(&mut self, moment: Moment, finish: bool) -> Ending {
        self.prepare();
        let ending = run(&self.tool(), moment);
        println!("{} {:?}, {moment:?}: {ending}", self.mode, self.operation);
        // as the dead tool has left it: those who stood are let go by the deadline
        self.victim.assert_answering();
        self.victim.assert_no_residue();
        status(self.victim.pid()).succeed();
        if self.operation != Operation::Abort {
            self.victim.announce(Phase::Either(1, 2));
            if finish {
                self.apply("60s").succeed();
                self.victim.assert_settled(2);
                self.victim.announce(Phase::Over(2, 1));
            }
        }
        if self.operation == Operation::Abort {
            if ending.run.code.is_some_and(|code| code != 0) {
                self.victim.assert_settled(1);
            }
            in_mode(revert(self.victim.pid()), "stop", "60s").succeed();
        } else {
            self.revert().succeed();
        }
        self.victim.assert_settled(1);
        self.victim.assert_pristine();
        ending
    }
}

/// Right after the Nth system call, for every N (a sample of them in a short run).
#[track_caller]
fn after_every_system_call(operation: Operation, mode: &str, scope: &str, promise: &str) {
    let program = program(if operation == Operation::Abort { "pool" } else { "points" });
    let patch = program.patch_with(2, &["--scope", scope]);
    let arguments = if operation == Operation::Abort { vec!["careless"] } else { vec![promise, "4"] };
    let mut case = Case { operation, mode, patch: &patch, victim: program.start(&arguments) };
    let total = case.kill(Moment::Never, false).syscalls;
    let mut killed = 0;
    for (i, n) in sample(total, AT_LEAST, BUDGET).enumerate() {
        killed += usize::from(case.kill(Moment::AfterSyscalls(n), i % 2 == 0).killed);
    }
    println!("{mode} {operation:?}: killed {killed} times among {total} system calls");
    assert!(killed >= AT_LEAST / 2, "only {killed} of the runs were killed before their end");
}

#[test]
fn killed_while_threads_go_by_themselves() {
    after_every_system_call(Operation::Apply, "local", "thread-local", "none");
}

/// Threads outside of the group have gone over one by one before it gathers. When the tool is killed then, the next call takes
/// them back by probing, between two of their points as well: only the members are promised more.
#[test]
fn killed_while_a_group_gathers() {
    after_every_system_call(Operation::Apply, "group:a", "thread-group", "members");
}

#[test]
fn killed_while_all_gather() {
    after_every_system_call(Operation::Apply, "global", "process", "all");
}

#[test]
fn killed_while_all_gather_to_go_back() {
    after_every_system_call(Operation::Revert, "global", "process", "all");
}

#[test]
fn killed_while_a_barrier_that_cannot_open_is_abandoned() {
    after_every_system_call(Operation::Abort, "global", "process", "");
}
