//! Mapping of memory in a target: few system calls, made by one of its own threads, none of them through the C library.

use crate::Error;
use crate::event_pump::with_carrier;
use crate::ledger::CAPACITY;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Process, Remote, Session, Stopped, Tid};

const SYS_MMAP: u64 = 9;
const SYS_MPROTECT: u64 = 10;
const PROT_READ: u64 = 1;
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;
const MAP_PRIVATE: u64 = 0x02;
const MAP_ANONYMOUS: u64 = 0x20;
const MAP_NORESERVE: u64 = 0x4000;
const MAP_FIXED_NOREPLACE: u64 = 0x10_0000;
const NO_FILE: u64 = u64::MAX;

/// Memory wanted in a target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryRequest {
    /// Address, and lengths in bytes of text, read-only data and data from there.
    pub(crate) arena: Option<(Avma, [u64; 3])>,
    /// True if room for a ledger, at any address, is wanted too.
    pub(crate) ledger: bool,
}

type Call = (u64, [u64; 6]);

/// Returns the calls. The arena is mapped executable as a whole, and parts of it lose that permission if they must not have it. Mapping
/// each part by itself takes as many calls, and `MemoryDenyWriteExecute=` forbids to gain the permission later. Writing and executing are
/// never allowed together; the bytes come through `/proc/PID/mem`.
fn calls(wanted: MemoryRequest) -> Vec<Call> {
    let private = MAP_PRIVATE | MAP_ANONYMOUS;
    let mut calls = Vec::new();
    if let Some((at, [text, read_only, data])) = wanted.arena {
        let len = text + read_only + data;
        let fixed = private | MAP_FIXED_NOREPLACE;
        calls.push((SYS_MMAP, [at.0, len, PROT_READ | PROT_EXEC, fixed, NO_FILE, 0]));
        if read_only > 0 {
            calls.push((SYS_MPROTECT, [at.0 + text, read_only, PROT_READ, 0, 0, 0]));
        }
        if data > 0 {
            calls.push((SYS_MPROTECT, [at.0 + text + read_only, data, PROT_READ | PROT_WRITE, 0, 0, 0]));
        }
    }
    if wanted.ledger {
        calls.push((SYS_MMAP, [0, CAPACITY, PROT_READ, private | MAP_NORESERVE, NO_FILE, 0]));
    }
    calls
}

/// Maps the wanted memory; returns the address of the ledger's room. A kill meanwhile leaves unused memory.
pub(crate) fn map(
    process: &Process,
    session: &mut Session<'_>,
    wanted: MemoryRequest,
    stopped: &mut dyn FnMut(Tid, u64),
) -> Result<Option<Avma>, Error> {
    let calls = calls(wanted);
    if calls.is_empty() {
        return Ok(None);
    }
    let work = |carrier: &mut Stopped<'_>| {
        carrier.check_syscalls(&calls)?;
        let mut remote = carrier.begin_remote()?;
        let result = run(&mut remote, &calls, wanted);
        remote.finish()?;
        result
    };
    with_carrier(process, session, work, stopped)
}

/// Checks that a thread of the target may make the calls that map the wanted memory. Changes nothing.
pub(crate) fn check_calls(
    process: &Process,
    session: &mut Session<'_>,
    wanted: MemoryRequest,
    stopped: &mut dyn FnMut(Tid, u64),
) -> Result<(), Error> {
    let calls = calls(wanted);
    with_carrier(process, session, |carrier| Ok(carrier.check_syscalls(&calls)?), stopped)
}

fn run(remote: &mut Remote<'_>, calls: &[Call], wanted: MemoryRequest) -> Result<Option<Avma>, Error> {
    let mut ledger = None;
    for (nr, args) in calls {
        let result = remote.syscall(*nr, *args)?;
        if *nr != SYS_MMAP {
            continue;
        }
        match wanted.arena {
            // kernels before 4.17 treat the flag as a mere hint
            Some((at, lens)) if args[0] == at.0 => {
                if result != at.0 {
                    return Err(Error::NoRoom { len: lens.iter().sum(), module: format!("{at}") });
                }
            }
            _ => ledger = Some(Avma(result)),
        }
    }
    Ok(ledger)
}
