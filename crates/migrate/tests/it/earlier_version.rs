//! Migrations that an earlier version has begun, with its proxy or with the present one.

use rustix::process::Signal;
use std::time::Duration;
use stillpoint_migrate_tests::{Ended, Moment, Stage, Trial};
use stillpoint_testing::{
    binary::{earlier, with},
    postgresql::available,
    skip,
};

const RUN: [&str; 3] = ["run", "--share", "0"];

#[track_caller]
fn succeeds(stage: &Stage, words: &[&str]) -> Ended {
    let ended = stage.run(words);
    assert_eq!(ended.code, Some(0), "{words:?}: {ended:?}");
    ended
}

fn killed_in(stage: &Stage, phase: &'static str) {
    let mut tool = stage.tool(&RUN);
    Moment { phase: Some(phase), after: Duration::ZERO }.come(&mut tool);
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
        let mut stage = if proxy_is_earlier { with(earlier, Stage::start) } else { Stage::start() };
        with(earlier, || Trial::prepare(&stage));
        for phase in ["copy", "catch-up"] {
            with(earlier, || killed_in(&stage, phase));
            succeeds(&stage, &["abort"]);
            stage.assert_clean();
            with(earlier, || killed_in(&stage, phase));
            succeeds(&stage, &RUN);
            assert_eq!(stage.standing(), (Some("switched".into()), Some("target".into())), "{phase}");
            succeeds(&stage, &["fallback"]);
            stage.assert_clean();
        }
        with(earlier, || succeeds(&stage, &RUN));
        succeeds(&stage, &["fallback"]);
        stage.assert_clean();
        with(earlier, || succeeds(&stage, &RUN));
        succeeds(&stage, &["finish"]);
        assert_eq!(stage.standing(), (None, Some("target".into())));
        stage.kill_proxy();
    }
}
