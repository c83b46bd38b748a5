//! Targets that act on themselves in every way while they are patched, reverted, and recovered from an abort.

use rustix::process::Signal;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::kill_injection::{KillInstant, run};
use stillpoint_patch_tests::server::bound_command;
use stillpoint_patch_tests::victim::{Phase, Program, Victim, apply, assert_refused, revert, soak};
use stillpoint_patch_tests::{skip, wait};

/// Returns the number of patches and reverts of each storm.
fn rounds() -> u32 {
    if soak() { 200 } else { 3 }
}

fn storm() -> (Program, PathBuf) {
    let program = Program::build("storm");
    let patch = program.patch(2);
    (program, patch)
}

/// Applies, reverts, and applies without any time to finish (which may abort, or finish in time).
#[track_caller]
fn endure(mode: &str) {
    let (program, patch) = storm();
    let mut victim = program.start(&[mode]);
    for round in 0..rounds() {
        println!("{mode}: round {round}");
        victim.announce(Phase::Over(1, 2));
        apply(&patch, victim.pid()).succeed();
        victim.assert_no_residue();
        victim.assert_settled(2);
        victim.announce(Phase::Over(2, 1));
        revert(victim.pid()).succeed();
        victim.assert_settled(1);
        victim.assert_pristine();
        abort_or_apply(&mut victim, &patch);
    }
}

#[track_caller]
fn abort_or_apply(victim: &mut Victim, patch: &std::path::Path) {
    victim.announce(Phase::OverAndBack(1, 2));
    let hasty = apply(patch, victim.pid()).args(["--timeout", "1ms"]).run();
    match hasty.code {
        Some(4) => victim.assert_settled(1),
        Some(0) => {
            victim.assert_settled(2);
            victim.announce(Phase::Over(2, 1));
            revert(victim.pid()).succeed();
            victim.assert_settled(1);
        }
        _ => panic!("{hasty}"),
    }
    victim.assert_pristine();
}

#[test]
fn threads_are_created_and_end() {
    endure("threads");
}

#[test]
fn children_are_forked() {
    endure("fork");
}

#[test]
fn children_are_vforked_and_spawned() {
    endure("vfork");
}

#[test]
fn io_uring_has_kernel_workers_among_the_threads() {
    if std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|v| v.trim() != "0") {
        stillpoint_patch_tests::skip!("io_uring is disabled on this machine");
    }
    endure("uring");
}

#[test]
fn handlers_run_on_alternate_stacks() {
    endure("altstack");
}

#[test]
fn frames_are_left_by_longjmp() {
    endure("longjmp");
}

#[test]
fn sigtrap_is_blocked_and_ignored() {
    endure("sigtrap");
}

/// Stops the target by job control before, during and after: it stays stopped until it is continued, and is patched or
/// refused by name; in both cases it continues on the reported side.
#[test]
fn the_target_is_stopped_and_continued() {
    let (program, patch) = storm();
    let mut victim = program.start(&["idle"]);
    let stopped = |victim: &Victim| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", victim.pid())).expect("read the status");
        status.lines().any(|line| line.starts_with("State:\tT"))
    };
    for round in 0..rounds() {
        victim.announce(Phase::Either(1, 2));
        let mut tool = apply(&patch, victim.pid()).args(["--timeout", "5s"]).command();
        tool.stderr(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        let before = round % 2 == 0;
        if before {
            victim.process().signal(Signal::STOP);
            wait::until("the target to stop", || stopped(&victim).then_some(()));
        }
        let mut tool = tool.spawn().expect("start the tool");
        if !before {
            std::thread::sleep(Duration::from_millis(u64::from(round) * 2));
            victim.process().signal(Signal::STOP);
        }
        let code = tool.wait().expect("wait for the tool").code().expect("the tool exits");
        wait::until("the target to be stopped still", || stopped(&victim).then_some(()));
        victim.process().signal(Signal::CONT);
        match code {
            0 => victim.assert_settled(2),
            1 | 3 | 4 => victim.assert_settled(1),
            other => panic!("exit {other}"),
        }
        victim.assert_no_residue();
        victim.announce(Phase::Either(1, 2));
        revert(victim.pid()).succeed();
        victim.assert_settled(1);
        victim.assert_pristine();
    }
}

