//! Functions that sixteen threads call all the time, patched and reverted: no thread sees a mixture, returns to old
//! code or dies.

use std::io::Write;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::victim::{Kind, Phase, Program, Victim, apply, assert_refused, revert, soak, status};
use stillpoint_patch_tests::wait;

/// Options with a long time-out: sixteen threads on two cores, nearly always inside of a patched function, leave it
/// slowly.
const LONG_TIMEOUT: [&str; 2] = ["--timeout", "120s"];

/// Applies and reverts `count` times, and checks all conditions each time.
#[track_caller]
fn cycles(victim: &mut Victim, patch: &std::path::Path, count: u32, options: &[&str]) {
    for cycle in 0..count {
        println!("cycle {cycle} of {count}");
        victim.announce(Phase::Over(1, 2));
        apply(patch, victim.pid()).args(LONG_TIMEOUT).args(options.iter().copied()).succeed();
        victim.assert_no_residue();
        victim.assert_settled(2);
        victim.announce(Phase::Over(2, 1));
        revert(victim.pid()).args(LONG_TIMEOUT).args(options.iter().copied()).succeed();
        victim.assert_settled(1);
        victim.assert_pristine();
    }
    victim.assert_running();
}

#[test]
fn sixteen_threads_see_each_change_once() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let mut victim = program.start(&["16"]);
    cycles(&mut victim, &patch, if soak() { 1000 } else { 8 }, &[]);
}

#[test]
fn a_stripped_executable_at_a_fixed_address_is_patched_alike() {
    let program = Program::build_as("victim", Kind::Executable, &[], &[]).strip();
    let patch = program.patch(2);
    let mut victim = program.start(&["4"]);
    // Without symbols the entries are not known here; the test still checks that the text is the same in the end.
    for _ in 0..if soak() { 20 } else { 2 } {
        victim.there_and_back(&patch);
    }
}

#[test]
fn stopping_all_threads_at_once_is_as_right() {
    // All threads must be outside at the same instant: with the victim's sixteen that never happens.
    let program = Program::build("storm");
    let patch = program.patch(2);
    let mut victim = program.start(&["idle"]);
    cycles(&mut victim, &patch, if soak() { 200 } else { 2 }, &["--quiescence", "stop"]);
}

#[test]
fn prologues_that_are_hard_to_displace() {
    for kind in [Kind::Pie, Kind::Executable] {
        let program = Program::build_as("prologues", kind, &[], &[]);
        let patch = program.patch(2);
        let mut victim = program.start(&["16"]);
        cycles(&mut victim, &patch, if soak() { 300 } else { 3 }, &[]);
    }
}

const WITHOUT_ROOM: [&str; 6] =
    ["-DONE_BYTE", "-DTHREE_BYTES", "-DFOUR_BYTES", "-DJUMP_INSIDE", "-DLOOP_INSIDE", "-DPAGE_CROSSING"];

/// Patches through callers: all callers of a static function are known, so they are patched in its place.
#[test]
fn static_functions_without_room_for_a_jump_are_patched_through_their_callers() {
    for case in WITHOUT_ROOM {
        let program = Program::build_as("short", Kind::Pie, &[case, "-DSTATIC", "-fno-align-functions"], &[]);
        let patch = program.patch(2);
        let mut victim = program.start(&[]);
        if case == "-DPAGE_CROSSING" {
            // Long enough for the builder; apply decides if the first bytes can be written at once.
            there_and_back_or_named(&mut victim, &patch);
        } else {
            cycles(&mut victim, &patch, if soak() { 3 } else { 1 }, &[]);
        }
    }
}

/// Refuses by name: any code may call a global function, and no neighbour is ever overwritten.
#[test]
fn global_functions_without_room_for_a_jump_are_refused_by_name() {
    for case in WITHOUT_ROOM {
        let program = Program::build_as("short", Kind::Pie, &[case, "-fno-align-functions"], &[]);
        let path = program.dir().join("short.patch");
        let built = program.builder(2, &path).run();
        if built.code == Some(0) {
            there_and_back_or_named(&mut program.start(&[]), &path);
        } else {
            assert_refused(&built, "short_function");
            assert!(!path.exists(), "a patch was written all the same");
        }
    }
}

