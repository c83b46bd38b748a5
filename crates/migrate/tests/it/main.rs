//! Whole migrations with the binary, and tests of each crate in the folder of its name.
//!
//! Each module runs as a process of its own; in a folder each of its modules does: `cargo test -p
//! stillpoint-migrate-tests --test it faults::`.

mod capture;
mod engine;
mod proxy;
mod wire;

mod backlog;
mod bypass;
mod cleanup_faults;
mod earlier_version;
mod faults;
mod guardian;
mod hold;
mod hosted_servers;
mod isolation_levels;
mod lasting_faults;
mod live_page;
mod mirror;
mod part_of_database;
mod replay_modes;
mod secrets;
mod session_state;
mod several_databases;
mod standby;
mod targets;
mod tpcc;
mod versions;
