//! Quiescence points: threads of a program with libstillpoint migrate by themselves, alone or together.
//!
//! A request asks them; both mechanisms use it. A tool that is killed leaves threads blocked until the deadline that it wrote into the
//! request.

pub mod abi;
mod library;
mod point_status;
pub(crate) mod rendezvous;

use crate::error::Busy;
use crate::{Error, options::Quiescence};
pub use abi::{Name, ThreadState};
pub(crate) use library::{Library, own_word};
pub(crate) use point_status::read_points;
pub use point_status::{PendingRequest, QuiescencePoints, RegisteredThread};
use stillpoint_patch_format::Scope;
use stillpoint_patch_tracee::{Module, Process};

/// Refuses a mode that guarantees less than the patch requires.
pub(crate) fn check_scope(patch: &str, scope: Scope, quiescence: Quiescence) -> Result<(), Error> {
    if quiescence.satisfies(scope) {
        return Ok(());
    }
    let scope = if scope == Scope::Process { "process" } else { "thread-group" };
    Err(Error::Scope { patch: patch.to_owned(), scope: scope.into() })
}

/// Refuses a mode that needs quiescence points, for a process without any.
pub(crate) fn check_points(process: &Process, modules: &[Module], quiescence: Quiescence) -> Result<(), Error> {
    if !quiescence.needs_points() {
        return Ok(());
    }
    let refuse = |why: String| Err(Error::NoPoints { pid: process.pid(), mode: quiescence.to_string(), why });
    let Some(library) = Library::find(process, modules)? else {
        return refuse(match Library::other_version(process, modules)? {
            Some(version) => format!(
                "its libstillpoint has control blocks of version {version}, but this program knows version {}: restart the \
                 process with the library that came with this program",
                abi::VERSION
            ),
            None => "it has no libstillpoint".into(),
        });
    };
    if library.control(process.memory())?.priorities == 0 {
        return refuse("it has libstillpoint but never called sp_init".into());
    }
    let slots = library.slots(process.memory())?;
    if slots.is_empty() {
        return refuse("none of its threads has called sp_thread_birth".into());
    }
    let Quiescence::Group(name) = quiescence else { return Ok(()) };
    if slots.iter().any(|slot| slot.group == name) {
        return Ok(());
    }
    let mut groups: Vec<String> =
        slots.iter().filter(|s| !s.group.is_empty()).map(|slot| slot.group.to_string()).collect();
    groups.sort_unstable();
    groups.dedup();
    let there = if groups.is_empty() { "no groups".to_owned() } else { format!("the groups {}", groups.join(", ")) };
    refuse(format!("it has no thread of the group {name}; it has {there}"))
}

/// Returns the busy threads that would be probed: the others migrate at their points.
pub(crate) fn to_be_probed(
    process: &Process,
    modules: &[Module],
    quiescence: Quiescence,
    mut busy: Vec<Busy>,
) -> Result<Vec<Busy>, Error> {
    if quiescence.needs_points()
        && let Some((_, parts)) = read_points(process, modules)?
    {
        busy.retain(|b| !parts.contains_key(&b.tid));
    }
    Ok(busy)
}
