//! Errors of this crate.

use crate::{Pid, Tid};
use std::io;
use stillpoint_patch_format::Avma;

/// Every failure of this crate. After each of them the target continues as before unless the variant states otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process does not exist (any more).
    #[error("process {0} does not exist")]
    Gone(Pid),
    /// The number belongs to a thread, not to a process.
    #[error("{tid} is a thread of process {pid}")]
    NotAProcess {
        /// The given number.
        tid: Tid,
        /// The process that it belongs to.
        pid: Pid,
    },
    /// The process has ended and waits for its parent.
    #[error("process {0} has exited and waits for its parent (zombie)")]
    Zombie(Pid),
    /// The process is a kernel thread.
    #[error("process {0} is a kernel thread")]
    KernelThread(Pid),
    /// The program is not a 64-bit x86 program.
    #[error("process {pid} runs {what}; only 64-bit x86-64 programs can be patched")]
    NotX86_64 {
        /// The process.
        pid: Pid,
        /// Kind of its executable.
        what: String,
    },
    /// The program has neither an interpreter nor a C library mapped.
    #[error("process {0} is a static executable: it maps no C library")]
    Static(Pid),
    /// Another process already traces it.
    #[error("process {pid} is already traced by {tracer} ({name})")]
    AlreadyTraced {
        /// The process.
        pid: Pid,
        /// The tracer (0: a tracer outside of our PID namespace).
        tracer: Pid,
        /// The tracer's command name.
        name: String,
    },
    /// The process is the tool itself.
    #[error("process {0} is the tool itself")]
    Own(Pid),
    /// The kernel denies the permission to trace.
    #[error("no permission to trace process {pid}: {hint}")]
    Permission {
        /// The process.
        pid: Pid,
        /// A way to get the permission.
        hint: String,
    },
    /// A call that this crate needs is missing in the kernel, or is disabled.
    #[error("the kernel does not offer {0}")]
    Unsupported(&'static str),
    /// The thread has ended.
    #[error("thread {0} has ended")]
    ThreadGone(Tid),
    /// The thread did not stop in time. The request to stop is withdrawn as soon as the thread stops.
    #[error("thread {tid} does not stop: {why}")]
    Unstoppable {
        /// The thread.
        tid: Tid,
        /// Reason why the thread did not stop.
        why: String,
    },
    /// The program that the process executed has privileges that the process did not have (set-user-id, file capabilities).
    #[error("process {0} gained privileges when it executed its program: it is not held, and runs unpatched")]
    GainsPrivileges(Pid),
    /// The process replaced its program.
    #[error("process {0} called exec: it is another program now")]
    Exec(Pid),
    /// The thread cannot carry remote calls now; another thread may, or the same thread later.
    #[error("thread {tid} cannot carry remote calls: {why}")]
    BadCarrier {
        /// The thread.
        tid: Tid,
        /// Reason.
        why: String,
    },
    /// No thread can carry remote calls now.
    #[error("no thread of process {pid} can carry remote calls now: {why}")]
    NoCarrier {
        /// The process.
        pid: Pid,
        /// Reason why the last examined thread cannot.
        why: String,
    },
    /// A piece of code that remote calls need is not in the target's text.
    #[error("process {pid} maps no `{what}` in executable text")]
    NoGadget {
        /// The process.
        pid: Pid,
        /// The missing instructions.
        what: &'static str,
    },
    /// The thread's seccomp filter would not allow the call; it was not made.
    #[error("seccomp filter of thread {tid} does not allow system call {nr}: {verdict}")]
    Seccomp {
        /// The thread.
        tid: Tid,
        /// Number of the system call.
        nr: u64,
        /// Action that the filter would take.
        verdict: String,
    },
    /// The thread's seccomp filter cannot be read.
    #[error("seccomp filter of thread {tid} cannot be read: {why}")]
    SeccompUnreadable {
        /// The thread.
        tid: Tid,
        /// Reason.
        why: String,
    },
    /// The remote system call ran and returned an error.
    #[error("remote system call {nr} in thread {tid}")]
    RemoteSyscall {
        /// The thread.
        tid: Tid,
        /// Number of the system call.
        nr: u64,
        /// Returned error.
        source: io::Error,
    },
    /// The remote call did not end in time. The thread continues and restores itself when the call ends.
    #[error("remote call in thread {tid} did not end within {limit_ms} ms; the thread restores itself when it ends")]
    RemoteTimeout {
        /// The thread.
        tid: Tid,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// The remotely called function raised a signal; the thread was restored to its state before the call.
    #[error("remote call in thread {tid} raised signal {signal} at {pc}")]
    RemoteFault {
        /// The thread.
        tid: Tid,
        /// The signal.
        signal: i32,
        /// Address of the instruction.
        pc: Avma,
    },
    /// Memory of the target cannot be read or written at this address.
    #[error("memory of process {pid} at {at} cannot be {what} ({len} bytes)")]
    Memory {
        /// The process.
        pid: Pid,
        /// The address.
        at: Avma,
        /// Number of bytes.
        len: usize,
        /// `read` or `written`.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A piece of text crosses a page boundary: no single write covers it, so a kill could leave half of it.
    #[error("{len} bytes of text at {at} cross a page and cannot be written at once")]
    CrossesPage {
        /// The address.
        at: Avma,
        /// Number of bytes.
        len: usize,
    },
    /// A mapped file can be opened neither through `map_files` nor through the process's root.
    #[error("file {path} mapped by process {pid} cannot be opened: {why}")]
    MappedFile {
        /// The process.
        pid: Pid,
        /// Path as the process sees it.
        path: String,
        /// Reason.
        why: String,
    },
    /// A file under `/proc` does not have the expected form.
    #[error("{path} does not read as expected: {what}")]
    Malformed {
        /// The file.
        path: String,
        /// Difference from the expected form.
        what: String,
    },
    /// A system call of this process failed.
    #[error("{call} on {id}")]
    Os {
        /// The call.
        call: &'static str,
        /// Number of the process or thread concerned.
        id: i32,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl Error {
    /// Returns true if the thread or process does not exist any more.
    pub fn gone(&self) -> bool {
        matches!(self, Error::Gone(_) | Error::ThreadGone(_) | Error::Zombie(_) | Error::Exec(_))
    }
}

/// Converts the error of a request on a stopped thread: it fails with ESRCH only if the thread was killed.
pub(crate) fn lost(tid: i32, call: &'static str, source: std::io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ESRCH) => Error::ThreadGone(Tid(tid)),
        _ => Error::Os { call, id: tid, source },
    }
}
