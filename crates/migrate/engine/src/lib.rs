//! Moves a PostgreSQL database to another server while it is in use.
#![forbid(unsafe_code)]

mod check;
mod error;
mod fault;
mod inventory;
mod link;
mod pgoutput;
mod server;

pub use check::{Accepted, Finding, Report, Verdict, check};
pub use error::Error;
pub use fault::FaultPoint;
pub use server::Server;

/// What our connections call themselves, so that both servers can tell them from clients.
pub(crate) const APPLICATION: &str = "stillpoint migrate";
