//! Operations on one stopped thread.

use crate::tracer::Tracer;
use crate::{Error, Registers, Remote, Tid, carrier, seccomp};
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use stillpoint_patch_format::Avma;

/// A stopped thread, held by a [`Stopped`] or a [`FrozenProcess`](crate::FrozenProcess).
#[derive(Debug)]
pub struct StoppedThread<'s> {
    tracer: &'s mut Tracer,
    tid: i32,
}

impl<'s> StoppedThread<'s> {
    pub(crate) fn new(tracer: &'s mut Tracer, tid: i32) -> StoppedThread<'s> {
        StoppedThread { tracer, tid }
    }

    /// Returns the thread.
    pub fn tid(&self) -> Tid {
        Tid(self.tid)
    }

    /// Returns its registers (read once, then kept). In a thread interrupted in a system call, `rax` is the kernel's code and `orig_rax`
    /// the call.
    ///
    /// # Errors
    /// [`Error::ThreadGone`] if it was killed.
    pub fn registers(&mut self) -> Result<Registers, Error> {
        self.tracer.registers(self.tid)
    }

    /// Returns the base of its thread-local storage. A kernel worker shows its creator's: see [`Registers::has_no_user_side`].
    ///
    /// # Errors
    /// As [`StoppedThread::registers`].
    pub fn fs_base(&mut self) -> Result<Avma, Error> {
        Ok(Avma(self.registers()?.fs_base))
    }

    /// Returns true if job control has stopped the process (it stays stopped when it is resumed).
    pub fn group_stopped(&mut self) -> bool {
        self.tracer.stop_state(self.tid).is_ok_and(|stop_state| stop_state.group_stop)
    }

    /// Returns the reason why the thread cannot carry remote calls now, or `None` if it can.
    ///
    /// # Errors
    /// As [`StoppedThread::own_stack`].
    pub fn carrier_fault(&mut self) -> Result<Option<String>, Error> {
        carrier::fault(self.tracer, self.tid)
    }

    /// Checks that the thread's seccomp filters allow `rt_sigreturn` and each of these calls, exactly as they would be made. Changes
    /// nothing.
    ///
    /// # Errors
    /// [`Error::NoGadget`], [`Error::Seccomp`], or the process or its filters cannot be read.
    pub fn check_syscalls(&mut self, calls: &[(u64, [u64; 6])]) -> Result<(), Error> {
        let gadgets = self.tracer.process.find_gadgets()?;
        let filters = seccomp::Filters::of(&self.tracer.process, Tid(self.tid))?;
        calls.iter().try_for_each(|(nr, args)| gadgets.check(&filters, Tid(self.tid), *nr, *args))
    }

    /// Makes the thread ready for several remote calls. It is restored when the value is dropped; if the tool is killed, it restores
    /// itself.
    ///
    /// # Errors
    /// [`Error::BadCarrier`], [`Error::NoGadget`], [`Error::Seccomp`], or a part of its state cannot be read or written.
    pub fn begin_remote(&mut self) -> Result<Remote<'_>, Error> {
        Remote::begin(self.tracer, self.tid)
    }

    /// Makes one remote system call: begin, call, restore.
    ///
    /// # Errors
    /// As for [`StoppedThread::begin_remote`] and [`Remote::syscall`], or the thread cannot be restored.
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
    ///
    /// # Errors
    /// As [`StoppedThread::begin_remote`] and [`Remote::function`].
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
    held: StoppedThread<'s>,
    resumed: bool,
}

impl<'s> Stopped<'s> {
    pub(crate) fn new(tracer: &'s mut Tracer, tid: i32) -> Stopped<'s> {
        Stopped { held: StoppedThread::new(tracer, tid), resumed: false }
    }

    /// Resumes the thread and returns for how long it was stopped, in nanoseconds, from the moment when the stop was observed. An
    /// interrupted system call is made to restart if the kernel does not restart it by itself.
    ///
    /// # Errors
    /// The kernel refuses to resume it.
    pub fn resume(mut self) -> Result<u64, Error> {
        self.resume_thread()
    }

    fn resume_thread(&mut self) -> Result<u64, Error> {
        self.resumed = true;
        let result = self.held.tracer.resume_thread(self.held.tid);
        self.held.tracer.timer.disarm();
        self.held.tracer.lower_priority();
        result
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if !self.resumed {
            let _ = self.resume_thread();
        }
    }
}

impl<'s> Deref for Stopped<'s> {
    type Target = StoppedThread<'s>;

    fn deref(&self) -> &StoppedThread<'s> {
        &self.held
    }
}

impl<'s> DerefMut for Stopped<'s> {
    fn deref_mut(&mut self) -> &mut StoppedThread<'s> {
        &mut self.held
    }
}
