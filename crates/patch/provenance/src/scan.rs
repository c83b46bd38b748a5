//! Comparison of every running process with what is installed and what the archive offers.

mod report;

pub use report::{Class, Counts, Finding, Level, LivePatch, ProcessName, Reason, Report, Unseen};

use crate::archive::{Offer, lists_age, offers};
use crate::mapped::{MappedFile, ProcessFiles, all_processes};
use crate::origin::{OnDisk, Origin, Origins, Subject};
use crate::version::{compare, without_rebuild};
use crate::{Changelog, Database, Error, Package, Release, SeenPackages, Tracker};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use stillpoint_host::file::read_regular_text;
use stillpoint_patch_tracee::Pid;

/// Size limit of `/etc/os-release`, in bytes.
const OS_RELEASE_MAX: u64 = 1 << 20;

/// Limit of mapped files that are open at the same time.
const OPEN_FILES_MAX: usize = 256;

/// Settings of a scan.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Packages in which build-ids of replaced files are looked for.
    pub seen: SeenPackages,
    /// File of a security tracker.
    pub tracker: Option<PathBuf>,
}

/// Reads the active patches of a process, as its ledger states them; or the reason why they are not known.
pub type LivePatches<'a> = &'a mut dyn FnMut(Pid) -> Result<Vec<LivePatch>, String>;

/// Looks at every process of this machine.
///
/// # Errors
/// There is no database of dpkg, the archive's lists cannot be read, or the tracker's file has another form. A process that cannot be looked
/// at is a part of the report.
pub fn scan(request: &Request, live: LivePatches<'_>) -> Result<Report, Error> {
    let own = Pid(std::process::id() as i32);
    scan_processes(request, all_processes().into_iter().filter(|pid| *pid != own), live)
}

/// Looks at these processes in the same way as [`scan`].
///
/// # Errors
/// Those of [`scan`].
pub fn scan_processes(
    request: &Request,
    pids: impl IntoIterator<Item = Pid>,
    live: LivePatches<'_>,
) -> Result<Report, Error> {
    let origins = Origins::new(Database::open(Path::new("/"))?, request.seen.clone());
    let mut report = Report { lists_age_s: lists_age().map(|age| age.as_secs()), ..Report::default() };
    let processes = look_at_all(pids, &mut report);
    let files = distinct(&processes);
    let (mut subjects, mut found) = (Vec::new(), Vec::new());
    for files in files.chunks(OPEN_FILES_MAX) {
        let opened: Vec<Subject> = files.iter().map(|(_, users)| subject(users)).collect();
        found.extend(origins.of(&opened)?);
        subjects.extend(opened.into_iter().map(|subject| Subject { file: None, ..subject }));
    }
    let packages: BTreeSet<String> = found
        .iter()
        .filter_map(|origin| origin.installed.as_ref())
        .map(|package| qualified(package, &origins))
        .collect();
    let offers = offers(&packages.into_iter().collect::<Vec<_>>())?;
    let tracker = read_tracker(request, &found)?;
    let mut context = Context { origins: &origins, offers, tracker, changelogs: HashMap::new() };
    let mut live_of: HashMap<Pid, Result<Vec<LivePatch>, String>> = HashMap::new();
    for ((_, users), (subject, origin)) in files.iter().zip(subjects.iter().zip(&found)) {
        let names = || users.iter().map(|(process, _)| ProcessName { pid: process.pid.0, name: process.name.clone() });
        let finding = match context.judge(subject, origin, users[0].1.is_executable) {
            Judgement::Finding(finding) => *finding,
            Judgement::Unseen(reason, detail) => {
                report.add_unseen(reason, detail, Some(subject.path.clone()), names());
                continue;
            }
            Judgement::NoProgram => continue,
        };
        if finding.class == Class::Current {
            report.add(finding, names());
            continue;
        }
        for process in names() {
            let patches = live_of.entry(Pid(process.pid)).or_insert_with_key(|pid| live(*pid));
            report.add(finding.clone().with_live(patches), [process]);
        }
    }
    report.finish();
    Ok(report)
}

