//! Report of a scan as text: a table for people, gauges, and the line of a monitoring plug-in.

use super::list::escape;
use super::scan::open;
use crate::output::Output;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use stillpoint_patch_provenance::scan::{Class, Finding, Level, Reason, Report, Unseen};

/// Limit of processes and of CVEs that one line names.
const NAMED_MAX: usize = 8;

/// Prints the report for people.
pub(super) fn print(report: &Report, all: bool, output: &Output) {
    let rows = rows(report, all);
    if !rows.is_empty() {
        let head = ["PACKAGE", "RUNS", "INSTALLED", "OFFERED", "STATE", "PROCESSES"].map(str::to_owned);
        let width = |column: usize| {
            rows.iter().map(|row| &row.cells).chain([&head]).map(|cells| cells[column].len()).max().unwrap_or(0)
        };
        let widths: [usize; 6] = std::array::from_fn(width);
        let line = |cells: &[String; 6]| {
            let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        output.line(line(&head));
        for row in &rows {
            output.line(line(&row.cells));
            row.notes.iter().for_each(|note| output.line(format_args!("    {note}")));
        }
    }
    summary(report).iter().for_each(|line| output.line(line));
}

/// Row of the table: a package in one state.
struct Row {
    cells: [String; 6],
    notes: Vec<String>,
}

fn rows(report: &Report, all: bool) -> Vec<Row> {
    let mut groups: BTreeMap<_, Vec<&Finding>> = BTreeMap::new();
    for finding in report.findings.iter().filter(|finding| all || finding.class != Class::Current) {
        let key = (
            &finding.package,
            &finding.architecture,
            finding.class,
            &finding.running,
            &finding.live_patches,
            &finding.live_unknown,
        );
        groups.entry(key).or_default().push(finding);
    }
    groups.into_values().map(|findings| row(&findings)).collect()
}

fn row(findings: &[&Finding]) -> Row {
    let first = findings[0];
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".to_owned());
    let processes: BTreeSet<_> = findings.iter().flat_map(|finding| &finding.processes).collect();
    let names: Vec<String> = processes.iter().map(|process| format!("{}({})", process.name, process.pid)).collect();
    let paths: Vec<String> = findings.iter().map(|finding| finding.path.display().to_string()).collect();
    let cells = [
        first.package.clone().unwrap_or_else(|| "(none)".to_owned()),
        text(&first.running),
        text(&first.installed),
        first.offered.clone().unwrap_or_else(|| "-".to_owned()),
        first.class.name().to_owned(),
        names.len().to_string(),
    ];
    let mut notes = vec![format!("in {}", bounded(&names)), bounded(&paths)];
    if first.class != Class::Current {
        notes.extend(problems(first));
        notes.push(format!("to do: {}", next_step(first)));
    }
    Row { cells, notes }
}

/// Lines about CVEs and patches.
fn problems(finding: &Finding) -> Vec<String> {
    let mut lines = Vec::new();
    for patch in &finding.live_patches {
        let cves = if patch.cves.is_empty() { String::new() } else { format!(", fixes {}", bounded(&patch.cves)) };
        lines.push(format!("live patch {}{cves}", patch.name));
    }
    if let Some(why) = &finding.live_unknown {
        lines.push(format!("its live patches are not known: {why}"));
    }
    if !finding.open_cves.is_empty() {
        lines.push(format!("open: {}", bounded(&finding.open_cves)));
    }
    let security = if finding.is_security { "; a security update is newer than it" } else { "" };
    lines.push(match (finding.cves_known, &finding.running) {
        (true, _) if finding.cves.is_empty() => format!("no CVE is known that a newer version fixes{security}"),
        (true, _) => format!(
            "{} of {} CVEs are fixed live{security}",
            finding.cves.len() - finding.open_cves.len(),
            finding.cves.len()
        ),
        (false, None) => "the version that runs is not known, and so are its CVEs".to_owned(),
        (false, Some(_)) => format!("the CVEs that the newest version fixes are not known without --tracker{security}"),
    });
    lines
}

fn next_step(finding: &Finding) -> &'static str {
    match (finding.class, &finding.offered) {
        (Class::Current, _) => "nothing",
        (Class::FixedLive, Some(_)) => "nothing now; upgrade the package before the next restart",
        (Class::FixedLive, None) => "nothing now; the next start runs the installed version",
        (Class::Outdated, _) => "a live patch, or an upgrade and a restart",
        (Class::Replaced, Some(_)) => {
            "a live patch, or an upgrade and a restart (a restart alone leads to the installed version)"
        }
        (Class::Replaced, None) => "a live patch, or a restart",
    }
}

