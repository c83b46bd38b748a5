//! Real PostgreSQL clusters for the tests of `stillpoint migrate`: one call starts a server of Debian on a port and in
//! a directory of its own; a drop ends the server and removes the directory. A [`Relay`] is a network that can be cut,
//! a [`SmallDisk`] a disk that becomes full.
//!
//! The caller must run as root (the server runs as `postgres`) and have `postgresql-15` installed (`setup/` lists it);
//! if not, [`available`] reports so, and with `REQUIRE_ALL=1` the test fails instead of being skipped.
//!
//! Guarantees: nothing of the machine's own clusters is touched; the kernel ends a server whose test thread dies; every
//! wait is for a condition and names it when its limit passes. A failing helper panics with the server's log.
//!
//! What it does not do: it measures nothing, and it does not depend on the product. It is only for
//! `[dev-dependencies]`.
//!
//! ```no_run
//! # use stillpoint_testing::postgresql::{Cluster, available};
//! if !available() { return }
//! let source = Cluster::start(&["wal_level=logical"]);
//! source.sql("postgres", "CREATE DATABASE shop");
//! source.pgbench("shop", &["-i", "-s", "1", "-q"]);
//! let mut load = source.pgbench_load("shop", source.port(), &["-c", "4", "-T", "60"]);
//! // ... migrate ...
//! let outcome = load.finish();
//! assert_eq!(outcome.failed, 0, "{}", outcome.text);
//! ```

mod cluster;
mod disk;
mod load;
mod program;
mod regress;
mod relay;
mod template;

pub use cluster::Cluster;
pub use disk::SmallDisk;
pub use load::{Load, LoadOutcome};
pub use program::{NEWER_MAJOR, Programs, available, newer_available};
pub use regress::Regression;
pub use relay::Relay;
