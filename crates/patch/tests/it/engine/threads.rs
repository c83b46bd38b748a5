//! Many threads: each is consistent by itself during applies and reverts, fork children continue, libraries are
//! patched.

use crate::engine::support::{Handmade, committed, compile, object};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind, patch};
use stillpoint_patch_engine::{Error, Options, Outcome, PatchSelection, apply, revert, status};
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::Pid;

/// Sixteen threads call `outer -> middle -> inner`. A call chain that is not all old or all new ends the program. So
/// does a thread that returns to old code while the word in its stack frame says that new code runs.
const HAMMER: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static volatile long rounds;
__attribute__((noinline)) int inner(int x) { __asm__ volatile("" : "+r"(x)); return x * 0 + 1; }
__attribute__((noinline)) int middle(int x) { int v = inner(x); __asm__ volatile("" : "+r"(v)); return v * 10 + 1; }
__attribute__((noinline)) int outer(int x) { int v = middle(x); __asm__ volatile("" : "+r"(v)); return v * 10 + 1; }
static void *run(void *a) {
  for (long i = 0;; i++) {
    int v = outer((int)i);
    if (v != 111 && v != 222) { printf("mixed %d\n", v); fflush(stdout); _exit(3); }
    if (i % 64 == 0) __atomic_add_fetch(&rounds, 1, __ATOMIC_RELAXED);
    if (i % 4096 == 0) usleep(100);
  }
  return a;
}
static void *storm(void *a) { for (int i = 0; i < 50; i++) { int v = outer(i); if (v != 111 && v != 222) _exit(4); } return a; }
int main(int argc, char **argv) {
  int threads = argc > 1 ? atoi(argv[1]) : 16;
  for (int i = 0; i < threads; i++) { pthread_t t; pthread_create(&t, 0, run, 0); }
  printf("ready\n"); fflush(stdout);
  for (;;) { pthread_t t; pthread_create(&t, 0, storm, 0); pthread_join(t, 0); usleep(200); }
}
"#;

const HAMMER_NEW: &str = r#"
int inner(int x) { __asm__ volatile("" : "+r"(x)); return x * 0 + 2; }
int middle(int x) { int v = inner(x); __asm__ volatile("" : "+r"(v)); return v * 10 + 2; }
int outer(int x) { int v = middle(x); __asm__ volatile("" : "+r"(v)); return v * 10 + 2; }
"#;

struct Running {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("victim starts");
        let output = BufReader::new(child.stdout.take().expect("stdout"));
        Running { child, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("victim prints");
        line.trim().to_owned()
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id() as i32)
    }

    fn alive(&mut self) {
        if let Some(end) = self.child.try_wait().expect("wait") {
            let line = self.line();
            panic!("victim ended with {end}: {line}");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options() -> Options {
    Options { timeout: Duration::from_secs(30), ..Options::default() }
}

fn patch(dir: &Path, name: &str, target: &Path, text: &str, flags: &[&str]) -> Signed {
    Handmade::new(name, target, &object(dir, name, text, flags)).file()
}

#[test]
fn sixteen_threads_stay_consistent_through_200_cycles() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "hammer", HAMMER, &["-pthread"]);
    let one = patch(dir.path(), "one", &victim, HAMMER_NEW, &["-fPIE"]);
    let mut running = Running::start(&mut Command::new(&victim));
    assert_eq!(running.line(), "ready");
    let mut stops: Vec<u64> = Vec::new();
    let mut migrations = Vec::new();
    for cycle in 0..200 {
        let mut observe = |event: Event| match event.kind {
            EventKind::Patch(patch::Event::ThreadStopped { stopped_ns, ref reason, .. }) if reason == "probe" => {
                stops.push(stopped_ns)
            }
            EventKind::Patch(patch::Event::Committed { duration_ns, .. }) => migrations.push(duration_ns),
            _ => {}
        };
        committed(apply(running.pid(), &one, &options(), &mut observe));
        running.alive();
        committed(revert(running.pid(), &PatchSelection::Newest, &options(), &mut observe));
        running.alive();
        let _ = cycle;
    }
    stops.sort_unstable();
    migrations.sort_unstable();
    let at = |list: &[u64], p: usize| list[(list.len() - 1) * p / 100] / 1000;
    println!("stopped us: median {} p99 {}", at(&stops, 50), at(&stops, 99));
    println!("transition us: median {} p99 {}", at(&migrations, 50), at(&migrations, 99));
    let status = status(running.pid()).expect("status");
    assert!(status.entries.iter().all(|e| e.verified && e.patch.is_none()));
    assert_eq!((status.generation, status.patches.len()), (400, 0));
}

