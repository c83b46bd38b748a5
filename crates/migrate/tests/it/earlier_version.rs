//! Migrations that an earlier version has begun, with its proxy or with the present one.

use rustix::process::Signal;
use std::time::Duration;
use stillpoint_migrate_tests::{Moment, Testbed, Trial};
use stillpoint_testing::{
    binary::{earlier, with},
    postgresql::available,
    skip,
};

const RUN: [&str; 3] = ["run", "--share", "0"];

fn killed_in(testbed: &Testbed, phase: &'static str) {
    let mut tool = testbed.tool(&RUN);
    Moment { phase: Some(phase), after: Duration::ZERO }.wait(&mut tool);
    tool.signal(Signal::KILL);
    tool.end();
}

#[test]
#[ignore = "full tier: an earlier version is compiled, three minutes of two processors"]
fn what_an_earlier_version_has_begun_is_completed_rolled_back_or_aborted() {
    if !available() {
        return;
    }
    let earlier = match earlier() {
        Ok(earlier) => earlier,
        Err(why) => skip!(why),
    };
    for proxy_is_earlier in [true, false] {
        let mut testbed = if proxy_is_earlier { with(earlier, Testbed::start) } else { Testbed::start() };
        with(earlier, || Trial::prepare(&testbed));
        for phase in ["copy", "catch-up"] {
            with(earlier, || killed_in(&testbed, phase));
            testbed.succeed(&["abort"]);
            testbed.assert_clean();
            with(earlier, || killed_in(&testbed, phase));
            testbed.succeed(&RUN);
            assert_eq!(testbed.standing(), (Some("switched".into()), Some("target".into())), "{phase}");
            testbed.succeed(&["fallback"]);
            testbed.assert_clean();
        }
        with(earlier, || testbed.succeed(&RUN));
        testbed.succeed(&["fallback"]);
        testbed.assert_clean();
        with(earlier, || testbed.succeed(&RUN));
        testbed.succeed(&["finish"]);
        assert_eq!(testbed.standing(), (None, Some("target".into())));
        testbed.kill_proxy();
    }
}
