//! Cost of a proxy: SELECTs by primary key directly to PostgreSQL, through `stillpoint migrate proxy`, and through
//! Debian's pgbouncer, in turns within one run.
//!
//! All traffic uses TCP on this machine, clients and servers included, so that throughput is the capacity of the
//! processors for all of them together. A *pair* is one statement and its answer. Connections are made before the
//! counting begins.

use crate::results::{Section, number};
use serde::Serialize;
use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use stillpoint_patch_bench::operation::Spread;
use stillpoint_patch_tests::packages::{self, Binary};
use stillpoint_patch_tests::postgres::{Bench, Cluster, Postgres};
use stillpoint_patch_tests::server::{ChildGuard, bound_command, free_port};
use stillpoint_patch_tests::{cli, wait};
use tempfile::TempDir;

const CLIENTS: [usize; 4] = [1, 16, 64, 256];
const PROTOCOLS: [&str; 2] = ["simple", "prepared"];
/// Interval of readings of processor time; counting begins and ends with a reading.
const READING_INTERVAL: Duration = Duration::from_millis(20);
/// Readings left out at the beginning of a run.
const WARM_UP_READINGS: usize = 10;
/// Minimum share of the time that must remain for counting: pgbench's time begins before its connections, which may use
/// all of it on a busy machine. A run with less is repeated with twice the time, up to `SECONDS_MAX` seconds.
const COUNTED_SHARE_MIN: f64 = 0.5;
const SECONDS_MAX: u64 = 120;
/// Time in seconds, after its nominal time, within which pgbench ends.
const END_TIMEOUT_S: u64 = 300;
/// User id of servers and pgbench: that of the unprivileged user of every Debian.
const USER_ID: u32 = 65534;

/// A path to the server.
struct ServerPath {
    name: &'static str,
    port: u16,
    process: Option<ChildGuard>,
    /// True if clients can prepare statements through it.
    prepares: bool,
}

/// One run of pgbench on one path.
#[derive(Debug, Clone, Serialize)]
struct Run {
    tps: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    cpu_us_per_pair: Option<f64>,
}

/// All runs with one number of clients and one protocol, on one path.
#[derive(Debug, Serialize)]
struct RunGroup {
    protocol: &'static str,
    clients: usize,
    way: &'static str,
    runs: Vec<Run>,
}

/// Compares the paths in `rounds` rounds of `seconds` for each.
pub(crate) fn proxy(rounds: usize, seconds: u64) -> Result<Section, String> {
    let postgres = Postgres::unpatched()?;
    let pgbouncer = packages::binary(&["pgbouncer"], None, "usr/sbin/pgbouncer")?;
    let cluster = Cluster::start(&postgres, &["max_connections=1000", "autovacuum=off"]);
    Bench::prepare(&cluster, 10);
    let dir = TempDir::with_prefix("stillpoint-bench-").map_err(|e| format!("make a directory: {e}"))?;
    chown(dir.path(), Some(USER_ID), Some(USER_ID))
        .map_err(|e| format!("give the directory to the unprivileged user: {e}"))?;
    let pgbouncer = owned_by_unprivileged_user(&pgbouncer, dir.path());
    // the proxy reads no configuration that another user could exchange
    let own = TempDir::with_prefix("stillpoint-bench-").map_err(|e| format!("make a directory: {e}"))?;
    let ways = [
        ServerPath { name: "direct", port: cluster.port(), process: None, prepares: true },
        ours(&cluster, own.path()),
        bouncer(&pgbouncer, &cluster, dir.path(), "session"),
        bouncer(&pgbouncer, &cluster, dir.path(), "transaction"),
    ];
    let mut cells: Vec<RunGroup> = Vec::new();
    for protocol in PROTOCOLS {
        for clients in CLIENTS {
            let used = ways.iter().filter(|way| way.prepares || protocol == "simple");
            cells.extend(used.map(|way| RunGroup { protocol, clients, way: way.name, runs: Vec::new() }));
        }
    }
    for round in 0..rounds {
        let mut order: Vec<&mut RunGroup> = cells.iter_mut().collect();
        // The order alternates, too.
        if round % 2 == 1 {
            order.reverse();
        }
        for cell in order {
            let way = ways.iter().find(|way| way.name == cell.way).expect("a cell's way");
            cell.runs.push(run(&cluster, way, dir.path(), cell, seconds));
        }
    }
    Ok(section(&cells, rounds, seconds))
}

