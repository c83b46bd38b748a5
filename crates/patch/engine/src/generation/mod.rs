//! Patching with address-space generations: on a kernel that has them (`crates/patch/generations/`) each thread sees its own text, and no
//! dispatcher decides.
//!
//! ```text
//! arm ── migrate ── decide ── commit          arm:     entries are direct jumps, in a new generation only (`create`)
//!           └── move back ── disarm             commit:  the kernel makes that the text of all
//! ```
//! Patches, checks, memory, ledger and unwinders are the same as with trampolines, and so is the result: afterwards either way can revert
//! the patch. A thread migrates when no code that changes is on its stack, by a system call that it makes for the tool while it is stopped;
//! or by itself at a quiescence point. A new thread is in the generation of its parent. Threads that change together stay in place, and are
//! blocked, until the generation is the text of all.
//!
//! *A killed tool.* Until all threads have migrated, or are blocked, nothing is in the ledger: the kernel itself shows that a generation
//! was left, and the threads in it. Then the record `Begin` is written, with a state byte that already says "all new". A tool that finds
//! the record goes forward if all threads are in the generation. If some were blocked, they have continued by themselves on the old text.
//! That text is still active if the kernel was not told yet: then all roll back. While a thread is in a generation of a patch, only this
//! view can continue.
//!
//! *Threads that stay.* A patch may name functions that a thread need not leave. When all others have migrated, the transition rests: one
//! record states it, those threads are in the base, which is unchanged, and all others in the generation. A new thread is in the generation
//! of its parent. The same command continues when they have left; the opposite command moves all back.

mod kernel;
mod killed_tool;
mod migration;
mod points;
mod rest;
mod text;

use crate::apply::plan::Plan;
use crate::error::Busy;
use crate::ledger::{NamedSpan, Phase, Record, Transition, View};
use crate::mechanism::{Context, Mechanism, MigrationResult};
use crate::points::Name;
use crate::points::abi::Mode;
use crate::scan::Forbidden;
use crate::target::Target;
use crate::{Error, Quiescence, event_pump, lookup_redirect, suspended_frames};
pub use kernel::Generation;
pub(crate) use kernel::{generations, in_base};
use killed_tool::{finish_killed, undo_commit_record};
pub(crate) use killed_tool::{prepare, refuse, undo_decision};
use migration::Migration;
use points::PointMigration;
pub(crate) use rest::{RestRequest, RestResult, continue_resting};
use std::time::Instant;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{DISPATCH_LEN, DispatchState};
use stillpoint_patch_tracee::{self as tracee, FrozenProcess};

/// Transitions of one process by generations of its address space.
pub(crate) struct Generations<'o, 's, 'r> {
    cx: Context<'o, 's, 'r>,
    /// The new generation; 0, the base, before it is made.
    generation: u32,
    /// True if the transition rested, so that it is in the ledger.
    rested: bool,
    /// True if the threads that change together have done so, in the moment of the decision.
    is_decided: bool,
    /// Time limit of the migration, set when the generation is made.
    deadline: Instant,
    /// Our memory that no code uses: the calls of the kernel need it.
    scratch: Option<Avma>,
    points: Option<PointMigration>,
}

impl<'o, 's, 'r> Generations<'o, 's, 'r> {
    /// Prepares transitions; nothing is read from the process.
    pub(crate) fn new(cx: Context<'o, 's, 'r>) -> Self {
        let deadline = Instant::now() + cx.options.timeout;
        Generations { cx, generation: 0, rested: false, is_decided: false, deadline, scratch: None, points: None }
    }

    /// Takes over a transition that rests with this generation.
    fn resume(cx: Context<'o, 's, 'r>, generation: u32) -> Self {
        Generations { generation, rested: true, ..Generations::new(cx) }
    }

    fn forbidden(&self, code: &[NamedSpan], transition: &Transition) -> Forbidden {
        let mut trampolines = self.cx.target.view.trampolines();
        trampolines.extend(&transition.trampolines);
        Forbidden::new(code, &trampolines, &transition.loop_entries)
    }

    /// Asks threads to migrate at their points, or to block there.
    fn ask(&mut self, mode: Mode, group: Name, transition: &Transition) -> Result<(), Error> {
        let (goal, deadline) = ((self.generation, transition.number), self.deadline);
        self.points.as_mut().map_or(Ok(()), |points| points.ask(mode, group, goal, deadline))
    }

    /// Abandons the request: no thread migrates at its point, or blocks there, any more.
    fn abandon_request(&mut self) -> Result<(), Error> {
        let Context { session, report, .. } = &mut self.cx;
        self.points.as_mut().map_or(Ok(()), |points| points.abandon(session, report))
    }

