//! MariaDB's own tests, while the servers that they start are patched and reverted once a second.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;
use stillpoint_patch_bench::machine::machine;
use stillpoint_patch_tests::mariadb::change;
use stillpoint_patch_tests::mariadb::{PackagedServer, packaged};
use stillpoint_patch_tests::packages;
use stillpoint_patch_tests::patch_calls::{apply, revert};
use stillpoint_patch_tests::server::ChildGuard;

/// Changes without visible effect, in functions that some of the tests call.
const CHANGES: [&str; 4] = ["mysys-base64", "innodb-log", "sql-reverse", "sql-kill"];
/// Packages of the same source package, each with a part of the files that the tests need.
const PACKAGES: [&str; 6] = [
    "mariadb-test",
    "mariadb-test-data",
    "mariadb-client",
    "mariadb-client-core",
    "mariadb-server",
    "mariadb-server-core",
];
/// Default tests: some for each part of the server.
const TESTS: [&str; 27] = [
    "main.alter_table",
    "main.case",
    "main.cte_recursive",
    "main.delete",
    "main.distinct",
    "main.func_group",
    "main.func_math",
    "main.func_str",
    "main.func_time",
    "main.group_by",
    "main.insert",
    "main.join",
    "main.null",
    "main.order_by",
    "main.parser",
    "main.ps",
    "main.select",
    "main.sp",
    "main.subselect",
    "main.type_date",
    "main.union",
    "main.update",
    "main.view",
    "main.win",
    "innodb.foreign_key",
    "innodb.innodb-lock",
    "maria.maria",
];

/// Result of a test as the tester prints it.
struct TestReport {
    test: String,
    verdict: String,
    ms: u64,
}

/// Runs the named tests, prints their results, and panics unless all pass.
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
    let (mut tester, output) = start(usr, &suite, &var, tests);
    let reader = std::thread::spawn(move || told(output));
    let (mut applied, mut refused) = (0u32, 0u32);
    let status = loop {
        if let Some(status) = tester.ended() {
            break status;
        }
        for pid in servers(&var) {
            let turn = patches.iter().cycle().nth((applied / 2) as usize).expect("there are patches");
            // a server may end at any time: the results of the tests count
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
    let told = reader.join().expect("the reader does not panic");
    print(packaged, &told, applied, refused);
    assert!(status.success() && told.iter().all(|t| t.verdict == "pass"), "the tests ended with {status}");
    assert!(applied > 0 && !told.is_empty(), "{applied} patchings, {} tests", told.len());
}

/// Parses lines such as `main.select 'x'  [ pass ]  1234`; prints all lines to the terminal.
fn told(output: impl Read) -> Vec<TestReport> {
    let lines = BufReader::new(output).lines().map_while(Result::ok).inspect(|line| eprintln!("{line}"));
    let parse = |line: String| {
        let (name, rest) = line.split_once("[ ")?;
        let (verdict, ms) = rest.split_once(" ]")?;
        let test = name.trim().to_owned();
        test.contains('.').then(|| TestReport { test, verdict: verdict.to_owned(), ms: ms.trim().parse().unwrap_or(0) })
    };
    lines.filter_map(parse).collect()
}

fn print(packaged: &PackagedServer, told: &[TestReport], applied: u32, refused: u32) {
    let passed = told.iter().filter(|t| t.verdict == "pass").count();
    println!("# MariaDB's own tests while its servers are patched and reverted\n");
    println!("Printed by `experiments/mariadb-mtr` on {}, for Debian's mariadbd {}.\n", machine(), packaged.version);
    println!("{passed} of {} tests passed; meanwhile {applied} patches were applied or reverted, in turn", told.len());
    println!("{}; {refused} calls met a server that came up or went down.\n", CHANGES.join(", "));
    println!("| test | | ms |\n|---|---|---|");
    told.iter().for_each(|t| println!("| {} | {} | {} |", t.test, t.verdict, t.ms));
}

fn start(usr: &Path, suite: &packages::Binary, var: &Path, tests: &[String]) -> (ChildGuard, ChildStdout) {
    let mut perl = Command::new("perl");
    perl.arg("mariadb-test-run.pl").arg(format!("--vardir={}", var.display()));
    perl.args(["--mysqld=--user=root", "--force", "--suite-timeout=60", "--testcase-timeout=15"]);
    match tests {
        [] => perl.args(TESTS),
        tests => perl.args(tests),
    };
    perl.current_dir(usr.join("share/mysql/mysql-test")).envs(suite.environment()).stdin(Stdio::null());
    // its servers belong to its own process group
    perl.process_group(0).stdout(Stdio::piped());
    let mut tester = perl.spawn().expect("start the tests");
    let output = tester.stdout.take().expect("it is piped");
    (ChildGuard::from_child(tester), output)
}

/// Returns servers whose files are below `var` and that have completed their start.
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