fn await_port(port: u16, what: &str) {
    wait::until(what, || std::net::TcpStream::connect(("127.0.0.1", port)).ok());
}

fn ours(cluster: &Cluster, dir: &Path) -> ServerPath {
    let (port, config) = (free_port(), dir.join("proxy.toml"));
    let text = format!(
        "listen = [\"127.0.0.1:{port}\"]\ncontrol = {:?}\nroutes = {:?}\n[servers.s]\nhost = \"127.0.0.1\"\nport = {}\n\
         [tenants.postgres]\nserver = \"s\"\n",
        dir.join("control.sock"),
        dir.join("routes.json"),
        cluster.port()
    );
    fs::write(&config, text).expect("write the proxy's configuration");
    let mut command = bound_command(cli::binary());
    command.args(["migrate", "proxy", "--config"]).arg(&config).stdout(Stdio::null()).stderr(Stdio::null());
    let process = ChildGuard::from_child(command.spawn().expect("start the proxy"));
    await_port(port, "the proxy to accept connections");
    ServerPath { name: "stillpoint", port, process: Some(process), prepares: true }
}

fn bouncer(pgbouncer: &Binary, cluster: &Cluster, dir: &Path, mode: &'static str) -> ServerPath {
    let (port, base) = (free_port(), dir.join(mode));
    // In session mode every client has a server process of its own, which ends with the client, as behind a proxy. A
    // process that other clients have used has the pages of shared memory mapped and its caches filled, and would be
    // compared with new ones. All other settings are pgbouncer's defaults.
    let (pool, lifetime) = if mode == "session" { (300, 0) } else { (20, 3600) };
    let text = format!(
        "[databases]\npostgres = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
         unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = {mode}\nmax_client_conn = 500\n\
         default_pool_size = {pool}\nserver_lifetime = {lifetime}\nlog_connections = 0\nlog_disconnections = 0\n\
         ignore_startup_parameters = extra_float_digits\n",
        cluster.port(),
        base.with_extension("users").display()
    );
    fs::write(base.with_extension("users"), "\"postgres\" \"\"\n").expect("write pgbouncer's users");
    fs::write(base.with_extension("ini"), text).expect("write pgbouncer's configuration");
    let mut command = bound_command(Path::new("setpriv"));
    let user = USER_ID.to_string();
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--pdeathsig", "KILL", "--"]);
    command.arg(&pgbouncer.path).arg("-q").arg(base.with_extension("ini")).envs(pgbouncer.environment());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = ChildGuard::from_child(command.spawn().expect("start pgbouncer"));
    await_port(port, "pgbouncer to accept connections");
    let name = if mode == "session" { "pgbouncer, session" } else { "pgbouncer, transaction" };
    ServerPath { name, port, process: Some(process), prepares: mode == "session" }
}

/// Copies a program and its libraries to a directory that the unprivileged user can read: only the owner can read a
/// cache below a home directory.
fn owned_by_unprivileged_user(binary: &Binary, dir: &Path) -> Binary {
    let inside = |path: &Path| dir.join(path.file_name().expect("programs and directories have names"));
    for path in binary.libraries.iter().chain([&binary.path]) {
        let copied = Command::new("cp").arg("-a").arg(path).arg(inside(path)).status().expect("run cp");
        assert!(copied.success(), "copy {}", path.display());
    }
    Binary { path: inside(&binary.path), libraries: binary.libraries.iter().map(|library| inside(library)).collect() }
}

/// Returns the processor time of all threads of a process.
fn cpu_ns(pid: i32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the proxy runs").flatten();
    let times = tasks.filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok());
    times.filter_map(|text| text.split(' ').next()?.parse::<u64>().ok()).sum()
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later than 1970").as_micros() as u64
}

