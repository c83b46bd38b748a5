//! Threads that migrate by themselves, and the moment at which blocked threads migrate.

use super::Library;
use super::abi::{Gathered, Mode, Name, Request};
use super::rendezvous::{self, Eyes, describe};
use crate::error::Busy;
use crate::ledger::Transition;
use crate::plan::word_value;
use crate::report::now_ns;
use crate::scan::Forbidden;
use crate::transition::{Mover, Traveller, holds};
use crate::{Error, Quiescence};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_events::EventKind;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::DispatchState;
use stillpoint_patch_tracee::Tid;

/// Interval of the reads of the slots; reading them stops no thread.
const LOOK_FIRST: Duration = Duration::from_micros(100);
const LOOK_MAX: Duration = Duration::from_millis(1);

/// A request that threads follow.
#[derive(Debug, Default)]
pub(crate) struct Following {
    request: Option<Request>,
    /// Threads that the library knows and that have not migrated: they must not be probed.
    own_way: BTreeSet<Tid>,
}

impl Following {
    /// Returns true if a thread migrates by itself.
    pub(crate) fn own_way(&self, tid: Tid) -> bool {
        self.own_way.contains(&tid)
    }
}

impl Mover<'_, '_, '_, '_> {
    /// Migrates every thread in a mode with quiescence points.
    pub(crate) fn by_points(
        &mut self,
        transition: &Transition,
        how: Quiescence,
        deadline: Instant,
    ) -> Result<u32, Error> {
        self.find_library()?;
        match how {
            Quiescence::Group(name) => {
                self.apart(transition, Mode::Others, name, deadline)?;
                self.in_phase("gather", |m| m.together(transition, Mode::Group, name, deadline))
            }
            Quiescence::Global => {
                self.in_phase("gather", |m| m.together(transition, Mode::Global, Name::default(), deadline))
            }
            _ => self.apart(transition, Mode::Local, Name::default(), deadline),
        }
    }

    /// Migrates each thread by itself: at its point if it has one, otherwise by probing.
    fn apart(&mut self, transition: &Transition, mode: Mode, group: Name, deadline: Instant) -> Result<u32, Error> {
        self.per_thread(transition)?;
        let request = self.ask_library(transition, mode, group, deadline)?;
        self.following.request = Some(request);
        let moved = self.in_phase("migrate", |m| m.forward_all(transition, deadline));
        self.following = Following::default();
        // in a group's request new threads may be members: they stay on the old side until the others migrate with them
        self.newborn = None;
        moved
    }

    fn ask_library(
        &mut self,
        transition: &Transition,
        mode: Mode,
        group: Name,
        deadline: Instant,
    ) -> Result<Request, Error> {
        let left = deadline.saturating_duration_since(Instant::now()).as_nanos() as u64;
        let word = (self.store.ledger.word_offset, word_value(transition.number));
        let Some(library) = &mut self.library else { return Err(self.no_library(mode)) };
        library.ask(self.process, mode, group, word, 0, now_ns() + left)
    }

    /// Looks for the library if that was not done yet.
    pub(crate) fn find_library(&mut self) -> Result<(), Error> {
        if self.library.is_none() {
            self.library = Library::find(self.process, &self.process.modules()?)?;
        }
        Ok(())
    }

    fn no_library(&self, mode: Mode) -> Error {
        let why = "its libstillpoint is not mapped any more".to_owned();
        Error::NoPoints { pid: self.process.pid(), mode: format!("{mode:?}").to_lowercase(), why }
    }

    /// Records the threads that have migrated by themselves, and those that have not yet.
    pub(crate) fn follow(
        &mut self,
        threads: &[Tid],
        waiting: &mut BTreeMap<Tid, Traveller>,
        done: &mut BTreeMap<Tid, Avma>,
    ) -> Result<(), Error> {
        let (Some(request), Some(library)) = (&self.following.request, &mut self.library) else { return Ok(()) };
        library.learn(self.process, threads);
        self.following.own_way.clear();
        for slot in library.slots(self.process.memory())? {
            let Some(tid) = library.thread(&slot).filter(|tid| !done.contains_key(tid)) else { continue };
            // it was asked to stop before it was known: the probe's result is equally good
            if waiting.get(&tid).is_some_and(|t| t.asked) {
                continue;
            }
            if request.awaits(&slot) {
                let traveller = waiting.entry(tid).or_insert_with(Traveller::new);
                if traveller.follows(describe(&slot)) {
                    self.report.event(EventKind::ThreadBusy { tid: tid.0, function: describe(&slot) });
                }
                self.following.own_way.insert(tid);
                continue;
            }
            waiting.remove(&tid);
            // its control block was not read, and belongs to no other thread
            done.insert(tid, Avma(0));
            if request.is_taken_by(&slot) {
                let transition = crate::plan::transition_of_word(slot.word).unwrap_or_default();
                self.report.event(EventKind::ThreadMigrated { tid: tid.0, transition });
            }
        }
        Ok(())
    }

