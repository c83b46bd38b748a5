//! Moves a PostgreSQL database to another server while it is in use.
#![forbid(unsafe_code)]

mod back;
mod check;
mod checksum;
mod copy;
mod definitions;
mod error;
mod fault;
mod fence;
mod follow;
mod front;
mod inventory;
mod journal;
mod link;
mod options;
mod outfit;
mod pgoutput;
mod progress;
mod run;
mod server;
mod switch;
mod throttle;
mod undo;

pub use back::{fallback, finish};
pub use check::{Accepted, Finding, Report, Verdict, check};
pub use checksum::Compared;
pub use error::Error;
pub use fault::FaultPoint;
pub use journal::{Phase, Record};
pub use options::{Failure, Options, State};
pub use progress::Observer;
pub use run::{Outcome, run};
pub use server::Server;
pub use undo::{Status, abort, status};

/// What our connections call themselves, so that both servers can tell them from clients.
pub(crate) const APPLICATION: &str = "stillpoint migrate";
