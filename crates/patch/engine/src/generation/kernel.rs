//! What the kernel says of a process's generations, and the calls that change them (`crates/patch/generations/man/asgen.2`).

use crate::Error;
use crate::calm;
use crate::ledger::Transition;
use serde::Serialize;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{self as tracee, Held, Pid, Process, Session, Tid};

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
/// Bytes of memory of ours in the target that calls need: a `struct asgen_write` and what it writes.
pub(super) const SCRATCH_LEN: usize = 24 + PIECE_LEN;

/// A generation of a process, besides its base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Generation {
    /// Its number.
    pub number: u32,
    /// `known`, `committing` or `deleted`.
    pub state: String,
    /// Threads in it.
    pub threads: u32,
    /// Pages that differ from the base.
    pub pages: u64,
}

/// Whether the kernel that runs has generations. Asking for the file tells it without a call whose number another kernel may
/// have given to something else.
pub(super) fn has_generations() -> bool {
    Path::new("/proc/self/generations").exists()
}

/// The generations of a process; `None` where they cannot be seen.
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

/// The generation that a thread is in, 0 for the base; `None` when it has ended.
pub(super) fn generation_of(process: &Process, tid: Tid) -> Option<u32> {
    let path = format!("/proc/{}/task/{tid}/generation", process.pid());
    kernel_files::text(path).ok()?.trim().parse().ok()
}

/// Threads of a process that are in the base, the kernel's workers apart.
pub(crate) fn in_base(process: &Process) -> Result<Vec<Tid>, Error> {
    let mut threads = process.threads()?;
    threads.retain(|t| !t.kernel_worker && generation_of(process, t.tid) == Some(0));
    Ok(threads.into_iter().map(|t| t.tid).collect())
}

/// Reads what a thread sees; `false` when it has ended.
pub(super) fn read_as(process: &Process, tid: Tid, at: Avma, buf: &mut [u8]) -> bool {
    let memory = kernel_files::open(format!("/proc/{}/task/{tid}/mem", process.pid()));
    memory.and_then(|memory| memory.read_exact_at(buf, at.0)).is_ok()
}

/// Takes a thread that stands to a generation.
pub(super) fn migrate(thread: &mut Held<'_>, generation: u32) -> Result<(), tracee::Error> {
    thread.remote(SYS_ASGEN, [MIGRATE, generation.into(), 0, 0, 0, 0]).map(drop)
}

/// Has a thread of the process commit a generation.
pub(super) fn commit(process: &Process, session: &mut Session<'_>, generation: u32) -> Result<(), Error> {
    one_call(process, session, [COMMIT, generation.into(), 0, 0, 0, 0])
}

/// Has a thread of a frozen process commit a generation wherever threads are: none is in the middle of what changes.
pub(super) fn commit_wherever(carrier: &mut Held<'_>, generation: u32) -> Result<(), tracee::Error> {
    carrier.remote(SYS_ASGEN, [COMMIT_WHEREVER, generation.into(), 0, 0, 0, 0]).map(drop)
}

/// Has a thread of the process delete a generation.
pub(super) fn delete(process: &Process, session: &mut Session<'_>, generation: u32) -> Result<(), Error> {
    one_call(process, session, [DELETE, generation.into(), 0, 0, 0, 0])
}

fn one_call(process: &Process, session: &mut Session<'_>, args: [u64; 6]) -> Result<(), Error> {
    calm::with_carrier(process, session, |carrier| Ok(carrier.remote(SYS_ASGEN, args).map(drop)?), &mut |_, _| {})
}

/// Has a thread of the process make a generation in which entries and constants hold what they come to hold; nobody is in it
/// yet. `scratch` is memory of ours that nobody uses. The mappings with them are sealed for good.
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
    // as much at a time as there is room for
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
    calm::with_carrier(process, session, work, &mut |_, _| {})
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
