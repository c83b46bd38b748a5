//! Load for PostgreSQL: emulated browsers in a shop, and workloads that check the answers.
//!
//! ```text
//! client --- due ---> transaction (BEGIN, statements one by one, COMMIT) ---> sample, and with `checked` its history
//!   ^                     | 40001, 40P01: retried, the time continues
//!   +---- think time, drawn when the last one was due: waiting for an answer does not prolong it
//! ```
//!
//! Every client has a connection of its own and a schedule that does not wait for answers: think times run from due time to due time, so a
//! pause of the server shows in every transaction that was due meanwhile. A connection that ends is recorded and opened again. Its
//! transaction in progress counts as lost, and has an unknown outcome only if COMMIT had been sent.
//!
//! *Ordering* follows the ordering mix of TPC-W: its interactions and their frequencies, half of them updates, with our own tables and
//! statements. *Checked* uses counters, accounts and append lists, records all operations and answers of every client, and passes them to
//! [`crate::history`].
//!
//! Tables begin with `sp_`, and are made by [`prepare`]; nothing else in the database is changed.

mod clients;
mod consistency_workload;
mod ordering;
mod recorder;
mod session;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::config::Host;
use tokio_postgres::{Config, NoTls};

use crate::error::{Error, Result};
use crate::history::{Anomaly, Level};
use crate::load::{Finished, Mix, Running, Weights};

/// Work of the clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Emulated browsers in a shop.
    Ordering {
        /// Items on sale; customers are ten times as many.
        items: u32,
    },
    /// Counters, transfers and append lists by weight: `counter=1,transfer=1,list=1`.
    Checked {
        /// Kinds with weights, to draw from.
        mix: Mix,
        /// Number of counters, and of accounts.
        rows: u32,
    },
}

/// Isolation level that transactions request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Isolation {
    /// READ COMMITTED.
    ReadCommitted,
    /// REPEATABLE READ: snapshot isolation.
    RepeatableRead,
    /// SERIALIZABLE.
    Serializable,
}

impl Isolation {
    fn begin(self) -> &'static str {
        match self {
            Isolation::ReadCommitted => "BEGIN ISOLATION LEVEL READ COMMITTED",
            Isolation::RepeatableRead => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            Isolation::Serializable => "BEGIN ISOLATION LEVEL SERIALIZABLE",
        }
    }

    /// Returns the level by which a history is checked.
    pub fn level(self) -> Level {
        match self {
            Isolation::ReadCommitted => Level::ReadCommitted,
            Isolation::RepeatableRead => Level::Snapshot,
            Isolation::Serializable => Level::Serializable,
        }
    }
}

/// Plan of a load for PostgreSQL.
#[derive(Debug, Clone)]
pub struct PostgresPlan {
    /// Address of the server: `host=... dbname=...` or a URL.
    pub connect: String,
    /// Work of the clients.
    pub work: Work,
    /// Number of clients (the paper's EBs).
    pub clients: u32,
    /// Mean of the exponential think time between the due times of one client.
    pub think: Duration,
    /// Isolation level that transactions request.
    pub isolation: Isolation,
    /// Time for which transactions become due.
    pub duration: Duration,
    /// Time after which a sent transaction has failed; its connection is then opened again.
    pub timeout: Duration,
    /// Seed of all random choices.
    pub seed: u64,
    /// File into which every transaction's latency is recorded.
    pub record: Option<PathBuf>,
    /// File that the history of a checked workload is written to.
    pub history: Option<PathBuf>,
}

impl PostgresPlan {
    /// Makes a plan of the ordering mix: 100 browsers, a second of think time, REPEATABLE READ, ten seconds.
    pub fn ordering(connect: impl Into<String>) -> PostgresPlan {
        PostgresPlan {
            connect: connect.into(),
            work: Work::Ordering { items: 1_000 },
            clients: 100,
            think: Duration::from_secs(1),
            isolation: Isolation::RepeatableRead,
            duration: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            seed: 1,
            record: None,
            history: None,
        }
    }

    /// Makes a plan of checked data: 16 clients with a think time of 5 ms.
    pub fn checked(connect: impl Into<String>) -> PostgresPlan {
        let mix = Mix(consistency_workload::KINDS.map(|kind| (kind.to_owned(), 1)).to_vec());
        PostgresPlan {
            work: Work::Checked { mix, rows: 8 },
            clients: 16,
            think: Duration::from_millis(5),
            ..PostgresPlan::ordering(connect)
        }
    }

