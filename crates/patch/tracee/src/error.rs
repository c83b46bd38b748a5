//! What can go wrong, by name.

use crate::{Pid, Tid};
use std::io;
use stillpoint_patch_format::Avma;

/// Every failure of this crate. After any of them the target runs on as before unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such process (any more).
    #[error("process {0} does not exist")]
    Gone(Pid),
    /// The number belongs to a thread, not to a process.
    #[error("{tid} is a thread of process {pid}")]
    NotAProcess {
        /// The number given.
        tid: Tid,
        /// The process that it belongs to.
        pid: Pid,
    },
    /// The process has ended and waits for its parent.
    #[error("process {0} has exited and waits for its parent (zombie)")]
    Zombie(Pid),
    /// It is part of the kernel.
    #[error("process {0} is a kernel thread")]
    KernelThread(Pid),
    /// Not a 64-bit x86 program.
    #[error("process {pid} runs {what}; only 64-bit x86-64 programs can be patched")]
    NotX86_64 {
        /// The process.
        pid: Pid,
        /// What its executable is.
        what: String,
    },
    /// The program has neither an interpreter nor a C library mapped.
    #[error("process {0} is a static executable: it maps no C library")]
    Static(Pid),
    /// Somebody traces it already.
    #[error("process {pid} is already traced by {tracer} ({name})")]
    AlreadyTraced {
        /// The process.
        pid: Pid,
        /// Who traces it (0: a tracer outside of our PID namespace).
        tracer: Pid,
        /// The tracer's command name.
        name: String,
    },
    /// It is this very process.
    #[error("process {0} is the tool itself")]
    Own(Pid),
    /// The kernel does not let us.
    #[error("no permission to trace process {pid}: {hint}")]
    Permission {
        /// The process.
        pid: Pid,
        /// How to get the permission.
        hint: String,
    },
    /// A call that this crate needs is not in the kernel, or is switched off.
    #[error("the kernel does not offer {0}")]
    Unsupported(&'static str),
    /// The thread has ended.
    #[error("thread {0} has ended")]
    ThreadGone(Tid),
    /// The thread did not come to a stop in time. The request to stop is withdrawn as soon as it does.
    #[error("thread {tid} does not stop: {why}")]
    Unstoppable {
        /// The thread.
        tid: Tid,
        /// What keeps it.
        why: String,
    },
    /// The program that the process executed has privileges that the process had not (set-user-id, file capabilities).
    #[error("process {0} gained privileges when it executed its program: it is not held, and runs unpatched")]
    GainsPrivileges(Pid),
    /// The process replaced its program.
    #[error("process {0} called exec: it is another program now")]
    Exec(Pid),
    /// The thread cannot carry remote calls now; another one, or the same one later, may.
    #[error("thread {tid} cannot carry remote calls: {why}")]
    BadCarrier {
        /// The thread.
        tid: Tid,
        /// Why.
        why: String,
    },
    /// No thread can carry remote calls now.
    #[error("no thread of process {pid} can carry remote calls now: {why}")]
    NoCarrier {
        /// The process.
        pid: Pid,
        /// Why the last one looked at cannot.
        why: String,
    },
    /// A piece of code that remote calls need is not in the target's text.
    #[error("process {pid} maps no `{what}` in executable text")]
    NoGadget {
        /// The process.
        pid: Pid,
        /// The instructions looked for.
        what: &'static str,
    },
    /// The thread's seccomp filter would not let the call through; it was not made.
    #[error("seccomp filter of thread {tid} does not allow system call {nr}: {verdict}")]
    Seccomp {
        /// The thread.
        tid: Tid,
        /// Number of the system call.
        nr: u64,
        /// What the filter would do.
        verdict: String,
    },
    /// The thread's seccomp filter cannot be read.
    #[error("seccomp filter of thread {tid} cannot be read: {why}")]
    SeccompUnreadable {
        /// The thread.
        tid: Tid,
        /// Why.
        why: String,
    },
    /// The remote system call ran and returned an error.
    #[error("remote system call {nr} in thread {tid}")]
    RemoteSyscall {
        /// The thread.
        tid: Tid,
        /// Number of the system call.
        nr: u64,
        /// What it returned.
        source: io::Error,
    },
    /// The remote call did not end in time. The thread runs on and restores itself when the call ends.
    #[error("remote call in thread {tid} did not end within {limit_ms} ms; the thread restores itself when it ends")]
    RemoteTimeout {
        /// The thread.
        tid: Tid,
        /// The limit.
        limit_ms: u64,
    },
    /// The function called remotely raised a signal; the thread was put back to where it was before the call.
    #[error("remote call in thread {tid} raised signal {signal} at {pc}")]
    RemoteFault {
        /// The thread.
        tid: Tid,
        /// The signal.
        signal: i32,
        /// Where.
        pc: Avma,
    },
    /// Memory of the target cannot be read or written there.
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
        /// What the kernel said.
        source: io::Error,
    },
    /// A piece of text crosses a page: no single write covers it, so a kill could leave half of it.
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
        /// Why.
        why: String,
    },
    /// A file under `/proc` does not look as expected.
    #[error("{path} does not read as expected: {what}")]
    Malformed {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// A system call of our own failed.
    #[error("{call} on {id}")]
    Os {
        /// The call.
        call: &'static str,
        /// The process or thread concerned.
        id: i32,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Error {
    /// Whether the target was refused before anything was touched (exit code 3), as opposed to a failure on the way.
    pub fn refused(&self) -> bool {
        use Error::*;
        matches!(
            self,
            Gone(_)
                | NotAProcess { .. }
                | Zombie(_)
                | KernelThread(_)
                | NotX86_64 { .. }
                | Static(_)
                | AlreadyTraced { .. }
                | Own(_)
                | Permission { .. }
                | Unsupported(_)
                | NoGadget { .. }
                | Seccomp { .. }
                | SeccompUnreadable { .. }
        )
    }

    /// Whether the thread or process is simply not there any more.
    pub fn gone(&self) -> bool {
        matches!(self, Error::Gone(_) | Error::ThreadGone(_) | Error::Zombie(_) | Error::Exec(_))
    }
}
