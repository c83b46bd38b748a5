//! Units go to another kernel with their memory, files and connections. The long form is ten switches and ten ways back
//! from each fault; in pieces with `SOAK_PIECES`.

use std::time::Duration;
use stillpoint_testing::LineClient;
use stillpoint_testing::binary::stillpoint;
use stillpoint_testing::machine::clients::{
    CountingClient, NewConnections, POSTGRESQL, Postgresql, append, longest, place_images_in_memory, prepare_mariadb,
    prepare_postgresql, prepare_units, read_pairs, store_pairs, switch, wait_until_done, wait_until_state,
};
use stillpoint_testing::machine::{Guest, Machine, Shape, emulated};
use stillpoint_testing::skipped;
use stillpoint_testing::soak::{cases_of_part, is_soak, rounds};

/// Time between two requests of a client: all of them share the emulated processors.
const REQUEST_INTERVAL: Duration = Duration::from_millis(250);
const KEYS: u32 = 2000;
const UNITS: [&str; 3] = ["mariadb", "memcached", "redis-server"];
const JOURNAL: &str = "/var/lib/stillpoint/switch/journal.json";

/// Returns the number of clients of each database. In the short form they leave the emulated processors to the test.
fn clients() -> usize {
    if is_soak() { 17 } else { 4 }
}

/// Installs a firewall that flushes nftables when it starts, as Debian's nftables.service does.
#[track_caller]
fn install_firewall(machine: &mut Machine) {
    machine.succeed(
        "printf '[Unit]\\nDefaultDependencies=no\\nBefore=network-pre.target\\nWants=network-pre.target\\n[Service]\\nType=oneshot\\n\
         RemainAfterExit=yes\\nExecStart=/usr/sbin/nft flush ruleset\\n' >/etc/systemd/system/firewall.service && \
         mkdir -p /etc/systemd/system/sysinit.target.wants && \
         ln -s ../firewall.service /etc/systemd/system/sysinit.target.wants/ && systemctl daemon-reload",
    );
}

/// A machine on its older kernel, with databases under load.
struct LoadedMachine {
    machine: Machine,
    /// A connection from before all switches.
    client: LineClient,
    pulses: Vec<CountingClient>,
}

impl LoadedMachine {
    /// Boots with `clients` of each of `units`, of which redis is one.
    #[track_caller]
    fn boot(guest: &Guest, units: &[&str], clients: usize) -> LoadedMachine {
        let mut machine = Machine::boot(guest, &guest.kernels[0], stillpoint());
        if units.contains(&POSTGRESQL) {
            assert_shipped_is_refused(&mut machine);
        }
        prepare_units(&mut machine, units);
        for unit in units {
            match *unit {
                "mariadb" => prepare_mariadb(&mut machine),
                POSTGRESQL => prepare_postgresql(&mut machine),
                _ => {}
            }
        }
        order_units(&mut machine);
        let mut client = machine.client(6379);
        store_pairs(&mut client, KEYS);
        let pulses = CountingClient::of_all(&machine, units, clients, REQUEST_INTERVAL)
            .into_iter()
            .map(|(_, pulse)| pulse)
            .collect();
        LoadedMachine { machine, client, pulses }
    }

