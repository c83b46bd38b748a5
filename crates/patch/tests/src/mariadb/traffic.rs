//! Load on a MariaDB with every statement recorded: by a schedule, or one statement after another.
//!
//! By a schedule, latency counts from the time at which a statement was due: a pause of the server is visible even if
//! the client waited and sent nothing.

use super::MariaDb;
use super::client::{Answer, Client};
use crate::load::LoadResult;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::{End, Header, Outcome, Record, Sample};
use stillpoint_testing::random::Random;

/// Rows over which one client's statements are spread.
const ROWS: u64 = 10_000;
const STOCK: u64 = 1_000;
/// Rows that a query joins with each other and with themselves.
const MANY: u64 = 2_000;

/// Kind of statements that a client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// A statement without effect.
    NoOp,
    /// One row by its key, read or written in turn at random, as YCSB's workload A.
    Ycsb,
    /// Transactions of many statements, as TPC-C's new order and payment. They never wait for each other in a circle.
    TpcC,
    /// Queries that keep a processor busy for seconds.
    Olap,
    /// Query for the active ones of three changes; the kind of a sample is their number.
    Versions,
}

impl Work {
    /// Returns the name of its part of a file name.
    pub fn file_name(self) -> &'static str {
        match self {
            Work::NoOp => "noop",
            Work::Ycsb => "ycsb",
            _ => "tpcc",
        }
    }

    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        match self {
            Work::NoOp => "NoOp",
            Work::Ycsb => "YCSB-like",
            Work::TpcC => "TPC-C-like",
            Work::Olap => "OLAP",
            Work::Versions => "versions",
        }
    }

    /// Fills the tables that this kind needs.
    #[track_caller]
    pub fn prepare(self, server: &MariaDb) {
        let statements: &[String] = match self {
            Work::NoOp | Work::Versions => &[],
            Work::Olap => &[
                "CREATE TABLE many (n INT) ENGINE=InnoDB".into(),
                format!("INSERT INTO many SELECT seq FROM seq_1_to_{MANY}"),
            ],
            Work::Ycsb => &[
                "CREATE TABLE usertable (id INT PRIMARY KEY, field VARCHAR(100) NOT NULL) ENGINE=InnoDB".into(),
                format!("INSERT INTO usertable SELECT seq, REPEAT('x', 100) FROM seq_0_to_{}", ROWS - 1),
            ],
            Work::TpcC => &[
                "CREATE TABLE warehouse (w INT PRIMARY KEY, ytd BIGINT NOT NULL) ENGINE=InnoDB".into(),
                "INSERT INTO warehouse VALUES (1, 0)".into(),
                "CREATE TABLE district (d INT PRIMARY KEY, next INT NOT NULL, ytd BIGINT NOT NULL) ENGINE=InnoDB"
                    .into(),
                "INSERT INTO district SELECT seq, 1, 0 FROM seq_0_to_9".into(),
                "CREATE TABLE stock (i INT PRIMARY KEY, quantity INT NOT NULL) ENGINE=InnoDB".into(),
                format!("INSERT INTO stock SELECT seq, 100 FROM seq_0_to_{}", STOCK - 1),
                "CREATE TABLE orders (o BIGINT AUTO_INCREMENT PRIMARY KEY, d INT, i INT) ENGINE=InnoDB".into(),
            ],
        };
        let mut client = server.client();
        for statement in statements {
            client.done(statement).unwrap_or_else(|e| panic!("{e}"));
        }
    }

    /// Returns the statements of one transaction.
    fn statements(self, random: &mut Random) -> Vec<String> {
        match self {
            Work::NoOp => vec!["DO 0".into()],
            Work::Versions => vec!["SELECT (RAND() = 0.5) + (ASCII('a') = 197) + (REVERSE('old') = 'new')".into()],
            Work::Olap => {
                let some = random.below(12) + 1;
                // In this order also for a server without statistics of its tables: in another it takes an hour.
                let tables = "many c, many a, many b";
                vec![format!(
                    "SELECT STRAIGHT_JOIN COUNT(*) FROM {tables} WHERE c.n <= {some} AND a.n + b.n + c.n = -1"
                )]
            }
            Work::Ycsb => {
                let id = random.below(ROWS);
                vec![match random.below(2) {
                    0 => format!("SELECT field FROM usertable WHERE id = {id}"),
                    _ => format!("UPDATE usertable SET field = REPEAT('{}', 100) WHERE id = {id}", random.below(10)),
                }]
            }
            Work::TpcC if random.below(2) == 0 => {
                let (d, amount) = (random.below(10), random.below(5000));
                vec![
                    "BEGIN".into(),
                    format!("UPDATE warehouse SET ytd = ytd + {amount} WHERE w = 1"),
                    format!("UPDATE district SET ytd = ytd + {amount} WHERE d = {d}"),
                    "COMMIT".into(),
                ]
            }
            Work::TpcC => {
                let d = random.below(10);
                let mut items: Vec<u64> = (0..5).map(|_| random.below(STOCK)).collect();
                // In one order: no circle of waiting transactions.
                items.sort_unstable();
                items.dedup();
                let mut all = vec![
                    "BEGIN".into(),
                    format!("SELECT next FROM district WHERE d = {d} FOR UPDATE"),
                    format!("UPDATE district SET next = next + 1 WHERE d = {d}"),
                ];
                for i in items {
                    all.push(format!("UPDATE stock SET quantity = IF(quantity > 10, quantity - 1, 100) WHERE i = {i}"));
                    all.push(format!("INSERT INTO orders (d, i) VALUES ({d}, {i})"));
                }
                all.push("COMMIT".into());
                all
            }
        }
    }

    fn kinds(self) -> Vec<String> {
        match self {
            Work::Versions => (0..=3).map(|n| format!("{n} patches")).collect(),
            other => vec![other.name().into()],
        }
    }

    fn kind(self, answer: &Answer) -> u8 {
        if self == Work::Versions { answer.to_string().parse().unwrap_or(0) } else { 0 }
    }
}

