//! Destinations of relocations in the new code: in the target, in the patch, or resolved at run time.

use crate::Refusal;
use crate::assemble::Assembly;
use crate::object_file::{Home, Nature, Reloc, Site, SymbolType};
use crate::reverse::Name;
use crate::symbol_names;
use crate::unit::Ancestor;
use crate::unnamed_types;
use object::elf;
use stillpoint_patch_format::{ResolvedBy, Svma, SymbolValue, TargetKind};

/// Name by which the compiler refers to the module's thread-locals as a whole.
const MODULE_BASE: &str = "_TLS_MODULE_BASE_";

/// Index of a symbol of the patch, and its addend.
type ResolvedSymbol = Result<(u32, i64), Refusal>;

/// Result for a relocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// A symbol of the patch, by index, and its addend.
    Symbol(u32, i64),
    /// A symbol of the patch for the slot itself, not for the value in a slot.
    Slot(u32, i64),
    /// A value that is final now.
    Value(i64),
}

/// Kind of a reference: it selects among a name's address, stub and slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReferenceKind {
    Branch,
    Slot,
    ThreadLocal,
    /// Reference through a `tls_index` for `__tls_get_addr`, either of the variable or of the module.
    Index,
    /// Reference through a TLS descriptor, either of the variable or of the module.
    Descriptor,
    Address,
}

fn reference_kind(reloc: &Reloc) -> ReferenceKind {
    match elf::RelocationType(reloc.kind) {
        elf::R_X86_64_GOTPCREL | elf::R_X86_64_GOTPCRELX | elf::R_X86_64_REX_GOTPCRELX => ReferenceKind::Slot,
        elf::R_X86_64_TPOFF32 | elf::R_X86_64_GOTTPOFF => ReferenceKind::ThreadLocal,
        elf::R_X86_64_TLSGD | elf::R_X86_64_TLSLD => ReferenceKind::Index,
        _ if reloc.is_descriptor() => ReferenceKind::Descriptor,
        _ if reloc.is_branch() => ReferenceKind::Branch,
        _ => ReferenceKind::Address,
    }
}

/// Selects the value. In an executable that is not position-independent, the address of an imported function is its
/// stub's.
fn value(name: Name, reference: ReferenceKind, kind: TargetKind) -> Option<SymbolValue> {
    let stub = || if kind == TargetKind::Executable { name.stub } else { None };
    let at = |at: Option<u64>| at.map(|at| SymbolValue::Target(Svma(at)));
    let slot = || name.slot.map(|at| SymbolValue::TargetSlot(Svma(at)));
    let tls_slot = || name.tls_slot.map(|at| SymbolValue::TargetTlsSlot(Svma(at)));
    let offset = || name.tls.map(SymbolValue::TargetTls).or(tls_slot());
    match reference {
        ReferenceKind::Branch => at(name.direct).or(at(name.stub)).or(slot()),
        ReferenceKind::Address => at(name.direct).or(at(stub())).or(slot()),
        // Another module may define a name that a library exports (above all inline variables): its slot has the chosen
        // one.
        ReferenceKind::Slot if kind == TargetKind::SharedLibrary => slot().or(at(name.direct)).or(at(stub())),
        ReferenceKind::Slot => at(name.direct).or(slot()).or(at(stub())),
        ReferenceKind::Index => at(name.tls_index),
        ReferenceKind::ThreadLocal => offset(),
        ReferenceKind::Descriptor => at(name.tls_descriptor).or(offset()),
    }
}

