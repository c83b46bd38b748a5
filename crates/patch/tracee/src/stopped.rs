//! Operations on one stopped thread.

use crate::tracer::Tracer;
use crate::{Error, Registers, Remote, Tid, carrier, seccomp, sys};
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use stillpoint_patch_format::Avma;

/// A stopped thread, held by a [`Stopped`] or a [`Frozen`](crate::Frozen).
#[derive(Debug)]
pub struct Held<'s> {
    tracer: &'s mut Tracer,
    tid: i32,
}

impl<'s> Held<'s> {
    pub(crate) fn new(tracer: &'s mut Tracer, tid: i32) -> Held<'s> {
        Held { tracer, tid }
    }

    /// Returns the thread.
    pub fn tid(&self) -> Tid {
        Tid(self.tid)
    }

    /// Returns its registers (read once, then kept). In a thread interrupted in a system call, `rax` is the kernel's code and `orig_rax`
    /// the call.
    pub fn registers(&mut self) -> Result<Registers, Error> {
        registers(self.tracer, self.tid)
    }

    /// Returns the base of its thread-local storage. A kernel worker shows its creator's: see [`Registers::no_user_side`].
    pub fn fs_base(&mut self) -> Result<Avma, Error> {
        Ok(Avma(self.registers()?.fs_base))
    }

    /// Returns true if job control has stopped the process (it stays stopped when it is resumed).
    pub fn group_stopped(&mut self) -> bool {
        self.tracer.standing(self.tid).is_ok_and(|standing| standing.group_stop)
    }

    /// Returns the reason why the thread cannot carry remote calls now, or `None` if it can.
    pub fn carrier_fault(&mut self) -> Result<Option<String>, Error> {
        carrier::fault(self.tracer, self.tid)
    }

    /// Checks that the thread's seccomp filters allow `rt_sigreturn` and each of these calls, exactly as they would be made. Changes
    /// nothing.
    pub fn check_syscalls(&mut self, calls: &[(u64, [u64; 6])]) -> Result<(), Error> {
        let gadgets = self.tracer.process.find_gadgets()?;
        let filters = seccomp::Filters::of(&self.tracer.process, Tid(self.tid))?;
        calls.iter().try_for_each(|(nr, args)| gadgets.check(&filters, Tid(self.tid), *nr, *args))
    }

    /// Makes the thread ready for several remote calls. It is restored when the value is dropped; if the tool is killed, it restores
    /// itself.
    pub fn begin_remote(&mut self) -> Result<Remote<'_>, Error> {
        Remote::begin(self.tracer, self.tid)
    }

    /// Makes one remote system call: begin, call, restore.
    pub fn remote(&mut self, nr: u64, args: [u64; 6]) -> Result<u64, Error> {
        let mut remote = self.begin_remote()?;
        let result = remote.syscall(nr, args);
        remote.finish()?;
        result
    }

    /// Calls `int f(void)` on the thread's own stack. On time-out the function continues, and the thread restores itself when it returns.
    ///
    /// The function runs like a signal handler: at any point of the program, so it must save `errno` and take no lock that the thread may
    /// hold.
    pub fn call_function(&mut self, function: Avma, limit: Duration) -> Result<i32, Error> {
        let mut remote = self.begin_remote()?;
        let result = remote.function(function, limit);
        match (remote.finish(), result) {
            (_, Err(error)) => Err(error),
            (Err(error), Ok(_)) => Err(error),
            (Ok(()), Ok(result)) => Ok(result),
        }
    }
}

/// One thread stopped alone. Dropping it resumes the thread.
#[derive(Debug)]
pub struct Stopped<'s> {
    held: Held<'s>,
    resumed: bool,
}

impl<'s> Stopped<'s> {
    pub(crate) fn new(tracer: &'s mut Tracer, tid: i32) -> Stopped<'s> {
        Stopped { held: Held::new(tracer, tid), resumed: false }
    }

    /// Resumes the thread and returns for how long it was stopped, in nanoseconds, from the moment when the stop was observed. An
    /// interrupted system call is made to restart if the kernel does not restart it by itself.
    pub fn resume(mut self) -> Result<u64, Error> {
        self.let_go()
    }

    fn let_go(&mut self) -> Result<u64, Error> {
        self.resumed = true;
        let result = self.held.tracer.let_go(self.held.tid);
        self.held.tracer.timer.disarm();
        self.held.tracer.lower_priority();
        result
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if !self.resumed {
            let _ = self.let_go();
        }
    }
}

impl<'s> Deref for Stopped<'s> {
    type Target = Held<'s>;

    fn deref(&self) -> &Held<'s> {
        &self.held
    }
}

impl<'s> DerefMut for Stopped<'s> {
    fn deref_mut(&mut self) -> &mut Held<'s> {
        &mut self.held
    }
}

/// Returns the registers of a stopped thread, read once.
pub(crate) fn registers(tracer: &mut Tracer, tid: i32) -> Result<Registers, Error> {
    let standing = tracer.standing(tid)?;
    if let Some(registers) = standing.registers {
        return Ok(registers);
    }
    let registers = sys::registers(tid).map_err(|error| lost(tid, "PTRACE_GETREGS", error))?;
    standing.registers = Some(registers);
    Ok(registers)
}

/// Converts the error of a request on a stopped thread: it fails with ESRCH only if the thread was killed.
pub(crate) fn lost(tid: i32, call: &'static str, source: std::io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ESRCH) => Error::ThreadGone(Tid(tid)),
        _ => Error::Os { call, id: tid, source },
    }
}
