//! Patching with a jump at each entry: a dispatcher behind it chooses the side of each thread.
//!
//! ```text
//! begin ── arm ── migrate ── decide ── commit       state byte:  2 ── 2 ── 0 ── 1 ── 1
//!            └──────┴── move back ── disarm ── abort                       0 ── 2
//! ```
//! The commit point is the write of one byte. Before it a rollback is always possible. After it every thread, including future ones, runs
//! the new side, and the remaining work (turning entries into direct jumps) has no visible effect. Each step is recorded in the ledger
//! before it is done, so that another tool can continue from the ledger.
//!
//! A transition that changes data has a fourth state, see [`data`].
//!
//! The obvious way is to compare the generation word of the thread alone. With the state byte before it, abort and commit are one byte
//! each instead of one store per thread, and neither can be half done. The number of a transition rises with every apply, revert and
//! abort and is never used again, so a word that a dead thread left never means anything.
//!
//! ```text
//! local    arm ── ask(local) ── each thread takes its word at its point ── commit
//! group    arm ── ask(others) ── ... ── ask(group) ── members block ── frozen: all over or blocked?  commit, release
//! global   arm ── ask(global) ────────── all block ────────────────── frozen: all blocked?           commit, release
//! ```
//! The commit is the same byte in all modes. In the modes with blocked threads it is written while they are blocked, and the whole process
//! is stopped for that moment, so that no two of them ever run different code. Threads that libstillpoint does not know are probed: before
//! the commit in the local mode, at its very moment in the others.

mod data;
mod entries;
mod gather;
mod migrate;
mod stop;

use crate::apply::plan::Plan;
use crate::event_pump::Window;
use crate::ledger::{LedgerError, NamedSpan, Phase, Record, Span, Transition, View};
use crate::mechanism::{Context, Mechanism, MigrationResult};
use crate::points::Library;
use crate::points::abi::GatherOutcome;
use crate::probe::Prober;
use crate::scan::Forbidden;
use crate::walk::Walker;
use crate::{Error, Quiescence, lookup_redirect, suspended_frames};
use gather::FollowedRequest;
use migrate::Direction;
use std::time::{Duration, Instant};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::DispatchState;
use stillpoint_patch_tracee::{Memory, Tid};

/// Time limit for turning entries into direct jumps.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(10);

/// Transitions of one process by jumps at entries.
pub(crate) struct Trampolines<'o, 's, 'r> {
    cx: Context<'o, 's, 'r>,
    /// Mode in which threads migrate.
    quiescence: Quiescence,
    /// True if the record `Begin` is in the ledger.
    has_begun: bool,
    /// Time limit of the migration, set when the entries are written.
    deadline: Instant,
    /// Time limit of the rollback, set when it begins.
    back_deadline: Option<Instant>,
    prober: Prober,
    walker: Walker<'o>,
    /// All dispatchers and displaced code ever placed.
    trampolines: Vec<Span>,
    /// Offset of the generation word from the thread pointer.
    word_offset: i32,
    /// Offset and value of the word for new threads; set when threads migrate.
    new_thread_word: Option<(i32, u32)>,
    /// Threads that are stopped on request.
    at_stop: Vec<Tid>,
    window: Window,
    /// New threads that were put on the right side before their first instruction.
    initialised: Vec<(Tid, Avma)>,
    /// The library, found at first use.
    library: Option<Library>,
    followed_request: FollowedRequest,
    /// Reason why the program probably switches stacks by itself.
    switches_stacks: Option<String>,
}

impl<'o, 's, 'r> Trampolines<'o, 's, 'r> {
    /// Prepares transitions; nothing is read from the process.
    pub(crate) fn new(cx: Context<'o, 's, 'r>) -> Self {
        Trampolines {
            quiescence: cx.options.quiescence,
            has_begun: false,
            deadline: Instant::now(),
            back_deadline: None,
            prober: Prober::default(),
            walker: Walker::new(cx.process, Vec::new(), Vec::new()),
            trampolines: Vec::new(),
            word_offset: 0,
            new_thread_word: None,
            at_stop: Vec::new(),
            window: Window::new(),
            initialised: Vec::new(),
            library: None,
            followed_request: FollowedRequest::default(),
            switches_stacks: None,
            cx,
        }
    }

