//! Report of an upgrade: the state of each outdated file and of each CVE, by a scan after the work.

use super::outdated::{File, is_of, is_open};
use super::scan_text::bounded;
use crate::output::{Exit, Failure, Output, Success};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_builder::LeftOut;
use stillpoint_patch_provenance::scan::{Class, Finding, ProcessName, Reason, Report, Unseen};

/// State of a file in some processes, at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    /// The patch is active in them.
    FixedLive,
    /// Its code is that of the newest version: the package changed other files.
    SameCode,
    /// A dry run found nothing that prevents it.
    Possible,
    /// The change cannot be a live patch, or the version that runs has no source.
    Refused,
    /// No patch can help, or the patch is there and these processes cannot take it.
    NeedsRestart,
    /// A step failed that may succeed later.
    Failed,
    /// Nothing was tried: it appeared after the scan.
    NotLookedAt,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::FixedLive => "fixed live",
            State::SameCode => "has the newest code",
            State::Possible => "may be fixed live",
            State::Refused => "refused",
            State::NeedsRestart => "needs a restart",
            State::Failed => "failed",
            State::NotLookedAt => "not looked at",
        }
    }

    /// Returns true if nothing is left to do, or to try.
    fn is_fine(self) -> bool {
        matches!(self, State::FixedLive | State::SameCode | State::Possible)
    }
}

/// Result for a file to which no patch was applied.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) state: State,
    /// Version that it was compared with.
    pub(super) version: Option<String>,
    pub(super) reasons: Vec<String>,
    pub(super) hint: Option<String>,
    /// CVEs that this version fixes, beside those that the scan knows.
    pub(super) cves: Vec<String>,
}

impl Kept {
    pub(super) fn new(state: State, version: Option<String>, reason: String) -> Kept {
        Kept { state, version, reasons: vec![reason], hint: None, cves: Vec::new() }
    }
}

/// Result of the work on a file.
#[derive(Debug)]
pub(super) enum Effort {
    /// No process runs it any more.
    Gone,
    Kept(Kept),
    /// A patch was applied where that was possible.
    Applied {
        patch: String,
        version: String,
        cves: Vec<String>,
        /// Diffs of the version that are no part of the patch.
        refused: Vec<LeftOut>,
        /// Processes that were changed.
        done: usize,
        /// Processes that were not, with the reasons.
        left: Vec<String>,
        /// True if a transition is unfinished in a process.
        is_unfinished: bool,
    },
}

impl Effort {
    /// Returns true if processes of a finding about its file needed the work, or have its result.
    fn is_about(&self, finding: &Finding) -> bool {
        match self {
            Effort::Gone => false,
            _ => is_open(finding) || self.is_active_in(finding),
        }
    }

    /// Returns true if the patch is active in the processes of a finding.
    fn is_active_in(&self, finding: &Finding) -> bool {
        let Effort::Applied { patch, .. } = self else { return false };
        finding.live_patches.iter().any(|live| live.name == *patch)
    }
}

/// State of a file in some processes.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    state: State,
    package: Option<String>,
    source: Option<String>,
    path: String,
    running: Option<String>,
    /// Version of the source package that it has the code of, or should have.
    version: Option<String>,
    /// Names of the active patches.
    patches: Vec<String>,
    cves: Vec<String>,
    reasons: Vec<String>,
    hint: Option<String>,
    processes: Vec<ProcessName>,
}

impl Row {
    fn new(state: State, finding: &Finding, processes: Vec<ProcessName>) -> Row {
        Row {
            state,
            package: finding.package.clone(),
            source: finding.source.clone(),
            path: finding.path.display().to_string(),
            running: finding.running.clone(),
            version: None,
            patches: Vec::new(),
            cves: finding.cves.clone(),
            reasons: Vec::new(),
            hint: None,
            processes,
        }
    }
}

/// Account of an upgrade.
pub(super) struct Account {
    rows: Vec<Row>,
    /// The scan after the work.
    after: Report,
    changed: usize,
    is_unfinished: bool,
}

