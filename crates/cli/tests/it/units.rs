//! The unit of the proxy, in its sandbox below a real systemd.

use std::path::Path;
use stillpoint_testing::container::Container;
use stillpoint_testing::{skip, wait, workspace_root};

/// Returns the number of the process that listens for clients.
fn serving(container: &Container) -> Option<String> {
    let sockets = container.succeed(&["ss", "-tlnpH", "sport = 6432"]);
    let (_, after) = sockets.split_once("pid=")?;
    after.split(',').next().map(str::to_owned)
}

#[test]
fn two_proxies_serve_in_turn_without_rights() {
    let container = match Container::start() {
        Ok(container) => container,
        Err(why) => skip!(why),
    };
    container.install(Path::new(env!("CARGO_BIN_EXE_stillpoint")));
    container.succeed(&["systemd-sysusers"]);
    container.succeed(&["systemd-tmpfiles", "--create", "/usr/local/lib/tmpfiles.d/stillpoint.conf"]);
    let example = std::fs::read(workspace_root().join("packaging/examples/proxy.toml")).expect("read the example");
    container.write("/etc/stillpoint/proxy.toml", example, 0o644);

    let units = ["stillpoint-proxy@a.service", "stillpoint-proxy@b.service"];
    container.succeed(&["systemctl", "start", units[0]]);
    let first = wait::until("the first proxy to serve", || serving(&container));
    container.succeed(&["systemctl", "start", units[1]]);
    let main = |unit: &str| container.property(unit, "MainPID");
    assert_eq!(first, main(units[0]));
    let status = container.succeed(&["cat", &format!("/proc/{first}/status")]);
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field of the status");
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_ne!(field("Uid:")[0], "0");
    assert_eq!(field("CapEff:"), ["0000000000000000"]);

    // `stillpoint migrate` finds the control socket where it looks for it.
    let link = container.succeed(&["readlink", "-e", "/run/stillpoint/proxy.sock"]);
    assert_eq!(link.trim(), "/run/stillpoint/proxy/proxy.sock");

    container.succeed(&["kill", "-KILL", &first]);
    let second = wait::until("the second proxy to serve", || serving(&container).filter(|pid| *pid != first));
    assert_eq!(second, main(units[1]));
    wait::until("the first proxy to start again", || {
        (container.property(units[0], "ActiveState") == "active" && main(units[0]) != first).then_some(())
    });
    container.succeed(&["systemctl", "reload", units[1]]);
    container.succeed(&["systemctl", "stop", units[0], units[1]]);
    for unit in units {
        assert_eq!(container.property(unit, "Result"), "success", "{unit}");
    }
}
