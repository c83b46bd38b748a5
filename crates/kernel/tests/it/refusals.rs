//! Switches that are impossible: refused before anything is touched, or rolled back from the phase that fails.

use std::time::Duration;
use stillpoint_testing::binary::stillpoint;
use stillpoint_testing::machine::clients::{CountingClient, longest, prepare_units};
use stillpoint_testing::machine::{Machine, Output, Shape, emulated};
use stillpoint_testing::soak::is_soak;

const REQUEST_INTERVAL: Duration = Duration::from_millis(50);

/// Asserts that a command in the machine ends with this code and prints these words.
#[track_caller]
fn assert_output(machine: &mut Machine, command: &str, expected: i32, words: &str) {
    let Output { code, text } = machine.run(command);
    assert!(
        code == expected && text.contains(words),
        "`{command}` ended with {code}, not {expected} and {words:?}: {text}"
    );
}

/// Asserts that nothing of a switch is left: no guard, no loaded kernel, no image, no read-only file system, and the
/// same processes.
#[track_caller]
fn assert_unchanged(machine: &mut Machine, processes: &str) {
    assert_eq!(machine.succeed("nft list tables"), "");
    assert_eq!(machine.succeed("cat /sys/kernel/kexec_loaded"), "0");
    machine.succeed("test ! -e /var/lib/stillpoint/switch/images && touch /var/lib/stillpoint/written");
    assert_eq!(machine.succeed(PROCESSES), processes);
}

const PROCESSES: &str = "systemctl show --property=MainPID --property=ActiveState redis-server memcached";

#[test]
fn a_switch_that_cannot_be_is_refused_or_taken_back() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        let region = Shape { append: "memmap=64M!1G", ..Shape::default() };
        let mut machine = Machine::boot_as(guest, from, stillpoint(), region);
        prepare_units(&mut machine, &["memcached", "redis-server"]);
        let pulses = [
            CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL),
            CountingClient::memcached(&machine, "pulse", REQUEST_INTERVAL),
        ];
        let processes = machine.succeed(PROCESSES);
        check_remaining_units(&mut machine, to);
        check_refusals(&mut machine, from, to);
        check_memory_refusals(&mut machine, to);
        assert_unchanged(&mut machine, &processes);
        // a phase before the units are stopped, one while they are, and the last one are enough for a short test
        let all = ["preload", "stop", "passes", "close", "drain", "guard", "freeze", "seal", "still", "watch", "jump"];
        for phase in all.iter().filter(|phase| is_soak() || ["passes", "guard", "seal", "jump"].contains(phase)) {
            let command = format!("stillpoint kernel switch --to {to} --fail-in {phase}");
            assert_output(&mut machine, &command, 4, "a test made it fail");
            assert_unchanged(&mut machine, &processes);
        }
        machine.succeed("grep -q '\"state\": \"aborted\"' /var/lib/stillpoint/switch/journal.json");
        for pulse in pulses {
            let beats = pulse.end();
            println!("{} requests; the longest took {:.1} s", beats.len(), longest(&beats).as_secs_f64());
        }
    });
}

/// A tool that is killed leaves neither a guard nor a sealed journal, and the units run on.
#[test]
#[ignore = "a boot of an emulated machine more: one of the long forms"]
fn a_switch_that_is_killed_is_taken_back() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        let mut machine = Machine::boot(guest, from, stillpoint());
        prepare_units(&mut machine, &["memcached", "redis-server"]);
        let pulses = [
            CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL),
            CountingClient::memcached(&machine, "pulse", REQUEST_INTERVAL),
        ];
        let processes = machine.succeed(PROCESSES);
        for phase in ["passes", "freeze", "seal", "still", "jump"] {
            // the shell of the machine reports that it was killed
            machine.run(&format!("stillpoint kernel switch --to {to} --killed-in {phase}"));
            machine.run_until_success("grep -q '\"state\": \"aborted\"' /var/lib/stillpoint/switch/journal.json && test -z \"$(nft list tables)\"");
            // the guardian holds the lock until it has ended
            machine.run_until_success("flock -n /var/lib/stillpoint/switch/lock true");
            assert_unchanged(&mut machine, &processes);
            machine.succeed("grep -q 'the switch was killed' /var/lib/stillpoint/switch/journal.json");
        }
        for pulse in pulses {
            let beats = pulse.end();
            println!("{} requests; the longest took {:.1} s", beats.len(), longest(&beats).as_secs_f64());
        }
    });
}

/// Units that stay are listed before, and run again after a switch that is rolled back.
#[track_caller]
fn check_remaining_units(machine: &mut Machine, to: &str) {
    machine.succeed("printf '[Service]\\nExecStart=/bin/sleep infinity\\n' >/etc/systemd/system/by-hand.service && systemctl daemon-reload");
    machine.succeed("systemctl start by-hand && systemd-run -q --unit=made sleep infinity");
    let told = machine.succeed(&format!("stillpoint kernel switch --to {to} --dry-run"));
    let line = |words: &str| told.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("{told}"));
    assert!(line("are stopped before the others are frozen").contains("by-hand.service"), "{told}");
    assert!(line("are not started again").contains("by-hand.service"), "{told}");
    assert!(line("is terminated by the kexec").contains("made.service"), "{told}");
    let before = machine.succeed("systemctl show --value --property=MainPID by-hand made");
    assert_output(machine, &format!("stillpoint kernel switch --to {to} --fail-in passes"), 4, "a test made it fail");
    let after = machine.succeed("systemctl show --value --property=MainPID by-hand made");
    assert_eq!(machine.succeed("systemctl is-active by-hand made"), "active\nactive");
    let pids = |text: &str| text.split_whitespace().map(ToOwned::to_owned).collect::<Vec<_>>();
    assert!(pids(&before)[0] != pids(&after)[0] && pids(&before)[1] == pids(&after)[1], "{before}\n{after}");
    machine.succeed("systemctl stop by-hand made");
}

