//! A structure that gains a member, in a program whose threads make and end objects of it all the time.

use stillpoint_patch_tests::victim::{Phase, Program, Victim, apply, refused, revert};
use stillpoint_patch_tests::wait;

const ALL_AT_ONCE: [&str; 2] = ["--quiescence", "stop"];

#[test]
fn an_added_member_lives_beside_the_objects() {
    let program = Program::build("sessions");
    let without = program.builder(2, &program.dir().join("without.patch")).run();
    refused(&without, &["member `hits` added", "try: --shadow-member session.hits"]);
    let other = program.builder(2, &program.dir().join("other.patch")).args(["--shadow-member", "session.hats"]).run();
    refused(&other, &["session.hats", "[shadow-type]"]);

    let patch = program.patch_with(2, &["--shadow-member", "session.hits"]);
    let mut victim = program.start(&[]);
    refused(&apply(&patch, victim.pid()).run(), &["scope process", "--quiescence global, or stop"]);
    // the second time, old code has made and ended sessions whose addresses the table knew
    for _ in 0..2 {
        victim.announce(Phase::Over(1, 2));
        apply(&patch, victim.pid()).args(ALL_AT_ONCE).succeed();
        victim.assert_settled(2);
        let calls = |victim: &Victim| victim.slots().iter().map(|slot| slot.calls).sum::<u64>();
        let begin = calls(&victim);
        wait::until("the threads to make some thousand objects", || (calls(&victim) > begin + 20_000).then_some(()));
        victim.assert_settled(2);
        victim.announce(Phase::Over(2, 1));
        revert(victim.pid()).args(ALL_AT_ONCE).succeed();
        victim.assert_settled(1);
    }
}
