//! One translation unit in all its builds, and the mapping between their symbols.

use crate::compare::Pair;
use crate::correlate::{self, Correlation};
use crate::object_file::{Home, Nature, Object, SymbolType};
use crate::shipped_unit::ShippedUnit;
use crate::symbol_names;
use crate::target::TargetElf;
use crate::types::{self, Scopes};
use crate::{Refusal, UnitInput, unnamed_types};
use std::collections::{BTreeMap, BTreeSet};

/// One translation unit in all its builds.
#[derive(Debug)]
pub(crate) struct Unit<'a> {
    pub(crate) path: &'a str,
    pub(crate) shipped: Option<ShippedUnit<'a>>,
    pub(crate) before: Option<Object<'a>>,
    /// Object of the after side; absent for a unit that only provides names.
    pub(crate) after: Option<Object<'a>>,
    to_before: Correlation,
    to_shipped: Correlation,
    after_to_shipped: Correlation,
}

/// Origin of a symbol of the after side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ancestor<'u> {
    /// The target has it under this name of the shipped object.
    Shipped(&'u str),
    /// An earlier patch of the series added it.
    Before,
    /// New symbol.
    None,
    /// Any of these may be the origin.
    Ambiguous(Vec<&'u str>),
}

impl<'a> Unit<'a> {
    /// Reads all units. Addresses of global names from one unit help to distinguish equal code in another.
    pub(crate) fn read_all(target: &TargetElf, inputs: &[UnitInput<'a>]) -> Result<Vec<Self>, Vec<Refusal>> {
        let (mut units, mut refusals) = (Vec::new(), Vec::new());
        for input in inputs {
            match Unit::read(target, input, &BTreeMap::new()) {
                Ok(unit) => units.push(unit),
                Err(found) => refusals.extend(found),
            }
        }
        if !refusals.is_empty() {
            return Err(refusals);
        }
        let mut globals: BTreeMap<String, u64> = BTreeMap::new();
        for unit in &units {
            for (name, at) in unit.shipped.iter().flat_map(ShippedUnit::globals) {
                let before = *globals.entry(name.clone()).or_insert(at);
                if before != at {
                    let (one, other) = (format!("{before:#x} by another unit"), format!("{at:#x}"));
                    refusals.push(Refusal::SymbolConflict { unit: unit.path.to_owned(), name, one, other });
                }
            }
        }
        if !refusals.is_empty() {
            return Err(refusals);
        }
        for (unit, input) in units.iter_mut().zip(inputs) {
            if unit.shipped.as_ref().is_some_and(ShippedUnit::is_ambiguous) {
                *unit = Unit::read(target, input, &globals)?;
            }
        }
        Ok(units)
    }

    fn read(target: &TargetElf, input: &UnitInput<'a>, globals: &BTreeMap<String, u64>) -> Result<Self, Vec<Refusal>> {
        let parse = |bytes: &'a [u8], side| {
            if bytes.is_empty() { Ok(None) } else { Object::parse(bytes, input.path, side).map(Some) }
        };
        let one = |refusal| vec![refusal];
        let shipped = if input.shipped.is_empty() {
            None
        } else {
            Some(ShippedUnit::find(target, input.path, input.shipped, globals)?)
        };
        let (before, after) = (parse(input.before, "before").map_err(one)?, parse(input.after, "after").map_err(one)?);
        let closures = |object: Option<&Object<'_>>, bytes: &[u8]| match object.is_some_and(unnamed_types::has_any) {
            true => types::closures(bytes).map_err(one),
            false => Ok(BTreeMap::new()),
        };
        let scopes = |object: Option<&Object<'_>>, bytes: &[u8]| match object.is_some_and(correlate::has_namesakes) {
            true => types::scopes(bytes).map_err(one),
            false => Ok(Scopes::default()),
        };
        let held = closures(before.as_ref(), input.before)?;
        let held_scopes = scopes(before.as_ref(), input.before)?;
        let to_before = match (&before, &after) {
            (Some(old), Some(new)) => {
                let new_scopes = scopes(Some(new), input.after)?;
                let new_closures = closures(Some(new), input.after)?;
                Correlation::between(old, new, [&held, &new_closures], [&held_scopes, &new_scopes])
            }
            _ => Correlation::default(),
        };
        let mut to_shipped = match (&shipped, &before) {
            (Some(old), Some(new)) => {
                let old = &old.object;
                let old_scopes = scopes(Some(old), input.shipped)?;
                let old_closures = closures(Some(old), input.shipped)?;
                Correlation::between(old, new, [&old_closures, &held], [&old_scopes, &held_scopes])
            }
            _ => Correlation::default(),
        };
        if let (Some(old), Some(new)) = (&shipped, &before) {
            // an earlier patch has brought a copy
            for (copy, _) in to_shipped.resized(&old.object, new) {
                to_shipped.separate(copy);
            }
        }
        let after_to_shipped = to_before.join(&to_shipped);
        Ok(Unit { path: input.path, shipped, before, after, to_before, to_shipped, after_to_shipped })
    }

    /// Returns the origin of a symbol of the after side.
    pub(crate) fn ancestor(&self, symbol: usize) -> Ancestor<'_> {
        let (Some(before), Some(_)) = (&self.before, &self.after) else { return Ancestor::None };
        let name_in = |object: &Object<'a>, all: &[usize]| all.iter().map(|s| object.symbols[*s].name).collect();
        let Some(older) = self.to_before.old(symbol) else {
            let candidates = self.to_before.candidates(symbol);
            return candidates.map_or(Ancestor::None, |all| Ancestor::Ambiguous(name_in(before, all)));
        };
        let Some(shipped) = &self.shipped else { return Ancestor::Before };
        match (self.to_shipped.old(older), self.to_shipped.candidates(older)) {
            (Some(oldest), _) => Ancestor::Shipped(shipped.object.symbols[oldest].name),
            (None, Some(all)) => Ancestor::Ambiguous(name_in(&shipped.object, all)),
            (None, None) => Ancestor::Before,
        }
    }

    /// Makes a variable of the after side a new one.
    pub(crate) fn separate(&mut self, variable: usize) {
        self.to_before.separate(variable);
        self.after_to_shipped.separate(variable);
    }

    /// Returns the static variables of the after side that have another size than before, each with that of the before side.
    pub(crate) fn resized(&self) -> Vec<(usize, usize)> {
        let (Some(before), Some(after)) = (&self.before, &self.after) else { return Vec::new() };
        self.to_before.resized(before, after)
    }

    /// Returns the functions of the before side that exist on the after side.
    pub(crate) fn kept(&self) -> BTreeSet<usize> {
        self.to_before.pairs().map(|(_, old)| old).collect()
    }

    /// Returns the lambdas that the after side replaced by others.
    pub(crate) fn replaced_lambdas(&self) -> &[String] {
        &self.to_before.left
    }

    /// Returns the before side's symbol for one of the after side.
    pub(crate) fn older(&self, symbol: usize) -> Option<usize> {
        self.to_before.old(symbol)
    }

    /// Returns both sides, when the unit has both.
    pub(crate) fn pair(&self) -> Option<Pair<'_, 'a>> {
        Some(Pair::new(self.before.as_ref()?, self.after.as_ref()?, &self.to_before))
    }

    /// Returns the after side and the shipped side, when the unit has both.
    pub(crate) fn shipped_pair(&self) -> Option<Pair<'_, 'a>> {
        Some(Pair::new(&self.shipped.as_ref()?.object, self.after.as_ref()?, &self.after_to_shipped))
    }

    /// Returns the shipped side's symbol for one of the after side.
    pub(crate) fn oldest(&self, symbol: usize) -> Option<usize> {
        self.after_to_shipped.old(symbol)
    }

    /// Returns the functions of the after side without cold parts. Of several names at one place, only those count that
    /// were at different places before: the compiler has folded these since.
    pub(crate) fn functions(&self) -> Vec<usize> {
        let Some(after) = &self.after else { return Vec::new() };
        let old_place = |symbol: usize| {
            let before = self.before.as_ref()?;
            let old = &before.symbols[self.older(symbol)?];
            Some((old.home, old.value))
        };
        let mut out: Vec<usize> = Vec::new();
        for section in after.sections.iter().filter(|s| s.nature == Nature::Text) {
            let hot = |s: &&usize| after.symbols[**s].is_function() && !symbol_names::is_cold(after.symbols[**s].name);
            let mut group: Vec<usize> = Vec::new();
            for &index in section.symbols.iter().filter(hot) {
                group.retain(|s| after.symbols[*s].value == after.symbols[index].value);
                let place = old_place(index);
                if group.is_empty() || (place.is_some() && group.iter().all(|s| old_place(*s) != place)) {
                    group.push(index);
                    out.push(index);
                }
            }
        }
        out
    }

    /// Returns the variables and constants that have a name of their own on the after side.
    pub(crate) fn variables(&self) -> impl Iterator<Item = usize> + '_ {
        let after = self.after.as_ref();
        let count = after.map_or(0, |o| o.symbols.len());
        (0..count).filter(move |index| {
            let Some(object) = after else { return false };
            let symbol = &object.symbols[*index];
            let data = match symbol.home {
                Home::Section(section) => !matches!(
                    object.sections[section].nature,
                    Nature::Text | Nature::Aside | Nature::Unwind | Nature::Exceptions | Nature::StartUp
                ),
                Home::Common => true,
                _ => false,
            };
            data && symbol.kind != SymbolType::Section && !symbol_names::is_anonymous(symbol.name)
        })
    }

    /// Returns the name that patches of a series use for a symbol: globals by their name, statics with their unit.
    pub(crate) fn public_name(&self, object: &Object<'_>, symbol: usize) -> String {
        let symbol = &object.symbols[symbol];
        if !symbol.local {
            return symbol.name.to_owned();
        }
        let stem = symbol_names::stem(symbol.name);
        let sharing = |s: &&crate::object_file::Symbol<'_>| {
            s.local && s.is_function() == symbol.is_function() && symbol_names::stem(s.name) == stem
        };
        let alone = !symbol.is_function() && object.symbols.iter().filter(sharing).count() == 1;
        format!("{}:{}", self.path, if alone { stem } else { symbol.name })
    }
}
