//! Debian's own PostgreSQL 15, stripped and unmodified: every process of a cluster patched under load.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stillpoint_patch_tests::cli::{Run, Stillpoint};
use stillpoint_patch_tests::postgres::{Bench, Change, Cluster, Postgres, Session, changes};
use stillpoint_patch_tests::victim::{residue, soak};
use stillpoint_patch_tests::{skip, wait};
use tempfile::TempDir;

/// The server and patches for it.
struct Built {
    postgres: Postgres,
    /// All changes of the executable, as one patch.
    server: PathBuf,
    /// The change of `plpgsql.so`.
    plpgsql: PathBuf,
    _dir: TempDir,
}

fn of_target(target: &str) -> Vec<Change> {
    changes().into_iter().filter(|change| change.target == target).collect()
}

fn built() -> &'static Result<Built, String> {
    static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let postgres = Postgres::debian()?;
        let dir = TempDir::with_prefix("stillpoint-postgres-patches-").map_err(|e| e.to_string())?;
        // The archive has all packages: a failed build is no reason to skip.
        let build = |target: &str, name: &str| {
            let run = postgres.build(&of_target(target), name, dir.path());
            assert_eq!(run.code, Some(0), "{run}");
            dir.path().join(format!("{name}.patch"))
        };
        let (server, plpgsql) = (build("postgres", "server"), build("plpgsql.so", "plpgsql"));
        Ok(Built { postgres, server, plpgsql, _dir: dir })
    })
}

fn all(command: &str, cluster: &Cluster) -> Stillpoint {
    Stillpoint::new().args(["patch", command, "--exe"]).arg(cluster.executable())
}

/// Applies a patch to every process of the cluster, or reverts it.
#[track_caller]
fn wave(cluster: &Cluster, patch: Option<&Path>) -> Run {
    match patch {
        Some(patch) => all("apply", cluster).arg(patch).args(["--timeout", "30s"]).json().succeed(),
        None => all("revert", cluster).args(["--timeout", "30s"]).json().succeed(),
    }
}

/// Returns the sets of patches that processes carry now; processes that end during the query do not count.
fn carried(cluster: &Cluster) -> BTreeSet<String> {
    let carried = |pid: &i32| {
        let status = Stillpoint::new().args(["patch", "status", "--pid"]).arg(*pid).json().run();
        let line = status.json().into_iter().find(|line| line["event"] == "status")?;
        let names = line["patches"].as_array()?.iter().filter_map(|p| p["name"].as_str());
        Some(names.collect::<Vec<_>>().join("+"))
    };
    cluster.processes().iter().filter_map(carried).collect()
}

#[track_caller]
fn assert_no_residue(cluster: &Cluster) {
    let left = |pid: i32| residue(pid).into_iter().filter(|what| !what.ends_with("is gone")).collect::<Vec<_>>();
    let left: Vec<String> = cluster.processes().into_iter().flat_map(left).collect();
    assert!(left.is_empty(), "{left:#?}");
}

/// Waits until the workers that autovacuum starts all the time, and other short-lived ones, have ended.
fn settled(cluster: &Cluster, wanted: &str) {
    wait::until(&format!("every process to carry {wanted:?} and nothing else"), || {
        (carried(cluster) == BTreeSet::from([wanted.to_owned()])).then_some(())
    });
}

/// Connections that a patch must not disturb, each with a statement of its own kind.
struct Watch<'a> {
    threads: Vec<std::thread::ScopedJoinHandle<'a, u64>>,
}

impl<'a> Watch<'a> {
    fn start(scope: &'a std::thread::Scope<'a, '_>, port: u16, stop: &'a AtomicBool) -> Watch<'a> {
        let kinds: [fn(u16, &AtomicBool) -> u64; 5] = [timeouts, latches, workers, newcomers, sleeps];
        Watch { threads: kinds.into_iter().map(|kind| scope.spawn(move || kind(port, stop))).collect() }
    }

    /// Panics unless each of them was served.
    fn assert_clean(self) {
        for thread in self.threads {
            match thread.join() {
                Ok(rounds) => assert!(rounds > 0, "a connection never got an answer"),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    }
}

/// Sets the stop flag of the watching connections when dropped, also when the test fails: its threads are joined.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn connect(port: u16) -> Session {
    Session::connect(port).expect("connect to postgres")
}

