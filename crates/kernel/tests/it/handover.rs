//! Images in memory that one kernel hands over to the next one: kernels of `setup/handover`, whose build is slow.

use std::time::Duration;
use stillpoint_testing::binary::stillpoint;
use stillpoint_testing::machine::clients::{
    CountingClient, append, longest, prepare_units, read_pairs, store_pairs, switch, wait_until_done, wait_until_state,
};
use stillpoint_testing::machine::{Guest, Machine, Output, Shape};
use stillpoint_testing::skipped;

const REQUEST_INTERVAL: Duration = Duration::from_millis(250);
const KEYS: u32 = 2000;
const HANDOVER_ARGUMENTS: &str = "kho=on liveupdate=on";
const MOUNT_POINT: &str = "/var/lib/stillpoint/switch/handover";

#[track_caller]
fn guest() -> Option<Guest> {
    Guest::for_test()?.with_handover().map_err(|why| skipped(&why)).ok()
}

/// Boots a machine whose images are in memory that is handed over.
#[track_caller]
fn boot(guest: &Guest, arguments: &str) -> Machine {
    let mut machine =
        Machine::boot_as(guest, &guest.kernels[0], stillpoint(), Shape { append: arguments, ..Shape::default() });
    prepare_units(&mut machine, &["memcached", "redis-server"]);
    machine.succeed("sed -i '1i images = \"handover\"' /etc/stillpoint/kernel.toml");
    machine
}

#[track_caller]
fn refused(machine: &mut Machine, to: &str, words: &str) {
    let Output { code, text } = machine.run(&format!("stillpoint kernel switch --to {to} --dry-run"));
    assert!(code == 3 && text.contains(words), "{code} and not {words:?}: {text}");
}

/// Asserts that no mount, no loop device and no memory is left.
#[track_caller]
fn assert_nothing_left(machine: &mut Machine) {
    machine.run_until_success(&format!(
        "! grep -q {MOUNT_POINT} /proc/self/mountinfo && test ! -e /sys/class/block/loop0/loop"
    ));
}

/// Goes to another kernel and back, as a restore fails there, and then to it: with the same memory each time.
#[test]
#[ignore = "two kernels to be built and four boots of an emulated machine: one of the long forms"]
fn images_reach_the_next_kernel_in_memory_that_is_handed_over() {
    let Some(guest) = guest() else { return };
    let [from, to] = &guest.kernels[..] else { panic!("two kernels: {:?}", guest.kernels) };
    let mut machine = boot(&guest, HANDOVER_ARGUMENTS);
    machine.succeed("test -c /dev/liveupdate");
    let arguments = machine.succeed(&format!("stillpoint kernel switch --to {to} --dry-run"));
    assert!(
        arguments.contains("warning: images are located in") && arguments.contains("no other; after a panic"),
        "{arguments}"
    );
    append(&mut machine, "kho=off");
    refused(&mut machine, to, &format!("{to} cannot take memory over: its command line has no kho=on"));
    append(&mut machine, "");
    let mut client = machine.client(6379);
    store_pairs(&mut client, KEYS);
    let pulses = [
        CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL),
        CountingClient::memcached(&machine, "pulse", REQUEST_INTERVAL),
    ];
    // a switch that fails is rolled back, and the memory is released
    let failed = machine.run(&format!("stillpoint kernel switch --to {to} --fail-in jump"));
    assert!(failed.text.contains("a test made it fail"), "{}", failed.text);
    assert_nothing_left(&mut machine);
    for (fault, ends_on, why) in
        [("stillpoint.fault=restore", from, "a test made it fail after restore"), ("", to, "\"why\": null")]
    {
        append(&mut machine, fault);
        switch(&mut machine, to, ends_on);
        let journal = wait_until_done(&mut machine);
        println!("{journal}");
        assert!(journal.contains(why) && journal.contains("\"handover\": {"), "{journal}");
        read_pairs(&mut client, KEYS);
        assert_nothing_left(&mut machine);
        println!("COUNT ways with images that were handed over, {fault} 1");
    }
    for pulse in pulses {
        println!("COUNT requests that had their effect once {}", pulse.end().len());
    }
}

