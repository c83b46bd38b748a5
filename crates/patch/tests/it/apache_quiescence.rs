//! Debian's Apache httpd with quiescence points (`crates/patch/integrations/apache2`): the threads of all its processes
//! change over in every mode under load.

use stillpoint_patch_tests::annotation;
use stillpoint_patch_tests::daemons::apache::{Apache, INTEGRATION, Mpm, PROGRAM, Visitors, changes, package};
use stillpoint_patch_tests::daemons::{BuiltChanges, Daemon};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_patch_tests::skip;
use stillpoint_patch_tests::victim::soak;

fn changes_over(mpm: Mpm, downloads: usize) {
    let (name, files) = INTEGRATION;
    let package = match package().as_ref().map_err(Clone::clone).and_then(|p| p.with_points(name, &files)) {
        Ok(package) => package,
        Err(why) => skip!(why),
    };
    let program: Vec<_> = changes(mpm).into_iter().filter(|change| change.target == PROGRAM).collect();
    let options = annotation::options(name).expect("libstillpoint is there");
    let built = BuiltChanges::of(&package, &program, &options).expect("build the changes");
    let (patch, changes) = &built.patches[0];
    let mut apache = Apache::start(&package, &package.program(PROGRAM), mpm);
    let load = MonitoredLoad::of(apache.load());
    let visitors = Visitors::start(apache.port(), downloads);
    for round in 0..if soak() { 200 } else { 3 } {
        for mode in ["local", "group:workers", "global", "probe"] {
            let one = &changes[round % changes.len()..][..1];
            let options = ["--timeout", "60s", "--quiescence", mode];
            apache.there_and_back(patch, one, &options, &|| load.answered(50));
        }
    }
    visitors.assert_clean();
    load.assert_clean();
}

#[test]
#[ignore = "full tier: Apache with quiescence points is compiled, minutes of two processors"]
fn apache_with_threads_changes_over_in_every_mode() {
    changes_over(Mpm::Event, 4);
}

/// A process with a slow download changes over at its end.
#[test]
#[ignore = "full tier: Apache with quiescence points is compiled, minutes of two processors"]
fn apache_with_processes_changes_over_in_every_mode() {
    changes_over(Mpm::Prefork, 1);
}
