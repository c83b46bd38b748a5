//! Status of the registered threads, and of the request that they are asked to follow.

use super::Library;
use super::abi::{Control, Mode, Request, Slot, ThreadState};
use crate::Error;
use crate::report::now_ns;
use serde::Serialize;
use std::collections::BTreeMap;
use stillpoint_patch_tracee::{Module, Process, Tid};

/// State of one thread in quiescence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RegisteredThread {
    /// Name that the program gave the thread.
    pub name: String,
    /// Its group; `None` for no group.
    pub group: Option<String>,
    /// Priority of its role: lower ones block first.
    pub priority: u32,
    /// Activity of the thread.
    pub state: ThreadState,
    /// True if a request waits for it.
    pub blocks: bool,
}

/// Quiescence points of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct QuiescencePoints {
    /// Number of priorities; 0 if the program never called `sp_init`.
    pub priorities: u32,
    /// Number of registered threads.
    pub registered: u32,
    /// Number of threads that the program reports; 0 if it reported none.
    pub program_threads: u32,
    /// The present request to the threads.
    pub request: Option<PendingRequest>,
}

/// A pending request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PendingRequest {
    /// `local`, `group`, `global`, or `others` (the first half of a group's).
    pub mode: String,
    /// Group for `group` and `others`.
    pub group: Option<String>,
    /// Number of the process that makes the request.
    pub patcher_pid: i32,
    /// Milliseconds until threads stop waiting by themselves.
    pub left_ms: u64,
    /// Number of blocked threads.
    #[serde(rename = "standing")]
    pub blocked: u32,
    /// Number of threads that it waits for.
    pub awaited: u32,
}

fn pending_request(request: &Request, slots: &[Slot]) -> PendingRequest {
    let count = |wanted: &dyn Fn(&&Slot) -> bool| slots.iter().filter(wanted).count() as u32;
    PendingRequest {
        mode: format!("{:?}", request.mode).to_lowercase(),
        group: (!request.group.is_empty()).then(|| request.group.to_string()),
        patcher_pid: request.patcher_pid,
        left_ms: request.deadline_ns.saturating_sub(now_ns()) / 1_000_000,
        blocked: count(&|slot| slot.state == ThreadState::Blocked),
        awaited: count(&|slot| request.awaits(slot)),
    }
}

/// Returns the request, except a local one after its deadline: no thread waits for that, threads only take it at their points.
fn current(control: &Control) -> Option<&Request> {
    let overdue =
        |request: &&Request| now_ns() < request.deadline_ns || !matches!(request.mode, Mode::Local | Mode::Others);
    control.pending().filter(overdue)
}

/// Registered threads by their number.
pub(crate) type RegisteredThreads = BTreeMap<Tid, (RegisteredThread, Slot)>;

/// Reads the state of the process's library, if it has one; stops no thread.
pub(crate) fn read_points(
    process: &Process,
    modules: &[Module],
) -> Result<Option<(QuiescencePoints, RegisteredThreads)>, Error> {
    let Some(mut library) = Library::find(process, modules)? else { return Ok(None) };
    let control = library.control(process.memory())?;
    let slots = library.slots(process.memory())?;
    let threads: Vec<Tid> = process.threads()?.iter().map(|thread| thread.tid).collect();
    library.update_tids(process, &threads);
    let request = current(&control);
    let registered = |slot: &Slot| RegisteredThread {
        name: slot.name.to_string(),
        group: (!slot.group.is_empty()).then(|| slot.group.to_string()),
        priority: slot.priority,
        state: slot.state,
        blocks: request.is_some_and(|request| request.awaits(slot)),
    };
    let parts = slots.iter().filter_map(|slot| Some((library.thread(slot)?, (registered(slot), *slot)))).collect();
    let points = QuiescencePoints {
        priorities: control.priorities,
        registered: slots.len() as u32,
        program_threads: control.program_threads,
        request: request.map(|request| pending_request(request, &slots)),
    };
    Ok(Some((points, parts)))
}
