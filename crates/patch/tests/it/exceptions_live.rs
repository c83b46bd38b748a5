//! Sixteen threads throw, catch, rethrow, pass on exceptions and are cancelled in functions that are patched and
//! reverted. Every exception is caught at its handler and every destructor runs, at any time and after any kill.

use std::path::Path;
use stillpoint_patch_tests::kill_injection::{KillInstant, run, sample};
use stillpoint_patch_tests::victim::{Kind, Phase, Program, Victim, apply, revert, soak, status};
use stillpoint_patch_tests::wait;

/// Options with a long time-out: sixteen threads on two cores, often inside of a patched function, leave it slowly.
const LONG_TIMEOUT: [&str; 2] = ["--timeout", "120s"];
/// Kills of each test without `STILLPOINT_SOAK=1`, which kills after every system call.
const KILLS: usize = 6;

#[track_caller]
fn there(victim: &mut Victim, patch: &Path) {
    victim.announce(Phase::Over(1, 2));
    apply(patch, victim.pid()).args(LONG_TIMEOUT).succeed();
    victim.assert_no_residue();
    victim.assert_settled(2);
}

#[track_caller]
fn back(victim: &mut Victim) {
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).args(LONG_TIMEOUT).succeed();
    victim.assert_settled(1);
    victim.assert_pristine();
}

#[track_caller]
fn cycles(program: &Program, count: u32) {
    let patch = program.patch(2);
    let mut victim = program.start(&["12"]);
    for cycle in 0..count {
        println!("cycle {cycle} of {count}");
        there(&mut victim, &patch);
        back(&mut victim);
    }
    victim.assert_running();
}

#[test]
fn exceptions_in_flight_survive_each_change() {
    cycles(&Program::build("exceptions"), if soak() { 1000 } else { 6 });
}

#[test]
fn exceptions_in_an_executable_at_a_fixed_address() {
    cycles(&Program::build_as("exceptions", Kind::Executable, &[], &[]), if soak() { 200 } else { 2 });
}

/// Links a program with a copy of the unwinder that no loader knows.
#[test]
fn exceptions_by_an_unwinder_of_the_programs_own() {
    cycles(&Program::build_as("exceptions", Kind::Pie, &[], &["-static-libgcc"]), if soak() { 200 } else { 2 });
}

/// Kills after any system call: threads continue to throw, and the next call finishes or undoes. The lookup redirect for
/// unwinders is placed in a process once, so each kill of an apply has a process of its own.
#[test]
fn killed_while_unwinders_are_told() {
    let program = Program::build("exceptions");
    let patch = program.patch(2);
    let victim = program.start(&["3"]);
    victim.announce(Phase::Over(1, 2));
    let whole = run(&apply(&patch, victim.pid()), KillInstant::Never);
    assert_eq!(whole.run.code, Some(0), "{whole}");
    let mut killed = 0;
    for (i, n) in sample(whole.syscalls, KILLS).enumerate() {
        let mut victim = program.start(&["3"]);
        victim.announce(Phase::Over(1, 2));
        let ending = run(&apply(&patch, victim.pid()), KillInstant::AfterSyscalls(n));
        println!("{n}: {ending}");
        killed += usize::from(ending.killed);
        victim.assert_answering();
        victim.assert_no_residue();
        status(victim.pid()).succeed();
        victim.announce(Phase::Either(1, 2));
        if i % 2 == 0 {
            apply(&patch, victim.pid()).args(LONG_TIMEOUT).succeed();
            victim.assert_settled(2);
            victim.announce(Phase::Over(2, 1));
        }
        revert(victim.pid()).args(LONG_TIMEOUT).succeed();
        victim.assert_settled(1);
        victim.assert_pristine();
    }
    assert!(killed >= KILLS / 3, "only {killed} of the runs were killed before their end");
}

#[test]
fn killed_while_unwind_data_is_withdrawn() {
    let program = Program::build("exceptions");
    let patch = program.patch(2);
    let mut victim = program.start(&["3"]);
    there(&mut victim, &patch);
    victim.announce(Phase::Over(2, 1));
    let whole = run(&revert(victim.pid()), KillInstant::Never);
    assert_eq!(whole.run.code, Some(0), "{whole}");
    for n in sample(whole.syscalls, KILLS) {
        victim.assert_settled(1);
        there(&mut victim, &patch);
        victim.announce(Phase::Over(2, 1));
        println!("{n}: {}", run(&revert(victim.pid()), KillInstant::AfterSyscalls(n)));
        victim.assert_answering();
        victim.assert_no_residue();
        victim.announce(Phase::Either(1, 2));
        revert(victim.pid()).args(LONG_TIMEOUT).succeed();
        victim.assert_settled(1);
        victim.assert_pristine();
    }
}

/// Delivers a profiler's signal anywhere: a backtrace from a dispatcher, a displaced prologue or new code reaches the
/// thread's first frame like any other.
#[test]
fn looking_back_from_code_that_no_compiler_wrote() {
    let program = Program::build("profiled");
    let patch = program.patch(2);
    let mut victim = program.start(&[]);
    let looks = |victim: &Victim| (victim.slots()[0].calls, victim.slots()[1].calls);
    wait::until("a look back", || (looks(&victim).0 > 0).then_some(()));
    assert_eq!(looks(&victim).1, 0, "nothing is patched yet");
    // One thread stays in old code: until the time limit every call goes through a dispatcher.
    victim.announce(Phase::OverAndBack(1, 2));
    let lasts = if soak() { "60s" } else { "2s" };
    let given_up = apply(&patch, victim.pid()).args(["--timeout", lasts]).run();
    assert_eq!(given_up.code, Some(4), "{given_up}");
    victim.assert_running();
    let (_, within) = looks(&victim);
    assert!(within > 0, "no signal came in a dispatcher, a displaced prologue or new code");
    println!("{within} looks from code of the patch, {} in all", looks(&victim).0);
    victim.announce(Phase::Over(1, 2));
    victim.command();
    apply(&patch, victim.pid()).args(LONG_TIMEOUT).succeed();
    victim.assert_settled(2);
    let (all, settled) = looks(&victim);
    wait::until("looks from new code", || (looks(&victim).1 > settled + 10).then_some(()));
    back(&mut victim);
    assert!(looks(&victim).0 > all);
}
