//! Moves a PostgreSQL database to another server while it is in use, clients and all.
//!
//! **The caller must** name both servers with roles that are superusers there; have the proxy
//! (`stillpoint-migrate-proxy`) in front, directly before the servers; call from a tokio runtime.
//!
//! **Guaranteed:** [`check`] changes nothing, and names everything that [`run`] would refuse. Until clients change sides
//! every failure, interruption and time-out leaves them on the source, and takes away what was put on either server: schema,
//! publications, slots, replica identities, the target's database; [`State`] says so, or what is left. From then on they
//! are on the target, and [`fallback`] brings them back with all that was committed since, until [`finish`]. A process
//! that is killed leaves a journal: the next [`run`] goes on from it, or [`abort`] takes everything away; where it left the
//! side that serves shut to new sessions, [`heal`], called by a process that outlives it, opens it at once. A committed
//! transaction is on the side in service exactly once: it is repeated with its stamp in the same transaction on the
//! target, and the source is told of it only when the target has flushed it. Where changes come from the log no snapshot is
//! held while rows are copied, but of tables for which it must be.
//!
//! Of several targets those that fail before clients are sent to one are dropped, and it goes on with the others
//! ([`Options::others`]).
//!
//! Where the source's log tells of no rows ([`Capture::Rows`]) the proxy captures what its clients' statements write. That
//! sees less: what gives no images of rows, and a session that bypasses the proxy, ends the migration by name, clients
//! unharmed; and a process that was killed is not gone on from, as the capture ends with it. Whoever asks for it
//! ([`Capture::Statements`]) has the statements themselves repeated, in one of the paper's schedules, where all of them can
//! be. The way back reads the target's log in any case.
//!
//! One command at a time is at work on a database: it holds the journal, and a lock on the source by which another command
//! is refused that was given another directory for its journal. Between two commands the source names the migration that has the
//! database, and no command works on it with another journal.
//!
//! **It does not** repeat definitions (whatever is defined on the source, or written to a large object, ends the migration by
//! name, clients unharmed), move large objects, or hold back clients whose load the target cannot follow: it tells of that.
//!
//! ```text
//!  Begun --> Snapshotted --> Copying --> Following --> Switching --> Switched --> (finish)
//!    |            |             |        ^   |            |  proxy      |
//!    |            |             |        |   |            |  decides    +--> Returning --+
//!    |            |             |        |   |            +--> Following                 |
//!    |            |             |        +---|-- after a crash: `run`                    |
//!    +------------+-------------+------------+-- undo ---------------------> Returned <--+
//!                                                                               |
//!                              clients stay on the source: what is left goes    +--> (gone)
//! ```
//!
//! An example:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use stillpoint_migrate_engine::{Options, Server, run};
//!
//! let source = Server::parse("source", "host=10.0.0.1 user=mover dbname=shop", None)?;
//! let target = Server::parse("target", "host=10.0.0.2 user=mover dbname=shop", None)?;
//! let options = Options::new(source, target, "/run/stillpoint/proxy.sock".into(), "/var/lib/stillpoint/migrate".into());
//! let outcome = run(&options, Arc::new(|event| println!("{:?}", event.kind))).await?;
//! println!("{outcome:?}");
//! # Ok(())
//! # }
//! ```
//!
//! Follows section 4.3 of "Madeus: Database Live Migration Middleware under Heavy Workloads for Cloud Environment" (SIGMOD
//! 2015); changes come from PostgreSQL's logical decoding, or as images of rows, so that any isolation level is sound, and as
//! statements, as there, only when asked for.
#![forbid(unsafe_code)]

mod attach;
mod back;
mod catalogs;
mod check;
mod checksum;
mod clients;
mod conninfo;
mod copy;
mod definitions;
mod error;
mod estimate;
mod fault;
mod fence;
mod follow;
mod front;
mod heal;
mod inventory;
mod journal;
mod light;
mod link;
mod options;
mod outfit;
mod owner;
mod pgoutput;
mod progress;
mod recording;
mod rehearsal;
mod roles;
mod run;
mod server;
mod settings;
mod several;
mod since;
mod surroundings;
mod switch;
mod throttle;
mod undo;
mod values;
mod weight;

pub use attach::{AttachOptions, Attached, DetachOptions, Detached, attach, detach};
pub use back::{fallback, finish};
pub use check::{Accepted, Carries, Finding, Report, TableSources, Verdict, Way, check};
pub use checksum::Compared;
pub use error::Error;
pub use fault::FaultPoint;
pub use heal::heal;
pub use journal::{Capture, Copying, Other, Phase, Record};
pub use options::{Failure, Options, State};
pub use owner::Owner;
pub use progress::Observer;
pub use roles::Roles;
pub use run::{Outcome, run};
pub use server::Server;
pub use since::defined_since;
pub use stillpoint_migrate_replay::Mode as Schedule;
pub use undo::{Status, abort, status};

/// Repeating statements as a migration does, of a capture that nobody migrates: for measurements.
pub mod spoken {
    pub use crate::follow::spoken::{Happened, Reader, Replay, Transaction, Way};
}

/// What our connections call themselves, so that both servers can tell them from clients.
pub(crate) const APPLICATION: &str = "stillpoint migrate";
