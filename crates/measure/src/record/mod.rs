//! The record file: every request of a run, about eight bytes each.
//!
//! ```text
//! file   = magic "stpl-rec" , version u16 , header block , { block } , [ end block ]
//! block  = kind u8 , length u32 , crc32 u32 (of kind, length and payload) , payload (length bytes)
//!   header  (1)  JSON, see Header
//!   samples (2)  base u64 (scheduled time before the first) , count u32 , { sample }
//!   mark    (3)  JSON, see Mark
//!   end     (4)  JSON, see End: the run ended in order
//! sample = tag u8 (kind << 3 | outcome) , zigzag varint (scheduled - previous scheduled, ns)
//!          , varint latency ns , varint lateness us , varint connection
//! ```
//! All numbers are little-endian. Samples stand in the order in which the answers came, so the scheduled time may
//! step back; every samples block can be read by itself. What a crash leaves is a cut-off or zero-filled last
//! block: the reader ends there and says so. Any other damage is an error that names the offset.
//!
//! Encoder and decoder are pure; [`Reader`] and [`Writer`] move their blocks through `std::io`.

mod codec;
mod file;

pub use codec::{
    BLOCK_PAYLOAD_MAX, Block, BlockHead, Damage, MAGIC, SampleEncoder, VERSION, decode_block, decode_head,
};
pub use file::{Item, Reader, Record, Writer};

use serde::{Deserialize, Serialize};

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Answered, and the answer is the right one.
    Ok,
    /// Answered with an error.
    ErrorReply,
    /// Answered with something else than what was stored, or in a form that the protocol does not know.
    WrongAnswer,
    /// Not answered in time.
    Timeout,
    /// The connection ended before the answer came.
    Lost,
}

impl Outcome {
    /// All outcomes, in the order of their codes.
    pub const ALL: [Outcome; 5] =
        [Outcome::Ok, Outcome::ErrorReply, Outcome::WrongAnswer, Outcome::Timeout, Outcome::Lost];

    fn code(self) -> u8 {
        self as u8
    }

    fn from_code(code: u8) -> Option<Outcome> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// When the schedule wanted it to be sent.
    pub scheduled_ns: u64,
    /// From `scheduled_ns` to the last byte of the answer (or to the moment it was given up).
    pub latency_ns: u64,
    /// By how much the client itself was late: from `scheduled_ns`, or from the moment when a connection had room for
    /// it again, to its being handed to the kernel.
    pub late_us: u32,
    /// Number of the connection.
    pub connection: u32,
    /// Index into [`Header::kinds`]; below [`KINDS_MAX`].
    pub kind: u8,
    /// How it ended.
    pub outcome: Outcome,
}

impl Sample {
    /// When the answer was complete.
    pub fn ended_ns(&self) -> u64 {
        self.scheduled_ns.saturating_add(self.latency_ns)
    }
}

/// Most kinds of requests that one record may tell apart.
pub const KINDS_MAX: usize = 32;

/// What was run; the first block of a record.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Protocol spoken: `redis`, `memcached`, `tcp`, `http`.
    pub protocol: String,
    /// Where the load went.
    pub target: String,
    /// `CLOCK_MONOTONIC` at the start of the schedule.
    pub started_ns: u64,
    /// Seconds since 1970 at the same moment, for the reader's eye only.
    pub started_unix_s: u64,
    /// Names of the kinds of requests; a sample refers to them by index.
    pub kinds: Vec<String>,
    /// Requests a second that the schedule wanted.
    pub rate: f64,
    /// `constant` or `poisson`.
    pub arrivals: String,
    /// Connections that carried requests.
    pub connections: u32,
    /// Connections that were only kept open.
    pub idle: u32,
    /// Connections blocked in a pop.
    pub blocking: u32,
    /// Most requests under way on one connection.
    pub pipeline: u32,
    /// Keys in the key space.
    pub keys: u64,
    /// Bytes of a value.
    pub value_bytes: u32,
}

/// Something that happened to a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// When.
    pub t_ns: u64,
    /// Number of the connection.
    pub connection: u32,
    /// What.
    pub what: MarkKind,
    /// In words.
    pub text: String,
}

/// What a [`Mark`] tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MarkKind {
    /// An open connection ended although the client did not end it.
    Dropped,
    /// A connection was opened again after it had been dropped.
    Reconnected,
    /// The first requests that were answered with an error or wrongly.
    Complaint,
}

/// What only the end of a run can tell; the last block of a record that is whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// `CLOCK_MONOTONIC` when the last answer was in.
    pub ended_ns: u64,
    /// Connections that ended although the client did not end them.
    pub dropped: u64,
    /// Attempts to open a dropped connection again that failed.
    pub reconnect_failures: u64,
    /// Idle connections that answered a PING at the end.
    pub idle_alive: u32,
    /// Blocked connections that got a last element at the end.
    pub blocking_alive: u32,
}
