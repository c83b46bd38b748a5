//! Debian's own mariadbd, stripped and unmodified, patched under load: both connection policies, in transactions, with
//! a thousand idle connections, and in the middle of a long query.

use std::path::PathBuf;
use std::sync::OnceLock;
use stillpoint_patch_tests::mariadb::change::{self, Change};
use stillpoint_patch_tests::mariadb::load::{Sysbench, Transactions};
use stillpoint_patch_tests::mariadb::{MariaDb, PackagedServer, Policy, packaged};
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::{apply, residue, revert, rounds, status};
use tempfile::TempDir;

/// Changes in C and in C++: a helper library, an engine of each language, functions of SQL; exceptions thrown,
/// rethrown, and passing a patched frame between two unpatched ones; a thread cancelled.
const CHANGES: [&str; 8] = [
    "mysys-base64",
    "aria-status",
    "innodb-log",
    "sql-ascii",
    "sql-new-class",
    "sql-rethrow",
    "sql-unwind",
    "sql-cancel",
];

/// A change and the patch built from it.
struct Ready {
    change: Change,
    patch: PathBuf,
}

struct Built {
    packaged: PackagedServer,
    ready: Vec<Ready>,
    _dir: TempDir,
}

fn built() -> &'static Result<Built, String> {
    static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let packaged = packaged().clone()?;
        let dir = TempDir::with_prefix("stillpoint-mariadb-").map_err(|e| format!("make a directory: {e}"))?;
        let mut ready = Vec::new();
        for name in CHANGES {
            let change = change::named(name);
            let (patch, run) = change.build(&packaged, dir.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
            // The archive has all packages: a failure here is no reason to skip.
            assert!(run.code == Some(0) && patch.exists(), "{run}");
            ready.push(Ready { change, patch });
        }
        Ok(Built { packaged, ready, _dir: dir })
    })
}

#[track_caller]
fn assert_active(ready: &Ready, server: &MariaDb, wanted: bool) {
    let state = ready.change.is_active(server).unwrap_or_else(|e| panic!("{}: {e}", ready.change.name));
    assert_eq!(state, wanted, "{}", ready.change.name);
}

/// Applies all patches on top of each other, checks each as active, and reverts them.
#[track_caller]
fn there_and_back(built: &Built, server: &mut MariaDb, load: &Transactions) {
    let pid = server.pid();
    for ready in &built.ready {
        assert_active(ready, server, false);
        apply(&ready.patch, pid).succeed();
        load.answered(50);
        assert_active(ready, server, true);
    }
    server.assert_running();
    status(pid).succeed();
    for ready in built.ready.iter().rev() {
        revert(pid).succeed();
        load.answered(50);
        assert_active(ready, server, false);
    }
    server.assert_running();
    assert_eq!(residue(pid), Vec::<String>::new());
}

fn under_load(policy: Policy) {
    let built = match built() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut server = built.packaged.start(policy, &[]);
    change::prepare(&server);
    let load = Transactions::start(&server, 6);
    // sixteen patchings a round
    let wanted = rounds(1, 100);
    let seconds = rounds(6, 600).try_into().expect("a few minutes");
    let mut sysbench = match Sysbench::start(&server, 4, seconds) {
        Ok(sysbench) => sysbench,
        Err(why) => skip!(why),
    };
    let mut done = 0;
    while done < wanted || sysbench.runs() {
        there_and_back(built, &mut server, &load);
        done += 1;
    }
    let statements = load.assert_clean();
    let counted = sysbench.finish();
    let patchings = 2 * built.ready.len() * done;
    println!("{policy:?}: {patchings} patchings, {statements} statements of ours, of sysbench {counted:?}");
    assert_eq!(counted.reconnects, 0, "{counted:?}");
    assert!(counted.queries > 0);
}

#[test]
fn mariadb_with_a_thread_per_connection_is_patched_under_load() {
    under_load(Policy::ThreadPerConnection);
}

#[test]
fn mariadb_with_a_pool_of_threads_is_patched_under_load() {
    under_load(Policy::Pool);
}

/// Keeps idle connections in `read` for hours: each is a thread that has to migrate.
#[test]
fn a_thousand_idle_connections_migrate_by_probing() {
    let built = match built() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut server = built.packaged.start(Policy::ThreadPerConnection, &[]);
    change::prepare(&server);
    let mut idle: Vec<_> = (0..1000).map(|_| server.client()).collect();
    assert!(server.status("Threads_connected") >= 1000);
    for ready in &built.ready[..2] {
        let applied = apply(&ready.patch, server.pid()).succeed();
        println!("{}", applied.stdout.trim());
        assert_active(ready, &server, true);
        let reverted = revert(server.pid()).succeed();
        println!("{}", reverted.stdout.trim());
    }
    for client in &mut idle {
        assert_eq!(client.done("SELECT 1").unwrap_or_else(|e| panic!("{e}")).to_string(), "1");
    }
    server.assert_running();
}

/// Runs a query for minutes: its thread reaches no quiescence point, and does not delay a patch of code that it does
/// not use.
#[test]
fn a_long_query_does_not_hold_up_a_patch() {
    let built = match built() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    for policy in Policy::ALL {
        let mut server = built.packaged.start(policy, &[]);
        change::prepare(&server);
        let queries = [
            "SELECT BENCHMARK(4000000000, MD5(1))",
            "SELECT COUNT(*) FROM on_innodb AS a, on_innodb AS b, on_innodb AS c WHERE a.c < b.c AND b.c > c.c",
        ];
        let mut clients = queries.map(|query| {
            let mut client = server.client();
            let id = client.done("SELECT CONNECTION_ID()").expect("it is answered").to_string();
            client.begin(query).expect("the query is sent");
            (client, id, query)
        });
        let running = |server: &MariaDb| {
            let list = "SELECT COUNT(*) FROM INFORMATION_SCHEMA.PROCESSLIST WHERE COMMAND = 'Query' AND \
                        (INFO LIKE 'SELECT BENCHMARK%' OR INFO LIKE 'SELECT COUNT(*) FROM on_innodb%')";
            server.client().done(list).expect("it is answered").to_string()
        };
        stillpoint_patch_tests::wait::until("the queries to run", || (running(&server) == "2").then_some(()));
        for ready in &built.ready {
            let applied = apply(&ready.patch, server.pid()).succeed();
            println!("{policy:?}, two long queries: {}", applied.stdout.trim());
            assert_active(ready, &server, true);
            revert(server.pid()).succeed();
            assert_active(ready, &server, false);
        }
        assert_eq!(running(&server), "2", "the queries run on");
        for (client, id, query) in &mut clients {
            server.client().done(&format!("KILL QUERY {id}")).expect("it is answered");
            let answer = client.answer().unwrap_or_else(|e| panic!("{query}: the connection is lost: {e}"));
            assert!(
                !matches!(&answer, stillpoint_patch_tests::mariadb::client::Answer::Error(code, _) if *code != 1317)
            );
            assert_eq!(client.done("SELECT 2").expect("the connection lives").to_string(), "2");
        }
        server.assert_running();
    }
}
