//! Load on a MariaDB that a patch must not disturb: transactions with every answer checked, and sysbench.

use super::MariaDb;
use super::client::{Answer, Client};
use crate::packages;
use crate::server::{ChildGuard, bound_command};
use crate::wait;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Clients with a connection each, always in transactions.
#[derive(Debug)]
pub struct Transactions {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    clients: Vec<JoinHandle<Result<(), String>>>,
}

impl Transactions {
    /// Starts `count` clients, each on rows of its own.
    #[track_caller]
    pub fn start(server: &MariaDb, count: usize) -> Transactions {
        let mut client = server.client();
        let table = "CREATE TABLE IF NOT EXISTS accounts (id INT PRIMARY KEY, amount INT NOT NULL) ENGINE=InnoDB";
        client.done(table).unwrap_or_else(|e| panic!("{e}"));
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let start = |number: usize| {
            client.done(&format!("REPLACE INTO accounts VALUES ({}, 100), ({}, 100)", 2 * number, 2 * number + 1))?;
            let connected = server.client();
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            Ok(std::thread::spawn(move || transfer(connected, number, &stop, &done)))
        };
        let clients = (0..count).map(start).collect::<std::io::Result<_>>().unwrap_or_else(|e| panic!("{e}"));
        Transactions { stop, done, clients }
    }

    /// Waits until `count` more statements have been answered.
    #[track_caller]
    pub fn answered(&self, count: u64) {
        let before = self.done.load(Ordering::Relaxed);
        wait::until("statements to be answered", || {
            let ended = self.clients.iter().any(JoinHandle::is_finished);
            (ended || self.done.load(Ordering::Relaxed) >= before + count).then_some(())
        });
    }

    /// Ends it, panics unless each statement of each client had the right answer, and returns the number of statements.
    #[track_caller]
    pub fn assert_clean(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().expect("a client does not panic").unwrap_or_else(|e| panic!("{e}"));
        }
        self.done.load(Ordering::Relaxed)
    }
}

/// Moves one unit between two rows repeatedly; the sum is always the same.
fn transfer(mut client: Client, number: usize, stop: &AtomicBool, done: &AtomicU64) -> Result<(), String> {
    let (one, two) = (2 * number, 2 * number + 1);
    let mut step = 1i32;
    while !stop.load(Ordering::Relaxed) {
        let sum = format!("SELECT SUM(amount) FROM accounts WHERE id IN ({one}, {two})");
        let statements = [
            "BEGIN".to_owned(),
            format!("UPDATE accounts SET amount = amount - {step} WHERE id = {one}"),
            format!("UPDATE accounts SET amount = amount + {step} WHERE id = {two}"),
            sum,
            "COMMIT".to_owned(),
        ];
        for statement in &statements {
            match client.query(statement) {
                Err(error) => return Err(format!("client {number} lost its connection in {statement}: {error}")),
                Ok(Answer::Error(code, text)) => return Err(format!("client {number}: {statement}: {code}: {text}")),
                Ok(answer @ Answer::Rows(_)) if answer.to_string() != "200" => {
                    return Err(format!("client {number}: {statement}: {answer}"));
                }
                Ok(_) => drop(done.fetch_add(1, Ordering::Relaxed)),
            }
        }
        step = -step;
    }
    Ok(())
}

/// Debian's sysbench.
#[derive(Debug)]
pub struct Sysbench {
    process: ChildGuard,
    output: PathBuf,
}

/// Counts of sysbench.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Statements answered.
    pub queries: u64,
    /// Errors after which it continued: dead-locks of transactions among themselves.
    pub ignored: u64,
    /// Connections that it had to open again.
    pub reconnects: u64,
}

impl Sysbench {
    /// Fills its tables and starts `threads` connections of read-write transactions for `seconds`.
    pub fn start(server: &MariaDb, threads: u32, seconds: u32) -> Result<Sysbench, String> {
        Sysbench::prepare(server)?;
        Sysbench::again(server, threads, seconds)
    }

