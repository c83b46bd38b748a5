//! Assembly of the patch: new code, all that it needs, and the destination of every relocation.

use crate::closure::{Function, Plan};
use crate::object_file::{Home, Nature, Object, Reloc, SymbolType};
use crate::resolve::Resolution;
use crate::symbol_names;
use crate::target::TargetElf;
use crate::unit::{Ancestor, Unit};
use crate::{Options, Refusal, data_changes, unwind_data};
use object::elf;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use stillpoint_patch_format as format;
use stillpoint_patch_format::{RelocationKind, ResolvedBy, SectionKind, Symbol, SymbolValue, readable};

/// Alignment of the pool of literals, in bytes; larger than any alignment that a compiler requests.
const POOL_ALIGN: u32 = 64;

/// A patch under construction.
#[derive(Debug)]
pub(crate) struct Assembly<'p, 'a> {
    pub(crate) target: &'p TargetElf,
    pub(crate) units: &'p [Unit<'a>],
    pub(crate) options: &'p Options,
    pub(crate) plan: &'p Plan,
    pub(crate) sections: Vec<format::Section>,
    pub(crate) symbols: Vec<Symbol>,
    pub(crate) exports: BTreeSet<u32>,
    pub(crate) escaping: BTreeSet<String>,
    pub(crate) warnings: Vec<String>,
    pub(crate) refusals: Vec<Refusal>,
    /// Sections of the after side that the patch contains, by unit and section.
    brought: BTreeMap<(usize, usize), u32>,
    queue: VecDeque<(usize, usize)>,
    pool: HashMap<Vec<u8>, u64>,
    pool_section: Option<u32>,
    trap_section: Option<u32>,
    index: HashMap<(String, String), u32>,
}

