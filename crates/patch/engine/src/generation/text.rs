//! Text that the threads of a process see in its generations.

use super::kernel;
use crate::Error;
use crate::ledger::{Phase, Transition, Version};
use crate::target::Target;
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{DispatchState, JUMP_LEN, jump5};
use stillpoint_patch_tracee::{Process, Tid};

/// Returns the generations that hold threads, including the base, each with its oldest thread, which is the least likely to end meanwhile.
/// Empty if there is only the base.
pub(super) fn occupied(process: &Process) -> BTreeMap<u32, Tid> {
    if !kernel::generations(process.pid()).is_some_and(|found| found.iter().any(|g| g.threads > 0)) {
        return BTreeMap::new();
    }
    // of equal keys the last one stays
    let threads = process.threads().unwrap_or_default().into_iter().rev();
    threads.filter_map(|t| Some((kernel::generation_of(process, t.tid)?, t.tid))).collect()
}

/// Returns true if a thread sees other bytes than the base at an entry: its generation is then one of a patch, and not one of the program.
pub(super) fn differs_from_base(target: &Target, tid: Tid) -> bool {
    let entries = target.view.origins().into_keys().map(|entry| (entry, JUMP_LEN));
    let constants = target.view.constants().map(|constant| (constant.at, constant.new.len()));
    entries.chain(constants).any(|(at, len)| {
        let mut base = vec![0; len];
        let readable = target.process.memory().read_base(at, &mut base).is_ok();
        readable && read_as_thread(target, tid, at, len).is_some_and(|seen| seen != base)
    })
}

/// Returns true if the state byte of a transition says that all threads run the new side.
pub(super) fn is_all_new(process: &Process, transition: &Transition) -> Result<bool, Error> {
    Ok(process.memory().read_array(transition.state)? == [DispatchState::AllThen as u8])
}

/// Returns true if a thread sees the new side of a transition that is decided in the ledger: no other record is written when a generation
/// becomes the text of all.
pub(super) fn is_decided(target: &Target, tid: Tid) -> bool {
    let Some(open) = &target.view.unfinished else { return false };
    is_all_new(&target.process, &open.transition).unwrap_or(false) && sees_new_side(target, tid, &open.transition)
}

/// Returns true if a thread sees the new side of a transition.
pub(super) fn sees_new_side(target: &Target, tid: Tid, transition: &Transition) -> bool {
    let holds = |at: Avma, bytes: &[u8]| read_as_thread(target, tid, at, bytes.len()).is_some_and(|seen| seen == bytes);
    transition.sites.iter().all(|site| holds(site.entry, &site.to.bytes))
        && transition.constants.iter().all(|constant| holds(constant.at, &constant.to))
}

/// Returns the transition that rests because threads stay in old code, unless it is decided.
pub(super) fn resting(target: &Target) -> Option<&Transition> {
    let open = target.view.unfinished.as_ref().filter(|open| open.phase == Some(Phase::Resting))?;
    (!is_all_new(&target.process, &open.transition).unwrap_or(false)).then_some(&open.transition)
}

/// Returns the error of another operation while a transition rests.
pub(super) fn resting_error(target: &Target) -> Error {
    let open = target.view.unfinished.as_ref();
    let patches = open.map(|open| open.transition.before.iter().chain(&open.transition.after));
    let names = patches.into_iter().flatten().filter_map(|n| target.view.patch(*n)).flat_map(|p| p.staying.clone());
    let functions: BTreeSet<String> = names.collect();
    Error::ThreadsStay { pid: target.process.pid(), functions: functions.into_iter().collect::<Vec<_>>().join(", ") }
}

/// Reads an entry, or a constant, as a thread sees it.
fn read_as_thread(target: &Target, tid: Tid, at: Avma, len: usize) -> Option<Vec<u8>> {
    let mut now = vec![0; len];
    kernel::read_as(&target.process, tid, at, &mut now).then_some(now)
}

/// Returns true if a thread sees every entry, and every constant, as the active patches define it.
pub(super) fn sees_active_patches(target: &Target, tid: Tid) -> bool {
    let view = &target.view;
    view.origins().into_iter().all(|(entry, origin)| {
        let expected = match view.version(&view.active, entry) {
            Version::Shipped => Some(origin.original),
            Version::Patched(_, function) => jump5(entry, function.new).ok(),
        };
        expected.is_some_and(|bytes| read_as_thread(target, tid, entry, JUMP_LEN).is_some_and(|seen| seen == bytes))
    }) && view.constants().all(|constant| {
        let expected = view.contents(&view.active, constant.at);
        read_as_thread(target, tid, constant.at, constant.new.len()).as_deref() == expected
    })
}
