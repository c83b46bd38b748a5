//! Duration of each step of a patching, in each mode, on servers with quiescence points.

use crate::results::{Section, number};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stillpoint_patch_bench::operation::{MODES, Operation, RESTART, Spread, Why};
use stillpoint_patch_tests::load::{Clients, Load};
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::series::Series;
use stillpoint_patch_tests::server::{Memcached, Redis, Restart};
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// One patch, applied to a process in one mode.
pub(crate) struct AppliedPatch {
    server: &'static str,
    mode: &'static str,
    patch: String,
    text_bytes: u64,
    operation: Operation,
}

#[derive(Serialize)]
struct Point<'a> {
    mode: &'a str,
    patch: &'a str,
    text_bytes: u64,
    reach_ms: f64,
    apply_ms: f64,
    command_ms: f64,
}

impl AppliedPatch {
    pub(crate) fn new(server: &'static str, mode: &'static str, patch: &str, operation: Operation) -> AppliedPatch {
        AppliedPatch { server, mode, patch: patch.into(), text_bytes: 0, operation }
    }

    fn point(&self) -> Point<'_> {
        let (reached, rest) = self.operation.reached_and_rest_ns();
        let ms = |ns: u64| ns as f64 / 1e6;
        let (mode, patch, text_bytes) = (self.mode, self.patch.as_str(), self.text_bytes);
        let command_ms = ms(self.operation.elapsed_ns());
        Point { mode, patch, text_bytes, reach_ms: ms(reached), apply_ms: ms(rest), command_ms }
    }
}

/// Starts requests that make the threads reach their points.
fn clients(protocol: &'static str) -> Clients {
    Clients { protocol, connections: 8, rate: 500, idle: 0, blocking: 0, mix: "get=100", keys: 1_000 }
}

/// Applies the whole series `runs` times in each mode, to one process at a time.
pub(crate) fn redis(series: &Series, runs: usize) -> Vec<AppliedPatch> {
    let mut done = Vec::new();
    let dir = tempfile::tempdir().expect("make a directory for the record");
    for mode in MODES {
        for _ in 0..runs {
            let redis = Redis::start(&series.binary, &[]);
            let load = Load::start(redis.port(), &clients("redis"), dir.path(), "series");
            for patch in &series.patches {
                let call = patch_calls::apply(&patch.file, redis.pid()).args(["--quiescence", mode]);
                let operation = Operation::of(call).succeeded();
                let (patch, text_bytes) = (patch.name.clone(), patch.text_bytes);
                done.push(AppliedPatch { server: "redis", mode, patch, text_bytes, operation });
            }
            load.finish();
        }
    }
    done
}

/// Applies the one patch and reverts it, `runs` times in each mode.
pub(crate) fn memcached(binary: &Binary, patch: &Path, runs: usize) -> Vec<AppliedPatch> {
    let mut done = Vec::new();
    let dir = tempfile::tempdir().expect("make a directory for the record");
    let memcached = Memcached::start(binary, &["-t", "4"]);
    let load = Load::start(memcached.port(), &clients("memcached"), dir.path(), "memcached");
    for mode in MODES {
        for _ in 0..runs {
            for call in [patch_calls::apply(patch, memcached.pid()), patch_calls::revert(memcached.pid())] {
                let operation = Operation::of(call.args(["--quiescence", mode])).succeeded();
                done.push(AppliedPatch::new("memcached", mode, "version", operation));
            }
        }
    }
    load.finish();
    done
}

/// Restarts of one server: from the request to end to the first answer, in milliseconds.
pub(crate) struct RestartTimes {
    pub(crate) server: &'static str,
    pub(crate) ms: Vec<f64>,
}

impl RestartTimes {
    /// Restarts redis under the same requests; it saves its data and loads them.
    pub(crate) fn redis(binary: &Binary, runs: usize) -> RestartTimes {
        let mut redis = Redis::start(binary, &[]);
        let port = redis.port();
        RestartTimes::of("redis", port, runs, || redis.restart())
    }

    /// Restarts memcached under the same requests; it starts empty.
    pub(crate) fn memcached(binary: &Binary, runs: usize) -> RestartTimes {
        let mut memcached = Memcached::start(binary, &["-t", "4"]);
        let port = memcached.port();
        RestartTimes::of("memcached", port, runs, || memcached.restart())
    }

    fn of(server: &'static str, port: u16, runs: usize, mut restart: impl FnMut() -> Restart) -> RestartTimes {
        let dir = tempfile::tempdir().expect("make a directory for the record");
        let load = Load::start(port, &clients(server), dir.path(), "restarts");
        let again = |_| {
            let done = restart();
            // Until all clients have connected again.
            std::thread::sleep(Duration::from_secs(1));
            done.ms()
        };
        let ms = (0..runs).map(again).collect();
        load.finish();
        RestartTimes { server, ms }
    }
}

