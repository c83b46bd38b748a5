//! A backlog of commits is read in steps, from a copy of the slot: every commit arrives once, also if the tool is
//! killed between two steps.

use rustix::process::Signal;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_tests::Testbed;
use stillpoint_testing::{postgresql::available, wait::until};

/// Transactions of each of four clients, beside one that touches every row: more than 16 MiB of log, and more than one
/// step.
const EACH: u32 = 4000;
const COPIES: &str = "SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ '^stillpoint_.*_copy$'";

#[test]
fn a_backlog_is_read_in_steps_and_once() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    testbed.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    let mut tool = testbed.tool(&["run", "--share", "0"]);
    let copied = |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "indexes");
    assert!(tool.await_event(copied), "it ended before: {:?}", tool.seen);
    tool.signal(Signal::STOP);
    testbed.source.sql("shop", "UPDATE pgbench_accounts SET filler = 'every row'");
    testbed.source.pgbench("shop", &["-n", "-c", "4", "-t", &EACH.to_string()]);
    tool.signal(Signal::CONT);
    let reads = || (testbed.source.sql("shop", COPIES) == "1").then_some(());
    until("the backlog to be read", reads);
    drop(tool);
    until("the copy to go with its reader", || (testbed.source.sql("shop", COPIES) == "0").then_some(()));
    // There is still much to read: the slot itself has not moved.
    let tool = testbed.tool(&["run", "--share", "0"]);
    until("the rest to be read", reads);
    let ended = tool.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended.events.iter().any(|event| matches!(event.kind, EventKind::Migrate(migrate::Event::Compared { .. }))),
        "{ended:?}"
    );
    let history = "SELECT count(*), (SELECT sum(abalance) FROM pgbench_accounts) = sum(delta) FROM pgbench_history";
    assert_eq!(testbed.target.sql("shop", history), format!("{}|t", 4 * EACH));
    let ended = testbed.run(&["fallback"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    testbed.assert_clean();
}
