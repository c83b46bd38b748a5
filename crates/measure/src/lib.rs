//! Watches a service from its clients' side: load, record, report.
pub mod blackout;
pub mod clock;
pub mod error;
pub mod load;
pub mod record;
pub mod summary;

pub use error::{Error, Result};
