//! Control of a proxy: its configuration file, and the requests and replies of its control socket.
//!
//! The proxy and the programs that command it share this crate, and nothing else.
//!
//! The crate guarantees: a configuration whose parts do not fit together is refused by name. A [`Client`] that is
//! dropped while it waits loses no reply; a dropped connection ends the pause that it asked for.
//!
//! It does not serve sessions, and does not open the files that a configuration names.
//!
//! ```
//! use stillpoint_migrate_control::Config;
//! let config = Config::parse(
//!     r#"
//!     listen = ["127.0.0.1:6432"]
//!     control = "/run/stillpoint/proxy.sock"
//!     routes = "/var/lib/stillpoint/routes.json"
//!     servers.old.host = "10.0.0.7"
//!     tenants.shop.server = "old"
//!     "#,
//! )?;
//! assert_eq!(config.tenants["shop"].server, "old");
//! # Ok::<(), stillpoint_migrate_control::ConfigError>(())
//! ```
#![forbid(unsafe_code)]

mod client;
mod config;
mod message;
mod mirror;
mod progress;
pub mod rows;
mod session_settings;

pub use client::{Client, ControlError};
pub use config::access::{Action, Network, Origin, Rule, TlsRequirement, allows};
pub use config::{
    ANY, Config, ConfigError, Endpoint, Limits, PageConfig, PoolConfig, SESSION_BYTES, TenantConfig, TlsFiles,
};
pub use message::{
    Activity, CounterStatus, Phase, PoolStatus, Remark, Reply, Request, SessionStatus, Status, TargetSpec, TenantStatus,
};
pub use mirror::{DifferenceKind, MirrorDifference, MirrorReport};
pub use progress::{CompareReport, CopyReport, FollowReport, PhaseReport, Phases, Progress, ShortText, SwitchReport};
pub use session_settings::SESSION_SETTINGS;
