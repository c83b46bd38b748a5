//! One unit as shipped: its object, the places of its code in the target, and every name read back.

use crate::object_file::{Home, Nature, Object, Reloc, Section, Site, Symbol, SymbolType};
use crate::placement::{self, Piece, Places};
use crate::reverse::{self, Name};
use crate::symbol_names;
use crate::target::TargetElf;
use crate::{Placed, Placement, Refusal};
use std::collections::BTreeMap;
use stillpoint_patch_format::{Range, ResolvedBy, Svma, SymbolValue};

/// One unit as shipped.
#[derive(Debug)]
pub(crate) struct ShippedUnit<'a> {
    pub(crate) unit: String,
    pub(crate) object: Object<'a>,
    places: Places<'a>,
}

impl<'a> ShippedUnit<'a> {
    /// Reads the object, finds it in the target, and checks the values read back against each other and the symbol
    /// tables. `globals` are names whose addresses other units have shown.
    pub(crate) fn find(
        target: &TargetElf,
        unit: &str,
        bytes: &'a [u8],
        globals: &BTreeMap<String, u64>,
    ) -> Result<Self, Vec<Refusal>> {
        let object = Object::parse(bytes, unit, "shipped").map_err(|refusal| vec![refusal])?;
        let places = placement::locate(target, &object, globals);
        let shipped = ShippedUnit { unit: unit.to_owned(), object, places };
        let mut refusals: Vec<Refusal> = shipped.places.known.conflicts.iter().map(|c| shipped.conflict(c)).collect();
        shipped.check_tables(target, &mut refusals);
        if refusals.is_empty() { Ok(shipped) } else { Err(refusals) }
    }

    fn conflict(&self, conflict: &crate::reverse::Conflict) -> Refusal {
        let (name, one, other) = (conflict.name.clone(), conflict.one.clone(), conflict.other.clone());
        Refusal::SymbolConflict { unit: self.unit.clone(), name, one, other }
    }

    /// Checks that every global in the target's own tables has the address that was found.
    fn check_tables(&self, target: &TargetElf, refusals: &mut Vec<Refusal>) {
        for symbol in self.object.symbols.iter().filter(|s| !s.local && !s.name.is_empty()) {
            self.check_definition(symbol.name, refusals);
            let Some(found) = self.name(symbol.name).and_then(|n| n.direct) else { continue };
            let Some(listed) = target.symbols.get(symbol.name) else { continue };
            let mut listed = listed.iter().filter(|s| s.global && !s.tls).peekable();
            let Some(first) = listed.peek().map(|s| s.at) else { continue };
            if !listed.any(|s| s.at == found) {
                refusals.push(Refusal::SymbolConflict {
                    unit: self.unit.clone(),
                    name: symbol.name.to_owned(),
                    one: format!("{found:#x}"),
                    other: format!("{first:#x} by the target's symbol table"),
                });
            }
        }
    }

    /// Checks that calls of a function reach this code: the linker may have chosen another object's definition.
    fn check_definition(&self, name: &str, refusals: &mut Vec<Refusal>) {
        let called = self.places.known.names.get(name).and_then(|n| n.direct);
        if let (Some(called), Some(code)) = (called, self.code(name))
            && called != code.start.0
        {
            refusals.push(Refusal::SymbolConflict {
                unit: self.unit.clone(),
                name: name.to_owned(),
                one: format!("{called:#x} by its callers"),
                other: format!("{} by its code", code.start),
            });
        }
    }

