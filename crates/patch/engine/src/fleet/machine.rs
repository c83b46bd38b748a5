//! Selection of processes by a file that they map, on the whole machine.

use super::container::{Container, Surroundings};
use super::{all_pids, patched_processes};
use crate::{Error, Status, peek};
use rustix::fs::{major, minor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use stillpoint_host::kernel_files;
use stillpoint_patch_format::{Avma, BuildId, Target};
use stillpoint_patch_tracee::{self as tracee, Mapping, Pid, Process, Stat, build_id_of, mappings_of};

/// Mapped file whose processes are selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MappedFile {
    /// The file at a path, and files that were there before it: spellings of the path; device and inode of the present file.
    Path(Vec<PathBuf>, Option<(u64, u64)>),
    /// Files of a name, in every directory.
    Name(String),
    /// Every file that has the build-id of the patch.
    OfPatch,
}

impl MappedFile {
    /// Reads the operand of an option: a path, or a name without a slash.
    ///
    /// # Errors
    /// [`Error::File`] if the path exists and its metadata cannot be read.
    pub fn parse(path: &Path) -> Result<MappedFile, Error> {
        if let Some(name) = path.to_str().filter(|text| !text.contains('/')) {
            return Ok(MappedFile::Name(name.to_owned()));
        }
        let file = |source| Error::File { path: path.display().to_string(), source };
        let absolute = std::path::absolute(path).map_err(file)?;
        match absolute.canonicalize() {
            Ok(full) => {
                let metadata = full.metadata().map_err(file)?;
                Ok(MappedFile::Path(vec![full, absolute], Some((metadata.dev(), metadata.ino()))))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // links may lead to the directory, even if the file is gone
                let directory = absolute.parent().and_then(|parent| parent.canonicalize().ok());
                let full = directory.zip(absolute.file_name()).map(|(directory, name)| directory.join(name));
                Ok(MappedFile::Path(full.into_iter().chain([absolute]).collect(), None))
            }
            Err(error) => Err(file(error)),
        }
    }

    /// Returns true if a mapping is of this file, as far as its path and inode show.
    fn is_of(&self, mapping: &Mapping) -> bool {
        let Some(path) = mapping.path.as_deref() else { return false };
        match self {
            MappedFile::Path(paths, identity) => {
                let is_same_file =
                    |(device, inode)| inode == mapping.inode && (major(device), minor(device)) == mapping.device;
                identity.is_some_and(is_same_file) || paths.iter().any(|known| known.as_os_str() == path)
            }
            MappedFile::Name(name) => is_named(path, name),
            MappedFile::OfPatch => false,
        }
    }
}

/// Returns true if the last part of a path is a name, or the name with a version behind it.
fn is_named(path: &str, name: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// A selected process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundProcess {
    /// Its number.
    pub pid: Pid,
    /// Its command name.
    pub name: String,
    /// Its start time in ticks: with it a number is not taken for an earlier process of that number.
    pub start_time: u64,
    /// Address of the file: after an exec it is another one.
    pub at: Avma,
    /// Path of the file, as the process sees it.
    pub path: String,
    /// True if the file was deleted or replaced since the process has mapped it.
    pub deleted: bool,
    /// Build-id of the file, if it has one.
    pub build_id: Option<BuildId>,
    /// Container of the process, if it runs in one.
    pub container: Option<Container>,
}

impl FoundProcess {
    /// Returns values that identify one run of a program in a process.
    pub fn instance(&self) -> (Pid, u64, Avma) {
        (self.pid, self.start_time, self.at)
    }
}

/// Describes a process by its number alone; `None` if it has ended.
pub fn process(pid: Pid) -> Option<FoundProcess> {
    let start_time = Stat::of(pid)?.start_time;
    let (path, container) = (String::new(), None);
    Some(FoundProcess {
        pid,
        name: name_of(pid),
        start_time,
        at: Avma(0),
        path,
        deleted: false,
        build_id: None,
        container,
    })
}

