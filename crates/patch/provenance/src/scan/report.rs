//! Result of a scan.

use crate::origin::{Evidence, Origin, Subject};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// State of a mapped file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// The newest version that the archive offers.
    Current,
    /// Live patches fix every CVE that is known of the version that runs.
    FixedLive,
    /// The archive has a newer version than the one that runs and is installed.
    Outdated,
    /// The file was deleted or replaced: another version is installed than the one that runs.
    Replaced,
}

impl Class {
    /// Name as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Class::Current => "current",
            Class::FixedLive => "fixed-live",
            Class::Outdated => "outdated",
            Class::Replaced => "replaced",
        }
    }
}

/// Reason why nothing is stated about a process or a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// This user may not look at it.
    NoRight,
    /// The process has another root file system, as in a container.
    OtherRoot,
    /// The process sees other mounts at this path.
    OtherMounts,
    /// The process has ended during the scan.
    Ended,
    /// It cannot be read for another reason.
    Unreadable,
    /// No installed package has the file.
    NoPackage,
    /// The file on disk is not as its package has it.
    Altered,
    /// No list of an archive has the package.
    NotInArchive,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Reason; 8] = [
        Reason::NoRight,
        Reason::OtherRoot,
        Reason::OtherMounts,
        Reason::Ended,
        Reason::Unreadable,
        Reason::NoPackage,
        Reason::Altered,
        Reason::NotInArchive,
    ];

    /// Name as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Reason::NoRight => "no-right",
            Reason::OtherRoot => "other-root",
            Reason::OtherMounts => "other-mounts",
            Reason::Ended => "ended",
            Reason::Unreadable => "unreadable",
            Reason::NoPackage => "no-package",
            Reason::Altered => "altered",
            Reason::NotInArchive => "not-in-archive",
        }
    }
}

/// Active patch of a process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct LivePatch {
    /// Name of the patch.
    pub name: String,
    /// CVE identifiers that it fixes.
    pub cves: Vec<String>,
    /// Build-id of the file that it patches, as hex.
    #[serde(skip)]
    pub build_id: String,
}

/// Process of a finding.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ProcessName {
    /// Number of the process.
    pub pid: i32,
    /// Command name; empty if it could not be read.
    pub name: String,
}

/// State of one file in all processes that run it in the same state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// State.
    pub class: Class,
    /// Binary package that has the file now.
    pub package: Option<String>,
    /// Architecture of the package.
    pub architecture: Option<String>,
    /// Its source package.
    pub source: Option<String>,
    /// Path of the file.
    pub path: PathBuf,
    /// Build-id of the mapped file, as hex.
    pub build_id: Option<String>,
    /// Version that runs; `None` if it is not known.
    pub running: Option<String>,
    /// Evidence for that version.
    pub evidence: Option<Evidence>,
    /// Installed version.
    pub installed: Option<String>,
    /// Version that the archive offers, if it is newer than the installed one.
    pub offered: Option<String>,
    /// True if a security update is newer than the version that runs.
    pub is_security: bool,
    /// CVEs of the version that runs, which a newer version fixes.
    pub cves: Vec<String>,
    /// True if the list of CVEs is complete, as far as changelogs and the tracker's file have them.
    pub cves_known: bool,
    /// Those of them that a tracker has, with the version of the source package that fixes each.
    #[serde(skip)]
    pub fixed_in: BTreeMap<String, String>,
    /// Those of them that no active patch fixes.
    pub open_cves: Vec<String>,
    /// Active patches of this file.
    pub live_patches: Vec<LivePatch>,
    /// Reason why the active patches are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live_unknown: Option<String>,
    /// Processes that run it.
    pub processes: Vec<ProcessName>,
}

impl Finding {
    pub(super) fn new(class: Class, subject: &Subject, origin: &Origin) -> Finding {
        let installed = origin.installed.as_ref();
        let identity = origin.identity.as_ref();
        Finding {
            class,
            package: installed.map(|package| package.name.clone()),
            architecture: installed.map(|package| package.architecture.clone()),
            source: installed.map(|package| package.source.clone()),
            path: subject.path.clone(),
            build_id: identity.and_then(|identity| identity.build_id.as_ref()).map(ToString::to_string),
            running: origin.running.as_ref().map(|(package, _)| package.version.clone()),
            evidence: None,
            installed: installed.map(|package| package.version.clone()),
            offered: None,
            is_security: false,
            cves: Vec::new(),
            cves_known: false,
            fixed_in: BTreeMap::new(),
            open_cves: Vec::new(),
            live_patches: Vec::new(),
            live_unknown: None,
            processes: Vec::new(),
        }
    }

