//! Units of a real systemd, in their sandboxes, that start with live patches and are patched while they run.

use serde_json::Value;
use std::process::Stdio;
use stillpoint_patch_tests::cli::binary;
use stillpoint_patch_tests::server::ChildGuard;
use stillpoint_patch_tests::shipped::older;
use stillpoint_patch_tests::victim::Program;
use stillpoint_patch_tests::{skip, wait};
use stillpoint_testing::container::Container;

/// Properties of Debian's own units that prevent a service from tracing, and from mapping executable memory.
const SANDBOX: &str = "User=redis
NoNewPrivileges=yes
PrivateDevices=yes
PrivateTmp=yes
PrivateUsers=yes
RestrictSUIDSGID=yes
ProtectSystem=strict
MemoryDenyWriteExecute=yes
RestrictNamespaces=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
";

macro_rules! container {
    () => {
        match Container::start() {
            Ok(container) => {
                container.install(binary());
                container
            }
            Err(why) => skip!(why),
        }
    };
}

/// Installs a unit that runs `command` to its end.
fn unit(container: &Container, name: &str, command: &str, more: &str) {
    let text =
        format!("[Service]\nType=oneshot\nRemainAfterExit=yes\nSuccessExitStatus=1 2\nExecStart={command}\n{more}");
    container.write(&format!("/etc/systemd/system/{name}.service"), text, 0o644);
    container.succeed(&["systemctl", "daemon-reload"]);
}

/// Starts a unit again, and returns the exit code of its program: the version that answered.
#[track_caller]
fn version(container: &Container, name: &str) -> String {
    container.succeed(&["systemctl", "restart", name]);
    container.property(&format!("{name}.service"), "ExecMainStatus")
}

/// Starts the helper by a socket of systemd; it asks the kernel for the unit that has connected.
#[test]
fn a_unit_in_a_sandbox_starts_with_what_is_enabled_for_it() {
    let program = Program::build("heritage");
    let patch = program.patch(2);
    let container = container!();
    container.copy(program.elf(), "/usr/local/bin/heritage");
    container.copy(&patch, "/root/fix.patch");
    let command = "/usr/local/bin/heritage old";
    for name in ["confined", "other"] {
        unit(&container, name, command, SANDBOX);
    }
    assert_eq!(version(&container, "confined"), "1");
    let enable = ["stillpoint", "patch", "enable", "/root/fix.patch", "--unit", "confined"];
    container.succeed(&enable);
    // The sandbox allows no helper in it: the program runs unpatched.
    assert_eq!(version(&container, "confined"), "1");
    container.succeed(&["systemctl", "enable", "--now", "stillpoint-exec.socket"]);
    for _ in 0..3 {
        assert_eq!(version(&container, "confined"), "2");
    }
    assert_eq!(version(&container, "other"), "1");

    // A later package changes the command; systemd reads its units again, and runs the generator.
    unit(&container, "confined", "/usr/local/bin/heritage new", SANDBOX);
    assert_eq!(version(&container, "confined"), "2");
    assert!(container.property("confined.service", "ExecStart").contains("/usr/local/bin/heritage new"));

    // The helper cannot be reached without a socket of its family.
    unit(&container, "confined", command, &format!("{SANDBOX}RestrictAddressFamilies=AF_INET\n"));
    assert_eq!(version(&container, "confined"), "1");
    container.succeed(&[&enable[..], &["--loosen-sandbox"]].concat());
    assert_eq!(version(&container, "confined"), "2");

    container.succeed(&["stillpoint", "patch", "disable", "--unit", "confined"]);
    assert_eq!(version(&container, "confined"), "1");
    assert!(!container.property("confined.service", "ExecStart").contains("stillpoint"));
}

/// Uses Debian's redis unchanged, with the unit's own sandbox and user.
#[test]
fn debians_redis_is_patched_at_its_start_and_while_it_runs() {
    let shipped = older("redis", &["redis-server", "redis-tools"], "usr/bin/redis-server", &["CVE-2026-25243"]);
    let shipped = match shipped {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let container = container!();
    // `redis-server` is a link to it
    container.copy(&shipped.binary.path, "/usr/bin/redis-check-rdb");
    container.copy(&shipped.patches[0], "/root/fix.patch");
    let pid = || container.property("redis-server.service", "MainPID");
    // Processes in which the patch is active.
    let patched = || {
        let listed = container.succeed(&["stillpoint", "--json", "patch", "list"]);
        let lines = listed.lines().filter(|line| line.contains("CVE-2026-25243"));
        let lines = lines.map(|line| serde_json::from_str(line).expect("a line of JSON"));
        lines.filter_map(|line: Value| line["pid"].as_u64().map(|pid| pid.to_string())).collect::<Vec<_>>()
    };
    container.succeed(&["systemctl", "start", "stillpoint-exec.socket"]);
    container.succeed(&["stillpoint", "patch", "enable", "/root/fix.patch", "--unit", "redis-server"]);
    container.succeed(&["systemctl", "start", "redis-server"]);
    assert_eq!(patched(), [pid()]);
    container.succeed(&["systemctl", "restart", "redis-server"]);
    assert_eq!(patched(), [pid()]);
    container.succeed(&["stillpoint", "patch", "status", "--pid", &pid()]);
    assert_eq!(container.succeed(&["redis-cli", "ping"]).trim(), "PONG");

    container.succeed(&["stillpoint", "patch", "disable", "--unit", "redis-server"]);
    container.succeed(&["systemctl", "restart", "redis-server"]);
    assert_eq!(patched(), Vec::<String>::new());
    // A group of the unit's name that a user could have made comes first in the tree.
    let decoy = "mkdir -p /sys/fs/cgroup/a.slice/redis-server.service && \
        echo $$ >/sys/fs/cgroup/a.slice/redis-server.service/cgroup.procs && exec redis-server --port 6400";
    let decoy = container.command(&["sh", "-c", decoy]).stdout(Stdio::null()).spawn().expect("start a decoy");
    let _decoy = ChildGuard::from_child(decoy);
    wait::until("the decoy to run", || {
        container.run(&["redis-cli", "-p", "6400", "ping"]).status.success().then_some(())
    });
    container.succeed(&["stillpoint", "patch", "apply", "/root/fix.patch", "--unit", "redis-server"]);
    assert_eq!(patched(), [pid()]);
    container.succeed(&["stillpoint", "patch", "revert", "--unit", "redis-server"]);
    assert_eq!(patched(), Vec::<String>::new());
    assert_eq!(container.succeed(&["redis-cli", "ping"]).trim(), "PONG");
}