/// Size of the load.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Kind of statements.
    pub work: Work,
    /// Number of clients, with a connection each.
    pub connections: u32,
    /// Transactions a second of all clients together, at random times; `None`: one after another.
    pub rate: Option<f64>,
    /// Number of the first connection in the record.
    pub first: u32,
}

/// A load in progress.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Vec<Sample>, String>>>,
    header: Header,
}

impl Traffic {
    /// Connects the clients and starts them.
    #[track_caller]
    pub fn start(server: &MariaDb, plan: &Plan) -> Traffic {
        Traffic::begin(server, plan, None)
    }

    /// Starts clients that continue through a restart. A client without an answer because the server ends counts the
    /// statement as lost, connects again and continues. The next statement counts from the time at which it was due, or
    /// at which the one before was lost.
    #[track_caller]
    pub fn start_through_restarts(server: &MariaDb, plan: &Plan) -> Traffic {
        Traffic::begin(server, plan, Some(server.socket()))
    }

    #[track_caller]
    fn begin(server: &MariaDb, plan: &Plan, again: Option<PathBuf>) -> Traffic {
        let stop = Arc::new(AtomicBool::new(false));
        let started_ns = now_ns();
        let start = |number: u32| {
            let client = server.client();
            let (plan, stop, again) = (*plan, Arc::clone(&stop), again.clone());
            std::thread::spawn(move || follow(client, plan, plan.first + number, &stop, again.as_deref()))
        };
        let threads = (0..plan.connections).map(start).collect();
        let header = Header {
            protocol: "mariadb".into(),
            target: server.socket().display().to_string(),
            started_ns,
            kinds: plan.work.kinds(),
            rate: plan.rate.unwrap_or(0.0),
            arrivals: if plan.rate.is_some() { "poisson" } else { "one after another" }.into(),
            connections: plan.connections,
            pipeline: 1,
            keys: ROWS,
            value_bytes: 100,
            ..Header::default()
        };
        Traffic { stop, threads, header }
    }

    /// Panics with the reason if a client has ended.
    #[track_caller]
    pub fn assert_running(&mut self) {
        if let Some(at) = self.threads.iter().position(JoinHandle::is_finished) {
            let ended = self.threads.swap_remove(at).join().expect("a client does not panic");
            panic!("a client has ended: {}", ended.err().unwrap_or_else(|| "without a request to end".into()));
        }
    }