    /// Takes the active patches of a process into account.
    pub(super) fn with_live(mut self, patches: &Result<Vec<LivePatch>, String>) -> Finding {
        match patches {
            Ok(patches) => {
                let own = |patch: &&LivePatch| self.build_id.as_ref() == Some(&patch.build_id);
                self.live_patches = patches.iter().filter(own).cloned().collect();
            }
            Err(why) => self.live_unknown = Some(why.clone()),
        }
        let fixed: BTreeSet<&String> = self.live_patches.iter().flat_map(|patch| &patch.cves).collect();
        self.open_cves = self.cves.iter().filter(|cve| !fixed.contains(cve)).cloned().collect();
        if self.cves_known && !self.cves.is_empty() && self.open_cves.is_empty() {
            self.class = Class::FixedLive;
        }
        self
    }

    /// Returns true if a newer version is known to fix a security problem that no active patch fixes.
    pub fn is_urgent(&self) -> bool {
        matches!(self.class, Class::Outdated | Class::Replaced) && (self.is_security || !self.open_cves.is_empty())
    }
}

/// Processes or a file about which nothing is stated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unseen {
    /// Kind of the reason.
    pub reason: Reason,
    /// The reason, for people.
    pub detail: String,
    /// The file; `None` if the whole process was not looked at.
    pub path: Option<PathBuf>,
    /// The processes.
    pub processes: Vec<ProcessName>,
}

/// Number of processes by their worst file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Processes that were looked at.
    pub processes: usize,
    /// All files are the newest version.
    pub current: usize,
    /// Live patches fix what is known.
    pub fixed_live: usize,
    /// A file is outdated on disk as well.
    pub outdated: usize,
    /// A file was deleted or replaced.
    pub replaced: usize,
    /// Nothing is wrong in what was looked at, and a file was not looked at.
    pub partly_seen: usize,
    /// Processes of which nothing was looked at.
    pub not_looked_at: usize,
}

impl Counts {
    /// Returns the number of processes in each state, with its name as in JSON but for the dash.
    pub fn states(&self) -> [(&'static str, usize); 6] {
        [
            ("current", self.current),
            ("fixed-live", self.fixed_live),
            ("outdated", self.outdated),
            ("replaced", self.replaced),
            ("partly-seen", self.partly_seen),
            ("not-looked-at", self.not_looked_at),
        ]
    }
}

/// Verdict of a monitoring plug-in; the number is its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Everything was looked at, and is current or fixed live.
    Ok = 0,
    /// A newer version is there, and no security problem is known.
    Warning = 1,
    /// A security problem is known, and neither an upgrade nor a live patch has fixed it in a process.
    Critical = 2,
    /// Nothing bad is known, and not everything was looked at.
    Unknown = 3,
}

/// Result of a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// States of files, those of a package together.
    pub findings: Vec<Finding>,
    /// Processes and files that were not looked at.
    pub not_looked_at: Vec<Unseen>,
    /// Numbers of processes.
    pub counts: Counts,
    /// Age of the newest index of an archive, in seconds; `None` if there is none.
    pub lists_age_s: Option<u64>,
}

/// Lists older than this, in seconds, do not show that a file is current.
pub(super) const LISTS_AGE_MAX_S: u64 = 7 * 24 * 3600;

impl Report {
    pub(super) fn add(&mut self, finding: Finding, processes: impl IntoIterator<Item = ProcessName>) {
        self.findings.push(Finding { processes: processes.into_iter().collect(), ..finding });
    }

    pub(super) fn add_unseen(
        &mut self,
        reason: Reason,
        detail: String,
        path: Option<PathBuf>,
        processes: impl IntoIterator<Item = ProcessName>,
    ) {
        let is_same = |known: &&mut Unseen| (known.reason, &known.path, &known.detail) == (reason, &path, &detail);
        match self.not_looked_at.iter_mut().find(is_same) {
            Some(known) => known.processes.extend(processes),
            None => {
                self.not_looked_at.push(Unseen { reason, detail, path, processes: processes.into_iter().collect() })
            }
        }
    }