impl<'p, 'a> Assembly<'p, 'a> {
    pub(crate) fn new(target: &'p TargetElf, units: &'p [Unit<'a>], options: &'p Options, plan: &'p Plan) -> Self {
        Assembly {
            target,
            units,
            options,
            plan,
            sections: Vec::new(),
            symbols: Vec::new(),
            exports: BTreeSet::new(),
            escaping: BTreeSet::new(),
            warnings: plan.warnings.clone(),
            refusals: Vec::new(),
            brought: BTreeMap::new(),
            queue: VecDeque::new(),
            pool: HashMap::new(),
            pool_section: None,
            trap_section: None,
            index: HashMap::new(),
        }
    }

    /// Adds every function of the plan, all that it needs, and the unwind data of the new code.
    pub(crate) fn run(&mut self) {
        let functions: Vec<Function> = self.plan.entries.keys().chain(&self.plan.rebound).copied().collect();
        for (unit, function) in functions {
            let redirected = self.plan.entries.contains_key(&(unit, function));
            if redirected || self.one_copy(unit, function) == (unit, function) {
                self.add_function(unit, function);
            }
        }
        for (unit, function) in self.new_exports() {
            self.add_function(unit, function);
        }
        for &(unit, constant) in self.plan.constants.keys().chain(self.plan.data.keys()) {
            self.add_constant(unit, constant);
        }
        self.drain();
        unwind_data::add(self);
        self.drain();
        self.warn_of_state();
    }

    /// Returns new global functions of a target that exports its globals: plug-ins, which are patched separately, may
    /// use them.
    fn new_exports(&self) -> Vec<Function> {
        let exported =
            |name: &str| self.target.symbols.get(name).into_iter().flatten().any(|s| s.how == ResolvedBy::Dynsym);
        let mut found = Vec::new();
        for (index, unit) in self.units.iter().enumerate() {
            let Some(after) = unit.after.as_ref() else { continue };
            let global = |f: &usize| !after.symbols[*f].local && !after.is_comdat(*f);
            let (new, old): (Vec<usize>, Vec<usize>) =
                unit.functions().into_iter().filter(global).partition(|f| unit.ancestor(*f) == Ancestor::None);
            if old.iter().any(|f| exported(after.symbols[*f].name)) {
                let missing = |f: &usize| !exported(after.symbols[*f].name);
                found.extend(new.into_iter().filter(missing).map(|f| (index, self.canonical(index, f))));
            }
        }
        found
    }

    fn drain(&mut self) {
        while let Some((unit, section)) = self.queue.pop_front() {
            self.relocate(unit, section);
        }
    }

    pub(crate) fn after(&self, unit: usize) -> Option<&'p Object<'a>> {
        self.units[unit].after.as_ref()
    }

    /// Adds a function with its cold parts; returns its symbol.
    pub(crate) fn add_function(&mut self, unit: usize, function: usize) -> Option<u32> {
        let after = self.after(unit)?;
        for section in after.parts(function)? {
            self.add_section(unit, section);
        }
        let Home::Section(home) = after.symbols[function].home else { return None };
        let section = self.add_section(unit, home);
        let name = self.units[unit].public_name(after, function);
        let symbol = self.patch_symbol(&name, section, after.symbols[function].value);
        let in_target = self.plan.entries.contains_key(&(unit, function));
        if !in_target {
            self.exports.insert(symbol);
        }
        Some(symbol)
    }

    /// Adds the new content of a constant; returns the symbol of that content.
    pub(crate) fn add_constant(&mut self, unit: usize, constant: usize) -> Option<u32> {
        let after = self.after(unit)?;
        let Home::Section(home) = after.symbols[constant].home else { return None };
        let section = self.add_section(unit, home);
        let name = self.units[unit].public_name(after, constant);
        Some(self.patch_symbol(&name, section, after.symbols[constant].value))
    }

    /// Adds a section of the after side; returns its index in the patch. Relocations are filled in later.
    pub(crate) fn add_section(&mut self, unit: usize, section: usize) -> u32 {
        if let Some(index) = self.brought.get(&(unit, section)) {
            return *index;
        }
        let index = self.sections.len() as u32;
        if let Some(after) = self.after(unit) {
            let entry = &after.sections[section];
            let kind = match entry.nature {
                Nature::Text => SectionKind::Text,
                _ if data_changes::is_contents(self.plan, after, (unit, section)) => SectionKind::RoData,
                // Every variable has a name; a section without one is a constant of the compiler with pointers in it.
                Nature::Data if entry.symbols.is_empty() => SectionKind::RoData,
                Nature::Data | Nature::Custom { write: true } => SectionKind::Data,
                Nature::Zero => SectionKind::Bss,
                Nature::Exceptions => SectionKind::ExceptTable,
                _ => SectionKind::RoData,
            };
            let mut bytes = if kind == SectionKind::Bss { Vec::new() } else { entry.bytes.to_vec() };
            if kind == SectionKind::RoData && entry.nature == Nature::Zero {
                bytes.resize(entry.size as usize, 0);
            }
            let align = u32::try_from(entry.align).unwrap_or(u32::MAX);
            let name = entry.name.to_owned();
            self.sections.push(format::Section { name, kind, align, size: entry.size, bytes, relocations: Vec::new() });
        }
        self.brought.insert((unit, section), index);
        self.queue.push_back((unit, section));
        index
    }

    /// Returns the text sections that the patch contains, by unit and section.
    pub(crate) fn added_text(&self) -> Vec<((usize, usize), u32)> {
        let text = |(_, index): &(&(usize, usize), &u32)| self.sections[**index as usize].kind == SectionKind::Text;
        self.brought.iter().filter(text).map(|(key, index)| (*key, *index)).collect()
    }

    fn relocate(&mut self, unit: usize, section: usize) {
        let Some(after) = self.after(unit) else { return };
        let index = self.brought[&(unit, section)] as usize;
        for reloc in &after.sections[section].relocations {
            if let Some(entry) = self.relocation(unit, section, reloc) {
                self.sections[index].relocations.push(entry);
            }
        }
    }

    /// Converts one relocation of the after side to the form of the patch file.
    pub(crate) fn relocation(&mut self, unit: usize, section: usize, reloc: &Reloc) -> Option<format::Relocation> {
        let after = self.after(unit)?;
        let Some(mut kind) = kind_of(reloc) else {
            self.refusals.push(self.unresolvable_kind(unit, section, reloc));
            return None;
        };
        let user = after.owner(section, reloc.offset as i64);
        let user = user.map_or(after.sections[section].name, |s| after.symbols[s].name);
        let (symbol, addend) = match self.resolve(unit, section, reloc, user) {
            Ok(Resolution::Symbol(symbol, addend)) => (symbol, addend),
            Ok(Resolution::Slot(symbol, addend)) => {
                kind = RelocationKind::Pc32;
                (symbol, addend)
            }
            Ok(Resolution::Value(value)) => {
                self.write_value(unit, section, reloc, value);
                return None;
            }
            Err(refusal) => {
                if !self.refusals.contains(&refusal) {
                    self.refusals.push(refusal);
                }
                return None;
            }
        };
        if reloc.is_descriptor() && !matches!(self.symbols[symbol as usize].value, SymbolValue::Target(_)) {
            self.load_offset(unit, section, reloc);
            kind = RelocationKind::GotTpOff32;
        }
        if elf::RelocationType(reloc.kind) == elf::R_X86_64_TLSDESC_CALL {
            return None;
        }
        let offset = u32::try_from(reloc.offset).ok()?;
        Some(format::Relocation { offset, kind, symbol, addend })
    }

    /// Writes a value that is final.
    fn write_value(&mut self, unit: usize, section: usize, reloc: &Reloc, value: i64) {
        let Some(index) = self.brought.get(&(unit, section)) else { return };
        let (start, width) = (reloc.offset as usize, reloc.width() as usize);
        if let Some(place) = self.sections[*index as usize].bytes.get_mut(start..start + width) {
            place.copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }

    /// Replaces the call of a TLS descriptor by a load of the value that the call would return, as a linker does
    /// (psABI, 4.11).
    fn load_offset(&mut self, unit: usize, section: usize, reloc: &Reloc) {
        const LOAD: u8 = 0x8b;
        const TWO_BYTE_NOP: [u8; 2] = [0x66, 0x90];
        let Some(index) = self.brought.get(&(unit, section)) else { return };
        let (bytes, at) = (&mut self.sections[*index as usize].bytes, reloc.offset as usize);
        if elf::RelocationType(reloc.kind) == elf::R_X86_64_TLSDESC_CALL {
            if let Some(call) = bytes.get_mut(at..at + 2) {
                call.copy_from_slice(&TWO_BYTE_NOP);
            }
        } else if let Some(opcode) = at.checked_sub(2).and_then(|place| bytes.get_mut(place)) {
            *opcode = LOAD;
        }
    }

    /// Returns a symbol for a place in a section of the patch.
    pub(crate) fn patch_symbol(&mut self, name: &str, section: u32, offset: u64) -> u32 {
        self.symbol(name, SymbolValue::Patch { section, offset }, ResolvedBy::Patch)
    }

    pub(crate) fn symbol(&mut self, name: &str, value: SymbolValue, resolved_by: ResolvedBy) -> u32 {
        let key = (name.to_owned(), format!("{value:?}"));
        if let Some(index) = self.index.get(&key) {
            return *index;
        }
        let index = self.symbols.len() as u32;
        self.symbols.push(Symbol { name: name.to_owned(), value, resolved_by });
        self.index.insert(key, index);
        index
    }

    /// Returns a symbol for a literal in the patch's own pool; equal literals are stored once.
    pub(crate) fn literal(&mut self, bytes: &[u8], align: u64) -> u32 {
        let section = match self.pool_section {
            Some(section) => section,
            None => {
                let section = self.own_section(".rodata.literals", SectionKind::RoData, POOL_ALIGN, &[]);
                *self.pool_section.insert(section)
            }
        };
        let align = align.clamp(1, u64::from(POOL_ALIGN));
        let known = self.pool.get(bytes).copied().filter(|at| at % align == 0);
        let offset = known.unwrap_or_else(|| {
            let pool = &mut self.sections[section as usize];
            pool.bytes.resize(pool.bytes.len().next_multiple_of(align as usize), 0);
            let offset = pool.bytes.len() as u64;
            pool.bytes.extend_from_slice(bytes);
            pool.size = pool.bytes.len() as u64;
            offset
        });
        self.pool.insert(bytes.to_vec(), offset);
        self.patch_symbol(".rodata.literals", section, offset)
    }

    /// Returns a symbol for the target of calls to an absent function; the code before such a call prevents that it
    /// executes.
    pub(crate) fn trap(&mut self) -> u32 {
        const UD2: [u8; 2] = [0x0f, 0x0b];
        let section = match self.trap_section {
            Some(section) => section,
            None => {
                let section = self.own_section(".text.absent", SectionKind::Text, 1, &UD2);
                *self.trap_section.insert(section)
            }
        };
        self.patch_symbol("an undefined function", section, 0)
    }

    /// Adds contents that no unit has; returns their symbol.
    pub(crate) fn add_contents(&mut self, name: &str, bytes: Vec<u8>, relocations: Vec<format::Relocation>) -> u32 {
        let section = self.own_section(name, SectionKind::RoData, POOL_ALIGN, &bytes);
        self.sections[section as usize].relocations = relocations;
        self.patch_symbol(name, section, 0)
    }

    /// Adds a section that no unit has.
    fn own_section(&mut self, name: &str, kind: SectionKind, align: u32, bytes: &[u8]) -> u32 {
        let (name, bytes, size) = (name.to_owned(), bytes.to_vec(), bytes.len() as u64);
        self.sections.push(format::Section { name, kind, align, size, bytes, relocations: Vec::new() });
        self.sections.len() as u32 - 1
    }

    /// Warns of new state that threads share: it needs a scope.
    fn warn_of_state(&mut self) {
        let writable = |s: &&Symbol| match s.value {
            SymbolValue::Patch { section, .. } => {
                matches!(self.sections[section as usize].kind, SectionKind::Data | SectionKind::Bss)
            }
            _ => false,
        };
        let guard = |s: &&Symbol| s.name.contains("_ZGV");
        let new = self.symbols.iter().filter(writable).filter(|s| !guard(s));
        let names: Vec<String> = new.map(|s| format!("`{}`", readable(&s.name))).collect();
        if !names.is_empty() && self.options.scope.is_none() {
            self.warnings.push(format!(
                "new code has new variables ({}), and the patch has no scope: while threads migrate, old code does not \
                 update these variables; state a scope",
                names.join(", ")
            ));
        }
    }

    /// Records that the address of a new object may be stored in live data.
    pub(crate) fn note_address(&mut self, name: &str, branch: bool) {
        if !branch {
            self.escaping.insert(name.to_owned());
        }
    }

    /// Returns true if calls from new code to this function of the unit go to its entry in the target.
    pub(crate) fn goes_to_target(&self, unit: usize, function: usize) -> bool {
        let Some(after) = self.after(unit) else { return false };
        !self.plan.rebound.contains(&(unit, function))
            && !self.plan.absent.contains(&(unit, function))
            && !self.options.known.contains(&self.units[unit].public_name(after, function))
            && matches!(self.units[unit].ancestor(function), Ancestor::Shipped(_))
    }

    /// Returns the first symbol at the function's place, which represents all its names.
    pub(crate) fn canonical(&self, unit: usize, function: usize) -> usize {
        let Some(after) = self.after(unit) else { return function };
        let symbol = &after.symbols[function];
        let Home::Section(section) = symbol.home else { return function };
        let same = |s: &&usize| {
            let other = &after.symbols[**s];
            other.value == symbol.value && other.kind != SymbolType::Section && !symbol_names::is_cold(other.name)
        };
        after.sections[section].symbols.iter().find(same).copied().unwrap_or(function)
    }
}

/// Returns the rule that computes the value; `None` if the patch file cannot express it.
fn kind_of(reloc: &Reloc) -> Option<RelocationKind> {
    Some(match elf::RelocationType(reloc.kind) {
        elf::R_X86_64_64 => RelocationKind::Abs64,
        elf::R_X86_64_32 => RelocationKind::Abs32,
        elf::R_X86_64_32S => RelocationKind::Abs32Signed,
        elf::R_X86_64_PC64 => RelocationKind::Pc64,
        elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 if reloc.is_branch() => RelocationKind::Branch32,
        elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => RelocationKind::Pc32,
        elf::R_X86_64_GOTPCREL | elf::R_X86_64_GOTPCRELX | elf::R_X86_64_REX_GOTPCRELX => RelocationKind::GotPc32,
        elf::R_X86_64_TPOFF32 => RelocationKind::TpOff32,
        elf::R_X86_64_GOTTPOFF => RelocationKind::GotTpOff32,
        // Relative to the target's own descriptor, if it has one.
        _ if reloc.is_descriptor() => RelocationKind::Pc32,
        // Relative to the target's own `tls_index`; an offset in the segment becomes final.
        elf::R_X86_64_TLSGD | elf::R_X86_64_TLSLD | elf::R_X86_64_DTPOFF32 => RelocationKind::Pc32,
        _ => return None,
    })
}