impl Assembly<'_, '_> {
    /// Resolves `reloc` of a section in the patch.
    pub(crate) fn resolve(
        &mut self,
        unit: usize,
        from: usize,
        reloc: &Reloc,
        user: &str,
    ) -> Result<Resolution, Refusal> {
        if let Some(value) = self.final_value(unit, reloc, user)? {
            return Ok(Resolution::Value(value));
        }
        if reference_kind(reloc) == ReferenceKind::Slot && self.is_absent(unit, reloc) {
            return Ok(Resolution::Slot(self.literal(&[0; 8], 8), reloc.addend));
        }
        if reloc.is_branch() && self.is_absent(unit, reloc) {
            return Ok(Resolution::Symbol(self.trap(), reloc.addend));
        }
        if reference_kind(reloc) == ReferenceKind::Slot
            && let Some((name, slot)) = self.weak_slot(unit, reloc)
        {
            // The slot may be empty, which is valid: new code reads the target's own.
            let symbol = self.symbol(name, SymbolValue::Target(Svma(slot)), ResolvedBy::ReverseRelocation);
            return Ok(Resolution::Slot(symbol, reloc.addend));
        }
        self.symbol_of(unit, from, reloc, user).map(|(symbol, addend)| Resolution::Symbol(symbol, addend))
    }

    /// Returns a value that needs no symbol: an offset within the thread-local segment, or a weak name that nothing
    /// defines.
    fn final_value(&self, unit: usize, reloc: &Reloc, user: &str) -> Result<Option<i64>, Refusal> {
        let Some(after) = self.after(unit) else { return Ok(None) };
        let symbol = &after.symbols[reloc.symbol];
        match elf::RelocationType(reloc.kind) {
            elf::R_X86_64_DTPOFF32 => {
                let offset = self.thread_local(unit, reloc)?;
                let why = "no code of the target shows the offset of this thread-local variable";
                let offset = offset.ok_or_else(|| self.unresolved(unit, symbol.name, user, why))?;
                Ok(Some((offset as i64).wrapping_add(reloc.addend)))
            }
            elf::R_X86_64_32 | elf::R_X86_64_32S | elf::R_X86_64_64 if self.is_absent(unit, reloc) => {
                Ok(Some(reloc.addend))
            }
            _ => Ok(None),
        }
    }

    /// Returns the target's slot for a weak symbol that another object may define.
    fn weak_slot(&self, unit: usize, reloc: &Reloc) -> Option<(&'static str, u64)> {
        let symbol = &self.after(unit)?.symbols[reloc.symbol];
        let weak = symbol.weak && symbol.home == Home::Undefined;
        let known = self.units[unit].shipped.as_ref()?.name(symbol.name).filter(|_| weak)?;
        Some(("slot of a weak symbol", known.slot.filter(|_| known.direct.is_none())?))
    }

    /// Returns true if the relocation names a weak symbol that nothing defined when the target was linked.
    fn is_absent(&self, unit: usize, reloc: &Reloc) -> bool {
        let Some(after) = self.after(unit) else { return false };
        let symbol = &after.symbols[reloc.symbol];
        if !symbol.weak || symbol.home != Home::Undefined {
            return false;
        }
        let shipped = self.units[unit].shipped.as_ref();
        shipped.is_some_and(|s| s.is_absent(symbol.name)) || self.is_defined_nowhere(unit, symbol.name)
    }

    /// Returns true if a name that was undefined when the target was linked is defined nowhere else either. Only a
    /// complete symbol table can show this.
    fn is_defined_nowhere(&self, unit: usize, name: &str) -> bool {
        let listed = self.target.symbols.values().flatten().any(|s| s.how == ResolvedBy::Symtab);
        let imported = self.options.imports.as_ref().is_none_or(|all| all.contains_key(name));
        let known = self.options.known.iter().any(|known| known == name);
        let patched = || self.units.iter().filter_map(|u| u.after.as_ref()).any(|o| o.defined(name).is_some());
        let ways = [ReferenceKind::Branch, ReferenceKind::Slot, ReferenceKind::ThreadLocal];
        listed
            && !imported
            && !known
            && !patched()
            && ways.iter().all(|reference| self.in_target(unit, name, *reference).is_none())
    }

