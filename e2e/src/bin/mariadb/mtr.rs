//! MariaDB's own tests, while the servers that they start are patched and reverted once a second.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_e2e::mariadb::change;
use stillpoint_e2e::mariadb::packaged;
use stillpoint_e2e::packages;
use stillpoint_e2e::patching::{apply, revert};
use stillpoint_e2e::server::Guarded;

/// What no test can see, but every function is called by some.
const CHANGES: [&str; 4] = ["mysys-base64", "innodb-log", "sql-reverse", "sql-kill"];
/// Of the same source package, each with a part of what the tests need.
const PACKAGES: [&str; 6] = [
    "mariadb-test",
    "mariadb-test-data",
    "mariadb-client",
    "mariadb-client-core",
    "mariadb-server",
    "mariadb-server-core",
];
/// When nothing else is asked for.
const TESTS: [&str; 6] =
    ["main.func_group", "main.insert", "main.select", "main.func_str", "main.group_by", "innodb.innodb_bug60049"];

/// Runs the tests named, and panics unless all pass.
pub(crate) fn run(tests: &[String]) {
    let packaged = packaged().as_ref().unwrap_or_else(|e| panic!("{e}"));
    let suite = packages::binary(&PACKAGES, Some(&packaged.version), "usr/bin/mariadb-test");
    let suite = suite.unwrap_or_else(|e| panic!("{e}"));
    let dir = tempfile::TempDir::with_prefix("stillpoint-mtr-").expect("make a directory");
    let patches: Vec<PathBuf> = CHANGES
        .map(|name| {
            let (patch, run) = change::named(name).build(packaged, dir.path()).unwrap_or_else(|e| panic!("{e}"));
            assert!(run.code == Some(0) && patch.exists(), "{run}");
            patch
        })
        .to_vec();
    let usr = suite.path.ancestors().nth(2).expect("usr/bin lies in usr");
    let var = dir.path().join("var");
    let mut tester = start(usr, &suite, &var, tests);
    let (mut applied, mut refused) = (0u32, 0u32);
    let status = loop {
        if let Some(status) = tester.ended() {
            break status;
        }
        for pid in servers(&var) {
            let turn = patches.iter().cycle().nth((applied / 2) as usize).expect("there are patches");
            // a server may end at any time: what counts is what the tests say
            match apply(turn, pid).run().code {
                Some(0) => applied += 1,
                _ => refused += 1,
            }
            std::thread::sleep(Duration::from_millis(500));
            if revert(pid).run().code == Some(0) {
                applied += 1;
            }
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    println!("{applied} patchings while the tests ran, {refused} not possible because a server came up or went down");
    assert!(status.success(), "the tests ended with {status}");
    assert!(applied > 0, "no server was patched");
}

fn start(usr: &Path, suite: &packages::Binary, var: &Path, tests: &[String]) -> Guarded {
    let mut perl = Command::new("perl");
    perl.arg("mariadb-test-run.pl").arg(format!("--vardir={}", var.display()));
    perl.args(["--mysqld=--user=root", "--force", "--suite-timeout=60", "--testcase-timeout=15"]);
    match tests {
        [] => perl.args(TESTS),
        tests => perl.args(tests),
    };
    perl.current_dir(usr.join("share/mysql/mysql-test")).envs(suite.environment()).stdin(Stdio::null());
    // its servers are its own process group's
    perl.process_group(0);
    Guarded::from_child(perl.spawn().expect("start the tests"))
}

/// Servers whose files lie below `var`, past their start.
fn servers(var: &Path) -> Vec<i32> {
    let wanted = var.to_string_lossy().into_owned();
    let is_server = |pid: i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.split('\0').next().is_some_and(|program| program.ends_with("/mariadbd"))
            && line.contains(&wanted)
            && !line.contains("--bootstrap")
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_server(*pid)).collect()
}