    /// Refuses a plan that contradicts itself.
    fn check(&self) -> Result<Config> {
        let refuse = |option, problem: String| Err(Error::Plan { option, problem });
        if self.clients == 0 {
            return refuse("--clients", "must be at least 1".into());
        }
        match &self.work {
            Work::Ordering { items } if *items < 10 => return refuse("--items", "must be at least 10".into()),
            Work::Ordering { .. } if self.history.is_some() => {
                return refuse("--history", "only checked workloads have one".into());
            }
            Work::Checked { rows, .. } if *rows < 2 => return refuse("--rows", "must be at least 2".into()),
            Work::Checked { mix, .. } => {
                let known = consistency_workload::KINDS;
                if let Some((kind, _)) = mix.0.iter().find(|(kind, _)| !known.contains(&kind.as_str())) {
                    return refuse("--mix", format!("`{kind}` is none of {}", known.join(", ")));
                }
            }
            Work::Ordering { .. } => {}
        }
        let config = Config::from_str(&self.connect);
        config.map_err(|error| Error::Plan { option: "--connect", problem: format!("cannot be read: {error}") })
    }

    /// Returns the kinds of transactions with their weights.
    fn weights(&self) -> Weights {
        match &self.work {
            Work::Ordering { .. } => Weights::new(&ordering::MIX.map(|(name, weight)| (name.to_owned(), weight))),
            Work::Checked { mix, .. } => Weights::new(&mix.0),
        }
    }
}

/// Address of the server in a configuration, without its password.
struct ServerAddress<'a>(&'a Config);

impl fmt::Display for ServerAddress<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.get_hosts().first() {
            Some(Host::Tcp(host)) => f.write_str(host)?,
            Some(Host::Unix(path)) => write!(f, "{}", path.display())?,
            None => f.write_str("localhost")?,
        }
        write!(f, ":{}/{}", self.0.get_ports().first().unwrap_or(&5432), self.0.get_dbname().unwrap_or_default())
    }
}

/// Result of the check of a recorded history.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Number of transactions in the history.
    pub transactions: usize,
    /// Number of transactions whose commit was acknowledged.
    pub committed: usize,
    /// Number of transactions whose outcome is unknown.
    pub unknown: usize,
    /// Results that are impossible at the requested level.
    pub anomalies: Vec<Anomaly>,
}

/// Result of a load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PostgresFinished {
    /// Latencies, counts, connections.
    #[serde(flatten)]
    pub finished: Finished,
    /// Number of retries after a serialization failure or a deadlock.
    pub retries: u64,
    /// Verdict on a checked workload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

impl PostgresFinished {
    /// Returns true if every request was answered rightly on connections that stayed open, and no anomaly was found.
    pub fn is_clean(&self) -> bool {
        self.finished.is_clean() && self.verdict.as_ref().is_none_or(|verdict| verdict.anomalies.is_empty())
    }
}

/// Makes and fills the workload's tables; replaces existing ones.
///
/// # Errors
/// The plan contradicts itself, or the server refused.
pub fn prepare(plan: &PostgresPlan) -> Result<()> {
    let config = plan.check()?;
    let statements = match &plan.work {
        Work::Ordering { items } => ordering::tables(*items),
        Work::Checked { rows, .. } => consistency_workload::tables(*rows),
    };
    let target = ServerAddress(&config).to_string();
    runtime()?.block_on(async {
        let connecting = config.connect(NoTls).await;
        let (client, connection) = connecting.map_err(|source| postgres_error(&target, "connecting", source))?;
        let connection = tokio::spawn(connection);
        for statement in statements {
            let made = client.batch_execute(&statement).await;
            made.map_err(|source| postgres_error(&target, "making the tables", source))?;
        }
        drop(client);
        // It ends with its client.
        let _ = connection.await;
        Ok(())
    })
}

fn postgres_error(target: &str, action: &'static str, source: tokio_postgres::Error) -> Error {
    Error::Postgres { target: target.to_owned(), action, source }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|source| Error::System { call: "epoll_create", source })
}

/// Load of transactions.
pub type PostgresLoad = Running<PostgresFinished>;

impl PostgresLoad {
    /// Checks the plan and connects all clients. When this returns, transactions are becoming due.
    ///
    /// # Errors
    /// The plan contradicts itself, a file cannot be created, or the server cannot be reached.
    pub fn start(plan: PostgresPlan) -> Result<PostgresLoad> {
        let config = plan.check()?;
        Running::spawn(move |counters, ready| {
            let tasks = tokio::task::LocalSet::new();
            runtime()?.block_on(tasks.run_until(clients::drive(plan, config, counters, ready)))
        })
    }
}
