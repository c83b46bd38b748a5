//! MariaDB with quiescence points (`crates/patch/integrations/mariadb`): both connection policies, under load, in every mode.

use std::os::unix::fs::PermissionsExt;
use std::time::Instant;
use stillpoint_integrations::Integration;
use stillpoint_patch_tests::cli::Run;
use stillpoint_patch_tests::mariadb::annotation::{Annotated, annotated};
use stillpoint_patch_tests::mariadb::client::{Answer, Client};
use stillpoint_patch_tests::mariadb::client_loop::ClientLoop;
use stillpoint_patch_tests::mariadb::effect::{half, in_mode, is_half, nothing, there_and_back};
use stillpoint_patch_tests::mariadb::load::Transactions;
use stillpoint_patch_tests::mariadb::{MariaDb, Policy, packaged};
use stillpoint_patch_tests::victim::{apply, residue, revert, rounds, status};
use stillpoint_patch_tests::{skip, wait, workspace_root};
use tempfile::TempDir;

/// Number of groups in the paper, which clients have to share.
const POOL: &[&str] = &["--thread-pool-size=3"];

macro_rules! server {
    () => {
        match annotated() {
            Ok(server) => server,
            Err(why) => skip!(why),
        }
    };
}

/// Compiles nothing: each anchor is found once in the source of the version that the archive serves.
#[test]
fn the_edits_fit_the_source() {
    let packaged = match packaged() {
        Ok(packaged) => packaged,
        Err(why) => skip!(why),
    };
    let edits = Integration::read(&workspace_root().join("crates/patch/integrations/mariadb"))
        .unwrap_or_else(|e| panic!("{e}"));
    let tree = tempfile::tempdir().expect("make a directory");
    let applied = edits.apply(&packaged.source, tree.path()).unwrap_or_else(|e| panic!("{e}"));
    assert!(!applied.files.is_empty() && applied.written == applied.files, "{:?}", applied.files);
}

#[track_caller]
fn assert_code(run: &Run, code: i32) {
    assert_eq!(run.code, Some(code), "{run}");
}

/// Starts transactions that wait for each other's rows most of the time, and never in a circle.
fn hot_rows(mariadb: &MariaDb) -> ClientLoop {
    let mut client = mariadb.client();
    client.done("CREATE TABLE hot (id INT PRIMARY KEY, n INT NOT NULL) ENGINE=InnoDB").expect("make a table");
    client.done("INSERT INTO hot VALUES (0, 0), (1, 0), (2, 0), (3, 0)").expect("fill it");
    ClientLoop::start(10, |number| {
        let mut client = mariadb.client();
        let rows = [number % 2, 2 + number / 2 % 2];
        Box::new(move || {
            let updates = rows.map(|row| format!("UPDATE hot SET n = n + 1 WHERE id = {row}"));
            for statement in ["BEGIN", &updates[0], "SELECT COUNT(*) FROM hot", &updates[1], "COMMIT"] {
                client.done(statement).map_err(|e| format!("client {number}: {statement}: {e}"))?;
            }
            Ok(())
        })
    })
}

