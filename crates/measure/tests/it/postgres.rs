//! Tests of the load for PostgreSQL against a real server, and of the checker against a server that loses acknowledged commits.

use std::time::Duration;

use stillpoint_measure::history::{AnomalyKind, History, Level, check};
use stillpoint_measure::postgres::{Isolation, PostgresLoad, PostgresPlan, Work, prepare};
use stillpoint_measure::record::Record;
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};

fn short(plan: PostgresPlan) -> PostgresPlan {
    PostgresPlan { duration: Duration::from_secs(2), ..plan }
}

#[test]
fn the_ordering_mix_runs_and_half_of_it_updates() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&["deadlock_timeout=50ms"]);
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("record");
    let plan = PostgresPlan {
        work: Work::Ordering { items: 200 },
        clients: 20,
        think: Duration::from_millis(50),
        record: Some(record.clone()),
        ..short(PostgresPlan::ordering(cluster.conninfo("postgres")))
    };
    prepare(&plan).unwrap();
    let finished = PostgresLoad::start(plan).unwrap().wait().unwrap();
    assert!(finished.is_clean(), "{finished:?}");
    let summary = &finished.finished.summary;
    assert!(summary.counts.ok > 300, "{:?}", summary.counts);
    let record = Record::open(&record).unwrap();
    assert_eq!(record.samples.len() as u64, summary.counts.requests);
    let updates = ["shopping-cart", "customer-registration", "buy-request", "buy-confirm", "admin-confirm"];
    let updates = summary.kinds.iter().filter(|kind| updates.contains(&kind.kind.as_str()));
    let share = updates.map(|kind| kind.counts.requests).sum::<u64>() as f64 / summary.counts.requests as f64;
    assert!((0.38..0.62).contains(&share), "{share}");
    assert_ne!(cluster.sql("postgres", "SELECT count(*) FROM sp_order_line"), "0");
    // The sum of every order is that of its lines, and was paid.
    let wrong = "SELECT count(*) FROM sp_order o LEFT JOIN sp_payment p ON p.sale = o.id WHERE p.amount IS DISTINCT FROM \
                 (SELECT sum(price * quantity) FROM sp_order_line WHERE sale = o.id)";
    assert_eq!(cluster.sql("postgres", wrong), "0");
}

#[test]
fn postgresql_keeps_the_promises_of_each_level() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&["deadlock_timeout=50ms"]);
    let dir = tempfile::tempdir().unwrap();
    for (at, isolation) in
        [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable].into_iter().enumerate()
    {
        let history = dir.path().join(format!("history-{at}"));
        let plan = PostgresPlan {
            isolation,
            history: Some(history.clone()),
            ..short(PostgresPlan::checked(cluster.conninfo("postgres")))
        };
        if at == 0 {
            // The other levels use the existing tables.
            prepare(&plan).unwrap();
        }
        let finished = PostgresLoad::start(plan).unwrap().wait().unwrap();
        let verdict = finished.verdict.as_ref().unwrap();
        assert!(finished.is_clean(), "{isolation:?}: {:?} {verdict:?}", finished.finished);
        assert!(verdict.committed > 200 && verdict.unknown == 0, "{verdict:?}");
        let written = History::from_lines(&std::fs::read_to_string(&history).unwrap()).unwrap();
        assert_eq!(written.transactions.len(), verdict.transactions);
    }
}

/// Anomalies that READ COMMITTED allows are found when the history is judged by a stronger level: the checker finds real anomalies.
#[test]
fn anomalies_of_read_committed_are_found_in_a_real_history() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&["deadlock_timeout=50ms"]);
    let dir = tempfile::tempdir().unwrap();
    let history = dir.path().join("history");
    let plan = PostgresPlan {
        work: Work::Checked { mix: "list=1".parse().unwrap(), rows: 2 },
        clients: 24,
        think: Duration::from_millis(1),
        isolation: Isolation::ReadCommitted,
        history: Some(history.clone()),
        ..short(PostgresPlan::checked(cluster.conninfo("postgres")))
    };
    prepare(&plan).unwrap();
    let mut found = Vec::new();
    until("an anomaly", || {
        let finished = PostgresLoad::start(plan.clone()).unwrap().wait().unwrap();
        assert!(finished.is_clean(), "{finished:?}");
        let history = History::from_lines(&std::fs::read_to_string(&history).unwrap()).unwrap();
        found = check(&history, Level::Snapshot);
        (!found.is_empty()).then_some(())
    });
    assert!(found.iter().all(|anomaly| anomaly.kind > AnomalyKind::IntermediateRead), "{found:?}");
}

/// A server that acknowledges commits before they are durable loses some in a crash, and the history shows it.
#[test]
fn a_crash_that_loses_acknowledged_commits_is_found() {
    if !available() {
        return;
    }
    let mut cluster = Cluster::start(&["synchronous_commit=off", "wal_buffers=16MB"]);
    let plan = PostgresPlan {
        duration: Duration::from_secs(60),
        timeout: Duration::from_secs(60),
        ..PostgresPlan::checked(cluster.conninfo("postgres"))
    };
    prepare(&plan).unwrap();
    let load = PostgresLoad::start(plan).unwrap();
    let ok = || load.counters().snapshot().counts.ok;
    until("some transactions", || (ok() > 500).then_some(()));
    // From here on commits only reach the log's buffers: no other process writes them before those are full.
    let writer = cluster.sql("postgres", "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'");
    let writer =
        writer.parse().ok().and_then(rustix::process::Pid::from_raw).expect("a server has a writer of the log");
    rustix::process::kill_process(writer, rustix::process::Signal::STOP).unwrap();
    let before = ok();
    until("transactions that are not written out", || (ok() > before + 100).then_some(()));
    cluster.crash();
    cluster.restart(None);
    let before = ok();
    until("transactions after the crash", || (ok() > before + 100).then_some(()));
    load.stop();
    let finished = load.wait().unwrap();
    assert!(finished.finished.end.dropped > 0);
    let kinds: Vec<AnomalyKind> = finished.verdict.unwrap().anomalies.iter().map(|anomaly| anomaly.kind).collect();
    let lost = [AnomalyKind::LostOrDoubledWrite, AnomalyKind::WrongCount, AnomalyKind::WrongSum];
    assert!(kinds.iter().any(|kind| lost.contains(kind)), "{kinds:?}");
}
