//! `run --hold` and `switch` as an operator calls them.

use stillpoint_migrate_tests::{Testbed, Trial};
use stillpoint_testing::postgresql::available;
use stillpoint_testing::wait;

#[test]
fn an_operator_decides_when_clients_move() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    Trial::prepare(&testbed);
    let refused = testbed.run(&["switch"]);
    assert_eq!(refused.code, Some(3), "no command holds: {refused:?}");
    let holder = testbed.tool(&["run", "--hold", "--share", "0", "--finish-after", "1s"]);
    let holding = || testbed.ask(&["status"])["holding"].clone();
    wait::until("a command that holds", || holding()["why_not"].as_str().map(drop));
    testbed.succeed(&["switch", "--no-wait", "--when", "lag<1m and tps>1000000"]);
    wait::until("the order", || (holding()["why_not"] == "tps>1000000 does not hold").then_some(()));
    assert_eq!(testbed.standing(), (Some("following".into()), Some("source".into())));
    for wrong in [["--at", "tomorrow"], ["--window", "9-17"], ["--when", "rows<5"]] {
        assert_eq!(testbed.run(&[&["switch"][..], &wrong].concat()).code, Some(2), "{wrong:?}");
    }
    testbed.succeed(&["switch"]);
    let ended = holder.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(testbed.standing(), (None, Some("target".into())), "it was finished");
}