    /// Asserts that both ends of every connection were informed that packets pass again.
    #[track_caller]
    fn assert_prompted(&self, journal: &str) {
        let woken = journal.split_once("\"woken\": {").expect("some ends were informed").1;
        let told = woken.split_once("\"Ok\": ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
        assert!(told.is_some_and(|told: usize| told > self.pulses.len()), "{journal}");
    }

    /// Asserts that every request of every client had its effect once, on its first connection.
    #[track_caller]
    fn end(self) -> Machine {
        let connections = self.pulses.len() + 1;
        let beats: Vec<_> = self.pulses.into_iter().flat_map(CountingClient::end).collect();
        println!("the longest request took {:.1} s", longest(&beats).as_secs_f64());
        println!("COUNT connections kept {connections}\nCOUNT requests that had their effect once {}", beats.len());
        self.machine
    }
}

/// Orders the databases one after another, and adds a unit after them all that stays: it records the state of the
/// switch.
#[track_caller]
fn order_units(machine: &mut Machine) {
    for (unit, order) in [
        ("memcached", "After=mariadb.service"),
        ("redis-server", "Requires=memcached.service\\nAfter=memcached.service"),
    ] {
        machine.succeed(&format!("printf '[Unit]\\n{order}\\n' >/etc/systemd/system/{unit}.service.d/order.conf"));
    }
    machine.succeed(&format!(
        "printf '[Unit]\\nAfter=redis-server.service\\n[Service]\\nType=oneshot\\nExecStart=/bin/cp {JOURNAL} /run/after\\n' \
         >/etc/systemd/system/after.service && ln -s ../after.service /etc/systemd/system/multi-user.target.wants/"
    ));
    // two that stay: systemd stops the second one first, and each records it on disk without a sync
    for (unit, order) in [("stays-first", ""), ("stays-last", "After=stays-first.service\\n")] {
        machine.succeed(&format!(
            "printf '[Unit]\\n{order}[Service]\\nExecStart=/bin/sleep infinity\\nExecStop=/bin/sh -c \"echo {unit} >>{STOPPED_FILE}\"\\n' \
             >/etc/systemd/system/{unit}.service && ln -s ../{unit}.service /etc/systemd/system/multi-user.target.wants/"
        ));
    }
    machine.succeed("systemctl daemon-reload && systemctl start stays-first stays-last");
}

/// File in which units that stay record that they were stopped.
const STOPPED_FILE: &str = "/var/lib/stays";

/// Asserts that units that stay were stopped in order before the machine changed its kernel, and run again.
#[track_caller]
fn assert_stopped_in_order(machine: &mut Machine) {
    machine.run_until_success("systemctl is-active stays-first stays-last");
    assert_eq!(machine.succeed(&format!("cat {STOPPED_FILE}")), "stays-last\nstays-first");
}

/// Asserts that a unit that stays, and starts after units that go along, has started only after their release.
#[track_caller]
fn assert_started_after(machine: &mut Machine) {
    machine.run_until_success("test -s /run/after");
    machine.succeed("! grep -q '\"state\": \"sealed\"' /run/after");
}

#[test]
fn four_databases_go_over_with_all_they_have() {
    emulated(|guest| {
        for _ in 0..rounds(1, 10) {
            let mut loaded = LoadedMachine::boot(guest, &[&UNITS[..], &[POSTGRESQL]].concat(), clients());
            install_firewall(&mut loaded.machine);
            let session = Session::start(&loaded.machine);
            // new clients also connect while the ports are guarded
            let newcomers = NewConnections::start(loaded.machine.port_access(6379), "PING");
            switch(&mut loaded.machine, &guest.kernels[1], &guest.kernels[1]);
            // on the connection from before
            read_pairs(&mut loaded.client, KEYS);
            let journal = wait_until_done(&mut loaded.machine);
            println!("{journal}");
            loaded.assert_prompted(&journal);
            assert!(journal.contains("\"unguarded\": []"), "{journal}");
            loaded.machine.succeed("systemctl is-active firewall");
            session.assert_kept();
            let came = newcomers.end();
            println!("COUNT newcomers {}", came.served);
            assert!(came.waited > 0, "the guard was seen from outside: {came:?}");
            let mut machine = loaded.end();
            println!("COUNT switches 1");
            assert_eq!(machine.succeed("systemctl is-active mariadb memcached redis-server"), "active\nactive\nactive");
            assert_eq!(machine.succeed("nft list tables"), "");
            assert_started_after(&mut machine);
            assert_stopped_in_order(&mut machine);
            // they are normal units again: they stop and start
            machine.succeed("systemctl restart redis-server && redis-cli ping");
            assert_restarts(&mut machine);
        }
    });
}

/// Seconds for which a unit may be unhealthy in [`slow_memory`] while no memory is fetched.
const HEALTH_LIMIT_S: u64 = 8;

/// Makes redis healthy, from the next switch on, only when all of MariaDB's memory is resident, which is fetched
/// slowly.
#[track_caller]
fn slow_memory(machine: &mut Machine) {
    let fill = "/var/lib/stillpoint/switch/images/mariadb.service/foam.fill";
    let config = "/etc/stillpoint/kernel.toml";
    machine.succeed(&format!(
        "cp {config} /root && {{ printf 'fill-rate = 3\\nhealth-limit-s = {HEALTH_LIMIT_S}\\n'; \
         sed '/redis-cli/s#=.*#= [\"grep\", \"-q\", \"done\", \"{fill}\"]#' /root/kernel.toml; }} >{config} && grep -q done {config}"
    ));
}

/// Returns the seconds of a phase in a journal.
fn seconds(journal: &str, phase: &str) -> u64 {
    let told = journal.rsplit_once(&format!("\"phase\": \"{phase}\"")).expect("the phase").1;
    let number = told.split_once("\"duration_us\": ").expect("its duration").1;
    number.split(',').next().and_then(|number| number.parse::<u64>().ok()).expect("a number") / 1_000_000
}

#[test]
fn a_kernel_that_panics_and_a_restore_that_fails_lead_back() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        // without MariaDB in the short form: under emulation it takes longer than the switches
        let (units, clients) = if is_soak() { (&UNITS[..], clients()) } else { (&UNITS[1..], 2) };
        let mut loaded = LoadedMachine::boot(guest, units, clients);
        // in the long form the old kernel's first restore fails as well, and after its second one memory is fetched
        // slowly
        let fails = if is_soak() { "stillpoint.fault=restore-twice" } else { "stillpoint.fault=restore" };
        let cases = [
            ("stillpoint.fault=panic", "the machine started with the old kernel"),
            ("stillpoint.initrd=panic", "the machine started with the old kernel"),
            (fails, "a test made it fail after restore"),
        ];
        // two of them, of two boots each, are enough for a short test: a kernel that panics and one that cannot restore
        let cases = &cases[usize::from(!is_soak())..];
        for _ in 0..rounds(1, 10) {
            for &(fault, why) in cases {
                append(&mut loaded.machine, fault);
                let is_slow = fault.ends_with("twice");
                if is_slow {
                    slow_memory(&mut loaded.machine);
                }
                switch(&mut loaded.machine, to, from);
                let journal = wait_until_done(&mut loaded.machine);
                println!("{journal}");
                assert!(journal.contains(why), "{journal}");
                loaded.assert_prompted(&journal);
                let told = loaded.machine.succeed("stillpoint kernel status");
                assert!(told.contains(&format!("fell back to {from}")), "{told}");
                assert_started_after(&mut loaded.machine);
                read_pairs(&mut loaded.client, KEYS);
                println!("COUNT ways back, {fault} 1");
                if is_slow {
                    // units that are as slow as their memory are not started from their files
                    assert!(seconds(&journal, "confirm") > HEALTH_LIMIT_S, "{journal}");
                    loaded.machine.succeed("cp /root/kernel.toml /etc/stillpoint/");
                }
            }
        }
        loaded.end();
    });
}

