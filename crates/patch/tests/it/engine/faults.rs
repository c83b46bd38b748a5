//! Failure of each phase of an operation: the target is on the promised side, and the next call continues from there.

use crate::engine::support::{Handmade, compile, object};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;
use stillpoint_operation::{FaultPoint, Faults};
use stillpoint_patch_engine::{
    Error, Options, Outcome, PatchSelection, Quiescence, ServiceState, apply, revert, status,
};
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::Pid;

/// Answers each line with the results of its two functions, from a thread of its own while the first one waits for it.
const VICTIM: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
__attribute__((noinline)) int leaf(int x) { return x + 1; }
__attribute__((noinline)) const char *name(void) { return "old"; }
static void *answers(void *nothing) {
  char line[64];
  while (fgets(line, sizeof line, stdin)) printf("%s %d\n", name(), leaf(atoi(line)));
  exit(0);
  return nothing;
}
int main(void) {
  pthread_t thread;
  setvbuf(stdout, 0, _IOLBF, 0);
  pthread_create(&thread, 0, answers, 0);
  pthread_join(thread, 0);
}
"#;

struct Victim {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    patch: Signed,
    _dir: tempfile::TempDir,
}

impl Victim {
    fn start() -> Victim {
        let dir = tempfile::tempdir().expect("directory");
        let program = compile(dir.path(), "victim", VICTIM, &[]);
        let text = "int leaf(int x) { return x + 100; } const char *name(void) { return \"new\"; }";
        let patch = Handmade::new("fix", &program, &object(dir.path(), "fix", text, &[])).file();
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("starts");
        let input = child.stdin.take().expect("stdin");
        let output = BufReader::new(child.stdout.take().expect("stdout"));
        let mut victim = Victim { child, input, output, patch, _dir: dir };
        assert_eq!(victim.answer(), OLD, "it has started");
        victim
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id() as i32)
    }

    fn answer(&mut self) -> String {
        writeln!(self.input, "5").expect("victim reads");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("victim answers");
        line.trim().to_owned()
    }

    fn apply(&self, how: Quiescence, faults: &[FaultPoint]) -> Result<Outcome, Error> {
        apply(self.pid(), &self.patch, &options(how, faults), &mut |_| ())
    }

    fn revert(&self, how: Quiescence, faults: &[FaultPoint]) -> Result<Outcome, Error> {
        revert(self.pid(), &PatchSelection::Newest, &options(how, faults), &mut |_| ())
    }

    /// Returns names of the active patches, and true if an operation is unfinished.
    fn state(&self) -> (Vec<String>, bool) {
        let status = status(self.pid()).expect("status");
        let active = status.patches.iter().map(|p| p.name.clone()).collect();
        (active, status.unfinished.is_some())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options(quiescence: Quiescence, points: &[FaultPoint]) -> Options {
    let faults = points.iter().cloned().fold(Faults::none(), Faults::failing);
    Options { quiescence, timeout: Duration::from_secs(20), faults, ..Options::default() }
}

fn service_state(result: Result<Outcome, Error>) -> ServiceState {
    result.expect_err("fault injection").service_state()
}

const OLD: &str = "old 6";
const NEW: &str = "new 105";

#[test]
fn before_the_decision_everything_is_taken_back() {
    let points = [FaultPoint::after("begin"), FaultPoint::after("arm"), FaultPoint::after("migrate")];
    // all at once, the decision is a part of the migration
    let cases = [(Quiescence::Probe, &points[..]), (Quiescence::Stop, &points[..2])];
    let mut victim = Victim::start();
    for (how, points) in cases {
        for point in points {
            assert_eq!(
                service_state(victim.apply(how, std::slice::from_ref(point))),
                ServiceState::RolledBack,
                "{how} {point}"
            );
            assert_eq!((victim.answer().as_str(), victim.state()), (OLD, (vec![], false)), "{how} {point}");
            victim.apply(how, &[]).expect("the next call works");
            assert_eq!(victim.answer(), NEW);

            assert_eq!(
                service_state(victim.revert(how, std::slice::from_ref(point))),
                ServiceState::RolledBack,
                "{how} {point}"
            );
            assert_eq!((victim.answer().as_str(), victim.state()), (NEW, (vec!["fix".into()], false)));
            victim.revert(how, &[]).expect("the next call works");
            assert_eq!(victim.answer(), OLD);
        }
    }
}

#[test]
fn a_patch_that_is_only_placed_is_not_in_force() {
    let mut victim = Victim::start();
    let error = victim.apply(Quiescence::Probe, &[FaultPoint::after("inject")]).expect_err("fault injection");
    assert!(!matches!(error.service_state(), ServiceState::Unfinished), "{error}");
    assert_eq!((victim.answer().as_str(), victim.state()), (OLD, (vec![], false)));
    victim.apply(Quiescence::Probe, &[]).expect("the next call works");
    assert_eq!(victim.answer(), NEW);
}

#[test]
fn behind_the_decision_there_is_no_way_back() {
    for how in [Quiescence::Probe, Quiescence::Stop] {
        let mut victim = Victim::start();
        assert_eq!(service_state(victim.apply(how, &[FaultPoint::after("decide")])), ServiceState::Unfinished);
        assert_eq!((victim.answer().as_str(), victim.state().1), (NEW, true), "{how}");
        assert!(matches!(victim.apply(how, &[]), Ok(Outcome::AlreadyThere(_))), "the next call completes it");
        assert_eq!((victim.answer().as_str(), victim.state()), (NEW, (vec!["fix".into()], false)));

        assert_eq!(service_state(victim.revert(how, &[FaultPoint::after("decide")])), ServiceState::Unfinished);
        assert_eq!((victim.answer().as_str(), victim.state().1), (OLD, true), "{how}");
        victim.revert(how, &[]).expect("the next call completes it");
        assert_eq!((victim.answer().as_str(), victim.state()), (OLD, (vec![], false)));
    }
}

#[test]
fn a_way_back_that_fails_is_gone_by_the_next_call() {
    for point in [FaultPoint::after("arm"), FaultPoint::after("migrate")] {
        let mut victim = Victim::start();
        let failed = victim.apply(Quiescence::Probe, &[point.clone(), FaultPoint::inverse("arm")]);
        assert_eq!(service_state(failed), ServiceState::Unfinished);
        assert_eq!((victim.answer().as_str(), victim.state().1), (OLD, true), "{point}");
        victim.apply(Quiescence::Probe, &[]).expect("undone, then applied");
        assert_eq!((victim.answer().as_str(), victim.state()), (NEW, (vec!["fix".into()], false)));
    }
}
