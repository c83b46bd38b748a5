//! go-tpc: TPC-C, and CH-benCHmark, which also runs analytical queries for minutes.

use super::{MariaDb, Packaged, Policy};
use crate::Unavailable;
use crate::server::{ChildGuard, bound_command};
use crate::wait;
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
pub use stillpoint_testing::go_tpc::go_tpc;
use stillpoint_testing::recipes;

/// Name of the database that it fills.
const DATABASE: &str = "tpcc";
/// Buffer size for all tables: the queries should take time, not the disk.
pub const OPTION: &str = "--innodb-buffer-pool-size=512M";

/// Makes data of a server whose database has the tables of both, for one warehouse; once.
pub fn data(packaged: &Packaged) -> Result<PathBuf, Unavailable> {
    let go_tpc = go_tpc().as_deref().map_err(Clone::clone)?;
    let entry =
        recipes::entry("mariadb", "tpc", &[packaged.version.as_bytes().to_vec()], |into| fill(packaged, go_tpc, into))?;
    Ok(entry.join("data"))
}

fn fill(packaged: &Packaged, go_tpc: &Path, into: &Path) -> Result<(), Unavailable> {
    let mut server = packaged.start(Policy::ThreadPerConnection, &[OPTION]);
    let mut client = server.client();
    let statements = [
        format!("CREATE DATABASE {DATABASE}"),
        "CREATE USER load_generator@'%' IDENTIFIED BY ''".to_owned(),
        format!("GRANT ALL ON {DATABASE}.* TO load_generator@'%'"),
    ];
    for statement in &statements {
        client.done(statement).map_err(|e| e.to_string())?;
    }
    for words in [["tpcc", "prepare", "--no-check"], ["ch", "prepare", "--threads=1"]] {
        let out = command(go_tpc, &server)
            .args(words)
            .arg("--warehouses=1")
            .output()
            .map_err(|e| format!("run go-tpc: {e}"))?;
        let text = String::from_utf8_lossy(&out.stdout);
        if !out.status.success() || !failures(&text).is_empty() {
            return Err(format!("{words:?} of go-tpc: {text}{}", String::from_utf8_lossy(&out.stderr)).into());
        }
    }
    drop(client);
    server.process().signal(Signal::TERM);
    let ended = wait::within(Duration::from_secs(300), || server.process().ended());
    if !ended.is_some_and(|status| status.success()) {
        return Err(format!("the server that was filled did not end in order: {}", server.log_text()).into());
    }
    let copied = Command::new("cp").arg("-a").arg(server.dir().join("data")).arg(into).status();
    copied.ok().filter(|status| status.success()).ok_or("cp failed")?;
    Ok(())
}

fn command(go_tpc: &Path, server: &MariaDb) -> Command {
    let mut command = bound_command(go_tpc);
    command.args(["--host=127.0.0.1", "--user=load_generator"]).arg(format!("--db={DATABASE}"));
    command.arg(format!("--port={}", server.port())).stdin(Stdio::null());
    command
}

/// Kind of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Transactions only.
    TpcC,
    /// Transactions, and two clients with analytical queries over the same tables, one after another.
    ChBenchmark,
}

/// A load in progress.
#[derive(Debug)]
pub struct Tpc {
    process: ChildGuard,
    output: PathBuf,
    mix: Mix,
}

/// Statement counts that it printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    /// Completed transactions (and queries).
    pub done: u64,
    /// Transactions that the server rolled back because they waited for each other's rows in a circle: part of TPC-C.
    pub circles: u64,
}

