//! Programs that announce their quiescence points, patched in each mode: the promise of a mode is kept, and a request
//! that it cannot meet is refused.

use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use stillpoint_events::{EventKind, patch};
use stillpoint_patch_tests::quiescence_program::{flags, in_mode, libstillpoint, program, there_and_back};
use stillpoint_patch_tests::victim::{Kind, Phase, Program, Victim, apply, assert_refused, revert, soak, status};
use stillpoint_patch_tests::wait;

fn cycles() -> u32 {
    if soak() { 500 } else { 6 }
}

/// Promise of each mode to a thread of `points.c` between two of its points.
const MODES: [(&str, &str); 5] =
    [("probe", "none"), ("local", "alone"), ("group:a", "group"), ("global", "all"), ("stop", "none")];

#[test]
fn each_mode_keeps_its_promise() {
    let program = program("points");
    let patch = program.patch_with(2, &["--scope", "thread-local"]);
    for (mode, promise) in MODES {
        if mode == "stop" {
            continue; // its workers are hardly ever all outside at one instant
        }
        let mut victim = program.start(&[promise, "6"]);
        there_and_back(&mut victim, &patch, mode, cycles());
        victim.assert_no_residue();
        victim.assert_pristine();
    }
}

/// Uses one mode after the other: a transition in one mode does not restrict the mode of the next.
#[test]
fn modes_follow_each_other_in_one_process() {
    let program = program("points");
    let patch = program.patch(2);
    let mut victim = program.start(&["none", "4"]);
    for _ in 0..if soak() { 50 } else { 3 } {
        for mode in ["global", "probe", "group:b", "local"] {
            there_and_back(&mut victim, &patch, mode, 1);
        }
    }
    victim.assert_pristine();
}

#[track_caller]
fn refused(victim: &mut Victim, patch: &Path, mode: &str, thing: &str) {
    let carried = |victim: &Victim| {
        let line = status(victim.pid()).json().succeed().json().remove(0);
        (line["bytes_kept"].clone(), line["ledger_bytes"].clone())
    };
    let before = carried(victim);
    assert_refused(&in_mode(apply(patch, victim.pid()), mode, "5s").run(), thing);
    assert_eq!(carried(victim), before, "a refusal touched the target");
    victim.assert_pristine();
    victim.assert_running();
}

#[test]
fn a_mode_weaker_than_the_scope_is_refused_for_apply_and_revert() {
    let program = program("points");
    for (scope, weak, strong) in [
        ("thread-group", &["probe", "local"][..], &["group:a", "global"][..]),
        ("process", &["probe", "local", "group:a"], &["global"]),
    ] {
        let patch = program.patch_with(2, &["--scope", scope]);
        let mut victim = program.start(&["none", "4"]);
        for mode in weak {
            refused(&mut victim, &patch, mode, "must not run at the same time");
        }
        for mode in strong {
            victim.announce(Phase::Over(1, 2));
            in_mode(apply(&patch, victim.pid()), mode, "60s").succeed();
            for weak in weak {
                assert_refused(&in_mode(revert(victim.pid()), weak, "5s").run(), "must not run at the same time");
            }
            victim.assert_settled(2);
            victim.announce(Phase::Over(2, 1));
            in_mode(revert(victim.pid()), mode, "60s").succeed();
            victim.assert_settled(1);
        }
    }
}

#[test]
fn a_mode_without_points_to_work_with_is_refused_by_name() {
    let plain = Program::build("storm");
    let patch = plain.patch(2);
    let mut victim = plain.start(&["idle"]);
    for mode in ["local", "group:a", "global"] {
        refused(&mut victim, &patch, mode, "no libstillpoint");
    }
    let program = program("points");
    let patch = program.patch(2);
    refused(&mut program.start(&["none", "2"]), &patch, "group:zebras", "no thread of the group zebras");
}

