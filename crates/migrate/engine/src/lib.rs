//! Moves a PostgreSQL database with its clients to another server while it is in use.
//!
//! **The caller must** name both servers with roles that are superusers there; run the proxy (`stillpoint-migrate-proxy`)
//! directly in front of the servers; call from a tokio runtime.
//!
//! **Guaranteed:** [`check`] changes nothing, and names everything that [`run`] would refuse. Until clients change sides, every
//! failure, interruption and time-out leaves them on the source, and removes what was put on either server: schema,
//! publications, slots, replica identities, the target's database; [`State`] reports success or what is left. After that,
//! clients are on the target, and [`fallback`] brings them back with everything that was committed since, until [`finish`]. A
//! process that is killed leaves a journal: the next [`run`] continues from it, or [`abort`] removes everything. If the killed
//! process left connections to the serving side disabled, [`repair_interrupted`], called by a process that outlives it, enables them
//! immediately. A committed transaction is on the side in service exactly once: it is repeated together with its stamp in one
//! transaction on the target, and the source gets a confirmation only when the target has flushed it. If changes come from the
//! log, no snapshot is held while rows are copied, except for tables that require it.
//!
//! With several targets, those that fail before clients move to one are dropped, and the migration continues with the others
//! ([`Options::others`]).
//!
//! If the source's log has no rows ([`Capture::Rows`]), the proxy captures what its clients' statements write. This sees less:
//! a statement that gives no row images, or a session that bypasses the proxy, ends the migration with its name, and clients
//! are not affected. A process that was killed cannot be continued, because the capture ends with it. On request
//! ([`Capture::Statements`]), the statements themselves are repeated, in one of the paper's schedules, if all of them can be.
//! The way back always reads the target's log.
//!
//! Only one command at a time works on a database: it holds the journal, and a lock on the source that refuses a command with
//! its journal in another directory. Between two commands the source names the migration that owns the database, and no command
//! works on it with another journal.
//!
//! Rows that no log reports are made again: materialized views by REFRESH. Triggers that would fire on what is repeated are
//! disabled on the side that follows, until the switch.
//!
//! **It does not** repeat definitions (a definition on the source ends the migration with its name, and clients are not
//! affected), or throttle clients whose load the target cannot follow: it reports
//! that.
//!
//! ```text
//!  Begun --> Snapshotted --> Copying --> Following --> Switching --> Switched --> (finish)
//!    |            |             |        ^   |            |  proxy      |
//!    |            |             |        |   |            |  decides    +--> Returning --+
//!    |            |             |        |   |            +--> Following                 |
//!    |            |             |        +---|-- after a crash: `run`                    |
//!    +------------+-------------+------------+-- undo ---------------------> Returned <--+
//!                                                                               |
//!                           clients stay on the source: what is left is removed +--> (gone)
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
//! 2015). Changes come from PostgreSQL's logical decoding, or as images of rows, so every isolation level is correct; they come
//! as statements, as in the paper, only on request.
#![forbid(unsafe_code)]

mod archive;
mod capture;
mod catalogs;
mod check;
mod checksum;
mod client_passwords;
mod clients;
mod copied_pages;
mod copied_settings;
mod copy;
mod copy_resume;
mod create;
mod database_group;
mod ddl_changes;
mod definitions;
mod estimate;
mod extensions;
mod fallback;
mod fence;
mod follow_state;
mod guardian;
mod hold;
mod journal;
mod large_objects;
mod live_report;
mod materialized_views;
mod mirror;
mod moved_slots;
mod multi_target;
mod object_names;
mod options;
mod owner;
mod phases;
mod placement;
mod poolers;
mod priority;
mod progress;
mod proxy_client;
mod reactions;
mod redefine;
mod rehearsal;
mod removal;
mod rendezvous;
mod report;
mod retry;
mod rights;
mod roles;
mod run;
mod selection;
mod server_settings;
mod setting_changes;
mod settle;

mod snapshot;
mod state_files;
mod status;
mod switch;
mod switch_order;

mod undo;
mod values;
mod weight;

pub use check::check;
pub use checksum::ComparisonReport;
pub use client_passwords::ClientPasswords;
pub use database_group::{fallback_together, run_together};
pub use ddl_changes::definitions_since_switch;
pub use fallback::{fallback, finish};
pub use guardian::repair_interrupted;
pub use hold::{Holding, order_switch};
pub use journal::{Capture, OtherTarget, Phase, Record};
pub use mirror::{MirrorOutcome, mirror};
pub use options::{AcceptedRestrictions, Failure, Options, State, SwitchHooks};
pub use owner::Owner;
pub use placement::Placement;
pub use progress::Observer;
pub use proxy_client::MirrorShare;
pub use rendezvous::Member;
pub use report::{Coverage, Finding, Report, SourceCoverage, TableSources, Verdict};
pub use retry::Outcome;
pub use roles::Roles;
pub use run::run;
pub use selection::{Pattern, Selection};
pub use setting_changes::Settings;
pub use state_files::{CopyProgress, running_migrations};
pub use status::{Status, databases, status};
pub use stillpoint_migrate_apply::{Error, statement_replay};
pub use stillpoint_migrate_control::{DifferenceKind, MirrorDifference, MirrorReport};
pub use stillpoint_migrate_postgres::link::{Server, ServerError};
pub use stillpoint_migrate_replay::Mode as Schedule;
pub use switch_order::{Condition, DailyWindow, FollowLoad, SwitchOrder, moment};
pub use undo::abort;
