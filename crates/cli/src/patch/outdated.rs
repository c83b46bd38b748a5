//! One outdated file of a machine: a build of a program or a library, with everything that a scan found about the processes that run it.

use super::scan_text::bounded;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use stillpoint_patch_format::is_patch_name;
use stillpoint_patch_provenance::scan::{Class, Finding, LivePatch, ProcessName, Report};
use stillpoint_patch_provenance::{Error, ProcessFiles, Program, SeenPackages, compare_versions};
use stillpoint_patch_tracee::Pid;

/// Length limit of each part of a patch's name.
const NAME_PART_MAX: usize = 40;

/// Build of a file that is outdated in some processes.
#[derive(Debug, Clone)]
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) build_id: Option<String>,
    /// Findings about it, which differ in what is active in the processes; never empty.
    findings: Vec<Finding>,
}

impl File {
    /// Returns the outdated files that a scan has found, of some packages or of all.
    pub(super) fn all(report: &Report, packages: &[String]) -> Vec<File> {
        let mut files: BTreeMap<(&PathBuf, &Option<String>), Vec<Finding>> = BTreeMap::new();
        for finding in report.findings.iter().filter(|finding| is_open(finding) && is_of(finding, packages)) {
            files.entry((&finding.path, &finding.build_id)).or_default().push(finding.clone());
        }
        let file = |((path, build_id), findings): ((&PathBuf, &Option<String>), _)| File {
            path: path.clone(),
            build_id: build_id.clone(),
            findings,
        };
        files.into_iter().map(file).collect()
    }

    /// Returns true if a finding is about this build.
    pub(super) fn is_in(&self, finding: &Finding) -> bool {
        (&finding.path, &finding.build_id) == (&self.path, &self.build_id)
    }

    /// One finding; package and versions are the same in all.
    pub(super) fn finding(&self) -> &Finding {
        &self.findings[0]
    }

    /// Processes that run it.
    pub(super) fn processes(&self) -> impl Iterator<Item = &ProcessName> {
        self.findings.iter().flat_map(|finding| &finding.processes)
    }

    /// Looks at the file in the first process that still runs it.
    ///
    /// # Errors
    /// Each process that still runs it cannot be looked at: the first reason.
    pub(super) fn program(&self, seen: &SeenPackages) -> Result<Option<Program>, Error> {
        let mut failed = None;
        for process in self.processes() {
            match self.program_of(Pid(process.pid), seen) {
                Ok(Some(program)) => return Ok(Some(program)),
                Ok(None) | Err(Error::Ended(_)) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(None), Err)
    }

    /// Looks at the file in a process; `None` if the process runs another program by now.
    fn program_of(&self, pid: Pid, seen: &SeenPackages) -> Result<Option<Program>, Error> {
        let Some(process) = ProcessFiles::of(pid)? else { return Ok(None) };
        let Some(file) = process.files.iter().find(|file| file.path == self.path) else { return Ok(None) };
        let library = match file.is_executable {
            true => None,
            false => Some(
                file.path
                    .to_str()
                    .ok_or_else(|| Error::Mapped { pid, why: "maps a file without a name in UTF-8".into() })?,
            ),
        };
        let program = Program::of_process(pid, library, seen)?;
        let build_id = program.origin.identity.as_ref().and_then(|identity| identity.build_id.as_ref());
        Ok((build_id.map(ToString::to_string) == self.build_id).then_some(program))
    }

    /// Name of the patch that brings the file to a version of its source package.
    pub(super) fn patch_name(&self, version: &str) -> String {
        let (start, end) = self.patch_names();
        format!("{start}{}{end}", part(version))
    }

    fn patch_names(&self) -> (String, String) {
        let source = self.finding().source.as_deref().unwrap_or("none");
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        (format!("{}_", part(source)), format!("_{}", part(&name)))
    }

    /// Returns the CVEs of the patch of this name, if every process has it.
    pub(super) fn has_everywhere(&self, name: &str) -> Option<Vec<String>> {
        let of = |finding: &Finding| finding.live_patches.iter().find(|patch| patch.name == name).cloned();
        let patches: Option<Vec<LivePatch>> = self.findings.iter().map(of).collect();
        patches?.into_iter().next().map(|patch| patch.cves)
    }

    /// Returns true if a patch that fixes these CVEs leaves nothing to the active ones: there are some, and each was an upgrade to an earlier version, or fixes
    /// CVEs, and all of these are among them.
    pub(super) fn is_covered_by(&self, cves: &[String]) -> bool {
        let (start, end) = self.patch_names();
        let is_covered = |patch: &LivePatch| {
            patch.name.starts_with(&start) && patch.name.ends_with(&end)
                || !patch.cves.is_empty() && patch.cves.iter().all(|cve| cves.contains(cve))
        };
        let mut live = self.findings.iter().flat_map(|finding| &finding.live_patches).peekable();
        live.peek().is_some() && live.all(is_covered)
    }

    /// Returns the CVEs that a version of the source package fixes: those that its changelog names, and those that a tracker states for
    /// versions up to it.
    pub(super) fn fixed_by(&self, version: &str, named: Vec<String>) -> Vec<String> {
        let tracked = self.findings.iter().flat_map(|finding| &finding.fixed_in);
        let reached = tracked.filter(|(_, fixed)| compare_versions(fixed, version).is_le()).map(|(cve, _)| cve.clone());
        let all: BTreeSet<String> = named.into_iter().chain(reached).collect();
        all.into_iter().collect()
    }
}

impl fmt::Display for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { package, running, .. } = self.finding();
        let package = package.as_deref().unwrap_or("no package");
        let names: Vec<String> = self.processes().map(|process| format!("{}({})", process.name, process.pid)).collect();
        write!(f, "{} of {package} {} in {}", self.path.display(), running.as_deref().unwrap_or("?"), bounded(&names))
    }
}

