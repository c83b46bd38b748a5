//! Life cycles on small victims: old -> new -> old, stacked, replaced, aborted.

use crate::engine::support::{Handmade, compile, object};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;
use stillpoint_events::Event;
use stillpoint_patch_engine::{
    Error, Options, Outcome, PatchSelection, Quiescence, ServiceState, ThreadView, apply, check, peek, revert,
};
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::Pid;

const VICTIM: &str = r#"
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
static int calls;
int counter = 40;
__attribute__((noinline)) int leaf(int x) { return x + 1; }
__attribute__((noinline)) int branchy(int x) { if (x > 3) return counter * 2; calls++; return leaf(x) + calls * 0; }
__attribute__((noinline)) const char *name(void) { return "old"; }
__attribute__((noinline)) int calls_first(int x) { return leaf(x) * 10 + leaf(x + 1); }
__attribute__((noinline)) int blocked(void) { char line[64]; if (!fgets(line, sizeof line, stdin)) exit(0); return atoi(line); }
int main(void) {
  setvbuf(stdout, 0, _IOLBF, 0);
  for (;;) { int v = blocked(); printf("%s %d %d %d\n", name(), leaf(v), branchy(v), calls_first(v)); }
}
"#;

struct Victim {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Victim {
    fn start(path: &Path) -> Self {
        let mut child = Command::new(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("victim starts");
        let input = child.stdin.take().expect("stdin");
        let output = BufReader::new(child.stdout.take().expect("stdout"));
        Victim { child, input, output }
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id() as i32)
    }

    fn ask(&mut self, value: i32) -> String {
        writeln!(self.input, "{value}").expect("victim reads");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("victim answers");
        line.trim().to_owned()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn quiet() -> impl FnMut(Event) + Send {
    |event| {
        if std::env::var_os("STILLPOINT_TEST_EVENTS").is_some() {
            eprintln!("{event:?}");
        }
    }
}

fn options() -> Options {
    Options { timeout: Duration::from_secs(20), ..Options::default() }
}

fn committed(outcome: Result<Outcome, Error>) -> Vec<String> {
    match outcome {
        Ok(Outcome::Committed { active, .. }) => active,
        Ok(other) => panic!("{other:?}"),
        Err(error) => panic!("{error}: {:?}", error),
    }
}

fn patch(dir: &Path, name: &str, target: &Path, text: &str, flags: &[&str]) -> Signed {
    let object: PathBuf = object(dir, name, text, flags);
    Handmade::new(name, target, &object).file()
}

fn life_cycle(flags: &[&str], object_flags: &[&str]) {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "victim", VICTIM, flags);
    let one = patch(
        dir.path(),
        "one",
        &victim,
        "extern int counter; int leaf(int x) { return x + 100; } const char *name(void) { return \"new\"; }\n\
         int branchy(int x) { return counter + x; }",
        object_flags,
    );
    let mut running = Victim::start(&victim);
    assert_eq!(running.ask(5), "old 6 80 67");
    let pid = running.pid();
    assert_eq!(committed(apply(pid, &one, &options(), &mut quiet())), ["one"]);
    assert_eq!(running.ask(5), "new 105 45 1156");
    assert!(matches!(apply(pid, &one, &options(), &mut quiet()), Ok(Outcome::AlreadyThere(_))));
    assert_eq!(committed(revert(pid, &PatchSelection::Newest, &options(), &mut quiet())), [""; 0]);
    assert_eq!(running.ask(2), "old 3 3 34");
    assert_eq!(committed(apply(pid, &one, &options(), &mut quiet())), ["one"]);
    assert_eq!(running.ask(5), "new 105 45 1156");
    assert!(matches!(
        revert(pid, &PatchSelection::Named("two".into()), &options(), &mut quiet()),
        Err(Error::NotActive { active, .. }) if active == ["one"]
    ));
    committed(revert(pid, &PatchSelection::All, &options(), &mut quiet()));
    assert_eq!(running.ask(5), "old 6 80 67");
    assert!(matches!(revert(pid, &PatchSelection::All, &options(), &mut quiet()), Ok(Outcome::AlreadyThere(_))));
}

/// Runs only without generations in the kernel; otherwise `crates/patch/generations/tests/patching.c` is the test.
#[test]
fn a_kernel_without_generations_is_named_and_nothing_is_touched() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "victim", VICTIM, &[]);
    let one = patch(dir.path(), "one", &victim, "int leaf(int x) { return x + 100; }", &["-fPIE"]);
    let mut running = Victim::start(&victim);
    assert_eq!(running.ask(5), "old 6 80 67");
    if Path::new("/proc/self/generations").exists() {
        return;
    }
    let before = memory(running.pid());
    let by_generation = Options { view: ThreadView::Generation, ..options() };
    let refused = apply(running.pid(), &one, &by_generation, &mut quiet());
    assert!(matches!(&refused, Err(Error::NoGenerations)), "{refused:?}");
    assert_eq!(refused.map_err(|error| error.service_state()), Err(ServiceState::Untouched));
    assert!(matches!(
        revert(running.pid(), &PatchSelection::Newest, &by_generation, &mut quiet()),
        Err(Error::NoGenerations)
    ));
    assert_eq!(memory(running.pid()), before);
    assert_eq!(running.ask(5), "old 6 80 67");
}