    /// Fills its tables.
    pub fn prepare(server: &MariaDb) -> Result<(), String> {
        server.client().done("CREATE DATABASE IF NOT EXISTS sbtest").map_err(|e| e.to_string())?;
        let prepared = sysbench(server)?.arg("prepare").output().map_err(|e| format!("run sysbench: {e}"))?;
        match prepared.status.success() {
            true => Ok(()),
            false => Err(format!("sysbench prepare: {}", String::from_utf8_lossy(&prepared.stdout))),
        }
    }

    /// Starts it on filled tables, one transaction after another.
    pub fn again(server: &MariaDb, threads: u32, seconds: u32) -> Result<Sysbench, String> {
        Sysbench::run(server, &[format!("--threads={threads}"), format!("--time={seconds}")])
    }

    /// Starts it on filled tables, with so many transactions a second at random times, independent of those before:
    /// their latency counts from the time at which they were due.
    pub fn at_rate(server: &MariaDb, threads: u32, seconds: u32, rate: u32) -> Result<Sysbench, String> {
        let paced = [format!("--threads={threads}"), format!("--time={seconds}"), format!("--rate={rate}")];
        Sysbench::run(server, &[&paced[..], &["--histogram=on".into()]].concat())
    }

    fn run(server: &MariaDb, options: &[String]) -> Result<Sysbench, String> {
        let output = server.dir().join("sysbench.out");
        let file = std::fs::File::create(&output).map_err(|e| format!("make {}: {e}", output.display()))?;
        let errors = file.try_clone().map_err(|e| format!("share {}: {e}", output.display()))?;
        let mut command = sysbench(server)?;
        let child = command
            .args(options)
            .arg("run")
            .stdout(file)
            .stderr(errors)
            .spawn()
            .map_err(|e| format!("run sysbench: {e}"))?;
        Ok(Sysbench { process: ChildGuard::from_child(child), output })
    }

    /// Returns true if it still runs.
    pub fn runs(&mut self) -> bool {
        self.process.ended().is_none()
    }

    /// Waits for its end and reads its counts; panics if it failed.
    #[track_caller]
    pub fn finish(self) -> Counted {
        let text = self.ended();
        Counted::parse(&text).unwrap_or_else(|| panic!("sysbench printed:\n{text}"))
    }

    /// Waits as `finish` does, and returns the latencies of its transactions too; it was started with `at_rate`.
    #[track_caller]
    pub fn finish_paced(self) -> (Counted, Latencies) {
        let text = self.ended();
        let both = Counted::parse(&text).zip(Latencies::parse(&text));
        both.unwrap_or_else(|| panic!("sysbench printed:\n{text}"))
    }

    #[track_caller]
    fn ended(mut self) -> String {
        let limit = std::time::Duration::from_secs(3600);
        let status = wait::within(limit, || self.process.ended()).expect("sysbench ends");
        let text = read(&self.output);
        assert!(status.success(), "sysbench ended with {status}:\n{text}");
        text
    }
}