    /// Returns the offset in the thread-local segment of the variable that `reloc` names.
    fn thread_local(&self, unit: usize, reloc: &Reloc) -> Result<Option<u64>, Refusal> {
        let Some(after) = self.after(unit) else { return Ok(None) };
        let symbol = &after.symbols[reloc.symbol];
        let Home::Section(section) = symbol.home else {
            let found = self.in_target(unit, symbol.name, ReferenceKind::ThreadLocal);
            return Ok(
                found.and_then(|(value, _)| if let SymbolValue::TargetTls(at) = value { Some(at) } else { None })
            );
        };
        let at = (symbol.value as i64).wrapping_add(if symbol.kind == SymbolType::Section { reloc.addend } else { 0 });
        let Some(owner) = after.owner(section, at) else { return Ok(None) };
        let (path, variable) = (self.units[unit].path, &after.symbols[owner]);
        match self.units[unit].ancestor(owner) {
            Ancestor::Shipped(old) => {
                let known = self.units[unit].shipped.as_ref().and_then(|s| s.name(old)).unwrap_or_default();
                let within = symbol.value.wrapping_sub(variable.value);
                Ok(known.tls.map(|at| at.wrapping_add(within)))
            }
            _ => Err(Refusal::NewThreadLocal {
                unit: path.to_owned(),
                object: symbol_names::stem(variable.name).to_owned(),
            }),
        }
    }

    /// Returns the destination of `reloc` of a section in the patch.
    fn symbol_of(&mut self, unit: usize, from: usize, reloc: &Reloc, user: &str) -> ResolvedSymbol {
        let Some(after) = self.after(unit) else { return Err(self.unresolved(unit, "?", user, "no object")) };
        if elf::RelocationType(reloc.kind) == elf::R_X86_64_TLSLD {
            let found = self.units.iter().filter_map(|u| u.shipped.as_ref()).find_map(|s| s.module_index());
            let at = found.or(self.target.module_index()).ok_or_else(|| self.unresolvable_kind(unit, from, reloc))?;
            let value = SymbolValue::Target(Svma(at));
            return Ok((self.symbol("tls_index of the module", value, ResolvedBy::ReverseRelocation), reloc.addend));
        }
        if reference_kind(reloc) == ReferenceKind::Descriptor && after.symbols[reloc.symbol].name == MODULE_BASE {
            let value = match self.target.tls_descriptor_at(0) {
                Some(at) => SymbolValue::Target(Svma(at)),
                None => SymbolValue::TargetTls(0),
            };
            return Ok((self.symbol("thread-locals of the module", value, ResolvedBy::Dynsym), reloc.addend));
        }
        match after.site(reloc) {
            Site::Extern(name, _) => Ok((self.external(unit, name, reloc, user)?, reloc.addend)),
            Site::Value(_) => Err(self.unresolved(unit, after.symbols[reloc.symbol].name, user, "it is absolute")),
            Site::Inside { section, offset, anchor } => self.inside(unit, from, reloc, (section, offset, anchor), user),
        }
    }

    pub(crate) fn unresolvable_kind(&self, unit: usize, section: usize, reloc: &Reloc) -> Refusal {
        Refusal::Relocation {
            unit: self.units[unit].path.to_owned(),
            kind: crate::object_file::relocation_name(reloc.kind),
            section: self.after(unit).map_or("", |after| after.sections[section].name).to_owned(),
            offset: reloc.offset,
        }
    }

    fn unresolved(&self, unit: usize, name: &str, user: &str, why: &str) -> Refusal {
        Refusal::UnresolvedSymbol {
            unit: self.units[unit].path.to_owned(),
            name: name.to_owned(),
            user: user.to_owned(),
            why: why.to_owned(),
        }
    }

