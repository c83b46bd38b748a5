//! Trials of `stillpoint migrate`: whole migrations with the real binary under load, while a part is killed, cut off or
//! full.
//!
//! A [`Stage`] holds two servers, each behind a network that can be cut, and the proxy. A [`Trial`] is one move of the
//! database, there or back, with clients that record their writes and reads, and a [`Fault`] at some moment of it.
//!
//! A trial that does not panic guarantees: every acknowledged commit is on the side in service exactly once, and no
//! other commit is there; the database can still be moved.
//!
//! The caller must be root on Debian with `postgresql-15` (as for `stillpoint_testing::postgresql`). The binary is
//! `$STILLPOINT_BIN`; without that variable it is built. A failing trial panics with all that was printed, and with its
//! seed.
#![forbid(unsafe_code)]

mod fault;
pub mod recording;
pub mod ring_session;
mod testbed;
mod trial;

pub use fault::{Fault, Moment};
pub use stillpoint_testing::binary::stillpoint;
pub use stillpoint_testing::random::{self, Random};
pub use stillpoint_testing::soak::{is_soak, rounds};
pub use testbed::{CommandResult, Proxy, Testbed, Tool};
pub use trial::{LEVELS, Trial};