/// Preloads a library: the tool uses its word, which saves the search for one in all threads.
#[test]
fn a_preloaded_library_lends_its_word_and_has_no_points() {
    let plain = Program::build("storm");
    let patch = plain.patch(2);
    let library = libstillpoint().join("libstillpoint.so.1");
    let preloaded = |path: &Path| {
        let mut command = stillpoint_patch_tests::server::bound_command(path);
        command.env("LD_PRELOAD", &library);
        command
    };
    let mut victim = plain.start_in(preloaded, &["idle"]);
    refused(&mut victim, &patch, "local", "never called sp_init");
    let applied = |victim: &mut Victim| {
        victim.announce(Phase::Over(1, 2));
        let run = apply(&patch, victim.pid()).json().succeed();
        victim.assert_settled(2);
        run.events()
            .iter()
            .filter(
                |e| matches!(&e.kind, EventKind::Patch(patch::Event::ThreadStopped { reason, .. }) if reason == "check"),
            )
            .count()
    };
    assert_eq!(applied(&mut victim), 0, "threads were stopped to look for a word");
    assert!(applied(&mut plain.start(&["idle"])) > 0, "without the library they are");
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).succeed();
    victim.assert_settled(1);
}

/// Runs a server that was started before the upgrade of the tool.
#[test]
fn a_library_of_another_version_is_refused_by_name() {
    let plain = Program::build("storm");
    let (source, library) = (plain.dir().join("other.c"), plain.dir().join("libstillpoint.so.1"));
    let text = "struct { char magic[16]; unsigned size, version; char rest[400]; } sp_control = {\"STILLPOINT-CTRL\", 424, 7, {0}};\n";
    std::fs::write(&source, text).expect("write the source");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(made.expect("run cc").success());
    let patch = plain.patch(2);
    let preloaded = |path: &Path| {
        let mut command = stillpoint_patch_tests::server::bound_command(path);
        command.env("LD_PRELOAD", &library);
        command
    };
    let mut victim = plain.start_in(preloaded, &["idle"]);
    refused(&mut victim, &patch, "local", "control blocks of version 7");
    victim.there_and_back(&patch);
}

/// Preloads the library into a program that calls sp_init: the process has one copy of it.
#[test]
fn a_program_with_the_library_may_be_preloaded_too() {
    let program = program("points");
    let patch = program.patch(2);
    let library = libstillpoint().join("libstillpoint.so.1");
    for (mode, promise) in [("global", "all"), ("probe", "none")] {
        let preloaded = |path: &Path| {
            let mut command = stillpoint_patch_tests::server::bound_command(path);
            command.env("LD_PRELOAD", &library);
            command
        };
        let mut victim = program.start_in(preloaded, &[promise, "4"]);
        there_and_back(&mut victim, &patch, mode, 2);
    }
}

/// Links statically, and strips: the tool finds the control block in the data.
#[test]
fn a_stripped_program_with_the_library_inside_has_its_points() {
    let (include, _) = flags();
    let archive = libstillpoint().join("libstillpoint.a");
    let link = [archive.to_str().expect("a path in UTF-8")];
    let program = Program::build_as("points", Kind::Pie, &[&include], &link).strip();
    let patch = program.patch(2);
    let mut victim = program.start(&["all", "4"]);
    there_and_back(&mut victim, &patch, "global", 3);
}

/// Patches a program before it has the library, which it loads later and closes again: the word that was chosen first
/// stays. Meanwhile it forks children, which are not requested to migrate.
#[test]
fn a_library_that_comes_late_writes_the_word_that_was_chosen_before() {
    let (include, _) = flags();
    let program = Program::build_as("late_library", Kind::Pie, &[&include], &[]);
    let patch = program.patch(2);
    let library = libstillpoint().join("libstillpoint.so.1");
    let mut victim = program.start(&[library.to_str().expect("a path in UTF-8")]);
    there_and_back(&mut victim, &patch, "probe", 1);
    refused(&mut victim, &patch, "local", "no libstillpoint");
    victim.command();
    wait::until("the threads to register", || {
        let line = status(victim.pid()).json().succeed().json().into_iter().next()?;
        (line["points"]["registered"] == 3).then_some(())
    });
    for mode in ["local", "global", "probe"] {
        there_and_back(&mut victim, &patch, mode, cycles().min(50));
    }
    victim.assert_pristine();
}