impl Tpc {
    /// Starts `clients` connections of transactions on a server that was started on [`data`].
    pub fn start(server: &MariaDb, mix: Mix, clients: u32) -> Result<Tpc, String> {
        let go_tpc = go_tpc().as_deref().map_err(Clone::clone)?;
        let output = server.dir().join("go-tpc.out");
        let file = std::fs::File::create(&output).map_err(|e| format!("make {}: {e}", output.display()))?;
        let errors = file.try_clone().map_err(|e| format!("share {}: {e}", output.display()))?;
        let mut command = command(go_tpc, server);
        command.arg(if mix == Mix::TpcC { "tpcc" } else { "ch" }).args(["run", "--warehouses=1"]);
        // It prints errors, one line each, and continues; this module judges them.
        command.args(["--time=10h", "--ignore-error", "--interval=1s", "--acThreads=2"]);
        command.arg(format!("--threads={clients}")).stdout(file).stderr(errors);
        let child = command.spawn().map_err(|e| format!("run go-tpc: {e}"))?;
        Ok(Tpc { process: ChildGuard::from_child(child), output, mix })
    }

    /// Returns its output so far.
    fn text(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// Panics unless it runs and every statement so far had the right answer.
    #[track_caller]
    pub fn assert_clean(&mut self) {
        let text = self.text();
        if let Some(status) = self.process.ended() {
            panic!("go-tpc ended with {status}:\n{text}");
        }
        let failures = failures(&text);
        assert!(failures.is_empty(), "{} statements failed, the first: {}", failures.len(), failures[0]);
    }

    /// Ends it, and panics unless every statement had the right answer.
    #[track_caller]
    pub fn finish(mut self) -> Said {
        self.assert_clean();
        let before = self.text();
        if self.mix == Mix::TpcC {
            self.process.signal(Signal::TERM);
            wait::until("go-tpc to end", || self.process.ended());
        }
        let text = if self.mix == Mix::TpcC { self.text() } else { before };
        let failures = failures(&text);
        assert!(failures.is_empty(), "{} statements failed, the first: {}", failures.len(), failures[0]);
        Said { done: done(&text), circles: text.lines().filter(|line| is_circle(line)).count() as u64 }
    }
}

fn is_circle(line: &str) -> bool {
    line.contains("failed, err") && line.contains("Error 1213")
}

/// Returns lines that report a failed statement or a lost connection.
fn failures(text: &str) -> Vec<&str> {
    let tells = |line: &&str| {
        let line = line.trim_start();
        ["failed", "panic", "bad connection", "invalid connection", "unexpected EOF"].iter().any(|w| line.contains(w))
    };
    text.lines().filter(tells).filter(|line| !is_circle(line)).collect()
}

/// Sums the counts of its lines of every second.
fn done(text: &str) -> u64 {
    let count = |line: &str| {
        let rest = line.strip_prefix("[Current] ")?;
        let (name, rest) = rest.split_once(" - ")?;
        let count = rest.split_once("Count: ")?.1.split(',').next()?.trim().parse::<u64>().ok()?;
        (!name.trim().ends_with("_ERR")).then_some(count)
    };
    text.lines().filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
[Current] NEW_ORDER - Takes(s): 1.0, Count: 74, TPM: 4445.5, Sum(ms): 1014.8, Avg(ms): 13.7\n\
[Current] NEW_ORDER_ERR - Takes(s): 1.0, Count: 1, TPM: 60.0, Sum(ms): 10.8, Avg(ms): 10.7\n\
[Current] Q1    - Takes(s): 1.0, Count: 2, TPM: 120.0\n\
[2026-11-21 07:00:00] execute run failed, err exec UPDATE failed Error 1213 (40001): Deadlock found when trying to get lock\n";

    #[test]
    fn what_is_done_is_counted_and_circles_are_no_failures() {
        assert_eq!(done(TEXT), 76);
        assert_eq!(failures(TEXT), Vec::<&str>::new());
        assert_eq!(TEXT.lines().filter(|line| is_circle(line)).count(), 1);
    }

    #[test]
    fn lost_connections_are_failures() {
        let text = "[2026-11-21 07:00:00] execute run failed, err driver: bad connection\nexecute run failed, err x\n";
        assert_eq!(failures(text).len(), 2);
    }
}
