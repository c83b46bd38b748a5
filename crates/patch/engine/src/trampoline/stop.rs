//! Migration of all threads at once, while all are stopped: the baseline mode.

use super::migrate::{RETRY_INTERVAL_MAX, RETRY_INTERVAL_MIN};
use super::{Trampolines, data};
use crate::error::Busy;
use crate::ledger::Transition;
use crate::scan::Forbidden;
use crate::{Error, suspended_frames};
use std::time::Instant;
use stillpoint_base::Backoff;
use stillpoint_events::patch;

impl Trampolines<'_, '_, '_> {
    /// Moves all threads at once while all are stopped and examined: the baseline mode.
    pub(super) fn stop_all(&mut self, transition: &Transition, deadline: Instant) -> Result<u32, Error> {
        let forbidden = self.forbidden(&transition.leave, transition);
        self.walker.prepare();
        let mut wait = Backoff::new(RETRY_INTERVAL_MIN, RETRY_INTERVAL_MAX);
        loop {
            let Some(busy) = self.stop_once(transition, &forbidden)? else {
                return Ok(self.cx.session.threads().len() as u32);
            };
            for b in &busy {
                self.cx.report.event(patch::Event::ThreadBusy { tid: b.tid.0, function: b.function.clone() });
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut(busy));
            }
            self.serve(Instant::now() + wait.next_wait())?;
        }
    }

    /// Examines all threads while all are stopped; commits if none is busy, otherwise returns the busy ones.
    fn stop_once(&mut self, transition: &Transition, forbidden: &Forbidden) -> Result<Option<Vec<Busy>>, Error> {
        let mut busy = Vec::new();
        let mut frozen = match self.cx.session.freeze() {
            Err(stillpoint_patch_tracee::Error::Unstoppable { tid, why }) => {
                return Ok(Some(vec![Busy { tid, function: why }]));
            }
            other => other?,
        };
        for tid in frozen.threads() {
            let mut held = frozen.thread(tid)?;
            let snapshot = self.prober.snapshot(self.cx.process, &mut held)?;
            let verdict = self.walker.judge(&snapshot, forbidden);
            if !verdict.is_free() {
                busy.push(Busy { tid, function: verdict.describe() });
            }
        }
        // a coroutine may have been suspended since the last search
        if busy.is_empty() && self.switches_stacks.is_some() && !self.cx.options.allow_suspended_frames {
            let search = suspended_frames::search(self.cx.process, forbidden, self.cx.target.ledger_at())?;
            let found = search.found.map(|frame| frame.describe());
            busy.extend(found.map(|function| Busy { tid: self.cx.process.pid().leader(), function }));
        }
        if busy.is_empty() {
            busy.extend(data::decide(&mut frozen, self.cx.process, &self.cx.target.view, transition)?);
        }
        for (tid, stopped_ns) in frozen.thaw()? {
            self.cx.report.stopped(tid, "freeze: check", stopped_ns);
        }
        Ok((!busy.is_empty()).then_some(busy))
    }
}
