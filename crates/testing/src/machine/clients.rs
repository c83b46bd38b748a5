//! Clients that must not notice a switch, and the setup that a machine needs before its units can go along.

use super::qemu::POLL_INTERVAL;
use super::{Machine, PortAccess};
use crate::LineClient;
use crate::soak::is_soak;
use crate::wait;
use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;
use std::io::{BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Debian's unit of PostgreSQL's first cluster.
pub const POSTGRESQL: &str = "postgresql@15-main";
/// Limit that is longer than any outage, also on a busy host.
const OUTAGE_LIMIT: Duration = Duration::from_secs(600);
/// Limit for reading logs on a slow machine.
const LOG_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts units so that they can go along, and writes the configuration that names them.
#[track_caller]
pub fn prepare_units(machine: &mut Machine, units: &[&str]) {
    let mut config = String::from("criu = \"/usr/local/bin/criu\"\n");
    for unit in units {
        let health = match *unit {
            "redis-server" => r#"["redis-cli", "ping"]"#,
            "memcached" => r#"["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/11211"]"#,
            POSTGRESQL => r#"["pg_isready", "-q"]"#,
            _ => r#"["mariadb", "-e", "SELECT 1"]"#,
        };
        config += &format!("[units.\"{unit}\"]\nhealth = {health}\n");
        if *unit == "mariadb" {
            // requirements of `check`: no io_uring, no listening socket that systemd holds, no address space for more
            // memory than exists
            machine.succeed("systemctl disable -q --now mariadb.socket");
            if !is_soak() {
                // each start checks all tables, which takes longer under emulation than the start itself
                machine.succeed("printf '#!/bin/sh\\n' >/etc/mysql/debian-start");
            }
            machine.succeed("printf '[mysqld]\\ninnodb_use_native_aio=OFF\\ninnodb_buffer_pool_size=32M\\ninnodb_buffer_pool_size_max=64M\\n' >/etc/mysql/mariadb.conf.d/91-switch.cnf");
        }
        if *unit == POSTGRESQL {
            // no files in memory that are lost with it; its other needs are visible only when it runs
            machine.succeed("printf 'dynamic_shared_memory_type = mmap\\nshared_buffers = 32MB\\n' >/etc/postgresql/15/main/conf.d/switch.conf");
            machine.succeed(&format!("systemctl start {unit}"));
        }
        machine.succeed(&format!(
            "mkdir -p /etc/systemd/system/{unit}.service.d && stillpoint kernel dropin {unit} \
             >/etc/systemd/system/{unit}.service.d/stillpoint.conf"
        ));
    }
    machine.succeed(&format!("mkdir -p /etc/stillpoint && printf '{config}' >/etc/stillpoint/kernel.toml"));
    machine.succeed(&format!("systemctl daemon-reload && systemctl restart {}", units.join(" ")));
    for unit in units {
        if *unit == POSTGRESQL {
            machine.run_until_success("pg_isready -q");
        } else {
            wait_until_single_process(machine, unit);
        }
    }
}

/// Puts the images of those units into the machine's region of memory, which its kernel command line names.
#[track_caller]
pub fn place_images_in_memory(machine: &mut Machine) {
    machine.succeed("mke2fs -q -t ext4 -b 4096 /dev/pmem0 && mkdir -p /pmem && mount -o dax /dev/pmem0 /pmem");
    machine.succeed("sed -i '1i images = \"/pmem\"' /etc/stillpoint/kernel.toml");
}

/// Waits until a unit has no process beside its server: Debian's MariaDB checks its tables after each start.
#[track_caller]
pub fn wait_until_single_process(machine: &mut Machine, unit: &str) {
    let processes = format!("/sys/fs/cgroup/system.slice/{unit}.service/cgroup.procs");
    machine.run_until_success(&format!("systemctl is-active -q {unit} && test $(wc -l <{processes}) = 1"));
}

impl Machine {
    /// Connects a client from outside of the machine.
    #[track_caller]
    pub fn client(&self, port: u16) -> LineClient {
        LineClient::new(self.connect(port), OUTAGE_LIMIT)
    }
}

/// Stores `keys` keys.
#[track_caller]
pub fn store_pairs(client: &mut LineClient, keys: u32) {
    for n in 0..keys {
        client.send(&format!("SET key{n} {}", format!("{n:08}").repeat(32)));
    }
    for _ in 0..keys {
        assert_eq!(client.line(), "+OK");
    }
}

/// Reads each of them.
#[track_caller]
pub fn read_pairs(client: &mut LineClient, keys: u32) {
    for n in 0..keys {
        client.send(&format!("GET key{n}"));
    }
    for n in 0..keys {
        assert_eq!(client.line(), "$256");
        assert_eq!(client.line(), format!("{n:08}").repeat(32));
    }
}

/// Switches, and waits until the machine runs on a kernel it has booted since.
#[track_caller]
pub fn switch(machine: &mut Machine, to: &str, ends_on: &str) {
    switch_with(machine, &format!("--to {to}"), ends_on);
}

/// Switches with these arguments, and waits until the machine runs on a kernel it has booted since.
#[track_caller]
pub fn switch_with(machine: &mut Machine, arguments: &str, ends_on: &str) {
    let boot = machine.succeed("cat /proc/sys/kernel/random/boot_id");
    // in the background: the shell ends with the kernel
    machine.succeed(&format!(
        "rm -f /run/ended; (setsid sh -c 'stillpoint kernel switch {arguments} >/run/switch.log 2>&1; touch /run/ended' &)"
    ));
    let end = Instant::now() + OUTAGE_LIMIT;
    while Instant::now() < end {
        let seen = machine.try_run(
            "cat /proc/sys/kernel/random/boot_id; uname -r; if [ -e /run/ended ]; then echo ended; cat /run/switch.log; fi",
        );
        let text = seen.map(|output| output.text).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        match lines[..] {
            [now, kernel, ..] if now != boot && kernel == ends_on => return,
            [now, _, "ended", ..] if now == boot => {
                let logs =
                    machine.run("tail -n 20 /var/lib/stillpoint/switch/images/*/*.log; journalctl -n 20 --no-pager");
                panic!("there was no switch: {text}\n{}\n{}", logs.text, machine.console());
            }
            _ => std::thread::sleep(POLL_INTERVAL),
        }
    }
    let logs = machine
        .run_within("cat /var/lib/stillpoint/switch/journal.json; uname -r; journalctl -n 30 --no-pager", LOG_TIMEOUT);
    panic!("not on {ends_on} within {OUTAGE_LIMIT:?}: {logs:?}\n{}", machine.console());
}

/// Gives the next kernel an argument; none if it is empty.
#[track_caller]
pub fn append(machine: &mut Machine, parameter: &str) {
    let file = "/etc/stillpoint/kernel.toml";
    // two calls: the deletion of a line must not depend on the other call
    machine.succeed(&format!("sed -i /^append/d {file}"));
    if !parameter.is_empty() {
        machine.succeed(&format!("sed -i '1i append = \"{parameter}\"' {file}"));
    }
}

/// Waits for the end of a switch, and returns its journal.
#[track_caller]
pub fn wait_until_done(machine: &mut Machine) -> String {
    wait_until_state(machine, "done")
}

/// Waits until a switch has reached a state, and returns its journal. Panics with the reason if it ended in another
/// state.
#[track_caller]
pub fn wait_until_state(machine: &mut Machine, state: &str) -> String {
    let is_in = |journal: &str, state: &str| journal.contains(&format!("\"state\": \"{state}\""));
    let end = Instant::now() + OUTAGE_LIMIT;
    let mut journal = String::new();
    while Instant::now() < end {
        if let Some(output) = machine.try_run("cat /var/lib/stillpoint/switch/journal.json") {
            journal = output.text;
        }
        if is_in(&journal, state) {
            return journal;
        }
        if ["done", "cold", "aborted"].iter().any(|ended| is_in(&journal, ended)) {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let logs =
        machine.run_within("journalctl -b -n 60 --no-pager -o short-monotonic", LOG_TIMEOUT).map(|output| output.text);
    panic!("the switch is not {state}: {journal}\n{}\n{}", logs.unwrap_or_default(), machine.console());
}

/// A client that counts, one request after another: an answer that is not the next number means a lost or doubled
/// request.
pub struct CountingClient {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<TimedRequest>>,
}

/// One request and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedRequest {
    /// Time at which it was sent.
    pub sent: Instant,
    /// Time until it was answered.
    pub latency: Duration,
}

impl CountingClient {
    /// Starts a client. `beat` makes one request and returns the number in the answer; `rest` is the time between two
    /// of them.
    pub fn start(interval: Duration, mut send_request: impl FnMut() -> u64 + Send + 'static) -> CountingClient {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut requests = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let sent = Instant::now();
                assert_eq!(send_request(), requests.len() as u64 + 1, "each request has its effect once");
                requests.push(TimedRequest { sent, latency: sent.elapsed() });
                std::thread::sleep(interval);
            }
            requests
        });
        CountingClient { stop, thread }
    }

    /// Starts a client of redis, which counts under a name of its own.
    #[track_caller]
    pub fn redis(machine: &Machine, name: &str, interval: Duration) -> CountingClient {
        let mut client = machine.client(6379);
        let request = format!("INCR {name}");
        CountingClient::start(interval, move || number(client.ask(&request).trim_start_matches(':')))
    }

    /// Starts a client of memcached.
    #[track_caller]
    pub fn memcached(machine: &Machine, name: &str, interval: Duration) -> CountingClient {
        let mut client = machine.client(11211);
        assert_eq!(client.ask(&format!("set {name} 0 0 1\r\n0")), "STORED");
        let request = format!("incr {name} 1");
        CountingClient::start(interval, move || number(&client.ask(&request)))
    }

    /// Starts a client of MariaDB: each request is a committed change of a row in the table of [`prepare_mariadb`].
    #[track_caller]
    pub fn mariadb(machine: &Machine, name: &str, interval: Duration) -> CountingClient {
        let mut client = Sql::connect(machine);
        client.ask(&format!("INSERT INTO t.pulse VALUES ('{name}', 0)"));
        let (change, select) = (
            format!("UPDATE t.pulse SET n = n + 1 WHERE name = '{name}'"),
            format!("SELECT n FROM t.pulse WHERE name = '{name}'"),
        );
        CountingClient::start(interval, move || {
            client.ask(&change);
            number(&client.ask(&select).expect("a row"))
        })
    }

    /// Starts a client of PostgreSQL with a server process of its own: each request is a committed change of a row in
    /// the table of [`prepare_postgresql`].
    #[track_caller]
    pub fn postgresql(machine: &Machine, name: &str, interval: Duration) -> CountingClient {
        let mut client = Postgresql::connect(machine);
        client.ask(&format!("INSERT INTO pulse VALUES ('{name}', 0)"));
        let change = format!("UPDATE pulse SET n = n + 1 WHERE name = '{name}' RETURNING n");
        CountingClient::start(interval, move || number(&client.ask(&change).expect("a row")))
    }

    /// Starts `each` clients of each of `units`, which [`prepare_units`] knows; the number beside each is the index of its
    /// unit.
    #[track_caller]
    pub fn of_all(machine: &Machine, units: &[&str], each: usize, interval: Duration) -> Vec<(u8, CountingClient)> {
        let mut pulses = Vec::new();
        for n in 0..each {
            let name = format!("pulse{n}");
            for (place, unit) in (0..).zip(units) {
                let pulse = match *unit {
                    "redis-server" => CountingClient::redis(machine, &name, interval),
                    "memcached" => CountingClient::memcached(machine, &name, interval),
                    POSTGRESQL => CountingClient::postgresql(machine, &name, interval),
                    _ => CountingClient::mariadb(machine, &name, interval),
                };
                pulses.push((place, pulse));
            }
        }
        pulses
    }

    /// Ends the client and returns every request, each answered once.
    #[track_caller]
    pub fn end(self) -> Vec<TimedRequest> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("every request was answered once")
    }
}

