//! Debian's smbd with quiescence points (`crates/patch/integrations/samba`): the main loops of all its processes and their
//! pools of threads change over in every mode under load.

use stillpoint_patch_tests::annotation;
use stillpoint_patch_tests::daemons::samba::{INTEGRATION, LIBRARY, PROGRAM, Samba, changes, package};
use stillpoint_patch_tests::daemons::{BuiltChanges, Daemon, DaemonLoad};
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::soak;

#[test]
#[ignore = "full tier: half of Samba is compiled, half an hour of two processors"]
fn samba_changes_over_in_every_mode() {
    let (name, files) = INTEGRATION;
    let package = match package().as_ref().map_err(Clone::clone).and_then(|p| p.with_points(name, &files)) {
        Ok(package) => package,
        Err(why) => skip!(why),
    };
    let library: Vec<_> = changes().into_iter().filter(|change| change.target == LIBRARY).collect();
    let options = annotation::options(name).expect("libstillpoint is there");
    let built = BuiltChanges::of(&package, &library, &options).expect("build the changes");
    let (patch, changes) = &built.patches[0];
    let mut samba = Samba::start(&package, &package.program(PROGRAM));
    let load = Box::new(samba.load());
    for round in 0..if soak() { 200 } else { 3 } {
        for mode in ["local", "group:loops", "global", "probe"] {
            let one = &changes[round % changes.len()..][..1];
            let options = ["--timeout", "60s", "--quiescence", mode];
            samba.there_and_back(patch, one, &options, &|| load.answered(50));
        }
    }
    load.assert_clean();
}