/// Returns the instants, relative to an apply, at which the target acts.
fn instants(victim: &Victim, patch: &std::path::Path) -> Vec<Duration> {
    victim.announce(Phase::Either(1, 2));
    let start = Instant::now();
    apply(patch, victim.pid()).succeed();
    let whole = start.elapsed();
    let count = 50;
    (0..count).map(|i| whole.mul_f64(f64::from(i) / f64::from(count))).collect()
}

/// Executes another program in the target while it is patched: the tool reports this or has finished before, and the
/// new program is unchanged.
#[test]
fn the_target_executes_another_program() {
    let (program, patch) = storm();
    let mut victim = program.start(&["exec"]);
    for instant in instants(&victim, &patch) {
        victim.announce(Phase::Either(1, 2));
        revert(victim.pid()).succeed();
        let mut tool = apply(&patch, victim.pid()).command();
        tool.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
        let tool = tool.spawn().expect("start the tool");
        std::thread::sleep(instant);
        let slots = victim.slots().len();
        victim.command();
        let output = tool.wait_with_output().expect("wait for the tool");
        wait::until("the new program to start", || (victim.slots().len() > slots).then_some(()));
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 1 | 3 | 4)), "{code:?}: {}", String::from_utf8_lossy(&output.stderr));
        if code != Some(0) {
            assert!(!output.stderr.is_empty(), "exit {code:?} without a word");
        }
        // The former threads are gone; those of the new program count on in new slots.
        let residue = stillpoint_patch_tests::victim::residue(victim.pid());
        assert!(residue.is_empty(), "left behind: {residue:#?}");
        victim.assert_running();
        // The patch may have reached the old program or the new one, depending on timing.
        apply(&patch, victim.pid()).succeed();
    }
}

#[test]
fn the_target_exits() {
    let (program, patch) = storm();
    let instants = instants(&program.start(&["exit"]), &patch);
    for instant in instants {
        let mut victim = program.start(&["exit"]);
        victim.announce(Phase::Over(1, 2));
        let mut tool = apply(&patch, victim.pid()).command();
        tool.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
        let tool = tool.spawn().expect("start the tool");
        std::thread::sleep(instant);
        victim.command();
        let ended = wait::until("the target to exit", || victim.process().ended());
        assert_eq!(ended.code(), Some(7), "the target did not end by itself: {ended}");
        let output = tool.wait_with_output().expect("wait for the tool");
        let code = output.status.code();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(code, Some(0 | 1 | 3)), "{code:?}: {text}");
        assert!(code == Some(0) || text.starts_with("error: "), "{code:?}: {text}");
        victim.assert_consistent();
    }
}

/// Combines the two worst events: the tool dies in the middle of a storm of threads and forks.
#[test]
fn the_tool_dies_in_a_storm() {
    let (program, patch) = storm();
    for mode in ["threads", "fork", "vfork", "uring", "altstack", "sigtrap"] {
        let mut victim = program.start(&[mode]);
        victim.announce(Phase::Either(1, 2));
        // Counting makes the tool slow, but it must still complete. A thread that sends signals to itself in a patched
        // function is stopped there as long as it takes to pass them on.
        let whole = match mode {
            "altstack" => run(&apply(&patch, victim.pid()), KillInstant::AfterSyscalls(100_000)),
            _ => run(&apply(&patch, victim.pid()), KillInstant::Never),
        };
        assert!(whole.killed || whole.run.code == Some(0), "{mode}: {whole}");
        let total = whole.syscalls;
        let count = if soak() { 100 } else { 4 };
        for i in 0..count {
            revert(victim.pid()).succeed();
            let ending =
                run(&apply(&patch, victim.pid()), KillInstant::AfterSyscalls(total * (2 * i + 1) / (2 * count)));
            println!("{mode}: {ending}");
            victim.assert_answering();
            victim.assert_no_residue();
            apply(&patch, victim.pid()).succeed();
        }
        victim.announce(Phase::Over(2, 1));
        revert(victim.pid()).succeed();
        victim.assert_settled(1);
        victim.assert_pristine();
    }
}

