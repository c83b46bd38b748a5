//! Calls made by a stopped thread on our behalf.

use crate::{Error, Tid};
use std::marker::PhantomData;
use std::time::Duration;
use stillpoint_patch_format::Avma;

/// A thread ready for remote calls. Dropping it puts the thread back exactly to where it stood.
///
/// At every moment the thread's registers lead, without us, to `rt_sigreturn` from a frame on its own stack that
/// restores it and makes an interrupted system call anew.
#[derive(Debug)]
pub struct Remote<'h> {
    tid: Tid,
    held: PhantomData<&'h mut ()>,
}

impl Remote<'_> {
    /// The thread.
    pub fn tid(&self) -> Tid {
        self.tid
    }

    /// Makes a system call; seccomp filters are evaluated for exactly this call first. What it returned, or
    /// [`Error::RemoteSyscall`] for an errno.
    pub fn syscall(&mut self, _nr: u64, _args: [u64; 6]) -> Result<u64, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Calls `int f(void)`.
    pub fn function(&mut self, _function: Avma, _limit: Duration) -> Result<i32, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Puts the thread back. What `drop` does, with the error.
    pub fn finish(self) -> Result<(), Error> {
        Err(Error::Unsupported("this yet"))
    }
}