/// Asserts refusals before anything is touched: code 3, and the reason by name.
#[track_caller]
fn check_refusals(machine: &mut Machine, from: &str, to: &str) {
    let with = |line: &str| {
        let other = "/run/other.toml";
        let edit = format!("{{ echo '{line}'; sed '/^{}/d' /etc/stillpoint/kernel.toml; }} >{other}", &line[..4]);
        format!("{edit}; stillpoint kernel switch --to {to} --config {other}")
    };
    assert_output(machine, "stillpoint kernel switch --to 6.99-none", 3, "/boot/vmlinuz-6.99-none does not exist");
    assert_output(machine, "stillpoint kernel switch --to 5.10-none", 3, "is older than");
    assert_output(machine, &format!("stillpoint kernel switch --to {from}"), 3, "is already running");
    assert_output(machine, &with("criu = \"/nowhere/criu\""), 3, "/nowhere/criu");
    assert_output(machine, &with("state = \"/run/switch\""), 3, "is located in memory");
    assert_output(machine, &format!("stillpoint kernel switch --to {to} --unit cron"), 3, "cron");
    machine.succeed("systemd-run -q --unit=holder -p StandardOutput=null -p StandardError=null sh -c 'exec sleep infinity 3>/run/holder.data'");
    machine.run_until_success("test -e /run/holder.data");
    assert_output(
        machine,
        &format!("stillpoint kernel switch --to {to} --dry-run --unit holder"),
        3,
        "has /run/holder.data open, which is located in memory",
    );
    machine.succeed("systemctl stop holder; rm /run/holder.data");
    machine.succeed("systemd-run -q --unit=between -p RemainAfterExit=yes -p After=memcached.service -p Before=redis-server.service true");
    assert_output(
        machine,
        &format!("stillpoint kernel switch --to {to}"),
        3,
        "between.service starts after memcached.service and before redis-server.service",
    );
    machine.succeed("systemctl stop between");
    let sandbox = "mv /etc/systemd/system/redis-server.service.d/stillpoint.conf /run; systemctl daemon-reload";
    assert_output(machine, &format!("{sandbox}; stillpoint kernel switch --to {to}"), 3, "its sandbox is closed");
    machine.succeed("mv /run/stillpoint.conf /etc/systemd/system/redis-server.service.d/; systemctl daemon-reload");
    let lock = "/var/lib/stillpoint/switch/lock";
    machine.succeed(&format!("mkdir -p {} && touch {lock}", lock.trim_end_matches("/lock")));
    assert_output(
        machine,
        &format!("flock {lock} stillpoint kernel switch --to {to}"),
        3,
        "another switch is in progress",
    );
    machine.succeed(&format!("head -c 100000 /boot/vmlinuz-{to} >/boot/vmlinuz-7.0-torn && cp /boot/initrd.img-{to} /boot/initrd.img-7.0-torn"));
    assert_output(machine, "stillpoint kernel switch --to 7.0-torn", 3, "it has 100000 bytes, and its header requires");
    // all but 1 MiB of the free space
    machine.succeed("fallocate -l $(( $(df --output=avail -B1 / | tail -n 1) - 1048576 )) /fill");
    assert_output(machine, &format!("stillpoint kernel switch --to {to}"), 3, "MiB free, the image needs up to");
    machine.succeed("rm /fill");
}

/// Asserts that images in memory are refused if the memory would not outlive the kernel, with warnings for other
/// memory. RAM for images is chosen and requested.
#[track_caller]
fn check_memory_refusals(machine: &mut Machine, to: &str) {
    machine.succeed("mke2fs -q -t ext4 -b 4096 /dev/pmem0 && mkdir -p /pmem && mount -o dax /dev/pmem0 /pmem");
    let with = |lines: &str| {
        let other = "/run/other.toml";
        let edit = format!("{{ printf '{lines}\\n'; cat /etc/stillpoint/kernel.toml; }} >{other}");
        format!("{edit}; stillpoint kernel switch --to {to} --dry-run --config {other}")
    };
    assert_output(
        machine,
        &with("images = \"/run/images\""),
        3,
        "/run/images is located in memory, which does not outlive this kernel",
    );
    assert_output(machine, &with("state = \"/pmem\""), 3, "the state must be on a disk");
    assert_output(machine, &with("images = \"/pmem\"\nappend = \"memmap=2M$1G\""), 3, "overlaps 0x40000000-0x43ffffff");
    assert_output(machine, &with("images = \"/pmem\""), 0, "warning: images are located in memory (/pmem)");
    machine.succeed("umount /pmem");
    assert_output(machine, "stillpoint kernel memory", 0, "there is a region of 64 MiB at 0x40000000");
    assert_output(machine, "stillpoint kernel memory --size 900G", 3, "MiB of RAM: a region may take");
    assert_output(machine, "stillpoint kernel memory --size 64M --write", 3, "without GRUB");
    machine.succeed("mkdir -p /etc/default && echo 'GRUB_CMDLINE_LINUX=quiet' >/etc/default/grub");
    let told = machine.succeed("stillpoint kernel memory --size 64M --write");
    let argument = told.lines().find(|line| line.starts_with("memmap=64M!0x")).expect("the argument");
    let line = machine
        .succeed("for f in /etc/default/grub /etc/default/grub.d/*.cfg; do . $f; done; echo $GRUB_CMDLINE_LINUX");
    assert_eq!(line, format!("quiet {argument}"));
    machine.succeed("stillpoint kernel memory --remove && test ! -e /etc/default/grub.d/stillpoint-memory.cfg");
}
