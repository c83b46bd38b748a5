//! Information in `/proc` about a thread, without stopping it.

use crate::{Pid, Tid};
use stillpoint_host::kernel_files;

/// `PF_IO_WORKER`: the thread serves io_uring.
const PF_IO_WORKER: u64 = 0x10;
/// `PF_USER_WORKER`: any worker that the kernel keeps inside a process. Before Linux 6.4 the bit had another meaning.
const PF_USER_WORKER: u64 = 0x4000;
/// `PF_KTHREAD`: the thread belongs to the kernel.
const PF_KTHREAD: u64 = 0x20_0000;

/// One thread of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadInfo {
    /// The thread.
    pub tid: Tid,
    /// True for a worker made by the kernel (io_uring, vhost): it has no user side, shows its creator's `fs_base`, is never traced, and
    /// nothing must be written through it.
    pub kernel_worker: bool,
    /// State letter: `R`, `S`, `D`, `T`, `t`, `Z`, `X`.
    pub state: char,
    /// Processor time that it has used, in ticks of the kernel (mostly 10 ms).
    pub cpu_ticks: u64,
}

impl ThreadInfo {
    /// Returns true if it runs the program's code: it is not a worker of the kernel, and has not ended.
    pub fn runs_program(&self) -> bool {
        !self.kernel_worker && !matches!(self.state, 'Z' | 'X')
    }
}

/// Processor time used by the threads of a process: the total in ticks, and the number of threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AverageUsage {
    ticks: u64,
    threads: u64,
}

/// Divisor for idle threads: a thread is idle if it has used less than the average divided by this number.
const IDLE_DIVISOR: u64 = 4;

impl AverageUsage {
    /// Sums the ticks of each thread.
    pub(crate) fn of(each: impl Iterator<Item = u64>) -> AverageUsage {
        each.fold(AverageUsage { ticks: 0, threads: 0 }, |average, ticks| AverageUsage {
            ticks: average.ticks.saturating_add(ticks),
            threads: average.threads + 1,
        })
    }

    /// Returns true if a sleeping thread with these ticks is idle: a pause of some milliseconds does no harm.
    pub(crate) fn is_idle(self, ticks: u64) -> bool {
        ticks.saturating_mul(self.threads * IDLE_DIVISOR) < self.ticks
    }
}

/// Result of one read of the list of threads.
#[derive(Debug)]
pub(crate) struct Threads {
    pub(crate) threads: Vec<ThreadInfo>,
    /// True if no thread ended before it could be read. The kernel ends its list at a thread that is released at the moment of listing, and
    /// omits those after it (`next_tid` in fs/proc/base.c). A traced thread is not released before its tracer has waited for it.
    pub(crate) all: bool,
}

/// Fields of a `stat` file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub(crate) state: char,
    /// Parent of the process.
    pub parent: Pid,
    pub(crate) flags: u64,
    pub(crate) cpu_ticks: u64,
    /// Threads of the process, including kernel workers and threads that have ended and were not waited for.
    pub(crate) threads: u64,
    /// Start time in ticks; a parent always starts before its children.
    pub start_time: u64,
}

impl Stat {
    /// Reads the file of a process; `None` if it has ended.
    pub fn of(pid: Pid) -> Option<Stat> {
        Stat::parse(&kernel_files::text(format!("/proc/{pid}/stat")).ok()?)
    }

    pub(crate) fn parse(text: &str) -> Option<Stat> {
        // The name may contain any character, including spaces and parentheses; it ends at the last one.
        let rest = &text[text.rfind(')')? + 1..];
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = Pid(fields.next()?.parse().ok()?);
        let flags = fields.nth(4)?.parse().ok()?;
        let user: u64 = fields.nth(4)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let threads = fields.nth(4)?.parse().ok()?;
        let start_time = fields.nth(1)?.parse().ok()?;
        Some(Stat { state, parent, flags, cpu_ticks: user.saturating_add(system), threads, start_time })
    }

    /// Returns true for a thread of the kernel.
    pub fn kernel_thread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    pub(crate) fn kernel_worker(&self, kernel: (u32, u32)) -> bool {
        self.flags & PF_IO_WORKER != 0 || (kernel >= (6, 4) && self.flags & PF_USER_WORKER != 0)
    }
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
    /// The tracer, 0 if it is not traced.
    pub tracer: Pid,
    /// Real, effective, saved and file-system user.
    pub uids: [u32; 4],
    /// Number of the process in each nested PID namespace, ours first.
    pub ns_pids: Vec<i32>,
    /// Number of threads of the process.
    pub threads: u32,
    /// Blocked signals, bit `n - 1` for signal `n`.
    pub blocked: u64,
    /// Signals pending for the thread, as in `blocked`.
    pub pending: u64,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    pub seccomp: u8,
    /// Number of seccomp filters.
    pub seccomp_filters: u32,
    /// True if `x86_Thread_features` contains `shstk`; `None` if the kernel does not support shadow stacks.
    pub shadow_stack: Option<bool>,
    /// Number of times it went to sleep voluntarily.
    pub voluntary_switches: u64,
}