const FORKER: &str = r#"
#include <stdio.h>
#include <signal.h>
#include <unistd.h>
__attribute__((noinline)) int leaf(int x) { __asm__ volatile("" : "+r"(x)); return x * 7 - 5; }
static volatile sig_atomic_t go;
static void on(int s) { go = s; }
int main(void) {
  struct sigaction sa = { .sa_handler = on };
  sigaction(SIGUSR1, &sa, 0);
  setvbuf(stdout, 0, _IOLBF, 0);
  printf("ready %d\n", leaf(1));
  while (!go) pause();
  go = 0;
  int child = fork();
  if (child) { while (!go) pause(); printf("parent %d\n", leaf(1)); for (;;) pause(); }
  printf("child %d %d\n", getpid(), leaf(1));
  while (!go) pause();
  printf("child again %d\n", leaf(1));
  for (;;) pause();
}
"#;

fn signal(pid: i32) {
    let done = Command::new("kill").args(["-USR1", &pid.to_string()]).status().expect("kill runs");
    assert!(done.success());
}

#[test]
fn a_fork_child_inherits_everything_and_is_reverted_by_itself() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "forker", FORKER, &[]);
    let one = patch(dir.path(), "one", &victim, "int leaf(int x) { return x + 100; }", &["-fPIE"]);
    let mut running = Running::start(&mut Command::new(&victim));
    assert_eq!(running.line(), "ready 2");
    committed(apply(running.pid(), &one, &options(), &mut |_| {}));
    signal(running.pid().0);
    let line = running.line();
    let words: Vec<&str> = line.split(' ').collect();
    assert_eq!((words[0], words[2]), ("child", "101"));
    let child: i32 = words[1].parse().expect("pid");
    assert!(matches!(apply(Pid(child), &one, &options(), &mut |_| {}), Ok(Outcome::AlreadyThere(_))));
    committed(revert(Pid(child), &PatchSelection::Newest, &options(), &mut |_| {}));
    signal(child);
    assert_eq!(running.line(), "child again 2");
    signal(running.pid().0);
    assert_eq!(running.line(), "parent 101");
    let _ = Command::new("kill").args(["-KILL", &child.to_string()]).status();
}

const LIBRARY: &str = "int answer(int x) { __asm__ volatile(\"\" : \"+r\"(x)); return x * 7 - 5; }\n";
const USER: &str = r#"
#include <stdio.h>
#include <signal.h>
#include <unistd.h>
int answer(int);
static void on(int s) { (void)s; }
int main(void) {
  struct sigaction sa = { .sa_handler = on };
  sigaction(SIGUSR1, &sa, 0);
  setvbuf(stdout, 0, _IOLBF, 0);
  for (;;) { printf("%d\n", answer(1)); pause(); }
}
"#;

#[test]
fn a_shared_library_is_patched_and_calls_the_c_library() {
    let dir = tempfile::tempdir().expect("directory");
    let library = compile(dir.path(), "libanswer.so", LIBRARY, &["-shared", "-fPIC"]);
    let folder = dir.path().to_str().expect("utf-8").to_owned();
    let link = [&*format!("-L{folder}"), "-lanswer", &format!("-Wl,-rpath,{folder}")];
    let user = compile(dir.path(), "user", USER, &link);
    let text = "#include <stdlib.h>\n#include <string.h>\nint answer(int x) { char *p = strdup(\"77\"); int v = atoi(p) + (int)strlen(p) + x; free(p); return v; }";
    let one = patch(dir.path(), "one", &library, text, &["-fPIC", "-fno-builtin"]);
    let mut running = Running::start(&mut Command::new(&user));
    assert_eq!(running.line(), "2");
    committed(apply(running.pid(), &one, &options(), &mut |_| {}));
    signal(running.pid().0);
    assert_eq!(running.line(), "80");
    committed(revert(running.pid(), &PatchSelection::Newest, &options(), &mut |_| {}));
    signal(running.pid().0);
    assert_eq!(running.line(), "2");
}

