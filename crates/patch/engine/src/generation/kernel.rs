//! State of a process's generations in the kernel, and the calls that change them (`crates/patch/generations/man/asgen.2`).

use crate::Error;
use crate::event_pump;
use crate::ledger::Transition;
use serde::Serialize;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{self as tracee, Pid, Process, Session, StoppedThread, Tid};

const SYS_MSEAL: u64 = 462;
const SYS_ASGEN: u64 = 548;
const PIN: u64 = 1;
const CREATE: u64 = 2;
const WRITE: u64 = 3;
const MIGRATE: u64 = 4;
const COMMIT: u64 = 5;
const DELETE: u64 = 6;
const COMMIT_WHEREVER: u64 = 8;
/// Bytes written by one call; a jump is shorter.
const PIECE_LEN: usize = 8;
/// Bytes of our memory in the target that calls need: a `struct asgen_write` and the bytes that it writes.
pub(super) const SCRATCH_LEN: usize = 24 + PIECE_LEN;

/// A generation of a process, besides its base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Generation {
    /// Number of the generation.
    pub number: u32,
    /// `known`, `committing` or `deleted`.
    pub state: String,
    /// Number of threads in it.
    pub threads: u32,
    /// Number of pages that differ from the base.
    pub pages: u64,
}

/// Returns true if the running kernel has generations. It checks for the file, because another kernel may use the number of the call for
/// another purpose.
pub(super) fn has_generations() -> bool {
    Path::new("/proc/self/generations").exists()
}

/// Returns the generations of a process; `None` if they are not visible.
pub(crate) fn generations(pid: Pid) -> Option<Vec<Generation>> {
    let text = kernel_files::text(format!("/proc/{pid}/generations")).ok()?;
    Some(text.lines().skip(1).filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Generation> {
    let mut words = line.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    let state = words.next()?.to_owned();
    Some(Generation { number, state, threads: words.next()?.parse().ok()?, pages: words.next()?.parse().ok()? })
}

/// Returns the generation of a thread, 0 for the base; `None` if the thread has ended.
pub(super) fn generation_of(process: &Process, tid: Tid) -> Option<u32> {
    let path = format!("/proc/{}/task/{tid}/generation", process.pid());
    kernel_files::text(path).ok()?.trim().parse().ok()
}

/// Returns the threads of a process that are in the base, without the kernel's workers.
pub(crate) fn in_base(process: &Process) -> Result<Vec<Tid>, Error> {
    let mut threads = process.threads()?;
    threads.retain(|t| !t.kernel_worker && generation_of(process, t.tid) == Some(0));
    Ok(threads.into_iter().map(|t| t.tid).collect())
}

/// Reads memory as a thread sees it; returns `false` if the thread has ended.
pub(super) fn read_as(process: &Process, tid: Tid, at: Avma, buf: &mut [u8]) -> bool {
    let memory = kernel_files::open(format!("/proc/{}/task/{tid}/mem", process.pid()));
    memory.and_then(|memory| memory.read_exact_at(buf, at.0)).is_ok()
}

/// Migrates a stopped thread to a generation.
pub(super) fn migrate(thread: &mut StoppedThread<'_>, generation: u32) -> Result<(), tracee::Error> {
    thread.remote(SYS_ASGEN, [MIGRATE, generation.into(), 0, 0, 0, 0]).map(drop)
}

/// Makes a thread of the process commit a generation.
pub(super) fn commit(process: &Process, session: &mut Session<'_>, generation: u32) -> Result<(), Error> {
    one_call(process, session, [COMMIT, generation.into(), 0, 0, 0, 0])
}

/// Makes a thread of a frozen process commit a generation without a check of the threads: none is inside the code that changes.
pub(super) fn commit_wherever(carrier: &mut StoppedThread<'_>, generation: u32) -> Result<(), tracee::Error> {
    carrier.remote(SYS_ASGEN, [COMMIT_WHEREVER, generation.into(), 0, 0, 0, 0]).map(drop)
}

/// Makes a thread of the process delete a generation.
pub(super) fn delete(process: &Process, session: &mut Session<'_>, generation: u32) -> Result<(), Error> {
    one_call(process, session, [DELETE, generation.into(), 0, 0, 0, 0])
}

fn one_call(process: &Process, session: &mut Session<'_>, args: [u64; 6]) -> Result<(), Error> {
    event_pump::with_carrier(process, session, |carrier| Ok(carrier.remote(SYS_ASGEN, args).map(drop)?), &mut |_, _| {})
}

/// Makes a thread of the process create a generation in which entries and constants have their new contents; no thread is in it yet.
/// `scratch` is our memory that no code uses. The mappings that hold the entries and constants are sealed permanently.
pub(super) fn create(
    process: &Process,
    session: &mut Session<'_>,
    transition: &Transition,
    scratch: Avma,
) -> Result<u32, Error> {
    let memory = process.memory();
    let mut ranges = BTreeMap::new();
    let mappings = process.mappings()?;
    let entries = transition.sites.iter().map(|site| (&site.name, site.entry, &site.to.bytes[..]));
    let constants = transition.constants.iter().map(|constant| (&constant.name, constant.at, &constant.to[..]));
    let changes: Vec<_> = entries.chain(constants).collect();
    for &(name, at, _) in &changes {
        let mapping = mappings.iter().find(|m| m.contains(at));
        let mapping = mapping.ok_or_else(|| Error::BytesDiffer { function: name.clone(), at, offset: 0 })?;
        ranges.insert(mapping.start, mapping.end);
    }
    // each piece is as long as there is room for
    let pieces = changes.iter().flat_map(|(_, at, bytes)| {
        let starts = (at.0..).step_by(PIECE_LEN).map(Avma);
        starts.zip(bytes.chunks(PIECE_LEN))
    });
    let work = |carrier: &mut tracee::Stopped<'_>| -> Result<u32, Error> {
        let mut remote = carrier.begin_remote()?;
        for (start, end) in &ranges {
            remote.syscall(SYS_MSEAL, [start.0, end.0 - start.0, 0, 0, 0, 0])?;
            memory.write(scratch, &[start.0.to_le_bytes(), end.0.to_le_bytes()].concat())?;
            remote.syscall(SYS_ASGEN, [PIN, 0, scratch.0, 16, 0, 0])?;
        }
        let generation = remote.syscall(SYS_ASGEN, [CREATE, 0, 0, 0, 0, 0])?;
        let mut write = |(at, bytes): (Avma, &[u8])| -> Result<u64, tracee::Error> {
            let what = [at.0, scratch.0 + 24, bytes.len() as u64].map(u64::to_le_bytes).concat();
            memory.write(scratch, &[&what[..], bytes].concat())?;
            remote.syscall(SYS_ASGEN, [WRITE, generation, scratch.0, 24, 0, 0])
        };
        if let Err(error) = pieces.clone().try_for_each(|piece| write(piece).map(drop)) {
            remote.syscall(SYS_ASGEN, [DELETE, generation, 0, 0, 0, 0])?;
            return Err(error.into());
        }
        remote.finish()?;
        Ok(generation as u32)
    };
    event_pump::with_carrier(process, session, work, &mut |_, _| {})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_lists_is_read() {
        let found = parse("3 committing 17 2 5").expect("a line of the list");
        assert_eq!(found, Generation { number: 3, state: "committing".into(), threads: 17, pages: 2 });
        assert_eq!(parse("3 known"), None);
    }
}
