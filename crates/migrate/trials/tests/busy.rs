//! A source whose clients leave it no time: it is left all the same, and not in the end when they go.

use std::time::Duration;
use stillpoint_migrate_testbed::{Cluster, available};
use stillpoint_migrate_trials::Stage;
use stillpoint_migrate_trials::processors::{pin, processors};

/// Clients that send the next transaction as soon as they have an answer, and wait for no row of another's.
const LOAD: [&str; 8] = ["-n", "-N", "-c", "8", "-T", "600", "-M", "prepared"];
/// Some minutes where the processors have other work, and never where a replay stays as late as it is.
const LIMIT: Duration = Duration::from_secs(400);

#[test]
fn clients_that_leave_the_source_nothing_do_not_keep_it_from_being_left() {
    if !available() {
        return;
    }
    if processors() < 2 {
        return stillpoint_testing::skipped("source and target need a processor each");
    }
    // Whoever is started is where this process is.
    let (us, others) = (std::process::id(), format!("1-{}", processors() - 1));
    pin(us, &others);
    let target = Cluster::start(&["wal_level=logical"]);
    pin(us, "0");
    let stage = Stage::direct(Cluster::start(&["wal_level=logical"]), target);
    stage.source.pgbench("shop", &["-i", "-s", "3", "-q"]);
    let mut load = stage.source.pgbench_load("shop", stage.port(), &LOAD);
    pin(us, &others);
    let committed = "SELECT count(*) > 1000 FROM pgbench_history";
    while stage.source.sql("shop", committed) != "t" {
        std::thread::sleep(Duration::from_millis(100));
    }
    let ended = stage.tool(&["run"]).end_within(LIMIT);
    assert!(ended.code == Some(0) && load.running(), "{ended:?}");
    assert_eq!(stage.standing(), (Some("switched".into()), Some("target".into())));
    let outcome = load.stop();
    assert!(outcome.success && outcome.failed == 0, "{}", outcome.text);
    let history = stage.target.sql("shop", "SELECT count(*) FROM pgbench_history");
    assert_eq!(history, outcome.transactions.to_string(), "every commit exactly once");
}