    /// Returns cold parts of the function called `name`, under any of its names.
    pub(crate) fn cold_parts(&self, name: &str) -> Vec<&'a str> {
        let Some((function, _)) = self.function(name) else { return Vec::new() };
        let names = self.object.same_place(function);
        names.flat_map(|s| self.object.cold_parts(s.name)).map(|(_, cold)| cold.name).collect()
    }

    /// Returns the range of the function or cold part called `name`, if it was found.
    pub(crate) fn code(&self, name: &str) -> Option<Range> {
        let (_, symbol) = self.function(name)?;
        let Home::Section(section) = symbol.home else { return None };
        let start = self.places.code_address(section, symbol.value)?;
        let len =
            if symbol.size > 0 { symbol.size } else { self.object.sections[section].size.saturating_sub(symbol.value) };
        Some(Range { start: Svma(start), len })
    }

    /// Returns the range of the constant called `name`, at the address from this unit's code or from `elsewhere`, if
    /// the target has the object's content there.
    pub(crate) fn constant(&self, target: &TargetElf, name: &str, elsewhere: Option<u64>) -> Option<Range> {
        let (_, symbol) = self.object.defined(name)?;
        let Home::Section(section) = symbol.home else { return None };
        let start = self.name(name).and_then(|known| known.direct).or(elsewhere)?;
        let address = start.checked_sub(symbol.value)?;
        let whole = Piece { section, start: 0, end: self.object.sections[section].size, address };
        let range = Range { start: Svma(start), len: symbol.size };
        reverse::data_matches(target, &self.object, &whole).then_some(range)
    }

    /// Returns the name of the function that was found at an address.
    pub(crate) fn name_of_code(&self, at: u64) -> Option<&'a str> {
        self.object.functions().map(|(_, s)| s.name).find(|name| self.code(name).is_some_and(|code| code.start.0 == at))
    }

    fn function(&self, name: &str) -> Option<(usize, &Symbol<'a>)> {
        let is_code = |s: &Symbol<'_>| {
            let Home::Section(home) = s.home else { return false };
            s.is_function() && self.object.sections[home].nature == Nature::Text && !name.starts_with(".L")
        };
        self.object.defined(name).filter(|(_, s)| is_code(s))
    }

    /// Returns the reason why the code of `name` has no place.
    pub(crate) fn unplaced_reason(&self, name: &str) -> String {
        let Some((_, symbol)) = self.function(name) else {
            return "the unit does not define it".to_owned();
        };
        let Home::Section(section) = symbol.home else { return "it has no section".to_owned() };
        let comdat = self.object.sections[section].comdat;
        if let Some(at) = self.places.known.names.get(name).and_then(|known| known.direct).filter(|_| comdat) {
            return format!("the linker kept another object's copy, at {at:#x}, and its bytes differ");
        }
        let ambiguous = self.places.ambiguous.iter().find(|((s, start), _)| *s == section && *start <= symbol.value);
        match ambiguous {
            Some((_, count)) => format!("it matches at {count} addresses"),
            None if comdat => "no bytes match, or matching bytes cannot be attributed to this function".to_owned(),
            None => "no bytes match".to_owned(),
        }
    }

    /// Returns all known values of a name of the unit, defined or not.
    pub(crate) fn name(&self, name: &str) -> Option<Name> {
        let mut known = self.places.known.names.get(name).copied().unwrap_or_default();
        if let Some((_, symbol)) = self.object.defined(name)
            && let Home::Section(section) = symbol.home
        {
            if self.object.sections[section].nature == Nature::Text {
                known.direct = self.places.code_address(section, symbol.value).or(known.direct);
            } else if let Some(base) = self.places.known.bases.get(&section) {
                let at = Some(base.wrapping_add(symbol.value));
                match symbol.kind {
                    SymbolType::Tls => known.tls = at,
                    // the linker chose one of several weak definitions: what refers to the name shows which
                    _ if symbol.weak && !self.object.sections[section].comdat => {}
                    _ => known.direct = at,
                }
            }
        }
        (known != Name::default()).then_some(known)
    }

    /// Returns the address of the string that the target has in place of one of this unit.
    pub(crate) fn other_string(&self, literal: &[u8]) -> Option<u64> {
        self.places.known.other_strings.get(literal).copied()
    }

    /// Returns true if code or data of this unit in the target refers to a name, or might: code that exists there and
    /// was not found counts. Copies of inline code without a reference do not count: the unit has no evidence that the
    /// target has them.
    pub(crate) fn may_refer_to(&self, name: &str) -> bool {
        let seen = |name: &str| self.places.known.names.get(name).is_some_and(|known| *known != Name::default());
        let names_it = |reloc: &Reloc| match self.object.site(reloc) {
            Site::Extern(found, _) => found == name,
            Site::Inside { section, offset, .. } => {
                self.object.owner(section, offset).is_some_and(|owner| self.object.symbols[owner].name == name)
            }
            Site::Value(_) => false,
        };
        let is_dropped = |section: &Section<'_>| {
            section.comdat && !section.symbols.iter().any(|s| seen(self.object.symbols[*s].name))
        };
        let beside = |section: &Section<'_>| {
            matches!(section.nature, Nature::Unwind | Nature::Exceptions | Nature::Aside) || is_dropped(section)
        };
        let own = |section: &Section<'_>| section.symbols.iter().any(|s| self.object.symbols[*s].name == name);
        let known = |index: usize, reloc: &Reloc| {
            self.places.known.has_read(index) || self.places.code_address(index, reloc.offset).is_some()
        };
        let mut rest = self.object.sections.iter().enumerate().filter(|(_, s)| !beside(s) && !own(s));
        seen(name) || rest.any(|(index, s)| s.relocations.iter().any(|r| !known(index, r) && names_it(r)))
    }

    /// Returns true if some code was found at more than one place.
    pub(crate) fn is_ambiguous(&self) -> bool {
        !self.places.ambiguous.is_empty()
    }

    /// Returns global names with the addresses that this unit shows.
    pub(crate) fn globals(&self) -> impl Iterator<Item = (String, u64)> {
        let global = self.object.symbols.iter().filter(|s| !s.local && !s.name.is_empty());
        global.filter_map(|s| Some((s.name.to_owned(), self.name(s.name)?.direct?)))
    }

    /// Returns true if the name is a weak one that nothing defined when the target was linked.
    pub(crate) fn is_absent(&self, name: &str) -> bool {
        self.places.known.absent.contains(name)
    }

    /// Returns the module's own `tls_index`, when code of the unit uses it.
    pub(crate) fn module_index(&self) -> Option<u64> {
        self.places.known.module_index
    }

    /// Returns the number of all hot functions, and of those that were found.
    pub(crate) fn counts(&self) -> (u32, u32) {
        let hot = || self.object.functions().filter(|(_, s)| !symbol_names::is_cold(s.name));
        let placed = hot().filter(|(_, s)| self.code(s.name).is_some()).count();
        (placed as u32, hot().count() as u32)
    }

    /// Makes the placement for callers outside of the differ.
    pub(crate) fn placement(&self, target: &TargetElf) -> Placement {
        let (functions_placed, functions_total) = self.counts();
        let hot = self.object.functions().filter(|(_, s)| !symbol_names::is_cold(s.name));
        let unplaced = hot.filter(|(_, s)| self.code(s.name).is_none()).map(|(_, s)| s.name.to_owned()).collect();
        let mut symbols = BTreeMap::new();
        for symbol in &self.object.symbols {
            if symbol.name.is_empty() || symbol.name.starts_with(".L") || symbol.kind == SymbolType::Section {
                continue;
            }
            let Some(name) = self.name(symbol.name) else { continue };
            let defined = matches!(symbol.home, Home::Section(_) | Home::Common);
            let Some(value) = value_of(name) else { continue };
            let listed = target.symbols.get(symbol.name).and_then(|all| all.iter().find(|s| Some(s.at) == name.direct));
            let how = match listed {
                Some(symbol) => symbol.how,
                None if defined && symbol.is_function() => ResolvedBy::Placement,
                None => ResolvedBy::ReverseRelocation,
            };
            let size = if defined { symbol.size } else { 0 };
            symbols.insert(symbol.name.to_owned(), Placed { value, how, size });
        }
        Placement { symbols, functions_placed, functions_total, unplaced }
    }
}

/// Returns the value to show for a name: its own address before a stub before a slot.
fn value_of(name: Name) -> Option<SymbolValue> {
    name.direct
        .or(name.stub)
        .map(|at| SymbolValue::Target(Svma(at)))
        .or(name.tls.map(SymbolValue::TargetTls))
        .or(name.slot.map(|at| SymbolValue::TargetSlot(Svma(at))))
        .or(name.tls_slot.map(|at| SymbolValue::TargetTlsSlot(Svma(at))))
}