impl Account {
    /// Compares what was done with what a scan found afterwards.
    pub(super) fn new(efforts: Vec<(File, Effort)>, after: Report, packages: &[String]) -> Account {
        let mut rows = Vec::new();
        let (mut changed, mut is_unfinished) = (0, false);
        for (file, effort) in &efforts {
            let is_meant = |finding: &&Finding| file.is_in(finding) && effort.is_about(finding);
            let found: Vec<&Finding> = after.findings.iter().filter(is_meant).collect();
            if let Effort::Applied { done, is_unfinished: open, .. } = effort {
                (changed, is_unfinished) = (changed + done, is_unfinished || *open);
            }
            rows.extend(rows_of(file, effort, &found));
        }
        let is_rest = |finding: &&Finding| {
            is_of(finding, packages)
                && !efforts.iter().any(|(file, effort)| file.is_in(finding) && effort.is_about(finding))
        };
        for finding in after.findings.iter().filter(is_rest) {
            if finding.class == Class::FixedLive {
                let patches = finding.live_patches.iter().map(|patch| patch.name.clone()).collect();
                rows.push(Row { patches, ..Row::new(State::FixedLive, finding, finding.processes.clone()) });
            } else if is_open(finding) {
                let reasons = vec!["it appeared during the upgrade".to_owned()];
                let hint = Some("the same command again".to_owned());
                let row = Row::new(State::NotLookedAt, finding, finding.processes.clone());
                rows.push(Row { reasons, hint, ..row });
            }
        }
        rows.sort_by(|a, b| (a.state, &a.path, &a.running).cmp(&(b.state, &b.path, &b.running)));
        Account { rows, after, changed, is_unfinished }
    }

    /// Prints the account for people: files first, then each CVE.
    pub(super) fn print(&self, output: &Output) {
        for row in &self.rows {
            let names: Vec<String> = row.processes.iter().map(|one| format!("{}({})", one.name, one.pid)).collect();
            let version = row.version.as_ref().map(|version| format!(" (newest source {version})")).unwrap_or_default();
            output.line(format_args!(
                "{}: {} of {} {}{version} in {}",
                row.state.name(),
                row.path,
                row.package.as_deref().unwrap_or("no package"),
                row.running.as_deref().unwrap_or("?"),
                bounded(&names)
            ));
            row.reasons.iter().for_each(|reason| output.line(format_args!("    because {reason}")));
            row.hint.iter().for_each(|hint| output.line(format_args!("    try: {hint}")));
        }
        for (cve, rows) in self.by_cve() {
            let text =
                |row: &&Row| format!("{} in {} of {} processes", row.state.name(), row.path, row.processes.len());
            output.line(format_args!("{cve}: {}", rows.iter().map(text).collect::<Vec<_>>().join("; ")));
        }
        if self.rows.is_empty() {
            output.line("nothing that runs is outdated, as far as it was looked at");
        }
    }

    /// Returns the rows of each CVE.
    fn by_cve(&self) -> BTreeMap<&str, Vec<&Row>> {
        let mut all: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
        for row in &self.rows {
            row.cves.iter().for_each(|cve| all.entry(cve).or_default().push(row));
        }
        all
    }

    /// Makes the line of JSON.
    pub(super) fn line(&self, dry_run: bool) -> Value {
        let entry = |row: &&Row| json!({"state": row.state, "package": row.package, "path": row.path, "processes": row.processes.len()});
        let of_cve = |(cve, rows): (&str, Vec<&Row>)| (cve.to_owned(), rows.iter().map(entry).collect::<Vec<_>>());
        let cves: BTreeMap<String, Vec<Value>> = self.by_cve().into_iter().map(of_cve).collect();
        json!({
            "dry_run": dry_run, "changed": self.changed, "files": self.rows, "cves": cves,
            "not_looked_at": self.after.not_looked_at, "lists_age_s": self.after.lists_age_s,
        })
    }

    /// Returns the result of the command: success only if everything is fixed live, and everything was looked at.
    pub(super) fn result(&self, accepted: &[Reason]) -> Result<Success, Failure> {
        let open: Vec<&Row> = self.rows.iter().filter(|row| !row.state.is_fine()).collect();
        let mut problems = Vec::new();
        if !open.is_empty() {
            let paths: BTreeSet<String> = open.iter().map(|row| row.path.clone()).collect();
            let paths: Vec<String> = paths.into_iter().collect();
            let pids: BTreeSet<i32> = open.iter().flat_map(|row| &row.processes).map(|process| process.pid).collect();
            problems.push(format!("{} processes are not fixed live, which run {}", pids.len(), bounded(&paths)));
        }
        problems.extend(unseen(&self.after, accepted));
        if self.after.has_old_lists() {
            problems.push("the archive's lists are missing or too old to show that a file is current".to_owned());
        }
        if problems.is_empty() && !self.is_unfinished {
            return Ok(Success::Done);
        }
        let exit = match (self.is_unfinished, self.changed) {
            (true, _) => Exit::Unknown,
            (_, 1..) => Exit::FellBack,
            _ if open.iter().any(|row| row.state == State::Failed) => Exit::Failed,
            _ => Exit::Refused,
        };
        let hint = match open.first() {
            Some(_) => {
                "the same command again for those that can be helped; for the others an upgrade of the package, and a restart"
            }
            None if self.after.has_old_lists() => "apt-get update",
            None => "--accept REASON,... with the reasons that this machine may have, for instance no-package",
        };
        let state = format!(
            "{} processes were changed, and run on; the others run the code that they ran before",
            self.changed
        );
        Err(Failure { exit, error: anyhow::anyhow!(problems.join("; ")), state, hint: Some(hint.to_owned()) })
    }
}