    /// Takes over the transition of a killed tool, whose record `Begin` is in the ledger. It goes on by probing, which completes any
    /// transition whose threads may migrate one by one.
    ///
    /// # Errors
    /// The process cannot be examined.
    pub(crate) fn resume(cx: Context<'o, 's, 'r>, view: &View, transition: &Transition) -> Result<Self, Error> {
        let mut resumed = Trampolines::new(cx);
        resumed.quiescence = Quiescence::Probe;
        resumed.has_begun = true;
        resumed.examine(view, transition)?;
        Ok(resumed)
    }

    /// Returns the state byte that a killed tool left.
    ///
    /// # Errors
    /// An entry or the state byte holds what no transition writes, or the process cannot be read.
    pub(crate) fn state_left(&mut self, transition: &Transition) -> Result<DispatchState, Error> {
        self.check_entries(transition)?;
        self.find_library()?;
        self.await_data(transition)?;
        self.state(transition)
    }

    /// Ends a request of a killed tool to migrate at points; no thread takes it any more.
    ///
    /// # Errors
    /// The library's lock stays held, or the process has ended.
    pub(crate) fn abandon_request(&mut self) -> Result<(), Error> {
        self.find_library()?;
        self.settle_request(GatherOutcome::Abandoned)
    }

    fn state(&self, transition: &Transition) -> Result<DispatchState, Error> {
        let [byte] = self.memory().read_array(transition.state)?;
        DispatchState::from_byte(byte).ok_or_else(|| {
            let text = format!("state byte {byte} of transition {}", transition.number);
            Error::Ledger(LedgerError::Inconsistent(text))
        })
    }

    /// Reads what the examination of threads needs.
    fn examine(&mut self, view: &View, transition: &Transition) -> Result<(), Error> {
        let process = self.cx.process;
        let store = self.cx.target.store.as_ref().ok_or(Error::NoWord(process.pid()))?;
        self.word_offset = store.ledger.word_offset;
        self.switches_stacks = suspended_frames::switches_stacks(process, &self.cx.target.modules)?;
        self.prober = Prober::new(process.mappings()?);
        let frames = view.placed.iter().map(|p| p.eh_frame).collect();
        self.walker = Walker::new(process, self.cx.target.modules.clone(), frames);
        self.trampolines = view.trampolines();
        self.trampolines.extend(&transition.trampolines);
        Ok(())
    }

    fn memory(&self) -> &'o Memory {
        self.cx.process.memory()
    }

    fn set_state(&self, transition: &Transition, state: DispatchState) -> Result<(), Error> {
        Ok(self.memory().write(transition.state, &[state as u8])?)
    }

    fn phase_record(&mut self, transition: &Transition, phase: Phase) -> Result<(), Error> {
        self.cx.target.append(Record::Phase { transition: transition.number, phase })
    }

    /// Switches to the state in which each thread's word decides.
    fn decide_per_thread(&mut self, transition: &Transition) -> Result<(), Error> {
        self.phase_record(transition, Phase::Migrating)?;
        self.set_state(transition, DispatchState::PerThread)
    }

    /// Waits until no frame of code to be left is found on a suspended stack.
    fn await_suspended(&mut self, transition: &Transition, deadline: Instant) -> Result<(), Error> {
        let Some(why) = self.switches_stacks.clone() else { return Ok(()) };
        let (ledger, allowed) = (self.cx.target.ledger_at(), self.cx.options.allow_suspended_frames);
        let mut wait =
            suspended_frames::SuspendedFrameWait::new((self.cx.process, why), transition, ledger, allowed, deadline);
        self.in_phase("search suspended stacks", |m| {
            while let Some(until) = wait.search(m.cx.report)? {
                m.serve(until)?;
            }
            Ok(())
        })
    }

    fn in_phase<T>(&mut self, phase: &str, work: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        self.cx.report.started(phase);
        let start = crate::report::now_ns();
        let result = work(self);
        self.cx.report.ended(phase, crate::report::now_ns() - start);
        result
    }

    fn forbidden(&self, code: &[NamedSpan], transition: &Transition) -> Forbidden {
        Forbidden::new(code, &self.trampolines, &transition.loop_entries)
    }

    fn back_deadline(&mut self) -> Instant {
        *self.back_deadline.get_or_insert_with(|| Instant::now() + self.cx.options.back_timeout())
    }
}

