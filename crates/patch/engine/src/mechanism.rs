//! Ways by which each thread sees its own version of the code: one interface of the phases of an operation, with two implementations.

use crate::Error;
use crate::apply::plan::Plan;
use crate::error::Busy;
use crate::ledger::{Transition, View};
use crate::options::Options;
use crate::report::Report;
use crate::target::Target;
use stillpoint_patch_tracee::{Process, Session};

/// Objects that the phases of an operation work with.
pub(crate) struct Context<'o, 's, 'r> {
    pub(crate) session: &'o mut Session<'s>,
    pub(crate) process: &'o Process,
    pub(crate) target: &'o mut Target,
    pub(crate) options: &'o Options,
    pub(crate) report: &'o mut Report<'r>,
}

impl<'s, 'r> Context<'_, 's, 'r> {
    /// Lends all of it for one step.
    pub(crate) fn reborrow(&mut self) -> Context<'_, 's, 'r> {
        let Context { session, process, target, options, report } = self;
        Context { session, process, target, options, report }
    }
}

/// Result of a migration.
#[derive(Debug, Default)]
pub(crate) struct MigrationResult {
    /// Number of threads.
    pub(crate) threads: u32,
    /// Threads that keep the old version, each with the code in which it stays.
    pub(crate) staying: Vec<Busy>,
}

/// Way by which each thread sees its own version of the code. The phases of an operation call the methods in this order, and the inverses
/// in the opposite order; each inverse relies on those of all later phases.
pub(crate) trait Mechanism<'o, 's, 'r> {
    /// Returns what the phases work with.
    fn context(&mut self) -> &mut Context<'o, 's, 'r>;

    /// Returns true if a failure from now on is a rollback: the target or its kernel holds the intent.
    fn has_begun(&self) -> bool;

    /// Returns true if the target itself shows that the deciding byte was written: nothing is undone any more.
    fn is_decided(&self, transition: &Transition) -> bool;

    /// Completes the plan, checks that the target holds the old side, and records the intent where the way has a record of it.
    fn begin(&mut self, view: &View, plan: &mut Plan) -> Result<(), Error>;

    /// Inverse of [`Mechanism::begin`].
    fn abort(&mut self, transition: &Transition) -> Result<(), Error>;

    /// Puts the new side into place; no thread sees it yet.
    fn arm(&mut self, transition: &Transition) -> Result<(), Error>;

    /// Inverse of [`Mechanism::arm`]: all threads are on the old side.
    fn disarm(&mut self, transition: &Transition) -> Result<(), Error>;

    /// Moves the threads to the new side; those that change together are moved and decided in one moment.
    fn migrate(&mut self, transition: &Transition) -> Result<MigrationResult, Error>;

    /// Inverse of [`Mechanism::migrate`]: moves every thread back to the old side; returns the number of threads.
    fn move_back(&mut self, transition: &Transition) -> Result<u32, Error>;

    /// Writes the deciding byte, unless the migration has: from now on every thread, also a future one, is on the new side.
    fn decide(&mut self, transition: &Transition, migrated: &MigrationResult) -> Result<(), Error>;

    /// Removes what the decision made superfluous, and records the end.
    fn commit(&mut self, transition: &Transition, migrated: &MigrationResult) -> Result<(), Error>;
}
