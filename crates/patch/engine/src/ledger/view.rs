//! What the records mean together.

use super::{
    ConstantRecord, FunctionRecord, GuideRecord, LedgerError, Phase, PlacedPatch, Record, Span, Transition, valid,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stillpoint_patch_format::Avma;

/// State of a target as its ledger tells it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct View {
    /// Every patch ever placed; its number is its index.
    pub placed: Vec<Arc<PlacedPatch>>,
    /// Numbers of the active ones, oldest first.
    pub active: Vec<u32>,
    /// The transition that has not come to an end.
    pub unfinished: Option<Unfinished>,
    /// Number of the last transition begun, 0 before the first.
    pub last_transition: u32,
    /// Number of the last transition committed, 0 before the first.
    pub generation: u32,
    /// The transitions begun since the last one that committed, and that one itself: somebody may still stand before
    /// one of their dispatchers. A transition that commits has seen every thread outside of all that were laid before.
    pub recent: Vec<Arc<Transition>>,
    /// Patches that a transition was to bring into force, whether it did or not.
    pub came: BTreeSet<u32>,
    /// Room for dispatchers that transitions have mapped, those of patches apart.
    pub laid: Vec<Span>,
    /// The guide, once it is in place.
    pub guide: Option<GuideRecord>,
}

/// A transition that has not come to an end.
#[derive(Debug, Clone, PartialEq)]
pub struct Unfinished {
    /// The transition.
    pub transition: Arc<Transition>,
    /// Its last phase; `None` before any thread may have migrated.
    pub phase: Option<Phase>,
}

/// What is shipped at an entry, and how to run it while a jump stands there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The entry's bytes as shipped.
    pub original: [u8; 5],
    /// The displaced code.
    pub displaced: Avma,
}

/// The code that runs behind an entry: as shipped, or of a patch.
#[derive(Debug, Clone, Copy)]
pub enum Version<'a> {
    /// As shipped.
    Shipped,
    /// Of the patch of that number.
    Patched(u32, &'a FunctionRecord),
}

/// The first value of each key.
pub(crate) fn first_of<K: Ord, V>(all: impl Iterator<Item = (K, V)>) -> BTreeMap<K, V> {
    let mut map = BTreeMap::new();
    for (key, value) in all {
        map.entry(key).or_insert(value);
    }
    map
}

fn contradiction<T>(text: impl Into<String>) -> Result<T, LedgerError> {
    Err(LedgerError::Inconsistent(text.into()))
}

impl View {
    /// Folds one more record in; refuses what no tool of ours would have written, and is as before then.
    ///
    /// # Errors
    /// The record breaks a rule, or contradicts an earlier one.
    pub fn add(&mut self, record: Record) -> Result<(), LedgerError> {
        valid::check(self, &record)?;
        match record {
            Record::Placed(patch) => self.placed.push(Arc::from(patch)),
            Record::Begin(transition) => self.begin(Arc::from(transition))?,
            Record::Rest(transition) => {
                let number = transition.number;
                self.begin(Arc::from(transition))?;
                self.phase(number, Phase::Resting)?;
            }
            Record::Phase { transition, phase } => self.phase(transition, phase)?,
            Record::Guide(guide) => self.guide = Some(*guide),
        }
        Ok(())
    }

    fn begin(&mut self, transition: Arc<Transition>) -> Result<(), LedgerError> {
        if let Some(open) = &self.unfinished {
            return contradiction(format!("transition {} began inside {}", transition.number, open.transition.number));
        }
        if transition.number != self.last_transition + 1 {
            return contradiction(format!("transition {} follows {}", transition.number, self.last_transition));
        }
        let known = self.placed.len() as u32;
        if transition.after.iter().collect::<BTreeSet<_>>().len() < transition.after.len() {
            return contradiction(format!("transition {} names a patch twice", transition.number));
        }
        if transition.before != self.active || transition.after.iter().any(|p| *p >= known) {
            return contradiction(format!("transition {} names patches that are not there", transition.number));
        }
        self.last_transition = transition.number;
        self.came.extend(&transition.after);
        self.laid.extend(&transition.trampolines);
        self.recent.push(Arc::clone(&transition));
        self.unfinished = Some(Unfinished { transition, phase: None });
        Ok(())
    }

    fn phase(&mut self, number: u32, phase: Phase) -> Result<(), LedgerError> {
        let Some(open) = self.unfinished.as_mut().filter(|open| open.transition.number == number) else {
            return contradiction(format!("{phase:?} of transition {number}, which is not open"));
        };
        open.phase = Some(phase);
        match phase {
            Phase::Committed => {
                self.active.clone_from(&open.transition.after);
                self.generation = number;
                self.recent.retain(|t| t.number >= number);
                self.unfinished = None;
            }
            Phase::Aborted => self.unfinished = None,
            Phase::Migrating | Phase::Aborting | Phase::Resting => {}
        }
        Ok(())
    }

    /// The patch of a number that a checked record named.
    pub fn patch(&self, number: u32) -> Option<&PlacedPatch> {
        self.placed.get(number as usize).map(Arc::as_ref)
    }

    /// The version behind `entry` when the patches in `active` are in force.
    pub fn version(&self, active: &[u32], entry: Avma) -> Version<'_> {
        for number in active.iter().rev() {
            let functions = self.patch(*number).into_iter().flat_map(|p| &p.functions);
            if let Some(function) = functions.into_iter().find(|f| f.old.start == entry) {
                return Version::Patched(*number, function);
            }
        }
        Version::Shipped
    }

    /// [`View::version`] of every entry that these patches redirect: a ledger may name so many that each is not looked up by itself.
    pub fn versions(&self, active: &[u32]) -> BTreeMap<Avma, (u32, &FunctionRecord)> {
        let patches = active.iter().rev().filter_map(|number| Some((*number, self.patch(*number)?)));
        first_of(patches.flat_map(|(number, p)| p.functions.iter().map(move |f| (f.old.start, (number, f)))))
    }

    /// Every constant that a patch of any number changes where it lies; several of one place.
    pub fn constants(&self) -> impl Iterator<Item = &ConstantRecord> {
        self.placed.iter().flat_map(|p| &p.constants)
    }

    /// What a constant holds when the patches in `active` are in force; `None` of one that no patch ever changed.
    pub fn contents(&self, active: &[u32], at: Avma) -> Option<&[u8]> {
        let of = |number: &u32| self.patch(*number)?.constants.iter().find(|c| c.at == at);
        let shipped = || self.constants().find(|c| c.at == at).map(|c| &c.original[..]);
        active.iter().rev().find_map(of).map(|c| &c.new[..]).or_else(shipped)
    }

    /// Every entry that was ever redirected, with what is shipped there: the latest displaced copy serves.
    pub fn origins(&self) -> BTreeMap<Avma, Origin> {
        let functions = self.placed.iter().flat_map(|p| &p.functions);
        functions.map(|f| (f.old.start, Origin { original: f.original, displaced: f.displaced })).collect()
    }

    /// Every dispatcher and displaced prologue that was ever laid: a thread that stands in one has a decision pending.
    pub fn trampolines(&self) -> Vec<Span> {
        let patches = self.placed.iter().flat_map(|p| &p.trampolines);
        patches.chain(&self.laid).copied().collect()
    }

    /// Bytes of the target that patches hold, active or not.
    pub fn bytes_kept(&self) -> u64 {
        self.placed.iter().map(|p| p.arena.len).sum()
    }
}
