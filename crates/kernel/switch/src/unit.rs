//! Units of systemd: the parts of their sandboxes that must be open before a switch, and the start of a unit from an
//! image.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::process_tree::{complete_unit_name, tree, unit_root_process};
use stillpoint_kernel_checkpoint::{Error, has_unmovable_memory, unit_properties};

/// The unit that leads a restore.
pub(crate) const LEADER_UNIT: &str = "stillpoint-switch.service";
/// Units that the leader of a restore itself starts after.
pub(crate) const LEADER_AFTER: [&str; 2] = ["local-fs.target", "systemd-remount-fs.service"];

/// Settings that put processes into namespaces of their own, or connect them to the journal; with the value that does
/// not.
const OPEN_SETTINGS: &str = "PrivateDevices=no PrivateIPC=no PrivateMounts=no PrivateNetwork=no PrivateTmp=no \
    PrivateUsers=no ProcSubset=all ProtectControlGroups=no ProtectHome=no ProtectHostname=no ProtectKernelLogs=no \
    ProtectKernelModules=no ProtectKernelTunables=no ProtectProc=default ProtectSystem=no BindPaths= \
    BindReadOnlyPaths= ExecPaths= InaccessiblePaths= NoExecPaths= ReadOnlyPaths= ReadWritePaths= RootDirectory= \
    RootImage= TemporaryFileSystem=";

/// Returns the socket units that start a unit with these properties: systemd holds their sockets, also on the next
/// kernel.
pub(crate) fn socket_units(properties: &BTreeMap<String, String>) -> impl Iterator<Item = &str> {
    let triggers = properties.get("TriggeredBy").map_or("", String::as_str);
    triggers.split_whitespace().filter(|name| name.ends_with(".socket"))
}

/// Returns the drop-in that a unit needs to be taken along; `None` if it needs none. A unit that runs is examined for
/// what it uses.
///
/// # Errors
/// The name is not a service, or systemd gives no answer.
pub fn dropin(unit: &str) -> Result<Option<String>, Error> {
    let unit = complete_unit_name(unit)?;
    dropin_of(unit.as_str(), &unit_properties(unit.as_str())?)
}

/// Returns the drop-in that a unit needs to be taken along, by its full name and its properties; `None` if it needs
/// none.
pub(crate) fn dropin_of(unit: &str, properties: &BTreeMap<String, String>) -> Result<Option<String>, Error> {
    let is_roots = properties.get("User").is_none_or(|user| user.is_empty() || user == "root");
    let ipc_command = if is_roots && unit_root_process(unit).is_ok_and(has_unmovable_memory) {
        ipc_namespace_command(&run("query a unit", "systemctl", &["cat", "--", unit], None)?)
    } else {
        None
    };
    Ok(dropin_for(properties, ipc_command))
}

/// Returns the command that starts a unit in an IPC namespace of its own, from its files. systemd's own setting would
/// also make a mount namespace. `None` if it does not have exactly one command, or the command sets another name.
fn ipc_namespace_command(files: &str) -> Option<String> {
    let files = files.replace("\\\n", " ");
    let mut commands: Vec<&str> = Vec::new();
    for value in files.lines().filter_map(|line| line.trim().strip_prefix("ExecStart=")) {
        if value.is_empty() { commands.clear() } else { commands.push(value) }
    }
    let [command] = commands[..] else { return None };
    let (marks, command) = command.split_at(command.find('/')?);
    let known = marks.chars().all(|mark| "-:+!".contains(mark));
    known.then(|| format!("ExecStart=\nExecStart={marks}/usr/bin/unshare --ipc {command}\n"))
}

fn dropin_for(properties: &BTreeMap<String, String>, ipc_command: Option<String>) -> Option<String> {
    let mut text = ipc_command.unwrap_or_default();
    for (key, open) in OPEN_SETTINGS.split(' ').filter_map(|setting| setting.split_once('=')) {
        if properties.get(key).is_some_and(|value| value != open && !(open.is_empty() && value == "no")) {
            let _ = writeln!(text, "{key}={open}");
        }
    }
    for key in ["StandardOutput", "StandardError"] {
        let value = properties.get(key).map_or("null", String::as_str);
        // `inherit` is the value of the other setting, and that is changed too
        if !["null", "inherit"].contains(&value) && !value.starts_with("file:") && !value.starts_with("append:") {
            let _ = writeln!(text, "{key}=null");
        }
    }
    (!text.is_empty()).then(|| format!("[Service]\n{text}"))
}

/// Returns the path of such a drop-in, for a unit by its full name.
pub fn dropin_path(unit: &str) -> String {
    format!("/etc/systemd/system/{unit}.d/stillpoint.conf")
}

