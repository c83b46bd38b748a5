//! Load for PostgreSQL: emulated browsers in a shop, and workloads that check what they were told.
//!
//! ```text
//! client --- due ---> transaction (BEGIN, statements one by one, COMMIT) ---> sample, and with `checked` its history
//!   ^                     | 40001, 40P01: once more, the time goes on
//!   +---- think time, drawn when the last one was due: who waits for an answer does not think longer
//! ```
//!
//! Every client has a connection of its own and a schedule that does not wait for answers: think times run from due time
//! to due time, so a server that pauses shows in every transaction that was due meanwhile. A connection that ends is
//! marked and opened again. What was under way counts as lost, and its outcome as unknown only if COMMIT had been sent.
//!
//! *Ordering* follows the ordering mix of TPC-W: interactions and their frequencies, half of them updates, on tables and
//! with statements of our own. *Checked* keeps counters, accounts and append lists, records what every client did and
//! saw, and hands it to [`crate::history`].
//!
//! Tables begin with `sp_`, and are made by [`prepare`]; nothing else in the database is touched.

mod checked;
mod clients;
mod ordering;
mod recorder;
mod session;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::config::Host;
use tokio_postgres::{Config, NoTls};

use crate::error::{Error, Result};
use crate::history::{Anomaly, Level};
use crate::load::{Counters, Finished, Mix};
use crate::record::Header;

/// What the clients do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Emulated browsers in a shop of so many items.
    Ordering {
        /// Items on sale; customers are ten times as many.
        items: u32,
    },
    /// Counters, transfers and append lists by weight: `counter=1,transfer=1,list=1`.
    Checked {
        /// Kinds with weights.
        mix: Mix,
        /// Counters, and as many accounts.
        rows: u32,
    },
}

/// The isolation level that transactions ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

    /// What it promises to histories.
    pub fn level(self) -> Level {
        match self {
            Isolation::ReadCommitted => Level::ReadCommitted,
            Isolation::RepeatableRead => Level::Snapshot,
            Isolation::Serializable => Level::Serializable,
        }
    }
}

/// A load for PostgreSQL.
#[derive(Debug, Clone)]
pub struct PostgresPlan {
    /// Where to connect: `host=... dbname=...` or a URL.
    pub connect: String,
    /// What the clients do.
    pub work: Work,
    /// How many there are (the paper's EBs).
    pub clients: u32,
    /// Mean of the exponential think time between the due times of one client.
    pub think: Duration,
    /// The level that transactions ask for.
    pub isolation: Isolation,
    /// How long transactions become due.
    pub duration: Duration,
    /// A transaction that is not done so long after it was sent has failed, and its connection is opened anew.
    pub timeout: Duration,
    /// Seed of all random choices.
    pub seed: u64,
    /// File that every transaction's latency is recorded in.
    pub record: Option<PathBuf>,
    /// File that the history of a checked workload is written to.
    pub history: Option<PathBuf>,
}

impl PostgresPlan {
    /// The ordering mix: 100 browsers, a second of think time, REPEATABLE READ, ten seconds.
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

    /// Checked data: 16 clients that think 5 ms.
    pub fn checked(connect: impl Into<String>) -> PostgresPlan {
        let mix = Mix(checked::KINDS.map(|kind| (kind.to_owned(), 1)).to_vec());
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
                if let Some((kind, _)) = mix.0.iter().find(|(kind, _)| !checked::KINDS.contains(&kind.as_str())) {
                    return refuse("--mix", format!("`{kind}` is none of {}", checked::KINDS.join(", ")));
                }
            }
            Work::Ordering { .. } => {}
        }
        let config = Config::from_str(&self.connect);
        config.map_err(|error| Error::Plan { option: "--connect", problem: format!("cannot be read: {error}") })
    }

    fn kinds(&self) -> Vec<String> {
        match &self.work {
            Work::Ordering { .. } => ordering::MIX.iter().map(|(name, _)| (*name).to_owned()).collect(),
            Work::Checked { mix, .. } => mix.0.iter().map(|(name, _)| name.clone()).collect(),
        }
    }
}

