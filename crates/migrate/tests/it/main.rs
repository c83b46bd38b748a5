//! Whole migrations with the binary.
//!
//! Each module runs as a process of its own: `cargo test -p stillpoint-migrate-tests --test it faults::`.

mod backlog;
mod behind;
mod bypass;
mod carried;
mod faults;
mod guardian;
mod levels;
mod modes;
mod secrets;
mod standby;
mod targets;
mod tpcc;
mod troubles;
mod versions;
