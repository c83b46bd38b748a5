//! Migration of every thread of a process to one generation, each alone.

use super::kernel;
use super::points::PointMigration;
use crate::error::Busy;
use crate::mechanism::MigrationResult;
use crate::probe::{Prober, Verdict};
use crate::report::Report;
use crate::scan::Forbidden;
use crate::target::Target;
use crate::walk::Walker;
use crate::{Error, event_pump};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_events::patch;
use stillpoint_patch_tracee::{self as tracee, Pid, Process, Session, Stop, ThreadInfo, Tid};

/// Interval between two checks of busy threads.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Time to wait for threads that may stay, after all others have migrated.
const STAY_TIMEOUT: Duration = Duration::from_millis(500);

/// Returns the threads of the process, and the processes that share its memory, that are not in the generation and cannot be migrated
/// alone. Omits threads in `staying`, and workers of the kernel, which run none of its code and are always in the base. The threads are
/// read twice, because one may be created while another is read; no thread is created elsewhere by threads that are in the generation.
pub(super) fn threads_outside(process: &Process, generation: u32, staying: &BTreeSet<Tid>) -> Result<Vec<Busy>, Error> {
    for _ in 0..2 {
        let mut threads = process.threads()?;
        threads.retain(|t| {
            !t.kernel_worker
                && !staying.contains(&t.tid)
                && kernel::generation_of(process, t.tid).is_some_and(|found| found != generation)
        });
        if !threads.is_empty() {
            let busy = |t: ThreadInfo| Busy { tid: t.tid, function: "code that was not examined yet".into() };
            return Ok(threads.into_iter().map(busy).collect());
        }
    }
    let sharer = |pid: Pid| Busy { tid: pid.leader(), function: "another process that shares the memory".into() };
    Ok(process.memory_sharers()?.into_iter().map(sharer).collect())
}

/// Threads on their way to a generation.
pub(super) struct Migration {
    process: Process,
    modules: Vec<tracee::Module>,
    prober: Prober,
    frames: Vec<crate::ledger::Span>,
    goal: u32,
    /// Number of the transition.
    number: u32,
    /// Code that must not be on the stack of a migrating thread.
    forbidden: Forbidden,
    /// Code in which a thread may stay, and the threads seen there at the last check.
    may_stay: Forbidden,
    stays: BTreeMap<Tid, String>,
    /// Threads that could not migrate at the last check, each with the reason.
    busy: BTreeMap<Tid, String>,
    /// Addresses of instructions at which no thread may migrate: the middle of an entry that has a jump in the other text. All code of
    /// patched functions is forbidden already; these belong to the lookup redirect.
    boundaries: Vec<u64>,
    /// Busy threads whose stack has been walked.
    stack_walked: BTreeSet<Tid>,
}

impl Migration {
    /// Prepares a migration to a generation, in a transition of this number; no thread has migrated.
    pub(super) fn new(
        target: &Target,
        (goal, number): (u32, u32),
        forbidden: Forbidden,
        may_stay: Forbidden,
    ) -> Result<Self, Error> {
        let frames = target.view.placed.iter().map(|patch| patch.eh_frame).collect();
        let process = target.process.clone();
        let prober = Prober::new(process.mappings()?);
        let modules = target.modules.clone();
        let redirect = target.view.lookup_redirect.iter();
        let boundaries = redirect.flat_map(|g| g.inner_boundaries.iter().map(|b| g.entry.0 + u64::from(*b))).collect();
        let (stays, busy, stack_walked) = Default::default();
        Ok(Migration {
            process,
            modules,
            prober,
            frames,
            goal,
            number,
            forbidden,
            may_stay,
            stays,
            busy,
            boundaries,
            stack_walked,
        })
    }

    /// Migrates all threads except those that stay elsewhere; threads that their `points` migrate are not touched. A thread that may stay
    /// does so if it has not left soon after all others have migrated.
    pub(super) fn run(
        &mut self,
        session: &mut Session<'_>,
        report: &mut Report<'_>,
        mut points: Option<&mut PointMigration>,
        deadline: Instant,
    ) -> Result<MigrationResult, Error> {
        let process = self.process.clone();
        let walker = Walker::new(&process, self.modules.clone(), self.frames.clone());
        // since when only threads that may stay are left
        let mut alone_since: Option<Instant> = None;
        loop {
            event_pump::serve(&process, session, Instant::now())?;
            let threads = session.threads();
            self.busy.retain(|tid, _| session.knows(*tid));
            self.stack_walked.retain(|tid| session.knows(*tid));
            let (going, staying) = match &mut points {
                Some(points) => points.self_migrating(&threads)?,
                None => Default::default(),
            };
            for tid in threads.iter().filter(|tid| !staying.contains(tid)) {
                match going.get(tid) {
                    Some(location) if !self.has_arrived(report, *tid) => {
                        self.record_busy(report, *tid, location.clone());
                        self.record_stay(session, report, &walker, *tid)?;
                    }
                    _ => self.visit(session, report, &walker, *tid)?,
                }
            }
            self.busy.retain(|tid, _| !staying.contains(tid));
            let mut busy: Vec<Busy> =
                self.busy.iter().map(|(tid, why)| Busy { tid: *tid, function: why.clone() }).collect();
            let late = Instant::now() > deadline;
            let alone = self.busy.keys().all(|tid| self.stays.contains_key(tid));
            alone_since = alone.then(|| alone_since.unwrap_or_else(Instant::now));
            if busy.is_empty() || alone && (late || alone_since.is_some_and(|since| since.elapsed() > STAY_TIMEOUT)) {
                let left: BTreeSet<Tid> = staying.iter().chain(self.busy.keys()).copied().collect();
                busy = threads_outside(&process, self.goal, &left)?;
                if busy.is_empty() {
                    let stays = |tid| Some(Busy { tid, function: self.stays.get(&tid)?.clone() });
                    let staying = self.busy.keys().filter_map(|tid| stays(*tid)).collect();
                    return Ok(MigrationResult { threads: threads.len() as u32, staying });
                }
                // seizes threads that wait to be reported as new
                session.seize_unreported()?;
            }
            if late {
                return Err(Error::TimedOut(busy));
            }
            event_pump::serve(&process, session, Instant::now() + POLL_INTERVAL)?;
        }
    }

