//! A load that the proxy captured is replayed on a real server in each mode of the scheduler, and ends with the rows of
//! the source.

use std::time::Duration;
use stillpoint_migrate_replay::Mode;
use stillpoint_migrate_tests::recording::{ProxiedServers, ReplaySettings, Target, record};
use stillpoint_testing::postgresql::available;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_mode_ends_in_what_the_source_holds() {
    if !available() {
        return;
    }
    let servers = ProxiedServers::start(&[]);
    let recording = record(&servers, 8, Duration::from_millis(10), 3.0).await;
    println!("{} transactions, {} of which wrote", recording.transactions, recording.writing);
    assert!(recording.writing > 0);
    let target = Target::new(&servers.target);
    for mode in Mode::ALL {
        let replayed = target.replay(&recording, ReplaySettings { mode, players: 4, synchronous: true }).await;
        println!("{}: {replayed:?}", mode.name());
        let wanted = if mode == Mode::BAll { recording.transactions } else { recording.writing };
        assert_eq!(replayed.transactions, wanted, "{}", mode.name());
    }
}
