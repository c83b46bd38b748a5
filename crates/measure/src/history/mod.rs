//! History of the clients of a database, and a check that a database with correct isolation can have answered so. Pure.
//!
//! ```text
//! clients ---> History (JSON lines) ---> check(level) ---> anomalies, each with the transactions that prove it
//! ```
//!
//! Three kinds of data are checked, because each finds what the others cannot:
//!
//! | data | a transaction | what is inferred |
//! |---|---|---|
//! | append lists | appends numbers used once to lists, reads whole lists | the order of all writers, hence dependencies between transactions |
//! | counters | adds one and gets the new value | every acknowledged commit happened once, and no value was given twice |
//! | transfers | moves an amount between accounts; others read all accounts | no read and no end state has another sum |
//!
//! **Guaranteed:** a reported anomaly cannot occur at the requested level (a transaction of unknown outcome counts only as far as another
//! transaction or the end shows it). **It does not** find anomalies that clients had no chance to see: their absence is no proof.
//!
//! Snapshot isolation allows a cycle of dependencies only where two read-write dependencies follow each other (Fekete et al., TODS 2005);
//! the inference of dependencies from lists is the idea of Elle (Kingsbury and Alvaro, VLDB 2020).

mod cycles;
mod invariants;
mod list_append;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Operation of a transaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Appended a number, used once in the whole history, to a list.
    Append {
        /// Number of the list.
        list: u64,
        /// The number.
        value: u64,
    },
    /// Read a list.
    ReadList {
        /// Number of the list.
        list: u64,
        /// All its numbers.
        values: Vec<u64>,
    },
    /// Added one to a counter.
    Increment {
        /// Number of the counter.
        counter: u64,
        /// New value of the counter.
        became: i64,
    },
    /// Moved an amount between two accounts.
    Transfer {
        /// Number of the account that the amount was taken from.
        from: u64,
        /// Number of the account that it was added to.
        to: u64,
        /// Amount, in units of the workload.
        amount: i64,
    },
    /// Read all accounts.
    ReadSum {
        /// Sum of all accounts.
        sum: i64,
    },
}

/// Outcome of a transaction, as far as the client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The commit was acknowledged.
    Committed,
    /// It failed, and the server reported so.
    Aborted,
    /// The connection ended while the commit was under way.
    Unknown,
}

/// Transaction of one client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transaction {
    /// Number of the client.
    pub client: u32,
    /// Time at which its first statement was sent (`CLOCK_MONOTONIC`), in nanoseconds.
    pub began_ns: u64,
    /// Time at which its outcome was known (`CLOCK_MONOTONIC`), in nanoseconds.
    pub ended_ns: u64,
    /// Outcome.
    pub outcome: Outcome,
    /// Operations, in order.
    pub operations: Vec<Operation>,
}

/// Contents of the database when all clients are done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Final {
    /// Numbers of every list.
    pub lists: BTreeMap<u64, Vec<u64>>,
    /// Value of every counter.
    pub counters: BTreeMap<u64, i64>,
    /// Balance of every account.
    pub accounts: BTreeMap<u64, i64>,
}

/// Transactions, with the contents before and after them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    /// All transactions, in any order.
    pub transactions: Vec<Transaction>,
    /// Accounts before the first transaction; lists are empty and counters zero.
    pub accounts: BTreeMap<u64, i64>,
    /// Contents at the end, if they could be read.
    pub last: Option<Final>,
}

/// Isolation that the database promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// No write is lost, nothing uncommitted is read.
    ReadCommitted,
    /// Each transaction reads one state that holds all that was committed before it began.
    Snapshot,
    /// Snapshot, and some serial order explains everything.
    Serializable,
}

/// Kind of anomaly, impossible at the level that the database promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnomalyKind {
    /// A committed write is missing at the end, or is there twice.
    LostOrDoubledWrite,
    /// Only a part of a transaction is there.
    TornTransaction,
    /// Two reads of a list show orders that exclude each other.
    IncompatibleOrder,
    /// A value of an aborted transaction was read (G1a).
    AbortedRead,
    /// An unfinished value of another transaction was read (G1b).
    IntermediateRead,
    /// A transaction did not see its own writes, or saw a list change during its run.
    Internal,
    /// A cycle of overwrites (G0).
    DirtyWrite,
    /// A cycle of overwrites and reads of written values (G1c).
    CircularInformation,
    /// Two transactions read the same state of a list, and both appended to it.
    LostUpdate,
    /// A cycle with one read of an older state (G-single, read skew).
    ReadSkew,
    /// A cycle with several reads of older states, no two of them in sequence (G-SI).
    SnapshotCycle,
    /// A transaction did not see a commit from before it began, or saw one that began after it.
    StaleRead,
    /// A cycle with reads of older states in sequence: snapshot isolation allows it, SERIALIZABLE does not (G2).
    WriteSkew,
    /// A counter gave one value twice, or lost an acknowledged increment.
    WrongCount,
    /// A sum that must not change did.
    WrongSum,
}

/// Result that is impossible.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Anomaly {
    /// Kind of the anomaly.
    pub kind: AnomalyKind,
    /// Indices of the transactions that prove it.
    pub transactions: Vec<usize>,
    /// Explanation in words.
    pub text: String,
}

impl Anomaly {
    fn new(kind: AnomalyKind, transactions: impl Into<Vec<usize>>, text: String) -> Anomaly {
        Anomaly { kind, transactions: transactions.into(), text }
    }
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {} (transactions", self.kind, self.text)?;
        self.transactions.iter().try_for_each(|number| write!(f, " {number}"))?;
        f.write_str(")")
    }
}

/// Returns every anomaly in a history that the level forbids.
pub fn check(history: &History, level: Level) -> Vec<Anomaly> {
    let mut anomalies = invariants::counters(history);
    anomalies.extend(invariants::transfers(history, level));
    let (inferred, found) = list_append::infer(history, level);
    anomalies.extend(found);
    anomalies.extend(cycles::find(history, &inferred, level));
    anomalies.sort_by_key(|anomaly| anomaly.kind);
    anomalies
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Accounts(BTreeMap<u64, i64>),
    Transaction(Transaction),
    Final(Final),
}

impl History {
    /// Formats one JSON object per line: contents before, each transaction, contents after.
    pub fn to_lines(&self) -> String {
        let mut lines = vec![Line::Accounts(self.accounts.clone())];
        lines.extend(self.transactions.iter().cloned().map(Line::Transaction));
        lines.extend(self.last.clone().map(Line::Final));
        let text = lines.iter().map(|line| serde_json::to_string(line).expect("maps with numbers for keys are JSON"));
        text.map(|line| line + "\n").collect()
    }

    /// Parses the output of [`History::to_lines`].
    ///
    /// # Errors
    /// Number and problem of the first wrong line.
    pub fn from_lines(text: &str) -> Result<History, String> {
        let mut history = History::default();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            match serde_json::from_str(line).map_err(|error| format!("line {}: {error}", number + 1))? {
                Line::Accounts(accounts) => history.accounts = accounts,
                Line::Transaction(transaction) => history.transactions.push(transaction),
                Line::Final(last) => history.last = Some(last),
            }
        }
        Ok(history)
    }
}

#[cfg(test)]
mod tests;
