//! Threads that reach no quiescence point for a long time: a thousand idle connections, and queries of minutes.

use super::{Amount, in_mode, start};
use crate::results::{Section, number};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stillpoint_patch_bench::operation::{Spread, StopsUs};
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::client::Client;
use stillpoint_patch_tests::mariadb::effect::half;
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_patch_tests::mariadb::{MariaDb, Policy, change, packaged};
use stillpoint_patch_tests::{patch_calls, wait};

const IDLE: usize = 1000;
/// Time-out of operations that wait for the end of a query.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Serialize)]
struct Row {
    server: &'static str,
    threads: String,
    mode: &'static str,
    operations: usize,
    given_up: usize,
    over_ms: Spread,
    command_ms: Spread,
    stopped_us: StopsUs,
}

pub(super) fn measure(server: &Annotated, amount: Amount) -> Result<Section, String> {
    let mut rows = Vec::new();
    let idle = format!("{IDLE} idle connections, a thread each");
    let debian = packaged().as_ref().map_err(Clone::clone)?;
    let dir = tempfile::tempdir().map_err(|e| format!("make a directory: {e}"))?;
    let (patch, run) = change::named("sql-ascii").build(debian, dir.path())?;
    if run.code != Some(0) {
        return Err(run.to_string());
    }
    let unmodified = debian.start(Policy::ThreadPerConnection, &[]);
    rows.push(among_idle("as Debian ships it", &unmodified, &patch, "probe", &idle, amount.runs));
    drop(unmodified);
    let mariadb = start(server, Policy::ThreadPerConnection, Work::NoOp, &[]);
    for mode in super::MODES {
        rows.push(among_idle("with points", &mariadb, half(server), mode, &idle, amount.runs));
    }
    drop(mariadb);
    for policy in Policy::ALL {
        rows.extend(beside_queries(server, policy, amount.runs));
    }
    let columns = [
        "server",
        "threads",
        "mode",
        "operations",
        "given up",
        "all over, ms: median (max)",
        "a thread probed, us: median, p99 (max)",
        "all stopped, us: median (max)",
    ];
    let mut section = Section::new(
        "mariadb-idle",
        "MariaDB: until every thread runs the new code, though some come to no point",
        &columns,
    );
    for row in &rows {
        let spread = |s: &Spread| {
            if s.count == 0 { "-".to_owned() } else { format!("{} ({})", number(s.median), number(s.max)) }
        };
        let probe = &row.stopped_us.probe;
        section.rows.push(vec![
            row.server.into(),
            row.threads.clone(),
            row.mode.into(),
            row.operations.to_string(),
            row.given_up.to_string(),
            spread(&row.over_ms),
            format!("{}, {} ({})", number(probe.median), number(probe.p99), number(probe.max)),
            spread(&row.stopped_us.all),
        ]);
    }
    section.notes.push(format!(
        "A query of minutes runs to its end, in every mode; a request that waits for it is given up after {} s here, and then nothing has happened.",
        OPERATION_TIMEOUT.as_secs()
    ));
    section.raw(&rows);
    Ok(section)
}

/// Applies and reverts with only idle connections.
fn among_idle(
    server: &'static str,
    mariadb: &MariaDb,
    patch: &Path,
    mode: &'static str,
    threads: &str,
    runs: usize,
) -> Row {
    let mut idle: Vec<Client> = (0..IDLE).map(|_| mariadb.client()).collect();
    let row = there_and_back(server, mariadb, patch, mode, threads, runs);
    for client in &mut idle {
        assert_eq!(client.done("SELECT 1").expect("the connection lives").to_string(), "1");
    }
    row
}

fn there_and_back(
    server: &'static str,
    mariadb: &MariaDb,
    patch: &Path,
    mode: &'static str,
    threads: &str,
    runs: usize,
) -> Row {
    let mut all = Vec::new();
    for _ in 0..runs {
        for call in [patch_calls::apply(patch, mariadb.pid()), patch_calls::revert(mariadb.pid())] {
            // Debian's own server has no modes: the default is to probe threads.
            all.push(in_mode(call, mode, super::CALL_TIMEOUT).succeeded());
        }
    }
    Row {
        server,
        threads: threads.into(),
        mode,
        operations: all.len(),
        given_up: 0,
        over_ms: Spread::of(all.iter().filter_map(|o| o.migrated_ns.map(super::ms)).collect()),
        command_ms: Spread::of(all.iter().map(|o| super::ms(o.elapsed_ns())).collect()),
        stopped_us: StopsUs::of(&all),
    }
}

/// Applies during two queries of minutes, with transactions: by probing, and at points, which wait.
fn beside_queries(server: &Annotated, policy: Policy, runs: usize) -> Vec<Row> {
    const QUERY: &str = "SELECT COUNT(*) FROM many a, many b, many c WHERE a.n + b.n + c.n = -1";
    let mariadb = start(server, policy, Work::Ycsb, &[]);
    let mut client = mariadb.client();
    client.done("CREATE TABLE many (n INT) ENGINE=InnoDB").expect("make a table");
    client.done("INSERT INTO many SELECT seq FROM seq_1_to_3000").expect("fill it");
    let mut analysts: Vec<Client> = (0..2).map(|_| mariadb.client()).collect();
    let ids: Vec<String> = analysts
        .iter_mut()
        .map(|analyst| {
            let id = analyst.done("SELECT CONNECTION_ID()").expect("the server answers").to_string();
            analyst.begin(QUERY).expect("send the query");
            id
        })
        .collect();
    let mut running = || {
        let list = "SELECT COUNT(*) FROM INFORMATION_SCHEMA.PROCESSLIST WHERE INFO LIKE 'SELECT COUNT(*) FROM many%'";
        client.done(list).expect("the server answers").to_string() == "2"
    };
    wait::until("the queries to run", || running().then_some(()));
    let load = Traffic::start(&mariadb, &Plan { work: Work::Ycsb, connections: 4, rate: Some(200.0), first: 0 });
    let threads = format!("2 queries of minutes, 4 clients; {}", policy.name());
    let mut rows = vec![there_and_back("with points", &mariadb, half(server), "probe", &threads, runs)];
    for mode in ["local", "global"] {
        let call = patch_calls::apply(half(server), mariadb.pid());
        let operation = in_mode(call, mode, OPERATION_TIMEOUT);
        assert_eq!(operation.run.code, Some(4), "{}", operation.run);
        rows.push(Row {
            server: "with points",
            threads: threads.clone(),
            mode,
            operations: 1,
            given_up: 1,
            over_ms: Spread::of(Vec::new()),
            command_ms: Spread::of(vec![super::ms(operation.elapsed_ns())]),
            stopped_us: StopsUs::of(&[operation]),
        });
    }
    assert!(running(), "the queries run on");
    load.finish();
    for id in ids {
        client.done(&format!("KILL QUERY {id}")).expect("end a query");
    }
    for analyst in &mut analysts {
        assert!(analyst.answer().expect("the connection lives").is_error());
    }
    rows
}
