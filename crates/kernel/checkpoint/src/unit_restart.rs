//! Units that systemd restarts from their files after a checkpoint has ended their processes.

use crate::Error;
use crate::command::run;
use crate::process_tree::tree;
use procfs::process::Process;
use std::collections::BTreeMap;
use stillpoint_host::systemd::{is_booted, service_of_group};

/// Refuses to end a program that systemd would restart: its image would be restored later over newer files.
///
/// # Errors
/// systemd would restart the program, the process does not exist, or systemd gives no answer.
pub fn check_unit_restart(pid: i32) -> Result<(), Error> {
    let groups = Process::new(pid).and_then(|process| process.cgroups()).map_err(|_| Error::NoProcess(pid))?;
    let mut units: Vec<String> = groups.into_iter().filter_map(|group| unit_of_group(&group.pathname)).collect();
    units.dedup();
    if !is_booted() {
        return Ok(());
    }
    let ending: Vec<i32> = tree(pid)?.iter().map(|process| process.pid).collect();
    for unit in units {
        if let Some(why) = restart_reason(&unit, &unit_properties(&unit)?, &ending) {
            return Err(Error::refused(why));
        }
    }
    Ok(())
}

/// Returns the properties of a unit in systemd.
///
/// # Errors
/// systemd gives no answer.
pub fn unit_properties(unit: &str) -> Result<BTreeMap<String, String>, Error> {
    let text = run("query a unit", "systemctl", &["show", "--", unit], None)?;
    let pair = |line: &str| line.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    Ok(text.lines().filter_map(pair).collect())
}

/// The service of the system's manager that a control group belongs to.
fn unit_of_group(group: &str) -> Option<String> {
    service_of_group(group).map(|(service, _)| service.to_string())
}

/// Returns the reason why systemd restarts a service. A service ends with its main process, or with its last one where
/// systemd knows no main process.
fn restart_reason(unit: &str, properties: &BTreeMap<String, String>, ending: &[i32]) -> Option<String> {
    let restart = properties.get("Restart").map_or("no", String::as_str);
    let main = properties.get("MainPID").and_then(|main| main.parse().ok()).unwrap_or(0);
    let ends = main == 0 || ending.contains(&main);
    let text = format!(
        "systemd restarts {unit} from its files when its processes end (Restart={restart}), and its image would be older than these files: let it run (--leave-running), or put \"[Service]\\nRestart=no\" into \
         /run/systemd/system/{unit}.d/stillpoint.conf and run systemctl daemon-reload; remove this setting after the restore"
    );
    (ends && restart != "no").then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_does_not_stay_ended_is_named() {
        let of = |group| unit_of_group(group).unwrap_or_default();
        assert_eq!(of("/system.slice/redis-server.service"), "redis-server.service");
        assert_eq!(of("/system.slice/system-x.slice/x@1.service/payload"), "x@1.service");
        assert_eq!(of("/user.slice/user-0.slice/session-1.scope"), "");
        assert_eq!(of("/user.slice/user-1000.slice/user@1000.service/app.slice/redis-server.service"), "");
        let why = |restart: &str, main: &str| {
            let pair = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
            let properties = [("Restart", restart), ("MainPID", main)].into_iter().map(pair).collect();
            restart_reason("a.service", &properties, &[41, 42])
        };
        assert_eq!(why("no", "41"), None);
        // a part of the unit that systemd does not wait for
        assert_eq!(why("always", "40"), None);
        for (restart, main) in [("always", "41"), ("on-failure", "42"), ("on-abnormal", "41"), ("on-abort", "0")] {
            let why = why(restart, main).unwrap();
            assert!(why.contains("a.service") && why.contains("--leave-running"));
            assert!(why.contains(&format!("Restart={restart}")));
        }
    }
}