#[track_caller]
fn ask(session: &mut Session, sql: &str) -> String {
    session.ask(sql).unwrap_or_else(|e| panic!("{sql}: {e}")).text().to_owned()
}

/// Runs `round` until the stop flag is set.
fn rounds(stop: &AtomicBool, mut round: impl FnMut()) -> u64 {
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        round();
        done += 1;
    }
    done
}

/// Tests SIGALRM: a time-out fires, and not too early.
fn timeouts(port: u16, stop: &AtomicBool) -> u64 {
    let mut session = connect(port);
    ask(&mut session, "SET statement_timeout = 300");
    rounds(stop, || {
        let start = Instant::now();
        let error = session.ask("SELECT pg_sleep(60)").expect_err("the time-out fires");
        assert!(error.contains("statement timeout"), "{error}");
        assert!(start.elapsed() >= Duration::from_millis(300), "too early: {:?}", start.elapsed());
    })
}

/// Checks that sleeps are neither shortened nor ended by a time-out armed at the same time.
fn sleeps(port: u16, stop: &AtomicBool) -> u64 {
    let mut session = connect(port);
    ask(&mut session, "SET statement_timeout = '50s'");
    rounds(stop, || {
        let start = Instant::now();
        ask(&mut session, "SELECT pg_sleep(0.1)");
        assert!(start.elapsed() >= Duration::from_millis(100), "too early: {:?}", start.elapsed());
    })
}

/// Tests SIGUSR1: a notification of one session reaches another one that waits in its socket.
fn latches(port: u16, stop: &AtomicBool) -> u64 {
    let (mut listener, mut speaker) = (connect(port), connect(port));
    ask(&mut listener, "LISTEN stillpoint");
    rounds(stop, || {
        ask(&mut speaker, "NOTIFY stillpoint");
        assert_eq!(listener.notification().expect("the listener is told"), "stillpoint");
        std::thread::sleep(Duration::from_millis(20));
    })
}

/// Starts parallel workers, which end with each statement; the sum that they compute stays the same.
fn workers(port: u16, stop: &AtomicBool) -> u64 {
    let mut session = connect(port);
    let settings = "SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0";
    ask(&mut session, settings);
    rounds(stop, || {
        assert_eq!(ask(&mut session, "SELECT count(*) FROM pgbench_accounts WHERE aid + 1 > 0"), "100000");
    })
}

/// Checks that new connections are always served, by the old code or the new.
fn newcomers(port: u16, stop: &AtomicBool) -> u64 {
    rounds(stop, || {
        let answer = ask(&mut connect(port), "SELECT 40 + 2");
        assert!(["42", "4242"].contains(&answer.as_str()), "{answer}");
        std::thread::sleep(Duration::from_millis(10));
    })
}

#[test]
fn a_cluster_is_patched_and_reverted_under_load() {
    let built = match built() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let (idle, clients, rounds) = if soak() { (180, 16, 100) } else { (40, 4, 2) };
    let mut cluster = Cluster::start(&built.postgres, &[]);
    Bench::prepare(&cluster, 1);
    let mut sleepers: Vec<Session> = (0..idle).map(|_| cluster.session()).collect();
    let stop = AtomicBool::new(false);
    let changes = of_target("postgres");
    std::thread::scope(|scope| {
        let port = cluster.port();
        let _at_end = StopAtEnd(&stop);
        let watch = Watch::start(scope, port, &stop);
        let bench = Bench::start(&cluster, clients, &[]);
        for round in 0..rounds {
            wave(&cluster, Some(&built.server));
            let status = all("status", &cluster).json().succeed();
            let over = |line: &serde_json::Value| line["patches"].to_string().contains("\"server\"");
            assert!(status.json().iter().filter(|line| over(line)).count() > idle, "{status}");
            for change in &changes {
                change.assert_shows(&cluster, true);
                change.assert_shows_in(&mut sleepers[round % idle], &cluster, true);
            }
            assert_no_residue(&cluster);
            wave(&cluster, None);
            for change in &changes {
                change.assert_shows(&cluster, false);
                change.assert_shows_in(&mut sleepers[round % idle], &cluster, false);
            }
            cluster.assert_unharmed();
        }
        stop.store(true, Ordering::Relaxed);
        watch.assert_clean();
        println!("{} transactions of pgbench", bench.assert_clean());
    });
    for sleeper in &mut sleepers {
        assert_eq!(ask(sleeper, "SELECT pg_backend_pid()"), sleeper.pid().to_string(), "the same process serves it");
    }
    settled(&cluster, "");
    cluster.assert_unharmed();
}

