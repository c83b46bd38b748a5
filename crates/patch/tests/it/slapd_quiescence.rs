//! Debian's slapd with quiescence points (`crates/patch/integrations/slapd`): its listener and its pool, which is in
//! libldap, change over in every mode under load.

use stillpoint_patch_tests::annotation;
use stillpoint_patch_tests::daemons::slapd::{INTEGRATION, PROGRAM, Slapd, changes, package};
use stillpoint_patch_tests::daemons::{BuiltChanges, Daemon};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_patch_tests::victim::soak;
use stillpoint_patch_tests::{skip, wait};

#[test]
#[ignore = "full tier: OpenLDAP with quiescence points is compiled, minutes of two processors"]
fn slapd_changes_over_in_every_mode() {
    let (name, files) = INTEGRATION;
    let package = match package().as_ref().map_err(Clone::clone).and_then(|p| p.with_points(name, &files)) {
        Ok(package) => package,
        Err(why) => skip!(why),
    };
    let program: Vec<_> = changes().into_iter().filter(|change| change.target == PROGRAM).collect();
    let options = annotation::options(name).expect("libstillpoint is there");
    let built = BuiltChanges::of(&package, &program, &options).expect("build the changes");
    let (patch, changes) = &built.patches[0];
    let mut slapd = Slapd::start(&package, &package.program(PROGRAM));
    let pid = slapd.pid();
    let load = MonitoredLoad::of(slapd.load());
    let there = |name: &str| annotation::taking_part(pid).iter().any(|thread| thread == name);
    wait::until("all kinds of threads to take part", || {
        ["main", "listener", "worker"].iter().all(|n| there(n)).then_some(())
    });
    for round in 0..if soak() { 200 } else { 3 } {
        for mode in ["local", "group:workers", "global", "probe"] {
            let one = &changes[round % changes.len()..][..1];
            slapd.there_and_back(patch, one, &["--quiescence", mode], &|| load.answered(50));
        }
    }
    load.assert_clean();
    // without load every thread sleeps
    for mode in ["local", "group:workers", "global"] {
        slapd.there_and_back(patch, &changes[..1], &["--quiescence", mode], &|| ());
    }
}