/// Looks at the processes; those that cannot be looked at become part of the report.
fn look_at_all(pids: impl IntoIterator<Item = Pid>, report: &mut Report) -> Vec<ProcessFiles> {
    let mut processes = Vec::new();
    for pid in pids {
        let (reason, detail, name) = match ProcessFiles::of(pid) {
            Ok(None) => continue,
            Ok(Some(process)) if process.has_other_root => {
                (Reason::OtherRoot, "it has another root file system".to_owned(), process.name)
            }
            Ok(Some(process)) => {
                report.counts.processes += 1;
                processes.push(process);
                continue;
            }
            Err(Error::Ended(_)) => (Reason::Ended, "it has ended".to_owned(), String::new()),
            Err(Error::Permission { why, .. }) => (Reason::NoRight, why, String::new()),
            Err(error) => (Reason::Unreadable, error.to_string(), String::new()),
        };
        report.add_unseen(reason, detail, None, [ProcessName { pid: pid.0, name }]);
    }
    processes
}

/// Mapped file with the processes that map it.
type Users<'a> = Vec<(&'a ProcessFiles, &'a MappedFile)>;

/// Collects the files of all processes, each once.
fn distinct(processes: &[ProcessFiles]) -> Vec<(PathBuf, Users<'_>)> {
    let mut files: BTreeMap<_, (PathBuf, Users<'_>)> = BTreeMap::new();
    for process in processes {
        for file in &process.files {
            let key = (file.path.clone(), file.key, file.deleted);
            files.entry(key).or_insert_with(|| (file.path.clone(), Vec::new())).1.push((process, file));
        }
    }
    files.into_values().collect()
}

/// Opens a file by one of the processes that map it: others may have ended.
fn subject(users: &Users<'_>) -> Subject {
    let file = users.iter().find_map(|(_, file)| file.open().ok());
    Subject { path: users[0].1.path.clone(), deleted: users[0].1.deleted, file }
}

/// Name by which apt knows a package.
fn qualified(package: &Package, origins: &Origins) -> String {
    match package.architecture.as_str() {
        "all" => package.name.clone(),
        architecture if architecture == origins.database().native_architecture() => package.name.clone(),
        architecture => format!("{}:{architecture}", package.name),
    }
}

fn read_tracker(request: &Request, found: &[Origin]) -> Result<Option<Tracker>, Error> {
    let Some(path) = &request.tracker else { return Ok(None) };
    let text = read_regular_text(Path::new("/etc/os-release"), OS_RELEASE_MAX)?;
    let malformed = || Error::Malformed { what: "/etc/os-release".into(), why: "it has no VERSION_CODENAME".into() };
    let release = Release::parse(&text).ok_or_else(malformed)?;
    let sources =
        found.iter().filter_map(|origin| origin.installed.as_ref()).map(|package| package.source.as_str()).collect();
    Tracker::read(path, &release, &sources).map(Some)
}

/// Everything that decides about a file.
struct Context<'a> {
    origins: &'a Origins,
    offers: BTreeMap<String, Offer>,
    tracker: Option<Tracker>,
    changelogs: HashMap<(String, String), Changelog>,
}

/// Judgement on one file.
enum Judgement {
    Finding(Box<Finding>),
    /// Nothing is stated about it, with the reason.
    Unseen(Reason, String),
    /// Executable memory of a file that is no ELF file.
    NoProgram,
}

