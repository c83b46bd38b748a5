//! Events of `stillpoint patch`: threads and transitions of one process.

use serde::{Deserialize, Serialize};

/// Kind of an event with its data. The tag is `"event"` in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A thread was stopped and then continued.
    ThreadStopped {
        /// Number of the thread.
        tid: i32,
        /// Reason: `probe`, `freeze`, `carrier`, `signal`.
        reason: String,
        /// Nanoseconds from the moment the thread was seen stopped until it was continued.
        stopped_ns: u64,
    },
    /// A thread runs the new generation from now on.
    ThreadMigrated {
        /// Number of the thread.
        tid: i32,
        /// Number of the transition it migrated to.
        transition: u32,
    },
    /// A thread could not be migrated yet.
    ThreadBusy {
        /// Number of the thread.
        tid: i32,
        /// Function found on its stack.
        function: String,
    },
    /// The memory of a program with coroutines of its own was searched for suspended frames of old code; none is left.
    SuspendedFramesSearched {
        /// Reason why the program probably has some.
        why: String,
        /// Bytes of memory.
        searched_bytes: u64,
    },
    /// Processes of the machine that map the same build of the file and do not have the patch.
    OthersUnpatched {
        /// Name of the patch.
        name: String,
        /// Their numbers, parents before children.
        pids: Vec<i32>,
    },
    /// Every thread runs the new generation and the entries are direct jumps.
    Committed {
        /// Number of the transition.
        transition: u32,
        /// Patches active from now on, oldest first; empty for the original code.
        active: Vec<String>,
        /// Nanoseconds from the start of the transition to the commit.
        duration_ns: u64,
        /// Number of threads that migrated.
        threads: u32,
    },
}
