//! All patches of redis in sequence: the duration of each, by its size.

use crate::results::{Section, number};
use serde::Serialize;
use stillpoint_patch_bench::operation::{Operation, Spread, StopsUs};
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::series::Series;
use stillpoint_patch_tests::server::Redis;

#[derive(Serialize)]
struct One {
    name: String,
    file_bytes: u64,
    text_bytes: u64,
    functions: u64,
    command_ms: Spread,
    migrated_ms: Spread,
    stopped_us: StopsUs,
}

/// Applies the whole series to one idle redis, `runs` times.
pub(crate) fn series(series: &Series, runs: usize) -> Section {
    let mut done: Vec<Vec<Operation>> = vec![Vec::new(); series.patches.len()];
    for _ in 0..runs {
        let redis = Redis::start(&series.binary, &[]);
        for (patch, done) in series.patches.iter().zip(&mut done) {
            done.push(Operation::of(patch_calls::apply(&patch.file, redis.pid())).succeeded());
        }
    }
    let title = format!("The series of redis CVE fixes, applied to one process {runs} times: median (max)");
    let columns = ["patch", "functions", "code, bytes", "whole command, ms", "all over, ms", "a thread probed, us"];
    let mut section = Section::new("series", title, &columns);
    let ones: Vec<One> = series
        .patches
        .iter()
        .zip(done)
        .map(|(patch, done)| One {
            name: patch.name.clone(),
            file_bytes: std::fs::metadata(&patch.file).map_or(0, |m| m.len()),
            text_bytes: patch.text_bytes,
            functions: patch.functions,
            command_ms: Spread::of(done.iter().map(|o| o.elapsed_ns() as f64 / 1e6).collect()),
            migrated_ms: Spread::of(done.iter().filter_map(|o| o.migrated_ns.map(|ns| ns as f64 / 1e6)).collect()),
            stopped_us: StopsUs::of(&done),
        })
        .collect();
    let cell = |spread: &Spread| format!("{} ({})", number(spread.median), number(spread.max));
    for one in &ones {
        section.rows.push(vec![
            one.name.clone(),
            one.functions.to_string(),
            one.text_bytes.to_string(),
            cell(&one.command_ms),
            cell(&one.migrated_ms),
            cell(&one.stopped_us.probe),
        ]);
    }
    section.raw(&ones);
    section
}