#[track_caller]
fn there_and_back_or_named(victim: &mut Victim, patch: &std::path::Path) {
    let before = victim.snapshot();
    victim.announce(Phase::Over(1, 2));
    let applied = apply(patch, victim.pid()).run();
    if applied.code == Some(0) {
        victim.assert_no_residue();
        victim.assert_settled(2);
        victim.announce(Phase::Over(2, 1));
        revert(victim.pid()).succeed();
    } else {
        assert_refused(&applied, "short_function");
        before.assert_untouched(victim.pid());
    }
    victim.assert_settled(1);
    victim.assert_pristine();
}

#[test]
fn a_second_apply_and_a_second_revert_have_nothing_to_do() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let mut victim = program.start(&["4"]);
    victim.announce(Phase::Over(1, 2));
    apply(&patch, victim.pid()).succeed();
    victim.assert_settled(2);
    let before = victim.snapshot();
    let again = apply(&patch, victim.pid()).succeed();
    assert!(format!("{}{}", again.stdout, again.stderr).contains("already"), "{again}");
    before.assert_untouched(victim.pid());
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).succeed();
    victim.assert_settled(1);
    let before = victim.snapshot();
    revert(victim.pid()).succeed();
    before.assert_untouched(victim.pid());
}

#[test]
fn patches_stack_and_are_replaced_by_one() {
    let program = Program::build("victim");
    let second = program.patch(2);
    let third = program.patch_on_top(&second, 2, 3);
    let cumulative = program.patch(3);
    let mut victim = program.start(&["8"]);
    let pid = victim.pid();
    for _ in 0..if soak() { 50 } else { 2 } {
        let mut step = |tool: Stillpoint, from: u8, to: u8| {
            victim.announce(Phase::Over(from, to));
            tool.args(LONG_TIMEOUT).succeed();
            victim.assert_no_residue();
            victim.assert_settled(to);
        };
        step(apply(&second, pid), 1, 2);
        step(apply(&third, pid), 2, 3);
        step(revert(pid), 3, 2);
        step(apply(&third, pid), 2, 3);
        step(revert(pid).arg("--all"), 3, 1);
        // One patch replaces another, in one transition.
        step(apply(&second, pid), 1, 2);
        step(apply(&cumulative, pid).arg("--replace"), 2, 3);
        let list = status(pid).json().succeed().stdout;
        assert!(list.contains("victim-1-3") && !list.contains("\"name\":\"victim-1-2\""), "{list}");
        step(revert(pid).arg("--all"), 3, 1);
        victim.assert_pristine();
    }
}

/// Applies a patch without the patch that it is based on.
#[test]
fn a_patch_whose_base_is_not_active_is_refused() {
    let program = Program::build("victim");
    let second = program.patch(2);
    let third = program.patch_on_top(&second, 2, 3);
    let mut victim = program.start(&["2"]);
    let before = victim.snapshot();
    assert_refused(&apply(&third, victim.pid()).run(), "victim-1-2");
    before.assert_untouched(victim.pid());
    victim.assert_settled(1);
}

/// Applies a patch that changes the functions of an active one and does not contain its diff, in both orders.
#[test]
fn a_patch_that_would_undo_an_active_one_is_refused() {
    let program = Program::build("victim");
    let (second, other) = (program.patch(2), program.patch(3));
    let mut victim = program.start(&["2"]);
    for (first, to, name, next) in [(&second, 2, "victim-1-2", &other), (&other, 3, "victim-1-3", &second)] {
        victim.announce(Phase::Over(1, to));
        apply(first, victim.pid()).succeed();
        victim.assert_settled(to);
        let before = victim.snapshot();
        assert_refused(&apply(next, victim.pid()).run(), &format!("the change that patch {name} has made"));
        assert_refused(&apply(next, victim.pid()).arg("--dry-run").run(), name);
        let check = Stillpoint::new().args(["patch", "check"]).arg(next).arg("--pid").arg(victim.pid()).run();
        assert!(check.code == Some(3) && check.stderr.contains(&format!("--on-top-of {name}.diff")), "{check}");
        before.assert_untouched(victim.pid());
        victim.assert_settled(to);
        victim.announce(Phase::Over(to, 1));
        revert(victim.pid()).succeed();
    }
}

