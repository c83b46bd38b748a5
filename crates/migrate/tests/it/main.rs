//! Whole migrations with the binary, and tests of each crate in the folder of its name.
//!
//! Each module runs as a process of its own; in a folder each of its modules does: `cargo test -p
//! stillpoint-migrate-tests --test it faults::`.

mod capture;
mod engine;
mod proxy;
mod wire;

mod backlog;
mod behind;
mod bypass;
mod carried;
mod earlier_version;
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
