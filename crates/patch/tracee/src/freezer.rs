//! Control groups that are frozen: no thread of theirs runs, not even for a remote call.

use crate::Pid;
use stillpoint_host::kernel_files;

/// Mount points of the hierarchy of version 2.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Mount point of the freezer of version 1.
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// Returns the control group by which a process is frozen. A group that is not visible from here counts as running.
pub fn frozen_group(pid: Pid) -> Option<String> {
    let text = kernel_files::text(format!("/proc/{pid}/cgroup")).ok()?;
    frozen_among(&text, |path| kernel_files::text(path).ok())
}

/// Returns the frozen group among those in the text of `/proc/PID/cgroup`.
fn frozen_among(groups: &str, read: impl Fn(String) -> Option<String>) -> Option<String> {
    let groups = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        Some((controllers, path.trim_end_matches('/')))
    });
    let is_frozen = |controllers: &str, path: &str| match controllers {
        "" => {
            let events = UNIFIED.iter().find_map(|root| read(format!("{root}{path}/cgroup.events")));
            events.is_some_and(|events| events.lines().any(|line| line == "frozen 1"))
        }
        _ if controllers.split(',').any(|name| name == "freezer") => {
            read(format!("{FREEZER}{path}/freezer.state")).is_some_and(|state| state.trim() != "THAWED")
        }
        _ => false,
    };
    let mut groups = groups.filter(|(_, path)| !path.is_empty());
    groups.find(|(controllers, path)| is_frozen(controllers, path)).map(|(_, path)| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frozen_groups_of_both_versions() {
        let files = [
            ("/sys/fs/cgroup/a/b/cgroup.events", "populated 1\nfrozen 1\n"),
            ("/sys/fs/cgroup/unified/c/cgroup.events", "populated 1\nfrozen 0\n"),
            ("/sys/fs/cgroup/freezer/c/freezer.state", "FREEZING\n"),
            ("/sys/fs/cgroup/freezer/d/freezer.state", "THAWED\n"),
        ];
        let read = |path: String| files.iter().find(|(at, _)| *at == path).map(|(_, text)| (*text).to_owned());
        assert_eq!(frozen_among("0::/a/b\n", read).as_deref(), Some("/a/b"));
        assert_eq!(frozen_among("7:cpu,freezer:/c\n0::/c\n", read).as_deref(), Some("/c"));
        assert_eq!(frozen_among("7:freezer:/d\n3:cpu:/c\n0::/c\n", read), None);
        assert_eq!(frozen_among("0::/\n0::/../x\nnone\n", read), None);
    }

    #[test]
    fn this_process_runs() {
        assert_eq!(frozen_group(Pid(std::process::id() as i32)), None);
    }
}