/// A kernel that was not started by kexec has no such memory, and only the leader of a restore can pass it on.
#[test]
#[ignore = "two kernels to be built and four boots of an emulated machine: one of the long forms"]
fn units_start_from_their_files_when_no_process_hands_their_images_on() {
    let Some(guest) = guest() else { return };
    let [from, to] = &guest.kernels[..] else { panic!("two kernels: {:?}", guest.kernels) };
    let mut machine = boot(&guest, HANDOVER_ARGUMENTS);
    store_pairs(&mut machine.client(6379), KEYS);
    machine.succeed("redis-cli save");
    for (fault, ends_on, why) in [
        ("stillpoint.initrd=panic", from, "this kernel was not started by a kexec"),
        ("stillpoint.fault=leader", to, "their leader was killed"),
    ] {
        append(&mut machine, fault);
        switch(&mut machine, to, ends_on);
        let journal = wait_until_state(&mut machine, "cold");
        assert!(journal.contains(why), "{journal}");
        machine.run_until_success("redis-cli ping");
        read_pairs(&mut machine.client(6379), KEYS);
        assert_eq!(machine.succeed("nft list tables"), "");
        assert_nothing_left(&mut machine);
    }
}

#[test]
#[ignore = "two kernels to be built: one of the long forms"]
fn kernels_that_were_not_told_to_hand_memory_over_are_refused() {
    let Some(guest) = guest() else { return };
    let [from, to] = &guest.kernels[..] else { panic!("two kernels: {:?}", guest.kernels) };
    let mut machine = boot(&guest, "");
    refused(&mut machine, to, &format!("{from}, which runs, cannot hand memory over: its command line has no kho=on"));
    refused(&mut machine, to, &format!("{to} cannot take memory over: its command line has no kho=on"));
    machine.succeed(&format!("sed -i 's/^CONFIG_LIVEUPDATE=y/# &/' /boot/config-{to}"));
    refused(&mut machine, to, "it was built without CONFIG_LIVEUPDATE");
}

/// Memory of redis in [`places_for_images_are_measured`].
const MEASURED_MIB: u32 = 128;
/// Phases in the journal, of both kernels.
const PHASES: [&str; 10] =
    ["check", "memory", "preload", "passes", "freeze", "boot", "restore", "release", "confirm", "fill"];

/// Returns the milliseconds of a phase in a journal.
fn milliseconds(journal: &str, phase: &str) -> Option<u64> {
    let arguments = journal.split_once(&format!("\"phase\": \"{phase}\""))?.1;
    let number = arguments.split_once("\"duration_us\": ")?.1.split(',').next()?;
    Some(number.parse::<u64>().ok()? / 1000)
}

/// Makes one switch of a redis with its images in one place; prints the time of its phases, and the longest request.
#[track_caller]
fn measure(guest: &Guest, (from, to): (&str, &str), place: &str) {
    let append = if place == "region" { "memmap=384M!1G" } else { HANDOVER_ARGUMENTS };
    let mut machine =
        Machine::boot_as(guest, from, stillpoint(), Shape { memory_mib: 2560, append, ..Shape::default() });
    prepare_units(&mut machine, &["redis-server"]);
    if place == "region" {
        machine.succeed("mke2fs -q -t ext4 -b 4096 /dev/pmem0 && mkdir -p /pmem && mount -o dax /dev/pmem0 /pmem");
        machine.succeed("sed -i '1i images = \"/pmem\"' /etc/stillpoint/kernel.toml");
    } else if place == "handover" {
        machine.succeed("sed -i '1i images = \"handover\"' /etc/stillpoint/kernel.toml");
    }
    let fat =
        format!("for n = 1, {} do redis.call('SET', 'fat' .. n, string.rep('x', 1000) .. n) end", MEASURED_MIB * 1024);
    machine.succeed(&format!("redis-cli config set save '' && redis-cli EVAL \"{fat}\" 0"));
    let pulse = CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL);
    switch(&mut machine, to, to);
    let journal = wait_until_done(&mut machine);
    assert!(journal.contains("\"why\": null"), "{journal}");
    let longest = longest(&pulse.end()).as_millis();
    let took = PHASES.map(|phase| milliseconds(&journal, phase).map_or("".into(), |took| took.to_string()));
    println!("| {place} | {longest} | {} |", took.join(" | "));
}

/// Measures the same program with each place for images, in milliseconds; two rounds, so that none is always the first.
#[test]
#[ignore = "two kernels to be built and twelve boots of an emulated machine: one of the long forms"]
fn places_for_images_are_measured() {
    let Some(guest) = guest() else { return };
    let [from, to] = &guest.kernels[..] else { panic!("two kernels: {:?}", guest.kernels) };
    println!("{MEASURED_MIB} MiB\n| images | longest request | {} |", PHASES.join(" | "));
    for _ in 0..2 {
        for place in ["disk", "region", "handover"] {
            measure(&guest, (from, to), place);
        }
    }
}
