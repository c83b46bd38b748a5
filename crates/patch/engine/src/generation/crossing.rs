//! Taking every thread of a process to one generation, each alone.

use super::kernel;
use crate::error::Busy;
use crate::operate::Target;
use crate::probe::{Prober, Verdict};
use crate::report::Report;
use crate::scan::Forbidden;
use crate::walk::Walker;
use crate::{Error, calm};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_events::EventKind;
use stillpoint_patch_tracee::{self as tracee, Process, Session, Stop, Tid};

/// Between two looks at threads that were busy.
const REST: Duration = Duration::from_millis(1);

/// Whether all threads of the process, and nobody else who shares its memory, are in a generation. Twice, for one may be
/// born while the other is looked at; from threads that are there nobody is born elsewhere.
pub(super) fn everybody_is_in(process: &Process, generation: u32) -> Result<bool, Error> {
    for _ in 0..2 {
        for thread in process.threads()? {
            if kernel::generation_of(process, thread.tid).is_some_and(|found| found != generation) {
                return Ok(false);
            }
        }
    }
    Ok(process.memory_sharers()?.is_empty())
}

/// Threads on their way to a generation.
pub(super) struct Crossing {
    process: Process,
    modules: Vec<tracee::Module>,
    prober: Prober,
    frames: Vec<crate::ledger::Span>,
    goal: u32,
    /// Of the transition.
    number: u32,
    /// Code that may not be on the stack of whoever goes.
    forbidden: Forbidden,
    /// Who could not go when last looked at, and why.
    busy: BTreeMap<Tid, String>,
    /// Those among them whose stack has been walked.
    walked: BTreeSet<Tid>,
}

impl Crossing {
    /// To a generation, in a transition of this number; nobody has set out.
    pub(super) fn new(target: &Target, (goal, number): (u32, u32), forbidden: Forbidden) -> Result<Self, Error> {
        let frames = target.view.placed.iter().map(|patch| patch.eh_frame).collect();
        let process = target.process.clone();
        let prober = Prober::new(target.restorers.clone(), process.mappings()?);
        let modules = target.modules.clone();
        let (busy, walked) = Default::default();
        Ok(Crossing { process, modules, prober, frames, goal, number, forbidden, busy, walked })
    }

    /// Brings all there; tells how many there are.
    pub(super) fn all(
        &mut self,
        session: &mut Session<'_>,
        report: &mut Report<'_>,
        deadline: Instant,
    ) -> Result<u32, Error> {
        let process = self.process.clone();
        let walker = Walker::new(&process, self.modules.clone(), self.frames.clone());
        loop {
            calm::serve(&process, session, Instant::now())?;
            let threads = session.threads();
            self.busy.retain(|tid, _| session.knows(*tid));
            self.walked.retain(|tid| session.knows(*tid));
            for tid in &threads {
                self.visit(session, report, &walker, *tid)?;
            }
            if self.busy.is_empty() && everybody_is_in(&process, self.goal)? {
                return Ok(threads.len() as u32);
            }
            if Instant::now() > deadline {
                let found = self.busy.iter();
                return Err(Error::TimedOut {
                    busy: found.map(|(tid, why)| Busy { tid: *tid, function: why.clone() }).collect(),
                });
            }
            calm::serve(&process, session, Instant::now() + REST)?;
        }
    }

    fn visit(
        &mut self,
        session: &mut Session<'_>,
        report: &mut Report<'_>,
        walker: &Walker<'_>,
        tid: Tid,
    ) -> Result<(), Error> {
        let at = kernel::generation_of(&self.process, tid);
        if at.is_none_or(|generation| generation == self.goal) {
            self.busy.remove(&tid);
            return Ok(());
        }
        // a newborn is let go by its event; stopping one that has not run again would tell nothing new, unless its stack
        // can be walked by now
        let again = self.busy.contains_key(&tid);
        let walked = again && self.walked.contains(&tid);
        if session.is_newborn(tid) || walked && session.idle_since_stop(tid)? {
            return Ok(());
        }
        if again {
            walker.prepare();
            self.walked.insert(tid);
        }
        let why = match session.stop(tid) {
            Ok(Stop::Stopped(mut thread)) => {
                let why = self.take(walker, &mut thread)?;
                report.stopped(tid, "probe", thread.resume()?);
                why
            }
            Ok(Stop::InVfork) => Some("vfork, whose child uses the same memory".to_owned()),
            Ok(Stop::Gone) | Err(tracee::Error::ThreadGone(_)) => None,
            Err(error @ tracee::Error::Unstoppable { .. }) => Some(error.to_string()),
            Err(error) => return Err(error.into()),
        };
        match why {
            None => {
                self.busy.remove(&tid);
                if self.goal != 0 {
                    report.event(EventKind::ThreadMigrated { tid: tid.0, transition: self.number });
                }
            }
            Some(why) => {
                if self.busy.get(&tid) != Some(&why) {
                    report.event(EventKind::ThreadBusy { tid: tid.0, function: why.clone() });
                }
                self.busy.insert(tid, why);
            }
        }
        Ok(())
    }

    /// Takes a thread that stands there, or tells why not now.
    fn take(&mut self, walker: &Walker<'_>, thread: &mut tracee::Stopped<'_>) -> Result<Option<String>, Error> {
        let look = self.prober.look(&self.process, thread)?;
        let verdict = walker.judge(&look, &self.forbidden);
        if verdict != Verdict::Clear {
            return Ok(Some(verdict.describe()));
        }
        match kernel::migrate(thread, self.goal) {
            Ok(()) => Ok(None),
            Err(
                error @ (tracee::Error::BadCarrier { .. }
                | tracee::Error::Seccomp { .. }
                | tracee::Error::SeccompUnreadable { .. }),
            ) => Ok(Some(format!("a place where it cannot make the call: {error}"))),
            Err(error) => Err(error.into()),
        }
    }
}