    /// Puts equal findings together, sorts them by package, and counts the processes.
    pub(super) fn finish(&mut self) {
        let mut merged: BTreeMap<Finding, Vec<ProcessName>> = BTreeMap::new();
        for mut finding in std::mem::take(&mut self.findings) {
            let processes = std::mem::take(&mut finding.processes);
            merged.entry(finding).or_default().extend(processes);
        }
        self.findings = merged.into_iter().map(|(finding, processes)| Finding { processes, ..finding }).collect();
        self.findings.sort_by(|a, b| (&a.package, a.class, &a.path).cmp(&(&b.package, b.class, &b.path)));
        self.not_looked_at.sort_by(|a, b| (a.reason, &a.path, &a.detail).cmp(&(b.reason, &b.path, &b.detail)));
        let mut worst: BTreeMap<i32, Class> = BTreeMap::new();
        for finding in &self.findings {
            for process in &finding.processes {
                let known = worst.entry(process.pid).or_insert(finding.class);
                *known = (*known).max(finding.class);
            }
        }
        let with_path = self.not_looked_at.iter().filter(|unseen| unseen.path.is_some());
        let partly: BTreeSet<i32> = with_path.flat_map(|unseen| &unseen.processes).map(|process| process.pid).collect();
        let count = |wanted: Class| {
            // what is bad in a part of a process is known, what is good is not
            let is_whole = |pid: &i32| wanted >= Class::Outdated || !partly.contains(pid);
            worst.iter().filter(|(pid, class)| **class == wanted && is_whole(pid)).count()
        };
        let [current, fixed_live, outdated, replaced] =
            [Class::Current, Class::FixedLive, Class::Outdated, Class::Replaced].map(count);
        self.counts = Counts { current, fixed_live, outdated, replaced, ..self.counts };
        let is_bad = |pid: &&i32| worst.get(*pid).is_some_and(|class| *class >= Class::Outdated);
        self.counts.partly_seen = partly.iter().filter(|pid| !is_bad(pid)).count();
        let whole = self.not_looked_at.iter().filter(|unseen| unseen.path.is_none() && unseen.reason != Reason::Ended);
        self.counts.not_looked_at = whole.map(|unseen| unseen.processes.len()).sum();
    }

    /// Returns true if the archive's lists are missing, or too old to show that a file is current.
    pub fn has_old_lists(&self) -> bool {
        self.lists_age_s.is_none_or(|age| age > LISTS_AGE_MAX_S)
    }

