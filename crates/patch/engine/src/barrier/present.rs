//! What a status tells of the threads that take part, and of the request that they are asked to follow.

use super::Library;
use super::abi::{Control, Mode, Request, Slot, ThreadState};
use crate::Error;
use crate::report::now_ns;
use serde::Serialize;
use std::collections::BTreeMap;
use stillpoint_patch_tracee::{Module, Process, Tid};

/// A thread's part in quiescence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// Its group; none for no group.
    pub group: Option<String>,
    /// Its role: lower ones stand first.
    pub priority: u32,
    /// What it is doing.
    pub state: ThreadState,
    /// A request waits for it.
    pub blocks: bool,
}

/// Quiescence points of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Points {
    /// Priorities in use; 0 when the program never called `sp_init`.
    pub priorities: u32,
    /// Threads that take part.
    pub registered: u32,
    /// How many the program believes to have; 0 when it did not say.
    pub program_threads: u32,
    /// What threads are asked now.
    pub request: Option<Asked>,
}

/// A request under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Asked {
    /// `local`, `group`, `global`, or `others` (the first half of a group's).
    pub mode: String,
    /// For `group` and `others`.
    pub group: Option<String>,
    /// Who asks.
    pub patcher_pid: i32,
    /// Milliseconds until threads stop waiting by themselves.
    pub left_ms: u64,
    /// Threads that stand.
    pub standing: u32,
    /// Threads that it waits for.
    pub awaited: u32,
}

fn asked(request: &Request, slots: &[Slot]) -> Asked {
    let count = |wanted: &dyn Fn(&&Slot) -> bool| slots.iter().filter(wanted).count() as u32;
    Asked {
        mode: format!("{:?}", request.mode).to_lowercase(),
        group: (!request.group.is_empty()).then(|| request.group.to_string()),
        patcher_pid: request.patcher_pid,
        left_ms: request.deadline_ns.saturating_sub(now_ns()) / 1_000_000,
        standing: count(&|slot| slot.state == ThreadState::Blocked),
        awaited: count(&|slot| request.awaits(slot)),
    }
}

/// A local request that has passed its deadline asks nobody to hurry; threads only take it when they come by.
fn current(control: &Control) -> Option<&Request> {
    let overdue =
        |request: &&Request| now_ns() < request.deadline_ns || !matches!(request.mode, Mode::Local | Mode::Others);
    control.pending().filter(overdue)
}

/// What takes part, by thread.
pub(crate) type Parts = BTreeMap<Tid, (Part, Slot)>;

/// What the library of a process knows, when it has one; nobody is stopped for it.
pub(crate) fn present(process: &Process, modules: &[Module]) -> Result<Option<(Points, Parts)>, Error> {
    let Some(mut library) = Library::find(process, modules)? else { return Ok(None) };
    let control = library.control(process.memory())?;
    let slots = library.slots(process.memory())?;
    let threads: Vec<Tid> = process.threads()?.iter().map(|thread| thread.tid).collect();
    library.learn(process, &threads);
    let request = current(&control);
    let part = |slot: &Slot| Part {
        name: slot.name.to_string(),
        group: (!slot.group.is_empty()).then(|| slot.group.to_string()),
        priority: slot.priority,
        state: slot.state,
        blocks: request.is_some_and(|request| request.awaits(slot)),
    };
    let parts = slots.iter().filter_map(|slot| Some((library.thread(slot)?, (part(slot), *slot)))).collect();
    let points = Points {
        priorities: control.priorities,
        registered: slots.len() as u32,
        program_threads: control.program_threads,
        request: request.map(|request| asked(request, &slots)),
    };
    Ok(Some((points, parts)))
}