fn under_load(server: &Annotated, policy: Policy) {
    let mut mariadb = server.packaged.start(policy, POOL);
    let patch = half(server);
    let idle: Vec<Client> = (0..20).map(|_| mariadb.client()).collect();
    let load = Transactions::start(&mariadb, 12);
    let visitors = ClientLoop::visitors(&mariadb);
    let mut client = mariadb.client();
    for round in 0..rounds(3, 250) {
        for mode in ["local", "global", "group:clients"] {
            println!("{policy:?}: round {round}, {mode}");
            there_and_back(&mariadb, patch, &mut client, mode);
            load.answered(50);
            visitors.more(2);
        }
    }
    there_and_back(&mariadb, patch, &mut client, "probe");
    visitors.assert_clean();
    load.assert_clean();
    mariadb.assert_running();
    assert_eq!(residue(mariadb.pid()), Vec::<String>::new());
    drop(idle);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn a_thread_per_connection_under_load() {
    under_load(server!(), Policy::ThreadPerConnection);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn the_pool_under_load() {
    under_load(server!(), Policy::Pool);
}

/// Applies a patch of C++ that changes nothing, under statements of both policies, in every mode.
#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn cxx_under_every_statement_is_patched_in_each_mode() {
    let server = server!();
    let nothing = nothing(server);
    for policy in Policy::ALL {
        let mut mariadb = server.packaged.start(policy, POOL);
        let pid = mariadb.pid();
        let load = Transactions::start(&mariadb, 6);
        for mode in ["local", "global", "group:clients", "probe"] {
            println!("{policy:?}: {mode}");
            assert_code(&in_mode(apply(nothing, pid), mode, "60s"), 0);
            load.answered(50);
            assert_code(&in_mode(revert(pid), mode, "60s"), 0);
            load.answered(50);
        }
        load.assert_clean();
        mariadb.assert_running();
        assert_eq!(residue(pid), Vec::<String>::new());
    }
}

/// Resources that a client can hold: statements that acquire each, and statements that release it.
const HELD: [(&[&str], &[&str]); 7] = [
    (&["BEGIN", "UPDATE kept SET n = n + 1"], &["COMMIT"]),
    (&["SET autocommit = 0", "SELECT * FROM kept"], &["COMMIT", "SET autocommit = 1"]),
    (&["LOCK TABLES kept WRITE"], &["UNLOCK TABLES"]),
    (&["FLUSH TABLES WITH READ LOCK"], &["UNLOCK TABLES"]),
    (&["SELECT GET_LOCK('stillpoint', 1)"], &["SELECT RELEASE_LOCK('stillpoint')"]),
    (&["HANDLER kept OPEN"], &["HANDLER kept CLOSE"]),
    (&["XA START 'x'", "UPDATE kept SET n = n + 1", "XA END 'x'", "XA PREPARE 'x'"], &["XA COMMIT 'x'"]),
];

#[track_caller]
fn all_done(client: &mut Client, statements: &[&str]) {
    for statement in statements {
        client.done(statement).unwrap_or_else(|e| panic!("{statement}: {e}"));
    }
}

fn held_things_are_respected(server: &Annotated, policy: Policy) {
    let mariadb = server.packaged.start(policy, POOL);
    let (patch, pid) = (half(server), mariadb.pid());
    let [mut holder, mut other] = [mariadb.client(), mariadb.client()];
    all_done(&mut other, &["CREATE TABLE kept (n INT) ENGINE=InnoDB", "INSERT INTO kept VALUES (1)"]);
    for (take, give) in HELD {
        println!("{policy:?}: {take:?}");
        all_done(&mut holder, take);
        assert_code(&in_mode(apply(patch, pid), "global", "700ms"), 4);
        assert!(!is_half(&mut other), "{take:?}");
        all_done(&mut holder, give);
        there_and_back(&mariadb, patch, &mut other, "global");
    }
    // Where no thread waits at a barrier, new code may continue a transaction.
    all_done(&mut holder, HELD[0].0);
    there_and_back(&mariadb, patch, &mut holder, "local");
    all_done(&mut holder, HELD[0].1);
    // A prepared transaction outlives its connection.
    all_done(&mut holder, HELD[6].0);
    drop(holder);
    assert!(!is_half(&mut other), "the next request may end it");
    assert_code(&in_mode(apply(patch, pid), "global", "700ms"), 4);
    wait::until("the transaction to have no owner", || other.done("XA COMMIT 'x'").ok());
    there_and_back(&mariadb, patch, &mut other, "global");
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn held_things_are_respected_with_a_thread_per_connection() {
    held_things_are_respected(server!(), Policy::ThreadPerConnection);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn held_things_are_respected_by_the_pool() {
    held_things_are_respected(server!(), Policy::Pool);
}

/// Name, priority and state of a thread that takes part.
type Part = (String, u64, String);

/// Returns all participating threads, from `status`; all are in the group of clients.
fn parts(mariadb: &MariaDb) -> Vec<Part> {
    let line = status(mariadb.pid()).json().succeed().json().remove(0);
    let threads = line["threads"].as_array().expect("threads").iter().filter(|thread| !thread["name"].is_null());
    let part = |thread: &serde_json::Value| {
        assert_eq!(thread["group"], "clients", "{thread}");
        let text = |key: &str| thread[key].as_str().expect("a text").to_owned();
        (text("name"), thread["priority"].as_u64().expect("a number"), text("state"))
    };
    threads.map(part).collect()
}

fn count(parts: &[Part], name: &str, priority: u64, state: &str) -> usize {
    parts.iter().filter(|part| **part == (name.to_owned(), priority, state.to_owned())).count()
}

/// Priorities: 0 works, 1 sleeps, 2 is needed by both.
#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn every_kind_of_thread_takes_part_in_its_role() {
    let server = server!();
    for policy in Policy::ALL {
        let mariadb = server.packaged.start(policy, POOL);
        // the thread that served the test's first connection serves the next client when it is in the cache
        let cached = |part: &Part| part.0 != "connection" || (part.1 == 2 && part.2 == "parked");
        let left = wait::within(wait::WAIT_TIMEOUT, || parts(&mariadb).iter().all(cached).then_some(()));
        assert!(left.is_some(), "{policy:?}: {:?}", parts(&mariadb));
        let [mut busy, mut other] = [mariadb.client(), mariadb.client()];
        let mut idle = [mariadb.client(), mariadb.client()];
        let id = busy.done("SELECT CONNECTION_ID()").expect("the server answers").to_string();
        busy.begin("SELECT SLEEP(1000)").expect("send it");
        let mut seen = Vec::new();
        let mut until = |what: &str, wanted: &dyn Fn(&[Part]) -> bool| {
            let found = wait::within(wait::WAIT_TIMEOUT, || {
                seen = parts(&mariadb);
                wanted(&seen).then_some(())
            });
            assert!(found.is_some(), "{policy:?}: {what}: {seen:?}");
        };
        match policy {
            Policy::ThreadPerConnection => {
                until("one works, three wait for their clients, one accepts", &|seen| {
                    count(seen, "main", 2, "parked") == 1
                        && count(seen, "connection", 0, "active") == 1
                        && count(seen, "connection", 0, "parked") == 3
                        && seen.len() == 5
                });
                drop(idle);
                until("two wait in the cache", &|seen| {
                    count(seen, "connection", 2, "parked") == 2 && count(seen, "connection", 0, "parked") == 1
                });
            }
            Policy::Pool => {
                until("one works, others listen, the timer ticks, one accepts", &|seen| {
                    count(seen, "main", 2, "parked") == 1
                        && count(seen, "timer", 2, "parked") == 1
                        && count(seen, "worker", 0, "active") == 1
                        && count(seen, "worker", 2, "parked") >= 1
                });
                idle.iter_mut().for_each(|client| drop(client.done("SELECT 1").expect("the server answers")));
            }
        }
        other.done(&format!("KILL QUERY {id}")).expect("end the query");
        busy.answer().expect("the connection lives");
        if policy == Policy::Pool {
            // the listener that replaced the worker stays, so the worker sleeps
            until("a worker sleeps, no worker works", &|seen| {
                count(seen, "worker", 1, "parked") >= 1 && seen.iter().all(|part| part.2 == "parked")
            });
        }
    }
}

/// While a barrier gathers, new clients are accepted, and clients that hold resources are served; all others continue
/// afterwards.
fn a_gathering_barrier_lets_clients_in(server: &Annotated, policy: Policy) {
    let mariadb = server.packaged.start(policy, POOL);
    let mut holder = mariadb.client();
    all_done(&mut holder, &["CREATE TABLE kept (n INT) ENGINE=InnoDB", "INSERT INTO kept VALUES (1)"]);
    all_done(&mut holder, HELD[0].0);
    let call = apply(half(server), mariadb.pid()).args(["--quiescence", "global", "--timeout", "60s"]);
    let gathering = std::thread::spawn(move || call.run());
    // The client selects no database: that would be a command, and wait.
    let enter = |_| Client::connect(&mariadb.socket(), "").expect("a new client is let in");
    let mut new: Vec<Client> = (0..8).map(enter).collect();
    for client in &mut new {
        client.begin("SELECT RAND()").expect("a statement can be sent");
        all_done(&mut holder, &["SELECT n FROM kept"]);
    }
    assert!(!gathering.is_finished(), "a transaction is open");
    all_done(&mut holder, HELD[0].1);
    assert_code(&gathering.join().expect("the call ends"), 0);
    for client in &mut new {
        let answer = client.answer().expect("the server answers");
        assert!(matches!(answer, Answer::Rows(_)), "{answer}");
        assert!(is_half(client));
    }
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn a_gathering_barrier_lets_clients_in_with_a_thread_per_connection() {
    a_gathering_barrier_lets_clients_in(server!(), Policy::ThreadPerConnection);
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn a_gathering_barrier_lets_clients_in_with_a_pool() {
    a_gathering_barrier_lets_clients_in(server!(), Policy::Pool);
}

/// Reproduces the published result: points in the pool without roles and without parking dead-lock on the first
/// request.
#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn points_without_roles_and_parking_dead_lock() {
    let server = server!();
    let dir = TempDir::with_prefix("stillpoint-naive-").expect("make a directory");
    let mut naive = server.packaged.clone();
    let script = dir.path().join("mariadbd");
    let text = format!("#!/bin/sh\nSTILLPOINT_MARIADB_NAIVE=1 exec '{}' \"$@\"\n", naive.binary.path.display());
    std::fs::write(&script, text).expect("write a script");
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("make it a program");
    naive.binary.path = script;
    let mut mariadb = naive.start(Policy::Pool, POOL);
    let load = hot_rows(&mariadb);
    load.more(100);
    assert_code(&in_mode(apply(half(server), mariadb.pid()), "global", "3s"), 4);
    // No harm is done: every thread left at the deadline.
    load.more(100);
    load.assert_clean();
    mariadb.assert_running();
}

#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn roles_and_parking_never_dead_lock() {
    let server = server!();
    let mut mariadb = server.packaged.start(Policy::Pool, POOL);
    let (patch, pid) = (half(server), mariadb.pid());
    let load = hot_rows(&mariadb);
    load.more(100);
    for round in 0..rounds(8, 500) {
        println!("round {round}");
        assert_code(&in_mode(apply(patch, pid), "global", "60s"), 0);
        load.more(20);
        assert_code(&in_mode(revert(pid), "global", "60s"), 0);
        load.more(20);
    }
    load.assert_clean();
    mariadb.assert_running();
}

/// Runs a query that takes longer than any test: local and global wait for its end, probing does not.
#[test]
#[ignore = "full tier: MariaDB with quiescence points is compiled, ten minutes of two processors"]
fn long_queries_hold_up_points_and_not_probing() {
    let server = server!();
    let mariadb = server.packaged.start(Policy::ThreadPerConnection, &[]);
    let (patch, pid) = (half(server), mariadb.pid());
    let [mut analyst, mut other] = [mariadb.client(), mariadb.client()];
    all_done(&mut other, &["CREATE TABLE many (n INT) ENGINE=InnoDB"]);
    let values: Vec<String> = (0..2000).map(|n| format!("({n})")).collect();
    other.done(&format!("INSERT INTO many VALUES {}", values.join(","))).expect("fill the table");
    let id = analyst.done("SELECT CONNECTION_ID()").expect("the server answers").to_string();
    analyst.begin("SELECT COUNT(*) FROM many a, many b, many c WHERE a.n + b.n + c.n = -1").expect("send it");
    let mut runs = || {
        let state = format!("SELECT state FROM information_schema.processlist WHERE id = {id} AND command = 'Query'");
        other.done(&state).expect("the server answers").to_string()
    };
    wait::until("the query to run", || (runs() == "Sending data").then_some(()));
    for mode in ["local", "global"] {
        assert_code(&in_mode(apply(patch, pid), mode, "1s"), 4);
        assert_eq!(runs(), "Sending data", "{mode}");
    }
    let started = Instant::now();
    assert_code(&in_mode(apply(patch, pid), "probe", "30s"), 0);
    println!("probing took {:?}", started.elapsed());
    assert!(is_half(&mut mariadb.client()));
    assert_code(&in_mode(revert(pid), "probe", "30s"), 0);
    assert_eq!(runs(), "Sending data");
    other.done(&format!("KILL QUERY {id}")).expect("end the query");
    assert!(analyst.answer().is_ok_and(|answer| answer.is_error()), "the query was cut off, not the connection");
}
