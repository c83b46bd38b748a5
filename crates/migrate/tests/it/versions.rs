//! A newer server as target, and back; an older one as target is refused.

use std::time::Duration;
use stillpoint_measure::postgres::Isolation;
use stillpoint_migrate_tests::{Fault, Moment, Stage, Trial};
use stillpoint_testing::postgresql::{Cluster, NEWER_MAJOR, newer_available};

const SETTINGS: [&str; 1] = ["wal_level=logical"];

#[test]
fn to_a_newer_server_and_back() {
    if !newer_available() {
        return;
    }
    let mut stage = Stage::of(Cluster::start(&SETTINGS), Cluster::of_major(NEWER_MAJOR, &SETTINGS));
    Trial::prepare(&stage);
    stage.source.sql("shop", "CREATE SEQUENCE tickets; SELECT setval('tickets', 41); CREATE VIEW v AS SELECT 1 AS a");
    for back in [false, true] {
        let moment = Moment { phase: None, after: Duration::ZERO };
        Trial { back, fault: Fault::None, moment, isolation: Isolation::RepeatableRead, seed: 5 }.run(&mut stage);
        let cluster = if back { &stage.source } else { &stage.target };
        assert_eq!(cluster.sql("shop", "SELECT nextval('tickets')"), if back { "43" } else { "42" });
    }
}

#[test]
fn an_older_target_is_refused() {
    if !newer_available() {
        return;
    }
    let stage = Stage::of(Cluster::of_major(NEWER_MAJOR, &SETTINGS), Cluster::start(&SETTINGS));
    let ended = stage.run(&["run"]);
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(ended.complaints.contains("older than the source's 17"), "{}", ended.complaints);
    stage.assert_clean();
}
