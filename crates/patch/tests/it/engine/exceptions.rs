//! Throw, catch, rethrow, unwind, cancel and backtrace through patched frames, on small victims.

use crate::engine::support::{Handmade, committed, compile, compile_cxx, object, object_cxx};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;
use stillpoint_patch_engine::{Options, PatchSelection, apply, revert};
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::Pid;

/// Code that both sides of a change share.
const COMMON: &str = r#"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <execinfo.h>
#include <mutex>
#include <pthread.h>
#include <stdexcept>
#include <string>
#include <unistd.h>
struct Own : std::runtime_error { int value; explicit Own(int v); ~Own() override; };
struct Trace { int *at; int by; ~Trace() { *at += by; } };
#define KEEP __attribute__((noinline, noipa))
extern int destroyed;
extern std::once_flag once;
extern int (*sink)(int);
KEEP int thrower(int what);
KEEP int middle(int what);
KEEP int catcher(int what);
KEEP int again(int what);
KEEP int shield(int what) noexcept;
KEEP int waits(int what);
KEEP int depth();
KEEP std::exception_ptr capture(int what);
KEEP int counted(int by);
extern thread_local int per_thread;
"#;

const VICTIM: &str = r#"
Own::Own(int v) : std::runtime_error("own"), value(v) {}
Own::~Own() {}
int destroyed;
std::once_flag once;
KEEP static int five() { return 5; }
thread_local int per_thread = five();
static int ends[2];
KEEP int thrower(int what) {
  if (what == 1) throw std::runtime_error("old");
  if (what == 2) throw Own(7);
  if (what == 3) throw 42;
  return what;
}
KEEP int middle(int what) { Trace t{&destroyed, 1}; return thrower(what) + 1; }
KEEP int catcher(int what) {
  try { return middle(what); }
  catch (Own &e) { return 100 + e.value; }
  catch (std::runtime_error &e) { return 200 + (e.what()[0] == 'o'); }
  catch (int i) { return 300 + i; }
}
KEEP int again(int what) {
  try { return middle(what); } catch (...) { destroyed += 10; throw; }
}
KEEP int shield(int what) noexcept { return middle(what); }
KEEP int waits(int what) { Trace t{&destroyed, 1000}; char c; return read(ends[0], &c, 1) + what; }
KEEP int depth() { void *at[64]; return backtrace(at, 64); }
KEEP std::exception_ptr capture(int what) {
  try { middle(what); } catch (...) { return std::current_exception(); }
  return nullptr;
}
KEEP int counted(int by) { return per_thread += by; }
KEEP static int outer(int what) {
  try { return again(what); } catch (std::exception &e) { return 1000 + e.what()[1]; } catch (int) { return 2000; }
}
static void *waiter(void *) { Trace t{&destroyed, 5000}; return (void *)(long)waits(1); }
static void *looks(void *p) {
  try { std::rethrow_exception(*(std::exception_ptr *)p); } catch (Own &e) { return (void *)(long)e.value; } catch (...) { return (void *)-1; }
}
static void *counts(void *) { counted(1); return (void *)(long)counted(1); }
static void *join(void *(*f)(void *), void *arg, bool cancel) {
  pthread_t t; void *result;
  pthread_create(&t, nullptr, f, arg);
  if (cancel) { usleep(20000); pthread_cancel(t); }
  pthread_join(t, &result);
  return result;
}
int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (pipe(ends)) return 1;
  char word[32]; int what;
  while (scanf("%31s %d", word, &what) == 2) {
    destroyed = 0;
    long result = -2;
    if (!strcmp(word, "catch")) result = catcher(what);
    if (!strcmp(word, "again")) result = outer(what);
    if (!strcmp(word, "shield")) result = shield(what);
    if (!strcmp(word, "cancel")) result = join(waiter, nullptr, true) == PTHREAD_CANCELED;
    if (!strcmp(word, "depth")) result = depth();
    if (!strcmp(word, "moved")) { std::exception_ptr e = capture(what); result = (long)join(looks, &e, false); }
    if (!strcmp(word, "thread")) result = (long)join(counts, nullptr, false);
    printf("%s %ld %d\n", word, result, destroyed);
  }
}
"#;

/// New version of each function, with a different result.
const NEW: [(&str, &str); 7] = [
    (
        "thrower",
        r#"KEEP int thrower(int what) {
  if (what == 1) throw std::runtime_error("xew");
  if (what == 2) { static Own *made = new Own(8); throw Own(made->value + 1); }
  if (what == 3) throw 43;
  return what;
}"#,
    ),
    (
        "middle",
        "KEEP int middle(int what) { Trace t{&destroyed, 2}; std::string s(what + 30, 'x'); return thrower(what) + int(s.size()); }",
    ),
    (
        "catcher",
        r#"KEEP int catcher(int what) {
  try { return middle(what); }
  catch (int i) { return 600 + i; }
  catch (Own &e) { return 400 + e.value; }
  catch (std::exception &e) { return 500 + (e.what()[0] == 'o'); }
}"#,
    ),
    (
        "again",
        "KEEP int again(int what) { try { return middle(what); } catch (Own &) { throw; } catch (...) { destroyed += 20; throw; } }",
    ),
    ("waits", "extern int destroyed; KEEP int waits(int what) { Trace t{&destroyed, 2000}; pause(); return what; }"),
    (
        "depth",
        "KEEP int depth() { void *at[32]; int n = backtrace(at, 32); for (int i = 0; i < n; i++) if (!at[i]) return -1; return n + 100; }",
    ),
    (
        "counted",
        "KEEP int counted(int by) { std::call_once(once, [] { destroyed += 7; }); return per_thread += 10 * by; }",
    ),
];

