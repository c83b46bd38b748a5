//! Debian's own slapd, stripped and unmodified: its executable, a module that it loads and a library, patched under
//! load.

use stillpoint_patch_tests::daemons::slapd::{PROGRAM, Slapd, changes, package};
use stillpoint_patch_tests::daemons::{BuiltChanges, Daemon};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::soak;

#[test]
#[ignore = "full tier: outlines a package of its own"]
fn slapd_its_backend_and_its_library_are_patched_and_reverted_under_load() {
    let package = match package() {
        Ok(package) => package,
        Err(why) => skip!(why),
    };
    let built = BuiltChanges::of(package, &changes(), &[]).expect("build the changes");
    assert_eq!(built.patches.len(), 3, "the executable, a module, a library");
    let mut slapd = Slapd::start(package, &package.program(PROGRAM));
    let load = MonitoredLoad::of(slapd.load());
    for round in 0..if soak() { 200 } else { 2 } {
        for (patch, changes) in &built.patches {
            // all of them once, then one in turn
            let shown = if round == 0 { &changes[..] } else { &changes[round % changes.len()..][..1] };
            slapd.there_and_back(patch, shown, &[], &|| load.answered(200));
        }
    }
    load.assert_clean();
}