/// A client that counts until its connection ends, as it does when a unit is started from its files.
pub struct AcknowledgedCount {
    connection: TcpStream,
    thread: JoinHandle<u64>,
}

impl AcknowledgedCount {
    /// Starts a client of redis, which counts under a name of its own.
    #[track_caller]
    pub fn redis(machine: &Machine, name: &str, interval: Duration) -> AcknowledgedCount {
        let mut client = machine.client(6379);
        let request = format!("INCR {name}");
        let connection = client.stream.get_ref().try_clone();
        AcknowledgedCount::start(connection, interval, move || {
            client.try_ask(&request).is_ok_and(|answer| answer.starts_with(':'))
        })
    }

    /// Starts a client of MariaDB: each request is a committed change of a row in the table of [`prepare_mariadb`].
    #[track_caller]
    pub fn mariadb(machine: &Machine, name: &str, interval: Duration) -> AcknowledgedCount {
        let mut client = Sql::connect(machine);
        client.ask(&format!("REPLACE INTO t.pulse VALUES ('{name}', 0)"));
        let change = format!("UPDATE t.pulse SET n = n + 1 WHERE name = '{name}'");
        let connection = client.stream.try_clone();
        AcknowledgedCount::start(connection, interval, move || client.try_ask(&change).is_ok())
    }

