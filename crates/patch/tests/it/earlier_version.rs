//! Processes that an earlier version has patched, and patches that it has built.

use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::{Phase, Program, apply, revert, status};
use stillpoint_testing::binary::{earlier, with};

/// The ledger in the target's memory, and the patch's file.
#[test]
#[ignore = "full tier: an earlier version is compiled, three minutes of two processors"]
fn what_an_earlier_version_has_patched_is_read_and_reverted() {
    let earlier = match earlier() {
        Ok(earlier) => earlier,
        Err(why) => skip!(why),
    };
    let program = Program::build("storm");
    let (patch, next) = with(earlier, || {
        let patch = program.patch(2);
        let next = program.patch_on_top(&patch, 2, 3);
        (patch, next)
    });
    let mut victim = program.start(&["idle"]);
    victim.announce(Phase::Over(1, 2));
    with(earlier, || apply(&patch, victim.pid()).succeed());
    victim.assert_settled(2);
    let seen = status(victim.pid()).succeed();
    assert!(seen.stdout.contains("storm"), "{seen}");
    // on top of the earlier version's
    victim.announce(Phase::Over(2, 3));
    apply(&next, victim.pid()).succeed();
    victim.assert_settled(3);
    victim.announce(Phase::Over(3, 2));
    revert(victim.pid()).succeed();
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).succeed();
    victim.assert_settled(1);
    victim.assert_no_residue();
}