/// Returns true if something in the finding is neither current nor fixed live.
pub(super) fn is_open(finding: &Finding) -> bool {
    matches!(finding.class, Class::Outdated | Class::Replaced)
}

/// Returns true if a finding is about one of some packages; all are meant if there are none.
pub(super) fn is_of(finding: &Finding, packages: &[String]) -> bool {
    let names = [&finding.package, &finding.source];
    packages.is_empty() || names.into_iter().flatten().any(|name| packages.contains(name))
}

/// Makes a part of a patch's name.
fn part(text: &str) -> String {
    let fit = |c: char| if is_patch_name(c.encode_utf8(&mut [0; 4])) { c } else { '-' };
    text.chars().take(NAME_PART_MAX).map(fit).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use stillpoint_patch_provenance::scan::Report;

    pub(in super::super) fn finding(class: Class, pid: i32, live: &[(&str, &[&str])]) -> Finding {
        let text = |text: &str| Some(text.to_owned());
        let live_patches = live.iter().map(|(name, cves)| LivePatch {
            name: (*name).to_owned(),
            cves: cves.iter().map(|cve| (*cve).to_owned()).collect(),
            build_id: "00ff".into(),
        });
        Finding {
            class,
            package: text("libssl3"),
            architecture: text("amd64"),
            source: text("openssl"),
            path: "/usr/lib/libssl.so.3".into(),
            build_id: text("00ff"),
            running: text("3.0.19-1"),
            evidence: None,
            installed: text("3.0.20-1"),
            offered: None,
            is_security: true,
            cves: vec!["CVE-2026-1111".into()],
            cves_known: true,
            fixed_in: BTreeMap::from([
                ("CVE-2026-2222".into(), "3.0.20-1".into()),
                ("CVE-2026-3333".into(), "4-1".into()),
            ]),
            open_cves: Vec::new(),
            live_patches: live_patches.collect(),
            live_unknown: None,
            processes: vec![ProcessName { pid, name: "x".into() }],
        }
    }

    pub(in super::super) fn report(findings: Vec<Finding>) -> Report {
        Report { findings, lists_age_s: Some(60), ..Report::default() }
    }

    #[test]
    fn a_build_is_one_file_with_all_of_its_open_processes() {
        let other = Finding { build_id: Some("01".into()), ..finding(Class::Replaced, 4, &[]) };
        let findings = vec![
            finding(Class::Replaced, 1, &[]),
            finding(Class::Replaced, 2, &[("old", &["CVE-2026-1111"])]),
            finding(Class::FixedLive, 3, &[]),
            finding(Class::Current, 5, &[]),
            other,
        ];
        let files = File::all(&report(findings), &[]);
        let pids: Vec<Vec<i32>> = files.iter().map(|file| file.processes().map(|one| one.pid).collect()).collect();
        assert_eq!(pids, [vec![1, 2], vec![4]]);
        let of = |name: &str| File::all(&report(vec![finding(Class::Outdated, 1, &[])]), &[name.to_owned()]).len();
        assert_eq!([of("openssl"), of("libssl3"), of("libssl")], [1, 1, 0]);
    }

    #[test]
    fn older_patches_are_replaced_only_if_they_lose_nothing() {
        let covered = |name: &str, cves: &[&str]| {
            let file = &File::all(&report(vec![finding(Class::Replaced, 1, &[(name, cves)])]), &[])[0];
            file.is_covered_by(&["CVE-2026-1111".to_owned()])
        };
        assert!(covered("by-hand", &["CVE-2026-1111"]));
        assert!(!covered("by-hand", &["CVE-2026-1111", "CVE-2026-9999"]));
        assert!(!covered("by-hand", &[]), "it may fix anything");
        assert!(covered("openssl_3.0.20-1_libssl.so.3", &["CVE-2026-9999"]), "an earlier upgrade");
        assert!(!covered("openssl_3.0.20-1_libcrypto.so.3", &[]));
        let none = &File::all(&report(vec![finding(Class::Replaced, 1, &[])]), &[])[0];
        assert!(!none.is_covered_by(&[]), "there is nothing to replace");
    }

    #[test]
    fn names_of_patches_and_their_cves_come_from_the_version() {
        let file = &File::all(&report(vec![finding(Class::Replaced, 1, &[])]), &[])[0];
        assert_eq!(file.patch_name("3.0.20-1"), "openssl_3.0.20-1_libssl.so.3");
        let long = File { path: format!("/usr/bin/[ {}", "x".repeat(300)).into(), ..file.clone() };
        let name = long.patch_name(&"9".repeat(300));
        assert!(is_patch_name(&name) && name.starts_with("openssl_9"), "{name}");
        // what the tracker has for a later version is not claimed
        assert_eq!(file.fixed_by("3.0.20-1", vec!["CVE-2026-4444".into()]), ["CVE-2026-2222", "CVE-2026-4444"]);
        let name = file.patch_name("3.0.20-1");
        let has = |findings: Vec<Finding>| File::all(&report(findings), &[])[0].has_everywhere(&name).is_some();
        let with = finding(Class::Replaced, 1, &[(&name, &[])]);
        assert!(has(vec![with.clone()]) && !has(vec![with, finding(Class::Replaced, 2, &[])]));
    }
}
