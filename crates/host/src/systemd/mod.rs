//! Services of the system's manager: their names, and the control groups of their processes.
//!
//! The obvious way is to search the tree of control groups for a folder with the service's name. A user may make such a folder in the part
//! of the tree that is delegated to that user, so a search can find processes of the user. Here systemd is asked instead; where it does not
//! run, only the one folder that systemd would make is accepted.
//!
//! systemctl(1) asks it: D-Bus by `zbus` 5 takes 67 crates, with an executor of its own, for four properties of a unit.

mod group;
mod name;

pub use group::{ControlGroup, groups_of_systemd, service_of_group, service_of_process};
pub use name::ServiceName;

use crate::Error;
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns true if systemd is the first process of this machine (sd_booted(3)).
pub fn is_booted() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// States in which all processes of a service run.
const ACTIVE: [&str; 3] = ["active", "reloading", "refreshing"];

/// Reply of systemd about one unit.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reply {
    /// Own name of the unit; the requested name may be an alias.
    id: String,
    load_state: String,
    active_state: String,
    control_group: String,
}

/// Asks the system's manager, without any setting of the caller's environment that would redirect the request.
fn ask(service: &ServiceName) -> Result<Reply, Error> {
    let failed = |why: String| Error::Service { service: service.to_string(), why: format!("asking systemd: {why}") };
    let mut command = Command::new("systemctl");
    command.env_clear().env("LC_ALL", "C").envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.args(["--system", "--no-pager", "show", "--property=Id,LoadState,ActiveState,ControlGroup", "--"]);
    let output = command.arg(service.as_str()).stdin(Stdio::null()).output();
    let output = output.map_err(|error| failed(format!("systemctl: {error}")))?;
    if output.status.success() {
        return Ok(Reply::parse(&String::from_utf8_lossy(&output.stdout)));
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(failed(format!("systemctl: {} {:?}", output.status, text.trim().chars().take(200).collect::<String>())))
}

impl Reply {
    fn parse(text: &str) -> Reply {
        let mut reply = Reply::default();
        for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
            let field = match key {
                "Id" => &mut reply.id,
                "LoadState" => &mut reply.load_state,
                "ActiveState" => &mut reply.active_state,
                "ControlGroup" => &mut reply.control_group,
                _ => continue,
            };
            value.clone_into(field);
        }
        reply
    }

    /// Returns the service's control group after checks.
    fn group(&self, service: &ServiceName, must_be_active: bool) -> Result<String, Error> {
        let refused = |why: String| Err(Error::Service { service: service.to_string(), why });
        if must_be_active && !ACTIVE.contains(&self.active_state.as_str()) {
            return refused(match self.load_state.as_str() {
                "not-found" => "systemd knows no such unit".to_owned(),
                _ => format!("it is not active, systemd says {:?}", self.active_state),
            });
        }
        if self.control_group.is_empty() {
            return refused("it has no process".to_owned());
        }
        match service_of_group(&self.control_group) {
            Some((found, group)) if found.as_str() == self.id && group == self.control_group => {
                Ok(self.control_group.clone())
            }
            _ => refused(format!("{:?} is not the control group of a system service", self.control_group)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(text: &str) -> Result<String, String> {
        let service = ServiceName::parse("redis").unwrap();
        Reply::parse(text).group(&service, true).map_err(|error| error.to_string())
    }

    #[test]
    fn the_group_of_an_active_service_is_taken() {
        let reply =
            |id: &str, group: &str| format!("Id={id}\nLoadState=loaded\nActiveState=active\nControlGroup={group}\n");
        // an alias, a slice of its own, a template's instance
        for (id, at) in [
            ("redis-server.service", "/system.slice/redis-server.service"),
            ("redis.service", "/db.slice/db-fast.slice/redis.service"),
            ("p-q@1.service", "/system.slice/system-p\\x2dq.slice/p-q@1.service"),
        ] {
            assert_eq!(group(&reply(id, at)).as_deref(), Ok(at));
        }
        // of a user's manager, of another unit, not the unit itself, and paths that lead elsewhere
        for at in [
            "/user.slice/user-1000.slice/user@1000.service/app.slice/redis.service",
            "/user.slice/redis.service",
            "/system.slice/other.service",
            "/system.slice/redis.service/inner",
            "/system.slice",
            "/system.slice/../redis.service",
            "//redis.service",
            "/system.slice/redis.service/",
            "redis.service",
            "/",
        ] {
            let error = group(&reply("redis.service", at)).expect_err(at);
            assert!(error.contains("is not the control group of a system service"), "{error}");
        }
    }

    #[test]
    fn a_service_that_is_not_active_is_refused_by_its_state() {
        let error = group("Id=redis.service\nLoadState=loaded\nActiveState=failed\nControlGroup=\n").unwrap_err();
        assert_eq!(error, "service redis.service: it is not active, systemd says \"failed\"");
        let error = group("Id=redis.service\nLoadState=not-found\nActiveState=inactive\nControlGroup=\n").unwrap_err();
        assert!(error.ends_with("systemd knows no such unit"), "{error}");
        let error = group("Id=redis.service\nLoadState=loaded\nActiveState=active\nControlGroup=\n").unwrap_err();
        assert!(error.ends_with("it has no process"), "{error}");
        assert!(group("").is_err());
        // a service that starts has a group already, which its helper needs
        let starts = Reply::parse("Id=redis.service\nActiveState=activating\nControlGroup=/system.slice/redis.service");
        let service = ServiceName::parse("redis").unwrap();
        assert!(starts.group(&service, true).is_err());
        assert_eq!(starts.group(&service, false).unwrap(), "/system.slice/redis.service");
    }
}
