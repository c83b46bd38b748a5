//! Debian's redis with quiescence points (`crates/patch/integrations/redis`): every mode, with all activities of redis
//! outside of its main loop in progress.

use std::process::Stdio;
use std::sync::OnceLock;
use stillpoint_patch_tests::resp::{Client, Reply};
use stillpoint_patch_tests::series::Series;
use stillpoint_patch_tests::server::{ChildGuard, Redis, bound_command};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_patch_tests::victim::{apply, residue, revert, soak, status};
use stillpoint_patch_tests::{annotation, effects, packages, skip, wait};

/// Fixes in the code of commands, of replies (which I/O threads send) and of access control.
const DIFFS: [&str; 3] = ["Apply-security-fixes-for-CVEs-1113", "Limiting-output-buffer", "CVE-2025-67733"];

fn redis() -> &'static Result<Series, stillpoint_patch_tests::Unavailable> {
    static BUILT: OnceLock<Result<Series, stillpoint_patch_tests::Unavailable>> = OnceLock::new();
    BUILT.get_or_init(|| Series::annotated(&DIFFS, &mut |text| println!("{text}")))
}

fn rounds(short: u32) -> u32 {
    if soak() { short * 20 } else { short }
}

/// Sends requests and asserts that the fixes are active or not.
#[track_caller]
fn assert_fixed(port: u16, fixed: bool) {
    for effect in DIFFS.iter().flat_map(|diff| effects::of_diff(diff)) {
        let answer = effect.ask(port).expect("redis answers");
        assert_eq!(answer.fixed, fixed, "{}: {}", effect.request, answer.text);
    }
}

/// Applies all patches in this mode, and reverts them in this mode.
#[track_caller]
fn there_and_back(redis: &mut Redis, series: &Series, load: &MonitoredLoad, mode: &str) {
    let (pid, port) = (redis.pid(), redis.port());
    for patch in &series.patches {
        apply(&patch.file, pid).args(["--quiescence", mode]).succeed();
    }
    redis.assert_running();
    assert_fixed(port, true);
    load.answered(100);
    status(pid).succeed();
    for _ in &series.patches {
        revert(pid).args(["--quiescence", mode]).succeed();
    }
    redis.assert_running();
    assert_fixed(port, false);
    load.answered(100);
    assert_eq!(residue(pid), Vec::<String>::new());
}

#[track_caller]
fn ask(client: &mut Client, words: &[&str]) -> Reply {
    client.command(words).expect("redis answers")
}

/// Returns a field of INFO.
#[track_caller]
fn info(client: &mut Client, field: &str) -> String {
    let text = ask(client, &["INFO", "everything"]).text().to_owned();
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.unwrap_or_else(|| panic!("INFO has no {field}: {text}")).to_owned()
}

/// Uses local, group and global quiescence and probing; meanwhile clients block, scripts run, a transaction is open,
/// data is saved, the append-only file is rewritten, and a replica follows.
#[test]
fn redis_changes_over_in_every_mode() {
    let series = match redis() {
        Ok(series) => series,
        Err(why) => skip!(why),
    };
    let mut redis = Redis::start(&series.binary, &["--appendonly", "yes", "--repl-diskless-sync-delay", "0"]);
    redis.populate(20_000);
    let port = redis.port().to_string();
    let mut replica = Redis::start(&series.binary, &["--replicaof", "127.0.0.1", &port]);
    let mut follower = replica.client();
    wait::until("the replica to follow", || (info(&mut follower, "master_link_status") == "up").then_some(()));
    let load = MonitoredLoad::redis(redis.port());
    let (mut client, mut transaction) = (redis.client(), redis.client());
    let mut increments = 0;
    for _ in 0..rounds(1) {
        for (i, mode) in ["probe", "local", "group:bio", "global"].into_iter().enumerate() {
            assert_eq!(ask(&mut transaction, &["MULTI"]).text(), "OK");
            assert_eq!(ask(&mut transaction, &["INCR", "in-flight"]).text(), "QUEUED");
            let background = if i % 2 == 0 { "BGSAVE" } else { "BGREWRITEAOF" };
            // One may still be in progress: then redis postpones or refuses this one.
            ask(&mut client, &[background]);
            // Work for the thread that frees memory.
            ask(&mut client, &["EVAL", "for i = 1, 5000 do redis.call('RPUSH', 'long', i) end", "0"]);
            assert_eq!(ask(&mut client, &["UNLINK", "long"]), Reply::Integer(1));
            there_and_back(&mut redis, series, &load, mode);
            replica.assert_running();
            increments += 1;
            ask(&mut client, &["SET", "in-flight", &(increments - 1).to_string()]);
            let Reply::Array(results) = ask(&mut transaction, &["EXEC"]) else { panic!("EXEC was refused") };
            assert_eq!(results, [Reply::Integer(increments)], "{mode}");
        }
    }
    load.assert_clean();
    wait::until("the background work to end", || {
        let mut is = |field, value| info(&mut client, field) == value;
        (is("rdb_bgsave_in_progress", "0") && is("aof_rewrite_in_progress", "0")).then_some(())
    });
    assert_eq!(info(&mut client, "rdb_last_bgsave_status"), "ok");
    assert_eq!(info(&mut client, "aof_last_bgrewrite_status"), "ok");
    assert_eq!(info(&mut client, "connected_slaves"), "1");
    let size = ask(&mut client, &["DBSIZE"]);
    wait::until("the replica to catch up", || (ask(&mut follower, &["DBSIZE"]) == size).then_some(()));
}