    /// Ends it; panics unless every statement had an answer, and none was refused. Only a restart may lose any.
    #[track_caller]
    pub fn finish(self) -> LoadResult {
        self.stop.store(true, Ordering::Relaxed);
        let mut samples = Vec::new();
        for thread in self.threads {
            samples.extend(thread.join().expect("a client does not panic").unwrap_or_else(|e| panic!("{e}")));
        }
        samples.sort_by_key(Sample::ended_ns);
        let dropped = samples.iter().filter(|sample| sample.outcome == Outcome::Lost).count() as u64;
        let end = Some(End { ended_ns: now_ns(), dropped, ..End::default() });
        let record = Record { header: self.header, samples, marks: Vec::new(), end };
        LoadResult { record, result: serde_json::Value::Null }
    }
}

/// Errors of a server that ends: shutdown, an aborted query, a closed connection.
const ENDING: [u16; 3] = [1053, 1317, 1927];

/// Runs one client until the stop flag is set, or a statement fails and there is no `again` to connect to.
fn follow(
    mut client: Client,
    plan: Plan,
    number: u32,
    stop: &AtomicBool,
    again: Option<&Path>,
) -> Result<Vec<Sample>, String> {
    let mut random = Random::new(u64::from(number));
    let gap_ns = plan.rate.map(|rate| 1e9 * f64::from(plan.connections) / rate);
    let mut due = now_ns();
    let mut samples = Vec::new();
    let mut lost_ns = None;
    while !stop.load(Ordering::Relaxed) {
        if let Some(gap) = gap_ns {
            // of a number above 0
            due += (-(1.0 - random.unit()).ln() * gap) as u64;
            while now_ns() < due && !stop.load(Ordering::Relaxed) {
                let left = due.saturating_sub(now_ns());
                std::thread::sleep(Duration::from_nanos(left.min(100_000_000)));
            }
        }
        for (at, statement) in plan.work.statements(&mut random).iter().enumerate() {
            let sent = now_ns();
            // Only the first statement of a transaction has a due time of its own; the others follow the one before.
            let lost_before = lost_ns.take();
            let scheduled_ns = if gap_ns.is_some() && at == 0 { due.min(sent) } else { lost_before.unwrap_or(sent) };
            let answer = client.query(statement);
            let ended_ns = now_ns();
            let (kind, outcome) = match &answer {
                Err(_) if again.is_some() => (0, Outcome::Lost),
                Ok(Answer::Error(code, _)) if again.is_some() && ENDING.contains(code) => (0, Outcome::Lost),
                Err(error) => return Err(format!("connection {number}, {statement}: {error}")),
                Ok(Answer::Error(code, text)) => {
                    return Err(format!("connection {number}, {statement}: {code}: {text}"));
                }
                Ok(answer) => (plan.work.kind(answer), Outcome::Ok),
            };
            samples.push(Sample {
                scheduled_ns,
                latency_ns: ended_ns - scheduled_ns,
                late_us: u32::try_from((sent - scheduled_ns) / 1000).unwrap_or(u32::MAX),
                connection: number,
                kind,
                outcome,
            });
            if let (Outcome::Lost, Some(socket)) = (outcome, again) {
                lost_ns = Some(ended_ns);
                match connected(socket, stop) {
                    Some(new) => client = new,
                    None => return Ok(samples),
                }
                break;
            }
        }
    }
    Ok(samples)
}

/// Opens a new connection as soon as there is a server; `None` if the stop flag is set.
fn connected(socket: &Path, stop: &AtomicBool) -> Option<Client> {
    while !stop.load(Ordering::Relaxed) {
        if let Ok(client) = Client::connect(socket, "test") {
            return Some(client);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_take_rows_in_one_order() {
        let mut random = Random::new(1);
        for _ in 0..1000 {
            let statements = Work::TpcC.statements(&mut random);
            let item = |s: &String| s.strip_prefix("UPDATE stock ")?.rsplit(' ').next()?.parse::<u64>().ok();
            let items: Vec<u64> = statements.iter().filter_map(item).collect();
            assert!(items.is_sorted_by(|a, b| a < b), "{statements:?}");
            assert_eq!((statements[0].as_str(), statements.last().unwrap().as_str()), ("BEGIN", "COMMIT"));
        }
    }
}
