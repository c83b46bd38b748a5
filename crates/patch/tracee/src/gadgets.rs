//! Instructions that remote calls need, found in the target's own text.

use crate::bpf::Call;
use crate::seccomp::Filters;
use crate::{Error, Mapping, Pid, Process, Tid};
use memchr::memmem;
use std::ops::ControlFlow;

const SYSCALL_RET: &[u8] = &[0x0f, 0x05, 0xc3];
const RESTORER: &[u8] = &[0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00, 0x0f, 0x05];
const EXCHANGE_RET: &[u8] = &[0x97, 0xc3];

/// Instructions that remote calls need, found in the target's own text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gadgets {
    /// Address of `syscall; ret`.
    pub(crate) syscall_ret: u64,
    /// Address of the call of `rt_sigreturn`.
    pub(crate) restorer: u64,
    /// Address of `xchg %eax,%edi; ret`.
    pub(crate) exchange_ret: Option<u64>,
}

/// Instructions found in one search through the target's text.
#[derive(Debug, Default)]
pub(crate) struct Landmarks {
    syscall_ret: Option<u64>,
    exchange_ret: Option<u64>,
    /// The first restorer outside the C library.
    other_restorer: Option<u64>,
    /// Restorers in the C library, ascending within each file.
    pub(crate) signal_returns: Vec<u64>,
}

impl Landmarks {
    pub(crate) fn find(process: &Process) -> Result<Landmarks, Error> {
        let mut mappings = process.mappings()?;
        mappings.retain(|m| m.execute && m.read && !m.write && (m.inode != 0 || m.path.as_deref() == Some("[vdso]")));
        let mut found = Landmarks::default();
        // The C library first: only its restorer is the real one.
        mappings.sort_by_key(|m| !of_libc(m));
        for mapping in mappings {
            let libc = of_libc(&mapping);
            if !libc && found.is_complete() {
                break;
            }
            process.memory().look_through(mapping.start, mapping.len(), RESTORER.len() - 1, |at, text| {
                let find = |what: &[u8]| Some(at.0 + memmem::find(text, what)? as u64);
                found.syscall_ret = found.syscall_ret.or_else(|| find(SYSCALL_RET));
                found.exchange_ret = found.exchange_ret.or_else(|| find(EXCHANGE_RET));
                if libc {
                    found.signal_returns.extend(memmem::find_iter(text, RESTORER).map(|offset| at.0 + offset as u64));
                } else {
                    found.other_restorer = found.other_restorer.or_else(|| find(RESTORER));
                }
                if !libc && found.is_complete() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
        }
        Ok(found)
    }

    fn restorer(&self) -> Option<u64> {
        self.signal_returns.first().copied().or(self.other_restorer)
    }

    fn is_complete(&self) -> bool {
        self.syscall_ret.is_some() && self.exchange_ret.is_some() && self.restorer().is_some()
    }

    pub(crate) fn gadgets(&self, pid: Pid) -> Result<Gadgets, Error> {
        let missing = |what| Error::NoGadget { pid, what };
        Ok(Gadgets {
            syscall_ret: self.syscall_ret.ok_or(missing("syscall; ret"))?,
            restorer: self.restorer().ok_or(missing("mov $15,%rax; syscall"))?,
            exchange_ret: self.exchange_ret,
        })
    }
}

/// Returns true for a library that returns from signal handlers: the C library, and before glibc 2.34 its library of threads.
fn of_libc(mapping: &Mapping) -> bool {
    let file = mapping.path.as_deref().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    ["libc.so", "libc-2", "libpthread"].iter().any(|name| file.starts_with(name))
}

impl Gadgets {
    /// Refuses a call, or the `rt_sigreturn` after it, that the thread's filters do not allow.
    pub(crate) fn check(&self, filters: &Filters, tid: Tid, nr: u64, args: [u64; 6]) -> Result<(), Error> {
        filters.check(tid, &Call { nr: nr as u32, ip: self.syscall_ret + 2, args })?;
        self.check_return(filters, tid, args)
    }

    /// Refuses the `rt_sigreturn` if the thread's filters do not allow it.
    pub(crate) fn check_return(&self, filters: &Filters, tid: Tid, args: [u64; 6]) -> Result<(), Error> {
        let ip = self.restorer_end();
        filters.check(tid, &Call { nr: libc::SYS_rt_sigreturn as u32, ip, args })
    }
    /// Returns the address after the system call of the restorer.
    pub(crate) fn restorer_end(&self) -> u64 {
        self.restorer + RESTORER.len() as u64
    }
}
