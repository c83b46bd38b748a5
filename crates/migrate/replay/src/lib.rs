//! Orders replay: takes syncsets, and returns which transaction of the source a player may replay on the target now.
//!
//! **The caller must**
//! - stamp transactions so that of two that wrote the same row or value, the earlier writer has the lower stamp: one counter
//!   taken when COMMIT is *sent* and every earlier reply has arrived, or the LSN of the commit;
//! - give each transaction a token for everything it touched ([`Token`]), and make replayed writes blind: they depend on
//!   captured values alone ([`Mode::Rows`]);
//! - in the modes that replay statements, report when a transaction of the source begins, its snapshot, and when it ends, and
//!   pass only deterministic statements under REPEATABLE READ or SERIALIZABLE;
//! - send the operations of one player on one connection, in the order in which the player got them, and report each
//!   ([`Scheduler::done`]; a first read that other transactions may wait for is reported before the rest,
//!   [`Operation::awaited`]); a batch of several whole transactions goes out under one Sync, so that the server does not
//!   execute what follows a failure.
//!
//! **Guaranteed**, in every order in which players ask and report:
//!
//! ```text
//! rows       stamp_i < stamp_j and tokens conflict   =>  c_i completes before the first write of j is sent
//! lsir (1-a) c_i < r_j on the source                 =>  c_i completes before r_j is sent
//!      (1-b) r_j < c_i on the source, i and j differ =>  r_j completes before c_i is sent
//!      (2)   writes of one transaction keep their order, and those whose tokens conflict the order of `rows`
//! b-con      as lsir, and one commit at a time in the source's order
//! b-min      one transaction at a time in the order of stamps (b-all: with all its reads)
//! ```
//!
//! Nothing else has to wait. Some player can always make progress ([`Scheduler::is_starved`] returns true when one more player
//! is needed). A failed transaction is retried when all lower stamps are done, and then once more alone. An error leaves the
//! scheduler unchanged, except for the two that end a replay: [`Error::GivenUp`] and [`Error::SnapshotGone`].
//!
//! **It does not** know rows, SQL or connections. It cannot make the serial modes correct for statements that read rows they do
//! not write, or that find no row to write (the caller leaves the latter out; the command tag shows them): no serial order
//! equals a history with write skew. `lsir` is correct for them, and `rows` has no such statements. Under `lsir`, a player that
//! fails after a commit which its transaction did not see cannot repeat its first read.
//!
//! Path of a syncset (modes that hand out whole transactions):
//!
//! ```text
//!   push            close                 tokens granted        next           done
//! ------> unordered ------> blocked ---------------------> ready ----> given ------> gone
//!                             |  waits only for what one player has      ^  | failed
//!                             +------------------------------------------+  v
//!                                    (on that player)         ready <--- held: all lower stamps done
//! ```
//!
//! An example:
//!
//! ```
//! use stillpoint_migrate_replay::{Limits, Mode, Player, Scheduler, Stamp, Step, Syncset, Token};
//!
//! let syncset = |stamp, key, payload| Syncset {
//!     stamp: Stamp(stamp),
//!     tokens: vec![Token::Row(16_384, key)],
//!     statement: None,
//!     bytes: 100,
//!     payload,
//! };
//! let mut scheduler = Scheduler::new(Mode::Rows, 2, Limits::default());
//! scheduler.push_next(syncset(1, 7, "a := 1"))?;
//! scheduler.push_next(syncset(2, 7, "a := 2"))?;
//! scheduler.push_next(syncset(3, 8, "b := 1"))?;
//!
//! let (first, second) = (Player(0), Player(1));
//! assert_eq!(scheduler.next(first)?.map(|given| given.stamp), Some(Stamp(1)));
//! assert_eq!(scheduler.next(second)?.map(|given| given.stamp), Some(Stamp(3))); // 2 waits for 1
//! assert_eq!(scheduler.next(first)?.map(|given| given.stamp), Some(Stamp(2))); // but not behind 1
//! scheduler.done(second)?;
//! scheduler.done(first)?;
//! scheduler.done(first)?;
//! assert!(scheduler.is_drained());
//! assert_eq!(scheduler.progress().applied, Stamp(3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Follows sections 3 and 4 and Appendix C of "Madeus: Database Live Migration Middleware under Heavy Workloads for Cloud
//! Environment" (SIGMOD 2015). Two things differ: the order comes from visibility instead of a critical region, and tokens are
//! added where the paper's rule alone loses updates on real PostgreSQL.
#![forbid(unsafe_code)]

mod error;
mod gates;
mod locks;
pub mod mapping;
mod rules;
mod scheduler;
mod syncset;
mod token;
mod visibility;

#[cfg(test)]
mod tests;

pub use error::{Error, Refused};
pub use scheduler::{Done, Limits, Progress, Retry, Scheduler};
pub use syncset::{Mode, Operation, Part, Player, RunningId, Stamp, Statement, Step, Syncset, SyncsetId};
pub use token::Token;
pub use visibility::{Snapshot, Xid};