/// Makes one run, long enough to be counted.
fn run(cluster: &Cluster, way: &ServerPath, dir: &Path, cell: &RunGroup, mut seconds: u64) -> Run {
    loop {
        if let Some(run) = run_for(cluster, way, dir, cell, seconds) {
            return run;
        }
        assert!(seconds < SECONDS_MAX, "{} clients through {} get nothing done in {seconds} s", cell.clients, way.name);
        seconds = (2 * seconds).min(SECONDS_MAX);
    }
}

/// Runs pgbench once: its own log has each transaction, and a thread reads the proxy's processor time meanwhile.
fn run_for(cluster: &Cluster, way: &ServerPath, dir: &Path, cell: &RunGroup, seconds: u64) -> Option<Run> {
    let logs = TempDir::new_in(dir).expect("make a directory for pgbench");
    chown(logs.path(), Some(USER_ID), Some(USER_ID)).expect("give the directory to the unprivileged user");
    let mut pgbench: Command = cluster.client("pgbench");
    let (clients, time) = (cell.clients.to_string(), seconds.to_string());
    pgbench.env("PGPORT", way.port.to_string()).current_dir(logs.path());
    let threads = cell.clients.min(2).to_string();
    pgbench.args(["-n", "-S", "-l", "-M", cell.protocol, "-c", &clients, "-j", &threads, "-T", &time, "postgres"]);
    let mut child = pgbench.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("start pgbench");
    let mut readings = Vec::new();
    let begun = Instant::now();
    let status = loop {
        readings.push((now_us(), way.process.as_ref().map(|process| cpu_ns(process.pid()))));
        if let Some(status) = child.try_wait().expect("pgbench is our child") {
            break status;
        }
        assert!(begun.elapsed() < Duration::from_secs(seconds + END_TIMEOUT_S), "pgbench does not end");
        std::thread::sleep(READING_INTERVAL);
    };
    let mut errors = String::new();
    child.stderr.take().map(|mut text| std::io::Read::read_to_string(&mut text, &mut errors));
    assert!(status.success(), "pgbench through {}: {errors}", way.name);
    evaluate(&transactions(logs.path()), &readings, Duration::from_secs(seconds).mul_f64(COUNTED_SHARE_MIN))
}

/// Returns the end of each transaction and its duration, in microseconds.
fn transactions(logs: &Path) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for file in fs::read_dir(logs).expect("list pgbench's logs").flatten() {
        let text = fs::read_to_string(file.path()).expect("read pgbench's log");
        all.extend(text.lines().filter_map(|line| {
            let words: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
            let [_, _, took, _, seconds, us, ..] = words[..] else { return None };
            Some((seconds * 1_000_000 + us, took))
        }));
    }
    all.sort_unstable();
    all
}

/// Counts the transactions between a reading shortly after the first transaction and the last reading before the end,
/// if that time is at least `least`.
fn evaluate(all: &[(u64, u64)], readings: &[(u64, Option<u64>)], least: Duration) -> Option<Run> {
    let (first, last) = (all.first()?, all.last()?);
    let within: Vec<_> =
        readings.iter().filter(|(at, _)| (first.0..last.0).contains(at)).skip(WARM_UP_READINGS).collect();
    let [(from, cpu_before), .., (to, cpu_after)] = within[..] else { return None };
    let mut took: Vec<u64> = all.iter().filter(|(at, _)| (*from..*to).contains(at)).map(|(_, took)| *took).collect();
    if took.is_empty() || u128::from(to - from) < least.as_micros() {
        return None;
    }
    took.sort_unstable();
    let at = |part: f64| took[((took.len() - 1) as f64 * part) as usize] as f64;
    let cpu = cpu_before.zip(*cpu_after).map(|(before, after)| (after - before) as f64 / 1000.0 / took.len() as f64);
    let tps = took.len() as f64 * 1e6 / (to - from) as f64;
    Some(Run { tps, p50_us: at(0.5), p99_us: at(0.99), max_us: at(1.0), cpu_us_per_pair: cpu })
}

