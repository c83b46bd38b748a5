//! Phase and outcome records: what an engine did, when, to whom. Data only.
//!
//! Every engine reports through [`Event`]; `stillpoint --json` prints one per line, and `stillpoint measure`
//! merges them with the clients' latencies. All times are `CLOCK_MONOTONIC` nanoseconds of the machine that
//! ran the engine, so records of one machine share one clock without any translation.
//!
//! The caller takes `t_ns` from that clock. Guarantees: what this version writes, it reads; adding a field or an event
//! kind is compatible, changing the meaning of one raises [`VERSION`]. The crate decides nothing and performs no I/O.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// Version of the event records, printed as `"v"` in every JSON line.
pub const VERSION: u32 = 1;

/// One thing that happened, on the engine's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Version of the record, [`VERSION`].
    pub v: u32,
    /// `CLOCK_MONOTONIC` in nanoseconds at the end of what is reported.
    pub t_ns: u64,
    /// Process concerned, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Which of several targets of a migration is concerned, from the second on. What happened may name a target as well.
    #[serde(default, rename = "target_number", skip_serializing_if = "Option::is_none")]
    pub target: Option<u32>,
    /// What happened.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// What an [`Event`] tells. The tag is `"event"` in JSON.
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
        /// How long it took.
        duration_ns: u64,
    },
    /// A thread was stopped and let go again.
    ThreadStopped {
        /// The thread.
        tid: i32,
        /// Why: `probe`, `freeze`, `carrier`, `signal`.
        reason: String,
        /// From the thread being observed stopped to its being let go.
        stopped_ns: u64,
    },
    /// A thread runs the new generation from now on.
    ThreadMigrated {
        /// The thread.
        tid: i32,
        /// Number of the transition it migrated to.
        transition: u32,
    },
    /// A thread could not be migrated yet.
    ThreadBusy {
        /// The thread.
        tid: i32,
        /// Function found on its stack.
        function: String,
    },
    /// Every thread runs the new generation and the entries are direct jumps.
    Committed {
        /// Number of the transition.
        transition: u32,
        /// Patches active from now on, oldest first; empty for the code as shipped.
        active: Vec<String>,
        /// From the start of the transition to here.
        duration_ns: u64,
        /// Threads migrated.
        threads: u32,
    },
    /// The transition was abandoned and every thread is back on the old side.
    FellBack {
        /// Number of the transition.
        transition: u32,
        /// Why.
        reason: String,
    },
    /// Rows of a database are being copied.
    Copying {
        /// Copied so far.
        bytes: u64,
        /// Size of the tables on the source; what is copied may come to less or more.
        bytes_total: u64,
        /// Copied in a second, now.
        bytes_per_s: u64,
        /// How many seconds the rest takes, as fast as it went of late; none before anything has been measured.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        estimate_s: Option<u64>,
    },
    /// A migration goes slower, or faster again, for the sake of clients.
    Throttled {
        /// Of their usual throughput clients keep so much.
        kept_percent: u64,
        /// What may be moved in a second from now on: bytes while rows are copied, transactions while it catches up.
        allowed_per_s: u64,
    },
    /// A migration makes indexes with less, or more, of a processor, for the sake of clients on the same machine.
    Yielding {
        /// Of their usual throughput clients keep so much.
        kept_percent: u64,
        /// What a process that makes them gets beside another one that works all the time, in hundredths of that.
        weight_percent: u64,
    },
    /// The target of a migration repeats what commits on the source.
    Following {
        /// From a commit on the source to its being repeated.
        lag_ms: u64,
        /// Log of the source that is not repeated yet.
        lag_bytes: u64,
        /// Transactions repeated in a second.
        tps: u64,
        /// When it will have caught up, at this rate.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        estimate_s: Option<u64>,
    },
    /// Both sides of a migration were compared at one moment, and hold the same.
    Compared {
        /// Tables.
        tables: u64,
        /// Rows.
        rows: u64,
    },
    /// One of several targets of a migration failed before clients were sent anywhere: it goes on without it.
    TargetDropped {
        /// Which server.
        target: String,
        /// Why.
        reason: String,
    },
    /// Clients are on the other side.
    SwitchedOver {
        /// From the pause of clients to their going on.
        paused_us: u64,
        /// Of it: until the last transaction had ended.
        drained_us: u64,
        /// Sessions that went over.
        sessions: u64,
    },
    /// The operation had nothing to do.
    AlreadyThere {
        /// What is so already.
        what: String,
    },
    /// Something the operator should know.
    Warning {
        /// The text.
        text: String,
    },
}

impl Event {
    /// An event of this version.
    pub fn new(t_ns: u64, pid: Option<i32>, kind: EventKind) -> Self {
        Event { v: VERSION, t_ns, pid, target: None, kind }
    }
}