impl<'o, 's, 'r> Mechanism<'o, 's, 'r> for Trampolines<'o, 's, 'r> {
    fn context(&mut self) -> &mut Context<'o, 's, 'r> {
        &mut self.cx
    }

    fn has_begun(&self) -> bool {
        self.has_begun
    }

    fn is_decided(&self, transition: &Transition) -> bool {
        // threads complete a change of data by themselves
        let decided = [DispatchState::AllThen, DispatchState::DataChanging];
        self.has_begun && self.state(transition).is_ok_and(|state| decided.contains(&state))
    }

    /// Writes the dispatchers, all of which choose the old side, and the record `Begin`.
    fn begin(&mut self, view: &View, plan: &mut Plan) -> Result<(), Error> {
        let memory = self.memory();
        let Plan { transition, dispatchers, data } = plan;
        transition.sites.extend(lookup_redirect::site(memory, view, &transition.after)?);
        self.examine(view, transition)?;
        let both = [&transition.before[..], &transition.after].concat();
        lookup_redirect::update_table(self.cx.target, view, &both)?;
        self.cx.target.expect_old_side(transition)?;
        self.set_state(transition, DispatchState::AllOtherwise)?;
        for (at, code) in dispatchers {
            memory.write(*at, code)?;
        }
        self.find_closed_pages(transition)?;
        data.iter().try_for_each(|(at, bytes)| memory.write(*at, bytes))?;
        let begun = Box::new(Transition { data: None, ..transition.clone() });
        self.cx.target.append(match &transition.data {
            Some(data) => Record::BeginWithData(begun, data.clone()),
            None => Record::Begin(begun),
        })?;
        self.has_begun = true;
        Ok(())
    }

    fn abort(&mut self, transition: &Transition) -> Result<(), Error> {
        if self.has_begun { self.phase_record(transition, Phase::Aborted) } else { Ok(()) }
    }

    fn arm(&mut self, transition: &Transition) -> Result<(), Error> {
        self.deadline = Instant::now() + self.cx.options.timeout;
        let armed: Vec<_> = transition.sites.iter().map(|s| (s, s.armed)).collect();
        self.protect_data(transition, false)?;
        self.in_phase("arm", |m| m.write_entries(&armed, "arm", m.deadline))
    }

    fn disarm(&mut self, transition: &Transition) -> Result<(), Error> {
        let deadline = self.back_deadline();
        let restored: Vec<_> = transition.sites.iter().map(|s| (s, s.from.bytes)).collect();
        self.in_phase("restore", |m| m.write_entries(&restored, "restore", deadline))?;
        self.protect_data(transition, true)
    }

    fn migrate(&mut self, transition: &Transition) -> Result<MigrationResult, Error> {
        let (how, deadline) = (self.quiescence, self.deadline);
        if how != Quiescence::Probe {
            self.await_suspended(transition, deadline)?;
        }
        let threads = match how {
            Quiescence::Probe => {
                self.decide_per_thread(transition)?;
                let forward = |m: &mut Self| m.move_threads(transition, Direction::Forward, deadline);
                let threads = self.in_phase("migrate", forward)?;
                self.await_suspended(transition, deadline)?;
                threads
            }
            Quiescence::Stop => self.in_phase("stop", |m| m.stop_all(transition, deadline))?,
            _ => self.migrate_at_points(transition, how, deadline)?,
        };
        Ok(MigrationResult { threads, staying: Vec::new() })
    }

    fn move_back(&mut self, transition: &Transition) -> Result<u32, Error> {
        let deadline = self.back_deadline();
        self.abandon_request()?;
        if self.state(transition)? != DispatchState::PerThread {
            return Ok(0);
        }
        self.phase_record(transition, Phase::Aborting)?;
        let moved = self.in_phase("migrate", |m| m.move_threads(transition, Direction::Back, deadline));
        let threads = moved.map_err(|error| error.stuck(transition.number))?;
        self.set_state(transition, DispatchState::AllOtherwise).map(|()| threads)
    }

    fn decide(&mut self, transition: &Transition, _migrated: &MigrationResult) -> Result<(), Error> {
        self.set_state(transition, DispatchState::AllThen)
    }

    /// Turns entries into direct jumps. A failure here leaves the new side active.
    fn commit(&mut self, transition: &Transition, _migrated: &MigrationResult) -> Result<(), Error> {
        self.settle_request(GatherOutcome::Released)?;
        let direct: Vec<_> = transition.sites.iter().map(|s| (s, s.to.bytes)).collect();
        let deadline = Instant::now() + COMPLETE_TIMEOUT;
        self.in_phase("commit", |m| {
            m.write_entries(&direct, "commit", deadline)?;
            m.protect_data(transition, true)?;
            m.phase_record(transition, Phase::Committed)
        })
        .map_err(|error| error.unfinished(transition.number))
    }
}
