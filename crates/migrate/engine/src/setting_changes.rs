//! Data about settings of a server that a migration writes to its target; [`copied_settings`](crate::copied_settings) writes them.

use serde::{Deserialize, Serialize};

/// Handling of the server's settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Settings {
    /// Compare those that clients notice, and report differences.
    #[default]
    Compare,
    /// Write those of the source to the target by ALTER SYSTEM.
    Copy,
}

/// A setting that was written to a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SettingChange {
    pub(crate) name: String,
    /// Value in the target's `postgresql.auto.conf` before; `None` if it had none there.
    pub(crate) before: Option<String>,
    /// Value there after it was written; `None` until that is done.
    pub(crate) made: Option<String>,
}
