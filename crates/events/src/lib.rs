//! Records of phases and outcomes: actions of an engine, their times and the processes concerned. Data only.
//!
//! Every engine reports through [`Event`]; `stillpoint --json` prints one per line, and `stillpoint measure` merges them with the clients'
//! latencies. All times are `CLOCK_MONOTONIC` nanoseconds of the machine that ran the engine, so records of one machine share one clock
//! without any translation.
//!
//! The caller takes `t_ns` from that clock. Guarantees: what this version writes, it reads; adding a field or an event kind is compatible,
//! changing the meaning of one raises [`VERSION`]. The crate decides nothing and performs no I/O.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// Version of the event records, printed as `"v"` in every JSON line.
pub const VERSION: u32 = 1;

/// One event, timed by the engine's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Version of the record, [`VERSION`].
    pub v: u32,
    /// `CLOCK_MONOTONIC` in nanoseconds at the end of the reported action.
    pub t_ns: u64,
    /// Number of the process concerned, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Number of the target concerned, for the second and later targets of a migration. The event's kind may name a target as well.
    #[serde(default, rename = "target_number", skip_serializing_if = "Option::is_none")]
    pub target: Option<u32>,
    /// Kind of the event, with its data.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// Kind of an [`Event`], with its data. The tag is `"event"` in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EventKind {
    /// A phase of an operation begins (`check`, `inject`, `arm`, `migrate`, `commit`, ...).
    PhaseStarted {
        /// Operation that the phase belongs to: `apply`, `revert`, `abort`, `check`.
        operation: String,
        /// Name of the phase.
        phase: String,
    },
    /// The phase ended.
    PhaseEnded {
        /// Operation that the phase belongs to.
        operation: String,
        /// Name of the phase.
        phase: String,
        /// Duration, in nanoseconds.
        duration_ns: u64,
    },
    /// A thread was stopped and then continued.
    ThreadStopped {
        /// Number of the thread.
        tid: i32,
        /// Reason: `probe`, `freeze`, `carrier`, `signal`.
        reason: String,
        /// Nanoseconds from the moment the thread was seen stopped until it was continued.
        stopped_ns: u64,
    },
    /// A thread runs the new generation from now on.
    ThreadMigrated {
        /// Number of the thread.
        tid: i32,
        /// Number of the transition it migrated to.
        transition: u32,
    },
    /// A thread could not be migrated yet.
    ThreadBusy {
        /// Number of the thread.
        tid: i32,
        /// Function found on its stack.
        function: String,
    },
    /// Every thread runs the new generation and the entries are direct jumps.
    Committed {
        /// Number of the transition.
        transition: u32,
        /// Patches active from now on, oldest first; empty for the original code.
        active: Vec<String>,
        /// Nanoseconds from the start of the transition to the commit.
        duration_ns: u64,
        /// Number of threads that migrated.
        threads: u32,
    },
    /// The transition was abandoned and every thread runs the old generation again.
    FellBack {
        /// Number of the transition.
        transition: u32,
        /// Reason.
        reason: String,
    },
    /// Rows of a database are being copied.
    Copying {
        /// Bytes copied so far.
        bytes: u64,
        /// Size of the tables on the source in bytes; the copy may need less or more.
        bytes_total: u64,
        /// Current rate in bytes a second.
        bytes_per_s: u64,
        /// Estimated seconds for the rest, at the recent rate; absent before the first measurement.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        estimate_s: Option<u64>,
    },
    /// A migration slows down, or speeds up again, to protect the throughput of clients.
    Throttled {
        /// Share of their usual throughput that clients still have.
        kept_percent: u64,
        /// Limit per second from now on: bytes while rows are copied, transactions while the target catches up.
        allowed_per_s: u64,
    },
    /// A migration builds indexes with less, or more, processor time, to protect clients on the same machine.
    Yielding {
        /// Share of their usual throughput that clients still have.
        kept_percent: u64,
        /// Processor weight of a process that builds indexes, in percent of the weight of another busy process.
        weight_percent: u64,
    },
    /// The target of a migration repeats the transactions that commit on the source.
    Following {
        /// Milliseconds from a commit on the source to its repetition on the target.
        lag_ms: u64,
        /// Bytes of the source's log that are not repeated yet.
        lag_bytes: u64,
        /// Transactions repeated per second.
        tps: u64,
        /// Estimated seconds until the target has caught up, at this rate.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        estimate_s: Option<u64>,
    },
    /// Both sides of a migration were compared at one moment and are equal.
    Compared {
        /// Number of compared tables.
        tables: u64,
        /// Rows compared.
        rows: u64,
    },
    /// One of several targets of a migration failed before the switch of clients: the migration continues without it.
    TargetDropped {
        /// Server that failed.
        target: String,
        /// Reason.
        reason: String,
    },
    /// Clients are connected to the other side.
    SwitchedOver {
        /// Microseconds for which clients were paused.
        paused_us: u64,
        /// Part of that pause: until the last transaction had ended.
        drained_us: u64,
        /// Number of moved sessions.
        sessions: u64,
    },
    /// The operation had nothing to do: the requested state was there already.
    AlreadyThere {
        /// State that was there already.
        what: String,
    },
    /// Warning for the operator.
    Warning {
        /// The text.
        text: String,
    },
}

impl Event {
    /// Makes an event of this version.
    pub fn new(t_ns: u64, pid: Option<i32>, kind: EventKind) -> Self {
        Event { v: VERSION, t_ns, pid, target: None, kind }
    }
}