    fn inside(&mut self, unit: usize, from: usize, reloc: &Reloc, to: (usize, i64, i64), user: &str) -> ResolvedSymbol {
        let (section, offset, anchor) = to;
        let Some(after) = self.after(unit) else { return Err(self.unresolved(unit, "?", user, "no object")) };
        let entry = &after.sections[section];
        // `S + A` of the object, counted from the start of the section.
        let raw = (after.symbols[reloc.symbol].value as i64).wrapping_add(reloc.addend);
        match entry.nature {
            Nature::Text => self.code(unit, from, reloc, (section, offset, raw)),
            Nature::Merged { .. } => {
                let Some(bytes) = after.literal(section, anchor) else {
                    return Err(self.unresolved(unit, entry.name, user, "it points outside of all literals"));
                };
                if let Some(at) = self.units[unit].shipped.as_ref().and_then(|shipped| shipped.other_string(bytes)) {
                    return Ok((self.string_of_target(unit, bytes, at), raw - anchor));
                }
                Ok((self.literal(bytes, entry.align), raw - anchor))
            }
            Nature::Tls => self.variable(unit, reloc, (section, anchor, raw), user),
            Nature::Exceptions | Nature::Unwind => {
                let index = self.add_section(unit, section);
                Ok((self.patch_symbol(entry.name, index, 0), raw))
            }
            Nature::StartUp | Nature::Aside => {
                Err(self.unresolved(unit, entry.name, user, "it is neither code nor data"))
            }
            Nature::Constant | Nature::Data | Nature::Zero | Nature::Custom { .. } => {
                self.variable(unit, reloc, (section, if offset == anchor { offset } else { anchor }, raw), user)
            }
        }
    }

    /// Returns the symbol of a string of the target that differs from the one of the unit.
    fn string_of_target(&mut self, unit: usize, literal: &[u8], at: u64) -> u32 {
        let text =
            |bytes: &[u8]| String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned();
        let there = self.target.bytes(at, literal.len() as u64).map(text).unwrap_or_default();
        let warning = format!(
            "{} has {:?} where the target has {there:?}; new code uses the target's",
            self.units[unit].path,
            text(literal)
        );
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
        self.symbol("string of the target", SymbolValue::Target(Svma(at)), ResolvedBy::ReverseRelocation)
    }

    /// Resolves a reference to code of the same unit.
    fn code(
        &mut self,
        unit: usize,
        from: usize,
        reloc: &Reloc,
        (section, offset, raw): (usize, i64, i64),
    ) -> ResolvedSymbol {
        let Some(after) = self.after(unit) else { return Err(self.unresolved(unit, "?", "", "no object")) };
        let entry = |s: &&usize| after.symbols[**s].is_function() && after.symbols[**s].value as i64 == offset;
        let function = after.sections[section].symbols.iter().find(entry).copied();
        let own = after.sections[from].nature == Nature::Text && self.same_function(unit, from, section);
        let internal = own && from != section;
        match function {
            Some(function)
                if !internal && !symbol_names::is_cold(after.symbols[function].name) && !self.is_table(unit, from) =>
            {
                let function = self.canonical(unit, function);
                let base = after.symbols[function].value as i64;
                Ok((self.function(unit, function, reloc)?, raw - base))
            }
            _ => {
                // For a part of a function or a byte inside of one, the reference must mean the new code.
                let index = self.add_section(unit, section);
                let name = after.sections[section].symbols.first().map(|s| after.symbols[*s].name);
                Ok((self.patch_symbol(name.unwrap_or(after.sections[section].name), index, 0), raw))
            }
        }
    }

    fn same_function(&self, unit: usize, one: usize, other: usize) -> bool {
        let Some(after) = self.after(unit) else { return false };
        let parent = |section: usize| {
            let first = *after.sections[section].symbols.first()?;
            Some(symbol_names::cold_parent(after.symbols[first].name).unwrap_or(after.symbols[first].name))
        };
        one == other || (parent(one).is_some() && parent(one) == parent(other))
    }

