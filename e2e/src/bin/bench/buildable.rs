//! How many of a package's own fixes become live patches, and go into a process that serves.

use crate::results::{Section, number};
use serde::Serialize;
use stillpoint_e2e::patching;
use stillpoint_e2e::series::{NOTHING_CHANGES, Series};

#[derive(Serialize)]
struct Row {
    server: String,
    version: String,
    diffs: usize,
    cves: usize,
    built: usize,
    applied: usize,
    /// In code that the package does not compile into the program.
    elsewhere: usize,
    functions_mean: f64,
    text_bytes_mean: f64,
    left_out: Vec<(String, String)>,
}

/// One row for each server: its series, and a process of it.
pub(crate) fn buildable(servers: &[(&str, &Series, i32)]) -> Section {
    let title = "Fixes of Debian's packages: built, and applied one after another to a process that serves";
    let columns = [
        "server",
        "diffs",
        "not in the program",
        "built",
        "applied",
        "CVEs fixed",
        "functions, mean",
        "code, bytes, mean",
    ];
    let mut section = Section::new("buildable", title, &columns);
    let mut rows = Vec::new();
    for &(server, series, pid) in servers {
        let applied = series.patches.iter().filter(|patch| patching::apply(&patch.file, pid).run().code == Some(0));
        let applied = applied.count();
        let mean = |sum: u64| sum as f64 / series.patches.len().max(1) as f64;
        rows.push(Row {
            server: server.to_owned(),
            version: series.version.clone(),
            diffs: series.patches.len() + series.refused.len(),
            cves: series.patches.iter().map(|patch| patch.cves.len()).sum(),
            built: series.patches.len(),
            applied,
            elsewhere: series.refused.iter().filter(|refused| refused.reasons == [NOTHING_CHANGES]).count(),
            functions_mean: mean(series.patches.iter().map(|patch| patch.functions).sum()),
            text_bytes_mean: mean(series.patches.iter().map(|patch| patch.text_bytes).sum()),
            left_out: series.refused.iter().map(|refused| (refused.diff.clone(), refused.reasons.join("; "))).collect(),
        });
    }
    for row in &rows {
        section.rows.push(vec![
            format!("{} {}", row.server, row.version),
            row.diffs.to_string(),
            row.elsewhere.to_string(),
            row.built.to_string(),
            row.applied.to_string(),
            row.cves.to_string(),
            number(row.functions_mean),
            number(row.text_bytes_mean),
        ]);
        let why = |(diff, why): &(String, String)| format!("{}: {diff}: {why}", row.server);
        section.notes.extend(row.left_out.iter().map(why));
    }
    section.raw(&rows);
    section
}
