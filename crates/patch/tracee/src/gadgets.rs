//! Instructions that remote calls need, found in the target's own text.

use crate::bpf::Call;
use crate::seccomp::Filters;
use crate::{Error, Mapping, Pid, Process, Tid};
use memchr::memmem;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use stillpoint_patch_format::Avma;

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

/// Instructions in one mapping of the C library, as offsets from its beginning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct LibcLandmarks {
    syscall_ret: Option<u64>,
    exchange_ret: Option<u64>,
    signal_returns: Vec<u64>,
}

/// Device, inode and path of a file, and offset and length of a mapping of it.
type MappedText = ((u32, u32), u64, Option<String>, u64, u64);

/// Results for texts of C libraries: all processes of a machine map the same.
static KNOWN: Mutex<Vec<(MappedText, LibcLandmarks)>> = Mutex::new(Vec::new());

impl LibcLandmarks {
    /// Returns those of a mapping if its file can be read. They are searched for in the file and not in the memory of a process, which may
    /// have changed its own copy, and are used for a process that has the same bytes there.
    fn of_file(process: &Process, mapping: &Mapping) -> Option<LibcLandmarks> {
        let key = (mapping.device, mapping.inode, mapping.path.clone(), mapping.offset, mapping.len());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match known.iter().find(|(text, _)| *text == key) {
            Some((_, found)) => found.clone(),
            None => {
                let mut text = vec![0; usize::try_from(mapping.len()).ok().filter(|len| *len <= LIBC_TEXT_MAX)?];
                process.open_mapping(mapping).ok()?.read_exact_at(&mut text, mapping.offset).ok()?;
                let found = LibcLandmarks::of_text(&text);
                known.push((key, found.clone()));
                found
            }
        };
        drop(known);
        found.is_in(process, mapping).then_some(found)
    }

    fn of_text(text: &[u8]) -> LibcLandmarks {
        let find = |what: &[u8]| memmem::find(text, what).map(|at| at as u64);
        let signal_returns = memmem::find_iter(text, RESTORER).map(|at| at as u64).collect();
        LibcLandmarks { syscall_ret: find(SYSCALL_RET), exchange_ret: find(EXCHANGE_RET), signal_returns }
    }

    /// Returns true if the memory of a process holds the same instructions.
    fn is_in(&self, process: &Process, mapping: &Mapping) -> bool {
        let holds = |offset: u64, code: &[u8]| {
            process.memory().read_vec(Avma(mapping.start.0 + offset), code.len()).is_ok_and(|bytes| bytes == code)
        };
        self.syscall_ret.is_none_or(|at| holds(at, SYSCALL_RET))
            && self.exchange_ret.is_none_or(|at| holds(at, EXCHANGE_RET))
            && self.signal_returns.iter().all(|at| holds(*at, RESTORER))
    }
}

/// Largest text of a C library that is read at once, in bytes.
const LIBC_TEXT_MAX: usize = 16 << 20;

impl Landmarks {
    fn add(&mut self, start: Avma, found: LibcLandmarks) {
        let address = |offset: u64| start.0 + offset;
        self.syscall_ret = self.syscall_ret.or(found.syscall_ret.map(address));
        self.exchange_ret = self.exchange_ret.or(found.exchange_ret.map(address));
        self.signal_returns.extend(found.signal_returns.into_iter().map(address));
    }

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
            if libc && let Some(of_file) = LibcLandmarks::of_file(process, &mapping) {
                found.add(mapping.start, of_file);
                continue;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_a_file_are_those_of_the_process_that_maps_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid(child.id() as i32);
        // until it has called exec, and the loader has mapped the library
        let (process, mapping) = loop {
            let is_it = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "sleep\n";
            if is_it
                && let Ok(process) = Process::open(pid)
                && let Ok(mappings) = process.mappings()
                && let Some(text) = mappings.into_iter().find(|m| m.execute && of_libc(m))
            {
                break (process, text);
            }
        };
        let found = LibcLandmarks::of_file(&process, &mapping).unwrap();
        let text = process.memory().read_vec(mapping.start, mapping.len() as usize).unwrap();
        assert_eq!(found, LibcLandmarks::of_text(&text));
        assert!(found.syscall_ret.is_some() && !found.signal_returns.is_empty());
        // the second time it is known; a process with other bytes there does not get it
        assert_eq!(LibcLandmarks::of_file(&process, &mapping), Some(found.clone()));
        let at = Avma(mapping.start.0 + found.signal_returns[0]);
        process.memory().write(at, &[0xcc]).unwrap();
        assert_eq!(LibcLandmarks::of_file(&process, &mapping), None);
        let landmarks = Landmarks::find(&process).unwrap();
        assert!(!landmarks.signal_returns.contains(&at.0), "the memory is searched");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
