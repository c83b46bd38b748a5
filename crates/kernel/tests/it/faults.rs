//! Faults after the point of no return, and around it: state and data of the units afterwards.

use std::time::Duration;
use stillpoint_testing::binary::stillpoint;
use stillpoint_testing::machine::clients::{
    Pulse, Sql, Tally, append, prepare_mariadb, switch_with, take_along, until_alone, until_done, until_state,
};
use stillpoint_testing::machine::{Guest, Machine, emulated};
use stillpoint_testing::soak::is_soak;

const REST: Duration = Duration::from_millis(50);

/// Boots a machine with a redis that writes a log of its changes but never syncs it, and a MariaDB as Debian ships it.
#[track_caller]
fn with_files(guest: &Guest) -> Machine {
    let mut machine = Machine::boot(guest, &guest.kernels[0], stillpoint());
    machine.ok("sed -i 's/^appendonly no/appendonly yes/; s/^appendfsync .*/appendfsync no/' /etc/redis/redis.conf");
    take_along(&mut machine, &["mariadb", "redis-server"]);
    prepare_mariadb(&mut machine);
    // the new configuration must survive a loss of power
    machine.ok("sync");
    machine
}

/// Asserts that MariaDB has all changes of a tally that it acknowledged, and one more at most.
#[track_caller]
fn kept(machine: &mut Machine, name: &str, tally: Tally) {
    let acknowledged = tally.acknowledged();
    machine.until("mariadb -e 'SELECT 1'");
    until_alone(machine, "mariadb");
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
            ("health", "does not become healthy"),
            ("damage", "is damaged"),
            ("reset", "the machine stopped after the processes had run"),
        ];
        // the last one is enough for a short test: images that must not be used
        for (fault, why) in &cases[if is_soak() { 0 } else { 2 }..] {
            append(&mut machine, &format!("stillpoint.fault={fault}"));
            let tally = Tally::mariadb(&machine, fault, REST);
            switch_with(&mut machine, &format!("--to {to}"), from);
            let journal = until_state(&mut machine, "cold");
            assert!(journal.contains(why), "{fault}: {journal}");
            kept(&mut machine, fault, tally);
            machine.until("redis-cli ping");
            assert_eq!(machine.ok("nft list tables"), "");
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
            let tally = Tally::mariadb(&machine, phase, REST);
            lose(&mut machine, phase);
            // the boot would start them
            machine.until("systemctl start mariadb redis-server");
            kept(&mut machine, phase, tally);
        }
        let after: &[&str] = if is_soak() { &["still", "watch", "jump"] } else { &["still"] };
        for phase in after {
            let pulses = [Pulse::redis(&machine, phase, REST), Pulse::mariadb(&machine, phase, REST)];
            lose(&mut machine, phase);
            until_done(&mut machine);
            let beats = pulses.map(Pulse::end);
            println!("{} requests, each had its effect once", beats.iter().map(Vec::len).sum::<usize>());
            // the log continues where the image has it: nothing that the page cache held is missing
            machine.ok("systemctl restart redis-server");
            machine.until("redis-cli ping");
            assert_eq!(machine.ok(&format!("redis-cli --raw get {phase}")), beats[0].len().to_string());
        }
    });
}
