//! Common code of all end-to-end tests: starts real servers, communicates with them, runs the `stillpoint` binary.
//!
//! The caller guarantees a Debian machine with `apt` (only [`packages`] needs it, to download, never to install) and
//! that a server is dropped by the thread that started it, or that this thread lives as long as the server.
//!
//! The crate guarantees: servers listen on 127.0.0.1 on a port of their own, keep their files in a directory of their
//! own, and have ended when their handle is dropped, also when the test panics or is killed. Every wait is for a
//! condition, has a limit, and names the condition when the limit passes. A test that cannot run here prints the reason
//! and passes; with `REQUIRE_ALL=1` in the environment it fails instead (see [`skip`]).
//!
//! It does not judge results, and it installs nothing.
//!
//! ```no_run
//! use stillpoint_patch_tests::{cli::Stillpoint, packages, server::Redis};
//! let binary = packages::redis(None).unwrap();
//! let redis = Redis::start(&binary, &[]);
//! let run = Stillpoint::new().args(["patch", "status", "--pid"]).arg(redis.pid()).json().run();
//! assert_eq!(run.code, Some(0), "{run}");
//! assert_eq!(redis.client().command(&["PING"]).unwrap().text(), "PONG");
//! ```

pub mod annotation;
pub mod checkpointed_server;
pub mod cli;
pub mod control_group;
pub mod daemons;
pub mod edited_source;
pub mod effects;
pub mod hash_server;
pub mod kill_injection;
pub mod load;
pub mod mariadb;
pub mod patch_calls;
pub mod postgres;
pub mod quiescence_program;
pub mod resp;
pub mod series;
pub mod server;
pub mod shipped_program;
pub mod victim;

pub use stillpoint_testing::{Unavailable, cache_dir, packages, skip, wait, workspace_root};