    fn visit(
        &mut self,
        session: &mut Session<'_>,
        report: &mut Report<'_>,
        walker: &Walker<'_>,
        tid: Tid,
    ) -> Result<(), Error> {
        if self.has_arrived(report, tid) {
            return Ok(());
        }
        // a new thread is resumed by its event; stopping a thread again that has not run would show nothing new, unless its stack can be
        // walked by now
        let again = self.busy.contains_key(&tid);
        let stack_walked = again && self.stack_walked.contains(&tid);
        if session.is_new(tid) || stack_walked && session.idle_since_stop(tid)? {
            return Ok(());
        }
        if again {
            walker.prepare();
            self.stack_walked.insert(tid);
        }
        let why = match session.stop(tid) {
            Ok(Stop::Stopped(mut thread)) => {
                let why = self.migrate_stopped(walker, &mut thread)?;
                report.stopped(tid, "probe", thread.resume()?);
                why
            }
            Ok(Stop::InVfork) => Some("vfork, whose child shares the memory".to_owned()),
            Ok(Stop::Gone) | Err(tracee::Error::ThreadGone(_)) => None,
            Err(error @ tracee::Error::Unstoppable { .. }) => Some(error.to_string()),
            Err(error) => return Err(error.into()),
        };
        match why {
            None => self.record_migrated(report, tid),
            Some(why) => self.record_busy(report, tid, why),
        }
        Ok(())
    }

    /// Checks if a thread that migrates by itself is in code in which it may stay, and records it.
    fn record_stay(
        &mut self,
        session: &mut Session<'_>,
        report: &mut Report<'_>,
        walker: &Walker<'_>,
        tid: Tid,
    ) -> Result<(), Error> {
        let known = self.stays.contains_key(&tid);
        if self.may_stay.is_empty() || session.is_new(tid) || known && session.idle_since_stop(tid)? {
            return Ok(());
        }
        walker.prepare();
        self.stays.remove(&tid);
        match session.stop(tid) {
            Ok(Stop::Stopped(mut thread)) => {
                let snapshot = self.prober.snapshot(&self.process, &mut thread)?;
                if let stays @ Verdict::Busy(_) = walker.judge(&snapshot, &self.may_stay) {
                    self.stays.insert(tid, stays.describe());
                }
                report.stopped(tid, "probe", thread.resume()?);
                Ok(())
            }
            Ok(Stop::InVfork | Stop::Gone) | Err(tracee::Error::ThreadGone(_) | tracee::Error::Unstoppable { .. }) => {
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns true if a thread is in the generation, or has ended.
    fn has_arrived(&mut self, report: &mut Report<'_>, tid: Tid) -> bool {
        let arrived = kernel::generation_of(&self.process, tid).is_none_or(|generation| generation == self.goal);
        // it was waited for, and has migrated by itself
        if arrived && self.busy.contains_key(&tid) {
            self.record_migrated(report, tid);
        }
        arrived
    }

    fn record_migrated(&mut self, report: &mut Report<'_>, tid: Tid) {
        self.busy.remove(&tid);
        self.stays.remove(&tid);
        if self.goal != 0 {
            report.event(patch::Event::ThreadMigrated { tid: tid.0, transition: self.number });
        }
    }

    fn record_busy(&mut self, report: &mut Report<'_>, tid: Tid, why: String) {
        if self.busy.get(&tid) != Some(&why) {
            report.event(patch::Event::ThreadBusy { tid: tid.0, function: why.clone() });
        }
        self.busy.insert(tid, why);
    }

    /// Migrates a thread that is stopped; returns the reason if that is impossible now.
    fn migrate_stopped(
        &mut self,
        walker: &Walker<'_>,
        thread: &mut tracee::Stopped<'_>,
    ) -> Result<Option<String>, Error> {
        let tid = thread.tid();
        let snapshot = self.prober.snapshot(&self.process, thread)?;
        self.stays.remove(&tid);
        if snapshot.is_inside(&self.boundaries) {
            return Ok(Some("the first bytes of a function".to_owned()));
        }
        let verdict = walker.judge(&snapshot, &self.forbidden);
        if verdict != Verdict::Clear {
            if !self.may_stay.is_empty()
                && let stays @ Verdict::Busy(_) = walker.judge(&snapshot, &self.may_stay)
            {
                self.stays.insert(tid, stays.describe());
            }
            return Ok(Some(verdict.describe()));
        }
        match kernel::migrate(thread, self.goal) {
            Ok(()) => Ok(None),
            Err(
                error @ (tracee::Error::BadCarrier { .. }
                | tracee::Error::Seccomp { .. }
                | tracee::Error::SeccompUnreadable { .. }),
            ) => Ok(Some(format!("code in which it cannot make the call: {error}"))),
            Err(error) => Err(error.into()),
        }
    }
}