/// Joins names, a limited number of them.
pub(super) fn bounded(names: &[String]) -> String {
    let shown = names[..names.len().min(NAMED_MAX)].join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Last lines: numbers of processes, what was not looked at, and the age of the lists.
fn summary(report: &Report) -> Vec<String> {
    let states = report.counts.states().map(|(state, number)| format!("{number} {}", state.replace('-', " ")));
    let mut lines = vec![format!("{} processes looked at; {}", report.counts.processes, states.join(", "))];
    let mut by_reason: BTreeMap<(Reason, &str), Vec<&Unseen>> = BTreeMap::new();
    for unseen in &report.not_looked_at {
        by_reason.entry((unseen.reason, &unseen.detail)).or_default().push(unseen);
    }
    for ((reason, detail), all) in by_reason {
        let files: Vec<String> =
            all.iter().filter_map(|unseen| Some(unseen.path.as_ref()?.display().to_string())).collect();
        let processes: BTreeSet<String> =
            all.iter().flat_map(|unseen| &unseen.processes).map(|process| process.pid.to_string()).collect();
        let what = match &files[..] {
            [] => format!("process {}", bounded(&processes.into_iter().collect::<Vec<_>>())),
            files => format!("{} in {} processes", bounded(files), processes.len()),
        };
        lines.push(format!("not looked at [{}]: {what}: {detail}", reason.name()));
    }
    lines.push(match report.lists_age_s {
        None => "the archive's lists are missing: apt-get update".to_owned(),
        Some(age) if report.has_old_lists() => {
            format!("the archive's newest list is {} days old: apt-get update", age / 86_400)
        }
        Some(age) => format!("the archive's newest list is {} hours old", age / 3_600),
    });
    lines
}

/// Formats the exposition format 0.0.4.
pub(super) fn exposition(report: &Report) -> String {
    let mut text = String::new();
    let mut metric = |name: &str, help: &str, samples: Vec<(String, u64)>| {
        let _ = writeln!(text, "# HELP stillpoint_{name} {help}\n# TYPE stillpoint_{name} gauge");
        for (labels, value) in samples {
            let _ = writeln!(text, "stillpoint_{name}{labels} {value}");
        }
    };
    let of_state = |(state, number): (&str, usize)| (format!("{{state=\"{state}\"}}"), number as u64);
    metric("scan_processes", "Processes by their worst mapped file.", report.counts.states().map(of_state).into());
    let mut packages: BTreeMap<[String; 6], BTreeSet<i32>> = BTreeMap::new();
    for finding in report.findings.iter().filter(|finding| finding.class != Class::Current) {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let key = [
            text(&finding.package),
            finding.class.name().to_owned(),
            text(&finding.running),
            text(&finding.installed),
            text(&finding.offered),
            finding.open_cves.join(","),
        ];
        packages.entry(key).or_default().extend(finding.processes.iter().map(|process| process.pid));
    }
    let of_package = |(key, pids): (&[String; 6], &BTreeSet<i32>)| {
        let names = ["package", "state", "running", "installed", "offered", "open_cves"];
        let labels: Vec<String> =
            names.iter().zip(key).map(|(name, value)| format!("{name}=\"{}\"", escape(value))).collect();
        (format!("{{{}}}", labels.join(",")), pids.len() as u64)
    };
    metric(
        "scan_package_processes",
        "Processes that run files of a package that is not current.",
        packages.iter().map(of_package).collect(),
    );
    let mut unseen: BTreeMap<&str, u64> = BTreeMap::new();
    for one in &report.not_looked_at {
        *unseen.entry(one.reason.name()).or_default() += one.processes.len() as u64;
    }
    let of_reason = |(reason, number): (&str, u64)| (format!("{{reason=\"{reason}\"}}"), number);
    metric(
        "scan_not_looked_at",
        "Processes, and files of processes, that were not looked at.",
        unseen.into_iter().map(of_reason).collect(),
    );
    metric(
        "scan_lists_age_seconds",
        "Age of the newest index of an archive.",
        report.lists_age_s.into_iter().map(|age| (String::new(), age)).collect(),
    );
    text
}

/// Formats the line of a monitoring plug-in, with performance data.
pub(super) fn monitoring_line(report: &Report, accepted: &[Reason]) -> String {
    let level = report.level(accepted);
    let counts = &report.counts;
    let is_open = |finding: &&Finding| matches!(finding.class, Class::Outdated | Class::Replaced);
    let is_named = |finding: &&Finding| if level == Level::Critical { finding.is_urgent() } else { is_open(finding) };
    let packages: BTreeSet<String> = report
        .findings
        .iter()
        .filter(is_named)
        .map(|finding| finding.package.clone().unwrap_or_else(|| "no package".into()))
        .collect();
    let packages = bounded(&packages.into_iter().collect::<Vec<_>>());
    let unseen = counts.not_looked_at + counts.partly_seen;
    let (word, text) = match level {
        Level::Ok => ("OK", format!("{} processes are current or fixed live", counts.processes)),
        Level::Warning => {
            ("WARNING", format!("{} processes run replaced or outdated files of {packages}", open(report)))
        }
        Level::Critical => ("CRITICAL", format!("security fixes are missing in running processes: {packages}")),
        Level::Unknown if report.has_old_lists() => {
            ("UNKNOWN", "the archive's lists are missing or too old".to_owned())
        }
        Level::Unknown => ("UNKNOWN", format!("{unseen} processes were not looked at, or not completely")),
    };
    let also = match (level, unseen) {
        (Level::Warning | Level::Critical, 1..) => {
            format!("; {unseen} processes were not looked at, or not completely")
        }
        _ => String::new(),
    };
    let states = counts.states().map(|(state, number)| format!("{}={number}", state.replace('-', "_")));
    format!("STILLPOINT {word} - {text}{also} | processes={} {}", counts.processes, states.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_patch_provenance::scan::{Counts, LivePatch, ProcessName};

    fn finding(class: Class) -> Finding {
        Finding {
            class,
            package: Some("libssl3".into()),
            architecture: Some("amd64".into()),
            source: Some("openssl".into()),
            path: "/usr/lib/libssl.so.3".into(),
            build_id: Some("00".into()),
            running: Some("3.0.19-1".into()),
            evidence: None,
            installed: Some("3.0.20-1".into()),
            offered: Some("3.0.22-1".into()),
            is_security: true,
            cves: vec!["CVE-2026-1111".into(), "CVE-2026-2222".into()],
            cves_known: true,
            fixed_in: BTreeMap::new(),
            open_cves: vec!["CVE-2026-2222".into()],
            live_patches: vec![LivePatch {
                name: "fix".into(),
                cves: vec!["CVE-2026-1111".into()],
                build_id: "00".into(),
            }],
            live_unknown: None,
            processes: vec![ProcessName { pid: 7, name: "a\u{1b}\"b".into() }],
        }
    }

    fn report(findings: Vec<Finding>) -> Report {
        let unseen = Unseen {
            reason: Reason::NoRight,
            detail: "denied".into(),
            path: None,
            processes: vec![ProcessName { pid: 9, name: String::new() }],
        };
        let counts = Counts { processes: 3, current: 2, replaced: 1, not_looked_at: 1, ..Counts::default() };
        Report { findings, not_looked_at: vec![unseen], counts, lists_age_s: Some(7200) }
    }

    #[test]
    fn a_row_names_what_is_open_and_what_to_do() {
        let report = report(vec![finding(Class::Replaced), finding(Class::Current)]);
        let rows = rows(&report, false);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].cells, ["libssl3", "3.0.19-1", "3.0.20-1", "3.0.22-1", "replaced", "1"]);
        let notes = rows[0].notes.join("\n");
        for text in [
            "live patch fix, fixes CVE-2026-1111",
            "open: CVE-2026-2222",
            "1 of 2 CVEs are fixed live; a security update",
            "to do: a live patch",
        ] {
            assert!(notes.contains(text), "{notes}");
        }
        assert_eq!(super::rows(&report, true).len(), 2);
        let lines = summary(&report).join("\n");
        assert!(
            lines.contains("not looked at [no-right]: process 9: denied") && lines.contains("2 hours old"),
            "{lines}"
        );
    }

    #[test]
    fn gauges_keep_their_form_with_any_name() {
        let name = Finding { package: Some("a\"b\\".into()), ..finding(Class::Outdated) };
        let text = exposition(&report(vec![name]));
        assert!(text.contains("stillpoint_scan_processes{state=\"not-looked-at\"} 1\n"), "{text}");
        assert!(text.contains("package=\"a\\\"b\\\\\",state=\"outdated\""), "{text}");
        assert!(text.contains("open_cves=\"CVE-2026-2222\"} 1\n"), "{text}");
        assert!(text.contains("stillpoint_scan_not_looked_at{reason=\"no-right\"} 1\n"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("# TYPE")).count(), 4);
    }

    #[test]
    fn the_line_of_a_plug_in_has_a_word_and_numbers() {
        let line = monitoring_line(&report(vec![finding(Class::Replaced)]), &[]);
        assert!(
            line.starts_with(
                "STILLPOINT CRITICAL - security fixes are missing in running processes: libssl3; 1 processes were not"
            ),
            "{line}"
        );
        assert!(
            line.ends_with("| processes=3 current=2 fixed_live=0 outdated=0 replaced=1 partly_seen=0 not_looked_at=1"),
            "{line}"
        );
        assert!(monitoring_line(&report(Vec::new()), &[]).starts_with("STILLPOINT UNKNOWN - 1 processes"));
        assert!(monitoring_line(&report(Vec::new()), &[Reason::NoRight]).starts_with("STILLPOINT OK - 3 processes"));
    }
}
