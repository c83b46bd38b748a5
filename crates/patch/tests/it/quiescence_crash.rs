//! Kills the tool in every state of a barrier: stopped threads continue by themselves at the deadline at the latest, no
//! mode's promise is broken, and the next call completes or undoes. `status` shows which states were reached.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::kill_injection::{KillInstant, RunResult, run, sample};
use stillpoint_patch_tests::quiescence_program::{in_mode, program};
use stillpoint_patch_tests::victim::{Phase, Victim, apply, revert, status};
use stillpoint_patch_tests::wait;

/// Kills of each test without `STILLPOINT_SOAK=1`, which kills after every system call.
const KILLS: usize = 10;
/// Limit of a transition: long enough to gather on a busy machine; a thread that is stopped when the tool is killed
/// stays stopped no longer.
const TRANSITION_TIMEOUT: &str = "1500ms";
/// Time after the kill within which stopped threads answer again: the limit, and extra time for a slow machine.
const ANSWERS_WITHIN: Duration = Duration::from_millis(1500 + 15_000);
/// Kills beyond the sample in order to reach a state.
const SEARCHES: usize = 60;

/// Operation of the killed tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Apply,
    Revert,
    /// An apply that almost never gathers all threads: it succeeds only if no work is queued at that moment.
    Abort,
}

/// State of a barrier after the tool's death, in the order in which a living tool passes the states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Left {
    /// The transition has not begun.
    Untouched,
    /// A transition is open, and no thread is requested to migrate: not yet, or no longer.
    Open,
    /// Threads are requested to migrate one by one.
    Going,
    /// Some threads are stopped, others are awaited.
    Gathering,
    /// All threads are stopped, and wait for the tool's decision.
    Standing,
    /// Released: threads have taken the transition, which no tool has finished.
    Leaving,
    /// The transition is complete.
    Done,
}

impl Left {
    /// Derives the state from the present `status` of the process.
    #[track_caller]
    fn of(victim: &Victim, began: u64) -> Left {
        let line = status(victim.pid()).json().succeed().json().remove(0);
        let (open, asked) = (&line["unfinished"]["transition"], &line["points"]["request"]);
        let threads = line["threads"].as_array().expect("threads");
        match asked["mode"].as_str() {
            _ if open.is_null() && line["generation"] == began => Left::Untouched,
            _ if open.is_null() => Left::Done,
            Some("global" | "group") if asked["awaited"] == 0 => Left::Standing,
            Some("global" | "group") => Left::Gathering,
            Some(_) => Left::Going,
            None if threads.iter().any(|thread| thread["transition"] == *open) => Left::Leaving,
            None => Left::Open,
        }
    }
}

fn generation(victim: &Victim) -> u64 {
    status(victim.pid()).json().succeed().json()[0]["generation"].as_u64().expect("a number")
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
            Operation::Apply => self.apply(TRANSITION_TIMEOUT),
            Operation::Revert => in_mode(revert(self.victim.pid()), self.mode, TRANSITION_TIMEOUT),
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

    /// Kills once, and asserts all conditions.
    #[track_caller]
    fn kill(&mut self, moment: KillInstant, finish: bool) -> (RunResult, Left) {
        self.prepare();
        let began = generation(&self.victim);
        let ending = run(&self.tool(), moment);
        let left = Left::of(&self.victim, began);
        println!("{} {:?}, {moment:?}: {left:?}, {ending}", self.mode, self.operation);
        // state after the tool's death: the deadline releases the stopped threads
        self.victim.assert_answering_within(ANSWERS_WITHIN);
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
        (ending, left)
    }

    /// Kills before each write into the process, the last first, until a state is reached: some states exist only
    /// between two writes, for a few of two thousand system calls.
    #[track_caller]
    fn search(&mut self, wanted: Left, writes: u64, met: &mut Vec<(KillInstant, Left)>) {
        for n in (1..=writes).rev().cycle().take(SEARCHES) {
            if met.iter().any(|(_, left)| *left == wanted) {
                return;
            }
            let moment = KillInstant::BeforeWrite(n);
            let left = self.kill(moment, false).1;
            met.push((moment, left));
        }
        panic!("{wanted:?} is not met: {met:?}, {writes} writes in all");
    }
}