    /// Returns true if a section holds only data without a name that one function's code refers to (jump tables).
    fn is_table(&self, unit: usize, section: usize) -> bool {
        self.after(unit).is_some_and(|after| {
            let entry = &after.sections[section];
            entry.nature == Nature::Constant && entry.symbols.is_empty()
        })
    }

    /// Returns the symbol of a function of the unit for a call or an address in new code.
    fn function(&mut self, unit: usize, function: usize, reloc: &Reloc) -> Result<u32, Refusal> {
        let (Some(after), path) = (self.after(unit), self.units[unit].path) else {
            return Err(self.unresolved(unit, "?", "", "no object"));
        };
        let (unit, function) = self.one_copy(unit, function);
        let after = self.after(unit).unwrap_or(after);
        let public = self.units[unit].public_name(after, function);
        let name = after.symbols[function].name;
        if self.goes_to_target(unit, function)
            && let Some(shipped) = &self.units[unit].shipped
            && let Ancestor::Shipped(old) = self.units[unit].ancestor(function)
        {
            let known = shipped.name(old).unwrap_or_default();
            if let Some(value) = value(
                known,
                if reloc.is_branch() { ReferenceKind::Branch } else { ReferenceKind::Address },
                self.target.identity().kind,
            ) {
                let how =
                    if shipped.code(old).is_some() { ResolvedBy::Placement } else { ResolvedBy::ReverseRelocation };
                let how = self.listed(name, &value).unwrap_or(how);
                return Ok(self.symbol(name, value, how));
            }
            // An inline function may have one copy for each object.
            if !after.is_comdat(function) {
                return Err(Refusal::UnplacedFunction {
                    unit: path.to_owned(),
                    function: old.to_owned(),
                    why: shipped.unplaced_reason(old),
                });
            }
        }
        if let Some((value, how)) = self.another_copy(unit, function, ReferenceKind::Branch) {
            return Ok(self.symbol(name, value, how));
        }
        let changed = self.plan.rebound.contains(&(unit, function));
        if !changed && self.options.known.contains(&public) {
            return Ok(self.symbol(&public, SymbolValue::OtherPatch, ResolvedBy::Runtime));
        }
        let symbol = self.add_function(unit, function);
        self.note_address(&public, reloc.is_branch());
        symbol.ok_or_else(|| self.unresolved(unit, name, "", "it has no code"))
    }

    /// Returns the copy that represents a definition of several units which the linker would merge: that of the first
    /// unit.
    pub(crate) fn one_copy(&self, unit: usize, symbol: usize) -> (usize, usize) {
        let Some(after) = self.after(unit) else { return (unit, symbol) };
        if after.symbols[symbol].local || !after.is_comdat(symbol) {
            return (unit, symbol);
        }
        let name = after.symbols[symbol].name;
        let copy = |other: usize| {
            let object = self.after(other)?;
            let (found, entry) = object.defined(name)?;
            (!entry.local && object.is_comdat(found)).then_some((other, found))
        };
        (0..unit).find_map(copy).unwrap_or((unit, symbol))
    }

    /// Finds the target's copy, from another unit, of a definition that is new in this unit and would be merged with
    /// it. Names with the number of a lambda are left out: the number may belong to another lambda there.
    fn another_copy(&self, unit: usize, symbol: usize, reference: ReferenceKind) -> Option<(SymbolValue, ResolvedBy)> {
        let after = self.after(unit)?;
        let (name, new) = (after.symbols[symbol].name, self.units[unit].ancestor(symbol) == Ancestor::None);
        let merged = new && !after.symbols[symbol].local && after.is_comdat(symbol);
        if !merged || unnamed_types::Name::parse(name).is_some() {
            return None;
        }
        self.in_target(unit, name, reference)
    }

    /// Returns the kind of entry by which the target's own tables list a value, if they do.
    fn listed(&self, name: &str, value: &SymbolValue) -> Option<ResolvedBy> {
        let SymbolValue::Target(at) = value else { return None };
        self.target.symbols.get(name)?.iter().find(|s| s.at == at.0).map(|s| s.how)
    }

