//! One thread that stands.

use crate::{Error, Registers, Remote, Tid};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use stillpoint_patch_format::Avma;

/// A thread that stands, held by a [`Stopped`] or a [`Frozen`](crate::Frozen).
#[derive(Debug)]
pub struct Held<'s> {
    tid: Tid,
    session: PhantomData<&'s mut ()>,
}

impl Held<'_> {
    /// The thread.
    pub fn tid(&self) -> Tid {
        self.tid
    }

    /// Its registers, as the program will see them when it runs on (fetched once, then kept).
    pub fn registers(&mut self) -> Result<Registers, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Changes its registers.
    pub fn set_registers(&mut self, _registers: &Registers) -> Result<(), Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Base of its thread-local storage. A kernel worker shows its creator's: see [`Registers::no_user_side`].
    pub fn fs_base(&mut self) -> Result<Avma, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Whether job control has stopped the process (it stays so when let go).
    pub fn group_stopped(&self) -> bool {
        false
    }

    /// Its own stack as far as it is in use: from the stack pointer (less the red zone) to the end of the stack. `None`
    /// when the stack pointer is not in the thread's own stack (coroutine, alternate signal stack).
    pub fn own_stack(&mut self) -> Result<Option<(Avma, Avma)>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Whether the thread could carry remote calls now, and if not, why.
    pub fn carrier_fault(&mut self) -> Result<Option<String>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Checks that the thread's seccomp filters allow `rt_sigreturn` and each of these calls, exactly as they would
    /// be made. Touches nothing.
    pub fn check_syscalls(&mut self, _calls: &[(u64, [u64; 6])]) -> Result<(), Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Makes the thread ready for several remote calls; it is put back when the value is dropped, by itself if the
    /// tool is killed.
    pub fn begin_remote(&mut self) -> Result<Remote<'_>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// One remote system call: begin, call, put back.
    pub fn remote(&mut self, _nr: u64, _args: [u64; 6]) -> Result<u64, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Calls `int f(void)` on the thread's own stack. On time-out the function runs on and the thread restores itself
    /// when it returns.
    pub fn call_function(&mut self, _function: Avma, _limit: Duration) -> Result<i32, Error> {
        Err(Error::Unsupported("this yet"))
    }
}

/// One thread stopped alone. Dropping it lets the thread go.
#[derive(Debug)]
pub struct Stopped<'s>(Held<'s>);

impl Stopped<'_> {
    /// Lets the thread go and says for how long it stood, from being observed stopped to here, in nanoseconds. An
    /// interrupted system call is made to restart where the kernel does not do it by itself.
    pub fn resume(self) -> Result<u64, Error> {
        Err(Error::Unsupported("this yet"))
    }
}

impl<'s> Deref for Stopped<'s> {
    type Target = Held<'s>;

    fn deref(&self) -> &Held<'s> {
        &self.0
    }
}

impl<'s> DerefMut for Stopped<'s> {
    fn deref_mut(&mut self) -> &mut Held<'s> {
        &mut self.0
    }
}