fn new(names: &[&str]) -> String {
    let wanted = NEW.iter().filter(|(name, _)| names.contains(name));
    wanted.fold(COMMON.to_owned(), |text, (_, function)| text + function + "\n")
}

struct Victim {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Victim {
    fn start(path: &Path) -> Self {
        let mut command = Command::new(path);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("victim starts");
        let input = child.stdin.take().expect("stdin");
        let output = BufReader::new(child.stdout.take().expect("stdout"));
        Victim { child, input, output }
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id() as i32)
    }

    fn ask(&mut self, question: &str) -> String {
        writeln!(self.input, "{question}").expect("victim reads");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("victim answers");
        line.trim().to_owned()
    }

    fn expect(&mut self, answers: &[(&str, &str)]) {
        for (question, answer) in answers {
            assert_eq!(self.ask(question), *answer, "{question}");
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options() -> Options {
    Options { timeout: Duration::from_secs(20), ..Options::default() }
}

fn put(pid: Pid, patch: &Signed) {
    committed(apply(pid, patch, &options(), &mut |event| {
        if std::env::var_os("STILLPOINT_TEST_EVENTS").is_some() {
            eprintln!("{event:?}");
        }
    }));
}

fn take(pid: Pid) {
    committed(revert(pid, &PatchSelection::Newest, &options(), &mut |_| {}));
}

const OLD_ANSWERS: [(&str, &str); 10] = [
    ("catch 0", "catch 1 1"),
    ("catch 1", "catch 201 1"),
    ("catch 2", "catch 107 1"),
    ("catch 3", "catch 342 1"),
    ("again 1", "again 1108 11"),
    ("again 3", "again 2000 11"),
    ("cancel 0", "cancel 1 6000"),
    ("moved 2", "moved 7 1"),
    ("thread 0", "thread 7 0"),
    ("shield 0", "shield 1 1"),
];

struct Case {
    target: std::path::PathBuf,
    dir: tempfile::TempDir,
    object_flags: &'static [&'static str],
}

impl Case {
    fn new(flags: &[&str], object_flags: &'static [&'static str]) -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let target = compile_cxx(dir.path(), "victim", &format!("{COMMON}{VICTIM}"), flags);
        Case { target, dir, object_flags }
    }

    fn patch(&self, name: &str, functions: &[&str]) -> Signed {
        let object = object_cxx(self.dir.path(), name, &new(functions), self.object_flags);
        Handmade::new(name, &self.target, &object).file()
    }
}

fn chains(flags: &[&str], object_flags: &'static [&'static str]) {
    let case = Case::new(flags, object_flags);
    let mut victim = Victim::start(&case.target);
    let pid = victim.pid();
    victim.expect(&OLD_ANSWERS);
    let frames = victim.ask("depth 0");
    let mut with = |functions: &[&str], answers: &[(&str, &str)]| {
        let patch = case.patch(functions[0], functions);
        put(pid, &patch);
        victim.expect(answers);
        take(pid);
        victim.expect(&OLD_ANSWERS[..6]);
    };
    // old -> old -> new: thrown by new code, caught by old
    with(
        &["thrower"],
        &[("catch 1", "catch 200 1"), ("catch 2", "catch 109 1"), ("catch 3", "catch 343 1"), ("moved 2", "moved 9 1")],
    );
    // old -> new -> old: destructors of the new frame run
    with(
        &["middle"],
        &[
            ("catch 0", "catch 30 2"),
            ("catch 1", "catch 201 2"),
            ("catch 2", "catch 107 2"),
            ("again 3", "again 2000 12"),
        ],
    );
    // new -> old -> old: caught by new code, by type
    with(
        &["catcher", "again"],
        &[
            ("catch 1", "catch 501 1"),
            ("catch 2", "catch 407 1"),
            ("catch 3", "catch 642 1"),
            ("again 1", "again 1108 21"),
            ("again 2", "again 1119 1"),
        ],
    );
    with(
        &["catcher", "middle", "thrower"],
        &[
            ("catch 0", "catch 30 2"),
            ("catch 1", "catch 500 2"),
            ("catch 2", "catch 409 2"),
            ("catch 3", "catch 643 2"),
        ],
    );
    // cancelled in new code: its destructors run, and those of the old frames above
    with(&["waits"], &[("cancel 0", "cancel 1 7000")]);
    // thread-locals, call_once through libstdc++'s own thread-locals
    with(&["counted"], &[("thread 0", "thread 25 7"), ("thread 0", "thread 25 0")]);
    let depth: i32 = frames.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    with(&["depth"], &[("depth 0", &format!("depth {} 0", depth + 100))]);
}