    #[track_caller]
    fn start(
        connection: std::io::Result<TcpStream>,
        interval: Duration,
        mut send_request: impl FnMut() -> bool + Send + 'static,
    ) -> AcknowledgedCount {
        let connection = connection.expect("a second handle of a connection");
        let thread = std::thread::spawn(move || {
            let mut count = 0;
            while send_request() {
                count += 1;
                std::thread::sleep(interval);
            }
            count
        });
        AcknowledgedCount { connection, thread }
    }

    /// Returns true if its connection has ended.
    pub fn ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Returns the number of changes that the server acknowledged before it ended. The server may have made one more.
    #[track_caller]
    pub fn acknowledged(self) -> u64 {
        // A machine that lost its power sends nothing to a client that waits for an answer.
        let _ = self.connection.shutdown(Shutdown::Both);
        wait::until("a connection to end", || self.thread.is_finished().then_some(()));
        self.thread.join().expect("a number")
    }
}

/// Time between two newcomers: without it an emulated processor would do little else.
const CONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// Clients that connect, send one request and disconnect, one after another: a switch may make them wait but must not
/// refuse them.
pub struct NewConnections {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<NewConnectionCounts>,
}

/// Counts of newcomers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NewConnectionCounts {
    /// Those that were served.
    pub served: u32,
    /// Attempts at which the port did not answer within a second.
    pub waited: u32,
}

