//! `make demo-migrate`: two PostgreSQL servers, the proxy in front, pgbench through it, and sessions that hold all that
//! a session can hold. The database moves to the other server (a newer version where one is available) and back while
//! clients go on. A table and `report.html` show what the clients noticed.
//!
//! Runs the `stillpoint` binary (`STILLPOINT_BIN`) as a user would. It starts the servers in directories of their own
//! and does not touch the machine's own clusters. It exits with code 1 if a client saw an error, a commit is missing or
//! is there twice, a session lost what it held, or the sides differ.
#![forbid(unsafe_code)]

mod record;
mod sessions;

use sessions::{SESSION_CONTENTS, SESSIONS, SessionReport, Sessions};
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_measure::report::Report;
use stillpoint_measure::timeline::Timeline;
use stillpoint_migrate_tests::ring_session::{COMMITS, TABLES, WRONG_BALANCES};
use stillpoint_testing::{
    port::free_port,
    postgresql::{Cluster, LoadOutcome, NEWER_MAJOR, available, newer_available},
    wait::until,
};

/// Size of the load; `--short` is for a quick look and for tests.
struct Size {
    scale: &'static str,
    clients: &'static str,
    rate: &'static str,
    /// Wait before the migration, between it and the way back, and after the way back.
    rest: Duration,
}

/// Limit of the load in seconds; it is stopped after the way back.
const LOAD_S_MAX: &str = "3600";

const FULL: Size = Size { scale: "50", clients: "32", rate: "800", rest: Duration::from_secs(15) };
const SHORT: Size = Size { scale: "5", clients: "16", rate: "400", rest: Duration::from_secs(3) };

struct Demo {
    stillpoint: PathBuf,
    source: Cluster,
    target: Cluster,
    dir: tempfile::TempDir,
    port: u16,
    proxy: Child,
}

fn main() -> ExitCode {
    let short = std::env::args().any(|argument| argument == "--short");
    let Some(stillpoint) = std::env::var_os("STILLPOINT_BIN").map(PathBuf::from) else {
        eprintln!("error: STILLPOINT_BIN does not name the binary; `make demo-migrate` sets it");
        return ExitCode::from(2);
    };
    if !available() {
        return ExitCode::from(3);
    }
    if demonstrate(Demo::start(stillpoint), if short { &SHORT } else { &FULL }) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn demonstrate(demo: Demo, size: &Size) -> bool {
    let [from, to] = [&demo.source, &demo.target].map(|server| server.sql("postgres", "SHOW server_version"));
    println!("from PostgreSQL {from} to {to}; pgbench, scale {}", size.scale);
    demo.source.sql("postgres", "CREATE DATABASE shop");
    demo.source.pgbench("shop", &["-i", "-s", size.scale, "-q"]);
    for server in [&demo.source, &demo.target] {
        server.sql("postgres", "CREATE ROLE teller");
    }
    demo.source.sql("shop", TABLES);
    println!("\n$ stillpoint migrate check");
    assert!(demo.migrate(&["check"], None), "check refuses");
    let arguments = ["-n", "-M", "prepared", "-c", size.clients, "-j", "2", "-R", size.rate, "-T", LOAD_S_MAX, "-l"];
    println!("\npgbench through the proxy: {} clients, {} transactions a second", size.clients, size.rate);
    let mut load = demo.source.pgbench_load("shop", demo.port, &arguments);
    println!("beside it {SESSIONS} sessions that hold {SESSION_CONTENTS}, and one that listens to them");
    let sessions = Sessions::open(demo.port);
    std::thread::sleep(size.rest);
    let events = demo.dir.path().join("events");
    println!("\n$ stillpoint migrate run");
    let moved = demo.migrate(&["run", "--pause-timeout", "2s"], Some(&events));
    let there = moved && load.running();
    std::thread::sleep(size.rest);
    println!("\n$ stillpoint migrate fallback");
    let back = moved && demo.migrate(&["fallback", "--pause-timeout", "2s"], Some(&events)) && load.running();
    std::thread::sleep(size.rest);
    let outcome = load.stop();
    report(&demo, &outcome, sessions.finish(), &events, there, back)
}

impl Demo {
    fn start(stillpoint: PathBuf) -> Demo {
        let settings = ["wal_level=logical", "fsync=on", "shared_buffers=256MB"];
        let source = Cluster::start(&settings);
        let target = if newer_available() {
            Cluster::of_major(NEWER_MAJOR, &settings)
        } else {
            println!("PostgreSQL {NEWER_MAJOR} is not installed: the target has the source's version");
            Cluster::start(&settings)
        };
        let dir = tempfile::TempDir::with_prefix("stillpoint-demo-").expect("make a directory");
        let port = free_port();
        let path = |name: &str| dir.path().join(name);
        let text = format!(
            "listen = [\"127.0.0.1:{port}\"]\ncontrol = {:?}\nroutes = {:?}\n[servers.old]\nhost = \"127.0.0.1\"\n\
             port = {}\n[tenants.shop]\nserver = \"old\"\n",
            path("proxy.sock"),
            path("routes.json"),
            source.port()
        );
        fs::write(path("proxy.toml"), text).expect("write the proxy's configuration");
        let mut command = Command::new(&stillpoint);
        command.args(["migrate", "proxy", "--config"]).arg(path("proxy.toml")).stdout(Stdio::null());
        let proxy = command.spawn().unwrap_or_else(|error| panic!("start {}: {error}", stillpoint.display()));
        until("the proxy to listen", || TcpStream::connect(("127.0.0.1", port)).ok());
        Demo { stillpoint, source, target, dir, port, proxy }
    }

    /// Runs `stillpoint migrate ...` and appends its events to `events`. Returns true if the command succeeded.
    fn migrate(&self, arguments: &[&str], events: Option<&Path>) -> bool {
        let mut command = Command::new(&self.stillpoint);
        command.arg("migrate").args(arguments).arg("--source").arg(self.source.conninfo("shop"));
        command.arg("--target").arg(self.target.conninfo("shop"));
        command.arg("--proxy").arg(self.dir.path().join("proxy.sock"));
        command.arg("--state").arg(self.dir.path().join("state"));
        let Some(events) = events else {
            return command.status().expect("run stillpoint").success();
        };
        let output = command.arg("--json").stderr(Stdio::inherit()).output().expect("run stillpoint");
        let mut all = fs::read(events).unwrap_or_default();
        all.extend_from_slice(&output.stdout);
        fs::write(events, all).expect("keep the events");
        for event in String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| serde_json::from_str(line).ok())
        {
            show(&event);
        }
        output.status.success()
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
    }
}

