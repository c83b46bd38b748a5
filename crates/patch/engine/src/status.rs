//! Patches of processes, verified against their memory. Nothing is changed here.

use crate::event_pump::ended_or;
use crate::generation::{Generation, generations, in_base};
use crate::generation_word::transition_of_word;
use crate::ledger::store::{self, Store};
use crate::ledger::{ConstantRecord, Phase, View, first_of};
use crate::points::abi::Slot;
use crate::points::{QuiescencePoints, RegisteredThread};
use crate::{Error, event_pump};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format::{Avma, Scope};
use stillpoint_patch_insn::{JUMP_LEN, jump5};
use stillpoint_patch_tracee::{self as tracee, Pid, Process, Session, Stopped, Tid};

/// State of one process.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Status {
    /// Number of the process.
    pub pid: i32,
    /// Its command name.
    pub name: String,
    /// Number of the last transition committed, 0 for the code as shipped.
    pub generation: u32,
    /// A transition that a killed tool left, or that another tool runs now.
    pub unfinished: Option<UnfinishedTransition>,
    /// Active patches, oldest first.
    pub patches: Vec<PatchStatus>,
    /// Every entry that was ever redirected.
    pub entries: Vec<EntryStatus>,
    /// Generation of each thread by its own word.
    pub threads: Vec<ThreadStatus>,
    /// True if another tool traces the threads: only words of threads that libstillpoint knows were read.
    #[serde(skip)]
    pub traced: bool,
    /// Its quiescence points, if it has libstillpoint.
    pub points: Option<QuiescencePoints>,
    /// Address-space generations, if the kernel supports them; one exists while `--view generation` works on the process.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub generations: Vec<Generation>,
    /// Memory that patches occupy, active or not, in bytes.
    pub bytes_kept: u64,
    /// Used bytes of the ledger.
    pub ledger_bytes: u64,
}

/// A transition that has not ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UnfinishedTransition {
    /// Number of the transition.
    pub transition: u32,
    /// `apply`, `revert`, `replace`.
    pub operation: String,
    /// Progress; `resting` if it waits only for threads that may stay in old code.
    pub phase: String,
    /// Numbers of those threads, if it rests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub staying: Vec<i32>,
    /// Functions in which they may stay.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub may_stay: Vec<String>,
}

/// An active patch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PatchStatus {
    /// Name of the patch.
    pub name: String,
    /// SHA-256 of its file's body, as hex.
    pub digest: String,
    /// Description in one line, for people.
    pub description: String,
    /// CVE identifiers.
    pub cves: Vec<String>,
    /// Module that it patches.
    pub module: String,
    /// Build-id of that module.
    pub build_id: String,
    /// Functions that it redirects.
    pub functions: Vec<String>,
    /// Variables and constants whose contents it has written.
    pub data: Vec<DataStatus>,
    /// Memory of the patch in bytes.
    pub bytes: u64,
    /// Scope of the patch.
    pub scope: Scope,
    /// Key that signed it.
    pub signer: Option<String>,
    /// Wall-clock seconds since 1970 of its placement.
    pub placed_at_s: u64,
}

/// A variable or constant whose contents a patch has written.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataStatus {
    /// Name of the variable.
    pub name: String,
    /// Address of the variable.
    pub address: String,
    /// False if the program has changed it since: then no patch that wrote it can be reverted.
    pub unchanged: bool,
}

/// State of an entry, or of a constant that patches change in place, in the ledger and in memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EntryStatus {
    /// Name of the function or constant.
    pub function: String,
    /// Address of the entry or constant.
    pub address: String,
    /// Patch whose code runs, or whose contents are there; `None` for the shipped bytes.
    pub patch: Option<String>,
    /// True if memory holds the bytes that the ledger states.
    pub verified: bool,
}

/// State of a thread's word.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ThreadStatus {
    /// Number of the thread.
    pub tid: i32,
    /// Number of the last transition that it went through; `None` if it was created after the last one, or could not be read.
    pub transition: Option<u32>,
    /// Its state in libstillpoint; `None` if the library does not know it.
    #[serde(flatten)]
    pub registered: Option<RegisteredThread>,
}