/// Starts closed-loop load that keeps more answers pending than are possible with sleeping I/O threads.
fn busy(series: &Series, port: u16) -> ChildGuard {
    let mut command =
        bound_command(&packages::redis(None).expect("the packages are there").path.with_file_name("redis-benchmark"));
    command.args(["-p", &port.to_string(), "-c", "32", "-n", "1000000000", "-r", "1000", "-q", "-t", "set"]);
    command.envs(series.binary.environment()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ChildGuard::from_child(command.spawn().expect("start redis-benchmark"))
}

/// Uses I/O threads that work, sleep, and spin in between: as a group of their own, and with all others.
#[test]
fn io_threads_change_over_in_every_mode() {
    let series = match redis() {
        Ok(series) => series,
        Err(why) => skip!(why),
    };
    let mut redis = Redis::start(&series.binary, &["--io-threads", "3", "--io-threads-do-reads", "yes"]);
    let part = ["bio_aof_fsync", "bio_close_file", "bio_lazy_free", "io_thd_1", "io_thd_2", "main"];
    wait::until("all threads to take part", || (annotation::taking_part(redis.pid()) == part).then_some(()));
    let load = MonitoredLoad::redis(redis.port());
    let mut client = redis.client();
    for busy_too in [true, false] {
        let closed_loop = busy_too.then(|| busy(series, redis.port()));
        let read = |client: &mut Client| info(client, "io_threaded_reads_processed").parse::<u64>().expect("a number");
        let before = read(&mut client);
        if busy_too {
            wait::until("I/O threads to read", || (read(&mut client) > before).then_some(()));
        }
        for _ in 0..rounds(1) {
            for mode in ["probe", "local", "group:io", "global"] {
                there_and_back(&mut redis, series, &load, mode);
            }
        }
        drop(closed_loop);
    }
    load.assert_clean();
}

/// Requests a mode that needs a group which the program lacks: the error names it, and the program is unchanged.
#[test]
fn an_unknown_group_is_refused_by_name() {
    let series = match redis() {
        Ok(series) => series,
        Err(why) => skip!(why),
    };
    let redis = Redis::start(&series.binary, &[]);
    let run = apply(&series.first().file, redis.pid()).args(["--quiescence", "group:workers"]).run();
    assert_eq!(run.code, Some(3), "{run}");
    assert!(run.stderr.contains("no thread of the group workers; it has the groups bio"), "{run}");
    assert_eq!(residue(redis.pid()), Vec::<String>::new());
}

/// Runs a script longer than the tool waits: the request is aborted, no thread stays stopped, and the next request
/// succeeds.
#[test]
fn a_long_script_outlasts_a_request() {
    let series = match redis() {
        Ok(series) => series,
        Err(why) => skip!(why),
    };
    let mut redis = Redis::start(&series.binary, &["--busy-reply-threshold", "100"]);
    let (pid, mut client) = (redis.pid(), redis.client());
    let patch = &series.first().file;
    client.send(&["EVAL", "while redis.call('EXISTS', 'no-such-key') == 0 do end", "0"]).expect("send a script");
    wait::until("the script to be under way", || {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("redis runs");
        state.contains(") R ").then_some(())
    });
    for mode in ["local", "global"] {
        let run = apply(patch, pid).args(["--quiescence", mode, "--timeout", "500ms"]).run();
        assert_eq!(run.code, Some(4), "{run}");
        assert!(run.stderr.contains("main"), "it says who was awaited: {run}");
        assert_eq!(residue(pid), Vec::<String>::new());
    }
    assert_eq!(redis.client().command(&["SCRIPT", "KILL"]).expect("redis answers").text(), "OK");
    assert!(matches!(client.receive(), Ok(Reply::Error(_))));
    for mode in ["local", "global"] {
        apply(patch, pid).args(["--quiescence", mode]).succeed();
        revert(pid).args(["--quiescence", mode]).succeed();
    }
    redis.assert_running();
}