/// Makes the section of the duration of an apply by the size of the patch.
pub(crate) fn by_size(applied: &[AppliedPatch], restarted: &RestartTimes) -> Section {
    let title = "Redis fixes by size of their code: time to apply without the wait for threads, ms, median (max)";
    let mut section = Section::new("patches", title, &["patch", "code, bytes", "probe", "local", "global"]);
    let mut names: Vec<(&str, u64)> = applied.iter().map(|a| (a.patch.as_str(), a.text_bytes)).collect();
    names.sort_by_key(|(name, bytes)| (*bytes, *name));
    names.dedup();
    for (name, bytes) in names {
        let mut row = vec![name.to_owned(), bytes.to_string()];
        for mode in MODES {
            let of = applied.iter().filter(|a| a.patch == name && a.mode == mode);
            let spread = Spread::of(of.map(|a| a.point().apply_ms).collect());
            row.push(format!("{} ({})", number(spread.median), number(spread.max)));
        }
        section.rows.push(row);
    }
    let restart = Spread::of(restarted.ms.clone());
    let mut row = vec!["a restart, to the first answer".to_owned(), "any".into()];
    row.push(format!("{} ({})", number(restart.median), number(restart.max)));
    row.extend(["the same", "the same"].map(str::to_owned));
    section.rows.push(row);
    let curve = |mode: &&str| {
        let of = applied.iter().filter(|a| a.mode == *mode);
        let points = of.map(|a| (a.text_bytes as f64, a.point().apply_ms)).collect();
        Curve { name: format!("--quiescence {mode}"), points, joined: false }
    };
    let sizes = || applied.iter().map(|a| a.text_bytes as f64);
    let ends = [sizes().fold(f64::MAX, f64::min), sizes().fold(0.0, f64::max)];
    let any = ends.map(|bytes| (bytes, restart.median)).into();
    let mut curves: Vec<Curve> = MODES.iter().map(curve).collect();
    curves.push(Curve { name: "a restart (median)".into(), points: any, joined: true });
    section.figures.push((
        "",
        Figure {
            x: Axis { label: "code of the patch, bytes", logarithmic: true },
            y: Axis { label: "time to apply, ms", logarithmic: true },
            curves,
        },
    ));
    section.raw(&serde_json::json!({
        "applied": applied.iter().map(AppliedPatch::point).collect::<Vec<_>>(),
        "restart_ms": restarted.ms,
    }));
    section
}

#[derive(Serialize)]
struct Extremes {
    server: &'static str,
    mode: &'static str,
    operations: usize,
    reach_ms: Spread,
    apply_ms: Spread,
    one_thread_stands_us: Spread,
    all_threads_stand_us: Spread,
}

/// Makes the section of the smallest and the largest time of each step.
pub(crate) fn extremes(applied: &[AppliedPatch], restarted: &[RestartTimes]) -> Section {
    let title = "Steps of patching: minimum / maximum";
    let columns = [
        "server",
        "mode",
        "operations",
        "threads reach quiescence, ms",
        "everything else, ms",
        "one thread stopped, us",
        "all threads stopped at once, us",
    ];
    let mut section = Section::new("operations", title, &columns);
    let mut raw = Vec::new();
    let mut servers: Vec<&'static str> = applied.iter().map(|a| a.server).collect();
    servers.dedup();
    for server in servers {
        for mode in MODES {
            let of: Vec<&AppliedPatch> = applied.iter().filter(|a| a.server == server && a.mode == mode).collect();
            let stops = |why| Spread::us(of.iter().flat_map(move |a| a.operation.stopped(why)));
            raw.push(Extremes {
                server,
                mode,
                operations: of.len(),
                reach_ms: Spread::of(of.iter().map(|a| a.point().reach_ms).collect()),
                apply_ms: Spread::of(of.iter().map(|a| a.point().apply_ms).collect()),
                one_thread_stands_us: stops(Why::Probe),
                all_threads_stand_us: stops(Why::All),
            });
        }
    }
    for RestartTimes { server, ms } in restarted {
        let none = Spread::of(Vec::new());
        let (reach_ms, one_thread_stands_us, all_threads_stand_us) = (none, none, none);
        let apply_ms = Spread::of(ms.clone());
        let mode = RESTART;
        let operations = ms.len();
        raw.push(Extremes { server, mode, operations, reach_ms, apply_ms, one_thread_stands_us, all_threads_stand_us });
    }
    let cell = |row: &Extremes, spread: &Spread| match spread.count {
        0 if row.mode == RESTART => "-".to_owned(),
        0 => "never".to_owned(),
        _ => format!("{} / {}", number(spread.min), number(spread.max)),
    };
    for row in &raw {
        section.rows.push(vec![
            row.server.into(),
            row.mode.into(),
            row.operations.to_string(),
            cell(row, &row.reach_ms),
            cell(row, &row.apply_ms),
            cell(row, &row.one_thread_stands_us),
            cell(row, &row.all_threads_stand_us),
        ]);
    }
    section.notes.push("Restart: from the order to end to the first answer; its connections end.".into());
    section.notes.push(
        "No address space is made: the papers' third operation (1 ms to 3 s there) has no counterpart; vldb25-fig9 has fork() as its stand-in."
            .into(),
    );
    section.raw(&raw);
    section
}