#[test]
fn chains_of_frames_in_a_position_independent_executable() {
    chains(&["-fPIE", "-pie", "-pthread"], &["-fPIE"]);
}

#[test]
fn chains_of_frames_in_an_executable_at_a_fixed_address() {
    chains(&["-no-pie", "-fno-pie", "-pthread"], &["-fno-pie"]);
}

/// Links a program with an unwinder of its own.
#[test]
fn chains_of_frames_with_a_static_libgcc_and_libstdcxx() {
    chains(&["-fPIE", "-pie", "-pthread", "-static-libgcc"], &["-fPIE"]);
}

#[test]
fn terminate_stays_terminate() {
    let case = Case::new(&["-pthread"], &["-fPIE"]);
    let mut victim = Victim::start(&case.target);
    put(victim.pid(), &case.patch("one", &["middle", "thrower"]));
    victim.expect(&[("shield 0", "shield 30 2")]);
    writeln!(victim.input, "shield 2").expect("victim reads");
    let ended = victim.child.wait().expect("it ends");
    assert_eq!(ended.signal(), Some(6), "{ended}");
    let mut said = String::new();
    victim.child.stderr.take().expect("stderr").read_to_string(&mut said).expect("text");
    assert!(said.contains("terminate called after throwing an instance of 'Own'"), "{said}");
}

const PLAIN: &str = r#"
#define _GNU_SOURCE
#include <execinfo.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#define KEEP __attribute__((noinline, noipa))
int cleaned;
KEEP int waits(int what) { pause(); return what; }
KEEP int depth(void) { void *at[64]; return backtrace(at, 64); }
static void clean(void *p) { cleaned += *(int *)p; }
static void *waiter(void *p) {
  int one = 1;
  pthread_cleanup_push(clean, &one);
  waits(1);
  pthread_cleanup_pop(0);
  return 0;
}
int main(void) {
  setvbuf(stdout, 0, _IOLBF, 0);
  char word[32]; int what;
  while (scanf("%31s %d", word, &what) == 2) {
    long result = -2;
    cleaned = 0;
    if (!strcmp(word, "cancel")) {
      pthread_t t; void *end;
      pthread_create(&t, 0, waiter, 0);
      usleep(20000);
      pthread_cancel(t);
      pthread_join(t, &end);
      result = end == PTHREAD_CANCELED;
    }
    if (!strcmp(word, "depth")) result = depth();
    if (!strcmp(word, "maps")) {
      char line[512]; FILE *f = fopen("/proc/self/maps", "r");
      for (result = 0; fgets(line, sizeof line, f);) result |= strstr(line, "libgcc_s") != 0;
      fclose(f);
    }
    printf("%s %ld %d\n", word, result, cleaned);
  }
}
"#;

/// Runs a plain C program that loads its unwinder only when a thread is cancelled, after the patch was applied.
#[test]
fn an_unwinder_that_is_loaded_later_sees_new_code() {
    for flags in [&["-pthread", "-fPIE"][..], &["-pthread", "-fPIE", "-fexceptions"]] {
        let dir = tempfile::tempdir().expect("directory");
        let target = compile(dir.path(), "victim", PLAIN, flags);
        let text = "#include <unistd.h>\n#include <execinfo.h>\n\
                    static void twice(int *p) { extern int cleaned; cleaned += *p * 2; }\n\
                    int waits(int what) { __attribute__((cleanup(twice))) int one = 2; pause(); return what + one; }\n\
                    int depth(void) { void *at[32]; return backtrace(at, 32) + 100; }";
        let made = object(dir.path(), "one", text, flags);
        let patch = Handmade::new("one", &target, &made).file();
        let mut victim = Victim::start(&target);
        // a program that unwinds itself is linked with its unwinder
        let (loaded, cleaned) = if flags.contains(&"-fexceptions") { ("maps 1 0", 5) } else { ("maps 0 0", 1) };
        victim.expect(&[("maps 0", loaded)]);
        put(victim.pid(), &patch);
        victim.expect(&[("maps 0", loaded)]);
        victim.expect(&[("cancel 0", &format!("cancel 1 {cleaned}")), ("maps 0", "maps 1 0")]);
        let new = victim.ask("depth 0");
        take(victim.pid());
        victim.expect(&[("cancel 0", "cancel 1 1")]);
        let old = victim.ask("depth 0");
        let frames = |answer: &str| answer.split(' ').nth(1).and_then(|n| n.parse::<i32>().ok()).expect("a number");
        assert_eq!(frames(&new), frames(&old) + 100);
        assert!(frames(&old) >= 4, "main and what calls it are seen: {old}");
    }
}