impl Context<'_> {
    fn judge(&mut self, subject: &Subject, origin: &Origin, is_executable: bool) -> Judgement {
        let unseen = |reason, detail: &str| Judgement::Unseen(reason, detail.to_owned());
        if !(origin.is_read || subject.deleted && origin.installed.is_some()) {
            return unseen(Reason::NoRight, "the file cannot be opened");
        }
        if origin.is_read && origin.identity.is_none() {
            return if is_executable { unseen(Reason::Unreadable, "it is no ELF file") } else { Judgement::NoProgram };
        }
        let is_gone = matches!(origin.on_disk, OnDisk::Replaced | OnDisk::Deleted);
        let Some(installed) = &origin.installed else {
            // a program in memory has no file that an upgrade could replace
            return match is_gone && !is_memory(&subject.path) {
                true => Judgement::Finding(Box::new(self.replaced(subject, origin, None))),
                false => unseen(Reason::NoPackage, "no installed package has this file"),
            };
        };
        if origin.on_disk == OnDisk::Elsewhere {
            return unseen(Reason::OtherMounts, "another file has this name outside of the process's mounts");
        }
        if is_gone {
            return Judgement::Finding(Box::new(self.replaced(subject, origin, Some(installed))));
        }
        let Some((running, evidence)) = &origin.running else {
            return unseen(Reason::Altered, "the file is not as its package has it");
        };
        let offer = self.offers.get(&qualified(installed, self.origins)).cloned().unwrap_or_default();
        if !offer.is_archived() {
            return unseen(Reason::NotInArchive, "no list of an archive has its package");
        }
        let is_outdated = compare(&offer.candidate, &running.version) == Ordering::Greater;
        let class = if is_outdated { Class::Outdated } else { Class::Current };
        let mut finding = Finding::new(class, subject, origin);
        finding.evidence = Some(evidence.clone());
        if is_outdated {
            self.complete(&mut finding, installed, Some(running), &offer);
        }
        Judgement::Finding(Box::new(finding))
    }

    /// Makes the finding for a file that is not on disk any more.
    fn replaced(&mut self, subject: &Subject, origin: &Origin, installed: Option<&Package>) -> Finding {
        let mut finding = Finding::new(Class::Replaced, subject, origin);
        let running = origin.running.as_ref();
        finding.evidence = running.map(|(_, evidence)| evidence.clone());
        if let Some(installed) = installed {
            let offer = self.offers.get(&qualified(installed, self.origins)).cloned().unwrap_or_default();
            self.complete(&mut finding, installed, running.map(|(package, _)| package), &offer);
        }
        finding
    }

    /// Adds what later versions of the package bring.
    fn complete(&mut self, finding: &mut Finding, installed: &Package, running: Option<&Package>, offer: &Offer) {
        let is_newer = compare(&offer.candidate, &installed.version) == Ordering::Greater;
        finding.offered = is_newer.then(|| offer.candidate.clone());
        let Some(running) = running else { return };
        finding.is_security = offer.has_security_update(&running.version);
        let key = (installed.name.clone(), installed.architecture.clone());
        let root = self.origins.database().root();
        let log = self
            .changelogs
            .entry(key)
            .or_insert_with_key(|(name, architecture)| Changelog::of_installed(root, name, architecture));
        let from_log = log.cves_between(&running.source_version, &installed.source_version);
        let from_tracker =
            self.tracker.as_ref().and_then(|tracker| tracker.fixed_after(&installed.source, &running.source_version));
        // a rebuild has the code of the version before
        let reaches = !is_newer
            || compare(without_rebuild(&offer.candidate), without_rebuild(&installed.version)) == Ordering::Equal;
        finding.cves_known = from_tracker.is_some() || (from_log.is_some() && reaches);
        finding.fixed_in = from_tracker.unwrap_or_default();
        let found: BTreeSet<String> = from_log.into_iter().flatten().chain(finding.fixed_in.keys().cloned()).collect();
        finding.cves = found.into_iter().collect();
    }
}

/// Returns true for names that the kernel gives to memory without a file.
fn is_memory(path: &Path) -> bool {
    ["/memfd:", "/dev/zero", "/SYSV"].iter().any(|start| path.to_string_lossy().starts_with(start))
}