/// Returns the bytes that patches hold, and the number of mappings of the victim.
fn memory(pid: Pid) -> (u64, usize) {
    let kept = peek(pid).expect("status").map_or(0, |status| status.bytes_kept);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("mappings");
    (kept, maps.lines().count())
}

#[test]
fn a_patch_that_comes_back_is_not_placed_again() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "victim", VICTIM, &[]);
    let one = patch(dir.path(), "one", &victim, "int leaf(int x) { return x + 100; }", &["-fPIE"]);
    let two = patch(dir.path(), "two", &victim, "const char *name(void) { return \"two\"; }", &["-fPIE"]);
    let mut running = Victim::start(&victim);
    assert_eq!(running.ask(5), "old 6 80 67");
    let pid = running.pid();
    committed(apply(pid, &one, &options(), &mut quiet()));
    committed(apply(pid, &two, &options(), &mut quiet()));
    committed(revert(pid, &PatchSelection::All, &options(), &mut quiet()));
    let before = memory(pid);
    for _ in 0..20 {
        committed(apply(pid, &two, &options(), &mut quiet()));
        assert_eq!(running.ask(2), "two 3 3 34");
        committed(apply(pid, &one, &options(), &mut quiet()));
        assert_eq!(running.ask(2), "two 102 102 1123");
        committed(revert(pid, &PatchSelection::Newest, &options(), &mut quiet()));
        assert_eq!(running.ask(2), "two 3 3 34");
        committed(revert(pid, &PatchSelection::All, &options(), &mut quiet()));
        assert_eq!(running.ask(2), "old 3 3 34");
    }
    assert_eq!(memory(pid), before);
}

#[test]
fn a_patch_with_data_of_its_own_begins_with_fresh_data() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "victim", VICTIM, &[]);
    let text = "static int own = 1000; int leaf(int x) { own += 1000; return x + own; }";
    let one = patch(dir.path(), "one", &victim, text, &["-fPIE", "-O1"]);
    let mut running = Victim::start(&victim);
    assert_eq!(running.ask(5), "old 6 80 67");
    let pid = running.pid();
    let mut answers = Vec::new();
    for _ in 0..3 {
        committed(apply(pid, &one, &options(), &mut quiet()));
        answers.push([running.ask(5), running.ask(5)]);
        committed(revert(pid, &PatchSelection::Newest, &options(), &mut quiet()));
        assert_eq!(running.ask(5), "old 6 80 67");
    }
    assert_ne!(answers[0][0], answers[0][1], "the data changes");
    assert_eq!(answers[1], answers[0]);
    assert_eq!(answers[2], answers[0]);
}

