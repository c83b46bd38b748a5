//! Targets of many processes of one executable: parents before children, and children that start during the operation.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::server::ChildGuard;
use stillpoint_patch_tests::victim::{Phase, Program, Victim, apply, residue, revert, soak};
use stillpoint_patch_tests::wait;

fn all(command: &str, program: &Program) -> Stillpoint {
    Stillpoint::new().args(["patch", command, "--exe"]).arg(program.elf())
}

/// Returns every process that runs the program.
fn processes(program: &Program) -> BTreeSet<i32> {
    let proc = std::fs::read_dir("/proc").expect("list the processes");
    let pids = proc.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| {
        std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program.elf())
            && !std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
    })
    .collect()
}

#[track_caller]
fn assert_no_residue(program: &Program) {
    // A process that has ended has no residue.
    let left = |pid: &i32| residue(*pid).into_iter().filter(|what| !what.ends_with("is gone")).collect::<Vec<_>>();
    let left: Vec<String> = processes(program).iter().flat_map(left).collect();
    assert!(left.is_empty(), "{left:#?}");
}

#[track_caller]
fn cycle(program: &Program, victim: &mut Victim, patch: &std::path::Path) {
    victim.announce(Phase::Over(1, 2));
    all("apply", program).arg(patch).succeed();
    assert_no_residue(program);
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    all("revert", program).succeed();
    assert_no_residue(program);
    victim.assert_settled(1);
}

#[test]
fn fifty_processes_of_one_executable() {
    let program = Program::build("tree");
    let patch = program.patch(2);
    let mut victim = program.start(&["50"]);
    wait::until("all processes to run", || (processes(&program).len() == 51).then_some(()));
    for _ in 0..if soak() { 50 } else { 2 } {
        cycle(&program, &mut victim, &patch);
    }
    assert_eq!(processes(&program).len(), 51);
}

#[test]
fn children_that_end_and_are_born_meanwhile() {
    let program = Program::build("tree");
    let patch = program.patch(2);
    // A worker runs for some ten milliseconds.
    let mut victim = program.start(&["8", "10"]);
    for _ in 0..if soak() { 200 } else { 8 } {
        cycle(&program, &mut victim, &patch);
    }
    victim.assert_pristine();
}

#[test]
fn children_inherit_the_patch_of_their_parent() {
    let program = Program::build("tree");
    let patch = program.patch(2);
    let mut victim = program.start(&["4", "40"]);
    victim.announce(Phase::Either(1, 2));
    apply(&patch, victim.pid()).succeed();
    // Existing workers keep their own code until they end; later ones inherit the parent's.
    wait::until("all workers to be born of the patched parent", || {
        victim.assert_running();
        victim.slots().iter().all(|slot| slot.version == 2).then_some(())
    });
    victim.assert_settled(2);
    for pid in processes(&program) {
        let status = Stillpoint::new().args(["patch", "status", "--pid"]).arg(pid).json().run();
        // A worker may end between the list and its inspection, or during it.
        let ended = status.code == Some(3) || status.code == Some(1) && status.stderr.contains("ended, or called exec");
        assert!(ended || status.code == Some(0) && status.stdout.contains("tree-1-2"), "{status}");
    }
    victim.announce(Phase::Either(1, 2));
    revert(victim.pid()).succeed();
    wait::until("all workers to be born of the reverted parent", || {
        victim.assert_running();
        victim.slots().iter().all(|slot| slot.version == 1).then_some(())
    });
    victim.assert_settled(1);
    victim.assert_pristine();
}

#[test]
fn the_list_shows_every_patched_process() {
    let program = Program::build("tree");
    let patch = program.patch(2);
    let mut victim = program.start(&["3"]);
    victim.announce(Phase::Over(1, 2));
    all("apply", &program).arg(&patch).succeed();
    victim.assert_settled(2);
    let list = Stillpoint::new().args(["patch", "list"]).json().succeed();
    for pid in processes(&program) {
        assert!(list.stdout.contains(&pid.to_string()), "process {pid} is not listed\n{list}");
    }
    victim.announce(Phase::Over(2, 1));
    all("revert", &program).succeed();
    victim.assert_settled(1);
}

/// A library that prevents the start of its program, with a ledger that no tool of ours wrote.
const FORGER: &str = r#"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
__attribute__((constructor)) static void forge(void) {
  size_t room = (16 << 20) + 8192;
  char *at = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), byte;
  memcpy(at, "STILLPOINT-LEDG\n\4\0\0\0forged", 26);
  mprotect(at, room, PROT_READ);
  write(1, "ready\n", 6);
  while (read(0, &byte, 1) > 0) continue;
  _exit(0);
}
"#;

/// Runs the service's program with a library of the user's own, as any user may.
#[test]
fn a_hostile_process_keeps_none_of_the_others_from_being_patched() {
    let program = Program::build("tree");
    let patch = program.patch(2);
    let (source, library) = (program.dir().join("forger.c"), program.dir().join("forger.so"));
    std::fs::write(&source, FORGER).expect("write the library");
    let made = Command::new("gcc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(made.expect("start gcc").success());
    // they are older than the others, so that they come first
    let mut hostile = [(), ()].map(|()| {
        let mut hostile = Command::new(program.elf());
        hostile.env("LD_PRELOAD", &library).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut hostile = hostile.spawn().expect("start a hostile process");
        let mut line = String::new();
        BufReader::new(hostile.stdout.take().expect("its output")).read_line(&mut line).expect("it is ready");
        ChildGuard::from_child(hostile)
    });
    let mut victim = program.start(&["4"]);
    wait::until("all processes to run", || (processes(&program).len() == 7).then_some(()));
    for (command, phase, settled) in [("apply", Phase::Over(1, 2), 2), ("revert", Phase::Over(2, 1), 1)] {
        victim.announce(phase);
        let call = all(command, &program);
        let run = if command == "apply" { call.arg(&patch).run() } else { call.run() };
        // every process that can be patched is, and each other one is named
        assert_eq!(run.code, Some(4), "{run}");
        assert!(run.stderr.contains("5 processes changed over, 2 did not change over"), "{run}");
        for process in &hostile {
            assert!(run.stderr.contains(&format!("process {}", process.pid())), "{run}");
        }
        victim.assert_settled(settled);
    }
    assert!(hostile.iter_mut().all(|process| process.ended().is_none()));
}
