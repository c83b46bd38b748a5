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
//!
//! The obvious way (of KUP) is to map the image privately. Such a mapping brings the old contents back after `MADV_DONTNEED`: redis crashed
//! after FLUSHALL. userfaultfd reports pages that are given up. Its events go to a log that server and keeper map, so a killed server loses
//! none.

mod fill;
mod huge;
mod keeper;
mod prefetch;
mod rate_limit;
mod server;

pub use fill::{FetchCounts, Fill, State};
pub(crate) use keeper::wait_for;
pub use keeper::{LazyOptions, serve};
