//! Quiescence points: threads of a program with libstillpoint migrate by themselves, alone or together.
//!
//! ```text
//! local    arm ── ask(local) ── each thread takes its word at its point ── commit
//! group    arm ── ask(others) ── ... ── ask(group) ── members block ── frozen: all over or blocked?  commit, release
//! global   arm ── ask(global) ────────── all block ────────────────── frozen: all blocked?           commit, release
//! ```
//! The commit is the same byte as in all modes. In the modes with blocked threads it is written while they are blocked, and the whole
//! process is stopped for that moment, so that no two of them ever run different code. Threads that the library does not know are probed:
//! before the commit in the local mode, at its very moment in the others. Until the commit the transition can be rolled back. A tool that
//! is killed leaves threads blocked until the deadline that it wrote into the request.

pub mod abi;
mod gather;
mod library;
mod point_status;
pub(crate) mod rendezvous;

use crate::error::Busy;
use crate::{Error, Quiescence};
pub use abi::{Name, ThreadState};
pub(crate) use gather::FollowedRequest;
pub(crate) use library::{Library, own_word};
pub(crate) use point_status::read_points;
pub use point_status::{PendingRequest, QuiescencePoints, RegisteredThread};
use stillpoint_patch_format::Scope;
use stillpoint_patch_tracee::{Module, Process};

impl Quiescence {
    /// Parses the output of [`std::fmt::Display`]: `probe`, `local`, `group:NAME`, `global`, `stop`.
    pub fn parse(text: &str) -> Option<Quiescence> {
        match text {
            "probe" => Some(Quiescence::Probe),
            "local" => Some(Quiescence::Local),
            "global" => Some(Quiescence::Global),
            "stop" => Some(Quiescence::Stop),
            _ => text.strip_prefix("group:").and_then(Name::new).map(Quiescence::Group),
        }
    }

    /// Returns true if old and new code never run at the same time where the scope forbids it.
    fn satisfies(self, scope: Scope) -> bool {
        match self {
            Quiescence::Probe | Quiescence::Local => scope == Scope::ThreadLocal,
            Quiescence::Group(_) => scope != Scope::Process,
            Quiescence::Global | Quiescence::Stop => true,
        }
    }

    fn needs_points(self) -> bool {
        matches!(self, Quiescence::Local | Quiescence::Group(_) | Quiescence::Global)
    }
}

impl std::fmt::Display for Quiescence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Quiescence::Probe => f.write_str("probe"),
            Quiescence::Local => f.write_str("local"),
            Quiescence::Group(name) => write!(f, "group:{name}"),
            Quiescence::Global => f.write_str("global"),
            Quiescence::Stop => f.write_str("stop"),
        }
    }
}

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
