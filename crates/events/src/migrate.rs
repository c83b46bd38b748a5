//! Events of `stillpoint migrate`: the copy, the replay and the switch of clients.

use serde::{Deserialize, Serialize};

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Kind of an event with its data. The tag is `"event"` in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
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
        /// Number of tables that are left out of the migration, and were not compared.
        #[serde(default, skip_serializing_if = "is_zero")]
        not_compared: u64,
    },
    /// Definitions of the source changed while a target follows; they are repeated there.
    Redefining {
        /// Changed objects by name.
        changes: Vec<String>,
    },
    /// The target has the changed definitions.
    Redefined {
        /// Number of its tables.
        tables: u64,
    },
    /// One of several targets of a migration failed before the switch of clients: the migration continues without it.
    TargetDropped {
        /// Server that failed.
        target: String,
        /// Reason.
        reason: String,
    },
    /// A slot of another reader was made on the target.
    SlotMade {
        /// Its name.
        slot: String,
        /// Position in the target's log at which it begins.
        position: String,
    },
    /// Settings of the source's server were written to the target's.
    SettingsWritten {
        /// Their names.
        names: Vec<String>,
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
}
