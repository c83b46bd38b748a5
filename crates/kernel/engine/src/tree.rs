//! Processes and their descendants.

use crate::Error;
use procfs::process::{Process, all_processes};
use std::collections::BTreeMap;

/// The processes below these, without them.
pub(crate) fn descendants(roots: &[i32]) -> Vec<i32> {
    let parents: BTreeMap<i32, i32> = all_processes()
        .map(|all| all.flatten().filter_map(|p| p.stat().ok().map(|stat| (stat.pid, stat.ppid))).collect())
        .unwrap_or_default();
    let mut found: Vec<i32> = Vec::new();
    let is_below = |pid: i32| {
        let ancestors = std::iter::successors(parents.get(&pid).copied(), |pid| parents.get(pid).copied());
        // a list that changes while it is read could lead round in a circle
        ancestors.take(parents.len()).any(|ancestor| roots.contains(&ancestor))
    };
    found.extend(parents.keys().copied().filter(|pid| !roots.contains(pid) && is_below(*pid)));
    found
}

/// A process and all below it, the root first.
pub(crate) fn tree(root: i32) -> Result<Vec<Process>, Error> {
    let mut processes = vec![Process::new(root).map_err(|_| Error::NoProcess(root))?];
    processes.extend(descendants(&[root]).into_iter().filter_map(|pid| Process::new(pid).ok()));
    Ok(processes)
}

/// A process's name.
pub(crate) fn name(pid: i32) -> String {
    Process::new(pid).and_then(|process| process.stat()).map(|stat| stat.comm).unwrap_or_else(|_| "?".into())
}

/// The name of a systemd unit with its suffix.
pub(crate) fn full(unit: &str) -> String {
    if unit.contains('.') { unit.to_owned() } else { format!("{unit}.service") }
}

/// The process at the root of a systemd unit: in its control group, with a parent that is not.
pub fn of_unit(unit: &str) -> Result<i32, Error> {
    let unit = full(unit);
    let mut members = BTreeMap::new();
    for process in all_processes().into_iter().flatten().flatten() {
        let (Ok(groups), Ok(stat)) = (process.cgroups(), process.stat()) else { continue };
        let is_in = |path: &str| path.split('/').any(|part| part == unit);
        if groups.into_iter().any(|group| is_in(&group.pathname)) {
            members.insert(stat.pid, stat.ppid);
        }
    }
    let roots: Vec<i32> =
        members.iter().filter(|(_, parent)| !members.contains_key(parent)).map(|(pid, _)| *pid).collect();
    match roots[..] {
        [root] => Ok(root),
        [] => Err(Error::Refused(vec![format!("no process of {unit} runs")])),
        _ => Err(Error::Refused(vec![format!("{unit} has {} processes side by side: {roots:?}", roots.len())])),
    }
}