fn name_of(pid: Pid) -> String {
    kernel_files::text(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// Reason why a process that maps the file does not run the build that the patch is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mismatch {
    /// Its file has another build-id.
    OtherBuild,
    /// Its file is no x86-64 ELF file: its kind.
    OtherKind(String),
    /// It executes a part of the file, without the beginning that names the build.
    PartOnly,
    /// It maps the file and executes nothing of it.
    NotExecuted,
}

/// Selected processes of a machine at one moment.
#[derive(Debug, Default)]
pub struct Census {
    /// Processes that the patch is for, parents before children.
    pub matching: Vec<FoundProcess>,
    /// Processes that map the file otherwise, each with the difference.
    pub mismatching: Vec<(FoundProcess, Mismatch)>,
    /// Processes in containers, if these are left out.
    pub left_out: Vec<FoundProcess>,
    /// Processes that this user may not inspect.
    pub uninspected: Vec<Pid>,
    /// Processes that could not be inspected for another reason.
    pub unknown: Vec<(Pid, Error)>,
}

/// Key of a file: device and inode as the kernel shows them, which file systems with subvolumes use more than once, and the path.
type FileKey = ((u32, u32), u64, String);

/// Build-id of a file; the kind of the file if it is no x86-64 ELF file.
type Build = Result<Option<BuildId>, String>;

/// Search for processes, which may be repeated.
#[derive(Debug)]
pub struct Search {
    file: MappedFile,
    target: Option<Target>,
    with_containers: bool,
    surroundings: Surroundings,
    /// Builds of files: most processes map the same ones.
    builds: Mutex<HashMap<FileKey, Build>>,
}

impl Search {
    /// Prepares a search for processes that map `file`; with the target of a patch, for those that map that build of it.
    pub fn new(file: MappedFile, target: Option<&Target>, with_containers: bool) -> Search {
        let surroundings = Surroundings::here();
        Search { file, target: target.cloned(), with_containers, surroundings, builds: Mutex::default() }
    }

    /// Returns the processes at this moment, without this one. None is opened, stopped or changed.
    pub fn run(&self) -> Census {
        let own = std::process::id() as i32;
        let mut census = Census::default();
        for pid in all_pids().into_iter().filter(|pid| *pid != own).map(Pid) {
            match mappings_of(pid) {
                Ok(mappings) => {
                    if let Some((found, mismatch)) = self.examine(pid, &mappings) {
                        self.put(&mut census, found, mismatch);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => census.uninspected.push(pid),
                Err(source) => {
                    let path = format!("/proc/{pid}/maps");
                    census.unknown.push((pid, Error::File { path, source }));
                }
            }
        }
        // a parent always starts before its children
        census.matching.sort_by_key(|found| (found.start_time, found.pid));
        census
    }

    /// Returns the processes that carry a patch at this moment, of this name if there is one.
    pub fn patched(&self, name: Option<&str>) -> Census {
        let patched = patched_processes();
        let mut census = Census { unknown: patched.unknown, ..Census::default() };
        census.uninspected.extend(patched.uninspected.into_iter().map(|(pid, _)| pid));
        for status in patched.found {
            let pid = Pid(status.pid);
            let wanted = status.patches.iter().find(|patch| name.is_none_or(|name| patch.name == name));
            let (Some(patch), Some(stat)) = (wanted, Stat::of(pid)) else { continue };
            let found = FoundProcess {
                pid,
                name: status.name,
                start_time: stat.start_time,
                at: Avma(0),
                path: patch.module.clone(),
                deleted: false,
                build_id: None,
                container: self.surroundings.container_of(pid),
            };
            self.put(&mut census, found, None);
        }
        census
    }

    /// Returns the processes that the patch of this name is for and that do not carry it, parents before children; without those that
    /// cannot be read.
    pub fn unpatched(&self, name: &str) -> Vec<Pid> {
        let carries = |status: Status| status.patches.iter().any(|patch| patch.name == name);
        let is_without = |pid: &Pid| peek(*pid).is_ok_and(|status| !status.is_some_and(carries));
        self.run().matching.into_iter().map(|found| found.pid).filter(is_without).collect()
    }

    fn put(&self, census: &mut Census, found: FoundProcess, mismatch: Option<Mismatch>) {
        match mismatch {
            _ if found.container.is_some() && !self.with_containers => census.left_out.push(found),
            Some(mismatch) => census.mismatching.push((found, mismatch)),
            None => census.matching.push(found),
        }
    }

    /// Returns a process that maps the file, with the difference from what is searched for.
    fn examine(&self, pid: Pid, mappings: &[Mapping]) -> Option<(FoundProcess, Option<Mismatch>)> {
        let mut files: BTreeMap<(u64, &str), Vec<&Mapping>> = BTreeMap::new();
        // a build is seen in the code; what else is mapped of that file belongs to it
        let wanted = mappings.iter().filter(|mapping| mapping.inode != 0 && self.may_be(pid, mapping));
        let wanted: BTreeSet<(u64, Option<&str>)> = wanted.map(|m| (m.inode, m.path.as_deref())).collect();
        for mapping in mappings.iter().filter(|mapping| wanted.contains(&(mapping.inode, mapping.path.as_deref()))) {
            let path = mapping.path.as_deref().unwrap_or_default();
            files.entry((mapping.inode, path)).or_default().push(mapping);
        }
        let mut judged = files.into_values().map(|mappings| {
            let build = self.build(pid, mappings[0]);
            let mismatch = mismatch(self.target.as_ref(), &mappings, &build);
            (mappings[0], build, mismatch)
        });
        let mut best = judged.next()?;
        for other in judged {
            if rank(&other.2) < rank(&best.2) {
                best = other;
            }
        }
        let (mapping, build, mismatch) = best;
        let found = FoundProcess {
            pid,
            name: name_of(pid),
            start_time: Stat::of(pid)?.start_time,
            at: mapping.start,
            path: mapping.path.clone().unwrap_or_default(),
            deleted: mapping.deleted,
            build_id: build.ok().flatten(),
            container: self.surroundings.container_of(pid),
        };
        Some((found, mismatch))
    }

    /// Returns true if a mapping may be of the file.
    fn may_be(&self, pid: Pid, mapping: &Mapping) -> bool {
        let (MappedFile::OfPatch, Some(target)) = (&self.file, &self.target) else { return self.file.is_of(mapping) };
        if mapping.path.as_deref().is_some_and(|path| path.rsplit('/').next() == Some(&target.file_name)) {
            return true;
        }
        let is_code = mapping.execute && !mapping.shared && !target.build_id.0.is_empty();
        is_code && self.build(pid, mapping) == Ok(Some(target.build_id.clone()))
    }

    /// Returns the build of a mapped file. It is read from the file and not from the memory of a process, which may have changed its own
    /// copy, and is kept for all others.
    fn build(&self, pid: Pid, mapping: &Mapping) -> Build {
        let key = (mapping.device, mapping.inode, mapping.path.clone().unwrap_or_default());
        if let Some(known) = self.builds.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return known.clone();
        }
        let Ok(file) = open_mapped(pid, mapping) else { return build_in_memory(pid, mapping) };
        let build = build_id_of(&file);
        self.builds.lock().unwrap_or_else(PoisonError::into_inner).insert(key, build.clone());
        build
    }
}

/// Opens the regular file behind a mapping of a process that is not opened.
fn open_mapped(pid: Pid, mapping: &Mapping) -> io::Result<File> {
    let link = format!("/proc/{pid}/map_files/{:x}-{:x}", mapping.start.0, mapping.end.0);
    kernel_files::open_expected(link, |_| true).or_else(|_| {
        // without CAP_CHECKPOINT_RESTORE the link cannot be followed
        let path = mapping.path.as_deref().unwrap_or_default().trim_start_matches('/');
        kernel_files::open_expected(format!("/proc/{pid}/root/{path}"), |found| {
            found.ino() == mapping.inode && (major(found.dev()), minor(found.dev())) == mapping.device
        })
    })
}

/// Returns the build as the process itself shows it.
fn build_in_memory(pid: Pid, mapping: &Mapping) -> Build {
    let process = match Process::watch(pid) {
        Ok(process) => process,
        Err(tracee::Error::NotX86_64 { what, .. }) => return Err(what),
        Err(_) => return Ok(None),
    };
    let modules = process.modules().unwrap_or_default();
    let module = modules.into_iter().find(|module| module.file == (mapping.device, mapping.inode));
    Ok(module.and_then(|module| module.build_id))
}

/// Returns the difference between the mappings of one file and those of the patch's target.
fn mismatch(target: Option<&Target>, mappings: &[&Mapping], build: &Build) -> Option<Mismatch> {
    if let Err(kind) = build {
        return Some(Mismatch::OtherKind(kind.clone()));
    }
    if !mappings.iter().any(|mapping| mapping.execute) {
        return Some(Mismatch::NotExecuted);
    }
    let wanted = target.map(|target| &target.build_id).filter(|id| !id.0.is_empty());
    if wanted.is_some_and(|wanted| !matches!(build, Ok(Some(id)) if id == wanted)) {
        return Some(Mismatch::OtherBuild);
    }
    let has_beginning = mappings.iter().any(|mapping| mapping.offset == 0 && mapping.read);
    (!has_beginning).then_some(Mismatch::PartOnly)
}

/// Rank of a file among several of one process; the lowest one represents the process.
fn rank(mismatch: &Option<Mismatch>) -> u8 {
    match mismatch {
        None => 0,
        Some(Mismatch::PartOnly) => 1,
        Some(Mismatch::OtherBuild) => 2,
        Some(Mismatch::OtherKind(_)) => 3,
        Some(Mismatch::NotExecuted) => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_patch_format::TargetKind;

    fn mapping(path: &str, offset: u64, execute: bool) -> Mapping {
        Mapping {
            start: Avma(0x1000 + offset),
            end: Avma(0x2000 + offset),
            read: true,
            write: false,
            execute,
            shared: false,
            offset,
            device: (8, 1),
            inode: 7,
            path: Some(path.to_owned()),
            deleted: false,
        }
    }

    fn target(id: &[u8]) -> Target {
        Target {
            build_id: BuildId(id.to_vec()),
            text_sha256: [0; 32],
            file_name: "libx.so.1".to_owned(),
            kind: TargetKind::SharedLibrary,
        }
    }

    #[test]
    fn files_are_found_by_path_inode_and_name() {
        let by_path = MappedFile::Path(vec!["/lib/libx.so.1".into()], Some((rustix::fs::makedev(8, 1), 9)));
        assert!(by_path.is_of(&mapping("/lib/libx.so.1", 0, false)), "replaced on disk");
        assert!(by_path.is_of(&Mapping { inode: 9, ..mapping("/other/name", 0, false) }));
        assert!(!by_path.is_of(&mapping("/other/name", 0, false)));
        let by_name = MappedFile::parse(Path::new("libx.so")).unwrap();
        assert_eq!(by_name, MappedFile::Name("libx.so".to_owned()));
        for (path, is_it) in
            [("/a/libx.so", true), ("/a/libx.so.1.2", true), ("/a/libx.sock", false), ("/libx.so/y", false)]
        {
            assert_eq!(by_name.is_of(&mapping(path, 0, true)), is_it, "{path}");
        }
    }

    #[test]
    fn a_file_that_is_gone_keeps_its_path() {
        let gone = MappedFile::parse(Path::new("/proc/self/../no-such-file")).unwrap();
        let MappedFile::Path(paths, None) = gone else { panic!("{gone:?}") };
        assert!(paths.iter().any(|path| path == Path::new("/proc/no-such-file") || path.starts_with("/proc/")));
    }

    #[test]
    fn a_process_that_runs_something_else_is_told_from_one_that_the_patch_is_for() {
        let (head, code) = (mapping("/lib/libx.so.1", 0, false), mapping("/lib/libx.so.1", 0x1000, true));
        let (wanted, id) = (target(&[1]), |id: u8| Ok(Some(BuildId(vec![id]))));
        let judge = |mappings: &[&Mapping], build: &Build| mismatch(Some(&wanted), mappings, build);
        assert_eq!(judge(&[&head, &code], &id(1)), None);
        assert_eq!(judge(&[&head, &code], &id(2)), Some(Mismatch::OtherBuild));
        assert_eq!(judge(&[&head, &code], &Ok(None)), Some(Mismatch::OtherBuild));
        assert_eq!(judge(&[&code], &id(1)), Some(Mismatch::PartOnly));
        assert_eq!(judge(&[&head], &id(1)), Some(Mismatch::NotExecuted));
        let kind = "a 32-bit x86 program".to_owned();
        assert_eq!(judge(&[&head, &code], &Err(kind.clone())), Some(Mismatch::OtherKind(kind)));
        // a target without a build-id is compared by its text, later
        assert_eq!(mismatch(Some(&target(&[])), &[&head, &code], &Ok(None)), None);
        assert_eq!(mismatch(None, &[&head, &code], &id(2)), None);
    }

    #[test]
    fn a_process_of_this_machine_is_found_by_each_selection() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid(child.id() as i32);
        let libc = |m: &&Mapping| m.execute && m.path.as_deref().is_some_and(|path| path.contains("/libc"));
        let code = loop {
            // until it has called exec
            let mappings = mappings_of(pid).unwrap();
            if kernel_files::text(format!("/proc/{pid}/comm")).unwrap() == "sleep\n"
                && let Some(code) = mappings.iter().find(libc)
            {
                break code.clone();
            }
        };
        let path = code.path.clone().unwrap();
        let build_id = build_id_of(&File::open(&path).unwrap()).unwrap().unwrap();
        let of_patch = Target { file_name: "another name".to_owned(), ..target(&build_id.0) };
        let found = |file: MappedFile, target: Option<&Target>| {
            let census = Search::new(file, target, true).run();
            census.matching.into_iter().find(|found| found.pid == pid)
        };
        for (file, target) in [
            (MappedFile::parse(Path::new(&path)).unwrap(), None),
            (MappedFile::Name(path.rsplit('/').next().unwrap().to_owned()), Some(&of_patch)),
            (MappedFile::OfPatch, Some(&of_patch)),
        ] {
            let found = found(file.clone(), target).unwrap_or_else(|| panic!("{file:?}"));
            assert_eq!((found.name.as_str(), found.build_id.as_ref()), ("sleep", Some(&build_id)), "{file:?}");
        }
        let other = Target { file_name: path.rsplit('/').next().unwrap().to_owned(), ..target(&[1]) };
        let census = Search::new(MappedFile::OfPatch, Some(&other), true).run();
        assert!(census.mismatching.iter().any(|(found, why)| found.pid == pid && *why == Mismatch::OtherBuild));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
