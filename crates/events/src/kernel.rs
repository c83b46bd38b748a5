//! Events of `stillpoint kernel`.

use serde::{Deserialize, Serialize};

/// Kind of an event with its data. The tag is `"event"` in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The machine runs another kernel, and its units continue.
    KernelChanged {
        /// Release of the kernel.
        release: String,
        /// Nanoseconds from the command until the units are complete.
        duration_ns: u64,
    },
}