impl NewConnections {
    /// Starts them; `request` must be answered by a line.
    pub fn start(port: PortAccess, request: &'static str) -> NewConnections {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut counts = NewConnectionCounts::default();
            while !stopped.load(Ordering::Relaxed) {
                let stream = match port.connect(Duration::from_secs(1)) {
                    Ok(stream) => stream,
                    Err(error) if is_wait(error.kind()) => {
                        counts.waited += 1;
                        continue;
                    }
                    Err(error) => panic!("a newcomer was sent away: {error}"),
                };
                stream.set_read_timeout(Some(OUTAGE_LIMIT)).expect("set a limit");
                LineClient { stream: BufReader::new(stream) }.ask(request);
                counts.served += 1;
                std::thread::sleep(CONNECT_INTERVAL);
            }
            counts
        });
        NewConnections { stop, thread }
    }

    /// Ends them and returns how many were served, and how many attempts had to wait; none was refused.
    #[track_caller]
    pub fn end(self) -> NewConnectionCounts {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("no newcomer was sent away")
    }
}

/// Returns true if there was no answer; while the machine has no address its neighbours report that there is no route.
fn is_wait(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::TimedOut | ErrorKind::WouldBlock | ErrorKind::HostUnreachable)
}

/// Makes the table in which MariaDB's clients count, and their user.
#[track_caller]
pub fn prepare_mariadb(machine: &mut Machine) {
    machine.succeed(
        "mariadb -e \"CREATE DATABASE t; CREATE TABLE t.pulse (name VARCHAR(20) PRIMARY KEY, n BIGINT) ENGINE=InnoDB; \
         CREATE USER outside; GRANT ALL ON t.* TO outside\"",
    );
}

/// Makes the table in which PostgreSQL's clients count.
#[track_caller]
pub fn prepare_postgresql(machine: &mut Machine) {
    machine.succeed("su postgres -c \"psql -qc 'CREATE TABLE pulse (name text PRIMARY KEY, n bigint)'\"");
}

/// Returns the time of the longest request.
pub fn longest(requests: &[TimedRequest]) -> Duration {
    requests.iter().map(|request| request.latency).max().unwrap_or_default()
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{text} is not a number"))
}

/// A client of MariaDB, without a password.
pub struct Sql {
    stream: TcpStream,
}

