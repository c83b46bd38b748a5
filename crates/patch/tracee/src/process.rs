//! A process as seen through `/proc`: nothing here stops or changes it.

use crate::{Error, Libc, Mapping, Memory, Module, Pid, Status, ThreadActivity, ThreadInfo, Tid};
use std::fs::File;

/// A running x86-64 process that may be traced. Holds a pidfd and `/proc/PID`, so that a reused number is noticed.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
}

impl Process {
    /// Opens a process, or refuses by name: gone, zombie, a thread's number, kernel thread, 32-bit, static, traced by
    /// somebody, the tool itself, no permission.
    pub fn open(_pid: Pid) -> Result<Process, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Its number.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Whether it is still the process that was opened, and has not ended (a zombie has).
    pub fn is_alive(&self) -> bool {
        false
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        unimplemented!()
    }

    /// All threads, kernel workers included and marked, in the kernel's order (oldest first).
    pub fn threads(&self) -> Result<Vec<ThreadInfo>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// All mappings, ascending by address.
    pub fn mappings(&self) -> Result<Vec<Mapping>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// All ELF files mapped, the executable first, the vdso included; what they are is read from the mapped memory.
    pub fn modules(&self) -> Result<Vec<Module>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// The executable, even when it was deleted or replaced on disk.
    pub fn open_exe(&self) -> Result<File, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// The file behind a mapping, even when it was deleted or replaced on disk: through `map_files`, else by path
    /// below the process's root when device and inode agree.
    pub fn open_mapping(&self, _mapping: &Mapping) -> Result<File, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Which C library is mapped.
    pub fn libc(&self) -> Result<Libc, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Whether a shadow stack is active in any thread (`x86_Thread_features` in `/proc`).
    pub fn shadow_stack(&self) -> Result<bool, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Fields of `/proc/PID/status`.
    pub fn status(&self) -> Result<Status, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Fields of a thread's `status`.
    pub fn thread_status(&self, _tid: Tid) -> Result<Status, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Where a thread stands and how often it ran, without stopping it.
    pub fn activity(&self, _tid: Tid) -> Result<ThreadActivity, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Whether another process shares this one's memory (`CLONE_VM`: children of vfork and posix_spawn before exec).
    pub fn shares_memory(&self, _other: Pid) -> Result<bool, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// All other processes that share this one's memory.
    pub fn memory_sharers(&self) -> Result<Vec<Pid>, Error> {
        Err(Error::Unsupported("this yet"))
    }
}