/// Reproduces the example of the paper: without priorities and parking the listener stops first, and no worker gets
/// work any more. No harm is done: all threads continue at the deadline.
#[test]
fn a_pool_without_priorities_dead_locks_and_is_let_go() {
    let program = program("pool");
    let patch = program.patch(2);
    let mut victim = program.start(&["careless"]);
    for _ in 0..if soak() { 20 } else { 3 } {
        let run = in_mode(apply(&patch, victim.pid()), "global", "500ms").run();
        assert_eq!(run.code, Some(4), "{run}");
        assert!(run.stderr.contains("quiescence point of \"worker\""), "{run}");
        victim.assert_settled(1);
        victim.assert_no_residue();
        victim.assert_pristine();
    }
    there_and_back(&mut victim, &patch, "local", 1);
}

#[test]
fn a_pool_with_priorities_and_parking_never_does() {
    let program = program("pool");
    let patch = program.patch(2);
    let mut victim = program.start(&["careful"]);
    there_and_back(&mut victim, &patch, "global", if soak() { 1000 } else { 8 });
    there_and_back(&mut victim, &patch, "group:pool", if soak() { 200 } else { 2 });
    victim.assert_pristine();
}

/// Returns threads of a role in a line of `status --json`.
fn of_role(line: &Value, role: &str) -> Vec<Value> {
    let threads = line["threads"].as_array().expect("threads");
    threads.iter().filter(|thread| thread["name"] == role).cloned().collect()
}

fn stands(thread: &Value) -> bool {
    thread["state"] == "blocked" && thread["blocks"] == false
}

fn blocks(thread: &Value) -> bool {
    thread["state"] == "active" && thread["blocks"] == true
}

/// Returns name, group and priority of each participating thread that stays, as in `status --json`.
fn roles(line: &Value) -> Vec<(String, Value, u64)> {
    let threads = line["threads"].as_array().expect("threads").iter().filter(|thread| !thread["name"].is_null());
    let role = |thread: &Value| {
        let name = thread["name"].as_str().expect("a name").to_owned();
        (name, thread["group"].clone(), thread["priority"].as_u64().expect("a number"))
    };
    let mut roles: Vec<_> = threads.map(role).filter(|(name, ..)| name != "mayfly").collect();
    roles.sort_by_key(|(name, group, _)| (name.clone(), group.to_string()));
    roles
}

/// Checks status before a patch, with one applied at points, and after one applied by probing.
#[test]
fn status_tells_role_group_priority_state_and_generation() {
    let program = program("points");
    let patch = program.patch(2);
    let mut victim = program.start(&["none", "4"]);
    let look = |victim: &Victim| status(victim.pid()).json().succeed().json().remove(0);
    let (none, group) = (Value::Null, |name: &str| Value::from(name));
    let worker = |name| ("worker".to_owned(), group(name), 0);
    let wanted = vec![
        ("listener".to_owned(), none.clone(), 2),
        ("parked".to_owned(), none.clone(), 0),
        ("sleeper".to_owned(), none.clone(), 1),
        worker("a"),
        worker("a"),
        worker("b"),
        worker("b"),
    ];
    let idle = wait::until("all threads to take their roles, and one to park", || {
        let line = look(&victim);
        (roles(&line) == wanted && of_role(&line, "parked")[0]["state"] == "parked").then_some(line)
    });
    assert_eq!((&idle["generation"], &idle["points"]["priorities"]), (&Value::from(0), &Value::from(3)), "{idle}");
    for thread in ["listener", "sleeper", "worker", "parked"].iter().flat_map(|role| of_role(&idle, role)) {
        assert!(thread["transition"].is_null() && thread["blocks"] == false, "nothing was ever asked: {thread}");
    }
    // A parked thread counts as quiescent, and takes no transition before it returns.
    victim.announce(Phase::Over(1, 2));
    in_mode(apply(&patch, victim.pid()), "local", "60s").succeed();
    victim.assert_settled(2);
    let patched = look(&victim);
    assert_eq!(roles(&patched), wanted);
    assert!(patched["generation"].as_u64() > Some(0), "{patched}");
    for thread in ["listener", "sleeper", "worker"].iter().flat_map(|role| of_role(&patched, role)) {
        assert_eq!(thread["transition"], patched["generation"], "{thread}");
        assert_eq!(thread["blocks"], false, "{thread}");
    }
    let parked = &of_role(&patched, "parked")[0];
    assert!(parked["state"] == "parked" && parked["transition"].is_null(), "{parked}");
    // A probe also inspects parked threads.
    victim.announce(Phase::Over(2, 1));
    in_mode(revert(victim.pid()), "probe", "60s").succeed();
    victim.assert_settled(1);
    let reverted = look(&victim);
    assert!(reverted["generation"].as_u64() > patched["generation"].as_u64(), "{reverted}");
    for thread in ["listener", "sleeper", "worker", "parked"].iter().flat_map(|role| of_role(&reverted, role)) {
        assert_eq!(thread["transition"], reverted["generation"], "{thread}");
    }
}