/// Describes what was not looked at; `None` if that is nothing, or is accepted.
fn unseen(report: &Report, accepted: &[Reason]) -> Option<String> {
    let is_open = |unseen: &&Unseen| unseen.reason != Reason::Ended && !accepted.contains(&unseen.reason);
    let mut counts: BTreeMap<&str, BTreeSet<i32>> = BTreeMap::new();
    for unseen in report.not_looked_at.iter().filter(is_open) {
        let pids = unseen.processes.iter().map(|process| process.pid);
        counts.entry(unseen.reason.name()).or_default().extend(pids);
    }
    let counts: Vec<String> = counts.iter().map(|(reason, pids)| format!("{} {reason}", pids.len())).collect();
    (!counts.is_empty()).then(|| format!("processes that were not looked at, or not completely: {}", counts.join(", ")))
}

/// Makes the rows of one file: `found` is what the scan after the work has found about it.
fn rows_of(file: &File, effort: &Effort, found: &[&Finding]) -> Vec<Row> {
    let cves = |more: &[String]| {
        let known = found.iter().copied().chain([file.finding()]).flat_map(|finding| &finding.cves);
        known.chain(more).cloned().collect::<BTreeSet<String>>()
    };
    let processes = |wanted: &dyn Fn(&Finding) -> bool| {
        let wanted = found.iter().filter(|finding| wanted(finding));
        wanted.flat_map(|finding| finding.processes.clone()).collect::<Vec<_>>()
    };
    let (patch, version, fixed, refused, left) = match effort {
        Effort::Gone => return Vec::new(),
        Effort::Kept(kept) => {
            let row = Row::new(kept.state, file.finding(), processes(&|_| true));
            return vec![Row {
                version: kept.version.clone(),
                cves: cves(&kept.cves).into_iter().collect(),
                reasons: kept.reasons.clone(),
                hint: kept.hint.clone(),
                ..row
            }];
        }
        Effort::Applied { patch, version, cves, refused, left, .. } => (patch, version, cves, refused, left),
    };
    let row = |state, processes| {
        let version = Some(version.clone());
        Row { version, cves: fixed.clone(), ..Row::new(state, file.finding(), processes) }
    };
    let mut rows = Vec::new();
    let (with, without) =
        (processes(&|finding| effort.is_active_in(finding)), processes(&|finding| !effort.is_active_in(finding)));
    if !with.is_empty() {
        for diff in refused {
            let reasons = vec![format!("{}: {}", diff.diff, diff.reason)];
            rows.push(Row { cves: diff.cves.clone(), reasons, ..row(State::Refused, with.clone()) });
        }
        // what no entry of the changelog names, and no tracker states for a version up to it
        let is_open = |cve: &String| !fixed.contains(cve) && !refused.iter().any(|diff| diff.cves.contains(cve));
        let open: Vec<String> = cves(&[]).into_iter().filter(is_open).collect();
        if !open.is_empty() {
            let reasons = vec![format!("nothing states that {version}, the newest source version, fixes it")];
            rows.push(Row { cves: open, reasons, ..row(State::Refused, with.clone()) });
        }
        rows.push(Row { patches: vec![patch.clone()], ..row(State::FixedLive, with) });
    }
    if !without.is_empty() {
        let unknown = found.iter().filter_map(|finding| finding.live_unknown.clone());
        let reasons: BTreeSet<String> = left.iter().cloned().chain(unknown).collect();
        let hint = Some("the same command again, or a restart after the upgrade of the package".to_owned());
        let row = row(State::NeedsRestart, without);
        rows.push(Row { reasons: reasons.into_iter().collect(), hint, ..row });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::outdated::tests::{finding, report};
    use super::*;

    const NAME: &str = "openssl_3.0.20-1_libssl.so.3";

    fn applied(left: &[&str]) -> Effort {
        Effort::Applied {
            patch: NAME.into(),
            version: "3.0.20-1".into(),
            cves: vec!["CVE-2026-1111".into()],
            refused: Vec::new(),
            done: 1,
            left: left.iter().map(|line| (*line).to_owned()).collect(),
            is_unfinished: false,
        }
    }

    /// Account of one file that two processes ran, of which the scan afterwards finds these.
    fn account(effort: Effort, after: Vec<Finding>) -> Account {
        let before = report(vec![finding(Class::Replaced, 1, &[]), finding(Class::Replaced, 2, &[])]);
        let file = File::all(&before, &[]).remove(0);
        Account::new(vec![(file, effort)], report(after), &[])
    }

    fn states(account: &Account) -> Vec<(State, Vec<i32>)> {
        let pids = |row: &Row| row.processes.iter().map(|process| process.pid).collect();
        account.rows.iter().map(|row| (row.state, pids(row))).collect()
    }

    fn exit(account: &Account, accepted: &[Reason]) -> i32 {
        account.result(accepted).map_or_else(|failure| failure.exit as i32, |success| success as i32)
    }

    #[test]
    fn only_processes_that_have_the_patch_afterwards_are_fixed_live() {
        let with = |pid| finding(Class::FixedLive, pid, &[(NAME, &["CVE-2026-1111"])]);
        let all = account(applied(&[]), vec![with(1), with(2)]);
        assert_eq!((states(&all), exit(&all, &[])), (vec![(State::FixedLive, vec![1, 2])], 0));
        let one =
            account(applied(&["process 2 (x) is not patched: why"]), vec![with(1), finding(Class::Replaced, 2, &[])]);
        assert_eq!(states(&one), [(State::FixedLive, vec![1]), (State::NeedsRestart, vec![2])]);
        assert_eq!((one.rows[1].reasons.len(), exit(&one, &[])), (1, 4));
        assert_eq!(one.by_cve()["CVE-2026-1111"].len(), 2);
        // a CVE that nothing states to be fixed by that version stays open
        let more = Finding { cves: vec!["CVE-2026-1111".into(), "CVE-2026-9999".into()], ..with(1) };
        let open = account(applied(&[]), vec![more]);
        assert_eq!(states(&open), [(State::FixedLive, vec![1]), (State::Refused, vec![1])]);
        assert_eq!((open.rows[1].cves.as_slice(), exit(&open, &[])), (&["CVE-2026-9999".to_owned()][..], 4));
    }

    #[test]
    fn the_exit_code_is_success_only_if_nothing_is_left_and_nothing_is_unknown() {
        let kept = |state| Effort::Kept(Kept::new(state, None, "why".into()));
        let code = |state| exit(&account(kept(state), vec![finding(Class::Replaced, 1, &[])]), &[]);
        let codes = [State::SameCode, State::Possible, State::Refused, State::NeedsRestart, State::Failed].map(code);
        assert_eq!(codes, [0, 0, 3, 3, 1]);
        let mut unseen = account(Effort::Gone, Vec::new());
        assert_eq!(exit(&unseen, &[]), 0);
        let processes = vec![ProcessName { pid: 9, name: String::new() }];
        unseen.after.not_looked_at.push(Unseen {
            reason: Reason::NoRight,
            detail: String::new(),
            path: None,
            processes,
        });
        assert_eq!([exit(&unseen, &[]), exit(&unseen, &[Reason::NoRight])], [3, 0]);
        unseen.after.lists_age_s = None;
        assert_eq!(exit(&unseen, &[Reason::NoRight]), 3);
        let by_hand = finding(Class::FixedLive, 1, &[("by-hand", &["CVE-2026-1111"])]);
        let apart = account(kept(State::Refused), vec![by_hand, finding(Class::Replaced, 2, &[])]);
        assert_eq!(states(&apart), [(State::FixedLive, vec![1]), (State::Refused, vec![2])]);
        let new = account(Effort::Gone, vec![Finding { build_id: None, ..finding(Class::Replaced, 7, &[]) }]);
        assert_eq!((states(&new), exit(&new, &[])), (vec![(State::NotLookedAt, vec![7])], 3));
        let unfinished = match applied(&[]) {
            Effort::Applied { patch, version, cves, refused, done, left, .. } => {
                Effort::Applied { patch, version, cves, refused, done, left, is_unfinished: true }
            }
            other => other,
        };
        assert_eq!(exit(&account(unfinished, Vec::new()), &[]), 5);
    }
}
