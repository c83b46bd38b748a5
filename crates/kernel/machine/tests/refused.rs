//! Switches that cannot be: refused before anything is touched, or taken back from whatever phase fails.

use std::time::Duration;
use stillpoint_kernel_machine::clients::{Pulse, longest, take_along};
use stillpoint_kernel_machine::{Guest, Machine, Output};
use stillpoint_testing::binary::stillpoint;

const REST: Duration = Duration::from_millis(50);

/// A command in the machine ends with this code and says this.
#[track_caller]
fn says(machine: &mut Machine, command: &str, expected: i32, words: &str) {
    let Output { code, text } = machine.run(command);
    assert!(
        code == expected && text.contains(words),
        "`{command}` ended with {code}, not {expected} and {words:?}: {text}"
    );
}

/// Nothing of a switch is left: no guard, no kernel in wait, no image, no file system that cannot be written, and the same
/// processes.
#[track_caller]
fn as_before(machine: &mut Machine, processes: &str) {
    assert_eq!(machine.ok("nft list tables"), "");
    assert_eq!(machine.ok("cat /sys/kernel/kexec_loaded"), "0");
    machine.ok("test ! -e /var/lib/stillpoint/switch/images && touch /var/lib/stillpoint/written");
    assert_eq!(machine.ok(PROCESSES), processes);
}

const PROCESSES: &str = "systemctl show --property=MainPID --property=ActiveState redis-server memcached";

#[test]
fn a_switch_that_cannot_be_is_refused_or_taken_back() {
    let Some(guest) = Guest::for_test() else { return };
    let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
    let mut machine = Machine::boot(&guest, from, stillpoint());
    take_along(&mut machine, &["memcached", "redis-server"]);
    let pulses = [Pulse::redis(&machine, "pulse", REST), Pulse::memcached(&machine, "pulse", REST)];
    let processes = machine.ok(PROCESSES);
    refusals(&mut machine, from, to);
    as_before(&mut machine, &processes);
    for phase in ["preload", "passes", "close", "drain", "guard", "freeze", "seal", "still", "watch", "jump"] {
        let command = format!("stillpoint kernel switch --to {to} --fail-in {phase}");
        says(&mut machine, &command, 4, "a test made it fail");
        as_before(&mut machine, &processes);
    }
    machine.ok("grep -q '\"state\": \"aborted\"' /var/lib/stillpoint/switch/journal.json");
    for pulse in pulses {
        let beats = pulse.end();
        println!("{} requests; the longest took {:.1} s", beats.len(), longest(&beats).as_secs_f64());
    }
}

/// What is refused before anything is touched: code 3, and the reason by name.
#[track_caller]
fn refusals(machine: &mut Machine, from: &str, to: &str) {
    let with = |line: &str| {
        let other = "/run/other.toml";
        let edit = format!("{{ echo '{line}'; sed '/^{}/d' /etc/stillpoint/kernel.toml; }} >{other}", &line[..4]);
        format!("{edit}; stillpoint kernel switch --to {to} --config {other}")
    };
    says(machine, "stillpoint kernel switch --to 6.99-none", 3, "/boot/vmlinuz-6.99-none is not there");
    says(machine, "stillpoint kernel switch --to 5.10-none", 3, "is older than");
    says(machine, &format!("stillpoint kernel switch --to {from}"), 3, "runs already");
    says(machine, &with("criu = \"/nowhere/criu\""), 3, "/nowhere/criu");
    says(machine, &with("state = \"/run/switch\""), 3, "lies in memory");
    says(machine, &format!("stillpoint kernel switch --to {to} --unit cron"), 3, "cron");
    machine.ok("systemd-run -q --unit=holder -p StandardOutput=null -p StandardError=null sh -c 'exec sleep infinity 3>/run/holder.data'");
    machine.until("test -e /run/holder.data");
    says(
        machine,
        &format!("stillpoint kernel switch --to {to} --dry-run --unit holder"),
        3,
        "has /run/holder.data open, which lies in memory",
    );
    machine.ok("systemctl stop holder; rm /run/holder.data");
    machine.ok("systemd-run -q --unit=between -p RemainAfterExit=yes -p After=memcached.service -p Before=redis-server.service true");
    says(
        machine,
        &format!("stillpoint kernel switch --to {to}"),
        3,
        "between.service starts after memcached.service and before redis-server.service",
    );
    machine.ok("systemctl stop between");
    let sandbox = "mv /etc/systemd/system/redis-server.service.d/stillpoint.conf /run; systemctl daemon-reload";
    says(machine, &format!("{sandbox}; stillpoint kernel switch --to {to}"), 3, "its sandbox is closed");
    machine.ok("mv /run/stillpoint.conf /etc/systemd/system/redis-server.service.d/; systemctl daemon-reload");
    let lock = "/var/lib/stillpoint/switch/lock";
    machine.ok(&format!("mkdir -p {} && touch {lock}", lock.trim_end_matches("/lock")));
    says(machine, &format!("flock {lock} stillpoint kernel switch --to {to}"), 3, "another switch is under way");
    machine.ok(&format!("head -c 100000 /boot/vmlinuz-{to} >/boot/vmlinuz-7.0-torn && cp /boot/initrd.img-{to} /boot/initrd.img-7.0-torn"));
    says(machine, "stillpoint kernel switch --to 7.0-torn", 3, "it has 100000 bytes, and its header says");
    // all but 1 MiB of what is free
    machine.ok("fallocate -l $(( $(df --output=avail -B1 / | tail -n 1) - 1048576 )) /fill");
    says(machine, &format!("stillpoint kernel switch --to {to}"), 3, "MiB free, the image needs up to");
    machine.ok("rm /fill");
}