impl Status {
    /// Reads the file of a process; `None` if it has ended.
    pub fn of(pid: Pid) -> Option<Status> {
        Status::parse(&kernel_files::text(format!("/proc/{pid}/status")).ok()?)
    }

    /// Returns `None` if a field that every kernel writes is missing.
    pub(crate) fn parse(text: &str) -> Option<Status> {
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        let number = |name: &str| field(name)?.parse::<u64>().ok();
        let mask = |name: &str| u64::from_str_radix(field(name)?, 16).ok();
        let mut uids = field("Uid")?.split_ascii_whitespace().map(|s| s.parse().ok());
        Some(Status {
            name: field("Name")?.to_owned(),
            state: field("State")?.chars().next()?,
            tgid: Pid(number("Tgid")? as i32),
            tracer: Pid(number("TracerPid")? as i32),
            uids: [uids.next()??, uids.next()??, uids.next()??, uids.next()??],
            ns_pids: field("NSpid")
                .map(|s| s.split_ascii_whitespace().filter_map(|s| s.parse().ok()).collect())
                .unwrap_or_default(),
            threads: number("Threads")? as u32,
            blocked: mask("SigBlk")?,
            pending: mask("SigPnd")?,
            seccomp: number("Seccomp").unwrap_or(0) as u8,
            seccomp_filters: number("Seccomp_filters").unwrap_or(0) as u32,
            shadow_stack: field("x86_Thread_features").map(|f| f.split(' ').any(|f| f == "shstk")),
            voluntary_switches: number("voluntary_ctxt_switches").unwrap_or(0),
        })
    }
}

/// Location of a thread and number of its sleeps, read without stopping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadActivity {
    /// The system call in which it sleeps, with arguments; `None` while it runs, or sleeps in a page fault.
    pub waits_in: Option<(u64, [u64; 6])>,
    /// Stack pointer and program counter while it sleeps.
    pub sp_pc: Option<(u64, u64)>,
    /// Number of times it went to sleep voluntarily.
    pub voluntary_switches: u64,
}

impl ThreadActivity {
    pub(crate) fn parse(syscall: &str, voluntary_switches: u64) -> ThreadActivity {
        let mut activity = ThreadActivity { waits_in: None, sp_pc: None, voluntary_switches };
        let mut words = syscall.split_ascii_whitespace();
        let Some(nr) = words.next().and_then(|nr| nr.parse::<i64>().ok()) else {
            return activity;
        };
        let mut hex = words.map(|w| u64::from_str_radix(w.trim_start_matches("0x"), 16).unwrap_or(0));
        if nr >= 0 {
            let mut args = [0; 6];
            args.fill_with(|| hex.next().unwrap_or(0));
            activity.waits_in = Some((nr as u64, args));
        }
        if let (Some(sp), Some(pc)) = (hex.next(), hex.next()) {
            activity.sp_pc = Some((sp, pc));
        }
        activity
    }

    /// Returns true if it may have executed instructions of the program since `earlier`. A thread that slept both times and has not gone to
    /// sleep in between, except for `switches` sleeps that a stop by the tool has caused, has slept all the time.
    pub(crate) fn ran_since(&self, earlier: &ThreadActivity, switches: u64) -> bool {
        self.waits_in.is_none()
            || self.waits_in != earlier.waits_in
            || self.sp_pc != earlier.sp_pc
            || self.voluntary_switches > earlier.voluntary_switches + switches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_survives_hostile_names() {
        let text = "77 (a) R 1 (x)) S 1 77 77 0 -1 4194368 1 2 3 4 5 6 7 8 20 0 1 0 4711 100 5";
        let stat = Stat::parse(text).unwrap();
        let (parent, flags) = (Pid(1), 4194368);
        assert_eq!(stat, Stat { state: 'S', parent, flags, cpu_ticks: 11, threads: 1, start_time: 4711 });
        assert!(!stat.kernel_thread() && !stat.kernel_worker((6, 18)));
        assert!(Stat { flags: 0x4000, ..stat }.kernel_worker((6, 4)));
        assert!(!Stat { flags: 0x4000, ..stat }.kernel_worker((6, 1)));
        assert!(Stat { flags: 0x10, ..stat }.kernel_worker((5, 15)));
    }

    #[test]
    fn activity_of_sleeping_and_running_threads() {
        let asleep = ThreadActivity::parse("232 0x5 0x7ffe 0x80 0xffffffffffffffff 0x0 0x0 0x7ff0 0x7f00\n", 9);
        assert_eq!(asleep.waits_in, Some((232, [5, 0x7ffe, 0x80, u64::MAX, 0, 0])));
        assert_eq!(asleep.sp_pc, Some((0x7ff0, 0x7f00)));
        assert!(!asleep.ran_since(&asleep, 0));
        let again = ThreadActivity { voluntary_switches: 11, ..asleep };
        assert!(again.ran_since(&asleep, 0) && !again.ran_since(&asleep, 2) && again.ran_since(&asleep, 1));
        let running = ThreadActivity::parse("running\n", 9);
        assert!(running.ran_since(&running, 0));
        assert_eq!(ThreadActivity::parse("-1 0x7ff0 0x7f00", 1).waits_in, None);
    }
}