fn spread(cell: &RunGroup, value: impl Fn(&Run) -> Option<f64>) -> Option<Spread> {
    let values: Vec<f64> = cell.runs.iter().filter_map(value).collect();
    (!values.is_empty()).then(|| Spread::of(values))
}

fn section(cells: &[RunGroup], rounds: usize, seconds: u64) -> Section {
    let title =
        format!("What a proxy costs: pgbench -S, {rounds} rounds of {seconds} s or more in turns, median (min to max)");
    let columns = [
        "protocol",
        "clients",
        "way",
        "pairs a second",
        "of direct",
        "p50, us",
        "p99, us",
        "max, us",
        "CPU a pair, us",
    ];
    let mut section = Section::new("proxy", title, &columns);
    for cell in cells {
        let direct = cells.iter().find(|c| (c.protocol, c.clients, c.way) == (cell.protocol, cell.clients, "direct"));
        let text = |value: Option<Spread>| match value {
            Some(v) => format!("{} ({} to {})", number(v.median), number(v.min), number(v.max)),
            None => "-".into(),
        };
        section.rows.push(vec![
            cell.protocol.into(),
            cell.clients.to_string(),
            cell.way.into(),
            text(spread(cell, |run| Some(run.tps))),
            direct.map_or_else(String::new, |direct| {
                number(ratio(cell, direct, |run| Some(run.tps)).map_or(0.0, |r| r.median))
            }),
            text(spread(cell, |run| Some(run.p50_us))),
            text(spread(cell, |run| Some(run.p99_us))),
            spread(cell, |run| Some(run.max_us)).map_or_else(String::new, |v| number(v.max)),
            text(spread(cell, |run| run.cpu_us_per_pair)),
        ]);
    }
    section.notes.extend(PROTOCOLS.into_iter().filter_map(|protocol| compared(cells, protocol)));
    section.notes.push(
        "pgbouncer 1.18 cannot pass prepared statements in transaction mode, where its pool has 20 servers; in session mode \
         each client has one of its own, which ends with it."
            .into(),
    );
    section.raw(&cells);
    section
}

/// Returns the ratio of two cells, round by round.
fn ratio(ours: &RunGroup, theirs: &RunGroup, value: impl Fn(&Run) -> Option<f64>) -> Option<Spread> {
    let pairs = ours.runs.iter().zip(&theirs.runs);
    let ratios: Vec<f64> = pairs.filter_map(|(a, b)| Some(value(a)? / value(b)?)).collect();
    (!ratios.is_empty()).then(|| Spread::of(ratios))
}

/// Returns the comparison of ours with pgbouncer in session mode, as text.
fn compared(cells: &[RunGroup], protocol: &'static str) -> Option<String> {
    let cell = |clients: usize, way: &str| {
        cells.iter().find(|cell| (cell.protocol, cell.clients, cell.way) == (protocol, clients, way))
    };
    let mut parts = Vec::new();
    for clients in CLIENTS {
        let (ours, theirs) = (cell(clients, "stillpoint")?, cell(clients, "pgbouncer, session")?);
        let text = |s: Spread| format!("{} ({} to {})", number(s.median), number(s.min), number(s.max));
        let (tps, cpu) = (ratio(ours, theirs, |run| Some(run.tps))?, ratio(ours, theirs, |run| run.cpu_us_per_pair)?);
        parts.push(format!("{clients} clients {} times the pairs for {} times the CPU each", text(tps), text(cpu)));
    }
    let p50 = |way: &str| Some(spread(cell(1, way)?, |run| Some(run.p50_us))?.median);
    let (direct, ours, theirs) = (p50("direct")?, p50("stillpoint")?, p50("pgbouncer, session")?);
    Some(format!(
        "{protocol}: stillpoint against pgbouncer (session mode), round by round: {}. Added to one client's median: {} us by stillpoint, {} us by pgbouncer.",
        parts.join("; "),
        number(ours - direct),
        number(theirs - direct)
    ))
}
