//! The daemon that fetches memory on demand, and its keeper.
//!
//! ```text
//!  restore --starts--> keeper ==one table of descriptors== server --pages--> restored processes
//!                        |  \--killed: server makes a new keeper
//!                        \--server killed: a new one goes on from the log
//! ```
//!
//! Threads that touch memory while no server is there wait. They never read zeros, as one of the two processes still
//! holds every userfaultfd. When pages cannot be fetched any more (the image is damaged), the processes are killed
//! before the last userfaultfd closes.

mod fill;
mod huge;
mod keeper;
mod prefetch;
mod rate_limit;
mod server;

pub(crate) use fill::read as read_fill;
pub use fill::{Fill, State};
pub(crate) use keeper::wait_for;
pub use keeper::{LazyOptions, serve};
pub use server::FetchCounts;