fn sysbench(server: &MariaDb) -> Result<Command, String> {
    let binary = packages::binary(&["sysbench"], None, "usr/bin/sysbench")?;
    let scripts = binary.path.ancestors().nth(2).expect("usr/bin lies in usr").join("share/sysbench");
    let mut command = bound_command(&binary.path);
    command.arg(scripts.join("oltp_read_write.lua")).envs(binary.environment()).current_dir(&scripts);
    command.args(["--db-driver=mysql", "--mysql-user=root", "--mysql-db=sbtest", "--tables=2"]);
    command.args(["--table-size=2000", "--rand-type=uniform", "--skip-trx=off"]);
    command.arg(format!("--mysql-socket={}", server.socket().display()));
    command.stdin(Stdio::null());
    Ok(command)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Durations of transactions, counted in buckets that are 2 % wide.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Latencies {
    /// Milliseconds and transactions, ascending.
    buckets: Vec<(f64, u64)>,
    /// Duration of the slowest one.
    max_ms: f64,
}

impl Latencies {
    /// Returns the number of transactions.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// Returns the duration, in milliseconds, below which this share of transactions is.
    pub fn quantile_ms(&self, share: f64) -> f64 {
        let rank = (share * self.count() as f64).ceil() as u64;
        let below = |at: usize| self.buckets[..=at].iter().map(|(_, count)| count).sum::<u64>();
        let at = (0..self.buckets.len()).find(|&at| below(at) >= rank);
        at.map_or(self.max_ms, |at| self.buckets[at].0)
    }

    /// Returns the duration of the slowest one, in milliseconds.
    pub fn max_ms(&self) -> f64 {
        self.max_ms
    }

    fn parse(text: &str) -> Option<Latencies> {
        let bucket = |line: &str| {
            let (value, counted) = line.split_once('|')?;
            Some((value.trim().parse().ok()?, counted.split_whitespace().last()?.parse().ok()?))
        };
        let buckets: Vec<(f64, u64)> = text.lines().filter_map(bucket).collect();
        let of_latencies = text.split_once("Latency (ms):")?.1;
        let max = of_latencies.lines().find_map(|line| line.trim().strip_prefix("max:"))?;
        (!buckets.is_empty()).then_some(Latencies { buckets, max_ms: max.trim().parse().ok()? })
    }
}

impl std::ops::AddAssign for Latencies {
    fn add_assign(&mut self, other: Latencies) {
        self.buckets.extend(other.buckets);
        self.buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.max_ms = self.max_ms.max(other.max_ms);
    }
}

impl std::ops::AddAssign for Counted {
    fn add_assign(&mut self, other: Counted) {
        self.queries += other.queries;
        self.ignored += other.ignored;
        self.reconnects += other.reconnects;
    }
}

impl Counted {
    fn parse(text: &str) -> Option<Counted> {
        let number = |label: &str| {
            let line = text.lines().find_map(|l| l.trim().strip_prefix(label))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some(Counted {
            queries: number("queries:")?,
            ignored: number("ignored errors:")?,
            reconnects: number("reconnects:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sysbench_prints_is_read() {
        let text = "    queries:                             6120   (610.55 per sec.)\n    ignored errors:                      3      (0.30 per sec.)\n    reconnects:                          0      (0.00 per sec.)\n";
        assert_eq!(Counted::parse(text), Some(Counted { queries: 6120, ignored: 3, reconnects: 0 }));
        assert_eq!(Counted::parse("FATAL: lost"), None);
    }

    #[test]
    fn latencies_that_sysbench_prints_are_read() {
        let text = "Latency histogram (values are in milliseconds)\n       value  ------------- distribution ------------- count\n       4.055 |****                                     990\n      17.320 |*                                        9\n      90.780 |                                         1\n\nLatency (ms):\n         min:                                    3.21\n         max:                                   91.02\n         sum:                                 10.00\n";
        let latencies = Latencies::parse(text).unwrap();
        assert_eq!((latencies.count(), latencies.max_ms()), (1000, 91.02));
        assert_eq!(
            [0.5, 0.99, 0.991, 0.999, 1.0].map(|share| latencies.quantile_ms(share)),
            [4.055, 4.055, 17.32, 17.32, 90.78]
        );
        assert_eq!(Latencies::parse("FATAL: lost"), None);
        let mut both = Latencies { buckets: vec![(10.0, 1)], max_ms: 10.0 };
        both += latencies;
        assert_eq!((both.count(), both.max_ms()), (1001, 91.02));
        assert_eq!([0.99, 0.9901, 0.9911].map(|share| both.quantile_ms(share)), [10.0, 17.32, 17.32]);
    }
}
