//! Selection of processes: all of an executable, all of a service, all that map a file, all that carry patches.

mod container;
mod machine;

use crate::Error;
use crate::ledger::store;
use crate::status::{Status, peek};
pub use container::Container;
pub use machine::{Census, FoundProcess, MappedFile, Mismatch, Search, process};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_host::kernel_files;
use stillpoint_host::systemd::{ControlGroup, ServiceName};
use stillpoint_patch_tracee::{Pid, Stat, mappings_of};

fn all_pids() -> Vec<i32> {
    kernel_files::names("/proc").iter().filter_map(|name| name.to_str()?.parse().ok()).collect()
}

/// Returns the parent of a process that still runs.
pub fn parent(pid: Pid) -> Option<Pid> {
    Some(Stat::of(pid)?.parent)
}

fn parents_first(pids: impl IntoIterator<Item = i32>) -> Vec<Pid> {
    let mut list: Vec<_> =
        pids.into_iter().filter_map(|pid| Some((Stat::of(Pid(pid))?.start_time, Pid(pid)))).collect();
    list.sort_unstable();
    list.into_iter().map(|(_, pid)| pid).collect()
}

/// Returns all processes of the executable at `path`, parents before children. A process whose file was deleted or replaced under that name
/// is included, because it needs the patch as much as the others; its build-id shows if the patch fits.
///
/// # Errors
/// [`Error::File`] if `path` exists and its metadata cannot be read.
pub fn of_executable(path: &Path) -> Result<Vec<Pid>, Error> {
    let file = |source| Error::File { path: path.display().to_string(), source };
    let (name, identity) = match path.canonicalize() {
        Ok(full) => {
            let metadata = full.metadata().map_err(file)?;
            (full, Some((metadata.dev(), metadata.ino())))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => (path.to_owned(), None),
        Err(error) => return Err(file(error)),
    };
    let gone = PathBuf::from(format!("{} (deleted)", name.display()));
    let runs_it = |pid: &i32| {
        let link = format!("/proc/{pid}/exe");
        let same_file = || {
            let metadata = kernel_files::metadata(&link).ok()?;
            Some(identity? == (metadata.dev(), metadata.ino()))
        };
        kernel_files::link(&link).is_ok_and(|to| to == name || to == gone) || same_file() == Some(true)
    };
    Ok(parents_first(all_pids().into_iter().filter(runs_it)))
}

/// Returns the control group of an active service, by its name as an operator writes it.
///
/// # Errors
/// [`Error::Host`] if the name is not a service name, or if the service has no control group that is certainly its own.
pub fn service(name: &str) -> Result<ControlGroup, Error> {
    Ok(ControlGroup::of_active(&ServiceName::parse(name)?)?)
}

/// Returns all processes of a service, parents before children.
///
/// # Errors
/// [`Error::Host`] if its control group cannot be read.
pub fn of_service(group: &ControlGroup) -> Result<Vec<Pid>, Error> {
    Ok(parents_first(group.processes()?))
}

/// Patched processes of a machine.
#[derive(Debug, Default)]
pub struct PatchedProcesses {
    /// Processes that carry patches.
    pub found: Vec<Status>,
    /// Processes that this user may not inspect, each with the permission that is missing.
    pub uninspected: Vec<(Pid, String)>,
    /// Processes whose state is unknown, each with the reason, for example a forged ledger.
    pub unknown: Vec<(Pid, Error)>,
}

/// Examines every process of this machine. A process that cannot be read does not hide the others.
pub fn patched_processes() -> PatchedProcesses {
    let own = std::process::id() as i32;
    let mut processes = PatchedProcesses::default();
    for pid in parents_first(all_pids().into_iter().filter(|pid| *pid != own)) {
        // cheaper than to open the process
        if mappings_of(pid).is_ok_and(|mappings| !store::has_place_for_ledger(&mappings)) {
            continue;
        }
        match peek(pid) {
            Ok(Some(status)) => processes.found.push(status),
            Err(Error::Tracee(stillpoint_patch_tracee::Error::Permission { pid, hint })) => {
                processes.uninspected.push((pid, hint));
            }
            Err(error) if !proves_unpatched(&error) && Stat::of(pid).is_some() => processes.unknown.push((pid, error)),
            Ok(None) | Err(_) => {}
        }
    }
    processes
}

/// Returns true for an error that proves that there is no patch: no program runs there, another one than before, or one of a kind that is
/// never patched.
fn proves_unpatched(error: &Error) -> bool {
    use stillpoint_patch_tracee::Error::{Exec, Gone, KernelThread, NotAProcess, NotX86_64, Own, Static, Zombie};
    let Error::Tracee(error) = error else { return false };
    matches!(
        error,
        Exec(_) | Gone(_) | KernelThread(_) | NotAProcess { .. } | NotX86_64 { .. } | Own(_) | Static(_) | Zombie(_)
    )
}