    /// Migrates each thread by itself.
    fn migrate_each(&mut self, transition: &Transition) -> Result<MigrationResult, Error> {
        let forbidden = self.forbidden(&transition.leave, transition);
        // threads that change together wait for each other
        let by_itself = self.rested || matches!(self.cx.options.quiescence, Quiescence::Probe | Quiescence::Local);
        let staying = if by_itself { &transition.staying[..] } else { &[] };
        let may_stay = Forbidden::new(staying, &[], &transition.loop_entries);
        let goal = (self.generation, transition.number);
        let Context { session, target, report, .. } = &mut self.cx;
        let (points, deadline) = (self.points.as_mut(), self.deadline);
        report.in_phase("migrate", |report| {
            Migration::new(target, goal, forbidden, may_stay)?.run(session, report, points, deadline)
        })
    }

    /// Waits until no frame of code to be left is found on a suspended stack; one may have appeared since the transition began.
    fn await_suspended(&mut self, transition: &Transition) -> Result<(), Error> {
        let Context { session, process, target, options, report } = &mut self.cx;
        let Some(why) = suspended_frames::switches_stacks(process, &target.modules)? else { return Ok(()) };
        let (ledger, allowed) = (target.ledger_at(), options.allow_suspended_frames);
        let mut wait =
            suspended_frames::SuspendedFrameWait::new((process, why), transition, ledger, allowed, self.deadline);
        report.in_phase("search suspended stacks", |report| {
            while let Some(until) = wait.search(report)? {
                event_pump::serve(process, session, until)?;
            }
            Ok(())
        })
    }

    /// Migrates and decides while the threads that change together are blocked: in that moment the generation becomes the text of all.
    fn change_together(&mut self, transition: &Transition) -> Result<MigrationResult, Error> {
        let forbidden = self.forbidden(&transition.leave, transition);
        let Context { session, process, target, options, report } = &mut self.cx;
        let modules = target.modules.clone();
        let frames = target.view.placed.iter().map(|patch| patch.eh_frame).collect();
        let switches_stacks = suspended_frames::switches_stacks(process, &modules)?.is_some();
        let search = switches_stacks && !options.allow_suspended_frames;
        let (generation, rested) = (self.generation, self.rested);
        let Some(points) = &mut self.points else { return Err(Error::NoWord(process.pid())) };
        let decide = |frozen: &mut FrozenProcess<'_, '_>| {
            decide_frozen(frozen, target, transition, (generation, rested), search)
        };
        let threads = report.in_phase("gather", |report| {
            points.gather(session, report, (modules, frames), &forbidden, generation, decide)
        })?;
        self.is_decided = true;
        Ok(MigrationResult { threads, staying: Vec::new() })
    }
}

/// Writes the record, and makes the kernel commit; on failure neither is active. Returns the obstacle if it is impossible now; with
/// `search`, a frame on a suspended stack is one.
fn decide_frozen(
    frozen: &mut FrozenProcess<'_, '_>,
    target: &mut Target,
    transition: &Transition,
    (generation, rested): (u32, bool),
    search: bool,
) -> Result<Option<Busy>, Error> {
    if search {
        let (process, forbidden) = (&target.process, Forbidden::new(&transition.leave, &[], &[]));
        if let Some(frame) = suspended_frames::search(process, &forbidden, target.ledger_at())?.found {
            return Ok(Some(Busy { tid: process.pid().leader(), function: frame.describe() }));
        }
    }
    let mut carrier = match frozen.carrier() {
        Err(tracee::Error::NoCarrier { pid, why }) => {
            return Ok(Some(Busy { tid: pid.leader(), function: why }));
        }
        other => other?,
    };
    record_decision(target, transition, rested).map_err(|error| error.unfinished(transition.number))?;
    if let Err(error) = kernel::commit_wherever(&mut carrier, generation) {
        undo_commit_record(target, transition)?;
        return Err(error.into());
    }
    Ok(None)
}

/// Writes the record `Begin`, with a state byte that already says that all threads run the new side.
fn record_decision(target: &mut Target, transition: &Transition, rested: bool) -> Result<(), Error> {
    target.process.memory().write(transition.state, &[DispatchState::AllThen as u8])?;
    if rested { Ok(()) } else { target.append(Record::Begin(Box::new(transition.clone()))) }
}

/// Writes the record `Rest`: old code stays active for the threads that have not migrated.
fn record_rest(target: &mut Target, transition: &Transition) -> Result<(), Error> {
    target.process.memory().write(transition.state, &[DispatchState::AllOtherwise as u8])?;
    target.append(Record::Rest(Box::new(transition.clone())))
}

