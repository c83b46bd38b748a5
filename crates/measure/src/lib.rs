//! Measures a service from its clients' side: loads it, records every latency, and reports the clients' view before, during and after each
//! operation of an engine.
//!
//! ```text
//!   load  ---> server          stillpoint --json patch ...
//!    | every request               | events
//!    v                             v
//!  record (file) ------------> timeline ------> report.html, JSON
//!                  one clock: CLOCK_MONOTONIC
//! ```
//!
//! **The caller must** run load and engine on one machine, between two boots (their times share one clock), and leave a core to the load
//! generator: its own lateness is recorded and shown, but not subtracted from the latencies.
//!
//! **Guaranteed:** latency counts from the due time of a request, so a pause of the server is never hidden by a client that waits. Every
//! request that was due ends in exactly one [`record::Outcome`]; answers are compared with the stored values, so a lost or wrong write is
//! found. A load changes only keys that begin with `sp:`. When the load generator is killed, its record is complete up to about a second
//! before. Reading a record or an event file fails only by an [`Error`].
//!
//! **It does not** take part in the operations that it measures: it knows engines only by their events.
//!
//! A load in the background of a test or a benchmark:
//!
//! ```no_run
//! use stillpoint_measure::load::{Load, Plan, Target};
//!
//! let plan = Plan { rate: 20_000.0, idle: 100, ..Plan::redis(Target::Tcp("127.0.0.1:6379".into())) };
//! let load = Load::start(plan)?;
//! // ... the operation to be measured ...
//! assert_eq!(load.counters().snapshot().counts.failed(), 0);
//! load.stop();
//! let finished = load.wait()?;
//! println!("p99.9 {} ns, blackout {} ns", finished.summary.latency.p999_ns, finished.summary.blackout.duration_ns);
//! # Ok::<(), stillpoint_measure::Error>(())
//! ```
//!
//! The plot of latencies coloured by code version follows Fig. 1 of "The Case for DBMS Live Patching"
//! (PVLDB 17, 2024).

#![forbid(unsafe_code)]

pub mod blackout;
pub mod clock;
pub mod compare;
pub mod error;
pub mod history;
pub mod load;
mod markup;
pub mod postgres;
pub mod record;
pub mod report;
pub mod summary;
pub mod timeline;

pub use error::{Error, Result};
