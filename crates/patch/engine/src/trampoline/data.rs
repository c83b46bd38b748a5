//! Change of data in the moment in which all threads change over.
//!
//! ```text
//! all threads stopped, none in code that uses the data
//!   divert      each thread executes the completing code first when it continues, and then restores itself
//!   state = 3   a thread that continues from now on writes all pieces, the others wait for it
//!   write       the tool writes all pieces
//!   state = 1   the deciding byte: nothing is left to do
//!   restore     each thread continues with its own code
//! ```
//! A kill before `state = 3` leaves the old data, a later one the new data, because no thread executes its own code in between. The obvious
//! way, to write while all threads are stopped, is not enough: a killed tool releases all threads at once, and a write of several pages or
//! variables can be half done.

use super::Trampolines;
use crate::error::Busy;
use crate::event_pump::with_carrier;
use crate::ledger::{Transition, View};
use crate::{Error, data_change};
use std::time::{Duration, Instant};
use stillpoint_patch_insn::DispatchState;
use stillpoint_patch_tracee::{self as tracee, FrozenProcess, Process, Stopped};

/// Time limit for threads that complete a change after a tool's death; they need microseconds when they run.
const COMPLETED_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two looks at the state byte.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

const SYS_MPROTECT: u64 = 10;
const PROT_READ: u64 = 1;
const PROT_WRITE: u64 = 2;

/// Decides the transition while all threads are stopped and examined: writes its data, if it changes any, and the deciding byte. Returns the
/// thread that prevents it.
///
/// # Errors
/// The program has changed the data, or the process cannot be written.
pub(super) fn decide(
    frozen: &mut FrozenProcess<'_, '_>,
    process: &Process,
    view: &View,
    transition: &Transition,
) -> Result<Option<Busy>, Error> {
    let memory = process.memory();
    let set_state = |state: DispatchState| memory.write(transition.state, &[state as u8]);
    let Some(data) = &transition.data else {
        set_state(DispatchState::AllThen)?;
        return Ok(None);
    };
    data_change::expect_all(memory, view, &data.changes)?;
    if let Some(sharer) = process.memory_sharers()?.first() {
        return Ok(Some(Busy { tid: sharer.leader(), function: "another process that shares the memory".into() }));
    }
    match frozen.divert(data.completer) {
        Ok(()) => {}
        Err(tracee::Error::BadCarrier { tid, why }) => return Ok(Some(Busy { tid, function: why })),
        Err(error) => return Err(error.into()),
    }
    set_state(DispatchState::DataChanging)?;
    data.changes.iter().try_for_each(|change| memory.write(change.at, &change.to))?;
    set_state(DispatchState::AllThen)?;
    frozen.cancel_diversion()?;
    Ok(None)
}

impl Trampolines<'_, '_, '_> {
    /// Completes the plan with the pages that the program maps read-only.
    pub(super) fn find_closed_pages(&self, transition: &mut Transition) -> Result<(), Error> {
        let Some(data) = &mut transition.data else { return Ok(()) };
        let mappings = self.cx.process.mappings()?;
        for change in &data.changes {
            let closed = data_change::pages(&mappings, &change.name, change.at, change.to.len() as u64)?;
            let new = closed.into_iter().filter(|pages| !data.opened.contains(pages)).collect::<Vec<_>>();
            data.opened.extend(new);
        }
        Ok(())
    }

    /// Makes these pages writable for the transition, or read-only again. The code that completes the change writes as the program does.
    pub(super) fn protect_data(&mut self, transition: &Transition, read_only: bool) -> Result<(), Error> {
        let Some(data) = transition.data.as_ref().filter(|data| !data.opened.is_empty()) else { return Ok(()) };
        let permission = if read_only { PROT_READ } else { PROT_READ | PROT_WRITE };
        let calls = data.opened.iter().map(|pages| (SYS_MPROTECT, [pages.start.0, pages.len, permission, 0, 0, 0]));
        let calls: Vec<(u64, [u64; 6])> = calls.collect();
        let work = |carrier: &mut Stopped<'_>| {
            carrier.check_syscalls(&calls)?;
            let mut remote = carrier.begin_remote()?;
            let result = calls.iter().try_for_each(|(nr, args)| remote.syscall(*nr, *args).map(drop));
            remote.finish()?;
            Ok(result?)
        };
        let (process, report) = (self.cx.process, &mut *self.cx.report);
        with_carrier(process, self.cx.session, work, &mut |tid, ns| report.stopped(tid, "carrier", ns))
    }

    /// Waits until no thread completes a change of data any more, which a killed tool left to them.
    pub(super) fn await_data(&mut self, transition: &Transition) -> Result<(), Error> {
        let limit = Instant::now() + COMPLETED_TIMEOUT;
        while self.state(transition)? == DispatchState::DataChanging {
            if Instant::now() > limit {
                return Err(Error::DataChanging(self.cx.process.pid()));
            }
            self.serve(Instant::now() + POLL_INTERVAL)?;
        }
        Ok(())
    }
}
