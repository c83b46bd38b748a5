//! Options of an operation, and its result.

use crate::error::Busy;
use crate::points::Name;
use std::fmt;
use std::time::Duration;
use stillpoint_operation::Faults;
use stillpoint_patch_format::{BuildId, Scope};
use stillpoint_patch_tracee::Process;

/// Shortest time limit for moving threads back.
const BACK_TIMEOUT_MIN: Duration = Duration::from_secs(10);

/// Way in which threads migrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiescence {
    /// Each by itself, when no patched function is on its stack; the other threads continue.
    Probe,
    /// Each by itself at its next quiescence point; threads without points are probed.
    Local,
    /// The threads of one group together, while they are blocked at their points; all others as `Local`.
    Group(Name),
    /// All together, while all are blocked at their points.
    Global,
    /// All at once, while all are stopped.
    Stop,
}

impl Quiescence {
    /// Parses the output of [`fmt::Display`]: `probe`, `local`, `group:NAME`, `global`, `stop`.
    pub fn parse(text: &str) -> Option<Quiescence> {
        match text {
            "probe" => Some(Quiescence::Probe),
            "local" => Some(Quiescence::Local),
            "global" => Some(Quiescence::Global),
            "stop" => Some(Quiescence::Stop),
            _ => text.strip_prefix("group:").and_then(Name::new).map(Quiescence::Group),
        }
    }

    /// Returns true if old and new code never run at the same time where the scope forbids it.
    pub(crate) fn satisfies(self, scope: Scope) -> bool {
        match self {
            Quiescence::Probe | Quiescence::Local => scope == Scope::ThreadLocal,
            Quiescence::Group(_) => scope != Scope::Process,
            Quiescence::Global | Quiescence::Stop => true,
        }
    }

    pub(crate) fn needs_points(self) -> bool {
        matches!(self, Quiescence::Local | Quiescence::Group(_) | Quiescence::Global)
    }
}

impl fmt::Display for Quiescence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Quiescence::Probe => f.write_str("probe"),
            Quiescence::Local => f.write_str("local"),
            Quiescence::Group(name) => write!(f, "group:{name}"),
            Quiescence::Global => f.write_str("global"),
            Quiescence::Stop => f.write_str("stop"),
        }
    }
}

/// Method by which each thread sees its version of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ThreadView {
    /// A jump at each entry, and code after it that reads a word of the thread. Every kernel supports it.
    #[default]
    Trampoline,
    /// Pages of the thread's own generation, on a kernel that has address-space generations.
    Generation,
}

/// Options of an operation.
#[derive(Debug, Clone)]
pub struct Options {
    /// Way in which threads migrate.
    pub quiescence: Quiescence,
    /// Method by which each thread sees its version.
    pub view: ThreadView,
    /// Time limit for the migration of all threads; after it all are moved back.
    pub timeout: Duration,
    /// True if the patch supersedes all older ones of the same module.
    pub replace: bool,
    /// True for a dry run: all checks, no change.
    pub dry_run: bool,
    /// Key that signed the patch, if the signature was verified.
    pub signer: Option<String>,
    /// The intended process, if the caller has opened it: another process that has its number by now is refused.
    pub process: Option<Process>,
    /// True to continue although frames on suspended stacks may run old code, or cannot be searched for.
    pub allow_suspended_frames: bool,
    /// Requested faults, for tests.
    pub faults: Faults,
}

impl Default for Options {
    fn default() -> Self {
        let timeout = Duration::from_secs(10);
        Options {
            quiescence: Quiescence::Probe,
            view: ThreadView::default(),
            timeout,
            replace: false,
            dry_run: false,
            signer: None,
            process: None,
            allow_suspended_frames: false,
            faults: Faults::none(),
        }
    }
}

impl Options {
    /// Returns the time limit for moving threads back.
    pub(crate) fn back_timeout(&self) -> Duration {
        self.timeout.max(BACK_TIMEOUT_MIN)
    }
}

/// Result of a successful operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every thread runs the new side.
    Committed {
        /// Number of the transition.
        transition: u32,
        /// Names of the patches active from now on, oldest first.
        active: Vec<String>,
        /// Number of threads moved.
        threads: u32,
        /// Duration of the operation in nanoseconds.
        duration_ns: u64,
    },
    /// Every thread runs the new side except those that stay in functions that the patch names.
    Rests {
        /// Number of the transition.
        transition: u32,
        /// Number of all threads.
        threads: u32,
        /// Threads that keep the old version, each with the code in which it stays.
        staying: Vec<Busy>,
        /// Duration of the operation in nanoseconds.
        duration_ns: u64,
    },
    /// The target was already in the requested state.
    AlreadyThere(String),
    /// Nothing was changed because of the dry run; the operation would succeed.
    DryRun(String),
}

/// Selection of patches to revert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatchSelection {
    /// The newest active patch.
    Newest,
    /// The newest active patch of the module with this build-id.
    NewestOf(BuildId),
    /// The patch of this name; it must be the newest of its module.
    Named(String),
    /// All active patches.
    All,
    /// All active patches of the module with this build-id.
    AllOf(BuildId),
}
