//! A traced process: seize, stop, let go, events.

use crate::{Error, Frozen, Pid, Process, Stopped, Tid};
use std::time::Instant;

/// How a new process came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Birth {
    /// A copy of the memory: it inherits text, trampolines and ledger, and runs on by itself.
    Fork,
    /// Shares the memory until it calls exec or exits, and its parent thread waits for that.
    Vfork,
    /// Shares the memory.
    CloneVm,
}

/// What the pump reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A thread was born. It is held before its first instruction until [`Session::let_go`], or [`Session::stop`] and
    /// dropping the [`Stopped`].
    NewThread(Tid),
    /// A thread made a process. It is held before its first instruction until [`Session::release`].
    NewProcess {
        /// The new process.
        pid: Pid,
        /// The thread that made it.
        parent: Tid,
        /// How.
        how: Birth,
    },
    /// The child of a vfork has called exec or exited, and its parent goes on.
    VforkDone(Tid),
    /// A thread ended.
    ThreadExited(Tid),
    /// The process runs another program now. It is held before the first instruction; all other threads are gone.
    Exec,
    /// The process ended: exit code, or 128 + signal.
    Exited(i32),
}

/// What [`Session::stop`] found.
#[derive(Debug)]
pub enum Stop<'s> {
    /// It stands, and stays until the value is dropped.
    Stopped(Stopped<'s>),
    /// It has ended.
    Gone,
    /// It waits for the child of its vfork, which uses this memory: it cannot be stopped, and does not run until
    /// [`Event::VforkDone`].
    InVfork,
}

/// All threads of a process, traced but running.
///
/// Only [`attach`] makes one, on an OS thread of its own. When that thread ends, the kernel lets go of everything
/// without stopping anything: this is the only way to end tracing that no thread notices.
#[derive(Debug)]
pub struct Session<'p> {
    process: &'p Process,
}

/// Runs `work` with all threads of the process traced (`PTRACE_SEIZE`, none stopped), on an OS thread made for it, and
/// lets go of all of them afterwards, whatever `work` did. When the tool is killed, the kernel does the same.
///
/// `work` must not block for long without [`Session::pump`]: signals and births wait for it meanwhile.
pub fn attach<R: Send>(
    _process: &Process,
    _work: impl FnOnce(&mut Session<'_>) -> R + Send,
) -> Result<R, Error> {
    Err(Error::Unsupported("this yet"))
}

impl<'p> Session<'p> {
    /// The process.
    pub fn process(&self) -> &'p Process {
        self.process
    }

    /// Threads known, kernel workers not among them.
    pub fn threads(&self) -> Vec<Tid> {
        Vec::new()
    }

    /// Stops one thread. One that is held already (new, or found stopped) is handed over as it is.
    pub fn stop(&mut self, _tid: Tid) -> Result<Stop<'_>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Lets a held thread go that no [`Stopped`] stands for.
    pub fn let_go(&mut self, _tid: Tid) -> Result<(), Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Ends the tracing of a new process; it runs on.
    pub fn release(&mut self, _pid: Pid) -> Result<(), Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Whether a thread has executed nothing of the program since it was last let go: stopping it again would tell
    /// nothing and begin its time-out anew. False for a thread that was never stopped.
    pub fn idle_since_stop(&mut self, _tid: Tid) -> Result<bool, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Serves what the target does (signals are forwarded unchanged, job control is kept) and returns the next event,
    /// or `None` when the deadline has passed. With a deadline in the past: what is there already.
    pub fn pump(&mut self, _deadline: Instant) -> Result<Option<Event>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Stops all threads, sleeping ones first and running ones last; on failure everything runs on.
    pub fn freeze(&mut self) -> Result<Frozen<'_, 'p>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Stops the thread best suited to carry remote calls: one in a system call that restarts, with room on its own stack.
    pub fn stop_carrier(&mut self) -> Result<Stopped<'_>, Error> {
        Err(Error::Unsupported("this yet"))
    }
}