#[test]
#[ignore = "three boots of an emulated machine more: one of the long forms"]
fn a_leader_that_is_killed_has_a_successor() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        for _ in 0..rounds(1, 10) {
            let mut loaded = LoadedMachine::boot(guest, &UNITS, if is_soak() { clients() } else { 2 });
            // before any process has run the failure leads back, and after that no client notices it
            for (fault, ends_on, why) in [
                ("stillpoint.fault=leader", from, "their leader was killed"),
                ("stillpoint.fault=late-leader", to, "\"why\": null"),
            ] {
                append(&mut loaded.machine, fault);
                switch(&mut loaded.machine, to, ends_on);
                let journal = wait_until_done(&mut loaded.machine);
                println!("{journal}");
                assert!(journal.contains(why), "{journal}");
                loaded.assert_prompted(&journal);
                assert_eq!(loaded.machine.succeed("nft list tables"), "");
                read_pairs(&mut loaded.client, KEYS);
                println!("COUNT leaders killed, {fault} 1");
            }
            loaded.end();
        }
    });
}

/// Process ids above all that a new kernel assigns, in [`units_whose_memory_still_comes_stop_and_start`].
const LAST_PID: u32 = 70_000;

/// An administrator need not know that memory is still being fetched: a unit that stops has all of its data, and one
/// that starts is the normal unit.
#[test]
#[ignore = "two boots of an emulated machine more: one of the long forms"]
fn units_whose_memory_still_comes_stop_and_start() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        let mut machine = Machine::boot(guest, from, stillpoint());
        machine.succeed(&format!("sysctl -q -w kernel.pid_max=4194304 kernel.ns_last_pid={LAST_PID}"));
        prepare_units(&mut machine, &["memcached", "redis-server"]);
        machine.succeed("sed -i '1i fill-rate = 1' /etc/stillpoint/kernel.toml");
        let mut client = machine.client(6379);
        store_pairs(&mut client, KEYS);
        // memory that takes a minute to fetch
        let fat = "for n = 1, 60000 do redis.call('SET', 'fat' .. n, string.rep('x', 960)) end";
        machine.succeed(&format!("redis-cli EVAL \"{fat}\" 0"));
        let mut other = machine.client(11211);
        let value = "y".repeat(1_000_000);
        for n in 0..60 {
            assert_eq!(other.ask(&format!("set fat{n} 0 0 {}\r\n{value}", value.len())), "STORED");
        }
        let pids =
            |machine: &mut Machine| machine.succeed("systemctl show --value --property=MainPID redis-server memcached");
        let before = pids(&mut machine);
        let numbers = before.split_whitespace().map(|pid| pid.parse::<u32>().expect("a process id"));
        assert!(numbers.clone().count() == 2 && numbers.clone().all(|pid| pid > LAST_PID), "{before}");
        switch(&mut machine, to, to);
        wait_until_state(&mut machine, "confirmed");
        assert_eq!(pids(&mut machine), before);
        read_pairs(&mut client, KEYS);
        drop((client, other));
        let comes = "grep -q '\"state\":\"filling\"' /var/lib/stillpoint/switch/images";
        machine.succeed(&format!("{comes}/redis-server.service/foam.fill"));
        // the successor of the leader waits in its place
        machine.succeed("systemctl kill --signal=KILL --kill-whom=main stillpoint-switch");
        machine.succeed("systemctl stop redis-server");
        machine.succeed(&format!("{comes}/memcached.service/foam.fill"));
        machine.succeed("systemctl start redis-server");
        machine.succeed(&format!("{comes}/memcached.service/foam.fill"));
        machine.succeed("systemctl restart memcached");
        machine.run_until_success("redis-cli ping | grep -q PONG");
        assert_eq!(machine.succeed("redis-cli --raw DBSIZE"), (KEYS + 60_000).to_string());
        read_pairs(&mut machine.client(6379), KEYS);
        assert_eq!(machine.client(11211).ask("get fat1"), "END");
        let journal = wait_until_done(&mut machine);
        assert!(journal.contains("\"why\": null"), "{journal}");
        println!("{journal}");
        machine.succeed("test ! -e /var/lib/stillpoint/switch/images");
        // the groups of those that were stopped stay, without processes
        assert_eq!(
            machine.succeed("find /sys/fs/cgroup -name 'stillpoint-memory-*' -exec cat {}/cgroup.procs ';'"),
            ""
        );
        assert_eq!(machine.succeed("nft list tables; systemctl is-active redis-server memcached"), "active\nactive");
        assert_eq!(
            machine.succeed("systemctl show --value --property=Type --property=Restart redis-server"),
            "notify\nalways"
        );
    });
}