impl Sql {
    /// Connects from outside of the machine, as the user of [`prepare_mariadb`].
    #[track_caller]
    pub fn connect(machine: &Machine) -> Sql {
        let stream = machine.connect(3306);
        stream.set_read_timeout(Some(OUTAGE_LIMIT)).expect("set a limit");
        let mut sql = Sql { stream };
        let greeting = sql.packet().expect("a greeting");
        assert_eq!(greeting[0], 10, "the protocol's version");
        // 4.1's protocol, plain passwords, 16 MiB packets, latin1
        let mut hello = (0x0000_8200_u32 | 0x0000_0001).to_le_bytes().to_vec();
        hello.extend_from_slice(&(1_u32 << 24).to_le_bytes());
        hello.push(8);
        hello.extend_from_slice(&[0; 23]);
        hello.extend_from_slice(b"outside\0\0");
        sql.send(1, &hello).expect("say who it is");
        let welcome = sql.packet().expect("a welcome");
        assert_eq!(welcome[0], 0, "{}", String::from_utf8_lossy(&welcome));
        sql
    }

    /// Runs one query; returns the first value of the first row, if there is one.
    #[track_caller]
    pub fn ask(&mut self, query: &str) -> Option<String> {
        self.try_ask(query).expect("an answer")
    }

    /// Runs one query and returns the first value of the first row, or an error if the server has ended.
    ///
    /// # Errors
    /// The connection has ended, or the time limit has passed.
    #[track_caller]
    pub fn try_ask(&mut self, query: &str) -> std::io::Result<Option<String>> {
        self.send(0, &[b"\x03", query.as_bytes()].concat())?;
        let first = self.packet()?;
        match first[0] {
            0 => return Ok(None),
            255 => panic!("{query}: {}", String::from_utf8_lossy(&first[3..])),
            _ => {}
        }
        let (mut value, mut ends) = (None, 0);
        while ends < 2 {
            let packet = self.packet()?;
            match packet[0] {
                254 if packet.len() < 9 => ends += 1,
                length if ends == 1 && value.is_none() => {
                    value = Some(String::from_utf8_lossy(&packet[1..=usize::from(length)]).into_owned());
                }
                _ => {}
            }
        }
        Ok(value)
    }

    fn send(&mut self, number: u8, payload: &[u8]) -> std::io::Result<()> {
        let mut packet = (payload.len() as u32).to_le_bytes().to_vec();
        packet[3] = number;
        packet.extend_from_slice(payload);
        self.stream.write_all(&packet)
    }

    fn packet(&mut self) -> std::io::Result<Vec<u8>> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head)?;
        let mut payload = vec![0; u32::from_le_bytes([head[0], head[1], head[2], 0]) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(payload)
    }
}

/// A client of PostgreSQL, as its superuser.
pub struct Postgresql {
    stream: TcpStream,
    heard: BytesMut,
}

impl Postgresql {
    /// Connects from outside of the machine.
    #[track_caller]
    pub fn connect(machine: &Machine) -> Postgresql {
        let stream = machine.connect(5432);
        stream.set_read_timeout(Some(OUTAGE_LIMIT)).expect("set a limit");
        let mut client = Postgresql { stream, heard: BytesMut::new() };
        let mut hello = BytesMut::new();
        frontend::startup_message([("user", "postgres"), ("database", "postgres")], &mut hello).expect("no zeros");
        client.stream.write_all(&hello).expect("say who it is");
        client.until_ready();
        client
    }

    /// Runs one query; returns the first value of its last row, if there is one.
    #[track_caller]
    pub fn ask(&mut self, query: &str) -> Option<String> {
        let mut message = BytesMut::new();
        frontend::query(query, &mut message).expect("no zeros");
        self.stream.write_all(&message).expect("send a query");
        self.until_ready()
    }

    #[track_caller]
    fn until_ready(&mut self) -> Option<String> {
        let mut value = None;
        loop {
            match Message::parse(&mut self.heard).expect("a message of PostgreSQL") {
                Some(Message::ReadyForQuery(_)) => return value,
                Some(Message::DataRow(row)) => {
                    let first = row.ranges().next().expect("a row").flatten();
                    value = first.map(|range| String::from_utf8_lossy(&row.buffer()[range]).into_owned());
                }
                Some(Message::ErrorResponse(error)) => {
                    let fields: Vec<_> =
                        error.fields().map(|field| Ok(field.value_bytes().to_vec())).collect().unwrap_or_default();
                    panic!("{:?}", fields.iter().map(|field| String::from_utf8_lossy(field)).collect::<Vec<_>>());
                }
                Some(_) => {}
                None => {
                    let mut bytes = [0; 4096];
                    let n = self.stream.read(&mut bytes).expect("an answer");
                    assert!(n > 0, "the connection was closed");
                    self.heard.extend_from_slice(&bytes[..n]);
                }
            }
        }
    }
}