impl<'o, 's, 'r> Mechanism<'o, 's, 'r> for Generations<'o, 's, 'r> {
    fn context(&mut self) -> &mut Context<'o, 's, 'r> {
        &mut self.cx
    }

    fn has_begun(&self) -> bool {
        self.generation != 0
    }

    /// Returns false: the steps that decide report [`Error::Unfinished`] themselves.
    fn is_decided(&self, _transition: &Transition) -> bool {
        false
    }

    /// Ends what a killed tool left. Nothing is recorded: the kernel shows the generation, and the threads in it.
    fn begin(&mut self, view: &View, plan: &mut Plan) -> Result<(), Error> {
        let Context { session, process, target, options, report } = &mut self.cx;
        let Plan { transition, dispatchers, .. } = plan;
        suspended_frames::refuse(target, transition, options)?;
        finish_killed(session, target, options, report)?;
        transition.sites.extend(lookup_redirect::site(process.memory(), view, &transition.after)?);
        target.expect_old_side(transition)?;
        lookup_redirect::update_table(target, view, &[&transition.before[..], &transition.after].concat())?;
        // the calls use the room of a dispatcher that is not needed
        let room = transition.trampolines.first().map(|room| room.start);
        self.scratch = dispatchers.first().map(|(at, _)| *at).or(room);
        Ok(())
    }

    fn abort(&mut self, _transition: &Transition) -> Result<(), Error> {
        Ok(())
    }

    fn arm(&mut self, transition: &Transition) -> Result<(), Error> {
        const { assert!(kernel::SCRATCH_LEN <= DISPATCH_LEN) };
        let Context { session, process, target, options, report } = &mut self.cx;
        let nothing = || Error::Unsuitable { pid: process.pid(), what: "has nothing that this would change".into() };
        let scratch = self.scratch.ok_or_else(nothing)?;
        self.points = match options.quiescence {
            Quiescence::Probe | Quiescence::Stop => None,
            _ => PointMigration::find(target)?,
        };
        if options.quiescence != Quiescence::Global {
            self.points.as_mut().map_or(Ok(()), PointMigration::check_filters)?;
        }
        self.deadline = Instant::now() + options.timeout;
        self.generation = report.in_phase("create", |_| kernel::create(process, session, transition, scratch))?;
        Ok(())
    }

    fn disarm(&mut self, _transition: &Transition) -> Result<(), Error> {
        if self.generation == 0 {
            return Ok(());
        }
        kernel::delete(self.cx.process, self.cx.session, self.generation)
    }

    fn migrate(&mut self, transition: &Transition) -> Result<MigrationResult, Error> {
        let migrated = match self.cx.options.quiescence {
            _ if self.points.is_none() => self.migrate_each(transition)?,
            Quiescence::Group(name) => {
                self.ask(Mode::Others, name, transition)?;
                self.migrate_each(transition)?;
                self.ask(Mode::Group, name, transition)?;
                return self.change_together(transition);
            }
            Quiescence::Global => {
                self.ask(Mode::Global, Name::default(), transition)?;
                return self.change_together(transition);
            }
            _ => {
                self.ask(Mode::Local, Name::default(), transition)?;
                self.migrate_each(transition)?
            }
        };
        if migrated.staying.is_empty() {
            self.await_suspended(transition)?;
        }
        Ok(migrated)
    }

    fn move_back(&mut self, transition: &Transition) -> Result<u32, Error> {
        let until = Instant::now() + self.cx.options.back_timeout();
        let forbidden = self.forbidden(&transition.enter, transition);
        self.abandon_request().map_err(|error| error.stuck(transition.number))?;
        let Context { session, target, report, .. } = &mut self.cx;
        let mut back = Migration::new(target, (0, transition.number), forbidden, Forbidden::default())?;
        let moved = report.in_phase("migrate", |report| back.run(session, report, None, until));
        moved.map(|moved| moved.threads).map_err(|error| error.stuck(transition.number))
    }

    /// Writes the record that is the commit point: a tool that finds it goes forward. If threads stay in old code, the record states that
    /// the transition rests, and a tool that finds it leaves all threads in place.
    fn decide(&mut self, transition: &Transition, migrated: &MigrationResult) -> Result<(), Error> {
        if self.is_decided {
            return Ok(());
        }
        if migrated.staying.is_empty() {
            let recorded = record_decision(self.cx.target, transition, self.rested);
            return recorded.map_err(|error| error.unfinished(transition.number));
        }
        self.abandon_request()?;
        if self.rested {
            return Ok(());
        }
        record_rest(self.cx.target, transition).map_err(|error| error.unfinished(transition.number))
    }

    /// Makes the generation the text of all, unless threads stay in old code.
    fn commit(&mut self, transition: &Transition, migrated: &MigrationResult) -> Result<(), Error> {
        if !migrated.staying.is_empty() {
            return Ok(());
        }
        let Context { session, process, target, report, .. } = &mut self.cx;
        let record = Record::Phase { transition: transition.number, phase: Phase::Committed };
        let (points, generation) = (self.points.as_mut(), self.generation);
        let committed = if self.is_decided {
            target.append(record)
        } else {
            report.in_phase("commit", |_| {
                kernel::commit(process, session, generation)?;
                points.map_or(Ok(()), PointMigration::release)?;
                target.append(record)
            })
        };
        committed.map_err(|error| error.unfinished(transition.number))
    }
}
