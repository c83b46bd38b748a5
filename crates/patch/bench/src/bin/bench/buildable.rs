//! Number of a package's own fixes that become live patches, and that a serving process accepts, in each mode.

use crate::results::{Section, number};
use serde::Serialize;
use std::ops::Deref;
use stillpoint_patch_bench::operation::MODES;
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::series::{NOTHING_CHANGES, Series};
use stillpoint_patch_tests::server::Server;

/// A server's fixes: for the program as it ships, and for the one with quiescence points where any is in the program.
pub(crate) struct FixCounts<'a> {
    pub(crate) name: &'static str,
    pub(crate) series: &'a Series,
    pub(crate) with_points: Option<&'a Series>,
    pub(crate) start: fn(&Binary) -> Box<dyn Deref<Target = Server>>,
}

#[derive(Serialize)]
struct Row {
    server: String,
    version: String,
    diffs: usize,
    cves: usize,
    built: usize,
    /// Number of patches applied by probing, without points.
    applied: usize,
    /// Number of patches applied with points, by mode.
    applied_with_points: Vec<(&'static str, usize)>,
    /// Fixes in code that the package does not compile into the program.
    elsewhere: usize,
    functions_mean: f64,
    text_bytes_mean: f64,
    left_out: Vec<(String, String)>,
}

/// One row for each server.
pub(crate) fn buildable(servers: &[FixCounts]) -> Section {
    let title = "Fixes of Debian's packages: built, and applied one after another to a process that serves";
    let columns = [
        "server",
        "diffs",
        "not in the program",
        "built",
        "applied",
        "with points: probe",
        "local",
        "global",
        "CVEs fixed",
        "functions, mean",
        "code, bytes, mean",
    ];
    let mut section = Section::new("buildable", title, &columns);
    let mut rows = Vec::new();
    for server in servers {
        let series = server.series;
        let refused =
            |refused: &stillpoint_patch_tests::series::RefusedDiff| (refused.diff.clone(), refused.reasons.join("; "));
        let mut left_out: Vec<(String, String)> = series.refused.iter().map(refused).collect();
        let applied = applied(server, series, "probe", &mut left_out);
        let in_mode =
            |mode| (mode, server.with_points.map_or(0, |with| self::applied(server, with, mode, &mut left_out)));
        let applied_with_points = MODES.map(in_mode).into();
        let mean = |sum: u64| sum as f64 / series.patches.len().max(1) as f64;
        rows.push(Row {
            server: server.name.into(),
            version: series.version.clone(),
            diffs: series.patches.len() + series.refused.len(),
            cves: series.patches.iter().map(|patch| patch.cves.len()).sum(),
            built: series.patches.len(),
            applied,
            applied_with_points,
            elsewhere: series.refused.iter().filter(|refused| refused.reasons == [NOTHING_CHANGES]).count(),
            functions_mean: mean(series.patches.iter().map(|patch| patch.functions).sum()),
            text_bytes_mean: mean(series.patches.iter().map(|patch| patch.text_bytes).sum()),
            left_out,
        });
    }
    for row in &rows {
        let counts = [row.diffs, row.elsewhere, row.built, row.applied];
        let by_mode = row.applied_with_points.iter().map(|(_, count)| *count);
        let mut cells = vec![format!("{} {}", row.server, row.version)];
        cells.extend(counts.into_iter().chain(by_mode).chain([row.cves]).map(|count| count.to_string()));
        cells.extend([number(row.functions_mean), number(row.text_bytes_mean)]);
        section.rows.push(cells);
        let why = |(diff, why): &(String, String)| format!("{}: {diff}: {why}", row.server);
        section.notes.extend(row.left_out.iter().map(why));
    }
    section.notes.push(
        "A restart as Debian's own program activates all changes of the program, and ends every connection.".into(),
    );
    section.raw(&rows);
    section
}

/// Returns the number of patches that one new process accepts; adds the reasons of the others to `left_out`.
fn applied(server: &FixCounts, series: &Series, mode: &str, left_out: &mut Vec<(String, String)>) -> usize {
    let process = (server.start)(&series.binary);
    let mut count = 0;
    for patch in &series.patches {
        let run = patch_calls::apply(&patch.file, process.pid()).args(["--quiescence", mode]).run();
        match run.code {
            Some(0) => count += 1,
            _ => {
                let why = run.stderr.lines().next().unwrap_or("no reason given");
                left_out.push((patch.diff.clone(), format!("not applied by `--quiescence {mode}`: {why}")));
            }
        }
    }
    count
}