    /// Resolves a variable or constant of the unit. `at` is the byte that identifies it, `raw` the offset in the
    /// relocation.
    fn variable(&mut self, unit: usize, reloc: &Reloc, place: (usize, i64, i64), user: &str) -> ResolvedSymbol {
        let (section, at, raw) = place;
        let Some(after) = self.after(unit) else { return Err(self.unresolved(unit, "?", user, "no object")) };
        let owner = after.owner(section, at).filter(|s| !symbol_names::is_anonymous(after.symbols[*s].name));
        let Some(owner) = owner else { return self.add_data(unit, section, None, reloc, raw) };
        let (symbol, path) = (&after.symbols[owner], self.units[unit].path);
        let (name, addend) = (symbol_names::stem(symbol.name).to_owned(), raw - symbol.value as i64);
        if symbol.name.starts_with("DW.ref.") {
            // For the unwinder, near the code: any pointer to the same object works as well.
            return self.add_data(unit, section, Some(owner), reloc, raw);
        }
        if let Some((value, how)) = self.another_copy(unit, owner, reference_kind(reloc)) {
            return Ok((self.symbol(&name, value, how), addend));
        }
        if let Some(function) = after.label_holder(owner) {
            if self.is_constant(unit, section) {
                return self.add_data(unit, section, Some(owner), reloc, raw);
            }
            let why = format!("it holds addresses inside of `{function}`, and the changed function `{user}` uses it");
            return Err(Refusal::DataChanged { unit: path.to_owned(), object: name, why, writable: false });
        }
        match self.units[unit].ancestor(owner) {
            Ancestor::Ambiguous(candidates) => Err(Refusal::AmbiguousStatic {
                unit: path.to_owned(),
                object: name,
                why: format!("`{}` could be any of {candidates:?}, used by `{user}`", symbol.name),
            }),
            Ancestor::Shipped(old) if !self.constant_changed(unit, owner) => {
                let shipped = self.units[unit].shipped.as_ref();
                let known = shipped.and_then(|s| s.name(old)).unwrap_or_default();
                if let Some(value) = value(known, reference_kind(reloc), self.target.identity().kind) {
                    let how = self.listed(symbol.name, &value).unwrap_or(ResolvedBy::ReverseRelocation);
                    return Ok((self.symbol(&name, value, how), addend));
                }
                if self.is_constant(unit, section) {
                    return self.add_data(unit, section, Some(owner), reloc, raw);
                }
                Err(self.unresolved(unit, symbol.name, user, "no code of the shipped unit that was found refers to it"))
            }
            Ancestor::Before | Ancestor::Shipped(_) | Ancestor::None => {
                let public = self.units[unit].public_name(after, owner);
                let new = self.units[unit].ancestor(owner) == Ancestor::None;
                let constant = self.is_constant(unit, section);
                if !new && !constant && self.options.known.contains(&public) {
                    return Ok((self.symbol(&public, SymbolValue::OtherPatch, ResolvedBy::Runtime), addend));
                }
                if symbol.kind == SymbolType::Tls || after.sections[section].nature == Nature::Tls {
                    return Err(Refusal::NewThreadLocal { unit: path.to_owned(), object: name });
                }
                if !new && !constant {
                    let why = "an earlier patch of the series added it but does not export it";
                    return Err(self.unresolved(unit, symbol.name, user, why));
                }
                self.add_data(unit, section, Some(owner), reloc, raw)
            }
        }
    }

    fn is_constant(&self, unit: usize, section: usize) -> bool {
        let nature = self.after(unit).map(|after| after.sections[section].nature);
        matches!(nature, Some(Nature::Constant | Nature::Merged { .. }))
    }

