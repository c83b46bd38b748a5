//! Processes and their descendants.

use crate::Error;
use procfs::process::{Process, all_processes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use stillpoint_host::systemd::{ControlGroup, ServiceName};

/// Returns the processes below these, without these themselves.
pub fn descendants(roots: &[i32]) -> Vec<i32> {
    let parents: BTreeMap<i32, i32> = all_processes()
        .map(|all| all.flatten().filter_map(|p| p.stat().ok().map(|stat| (stat.pid, stat.ppid))).collect())
        .unwrap_or_default();
    let mut found: Vec<i32> = Vec::new();
    let is_below = |pid: i32| {
        let ancestors = std::iter::successors(parents.get(&pid).copied(), |pid| parents.get(pid).copied());
        // a list that changes while it is read could contain a cycle
        ancestors.take(parents.len()).any(|ancestor| roots.contains(&ancestor))
    };
    found.extend(parents.keys().copied().filter(|pid| !roots.contains(pid) && is_below(*pid)));
    found
}

/// Returns a process and all below it, the root first.
///
/// # Errors
/// The process does not exist.
pub fn tree(root: i32) -> Result<Vec<Process>, Error> {
    let mut processes = vec![Process::new(root).map_err(|_| Error::NoProcess(root))?];
    processes.extend(descendants(&[root]).into_iter().filter_map(|pid| Process::new(pid).ok()));
    Ok(processes)
}

/// A process and all below it, each with a descriptor: it reports the end of that process, even if another process has
/// its number by then.
pub(crate) struct ProcessHandles(Vec<(i32, OwnedFd)>);

impl ProcessHandles {
    pub(crate) fn open(root: i32) -> Self {
        let pids = [root].into_iter().chain(descendants(&[root]));
        let open = |pid| Some((pid, pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?));
        ProcessHandles(pids.filter_map(open).collect())
    }

    /// Returns those that have ended, or are ending: to release much memory takes long. Waits at most `within` for the
    /// first.
    pub(crate) fn ended(&self, within: Timespec) -> Vec<i32> {
        let mut polled: Vec<PollFd<'_>> = self.0.iter().map(|(_, pidfd)| PollFd::new(pidfd, PollFlags::IN)).collect();
        let _ = poll(&mut polled, Some(&within));
        let has_ended = |polled: &PollFd<'_>| polled.revents().contains(PollFlags::IN);
        let ended = polled.iter().zip(&self.0).filter(|(polled, (pid, _))| has_ended(polled) || is_ending(*pid));
        ended.map(|(_, (pid, _))| *pid).collect()
    }

    /// Ends those that still run, and returns true if there were any.
    pub(crate) fn kill_remaining(&self) -> bool {
        let ended = self.ended(Timespec { tv_sec: 0, tv_nsec: 0 });
        let left = self.0.iter().filter(|(pid, _)| !ended.contains(pid));
        left.filter(|(_, pidfd)| pidfd_send_signal(pidfd, Signal::KILL).is_ok()).count() > 0
    }
}

/// Returns true if the first thread of a process is ending (`PF_EXITING`, field 9 of `/proc/PID/stat`).
fn is_ending(pid: i32) -> bool {
    const PF_EXITING: u32 = 0x4;
    Process::new(pid).and_then(|process| process.stat()).is_ok_and(|stat| stat.flags & PF_EXITING != 0)
}

/// Returns the name of a process, `?` if it is unknown.
pub fn process_name(pid: i32) -> String {
    Process::new(pid).and_then(|process| process.stat()).map(|stat| stat.comm).unwrap_or_else(|_| "?".into())
}

/// Returns the number of a process with its name.
pub fn describe_process(pid: i32) -> String {
    format!("process {pid} ({})", process_name(pid))
}

/// Returns the complete name of a service, checked.
///
/// # Errors
/// The name is not that of a service.
pub fn complete_unit_name(unit: &str) -> Result<ServiceName, Error> {
    ServiceName::parse(unit).map_err(Error::refused)
}

/// Returns the process at the root of a service of systemd: in its control group, with a parent that is not.
///
/// # Errors
/// [`Error::Refused`] for a service that is not active, and for one with several such processes or none.
pub fn unit_root_process(unit: &str) -> Result<i32, Error> {
    let unit = complete_unit_name(unit)?;
    let group = ControlGroup::of_active(&unit).and_then(|group| group.processes());
    let members = group.map_err(Error::refused)?;
    let parent = |pid: i32| Process::new(pid).and_then(|process| process.stat()).map(|stat| stat.ppid);
    let is_root = |pid: &i32| parent(*pid).is_ok_and(|parent| !members.contains(&parent));
    let roots: Vec<i32> = members.iter().copied().filter(is_root).collect();
    match roots[..] {
        [root] => Ok(root),
        [] => Err(Error::refused(format!("no process of {unit} runs"))),
        _ => Err(Error::refused(format!("{unit} has {} root processes: {roots:?}", roots.len()))),
    }
}
