//! Debian's own Apache httpd, stripped and unmodified: all processes of two MPMs patched under load, the executable and
//! the modules that it loads.

use stillpoint_patch_tests::daemons::apache::{Apache, Mpm, PROGRAM, Visitors, changes, package};
use stillpoint_patch_tests::daemons::{BuiltChanges, Daemon};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::soak;

fn patched_and_reverted(mpm: Mpm) {
    let package = match package() {
        Ok(package) => package,
        Err(why) => skip!(why),
    };
    let built = BuiltChanges::of(package, &changes(mpm), &[]).expect("build the changes");
    let mut apache = Apache::start(package, &package.program(PROGRAM), mpm);
    let load = MonitoredLoad::of(apache.load());
    let visitors = Visitors::start(apache.port(), 4);
    for round in 0..if soak() { 200 } else { 2 } {
        for (patch, changes) in &built.patches {
            let shown = if round == 0 { &changes[..] } else { &changes[round % changes.len()..][..1] };
            apache.there_and_back(patch, shown, &[], &|| load.answered(50));
        }
    }
    visitors.assert_clean();
    load.assert_clean();
}

#[test]
#[ignore = "full tier: outlines a package of its own"]
fn apache_with_threads_is_patched_and_reverted_under_load() {
    patched_and_reverted(Mpm::Event);
}

#[test]
#[ignore = "full tier: outlines a package of its own"]
fn apache_with_processes_is_patched_and_reverted_under_load() {
    patched_and_reverted(Mpm::Prefork);
}