fn show(event: &Event) {
    match &event.kind {
        EventKind::PhaseEnded { phase, duration_ns, .. } => {
            println!("  {phase:12} {:>9.1} ms", *duration_ns as f64 / 1e6)
        }
        EventKind::Migrate(migrate::Event::Compared { tables, rows, .. }) => {
            println!("  {tables} tables, {rows} rows: equal on both sides")
        }
        EventKind::Migrate(migrate::Event::SwitchedOver { paused_us, sessions, .. }) => {
            println!("  {sessions} sessions changed sides, paused for {:.1} ms", *paused_us as f64 / 1e3);
        }
        EventKind::Warning { text } => println!("  warning: {text}"),
        _ => {}
    }
}

/// Prints the table and writes the page. Returns true if all checks pass.
fn report(demo: &Demo, outcome: &LoadOutcome, seen: SessionReport, events: &Path, there: bool, back: bool) -> bool {
    let called = format!("of sessions that hold {SESSION_CONTENTS}");
    let record = record::of_logs(demo.source.socket_dir(), demo.port, seen.samples, called);
    let failed = outcome.failed + u64::from(!outcome.success);
    let committed: u64 = demo.source.sql("shop", "SELECT count(*) FROM pgbench_history").parse().unwrap_or(0);
    let balance = "SELECT sum(abalance) = (SELECT sum(delta) FROM pgbench_history) FROM pgbench_accounts";
    let balanced = demo.source.sql("shop", balance) == "t";
    let theirs = demo.source.sql("shop", COMMITS) == format!("{0}|{0}", seen.commits);
    let theirs = theirs && demo.source.sql("shop", WRONG_BALANCES) == "0";
    let timeline = Timeline::open(&[events]).expect("read the events");
    println!("\n  transactions {:>9}   failed {failed}", outcome.transactions);
    println!("  in the history {:>7}   every commit exactly once: {}", committed, committed == outcome.transactions);
    println!("  balances agree with the history: {balanced}");
    println!(
        "  {SESSIONS} sessions that hold {SESSION_CONTENTS}: {} transactions, each exactly once: {theirs}",
        seen.commits
    );
    match &seen.wrong {
        None => println!("  they kept all of it, and every notification came once and in order"),
        Some(wrong) => println!("  of what they hold: {wrong}"),
    }
    let page = Path::new("target/demo/migrate.html");
    match Report::of(vec![record], timeline) {
        Ok(report) => {
            let latency = &report.summary.latency;
            println!(
                "  latency p50 {:.2} ms, p99 {:.2} ms, longest {:.1} ms",
                latency.p50_ns as f64 / 1e6,
                latency.p99_ns as f64 / 1e6,
                latency.max_ns as f64 / 1e6
            );
            fs::create_dir_all("target/demo").and_then(|()| fs::write(page, report.html())).expect("write the page");
            println!("  latency over time, with the phases: {}", page.display());
        }
        Err(error) => println!("  no page: {error}"),
    }
    there && back && failed == 0 && balanced && committed == outcome.transactions && theirs && seen.wrong.is_none()
}
