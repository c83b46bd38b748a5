//! The example server under load, patched in every mode: no request fails, no connection is lost, each thread migrates
//! once, and with a global request no old code answers after the first answer of new code.

use std::collections::BTreeMap;
use std::time::Duration;
use stillpoint_patch_tests::hash_server::{HashServer, Sample, seeds, zero_bits};
use stillpoint_patch_tests::quiescence_program::in_mode;
use stillpoint_patch_tests::victim::{apply, revert};

const BITS: u32 = 10;

/// Answers of the old and the new code to a seed that shows the difference.
struct Difference {
    seed: [u8; 16],
    old: [u8; 16],
    new: [u8; 16],
}

/// Gets the answers of a separate server, before and after.
fn difference(server: &HashServer) -> Difference {
    let running = server.start(BITS);
    let mut client = running.client();
    let mut ask = || seeds().map(|seed| (seed, client.ask(seed).hash)).collect::<BTreeMap<_, _>>();
    let old = ask();
    apply(server.patch(), running.pid()).succeed();
    let new = ask();
    assert!(old.values().all(|hash| zero_bits(hash) > BITS), "the mistake is not there");
    assert!(new.values().all(|hash| zero_bits(hash) >= BITS), "the mended server stops too early");
    let (seed, old) = old.into_iter().find(|(seed, hash)| new[seed] != *hash).expect("a seed that shows it");
    let new = new[&seed];
    assert_eq!(zero_bits(&new), BITS);
    Difference { seed, old, new }
}

/// Returns the version of each client's answers, in order: true for the new.
fn sides(clients: &[Vec<Sample>], difference: &Difference) -> Vec<Vec<bool>> {
    let side = |sample: &Sample| {
        let known = [difference.old, difference.new].contains(&sample.hash);
        assert!(known, "an answer of neither version: {sample:?}");
        sample.hash == difference.new
    };
    clients.iter().map(|samples| samples.iter().map(side).collect()).collect()
}

#[test]
fn each_mode_mends_the_server_under_load() {
    let server = HashServer::build();
    let difference = difference(&server);
    for mode in ["local", "group:workers", "global", "probe"] {
        let mut running = server.start(BITS);
        let load = running.load(4, difference.seed, Duration::from_millis(1));
        let mut idle = running.client();
        assert_eq!(idle.ask(difference.seed).hash, difference.old);
        in_mode(apply(server.patch(), running.pid()), mode, "60s").succeed();
        // a connection that was idle all the time, and a new one
        assert_eq!(idle.ask(difference.seed).hash, difference.new, "{mode}");
        assert_eq!(running.client().ask(difference.seed).hash, difference.new, "{mode}");
        std::thread::sleep(Duration::from_millis(100));
        let clients = load.end();
        assert!(clients.iter().flatten().all(|sample| sample.lost == 0), "{mode}: a connection was lost");
        for (client, answers) in sides(&clients, &difference).iter().enumerate() {
            assert!(answers.len() > 4 && answers.is_sorted(), "{mode}: client {client} went back: {answers:?}");
            assert_eq!(answers.last(), Some(&true), "{mode}: client {client} never got new answers");
        }
        let all: Vec<&Sample> = clients.iter().flatten().collect();
        let first_new = all.iter().filter(|s| s.hash == difference.new).map(|s| s.received_ns).min();
        let last_old = all.iter().filter(|s| s.hash == difference.old).map(|s| s.sent_ns).max();
        if mode == "global" {
            assert!(last_old < first_new, "old and new code ran at the same time: {last_old:?} {first_new:?}");
        }
        in_mode(revert(running.pid()), mode, "60s").succeed();
        assert_eq!(idle.ask(difference.seed).hash, difference.old, "{mode}");
        running.assert_running();
    }
}