const HOOKED: &str = r#"
#include <stdio.h>
#include <signal.h>
#include <unistd.h>
int state = 1;
__thread int local = 5;
__attribute__((noinline)) int leaf(int x) { __asm__ volatile("" : "+r"(x)); return x + state + local; }
static void on(int s) { (void)s; }
int main(void) {
  struct sigaction sa = { .sa_handler = on };
  sigaction(SIGUSR1, &sa, 0);
  setvbuf(stdout, 0, _IOLBF, 0);
  for (;;) { printf("%d\n", leaf(0)); pause(); }
}
"#;

#[test]
fn hooks_run_and_may_refuse_and_thread_locals_resolve() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "hooked", HOOKED, &[]);
    let text = "extern int state; extern __thread int local; static int fresh = 3;\n\
        int leaf(int x) { return x + state * 1000 + local + fresh; }\n\
        int before(void) { state = 2; return 0; } int after(void) { fresh = 4; return 0; }\n\
        int back(void) { state = 9; return 0; } int never(void) { return 7; }";
    let object = object(dir.path(), "one", text, &["-fPIE"]);
    let mut made = Handmade::new("one", &victim, &object);
    made.hooks = [&["before"], &["after"], &["back"], &[]];
    let mut running = Running::start(&mut Command::new(&victim));
    assert_eq!(running.line(), "6");
    committed(apply(running.pid(), &made.file(), &options(), &mut |_| {}));
    signal(running.pid().0);
    assert_eq!(running.line(), "2009");
    committed(revert(running.pid(), &PatchSelection::Newest, &options(), &mut |_| {}));
    signal(running.pid().0);
    assert_eq!(running.line(), "14");
    made.hooks = [&["never"], &[], &[], &[]];
    match apply(running.pid(), &made.file(), &options(), &mut |_| {}) {
        Err(Error::RolledBack { source, .. }) => assert!(matches!(*source, Error::Hook { returned: 7, .. })),
        other => panic!("{other:?}"),
    }
    signal(running.pid().0);
    assert_eq!(running.line(), "14");
}

/// `outer` calls `inner`, which leaves a return address into `outer` at the place of a buffer in `blocked`, which never
/// fills it: a word on the live stack that is no frame.
const STALE: &str = r#"
#include <stdio.h>
#include <signal.h>
#include <unistd.h>
__attribute__((noinline)) int inner(int x) { volatile char pad[64]; pad[x & 63] = 1; return pad[x & 63] + x; }
__attribute__((noinline)) int outer(int x) { int v = inner(x); __asm__ volatile("" : "+r"(v)); return v * 3 + 1; }
static void on(int s) { (void)s; }
__attribute__((noinline)) void blocked(void) { volatile char buffer[4096]; buffer[0] = 1; pause(); buffer[1] = buffer[0]; }
int main(void) {
  struct sigaction sa = { .sa_handler = on };
  sigaction(SIGUSR1, &sa, 0);
  setvbuf(stdout, 0, _IOLBF, 0);
  for (;;) { printf("%d\n", outer(1)); outer(2); blocked(); }
}
"#;

/// Waits until the process is in `pause`.
fn await_pause(pid: Pid) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let waits = || std::fs::read_to_string(format!("/proc/{}/syscall", pid.0)).is_ok_and(|s| s.starts_with("34 "));
    while !waits() {
        assert!(Instant::now() < deadline, "the process never waits");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_stale_word_makes_no_thread_wait_when_the_walk_is_proof() {
    let dir = tempfile::tempdir().expect("directory");
    let victim = compile(dir.path(), "stale", STALE, &[]);
    let one = patch(dir.path(), "one", &victim, "int outer(int x) { return x + 40; }", &["-fPIE"]);
    let mut running = Running::start(&mut Command::new(&victim));
    assert_eq!(running.line(), "7");
    await_pause(running.pid());
    let mut busy = Vec::new();
    let mut observe = |event: Event| {
        if let EventKind::Patch(patch::Event::ThreadBusy { function, .. }) = event.kind {
            busy.push(function);
        }
    };
    committed(apply(running.pid(), &one, &options(), &mut observe));
    assert_eq!(busy, ["outer"], "the conservative scan must have seen the stale word first");
    signal(running.pid().0);
    assert_eq!(running.line(), "41");
}