/// Reads the status of one process. Each thread is stopped for some microseconds, one after another, to find its word. While another tool
/// traces them, only the words of threads known to libstillpoint are reported.
///
/// # Errors
/// The process cannot be read or traced, its ledger is invalid, or it has ended.
pub fn status(pid: Pid) -> Result<Status, Error> {
    let (process, traced) = match Process::open(pid) {
        Err(tracee::Error::AlreadyTraced { .. }) => (Process::watch(pid)?, true),
        other => (other?, false),
    };
    let found = read_status(&process, traced);
    found.map_err(|error| ended_or(&process, error))
}

fn read_status(process: &Process, traced: bool) -> Result<Status, Error> {
    let pid = process.pid();
    let name = process.status()?.name;
    let found = crate::points::read_points(process, &process.modules()?)?;
    let (points, parts) = found.map_or_else(Default::default, |(points, parts)| (Some(points), parts));
    let known = |(tid, (part, _)): (&Tid, &(RegisteredThread, Slot))| ThreadStatus {
        tid: tid.0,
        transition: None,
        registered: Some(part.clone()),
    };
    let Some(store) = store::find(process)? else {
        // a process that is about to end has no memory any more, even if it was patched
        if process.mappings()?.is_empty() {
            return Err(Error::Ended(pid));
        }
        let threads = parts.iter().map(known).collect();
        let generations = generations(pid).unwrap_or_default();
        return Ok(Status { pid: pid.0, name, threads, traced, points, generations, ..Status::default() });
    };
    let view = store.view();
    let offset = store.ledger.word_offset;
    let mut threads = match traced {
        false => event_pump::traced(process, |session| read_words(session, process, offset))?,
        true => registered_words(process, &parts, offset)?,
    };
    for thread in &mut threads {
        thread.registered = parts.get(&Tid(thread.tid)).map(|(part, _)| part.clone());
    }
    Ok(Status { points, traced, ..summary(process, name, &store, view, threads)? })
}

/// Returns the contents of [`status`] without stopping any thread, and so without the threads' words.
///
/// # Errors
/// The process cannot be read, its ledger is invalid, or it has ended.
pub fn peek(pid: Pid) -> Result<Option<Status>, Error> {
    let process = Process::open(pid)?;
    let Some(store) = store::find(&process)? else { return Ok(None) };
    let name = process.status()?.name;
    summary(&process, name, &store, store.view(), Vec::new()).map(Some)
}

fn summary(
    process: &Process,
    name: String,
    store: &Store,
    view: &View,
    threads: Vec<ThreadStatus>,
) -> Result<Status, Error> {
    let data = view.data(&view.active);
    let patches = view.active.iter().filter_map(|n| view.patch(*n)).map(|p| PatchStatus {
        name: p.name.clone(),
        digest: hex::encode(p.digest),
        description: p.description.clone(),
        cves: p.cves.clone(),
        module: p.module.clone(),
        build_id: p.build_id.to_string(),
        functions: p.functions.iter().map(|f| f.name.clone()).collect(),
        data: p.data.iter().map(|c| data_status(process, data.get(&c.at).copied(), c)).collect(),
        bytes: p.arena.len,
        scope: p.scope,
        signer: p.signer.clone(),
        placed_at_s: p.placed_at_s,
    });
    let resting = view.unfinished.as_ref().filter(|open| open.phase == Some(Phase::Resting));
    let staying = resting.map_or(Ok(Vec::new()), |_| in_base(process))?.into_iter().map(|tid| tid.0);
    let may_stay: BTreeSet<String> =
        resting.into_iter().flat_map(|open| &open.transition.staying).map(|code| code.name.clone()).collect();
    let unfinished = view.unfinished.as_ref().map(|open| UnfinishedTransition {
        transition: open.transition.number,
        operation: open.transition.operation.clone(),
        staying: staying.collect(),
        may_stay: may_stay.into_iter().collect(),
        phase: match open.phase {
            None => "arming",
            Some(Phase::Migrating | Phase::Committed) => "migrating",
            Some(Phase::Aborting | Phase::Aborted) => "aborting",
            Some(Phase::Resting) => "resting",
        }
        .to_owned(),
    });
    Ok(Status {
        pid: process.pid().0,
        name,
        generation: view.generation,
        unfinished,
        patches: patches.collect(),
        entries: entries(process, view)?,
        threads,
        traced: false,
        points: None,
        generations: generations(process.pid()).unwrap_or_default(),
        bytes_kept: view.bytes_kept(),
        ledger_bytes: store.ledger.end as u64,
    })
}

