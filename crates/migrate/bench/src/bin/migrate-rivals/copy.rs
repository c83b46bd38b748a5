//! Time to fill a target, up to the moment from which it follows.

use crate::native;
use crate::{Raw, SETTINGS, Size, against, cluster, median, of_rounds, spread};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_tests::Testbed;
use stillpoint_testing::packages::{Binary, binary};
use stillpoint_testing::{postgresql::Cluster, wait::within};

/// A copy that takes longer has failed.
const ROUND_TIMEOUT: Duration = Duration::from_secs(580);
/// Message of pgcopydb when rows, indexes and constraints are there, and changes may follow.
const FILLED_MESSAGE: &str = "to enable applying changes";

pub(crate) fn measure(size: &Size, rounds: usize) -> Raw {
    let rival = Pgcopydb::unpack();
    let [mut ours, mut natives, mut theirs, mut mib] = [const { Vec::new() }; 4];
    for _ in 0..rounds {
        ours.push(stillpoint(size, &mut mib));
        natives.push(logical_replication(size));
        match &rival {
            Ok(rival) => theirs.push(rival.copy_seconds(size)),
            Err(why) => eprintln!("no pgcopydb: {why}"),
        }
    }
    let mib = median(&mib);
    println!("## Filling the target: pgbench of scale {}, {mib:.0} MiB with indexes, no load\n", size.filled);
    println!("| | s | MiB a second | stillpoint / this |");
    println!("|---|---|---|---|");
    let per_second = |took: &[f64]| took.iter().map(|seconds| mib / seconds).collect::<Vec<_>>();
    let rate = per_second(&ours);
    let mut raw = Raw::new();
    for (name, took) in [
        ("stillpoint migrate, 2 copies at a time", ours),
        ("logical replication", natives),
        ("pgcopydb clone --follow, 2 copies at a time", theirs),
    ] {
        let this = per_second(&took);
        let times = if raw.is_empty() { String::new() } else { against(&rate, &this) };
        println!("| {name} | {} | {} | {times} |", spread(&took), spread(&this));
        raw.push((format!("filled in s, {name}"), took));
    }
    println!(
        "\n{}: from the command until rows, indexes and constraints are there and changes follow.\n",
        of_rounds(rounds)
    );
    raw
}

fn fill(size: &Size, source: &Cluster) {
    source.pgbench("shop", &["-i", "-s", size.filled, "-q"]);
    source.sql("shop", "CHECKPOINT");
}

fn stillpoint(size: &Size, mib: &mut Vec<f64>) -> f64 {
    let testbed = Testbed::direct(cluster(), cluster());
    fill(size, &testbed.source);
    let bytes = testbed.source.sql("shop", "SELECT pg_database_size('shop')");
    mib.push(bytes.parse::<f64>().expect("a size") / f64::from(1 << 20));
    let begun = Instant::now();
    let mut tool = testbed.tool(&["run"]);
    let follows = |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "catch-up");
    assert!(tool.await_event(follows), "it ended before: {:?}", tool.seen);
    let took = begun.elapsed().as_secs_f64();
    let ended = tool.end_within(ROUND_TIMEOUT);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    took
}

fn logical_replication(size: &Size) -> f64 {
    let (source, target) = (cluster(), cluster());
    source.sql("postgres", "CREATE DATABASE shop");
    fill(size, &source);
    let begun = Instant::now();
    native::subscribe(&source, &target);
    begun.elapsed().as_secs_f64()
}

/// Debian's pgcopydb, unpacked outside the system, with the plugin that the source has to load.
struct Pgcopydb {
    program: Binary,
    plugins: PathBuf,
}

impl Pgcopydb {
    fn unpack() -> Result<Pgcopydb, String> {
        let program = binary(&["pgcopydb"], None, "usr/bin/pgcopydb")?;
        let plugin = binary(&["postgresql-15-wal2json"], None, "usr/lib/postgresql/15/lib/wal2json.so")?;
        let plugins = plugin.path.parent().map(Path::to_owned).ok_or("the plugin lies nowhere")?;
        Ok(Pgcopydb { program, plugins })
    }

    /// Runs a copy; returns its seconds.
    fn copy_seconds(&self, size: &Size) -> f64 {
        let library_path = format!("dynamic_library_path=$libdir:{}", self.plugins.display());
        let source = Cluster::start(&[&SETTINGS[..], &[&library_path]].concat());
        let target = cluster();
        source.sql("postgres", "CREATE DATABASE shop");
        target.sql("postgres", "CREATE DATABASE shop");
        fill(size, &source);
        let dir = tempfile::tempdir().expect("make a directory");
        let log = dir.path().join("log");
        let file = File::create(&log).expect("make a log");
        let place = |server: &Cluster| format!("postgres://postgres@127.0.0.1:{}/shop", server.port());
        let mut command = Command::new(&self.program.path);
        command.envs(self.program.environment()).args(["clone", "--follow", "--table-jobs=2", "--index-jobs=2"]);
        // As large as the product's pieces: pgbench has one large table.
        command.args(["--split-tables-larger-than=64MB", "--dir"]).arg(dir.path().join("work"));
        command.args(["--source", &place(&source), "--target", &place(&target)]).process_group(0);
        command.stdout(file.try_clone().expect("share the log")).stderr(file);
        let begun = Instant::now();
        let mut child = command.spawn().expect("start pgcopydb");
        let read = || std::fs::read_to_string(&log).unwrap_or_default();
        let filled = within(ROUND_TIMEOUT, || {
            let ended = child.try_wait().expect("a child can be waited for").is_some();
            (ended || read().contains(FILLED_MESSAGE)).then(|| begun.elapsed())
        });
        // It would follow until it gets an end position.
        let group = Pid::from_raw(child.id() as i32).expect("a process has a number");
        let _ = kill_process_group(group, Signal::KILL);
        let _ = child.wait();
        assert!(read().contains(FILLED_MESSAGE), "pgcopydb: {}", read());
        let rows = |server: &Cluster| server.sql("shop", "SELECT count(*) FROM pgbench_accounts");
        assert_eq!(rows(&source), rows(&target));
        filled.expect("it said so").as_secs_f64()
    }
}
