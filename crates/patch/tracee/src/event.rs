//! Reports of a traced process.

use crate::{Pid, Tid};

/// Origin of a new process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessOrigin {
    /// Process with a copy of the memory: it inherits text, trampolines and ledger, and continues by itself.
    Fork,
    /// Process that shares the memory until it calls exec or exits, and its parent thread waits for that.
    Vfork,
    /// Process that shares the memory.
    CloneVm,
}

/// Report of the pump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A new thread. It is held before its first instruction until [`Session::resume_thread`](crate::Session::resume_thread), or
    /// [`Session::stop`](crate::Session::stop) and dropping the [`Stopped`](crate::Stopped).
    NewThread(Tid),
    /// A thread made a process. The process is held before its first instruction until [`Session::release`](crate::Session::release).
    NewProcess {
        /// The new process.
        pid: Pid,
        /// The thread that made it.
        parent: Tid,
        /// Origin of the process.
        how: ProcessOrigin,
    },
    /// The child of a vfork has called exec or exited, and its parent continues.
    VforkDone(Tid),
    /// A thread is stopped after [`Session::request_stop`](crate::Session::request_stop). It is held until
    /// [`Session::resume_thread`](crate::Session::resume_thread), or [`Session::stop`](crate::Session::stop) and dropping the
    /// [`Stopped`](crate::Stopped).
    Stopped(Tid),
    /// A thread ended.
    ThreadExited(Tid),
    /// The process runs another program now. It is held before the first instruction; all other threads are gone.
    Exec,
    /// The process ended: exit code, or 128 + signal, or -1 if the code is unknown.
    Exited(i32),
}