#[test]
fn position_independent_executable() {
    life_cycle(&["-fPIE", "-pie"], &["-fPIE"]);
}

#[test]
fn fixed_executable() {
    life_cycle(&["-no-pie", "-fno-pie"], &["-fno-pie"]);
}

#[test]
fn stop_mode() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "victim", VICTIM, &[]);
    let one = patch(dir.path(), "one", &victim, "int leaf(int x) { return x + 100; }", &[]);
    let mut running = Victim::start(&victim);
    assert_eq!(running.ask(5), "old 6 80 67");
    let stop = Options { quiescence: Quiescence::Stop, ..options() };
    committed(apply(running.pid(), &one, &stop, &mut quiet()));
    assert_eq!(running.ask(5), "old 105 80 1156");
    committed(revert(running.pid(), &PatchSelection::Newest, &stop, &mut quiet()));
    assert_eq!(running.ask(5), "old 6 80 67");
}

#[test]
fn stacked_and_replaced() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "victim", VICTIM, &[]);
    let texts = [
        ("one", "int leaf(int x) { return x + 100; } int other_helper(int x) { return x * 1000; }"),
        (
            "two",
            "int other_helper(int); int leaf(int x) { return other_helper(x); } const char *name(void) { return \"two\"; }",
        ),
        ("three", "int leaf(int x) { return x + 3; }"),
    ];
    let [one, two, three] = texts.map(|(name, text)| {
        let object = object(dir.path(), name, text, &["-fPIE"]);
        let based_on: &[&str] = if name == "two" { &["one"] } else { &[] };
        Handmade { based_on, ..Handmade::new(name, &victim, &object) }.file()
    });
    let mut running = Victim::start(&victim);
    assert_eq!(running.ask(5), "old 6 80 67");
    let pid = running.pid();
    committed(apply(pid, &one, &options(), &mut quiet()));
    assert_eq!(running.ask(5), "old 105 80 1156");
    assert_eq!(committed(apply(pid, &two, &options(), &mut quiet())), ["one", "two"]);
    assert_eq!(running.ask(5), "two 5000 80 56000");
    assert!(matches!(
        revert(pid, &PatchSelection::Named("one".into()), &options(), &mut quiet()),
        Err(Error::NotOnTop { .. })
    ));
    committed(revert(pid, &PatchSelection::Newest, &options(), &mut quiet()));
    assert_eq!(running.ask(5), "old 105 80 1156");
    committed(apply(pid, &two, &options(), &mut quiet()));
    let replace = Options { replace: true, ..options() };
    assert_eq!(committed(apply(pid, &three, &replace, &mut quiet())), ["three"]);
    assert_eq!(running.ask(5), "old 8 80 89");
    committed(revert(pid, &PatchSelection::All, &options(), &mut quiet()));
    assert_eq!(running.ask(5), "old 6 80 67");
}

#[test]
fn a_thread_inside_keeps_the_old_code_and_the_transition_falls_back() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "victim", VICTIM, &[]);
    let text = "int blocked(void) { return 7; } int leaf(int x) { return x + 100; }";
    let one = patch(dir.path(), "one", &victim, text, &[]);
    let mut running = Victim::start(&victim);
    assert_eq!(running.ask(5), "old 6 80 67");
    let prediction = check(running.pid(), &one, &options(), &mut quiet()).expect("check");
    assert_eq!(prediction.busy.iter().map(|b| b.function.as_str()).collect::<Vec<_>>(), ["blocked"]);
    let short = Options { timeout: Duration::from_millis(300), ..options() };
    match apply(running.pid(), &one, &short, &mut quiet()) {
        Err(Error::TimedOut(busy)) => assert_eq!(busy[0].function, "blocked"),
        other => panic!("{other:?}"),
    }
    assert_eq!(running.ask(5), "old 6 80 67");
    let two = patch(dir.path(), "two", &victim, "int leaf(int x) { return x + 100; }", &[]);
    committed(apply(running.pid(), &two, &options(), &mut quiet()));
    assert_eq!(running.ask(5), "old 105 80 1156");
}