/// Every kernel of Debian that is installed to every later one, in pieces with `SOAK_PIECES`. The shorter tests only go
/// from the first to the second.
#[test]
#[ignore = "two boots of an emulated machine for each pair of kernels: one of the long forms"]
fn every_pair_of_kernels_goes_forward() {
    let guest = match Guest::every(&["6.16", "6.17", "6.18", "7.2", "7.3"]) {
        Ok(guest) => guest,
        Err(why) => return skipped(&why),
    };
    println!("kernels: {}", guest.kernels.join(", "));
    let later = |(at, from)| guest.kernels[at + 1..].iter().map(move |to| (from, to));
    for (from, to) in cases_of_part(guest.kernels.iter().enumerate().flat_map(later).collect()) {
        let mut machine = Machine::boot(&guest, from, stillpoint());
        prepare_units(&mut machine, &["memcached", "redis-server"]);
        let mut client = machine.client(6379);
        store_pairs(&mut client, KEYS);
        let pulses = [
            CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL),
            CountingClient::memcached(&machine, "pulse", REQUEST_INTERVAL),
        ];
        switch(&mut machine, to, to);
        let journal = wait_until_done(&mut machine);
        assert!(journal.contains("\"why\": null"), "{from} to {to}: {journal}");
        read_pairs(&mut client, KEYS);
        let requests: usize = pulses.map(|pulse| pulse.end().len()).iter().sum();
        println!("COUNT pairs of kernels, {from} to {to} 1\nCOUNT requests that had their effect once {requests}");
    }
}