    /// Returns true if the target has another constant than the after side: this patch or an earlier one changed it.
    fn constant_changed(&self, unit: usize, symbol: usize) -> bool {
        let unit = &self.units[unit];
        match (unit.shipped_pair(), unit.oldest(symbol)) {
            (Some(pair), Some(old)) => pair.is_private_constant(symbol) && !pair.constant_equal(old, symbol),
            _ => false,
        }
    }

    fn add_data(
        &mut self,
        unit: usize,
        section: usize,
        owner: Option<usize>,
        reloc: &Reloc,
        raw: i64,
    ) -> ResolvedSymbol {
        let (mut unit, mut section, mut owner, mut raw) = (unit, section, owner, raw);
        if let (Some(symbol), Some(after)) = (owner, self.after(unit)) {
            let (first, copy) = self.one_copy(unit, symbol);
            if let Some((object, Home::Section(home))) = self.after(first).map(|o| (o, o.symbols[copy].home)) {
                raw += object.symbols[copy].value as i64 - after.symbols[symbol].value as i64;
                (unit, section, owner) = (first, home, Some(copy));
            }
        }
        let Some(after) = self.after(unit) else { return Err(self.unresolved(unit, "?", "", "no object")) };
        let entry = &after.sections[section];
        let writable = matches!(entry.nature, Nature::Data | Nature::Zero | Nature::Custom { write: true });
        if owner.is_none() && writable && !entry.symbols.is_empty() {
            return Err(self.unresolved(unit, entry.name, "", "it is a variable without a name"));
        }
        let index = self.add_section(unit, section);
        let Some(owner) = owner else {
            return Ok((self.patch_symbol(after.sections[section].name, index, 0), raw));
        };
        let (symbol, public) = (&after.symbols[owner], self.units[unit].public_name(after, owner));
        let found = self.patch_symbol(&public, index, symbol.value);
        if symbol.name.starts_with("DW.ref.") {
            return Ok((found, raw - symbol.value as i64));
        }
        self.exports.insert(found);
        if !self.is_constant(unit, section) {
            self.note_address(&public, reloc.is_branch());
        }
        Ok((found, raw - symbol.value as i64))
    }

    /// Resolves a name that another object defines.
    fn external(&mut self, unit: usize, name: &str, reloc: &Reloc, user: &str) -> Result<u32, Refusal> {
        let reference = reference_kind(reloc);
        if name == "_GLOBAL_OFFSET_TABLE_" {
            return Err(self.unresolved(unit, name, user, "code that computes the table's address is not supported"));
        }
        if let Some((value, how)) = self.in_target(unit, name, reference) {
            if matches!(value, SymbolValue::TargetSlot(_)) {
                self.check_reach(unit, name, reloc, user)?;
            }
            return Ok(self.symbol(name, value, how));
        }
        if let Some(found) = self.in_patch(name, reloc) {
            return found;
        }
        if self.options.known.iter().any(|known| known == name) {
            return Ok(self.symbol(name, SymbolValue::OtherPatch, ResolvedBy::Runtime));
        }
        if name == "__dso_handle" {
            // Identifies the destructors to run when a library is unloaded; a patch is never unloaded.
            return Ok(self.literal(&[0; 8], 8));
        }
        let imported = || self.options.imports.as_ref().is_some_and(|all| all.contains_key(name));
        let by_slot =
            elf::RelocationType(reloc.kind) == elf::R_X86_64_GOTTPOFF || reference == ReferenceKind::Descriptor;
        if reference == ReferenceKind::Index
            || reference == ReferenceKind::ThreadLocal && !by_slot
            || by_slot && !imported()
        {
            return Err(self.unresolved(
                unit,
                name,
                user,
                "no unit of the patch shows the offset of this thread-local variable",
            ));
        }
        self.check_reach(unit, name, reloc, user)?;
        match &self.options.imports {
            Some(imports) => {
                if let Some(version) = imports.get(name) {
                    let value = SymbolValue::Import { version: version.clone() };
                    return Ok(self.symbol(name, value, ResolvedBy::Runtime));
                }
            }
            None => {
                let warning = format!(
                    "`{name}` is resolved to any library that exports it, because the target's libraries were not stated"
                );
                if !self.warnings.contains(&warning) {
                    self.warnings.push(warning);
                }
                return Ok(self.symbol(name, SymbolValue::Import { version: None }, ResolvedBy::Runtime));
            }
        }
        let why = "no unit of the patch refers to it or defines it, no symbol table of the target lists it, and no library \
                   that the target needs exports it";
        Err(self.unresolved(unit, name, user, why))
    }

