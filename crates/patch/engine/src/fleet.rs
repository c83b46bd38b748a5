//! Which processes are meant: all of an executable, all of a service, all that carry patches.

use crate::Error;
use crate::status::{Status, peek};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_patch_tracee::Pid;

fn all_pids() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str().and_then(|n| n.parse().ok())).collect()
}

/// A field of `/proc/PID/stat`, counted from the one behind the name.
fn stat_field<T: std::str::FromStr>(pid: i32, index: usize) -> Option<T> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(index)?.parse().ok()
}

/// When a process began: a parent always did before its children.
fn started(pid: i32) -> Option<u64> {
    stat_field(pid, 19)
}

/// The parent of a process that still runs.
pub fn parent(pid: Pid) -> Option<Pid> {
    stat_field(pid.0, 1).map(Pid)
}

fn parents_first(pids: impl IntoIterator<Item = i32>) -> Vec<Pid> {
    let mut list: Vec<(u64, i32)> = pids.into_iter().filter_map(|pid| Some((started(pid)?, pid))).collect();
    list.sort_unstable();
    list.into_iter().map(|(_, pid)| Pid(pid)).collect()
}

/// All processes of the executable at `path`, parents before children. A process whose file was deleted or replaced
/// under that name counts, for it needs the patch as much as the others; whether the patch fits, its build-id tells.
pub fn of_executable(path: &Path) -> Result<Vec<Pid>, Error> {
    let file = |source| Error::File { path: path.display().to_string(), source };
    let (name, identity) = match fs::canonicalize(path) {
        Ok(full) => {
            let metadata = fs::metadata(&full).map_err(file)?;
            (full, Some((metadata.dev(), metadata.ino())))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => (path.to_owned(), None),
        Err(error) => return Err(file(error)),
    };
    let gone = PathBuf::from(format!("{} (deleted)", name.display()));
    let runs_it = |pid: &i32| {
        let link = format!("/proc/{pid}/exe");
        let same_file = || {
            let metadata = fs::metadata(&link).ok()?;
            Some(identity? == (metadata.dev(), metadata.ino()))
        };
        fs::read_link(&link).is_ok_and(|to| to == name || to == gone) || same_file() == Some(true)
    };
    Ok(parents_first(all_pids().into_iter().filter(runs_it)))
}

/// All processes of a systemd unit, parents before children.
pub fn of_unit(unit: &str) -> Result<Vec<Pid>, Error> {
    let full = if unit.ends_with(".service") || unit.ends_with(".scope") || unit.ends_with(".slice") {
        unit.to_owned()
    } else {
        format!("{unit}.service")
    };
    let group = hierarchies().iter().find_map(|root| find_group(root, &full, 0));
    let group = group.ok_or(Error::NoUnit(full))?;
    let mut pids = Vec::new();
    collect(&group, &mut pids, 0);
    Ok(parents_first(pids))
}

/// Where control groups are mounted in which systemd keeps its units: version 2, or its own hierarchy beside version 1.
fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let root = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (at, kind, options) = (words.next()?, words.next()?, words.next()?);
        let units = kind == "cgroup2" || kind == "cgroup" && options.split(',').any(|o| o == "name=systemd");
        units.then(|| PathBuf::from(at))
    };
    mounts.lines().filter_map(root).collect()
}

fn folders(at: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(at).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path())
}

const DEPTH_MAX: usize = 16;

fn find_group(at: &Path, name: &str, depth: usize) -> Option<PathBuf> {
    if at.file_name().is_some_and(|n| n == name) {
        return Some(at.to_owned());
    }
    if depth > DEPTH_MAX {
        return None;
    }
    folders(at).find_map(|below| find_group(&below, name, depth + 1))
}

fn collect(group: &Path, pids: &mut Vec<i32>, depth: usize) {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
    if depth < DEPTH_MAX {
        folders(group).for_each(|below| collect(&below, pids, depth + 1));
    }
}

/// What was found of the processes of a machine.
#[derive(Debug, Default)]
pub struct Carriers {
    /// Those that carry patches.
    pub found: Vec<Status>,
    /// How many may not be looked at by this user.
    pub unseen: usize,
    /// Those of which it cannot be told, each with the reason: a forged ledger, say.
    pub unclear: Vec<(Pid, Error)>,
}

/// Looks at every process of this machine. One that cannot be read keeps none of the others from being found.
pub fn carriers() -> Carriers {
    let own = std::process::id() as i32;
    let mut carriers = Carriers::default();
    for pid in parents_first(all_pids().into_iter().filter(|pid| *pid != own)) {
        match peek(pid) {
            Ok(Some(status)) => carriers.found.push(status),
            Err(Error::Tracee(stillpoint_patch_tracee::Error::Permission { .. })) => carriers.unseen += 1,
            Err(error) if !carries_nothing(&error) && started(pid.0).is_some() => carriers.unclear.push((pid, error)),
            Ok(None) | Err(_) => {}
        }
    }
    carriers
}

/// Returns true for an error that says of itself that there is no patch: no program runs there, another one than before, or one of
/// a kind that is never patched.
fn carries_nothing(error: &Error) -> bool {
    use stillpoint_patch_tracee::Error::{Exec, Gone, KernelThread, NotAProcess, NotX86_64, Own, Static, Zombie};
    let Error::Tracee(error) = error else { return false };
    matches!(
        error,
        Exec(_) | Gone(_) | KernelThread(_) | NotAProcess { .. } | NotX86_64 { .. } | Own(_) | Static(_) | Zombie(_)
    )
}