/// Asserts that PostgreSQL as Debian ships it is refused, with the remedy.
#[track_caller]
fn assert_shipped_is_refused(machine: &mut Machine) {
    machine.succeed(&format!("systemctl start {POSTGRESQL}"));
    let told = machine.run(&format!("stillpoint kernel check --criu /usr/local/bin/criu --unit {POSTGRESQL}"));
    assert_eq!(told.code, 3, "{told:?}");
    for what in ["unshare --ipc", "stillpoint kernel dropin", "dynamic_shared_memory_type = mmap"] {
        assert!(told.text.contains(what), "{what}: {told:?}");
    }
}

/// A session of PostgreSQL with an open transaction and data that only it sees, in a server process of its own.
struct Session {
    client: Postgresql,
    server: Option<String>,
}

impl Session {
    #[track_caller]
    fn start(machine: &Machine) -> Session {
        let mut client = Postgresql::connect(machine);
        client.ask("BEGIN ISOLATION LEVEL REPEATABLE READ");
        client.ask("CREATE TEMP TABLE mine AS SELECT n FROM generate_series(1, 1000) n");
        let server = client.ask("SELECT pg_backend_pid()");
        Session { client, server }
    }

    /// Asserts that the session continues at the same place.
    #[track_caller]
    fn assert_kept(mut self) {
        assert_eq!(self.client.ask("SELECT count(*) FROM mine").as_deref(), Some("1000"));
        assert_eq!(self.client.ask("SELECT pg_backend_pid()"), self.server);
        self.client.ask("COMMIT");
    }
}

/// Asserts that PostgreSQL accepts new sessions, and stops and starts as a unit.
#[track_caller]
fn assert_restarts(machine: &mut Machine) {
    assert!(Postgresql::connect(machine).ask("SELECT sum(n) FROM pulse").is_some());
    machine.succeed(&format!("systemctl restart {POSTGRESQL} && until pg_isready -q; do sleep 0.2; done"));
    assert!(Postgresql::connect(machine).ask("CHECKPOINT").is_none());
}

/// A server of many processes with SysV memory returns from a kernel that fails, and then goes to another one.
#[test]
#[ignore = "four boots of an emulated machine more: one of the long forms"]
fn postgresql_goes_along_with_all_of_its_processes() {
    emulated(|guest| {
        let (from, to) = (&guest.kernels[0], &guest.kernels[1]);
        let mut machine = Machine::boot(guest, from, stillpoint());
        assert_shipped_is_refused(&mut machine);
        prepare_units(&mut machine, &[POSTGRESQL, "redis-server"]);
        prepare_postgresql(&mut machine);
        let session = Session::start(&machine);
        let pulses: Vec<CountingClient> = (0..clients())
            .map(|n| CountingClient::postgresql(&machine, &format!("pulse{n}"), REQUEST_INTERVAL))
            .collect();
        append(&mut machine, "stillpoint.initrd=panic");
        switch(&mut machine, to, from);
        assert!(wait_until_done(&mut machine).contains("the machine started with the old kernel"));
        append(&mut machine, "");
        switch(&mut machine, to, to);
        let journal = wait_until_done(&mut machine);
        assert!(journal.contains("\"why\": null"), "{journal}");
        session.assert_kept();
        let beats: Vec<_> = pulses.into_iter().flat_map(CountingClient::end).collect();
        println!("the longest request took {:.1} s", longest(&beats).as_secs_f64());
        println!("COUNT connections kept {}\nCOUNT requests that had their effect once {}", clients() + 1, beats.len());
        assert_restarts(&mut machine);
    });
}