    /// Checks code that accesses a library's data without the GOT. It relies on a copy in the executable; the linker
    /// makes one only for names that the executable used when it was linked.
    fn check_reach(&self, unit: usize, name: &str, reloc: &Reloc, user: &str) -> Result<(), Refusal> {
        let wide = reloc.width() == 8;
        // The engine redirects short references to a library's function through a stub.
        let is_code = name.ends_with("_personality_v0");
        if reference_kind(reloc) != ReferenceKind::Address || wide || is_code {
            return Ok(());
        }
        let why = "it is in a library, the target has no copy of it, and the code accesses it directly, not through the \
                   GOT";
        Err(self.unresolved(unit, name, user, why))
    }

    /// Returns the value in the target, from this unit, another unit, or the target's tables.
    fn in_target(&self, unit: usize, name: &str, reference: ReferenceKind) -> Option<(SymbolValue, ResolvedBy)> {
        if self.options.known.iter().any(|known| known == name) {
            return None;
        }
        let this = std::iter::once(&self.units[unit]);
        let others = self.units.iter().enumerate().filter(|(index, _)| *index != unit).map(|(_, u)| u);
        for shipped in this.chain(others).filter_map(|u| u.shipped.as_ref()) {
            let global = shipped.object.symbols.iter().any(|s| s.name == name && !s.local);
            let found = shipped
                .name(name)
                .filter(|_| global)
                .and_then(|known| value(known, reference, self.target.identity().kind));
            if let Some(value) = found {
                let how = self.listed(name, &value);
                let defined = shipped.object.defined(name).is_some_and(|(_, s)| s.is_function());
                let found = if defined { ResolvedBy::Placement } else { ResolvedBy::ReverseRelocation };
                return Some((value, how.unwrap_or(found)));
            }
        }
        let listed = self.target.symbols.get(name).into_iter().flatten().find(|s| s.global);
        let known = Name {
            direct: listed.filter(|s| !s.tls).map(|s| s.at).or(self.target.copies.get(name).copied()),
            stub: self.target.stub_of(name),
            slot: self.target.slot_of(name),
            tls: listed.filter(|s| s.tls).map(|s| s.at),
            tls_slot: self.target.tls_slot_of(name),
            tls_index: None,
            tls_descriptor: self.target.tls_descriptor_of(name),
        };
        let how = listed.map_or(ResolvedBy::Dynsym, |s| s.how);
        value(known, reference, self.target.identity().kind).map(|value| (value, how))
    }

    /// Returns a symbol that is new in another unit of this patch.
    fn in_patch(&mut self, name: &str, reloc: &Reloc) -> Option<Result<u32, Refusal>> {
        for unit in 0..self.units.len() {
            let Some(after) = self.after(unit) else { continue };
            let Some((index, symbol)) = after.defined(name).filter(|(_, s)| !s.local) else { continue };
            let Home::Section(section) = symbol.home else { continue };
            if symbol.is_function() && after.sections[section].nature == Nature::Text {
                let index = self.canonical(unit, index);
                return Some(self.function(unit, index, reloc));
            }
            let place = (section, symbol.value as i64, symbol.value as i64);
            return Some(self.variable(unit, reloc, place, name).map(|(symbol, _)| symbol));
        }
        None
    }
}
