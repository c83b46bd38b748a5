//! Record file: every request of a run, about eight bytes each.
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
//! All numbers are little-endian. Samples are in the order of their answers, so the scheduled time may decrease; every samples block can be
//! read by itself. A crash leaves a truncated or zero-filled last block: the reader ends there and reports it. Any other damage is an error
//! that names the offset.
//!
//! Encoder and decoder are pure; [`Reader`] and [`Writer`] transfer their blocks through `std::io`.

mod codec;
mod file;

pub use codec::{
    BLOCK_PAYLOAD_MAX, Block, BlockHead, Damage, MAGIC, SampleEncoder, VERSION, decode_block, decode_head,
};
pub use file::{Item, Reader, Record, Writer};

use serde::{Deserialize, Serialize};

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Answered, and the answer is the right one.
    Ok,
    /// Answered with an error.
    ErrorReply,
    /// Answered with another value than the stored one, or in a form that the protocol does not have.
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
}

/// Request of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Time at which it was due (`CLOCK_MONOTONIC`), in nanoseconds.
    pub scheduled_ns: u64,
    /// Nanoseconds from `scheduled_ns` to the last byte of the answer (or to the time-out).
    pub latency_ns: u64,
    /// Lateness of the client itself: from `scheduled_ns`, or from the moment when a connection had room for it again, until the kernel got
    /// it, in microseconds.
    pub late_us: u32,
    /// Number of the connection.
    pub connection: u32,
    /// Index into [`Header::kinds`]; below [`KINDS_MAX`].
    pub kind: u8,
    /// Outcome.
    pub outcome: Outcome,
}

impl Sample {
    /// Returns the time at which the answer was complete.
    pub fn ended_ns(&self) -> u64 {
        self.scheduled_ns.saturating_add(self.latency_ns)
    }
}

/// Maximum number of kinds of requests in one record.
pub const KINDS_MAX: usize = 32;

/// Parameters of a run; the first block of a record.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Protocol spoken: `redis`, `memcached`, `tcp`, `http`.
    pub protocol: String,
    /// Address of the server.
    pub target: String,
    /// Start of the schedule (`CLOCK_MONOTONIC`), in nanoseconds.
    pub started_ns: u64,
    /// Seconds since 1970 at the same moment, for display only.
    pub started_unix_s: u64,
    /// Names of the kinds of requests; a sample refers to them by index.
    pub kinds: Vec<String>,
    /// Requests per second by the schedule.
    pub rate: f64,
    /// `constant` or `poisson`.
    pub arrivals: String,
    /// Number of connections that carried requests.
    pub connections: u32,
    /// Number of connections that were only kept open.
    pub idle: u32,
    /// Number of connections blocked in a pop.
    pub blocking: u32,
    /// Maximum number of requests in progress on one connection.
    pub pipeline: u32,
    /// Number of keys in the key space.
    pub keys: u64,
    /// Bytes of a value.
    pub value_bytes: u32,
}

/// Event of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Time (`CLOCK_MONOTONIC`), in nanoseconds.
    pub t_ns: u64,
    /// Number of the connection.
    pub connection: u32,
    /// Kind of the event.
    pub what: MarkKind,
    /// Description.
    pub text: String,
}

/// Kind of a [`Mark`].
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

/// Figures that only the end of a run knows; the last block of a complete record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Time of the last answer (`CLOCK_MONOTONIC`), in nanoseconds.
    pub ended_ns: u64,
    /// Number of connections that ended although the client did not end them.
    pub dropped: u64,
    /// Number of failed attempts to open a dropped connection again.
    pub reconnect_failures: u64,
    /// Number of idle connections that answered a PING at the end.
    pub idle_alive: u32,
    /// Number of blocked connections that got a last element at the end.
    pub blocking_alive: u32,
}
