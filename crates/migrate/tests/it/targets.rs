//! Several targets, one of which dies: clients notice nothing, and every acknowledged commit is there once.

use std::time::Duration;
use stillpoint_events::{EventKind, migrate};
use stillpoint_measure::postgres::{Isolation, PostgresLoad, PostgresPlan};
use stillpoint_migrate_tests::{Testbed, Trial};
use stillpoint_testing::postgresql::{Cluster, available};

#[test]
fn a_target_that_dies_in_catch_up_is_dropped() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    Trial::prepare(&testbed);
    let mut second = Cluster::start(&["wal_level=logical"]);
    let plan = PostgresPlan {
        clients: 8,
        think: Duration::from_millis(25),
        isolation: Isolation::RepeatableRead,
        duration: Duration::from_secs(600),
        timeout: Duration::from_secs(20),
        ..PostgresPlan::checked(testbed.conninfo())
    };
    let load = PostgresLoad::start(plan).expect("start the load");
    let other = second.conninfo("shop");
    let mut tool = testbed.tool(&["run", "--pause-timeout", "3s", "--share", "0", "--target", &other]);
    // The stage adds its own words after these: the target that dies is the first, and the other takes its place.
    let follows = |event: &stillpoint_events::Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "catch-up");
    assert!(tool.await_event(follows), "it ended before: {:?}", tool.seen);
    second.crash();
    let ended = tool.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let dropped = |kind: &EventKind| matches!(kind, EventKind::Migrate(migrate::Event::TargetDropped { .. }));
    assert_eq!(ended.events.iter().filter(|event| dropped(&event.kind)).count(), 1, "{ended:?}");
    assert_eq!(testbed.standing(), (Some("switched".into()), Some("target".into())));
    let status = testbed.ask(&["status", "--target", &other]);
    assert!(status["record"]["others"][0]["dropped"].is_string(), "{status}");
    std::thread::sleep(Duration::from_millis(500));
    load.stop();
    let finished = load.wait().expect("the load ends");
    let verdict = finished.verdict.as_ref().expect("a checked load has a verdict");
    assert!(verdict.anomalies.is_empty() && verdict.committed > 0, "{verdict:#?}");
    let counts = finished.finished.summary.counts;
    assert_eq!(counts.errors + counts.wrong + counts.timeouts + counts.lost, 0, "{counts:?}");
}