/// Linux 6.12 has a driver for the emulated watchdog, 6.1 has none: from 6.12 to a later one.
#[test]
fn a_kernel_that_hangs_is_left_and_one_that_comes_up_is_not() {
    emulated(|guest| {
        let [_, from, to] = &guest.kernels[..] else { panic!("three kernels: {:?}", guest.kernels) };
        let mut machine = Machine::boot(guest, from, stillpoint());
        prepare_units(&mut machine, &["memcached", "redis-server"]);
        let pulses = [
            CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL),
            CountingClient::memcached(&machine, "pulse", REQUEST_INTERVAL),
        ];
        let check = format!("stillpoint kernel switch --to {to} --dry-run");
        let told = machine.succeed(&check);
        assert!(
            told.contains("warning: a kernel that hangs is not reset automatically") && told.contains("/dev/watchdog0"),
            "{told}"
        );
        machine.succeed("modprobe i6300esb");
        // the limit ends the kernel that hangs, and gives the other one enough time even on a busy host
        for (limit, fault, ends_on, why) in [
            (25, "stillpoint.initrd=hang", from, "the machine started with the old kernel"),
            (250, "", to, "\"why\": null"),
        ] {
            append(&mut machine, fault);
            machine.succeed("sed -i /^watchdog/d /etc/stillpoint/kernel.toml");
            machine.succeed(&format!("sed -i '1i watchdog-limit-s = {limit}' /etc/stillpoint/kernel.toml"));
            let told = machine.succeed(&check);
            assert!(told.contains(&format!("is reset after {limit} s by a watchdog (i6300esb)")), "{told}");
            switch(&mut machine, to, ends_on);
            let journal = wait_until_done(&mut machine);
            assert!(journal.contains(why), "{journal}");
            assert_eq!(machine.succeed("cat /sys/class/watchdog/watchdog0/state"), "inactive");
        }
        for pulse in pulses {
            let beats = pulse.end();
            println!("COUNT requests that had their effect once {}", beats.len());
        }
    });
}

/// Boots a machine whose images are in memory.
#[track_caller]
fn with_a_region(guest: &Guest, kernel: &str) -> Machine {
    let region = Shape { append: "memmap=256M!1G", ..Shape::default() };
    let mut machine = Machine::boot_as(guest, kernel, stillpoint(), region);
    prepare_units(&mut machine, &["memcached", "redis-server"]);
    place_images_in_memory(&mut machine);
    machine
}

/// Memory that no kernel uses outlives a panic, the boot loader and a change of kernels.
#[test]
#[ignore = "four boots of an emulated machine more: one of the long forms"]
fn images_in_memory_outlive_kernels() {
    emulated(|guest| {
        let [_, from, to] = &guest.kernels[..] else { panic!("three kernels: {:?}", guest.kernels) };
        let mut machine = with_a_region(guest, from);
        let mut client = machine.client(6379);
        store_pairs(&mut client, KEYS);
        let pulses = [
            CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL),
            CountingClient::memcached(&machine, "pulse", REQUEST_INTERVAL),
        ];
        for (fault, ends_on, why) in [
            ("stillpoint.initrd=panic", from, "the machine started with the old kernel"),
            ("stillpoint.fault=restore", from, "a test made it fail after restore"),
            ("", to, "\"why\": null"),
        ] {
            append(&mut machine, fault);
            switch(&mut machine, to, ends_on);
            let journal = wait_until_done(&mut machine);
            println!("{journal}");
            assert!(journal.contains(why) && journal.contains("\"at\": \"/pmem\""), "{journal}");
            read_pairs(&mut client, KEYS);
            machine.succeed("grep -q ' /pmem .* /dev/pmem0 ' /proc/self/mountinfo && test ! -e /pmem/images");
            println!("COUNT ways with images in memory, {fault} 1");
        }
        for pulse in pulses {
            println!("COUNT requests that had their effect once {}", pulse.end().len());
        }
    });
}

/// A loss of power clears memory, and units start from the data that they have saved.
#[test]
#[ignore = "two boots of an emulated machine more: one of the long forms"]
fn units_start_from_their_files_when_memory_has_lost_their_images() {
    emulated(|guest| {
        let [_, from, to] = &guest.kernels[..] else { panic!("three kernels: {:?}", guest.kernels) };
        let mut machine = with_a_region(guest, from);
        let mut client = machine.client(6379);
        store_pairs(&mut client, KEYS);
        machine.succeed("redis-cli save");
        append(&mut machine, "stillpoint.initrd=forget");
        switch(&mut machine, to, from);
        let journal = wait_until_state(&mut machine, "cold");
        assert!(journal.contains("the memory has lost the images, as after a loss of power"), "{journal}");
        machine.run_until_success("redis-cli ping");
        read_pairs(&mut machine.client(6379), KEYS);
        assert_eq!(machine.succeed("nft list tables"), "");
    });
}