/// Compares a variable with what the newest active patch has written.
fn data_status(process: &Process, newest: Option<&[u8]>, written: &ConstantRecord) -> DataStatus {
    let now = process.memory().read_vec(written.at, written.new.len());
    let unchanged = now.is_ok_and(|now| newest == Some(&now[..]));
    DataStatus { name: written.name.clone(), address: written.at.to_string(), unchanged }
}

fn entries(process: &Process, view: &View) -> Result<Vec<EntryStatus>, Error> {
    let mut out = Vec::new();
    // each is looked up in a map: a hostile target may name a hundred thousand of them
    let (name_of, versions) = (|number| view.patch(number).map(|p| p.name.clone()), view.versions(&view.active));
    let functions = view.placed.iter().flat_map(|p| &p.functions);
    let names = first_of(functions.map(|f| (f.old.start, &f.name)));
    let sites = first_of(view.unfinished.iter().flat_map(|u| &u.transition.sites).map(|s| (s.entry, s)));
    for (entry, origin) in view.origins() {
        let (expected, patch) = match versions.get(&entry) {
            None => (Some(origin.original), None),
            Some((number, f)) => (jump5(entry, f.new).ok(), name_of(*number)),
        };
        let now: [u8; JUMP_LEN] = process.memory().read_array(entry)?;
        let during = sites.get(&entry).is_some_and(|s| [s.armed, s.from.bytes, s.to.bytes].contains(&now));
        let function = names.get(&entry).map(|name| (*name).clone()).unwrap_or_default();
        let verified = Some(now) == expected || during;
        out.push(EntryStatus { function, address: entry.to_string(), patch, verified });
    }
    let constants: BTreeMap<Avma, &ConstantRecord> = view.constants().map(|c| (c.at, c)).collect();
    let shipped = first_of(view.constants().map(|c| (c.at, &c.original)));
    let active = view.active.iter().rev().filter_map(|number| Some((*number, view.patch(*number)?)));
    let newest = first_of(active.flat_map(|(number, p)| p.constants.iter().map(move |c| (c.at, (number, &c.new)))));
    let moving = first_of(view.unfinished.iter().flat_map(|u| &u.transition.constants).map(|c| (c.at, c)));
    for (at, constant) in constants {
        let now = process.memory().read_vec(at, constant.new.len())?;
        let during = moving.get(&at).is_some_and(|c| [&c.from, &c.to].contains(&&now));
        let newest = newest.get(&at);
        let expected = newest.map(|(_, new)| *new).or_else(|| shipped.get(&at).copied());
        let verified = expected == Some(&now) || during;
        let patch = newest.and_then(|(number, _)| name_of(*number));
        out.push(EntryStatus { function: constant.name.clone(), address: at.to_string(), patch, verified });
    }
    Ok(out)
}

/// Returns all threads, with the words of those whose control block libstillpoint has reported.
fn registered_words(
    process: &Process,
    parts: &BTreeMap<Tid, (RegisteredThread, Slot)>,
    offset: i32,
) -> Result<Vec<ThreadStatus>, Error> {
    let word = |slot: &Slot| {
        let at = Avma(slot.thread_pointer.wrapping_add_signed(i64::from(offset)));
        transition_of_word(u32::from_le_bytes(process.memory().read_array(at).ok()?))
    };
    let of = |tid: Tid| parts.get(&tid).and_then(|(_, slot)| word(slot));
    let threads = process.threads()?.into_iter().filter(|thread| !thread.kernel_worker).map(|thread| thread.tid);
    Ok(threads.map(|tid| ThreadStatus { tid: tid.0, transition: of(tid), registered: None }).collect())
}

fn read_words(session: &mut Session<'_>, process: &Process, offset: i32) -> Result<Vec<ThreadStatus>, Error> {
    let mut out = Vec::new();
    let read_word = |stopped: &mut Stopped<'_>| {
        let registers = stopped.registers()?;
        let mut word = [0; 4];
        if !registers.has_no_user_side() && registers.fs_base != 0 {
            let at = Avma(registers.fs_base.wrapping_add_signed(i64::from(offset)));
            process.memory().read(at, &mut word)?;
        }
        let transition = transition_of_word(u32::from_le_bytes(word));
        out.push(ThreadStatus { tid: stopped.tid().0, transition, registered: None });
        Ok(())
    };
    event_pump::each_thread(process, session, read_word, &mut |_, _| {})?;
    out.sort_unstable_by_key(|t| t.tid);
    Ok(out)
}