    /// Waits until all of them are blocked, and commits in that moment.
    fn together(&mut self, transition: &Transition, mode: Mode, group: Name, deadline: Instant) -> Result<u32, Error> {
        let request = self.ask_library(transition, mode, group, deadline)?;
        let forbidden = self.forbidden(&transition.leave, transition);
        self.walker.prepare();
        let mut told = BTreeSet::new();
        let mut wait = LOOK_FIRST;
        let mut last = Vec::new();
        loop {
            self.serve(Instant::now() + wait)?;
            wait = (wait * 2).min(LOOK_MAX);
            let Some(library) = &mut self.library else { return Err(self.no_library(mode)) };
            let mut busy = rendezvous::awaited(self.process, library, &request, &self.session.threads())?;
            // the blocked threads have continued: the other threads are the cause
            if rendezvous::is_over(self.process, library, &request)? {
                return Err(Error::TimedOut { busy: if last.is_empty() { busy } else { last } });
            }
            if busy.is_empty() {
                match self.commit_standing(transition, &request, &forbidden)? {
                    None => return Ok(self.session.threads().len() as u32),
                    Some(found) => busy = found,
                }
            }
            for b in busy.iter().filter(|b| told.insert((b.tid, b.function.clone()))) {
                self.report.event(EventKind::ThreadBusy { tid: b.tid.0, function: b.function.clone() });
            }
            last = busy;
        }
    }

    /// Stops the process. Commits if all known threads are blocked or have migrated, and all other threads are outside the code that
    /// changes. While the process is stopped and no thread is inside the library's lock, writing the outcome is equivalent to holding that
    /// lock.
    fn commit_standing(
        &mut self,
        transition: &Transition,
        request: &Request,
        forbidden: &Forbidden,
    ) -> Result<Option<Vec<Busy>>, Error> {
        let Some(library) = &mut self.library else { return Err(self.no_library(request.mode)) };
        let mut frozen = match self.session.freeze() {
            Err(stillpoint_patch_tracee::Error::Unstoppable { tid, why }) => {
                return Ok(Some(vec![Busy { tid, function: why }]));
            }
            other => other?,
        };
        let memory = self.process.memory();
        let offset = i64::from(self.store.ledger.word_offset);
        let eyes = Eyes { prober: &mut self.prober, walker: &self.walker, forbidden };
        let busy = rendezvous::who_keeps_it(&mut frozen, self.process, library, request, eyes, |_, look| {
            let at = Avma(look.fs_base.0.wrapping_add_signed(offset));
            request.mode != Mode::Global && holds(memory, at, request.word)
        })?;
        if busy.is_empty() {
            memory.write(transition.state, &[DispatchState::AllThen as u8])?;
            library.settle(memory, Gathered::Released)?;
        }
        for (tid, stopped_ns) in frozen.thaw()? {
            self.report.stopped(tid, "freeze: commit", stopped_ns);
        }
        if busy.is_empty() {
            library.ring(self.process);
        }
        Ok((!busy.is_empty()).then_some(busy))
    }

    /// Settles a request on which threads may still act, of this tool or of a killed tool: no thread waits for it any more. After
    /// `Abandoned` no thread takes it any more either.
    pub(crate) fn settle_library(&mut self, outcome: Gathered) -> Result<(), Error> {
        let memory = self.process.memory();
        let Some(library) = &mut self.library else { return Ok(()) };
        if library.control(memory)?.pending().is_none() {
            return Ok(());
        }
        if outcome == Gathered::Abandoned {
            return self.abandon();
        }
        // the byte has already decided: they continue, even if the library applies the deadline
        library.settle(memory, outcome)?;
        library.ring(self.process);
        Ok(())
    }

    fn abandon(&mut self) -> Result<(), Error> {
        let limit = Instant::now() + rendezvous::LOCK_LIMIT;
        while let Some(library) = &mut self.library
            && !rendezvous::abandon(self.process, self.session, library, self.report)?
        {
            if Instant::now() > limit {
                return Err(Error::TimedOut { busy: vec![rendezvous::locked(self.process)] });
            }
            self.serve(Instant::now() + LOOK_FIRST)?;
        }
        Ok(())
    }
}