/// Returns the local ports of all TCP sockets of a process and all below it.
pub(crate) fn tcp_ports(pid: i32) -> Result<Vec<u16>, Error> {
    let mut inodes = BTreeSet::new();
    for process in tree(pid)? {
        for descriptor in process.fd().into_iter().flatten().flatten() {
            if let procfs::process::FDTarget::Socket(inode) = descriptor.target {
                inodes.insert(inode);
            }
        }
    }
    let all = procfs::net::tcp().into_iter().chain(procfs::net::tcp6()).flatten();
    let ours = all.filter(|entry| inodes.contains(&entry.inode));
    Ok(ours.map(|entry| entry.local_address.port()).collect::<BTreeSet<u16>>().into_iter().collect())
}

/// Returns the number of connections to these ports that no process has accepted yet, or that are being made.
pub(crate) fn pending_connections(ports: &[u16]) -> u32 {
    use procfs::net::TcpState;
    let all = procfs::net::tcp().into_iter().chain(procfs::net::tcp6()).flatten();
    let ours = all.filter(|entry| ports.contains(&entry.local_address.port()));
    ours.map(|entry| match entry.state {
        TcpState::Listen => entry.rx_queue,
        TcpState::SynRecv => 1,
        _ => 0,
    })
    .sum()
}

/// Returns a unit's drop-in for a kernel that starts: the unit starts from its image, by a program without the unit's
/// sandbox.
pub(crate) fn image_dropin(program: &Path, state: &Path, unit: &str) -> String {
    format!(
        "[Service]\nType=notify\nNotifyAccess=all\nPIDFile=\nExecCondition=\nExecStartPre=\nExecStart=\n\
         ExecStart=+{} kernel switch-unit --state {} {unit}\nExecStartPost=\nTimeoutStartSec=infinity\nRestart=no\n\
         WatchdogSec=0\n",
        program.display(),
        state.display(),
    )
}

/// Returns the unit that leads a restore; it is ready when all have been released. A leader that is killed has a
/// successor.
pub(crate) fn leader_unit(program: &Path, state: &Path, units: &[String]) -> String {
    let lead = format!("{} kernel switch-resume --state {}", program.display(), state.display());
    format!(
        "[Unit]\nDescription=Restore of units after a switch of kernels\nDefaultDependencies=no\n\
         After={}\nConflicts=shutdown.target\nWants={}\n[Service]\nType=notify\n\
         ExecStart={lead}\nExecStopPost={lead} --after\nTimeoutSec=infinity\nKillMode=process\n",
        LEADER_AFTER.join(" "),
        units.join(" "),
    )
}

/// Returns the unit that owns the guard on a kernel that starts.
pub(crate) fn guard_unit(program: &Path, state: &Path, socket: &str) -> String {
    format!(
        "[Unit]\nDescription=Guard of connections during a switch of kernels\nDefaultDependencies=no\n\
         StartLimitIntervalSec=0\n[Service]\nType=notify\nTimeoutStartSec=30\n\
         ExecStart={} kernel guard-keeper --state {} --socket {socket}\nRestart=on-failure\nRestartSec=100ms\n\
         OOMScoreAdjust=-1000\n",
        program.display(),
        state.display(),
    )
}

/// Notifies systemd about the unit that this process belongs to.
pub(crate) fn notify(text: &str) -> Result<(), Error> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let failed = |why: String| Error::Step { what: "notify systemd", why };
    let path = std::env::var("NOTIFY_SOCKET").map_err(|_| failed("systemd did not start this process".into()))?;
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        socket.send_to_addr(text.as_bytes(), &address)
    });
    sent.map(|_| ()).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropin_opens_what_is_closed_and_nothing_else() {
        let pairs = [
            ("PrivateTmp", "yes"),
            ("ProtectSystem", "strict"),
            ("ProtectHome", "no"),
            ("ReadWritePaths", "-/var/lib/redis"),
            ("BindPaths", ""),
            ("StandardOutput", "journal"),
            ("StandardError", "inherit"),
        ];
        let properties = pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let expected = "[Service]\nPrivateTmp=no\nProtectSystem=no\nReadWritePaths=\nStandardOutput=null\n";
        assert_eq!(dropin_for(&properties, None).as_deref(), Some(expected));
        let open = [("PrivateTmp", "no"), ("StandardOutput", "null"), ("StandardError", "append:/var/log/x")];
        let open = open.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        assert_eq!(dropin_for(&open, None), None);
    }

    #[test]
    fn one_command_is_started_apart() {
        let files = "[Service]\nExecStart=/bin/a\nExecStart=\n  ExecStart=-/usr/bin/b --c \\\n  %i start\n";
        let expected = "ExecStart=\nExecStart=-/usr/bin/unshare --ipc /usr/bin/b --c    %i start\n";
        assert_eq!(ipc_namespace_command(files).as_deref(), Some(expected));
        assert_eq!(
            dropin_for(&BTreeMap::new(), ipc_namespace_command(files)).as_deref(),
            Some(&*format!("[Service]\n{expected}"))
        );
        for other in ["", "ExecStart=/bin/a\nExecStart=/bin/b", "ExecStart=@/bin/a b"] {
            assert_eq!(ipc_namespace_command(other), None);
        }
    }
}