/// Parks waiting workers of a pool; the threads that hand out work stop last.
#[test]
fn status_tells_who_is_parked_and_who_stands_last() {
    let program = program("pool");
    let victim = program.start(&["careful"]);
    let line = wait::until("the roles, and two workers to be parked", || {
        let line = status(victim.pid()).json().succeed().json().remove(0);
        let parked = of_role(&line, "worker").iter().filter(|thread| thread["state"] == "parked").count();
        let last = ["listener", "timer"].iter().flat_map(|role| of_role(&line, role)).all(|t| t["priority"] == 1);
        (parked >= 2 && last).then_some(line)
    });
    for thread in of_role(&line, "worker") {
        assert!(thread["group"] == "pool" && thread["priority"] == 0 && thread["blocks"] == false, "{thread}");
    }
}

/// Reads the status with another tool while one waits: it lists the stopped and the blocking threads.
#[test]
fn status_tells_who_stands_and_who_blocks() {
    let program = program("pool");
    let patch = program.patch(2);
    let mut victim = program.start(&["careless"]);
    let idle = status(victim.pid()).json().succeed();
    let of = |role| of_role(&idle.json()[0], role).len();
    assert_eq!((of("worker"), of("listener"), of("timer")), (4, 1, 1), "{idle}");
    let in_pool = |thread: &Value| thread["group"] == "pool" && thread["priority"] == 0;
    let mut tool = in_mode(apply(&patch, victim.pid()), "global", "100s").command().spawn().expect("start the tool");
    // The threads that hand out work are stopped; some workers with remaining work may be, too; at least two wait for
    // ever.
    wait::until("the workers to wait for the listener, and the listener for them", || {
        let run = status(victim.pid()).json().run();
        let line = run.json().into_iter().next()?;
        let asked = &line["points"]["request"];
        let awaited = asked["awaited"].as_u64()?;
        let workers = of_role(&line, "worker");
        let others: Vec<_> = ["listener", "timer"].iter().flat_map(|role| of_role(&line, role)).collect();
        let seen = asked["mode"] == "global"
            && asked["standing"] == 6 - awaited
            && awaited >= 2
            && asked["group"].is_null()
            && workers.iter().all(in_pool)
            && others.iter().all(stands)
            && others.iter().all(|thread| thread["group"].is_null() && thread["priority"] == 0)
            && workers.iter().all(|thread| stands(thread) || blocks(thread))
            && workers.iter().filter(|thread| blocks(thread)).count() as u64 == awaited;
        seen.then_some(())
    });
    tool.kill().expect("kill the tool");
    tool.wait().expect("the tool ends");
    // the next call undoes it at once, long before the deadline
    let before = std::time::Instant::now();
    victim.announce(Phase::Over(1, 2));
    in_mode(apply(&patch, victim.pid()), "local", "30s").succeed();
    assert!(before.elapsed() < Duration::from_secs(50), "took {:?}", before.elapsed());
    victim.assert_settled(2);
}