/// Where a configuration leads, without its password.
struct Place<'a>(&'a Config);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.get_hosts().first() {
            Some(Host::Tcp(host)) => f.write_str(host)?,
            Some(Host::Unix(path)) => write!(f, "{}", path.display())?,
            None => f.write_str("localhost")?,
        }
        write!(f, ":{}/{}", self.0.get_ports().first().unwrap_or(&5432), self.0.get_dbname().unwrap_or_default())
    }
}

/// What the check of a recorded history came to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Transactions in the history.
    pub transactions: usize,
    /// Of these, those whose commit was acknowledged.
    pub committed: usize,
    /// Of these, those whose outcome nobody told.
    pub unknown: usize,
    /// Everything that cannot have happened at the level asked for.
    pub anomalies: Vec<Anomaly>,
}

/// What came out of a load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PostgresFinished {
    /// Latencies, counts, connections.
    #[serde(flatten)]
    pub finished: Finished,
    /// Transactions that were tried again after a serialization failure or a deadlock.
    pub retries: u64,
    /// Of a checked workload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

impl PostgresFinished {
    /// Whether everything was answered rightly on connections that stayed open, and no anomaly was found.
    pub fn is_clean(&self) -> bool {
        self.finished.is_clean() && self.verdict.as_ref().is_none_or(|verdict| verdict.anomalies.is_empty())
    }
}

/// Makes the workload's tables anew and fills them.
///
/// # Errors
/// The plan contradicts itself, or the server refused.
pub fn prepare(plan: &PostgresPlan) -> Result<()> {
    let config = plan.check()?;
    let statements = match &plan.work {
        Work::Ordering { items } => ordering::tables(*items),
        Work::Checked { rows, .. } => checked::tables(*rows),
    };
    let target = Place(&config).to_string();
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

/// A load that runs in a thread of its own. Dropping it stops the load without waiting for it.
#[derive(Debug)]
pub struct PostgresLoad {
    counters: Arc<Counters>,
    thread: Option<JoinHandle<Result<PostgresFinished>>>,
}

impl PostgresLoad {
    /// Checks the plan and connects all clients. When this returns, transactions are becoming due.
    ///
    /// # Errors
    /// The plan contradicts itself, a file cannot be created, or the server cannot be reached.
    pub fn start(plan: PostgresPlan) -> Result<PostgresLoad> {
        let config = plan.check()?;
        let counters = Arc::new(Counters::default());
        let (ready, started) = sync_channel(1);
        let for_thread = Arc::clone(&counters);
        let thread = std::thread::Builder::new()
            .name("load".into())
            .spawn(move || run(plan, config, for_thread, ready))
            .map_err(|source| Error::System { call: "clone", source })?;
        let load = PostgresLoad { counters, thread: Some(thread) };
        match started.recv() {
            Ok(_) => Ok(load),
            Err(_) => match load.wait() {
                Ok(_) => Err(Error::Panicked("it ended before it began".into())),
                Err(error) => Err(error),
            },
        }
    }

    /// The live counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether it has ended by itself.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Lets nothing more become due; what is under way is still waited for.
    pub fn stop(&self) {
        self.counters.stop();
    }

    /// Waits for the end, and for the check of the history.
    ///
    /// # Errors
    /// What was under way could not be recorded, or the last look at checked data failed.
    pub fn wait(mut self) -> Result<PostgresFinished> {
        let thread = self.thread.take().ok_or_else(|| Error::Panicked("it has been waited for before".into()))?;
        thread.join().unwrap_or_else(|_| Err(Error::Panicked("see its message above".into())))
    }
}

impl Drop for PostgresLoad {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop();
        }
    }
}

fn run(
    plan: PostgresPlan,
    config: Config,
    counters: Arc<Counters>,
    ready: SyncSender<Header>,
) -> Result<PostgresFinished> {
    let tasks = tokio::task::LocalSet::new();
    runtime()?.block_on(tasks.run_until(clients::drive(plan, config, counters, ready)))
}
