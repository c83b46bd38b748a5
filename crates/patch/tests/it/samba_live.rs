//! Debian's own smbd, stripped and unmodified: all of its processes are patched under load, those of sessions that are
//! open and those of new ones.

use stillpoint_patch_tests::daemons::samba::{PROGRAM, Samba, changes, package};
use stillpoint_patch_tests::daemons::{BuiltChanges, Daemon, DaemonLoad};
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::soak;

#[test]
#[ignore = "full tier: outlines a package of its own"]
fn samba_is_patched_and_reverted_under_load() {
    let package = match package() {
        Ok(package) => package,
        Err(why) => skip!(why),
    };
    let built = BuiltChanges::of(package, &changes(), &[]).expect("build the changes");
    assert_eq!(built.patches.len(), 2, "two libraries");
    let mut samba = Samba::start(package, &package.program(PROGRAM));
    let load = Box::new(samba.load());
    for round in 0..if soak() { 200 } else { 2 } {
        for (patch, changes) in &built.patches {
            let shown = if round == 0 { &changes[..] } else { &changes[round % changes.len()..][..1] };
            samba.there_and_back(patch, shown, &[], &|| load.answered(50));
        }
    }
    load.assert_clean();
}
