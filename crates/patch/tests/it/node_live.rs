//! Debian's own Node.js, whose libuv is patched while a service works on its pool of threads; and the same with
//! quiescence points (`crates/patch/integrations/libuv`), with libuv alone built again.

use stillpoint_patch_tests::annotation;
use stillpoint_patch_tests::daemons::node::{INTEGRATION, Node, changes, package, program};
use stillpoint_patch_tests::daemons::{BuiltChanges, Daemon};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_patch_tests::victim::soak;
use stillpoint_patch_tests::{skip, wait};

#[test]
fn the_libuv_of_node_is_patched_and_reverted_under_load() {
    let (package, program) = match package().as_ref().map_err(Clone::clone).and_then(|p| Ok((p, program(p)?))) {
        Ok(found) => found,
        Err(why) => skip!(why),
    };
    let built = BuiltChanges::of(package, &changes(), &[]).expect("build the changes");
    let (patch, changes) = &built.patches[0];
    let mut node = Node::start(&program);
    let load = MonitoredLoad::of(node.load());
    for round in 0..if soak() { 200 } else { 2 } {
        let shown = if round == 0 { &changes[..] } else { &changes[round % changes.len()..][..1] };
        node.there_and_back(patch, shown, &[], &|| load.answered(50));
    }
    load.assert_clean();
}

#[test]
#[ignore = "full tier: libuv with quiescence points is compiled"]
fn node_changes_over_in_every_mode() {
    let (name, files) = INTEGRATION;
    let found = package().as_ref().map_err(Clone::clone).and_then(|p| p.with_points(name, &files));
    let (package, program) = match found.and_then(|package| program(&package).map(|program| (package, program))) {
        Ok(found) => found,
        Err(why) => skip!(why),
    };
    let options = annotation::options(name).expect("libstillpoint is there");
    let built = BuiltChanges::of(&package, &changes(), &options).expect("build the changes");
    let (patch, changes) = &built.patches[0];
    let mut node = Node::start(&program);
    let pid = node.pid();
    let load = MonitoredLoad::of(node.load());
    let there = |name: &str| annotation::taking_part(pid).iter().any(|thread| thread == name);
    wait::until("the loop and the pool to take part", || (there("loop") && there("pool")).then_some(()));
    for round in 0..if soak() { 200 } else { 3 } {
        for mode in ["local", "group:pool", "global", "probe"] {
            let one = &changes[round % changes.len()..][..1];
            node.there_and_back(patch, one, &["--quiescence", mode], &|| load.answered(50));
        }
    }
    load.assert_clean();
    for mode in ["local", "group:pool", "global"] {
        node.there_and_back(patch, &changes[..1], &["--quiescence", mode], &|| ());
    }
}