    /// Judges the machine. Reasons that the operator accepts do not count as unknown; a process that has ended runs nothing.
    pub fn level(&self, accepted: &[Reason]) -> Level {
        let is_open = |finding: &&Finding| matches!(finding.class, Class::Outdated | Class::Replaced);
        let is_unknown = |unseen: &Unseen| unseen.reason != Reason::Ended && !accepted.contains(&unseen.reason);
        if self.findings.iter().any(Finding::is_urgent) {
            Level::Critical
        } else if self.findings.iter().any(|finding| is_open(&finding)) {
            Level::Warning
        } else if self.has_old_lists() || self.counts.processes == 0 || self.not_looked_at.iter().any(is_unknown) {
            Level::Unknown
        } else {
            Level::Ok
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(class: Class) -> Finding {
        let text = |text: &str| Some(text.to_owned());
        Finding {
            class,
            package: text("libssl3"),
            architecture: text("amd64"),
            source: text("openssl"),
            path: "/usr/lib/libssl.so.3".into(),
            build_id: text("00ff"),
            running: text("1-1"),
            evidence: None,
            installed: text("1-2"),
            offered: None,
            is_security: false,
            cves: Vec::new(),
            cves_known: false,
            fixed_in: BTreeMap::new(),
            open_cves: Vec::new(),
            live_patches: Vec::new(),
            live_unknown: None,
            processes: Vec::new(),
        }
    }

    fn process(pid: i32) -> ProcessName {
        ProcessName { pid, name: "x".into() }
    }

    fn report(findings: &[(Finding, i32)], unseen: &[(Reason, Option<&str>, i32)]) -> Report {
        let mut report = Report { lists_age_s: Some(60), ..Report::default() };
        report.counts.processes = findings.len();
        for (finding, pid) in findings {
            report.add(finding.clone(), [process(*pid)]);
        }
        for (reason, path, pid) in unseen {
            report.add_unseen(*reason, String::new(), path.map(PathBuf::from), [process(*pid)]);
        }
        report.finish();
        report
    }

    fn patch(cves: &[&str], build_id: &str) -> LivePatch {
        LivePatch {
            name: "p".into(),
            cves: cves.iter().map(|cve| (*cve).to_owned()).collect(),
            build_id: build_id.into(),
        }
    }

    #[test]
    fn a_process_is_fixed_live_only_if_every_known_cve_is() {
        let cves: Vec<String> = ["CVE-2026-1111", "CVE-2026-2222"].map(str::to_owned).into();
        let known = Finding { cves: cves.clone(), cves_known: true, ..finding(Class::Replaced) };
        let class = |finding: &Finding, patches: &[LivePatch]| finding.clone().with_live(&Ok(patches.to_vec())).class;
        assert_eq!(class(&known, &[patch(&["CVE-2026-1111", "CVE-2026-2222"], "00ff")]), Class::FixedLive);
        assert_eq!(
            class(&known, &[patch(&["CVE-2026-1111", "CVE-2026-2222"], "00fe")]),
            Class::Replaced,
            "another file's"
        );
        assert_eq!(class(&known, &[patch(&["CVE-2026-1111"], "00ff")]), Class::Replaced);
        let partly = known.clone().with_live(&Ok(vec![patch(&["CVE-2026-1111"], "00ff")]));
        assert!(partly.open_cves == ["CVE-2026-2222"] && partly.is_urgent());
        let unknown = Finding { cves_known: false, ..known.clone() };
        assert_eq!(class(&unknown, &[patch(&["CVE-2026-1111", "CVE-2026-2222"], "00ff")]), Class::Replaced);
        assert_eq!(class(&Finding { cves: Vec::new(), ..known.clone() }, &[patch(&[], "00ff")]), Class::Replaced);
        let unread = known.with_live(&Err("forged".into()));
        assert_eq!(
            (unread.class, unread.open_cves, unread.live_unknown.as_deref()),
            (Class::Replaced, cves, Some("forged"))
        );
    }

    #[test]
    fn processes_count_by_their_worst_file() {
        let report = report(
            &[
                (finding(Class::Current), 1),
                (finding(Class::Current), 2),
                (finding(Class::Outdated), 2),
                (finding(Class::Replaced), 2),
                (finding(Class::Current), 3),
                (finding(Class::FixedLive), 4),
            ],
            &[(Reason::NoPackage, Some("/opt/x"), 3), (Reason::NoRight, None, 5), (Reason::Ended, None, 6)],
        );
        let Counts { current, fixed_live, outdated, replaced, partly_seen, not_looked_at, .. } = report.counts;
        assert_eq!([current, fixed_live, outdated, replaced, partly_seen, not_looked_at], [1, 1, 0, 1, 1, 1]);
        assert_eq!(report.findings.iter().filter(|finding| finding.class == Class::Current).count(), 1, "one group");
    }

    #[test]
    fn a_machine_is_fine_only_if_all_of_it_was_looked_at() {
        let level = |findings: &[(Finding, i32)], unseen: &[(Reason, Option<&str>, i32)]| {
            report(findings, unseen).level(&[Reason::NoPackage])
        };
        let current = (finding(Class::Current), 1);
        let urgent = Finding { is_security: true, ..finding(Class::Outdated) };
        assert_eq!(level(std::slice::from_ref(&current), &[]), Level::Ok);
        assert_eq!(level(&[current.clone(), (finding(Class::FixedLive), 2)], &[(Reason::Ended, None, 3)]), Level::Ok);
        assert_eq!(
            level(std::slice::from_ref(&current), &[(Reason::NoPackage, Some("/opt/x"), 1)]),
            Level::Ok,
            "accepted"
        );
        assert_eq!(level(std::slice::from_ref(&current), &[(Reason::NoRight, None, 2)]), Level::Unknown);
        assert_eq!(level(&[], &[]), Level::Unknown);
        assert_eq!(level(&[(finding(Class::Replaced), 1)], &[(Reason::NoRight, None, 2)]), Level::Warning);
        assert_eq!(level(&[current.clone(), (urgent, 2)], &[(Reason::NoRight, None, 3)]), Level::Critical);
        let mut old = report(&[current], &[]);
        old.lists_age_s = Some(LISTS_AGE_MAX_S + 1);
        assert_eq!(old.level(&[]), Level::Unknown);
        old.lists_age_s = None;
        assert_eq!(old.level(&[]), Level::Unknown);
    }
}
