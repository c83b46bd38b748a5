//! Faults after the point of no return, and around it: state and data of the units afterwards.

use std::time::Duration;
use stillpoint_testing::binary::stillpoint;
use stillpoint_testing::machine::clients::{
    AcknowledgedCount, CountingClient, Sql, append, prepare_mariadb, prepare_units, switch_with, wait_until_done,
    wait_until_single_process, wait_until_state,
};
use stillpoint_testing::machine::{Guest, Machine, emulated};
use stillpoint_testing::soak::is_soak;

const REQUEST_INTERVAL: Duration = Duration::from_millis(50);

/// Boots a machine with a redis that writes a log of its changes but never syncs it, and a MariaDB as Debian ships it.
#[track_caller]
fn with_files(guest: &Guest) -> Machine {
    let mut machine = Machine::boot(guest, &guest.kernels[0], stillpoint());
    machine
        .succeed("sed -i 's/^appendonly no/appendonly yes/; s/^appendfsync .*/appendfsync no/' /etc/redis/redis.conf");
    prepare_units(&mut machine, &["mariadb", "redis-server"]);
    prepare_mariadb(&mut machine);
    // the new configuration must survive a loss of power
    machine.succeed("sync");
    machine
}

/// Asserts that MariaDB has all changes of a tally that it acknowledged, and one more at most.
#[track_caller]
fn assert_kept(machine: &mut Machine, name: &str, tally: AcknowledgedCount) {
    let acknowledged = tally.acknowledged();
    machine.run_until_success("mariadb -e 'SELECT 1'");
    wait_until_single_process(machine, "mariadb");
    let there = Sql::connect(machine).ask(&format!("SELECT n FROM t.pulse WHERE name = '{name}'"));
    let there: u64 = there.and_then(|number| number.parse().ok()).expect("its row");
    println!("{acknowledged} changes were acknowledged, {there} are there");
    assert!(acknowledged > 0 && (acknowledged..=acknowledged + 1).contains(&there), "{acknowledged}, {there}");
}

/// Once a process has run on the new kernel its files are newer than its image: from then on units start from their
/// files. The same holds if no kernel can restore an image.
#[test]
fn no_image_is_used_when_it_must_not_or_cannot_be() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        let mut machine = with_files(guest);
        let cases = [
            ("health", "a test made it fail after confirm"),
            ("damage", "is damaged"),
            ("reset", "the machine stopped after the processes had run"),
        ];
        // the last one is enough for a short test: images that must not be used
        for (fault, why) in &cases[if is_soak() { 0 } else { 2 }..] {
            append(&mut machine, &format!("stillpoint.fault={fault}"));
            let tally = AcknowledgedCount::mariadb(&machine, fault, REQUEST_INTERVAL);
            switch_with(&mut machine, &format!("--to {to}"), from);
            let journal = wait_until_state(&mut machine, "cold");
            assert!(journal.contains(why), "{fault}: {journal}");
            assert_kept(&mut machine, fault, tally);
            machine.run_until_success("redis-cli ping");
            assert_eq!(machine.succeed("nft list tables"), "");
            println!("COUNT cold starts, {fault} 1");
        }
    });
}

/// Until the images are sealed the files are valid; from then on the images, with files of the same age.
#[test]
fn power_lost_in_a_switch_loses_nothing_that_was_acknowledged() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        let mut machine = with_files(guest);
        let lose = |machine: &mut Machine, phase: &str| {
            println!("power lost in {phase}");
            switch_with(machine, &format!("--to {to} --lose-power-in {phase}"), from);
        };
        let before: &[&str] =
            if is_soak() { &["preload", "passes", "close", "drain", "guard", "freeze", "seal"] } else { &["seal"] };
        for phase in before {
            let tally = AcknowledgedCount::mariadb(&machine, phase, REQUEST_INTERVAL);
            lose(&mut machine, phase);
            // the boot would start them
            machine.run_until_success("systemctl start mariadb redis-server");
            assert_kept(&mut machine, phase, tally);
        }
        let after: &[&str] = if is_soak() { &["still", "watch", "jump"] } else { &["still"] };
        for phase in after {
            let pulses = [
                CountingClient::redis(&machine, phase, REQUEST_INTERVAL),
                CountingClient::mariadb(&machine, phase, REQUEST_INTERVAL),
            ];
            lose(&mut machine, phase);
            wait_until_done(&mut machine);
            let beats = pulses.map(CountingClient::end);
            println!("{} requests, each had its effect once", beats.iter().map(Vec::len).sum::<usize>());
            // the log continues where the image has it: nothing that the page cache held is missing
            machine.succeed("systemctl restart redis-server");
            machine.run_until_success("redis-cli ping");
            assert_eq!(machine.succeed(&format!("redis-cli --raw get {phase}")), beats[0].len().to_string());
        }
    });
}