#[test]
fn what_a_patched_postmaster_bears_is_born_patched() {
    let built = match built() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut cluster = Cluster::start(&built.postgres, &["jit=on", "jit_above_cost=0"]);
    Bench::prepare(&cluster, 1);
    wave(&cluster, Some(&built.server));
    let mut session = cluster.session();
    assert_eq!(ask(&mut session, "SELECT 40 + 2"), "4242");
    settled(&cluster, "server");
    // The function runs in parallel workers, which the postmaster starts for this statement.
    ask(&mut session, "SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0");
    let count = "SELECT count(*) FROM pgbench_accounts WHERE (aid % 2) * 0 + 40 + 2 = 4242";
    let plan = session.ask(&format!("EXPLAIN (ANALYZE, COSTS OFF) {count}")).expect("explain").all();
    assert!(plan.contains("Workers Launched: 2"), "{plan}");
    assert_eq!(ask(&mut session, count), "100000", "in every worker, compiled just in time or not");
    wave(&cluster, None);
    assert_eq!(ask(&mut session, count), "0");
    cluster.assert_unharmed();
}

#[test]
fn a_library_of_the_server_is_patched() {
    let built = match built() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut cluster = Cluster::start(&built.postgres, &[]);
    let mut session = cluster.session();
    let changes = of_target("plpgsql.so");
    for _ in 0..if soak() { 50 } else { 2 } {
        changes[0].assert_shows_in(&mut session, &cluster, false);
        wave(&cluster, Some(&built.plpgsql));
        changes[0].assert_shows_in(&mut session, &cluster, true);
        changes[0].assert_shows(&cluster, true);
        wave(&cluster, None);
    }
    changes[0].assert_shows_in(&mut session, &cluster, false);
    cluster.assert_unharmed();
}

/// Keeps one process from migrating: it delays no other process, and continues unchanged.
#[test]
fn a_statement_that_stands_in_the_patched_function_keeps_only_itself() {
    let built = match built() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut cluster = Cluster::start(&built.postgres, &[]);
    let mut session = cluster.session();
    let (asked, finish) = (cluster.session(), AtomicBool::new(false));
    let busy = asked.pid();
    std::thread::scope(|scope| {
        let finish = &finish;
        let waiting = scope.spawn(move || {
            let mut asked = asked;
            ask(&mut asked, "SELECT pg_advisory_lock(7)");
            finish.store(true, Ordering::Relaxed);
            asked
        });
        // no other session holds it: the lock is granted at once
        wait::until("the lock to be taken", || finish.load(Ordering::Relaxed).then_some(()));
        let mut asked = waiting.join().expect("the lock is taken");
        let mut blocked = cluster.session();
        let pid = blocked.pid();
        let waiting = scope.spawn(move || {
            ask(&mut blocked, "SELECT pg_advisory_lock(7)");
            blocked
        });
        wait::until("it to wait for the lock", || {
            let waits = format!("SELECT wait_event_type FROM pg_stat_activity WHERE pid = {pid}");
            (ask(&mut session, &waits) == "Lock").then_some(())
        });
        let run = all("apply", &cluster).arg(&built.server).args(["--timeout", "1s"]).run();
        assert_eq!(run.code, Some(4), "{run}");
        assert!(run.stderr.contains(&format!("process {pid}")), "{run}");
        assert!(run.stderr.contains("exec_simple_query"), "{run}");
        assert_ne!(pid, busy);
        assert_eq!(ask(&mut session, "SELECT 40 + 2"), "4242", "the others run the new code");
        ask(&mut asked, "SELECT pg_advisory_unlock(7)");
        let mut blocked = waiting.join().expect("its statement succeeds");
        assert_eq!(ask(&mut blocked, "SELECT 40 + 2"), "42", "it fell back");
        wave(&cluster, Some(&built.server));
        assert_eq!(ask(&mut blocked, "SELECT 40 + 2"), "4242", "the second call brings the rest");
    });
    cluster.assert_unharmed();
}