/// Kills right after the Nth system call, for every N (a sample in a short run), and in each of these states at least
/// once.
#[track_caller]
fn after_every_system_call(operation: Operation, mode: &str, scope: &str, promise: &str, wanted: &[Left]) {
    let program = program(if operation == Operation::Abort { "pool" } else { "points" });
    let patch = program.patch_with(2, &["--scope", scope]);
    let arguments = if operation == Operation::Abort { vec!["careless"] } else { vec![promise, "4"] };
    let mut case = Case { operation, mode, patch: &patch, victim: program.start(&arguments) };
    let RunResult { syscalls: total, writes, .. } = case.kill(KillInstant::Never, false).0;
    let mut killed = 0;
    let mut met = Vec::new();
    for (i, n) in sample(total, KILLS).enumerate() {
        let moment = KillInstant::AfterSyscalls(n);
        let (ending, left) = case.kill(moment, i % 2 == 0);
        killed += usize::from(ending.killed);
        met.push((moment, left));
    }
    assert!(killed >= KILLS / 3, "only {killed} of the runs were killed before their end");
    for left in wanted {
        case.search(*left, writes, &mut met);
    }
    let mut counted = BTreeMap::new();
    met.iter().for_each(|(_, left)| *counted.entry(*left).or_insert(0) += 1);
    println!("{mode} {operation:?}: killed {killed} times among {total} system calls; left behind: {counted:?}");
}

#[test]
fn killed_while_threads_go_by_themselves() {
    after_every_system_call(Operation::Apply, "local", "thread-local", "none", &[]);
}

/// Kills while a group gathers, after threads outside of it have migrated one by one. The next call rolls these back by
/// probing, also between two of their points: only the members have a stronger promise.
#[test]
fn killed_while_a_group_gathers() {
    after_every_system_call(Operation::Apply, "group:a", "thread-group", "members", &[]);
}

#[test]
fn killed_while_all_gather() {
    after_every_system_call(Operation::Apply, "global", "process", "all", &[Left::Standing, Left::Leaving]);
}

#[test]
fn killed_while_all_gather_to_go_back() {
    after_every_system_call(Operation::Revert, "global", "process", "all", &[Left::Standing, Left::Leaving]);
}

#[test]
fn killed_while_a_barrier_that_cannot_open_is_abandoned() {
    after_every_system_call(Operation::Abort, "global", "process", "", &[]);
}

/// Lets the pool dead-lock at its barrier: some threads are stopped, others wait for them. No thread leaves before the
/// deadline and all leave at it, though only the deadline can open the barrier.
#[test]
fn killed_while_some_stand_they_leave_at_the_deadline() {
    let program = program("pool");
    let patch = program.patch_with(2, &["--scope", "process"]);
    let mut victim = program.start(&["careless"]);
    victim.announce(Phase::Settled(1));
    let before = generation(&victim);
    let mut tool = in_mode(apply(&patch, victim.pid()), "global", "8s").command().spawn().expect("start the tool");
    wait::until("some to stand", || {
        let line = status(victim.pid()).json().run().json().into_iter().next()?;
        let asked = &line["points"]["request"];
        (asked["standing"].as_u64()? >= 1 && asked["awaited"].as_u64()? >= 1).then_some(())
    });
    tool.kill().expect("kill the tool");
    tool.wait().expect("the tool ends");
    assert_eq!(Left::of(&victim, before), Left::Gathering, "they stand on without the tool");
    let asked = status(victim.pid()).json().succeed().json()[0]["points"]["request"].clone();
    let left = Duration::from_millis(asked["left_ms"].as_u64().expect("the request is pending"));
    victim.assert_answering_within(left + ANSWERS_WITHIN);
    assert_eq!(Left::of(&victim, before), Left::Open, "the deadline has abandoned the request");
    victim.assert_no_residue();
    in_mode(revert(victim.pid()), "stop", "60s").succeed();
    victim.assert_settled(1);
    victim.assert_pristine();
}
