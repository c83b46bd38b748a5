//! Puts live patches into running processes and takes them back, thread by thread, without ever endangering them.
mod arena;
mod calm;
mod debuggers;
mod error;
pub mod fleet;
mod image;
mod inject;
pub mod ledger;
pub mod link;
mod operate;
mod place;
mod plan;
mod prepare;
mod probe;
mod report;
mod resolve;
mod scan;
mod status;
mod store;
mod transition;
mod walk;
mod word;

pub use debuggers::{DebuggerFiles, debugger_files};
pub use error::{Busy, Error, Landing};
pub use operate::{Options, Outcome, Prediction, Quiescence, Which, apply, check, recover_only, revert};
pub use report::{Observer, now_ns};
pub use status::{EntryStatus, PatchStatus, Status, ThreadStatus, Unfinished, peek, status};
