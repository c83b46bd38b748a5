//! State that all records define together.

use super::{
    ConstantRecord, FunctionRecord, LedgerError, LookupRedirectRecord, Phase, PlacedPatch, Record, Span, Transition,
    validation,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stillpoint_patch_format::Avma;

/// State of a target according to its ledger.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct View {
    /// Every patch ever placed; its number is its index.
    pub placed: Vec<Arc<PlacedPatch>>,
    /// Numbers of the active patches, oldest first.
    pub active: Vec<u32>,
    /// The transition that has not ended.
    pub unfinished: Option<OpenTransition>,
    /// Number of the last transition begun, 0 before the first.
    pub last_transition: u32,
    /// Number of the last transition committed, 0 before the first.
    pub generation: u32,
    /// Transitions begun since the last committed one, and that one itself: a thread may still be before one of their dispatchers. A
    /// committed transition has seen every thread outside all earlier dispatchers.
    pub recent: Vec<Arc<Transition>>,
    /// Patches that a transition was to make active, even if it failed.
    pub came: BTreeSet<u32>,
    /// Room for dispatchers that transitions have mapped, without that of patches.
    pub laid: Vec<Span>,
    /// The lookup redirect; `None` before it is in memory.
    pub lookup_redirect: Option<LookupRedirectRecord>,
}

/// A transition that has not ended.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenTransition {
    /// The transition.
    pub transition: Arc<Transition>,
    /// Its last phase; `None` if no thread can have migrated yet.
    pub phase: Option<Phase>,
}

/// Shipped bytes of an entry, and the way to run them while the entry holds a jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The entry's bytes as shipped.
    pub original: [u8; 5],
    /// Address of the displaced code.
    pub displaced: Avma,
}

/// Code that runs for an entry: as shipped, or of a patch.
#[derive(Debug, Clone, Copy)]
pub enum Version<'a> {
    /// The code as shipped.
    Shipped,
    /// Code of the patch with this number.
    Patched(u32, &'a FunctionRecord),
}

/// Collects the first value of each key.
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
    /// Adds one more record; refuses a record that this tool would never write, and is then unchanged.
    ///
    /// # Errors
    /// The record breaks a rule, or contradicts an earlier one.
    pub fn add(&mut self, record: Record) -> Result<(), LedgerError> {
        validation::check(self, &record)?;
        match record {
            Record::Placed(patch) => self.placed.push(Arc::from(patch)),
            Record::Begin(transition) => self.begin(Arc::from(transition))?,
            Record::Rest(transition) => {
                let number = transition.number;
                self.begin(Arc::from(transition))?;
                self.phase(number, Phase::Resting)?;
            }
            Record::Phase { transition, phase } => self.phase(transition, phase)?,
            Record::LookupRedirect(redirect) => self.lookup_redirect = Some(*redirect),
            Record::PlacedData(data) => match self.placed.last_mut() {
                Some(patch) => Arc::make_mut(patch).data = data,
                None => return contradiction("data of a patch that was not placed"),
            },
            Record::BeginWithData(mut transition, data) => {
                transition.data = Some(data);
                self.begin(Arc::from(transition))?;
            }
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
            return contradiction(format!("transition {} names patches that do not exist", transition.number));
        }
        self.last_transition = transition.number;
        self.came.extend(&transition.after);
        self.laid.extend(&transition.trampolines);
        self.recent.push(Arc::clone(&transition));
        self.unfinished = Some(OpenTransition { transition, phase: None });
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

    /// Returns the patch of a number that a checked record named.
    pub fn patch(&self, number: u32) -> Option<&PlacedPatch> {
        self.placed.get(number as usize).map(Arc::as_ref)
    }

    /// Returns the version for `entry` when the patches in `active` are active.
    pub fn version(&self, active: &[u32], entry: Avma) -> Version<'_> {
        for number in active.iter().rev() {
            let functions = self.patch(*number).into_iter().flat_map(|p| &p.functions);
            if let Some(function) = functions.into_iter().find(|f| f.old.start == entry) {
                return Version::Patched(*number, function);
            }
        }
        Version::Shipped
    }

    /// Returns [`View::version`] of every entry that these patches redirect, in one pass: a ledger may name too many for single look-ups.
    pub fn versions(&self, active: &[u32]) -> BTreeMap<Avma, (u32, &FunctionRecord)> {
        let patches = active.iter().rev().filter_map(|number| Some((*number, self.patch(*number)?)));
        first_of(patches.flat_map(|(number, p)| p.functions.iter().map(move |f| (f.old.start, (number, f)))))
    }

    /// Returns every constant that any patch changes in place; an address may occur several times.
    pub fn constants(&self) -> impl Iterator<Item = &ConstantRecord> {
        self.placed.iter().flat_map(|p| &p.constants)
    }

    /// Returns the contents of a constant when the patches in `active` are active; `None` if no patch ever changed it.
    pub fn contents(&self, active: &[u32], at: Avma) -> Option<&[u8]> {
        let of = |number: &u32| self.patch(*number)?.constants.iter().find(|c| c.at == at);
        let shipped = || self.constants().find(|c| c.at == at).map(|c| &c.original[..]);
        active.iter().rev().find_map(of).map(|c| &c.new[..]).or_else(shipped)
    }

    /// Returns the contents of every variable that any patch changes for all threads, when the patches in `active` are active. One pass: a
    /// ledger may name too many for single look-ups.
    pub fn data(&self, active: &[u32]) -> BTreeMap<Avma, &[u8]> {
        let newest = active.iter().rev().filter_map(|number| self.patch(*number)).flat_map(|p| &p.data);
        let shipped = self.placed.iter().flat_map(|p| &p.data);
        first_of(newest.map(|c| (c.at, &c.new[..])).chain(shipped.map(|c| (c.at, &c.original[..]))))
    }

    /// Returns every entry that was ever redirected, with its shipped bytes and the latest displaced copy.
    pub fn origins(&self) -> BTreeMap<Avma, Origin> {
        let functions = self.placed.iter().flat_map(|p| &p.functions);
        functions.map(|f| (f.old.start, Origin { original: f.original, displaced: f.displaced })).collect()
    }

    /// Returns every dispatcher and displaced prologue that was ever placed: a thread in one of them has not decided yet.
    pub fn trampolines(&self) -> Vec<Span> {
        let patches = self.placed.iter().flat_map(|p| &p.trampolines);
        patches.chain(&self.laid).copied().collect()
    }

    /// Returns the bytes of the target's memory that patches occupy, active or not.
    pub fn bytes_kept(&self) -> u64 {
        self.placed.iter().map(|p| p.arena.len).sum()
    }
}