#[test]
fn looking_touches_nothing() {
    let program = Program::build("victim");
    let patch = program.patch(2);
    let mut victim = program.start(&["4"]);
    let before = victim.snapshot();
    Stillpoint::new().args(["patch", "check"]).arg(&patch).arg("--pid").arg(victim.pid()).succeed();
    apply(&patch, victim.pid()).arg("--dry-run").succeed();
    status(victim.pid()).succeed();
    before.assert_untouched(victim.pid());
    victim.assert_settled(1);
}

#[test]
fn a_thread_inside_an_old_function_keeps_it_until_it_returns() {
    let program = Program::build("blocked");
    let patch = program.patch(2);
    let mut victim = program.start(&[]);
    let sleeper = |victim: &Victim| victim.slots().into_iter().find(|slot| slot.role == "sleeper").expect("a sleeper");
    wait::until("the sleeper to sleep", || reads_standard_input(&victim).then_some(()));

    victim.announce(Phase::Over(1, 2));
    let mut tool = apply(&patch, victim.pid()).args(["--timeout", "60s"]).command().spawn().expect("start the tool");
    // The others migrate although one thread cannot.
    wait::until("all other threads to run the new code", || {
        victim.assert_running();
        assert_eq!(tool.try_wait().expect("ask for the tool"), None, "the tool did not wait for the sleeper");
        let slots = victim.slots();
        slots.iter().filter(|slot| slot.role == "hammer").all(|slot| slot.version == 2).then_some(())
    });
    assert_eq!(sleeper(&victim).calls, 0);
    victim.stdin().write_all(b"x").expect("wake the sleeper");
    wait::until("the sleeper to return", || (sleeper(&victim).calls == 1).then_some(()));
    assert_eq!(sleeper(&victim).version, 1, "the call that began before the patch was answered by the new code");
    // It waits outside of the function now.
    assert!(tool.wait().expect("wait for the tool").success());
    victim.stdin().write_all(b"xx").expect("wake the sleeper");
    wait::until("the sleeper to return again", || (sleeper(&victim).calls == 2).then_some(()));
    assert_eq!(sleeper(&victim).version, 2);
    victim.assert_settled(2);
}

#[test]
fn a_thread_that_does_not_return_in_time_makes_all_go_back() {
    let program = Program::build("blocked");
    let patch = program.patch(2);
    let mut victim = program.start(&[]);
    wait::until("the sleeper to sleep", || reads_standard_input(&victim).then_some(()));
    for _ in 0..if soak() { 100 } else { 3 } {
        victim.announce(Phase::OverAndBack(1, 2));
        let run = apply(&patch, victim.pid()).args(["--timeout", "300ms"]).run();
        assert_eq!(run.code, Some(4), "{run}");
        assert!(run.stderr.contains("stands_here"), "who blocks is not named\n{run}");
        victim.assert_settled(1);
        victim.assert_pristine();
    }
    let check = Stillpoint::new().args(["patch", "check"]).arg(&patch).arg("--pid").arg(victim.pid()).run();
    assert!(format!("{}{}", check.stdout, check.stderr).contains("stands_here"), "check does not predict it\n{check}");
    // Remains of the attempts do not block once the thread has left.
    victim.announce(Phase::Over(1, 2));
    victim.stdin().write_all(b"x").expect("wake the sleeper");
    apply(&patch, victim.pid()).args(LONG_TIMEOUT).succeed();
    victim.assert_settled(2);
}

/// Returns true if a thread of the victim waits in a read of descriptor 0.
fn reads_standard_input(victim: &Victim) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", victim.pid())).expect("list the threads");
    let calls = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("syscall")).ok());
    calls.into_iter().any(|call| call.starts_with("0 0x0 "))
}

#[test]
fn a_contract_between_two_functions_is_kept() {
    let program = Program::build("blocked");
    let patch = program.patch_with(2, &["--off-stack", "transaction"]);
    let mut victim = program.start(&["--contract"]);
    for _ in 0..if soak() { 400 } else { 4 } {
        victim.announce(Phase::Over(1, 2));
        apply(&patch, victim.pid()).succeed();
        victim.assert_settled(2);
        victim.announce(Phase::Over(2, 1));
        revert(victim.pid()).succeed();
        victim.assert_settled(1);
    }
    victim.assert_pristine();
}
