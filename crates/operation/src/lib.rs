//! Skeleton of every long operation of the three pillars.
//!
//! An operation is a list of [`Phase`]s. One driver ([`run`]) executes them in order, and undoes them in reverse if one fails; it
//! reports each as an event, and fails at a requested [`FaultPoint`]. The state that must survive the tool is in a [`JournalFile`]; the
//! [`Guardian`] is the process that acts on it when the tool is killed.
//!
//! The caller guarantees that an inverse accepts any part of its phase, done or not. The crate guarantees that a phase begins only after
//! its journal entry is on disk, that an error before the point of no return runs the inverse of every phase that was begun, last first,
//! and that nothing is undone after that point.
#![forbid(unsafe_code)]

mod error;
mod fault;
mod guardian;
mod journal;
mod phase;

pub use error::Error;
pub use fault::{Fault, FaultPoint, Faults, Side};
pub use guardian::{DISMISS, Guardian, Request, Requests};
pub use journal::{JournalFile, JournalLock};
pub use phase::{Failed, Operation, Phase, Step, Undo, advance, run, run_blocking, undo, undo_blocking};