#[test]
fn coroutines_of_the_c_library_are_waited_for_if_all_memory_can_be_searched() {
    let program = Program::build("coroutine");
    let patch = program.patch(2);
    let mut victim = program.start(&[]);
    victim.announce(Phase::Over(1, 2));
    let applied = apply(&patch, victim.pid()).succeed();
    assert!(applied.stderr.contains("no suspended frame runs old code: it imports "), "{applied}");
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).succeed();
    victim.assert_settled(1);
    let mut large = program.start(&["1100"]);
    let before = large.snapshot();
    assert_refused(&apply(&patch, large.pid()).run(), "MiB may hold suspended frames");
    before.assert_untouched(large.pid());
    large.assert_settled(1);
    large.announce(Phase::Over(1, 2));
    apply(&patch, large.pid()).arg("--allow-suspended-frames").succeed();
}

/// Runs a coroutine that no import reveals and that is suspended in the function that changes.
#[test]
fn a_coroutine_of_the_program_s_own_is_waited_for() {
    let program = Program::build("fiber").strip();
    let patch = program.patch(2);
    let mut victim = program.start(&[]);
    for quiescence in ["probe", "stop"] {
        victim.announce(Phase::OverAndBack(1, 2));
        let run = apply(&patch, victim.pid()).args(["--timeout", "500ms", "--quiescence", quiescence]).run();
        assert!(run.code != Some(0) && run.stderr.contains("suspends, on a suspended stack"), "{run}");
        victim.assert_no_residue();
        victim.assert_settled(1);
    }
    let check = Stillpoint::new().args(["patch", "check"]).arg(&patch).arg("--pid").arg(victim.pid().to_string()).run();
    assert!(check.stdout.contains("suspends, on a suspended stack"), "{check}");
    let mut other = program.start(&[]);
    other.announce(Phase::Over(1, 2));
    let allowed = apply(&patch, other.pid()).arg("--allow-suspended-frames").succeed();
    assert!(allowed.stderr.contains("old code may continue to run in suspends"), "{allowed}");
    other.assert_settled(2);
    victim.command();
    victim.announce(Phase::Over(1, 2));
    apply(&patch, victim.pid()).succeed();
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).succeed();
    victim.assert_settled(1);
    victim.assert_no_residue();
}

/// Fills a control group: the kernel kills a process in it when it or a tool touches another of its pages.
#[test]
fn a_patch_that_a_group_s_memory_has_no_room_for_is_refused() {
    let hierarchy = std::path::Path::new("/sys/fs/cgroup/memory");
    let group = hierarchy.join(format!("sp-memory-{}", std::process::id()));
    if !hierarchy.join("memory.limit_in_bytes").exists() || std::fs::create_dir(&group).is_err() {
        skip!("no memory control group of version 1 can be made")
    }
    let (program, patch) = storm();
    let enter = format!("echo $$ >'{}' && exec \"$@\"", group.join("cgroup.procs").display());
    let wrap = |elf: &std::path::Path| {
        let mut command = bound_command(std::path::Path::new("sh"));
        command.args(["-c", &enter, "sh"]).arg(elf);
        command
    };
    let mut victim = program.start_in(wrap, &["idle"]);
    let read = |name: &str| std::fs::read_to_string(group.join(name)).expect("read a group");
    // as full as possible
    let fill = || {
        std::fs::write(group.join("memory.force_empty"), "0").ok();
        std::fs::write(group.join("memory.limit_in_bytes"), read("memory.usage_in_bytes").trim()).ok()
    };
    wait::until("the group to be full", fill);
    assert_refused(&apply(&patch, victim.pid()).run(), "KiB left");
    victim.assert_settled(1);
    std::fs::write(group.join("memory.limit_in_bytes"), "-1").expect("take the limit away");
    victim.announce(Phase::Over(1, 2));
    apply(&patch, victim.pid()).succeed();
    victim.assert_settled(2);
    drop(victim);
    wait::until("the group to be empty", || std::fs::remove_dir(&group).ok());
}
