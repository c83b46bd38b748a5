//! What `/proc` tells of a thread without stopping it.

use crate::{Pid, Tid};

/// One thread of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadInfo {
    /// The thread.
    pub tid: Tid,
    /// A worker made by the kernel (io_uring, vhost): it has no user side, shows its creator's `fs_base`, is never
    /// traced, and must never be stored through.
    pub kernel_worker: bool,
    /// State letter: `R`, `S`, `D`, `T`, `t`, `Z`, `X`.
    pub state: char,
}

/// Fields of a `status` file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Command name.
    pub name: String,
    /// State letter.
    pub state: char,
    /// The process that the thread belongs to.
    pub tgid: Pid,
    /// Who traces it, 0 for nobody.
    pub tracer: Pid,
    /// Real, effective, saved and file-system user.
    pub uids: [u32; 4],
    /// Its number in each nested PID namespace, ours first.
    pub ns_pids: Vec<i32>,
    /// Threads of the process.
    pub threads: u32,
    /// Blocked signals.
    pub blocked: u64,
    /// Ignored signals.
    pub ignored: u64,
    /// Caught signals.
    pub caught: u64,
    /// Signals pending for the thread.
    pub pending: u64,
    /// Signals pending for the process.
    pub shared_pending: u64,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    pub seccomp: u8,
    /// Number of seccomp filters.
    pub seccomp_filters: u32,
    /// `x86_Thread_features` contains `shstk`.
    pub shadow_stack: bool,
    /// Times it went to sleep by itself.
    pub voluntary_switches: u64,
    /// Times it was preempted.
    pub involuntary_switches: u64,
}

/// Where a thread stands and how often it ran, read without stopping it. Two that are equal, or [`ThreadActivity::ran_since`]
/// saying no, prove that it executed no instruction of the program in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadActivity {
    /// The system call that it sleeps in, with arguments, or `None` while it runs.
    pub waits_in: Option<(u64, [u64; 6])>,
    /// Stack pointer and program counter while it sleeps.
    pub sp_pc: Option<(u64, u64)>,
    /// Time on a processor.
    pub cpu_ns: u64,
    /// Times that it was put on a processor.
    pub slices: u64,
}

impl ThreadActivity {
    /// Whether it may have executed instructions of the program since `earlier`.
    pub fn ran_since(&self, earlier: &ThreadActivity) -> bool {
        self.waits_in.is_none() || self != earlier
    }
}
