//! Reverse relocation: reads every value that the linker filled in back from the target.

use crate::compare::equal_outside;
use crate::object_file::{Home, Nature, Object, Reloc, Site, SymbolType};
use crate::placement::Piece;
use crate::symbol_names;
use crate::target::{Dynamic, TargetElf};
use object::elf;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use stillpoint_patch_format::TargetKind;

/// Known values of one name. A function may have an address, a PLT stub and a GOT slot at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Name {
    /// Address of the symbol.
    pub(crate) direct: Option<u64>,
    /// A stub that jumps to it.
    pub(crate) stub: Option<u64>,
    /// A slot that holds its address.
    pub(crate) slot: Option<u64>,
    /// Offset from the start of the thread-local segment, in bytes.
    pub(crate) tls: Option<u64>,
    /// A slot that holds its offset from the thread pointer.
    pub(crate) tls_slot: Option<u64>,
    /// Address of its `tls_index`, the argument of `__tls_get_addr`.
    pub(crate) tls_index: Option<u64>,
    /// Address of its TLS descriptor, which new code calls as shipped code does.
    pub(crate) tls_descriptor: Option<u64>,
}

/// A value that contradicts one read before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub(crate) name: String,
    pub(crate) one: String,
    pub(crate) other: String,
}

/// All values read so far.
#[derive(Debug, Default)]
pub(crate) struct KnownValues<'a> {
    pub(crate) names: HashMap<&'a str, Name>,
    /// Address of each section; for thread-local sections the offset in the segment.
    pub(crate) bases: BTreeMap<usize, u64>,
    pub(crate) conflicts: Vec<Conflict>,
    /// Weak names that nothing defines.
    pub(crate) absent: BTreeSet<&'a str>,
    /// Strings in place of which the target has others, and the addresses of these: build paths, dates, versions of the
    /// compiler.
    pub(crate) other_strings: BTreeMap<&'a [u8], u64>,
    /// The module's own `tls_index`.
    pub(crate) module_index: Option<u64>,
    /// Data sections that were compared with the target, and those that match.
    read: BTreeSet<usize>,
    matched: BTreeSet<usize>,
    /// Data sections located by a name, which may be another object's copy.
    named: BTreeMap<usize, u64>,
}

impl KnownValues<'_> {
    /// Returns the address of a text section, if a relocation or a named function shows it.
    pub(crate) fn text_base(&self, object: &Object<'_>, section: usize) -> Option<u64> {
        self.bases.get(&section).copied().or_else(|| {
            object.sections[section].symbols.iter().find_map(|&s| {
                let symbol = &object.symbols[s];
                let name = self.names.get(symbol.name)?;
                name.direct?.checked_sub(symbol.value)
            })
        })
    }
}

/// A relocated value as the target holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    /// The symbol's address.
    Address(u64),
    /// A GOT slot with the symbol's address.
    Slot(u64),
    /// Offset from the start of the thread-local segment, in bytes.
    Tls(u64),
    /// A GOT slot with the symbol's offset from the thread pointer.
    TlsSlot(u64),
    /// A `tls_index`, either of the symbol or of the module.
    Index(u64),
    ModuleIndex(u64),
    /// A TLS descriptor.
    Descriptor(u64),
    /// Offset in bytes from the start of the thread-local segment, in code that gets the segment from `__tls_get_addr`.
    Offset(u64),
    /// No value can be read (thread-local sequences that the linker rewrites).
    Unreadable,
}

/// Reads one place; `None` when no linker makes such bytes of it.
fn read(target: &TargetElf, code: &[u8], reloc: &Reloc, at: u64) -> Option<Value> {
    let field = || target.i32_at(at).map(i64::from);
    let relative = |v: i64| at.wrapping_add_signed(v).wrapping_add_signed(reloc.addend.wrapping_neg());
    match elf::RelocationType(reloc.kind) {
        elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => Some(Value::Address(relative(field()?))),
        elf::R_X86_64_PC64 => {
            let v = i64::from_le_bytes(target.bytes(at, 8)?.try_into().ok()?);
            Some(Value::Address(relative(v)))
        }
        elf::R_X86_64_32 => {
            Some(Value::Address(u64::from(target.i32_at(at)? as u32).wrapping_add_signed(reloc.addend.wrapping_neg())))
        }
        elf::R_X86_64_32S => Some(Value::Address(field()?.wrapping_sub(reloc.addend) as u64)),
        // A pointer that the dynamic linker takes from another module gives no value for this one.
        elf::R_X86_64_64 => Some(match target.pointer_at(at) {
            Some(to) => Value::Address(to.wrapping_add_signed(reloc.addend.wrapping_neg())),
            None => Value::Unreadable,
        }),
        elf::R_X86_64_GOTPCREL | elf::R_X86_64_GOTPCRELX | elf::R_X86_64_REX_GOTPCRELX => {
            read_got(target, code, reloc, at)
        }
        elf::R_X86_64_TPOFF32 => offset_in_segment(target, field()?.checked_sub(reloc.addend)?),
        elf::R_X86_64_GOTTPOFF => read_tls_got(target, code, reloc, at),
        elf::R_X86_64_TLSGD if is_unchanged(target, code, reloc, at) => Some(Value::Index(relative(field()?))),
        elf::R_X86_64_TLSLD if is_unchanged(target, code, reloc, at) => Some(Value::ModuleIndex(relative(field()?))),
        elf::R_X86_64_GOTPC32_TLSDESC => read_descriptor(target, code, reloc, at),
        elf::R_X86_64_DTPOFF32 if target.identity().kind == TargetKind::SharedLibrary => {
            u64::try_from(field()?.checked_sub(reloc.addend)?).ok().map(Value::Offset)
        }
        // In an executable the linker knows the distance to the thread pointer.
        elf::R_X86_64_DTPOFF32 => offset_in_segment(target, field()?.checked_sub(reloc.addend)?),
        _ => Some(Value::Unreadable),
    }
}

/// Returns true if the linker did not change the instruction before a thread-local's field.
fn is_unchanged(target: &TargetElf, code: &[u8], reloc: &Reloc, at: u64) -> bool {
    let ours = usize::try_from(reloc.offset).ok().and_then(|place| code.get(place.checked_sub(3)?..place));
    let theirs = at.checked_sub(3).and_then(|start| target.bytes(start, 3));
    ours.is_some() && ours == theirs
}

/// Reads a load through the GOT, or its relaxed form.
fn read_got(target: &TargetElf, code: &[u8], reloc: &Reloc, at: u64) -> Option<Value> {
    let place = usize::try_from(reloc.offset).ok()?;
    let ours = code.get(place.checked_sub(2)?..place)?;
    let theirs = target.bytes(at.checked_sub(2)?, 6)?;
    let field = i64::from(target.i32_at(at)?);
    let next = at.wrapping_add(4).wrapping_add_signed(field);
    // The addend is -4 unless an immediate follows the field.
    let slot = at.wrapping_add_signed(field).wrapping_add_signed(reloc.addend.wrapping_neg());
    match (ours, &theirs[..2]) {
        (a, b) if a == b => Some(Value::Slot(slot)),
        ([0x8b, modrm], [0x8d, m]) if modrm == m => Some(Value::Address(next)),
        ([0xff, 0x15], [0x67, 0xe8]) => Some(Value::Address(next)),
        ([0xff, 0x15], [0xe8, _]) | ([0xff, 0x25], [0xe9, _]) if theirs[5] == 0x90 => {
            let short = i32::from_le_bytes(theirs[1..5].try_into().ok()?);
            Some(Value::Address(at.wrapping_add(3).wrapping_add_signed(i64::from(short))))
        }
        ([0x8b, _], [0xc7, m]) | ([0x85, _], [0xf7, m]) | ([_, _], [0x81, m]) if m & 0xc0 == 0xc0 => {
            Some(Value::Address(field as u64))
        }
        _ => None,
    }
}

/// Reads a load of a thread-local's offset, or its relaxed form.
fn read_tls_got(target: &TargetElf, code: &[u8], reloc: &Reloc, at: u64) -> Option<Value> {
    let place = usize::try_from(reloc.offset).ok()?;
    let ours = code.get(place.checked_sub(2)?..place)?;
    let theirs = target.bytes(at.checked_sub(2)?, 2)?;
    let field = i64::from(target.i32_at(at)?);
    if ours == theirs {
        return Some(Value::TlsSlot(at.wrapping_add(4).wrapping_add_signed(field)));
    }
    let relaxed = match theirs {
        [0xc7 | 0x81, m] => m & 0xc0 == 0xc0,
        [0x8d, m] => m & 0xc0 == 0x80,
        _ => false,
    };
    if relaxed { offset_in_segment(target, field) } else { None }
}

/// Reads the address of a TLS descriptor, or its relaxed form: a load from a slot, or the offset itself.
fn read_descriptor(target: &TargetElf, code: &[u8], reloc: &Reloc, at: u64) -> Option<Value> {
    let place = usize::try_from(reloc.offset).ok()?;
    let ours = code.get(place.checked_sub(2)?..place)?;
    let theirs = target.bytes(at.checked_sub(2)?, 2)?;
    let field = i64::from(target.i32_at(at)?);
    let next = at.wrapping_add(4).wrapping_add_signed(field);
    match (ours, theirs) {
        (a, b) if a == b => Some(Value::Descriptor(next)),
        ([_, modrm], [0x8b, m]) if modrm == m => Some(Value::TlsSlot(next)),
        (_, [0xc7, m]) if m & 0xf8 == 0xc0 => offset_in_segment(target, field),
        _ => None,
    }
}

/// Returns the value for a thread-local of the executable, from its distance to the thread pointer.
fn offset_in_segment(target: &TargetElf, from_thread_pointer: i64) -> Option<Value> {
    let span = target.tls?.span() as i64;
    u64::try_from(from_thread_pointer.checked_add(span)?).ok().map(Value::Tls)
}

/// Returns the relocations of a piece, each with the address of its place.
fn within<'o>(object: &'o Object<'_>, piece: &Piece) -> impl Iterator<Item = (&'o Reloc, u64)> {
    let (start, end, base) = (piece.start, piece.end, piece.base());
    let inside = move |r: &&Reloc| (start..end).contains(&r.offset);
    object.sections[piece.section].relocations.iter().filter(inside).map(move |r| (r, base.wrapping_add(r.offset)))
}

/// Returns the name of the relocation's symbol if it has a meaning outside of this object.
fn linkage_name<'a>(object: &Object<'a>, reloc: &Reloc) -> Option<&'a str> {
    let symbol = &object.symbols[reloc.symbol];
    let named = symbol.kind != SymbolType::Section && !symbol.name.is_empty() && !symbol.name.starts_with(".L");
    named.then_some(symbol.name)
}

/// Returns true if a relocation of inline code refers to data of internal linkage: the linker may have kept the copy of
/// another object, which refers to that object's data.
fn refers_to_internal_data(object: &Object<'_>, piece: &Piece, reloc: &Reloc) -> bool {
    let symbol = &object.symbols[reloc.symbol];
    let Home::Section(section) = symbol.home else { return false };
    let to = &object.sections[section];
    let is_merged = matches!(to.nature, Nature::Merged { .. });
    object.sections[piece.section].comdat && symbol.local && !to.comdat && !is_merged && section != piece.section
}

/// Returns true if a piece at that address contradicts no known value; a contradiction means that it is elsewhere.
pub(crate) fn is_consistent(target: &TargetElf, object: &Object<'_>, known: &KnownValues<'_>, piece: &Piece) -> bool {
    let code = object.sections[piece.section].bytes;
    within(object, piece).all(|(reloc, at)| {
        let Some(value) = read(target, code, reloc, at) else { return false };
        let Value::Address(address) = value else { return true };
        if let Some(name) = linkage_name(object, reloc) {
            let seen = known.names.get(name).and_then(|n| n.direct).is_none_or(|d| d == address);
            let listed = target.symbols.get(name).is_none_or(|all| all.iter().any(|s| s.at == address || !s.global));
            let stub = target.stub_name(address);
            return stub.map_or(seen && (listed || object.symbols[reloc.symbol].local), |n| n == name);
        }
        let Home::Section(section) = object.symbols[reloc.symbol].home else { return true };
        if refers_to_internal_data(object, piece, reloc) {
            return true;
        }
        if section == piece.section {
            return address.wrapping_sub(object.symbols[reloc.symbol].value) == piece.base();
        }
        match object.sections[section].nature {
            Nature::Merged { .. } => literal_matches(target, object, reloc, address),
            _ => {
                let base = address.wrapping_sub(object.symbols[reloc.symbol].value);
                known.bases.get(&section).is_none_or(|b| *b == base)
            }
        }
    })
}

/// Returns true if a relocation of the piece refers to the known address of a name, or to the literal that it names.
pub(crate) fn is_confirmed(target: &TargetElf, object: &Object<'_>, known: &KnownValues<'_>, piece: &Piece) -> bool {
    let code = object.sections[piece.section].bytes;
    within(object, piece).any(|(reloc, at)| {
        let Some(Value::Address(address)) = read(target, code, reloc, at) else { return false };
        if let Some(name) = linkage_name(object, reloc) {
            let listed = target.symbols.get(name).is_some_and(|all| all.iter().any(|s| s.at == address && s.global));
            let seen = known.names.get(name).is_some_and(|n| n.direct == Some(address));
            return seen || listed || target.stub_name(address) == Some(name);
        }
        let Home::Section(section) = object.symbols[reloc.symbol].home else { return false };
        match object.sections[section].nature {
            Nature::Merged { .. } => literal_matches(target, object, reloc, address),
            _ if section == piece.section => false,
            _ => known.bases.get(&section) == Some(&address.wrapping_sub(object.symbols[reloc.symbol].value)),
        }
    })
}

/// Returns true if the target has the literal that the relocation names at the address read back.
fn literal_matches(target: &TargetElf, object: &Object<'_>, reloc: &Reloc, address: u64) -> bool {
    let Site::Inside { section, anchor, .. } = object.site(reloc) else { return true };
    let symbol = &object.symbols[reloc.symbol];
    // Relative to a section, the linker relocates the exact place; relative to a literal, the literal.
    let at = if symbol.kind == SymbolType::Section { address.wrapping_add_signed(anchor) } else { address };
    let Some(literal) = object.literal(section, anchor) else { return true };
    target.bytes(at, literal.len() as u64) == Some(literal)
}

/// Returns true if code is certainly at the piece's address, even if the target has another string in place of some:
/// there is much of it, and most of its literals are there.
fn certainly_placed(target: &TargetElf, object: &Object<'_>, piece: &Piece) -> bool {
    /// Length limit, in bytes: shorter code is in other functions by chance.
    const LENGTH_MIN: u64 = 128;
    let code = object.sections[piece.section].bytes;
    let matches = within(object, piece).filter_map(|(reloc, at)| {
        let Home::Section(section) = object.symbols[reloc.symbol].home else { return None };
        let is_literal = matches!(object.sections[section].nature, Nature::Merged { .. });
        let Some(Value::Address(address)) = read(target, code, reloc, at).filter(|_| is_literal) else { return None };
        Some(literal_matches(target, object, reloc, address))
    });
    let (same, other) =
        matches.fold((0, 0), |(same, other), matches| if matches { (same + 1, other) } else { (same, other + 1) });
    piece.end - piece.start >= LENGTH_MIN && same > other
}

/// Reads every relocated value of a piece of code, and of the data that it refers to.
pub(crate) fn read_code<'a>(target: &TargetElf, object: &Object<'a>, known: &mut KnownValues<'a>, piece: &Piece) {
    if piece.start == 0 && piece.end == object.sections[piece.section].size {
        known.note_base(object, piece.section, piece.address);
    }
    known.read_piece(target, object, piece);
    // Data found in between is read as well: pointers in it name functions that no code calls.
    while let Some((section, base)) = known.unread_data(object) {
        known.read.insert(section);
        let whole = Piece { section, start: 0, end: object.sections[section].size, address: base };
        if data_matches(target, object, &whole) {
            known.matched.insert(section);
            known.read_piece(target, object, &whole);
        } else if known.bases.contains_key(&section) {
            known.conflicts.push(Conflict {
                name: object.sections[section].name.to_owned(),
                one: format!("{base:#x}"),
                other: "another address, where the contents differ".to_owned(),
            });
        }
    }
}

/// Returns true if the target has the data section at the piece's address, equal except for relocated places.
pub(crate) fn data_matches(target: &TargetElf, object: &Object<'_>, piece: &Piece) -> bool {
    let section = &object.sections[piece.section];
    let Some(there) = target.bytes(piece.address, section.bytes.len() as u64) else { return false };
    equal_outside(section.bytes, there, &section.relocations)
}

impl<'a> KnownValues<'a> {
    /// Returns true if a section of data was found and read.
    pub(crate) fn has_read(&self, section: usize) -> bool {
        self.matched.contains(&section)
    }

    fn unread_data(&self, object: &Object<'_>) -> Option<(usize, u64)> {
        let holds_data = |section: &usize| {
            let natures =
                matches!(object.sections[*section].nature, Nature::Constant | Nature::Data | Nature::Custom { .. });
            natures && !object.sections[*section].bytes.is_empty() && !self.read.contains(section)
        };
        self.bases.iter().chain(&self.named).find(|(section, _)| holds_data(section)).map(|(s, b)| (*s, *b))
    }

    fn conflict(&mut self, name: &str, one: u64, other: u64) {
        let conflict = Conflict { name: name.to_owned(), one: format!("{one:#x}"), other: format!("{other:#x}") };
        if !self.conflicts.contains(&conflict) {
            self.conflicts.push(conflict);
        }
    }

    fn note_base(&mut self, object: &Object<'_>, section: usize, base: u64) {
        let before = *self.bases.entry(section).or_insert(base);
        if before != base {
            self.conflict(object.sections[section].name, before, base);
        }
    }

    fn read_piece(&mut self, target: &TargetElf, object: &Object<'a>, piece: &Piece) {
        let code = object.sections[piece.section].bytes;
        let is_certain = certainly_placed(target, object, piece);
        let mut hidden_until = 0;
        for (reloc, at) in within(object, piece) {
            // The call that belongs to a thread-local sequence is rewritten along with it.
            if reloc.offset < hidden_until {
                continue;
            }
            match elf::RelocationType(reloc.kind) {
                elf::R_X86_64_TLSGD => hidden_until = reloc.offset + 12,
                elf::R_X86_64_TLSLD => hidden_until = reloc.offset + 9,
                _ => {}
            }
            match read(target, code, reloc, at) {
                Some(_) if refers_to_internal_data(object, piece, reloc) => {}
                Some(value) => self.note(target, object, reloc, value, is_certain),
                None => self.conflict(object.symbols[reloc.symbol].name, at, 0),
            }
        }
    }

    fn note(&mut self, target: &TargetElf, object: &Object<'a>, reloc: &Reloc, value: Value, is_certain: bool) {
        if let Value::ModuleIndex(at) = value {
            self.module_index.get_or_insert(at);
            return;
        }
        if let Some(name) = linkage_name(object, reloc) {
            return self.note_name(target, object, reloc, name, value);
        }
        let symbol = &object.symbols[reloc.symbol];
        let Home::Section(section) = symbol.home else { return };
        if let Nature::Merged { strings, .. } = object.sections[section].nature {
            if let Value::Address(address) = value
                && !literal_matches(target, object, reloc, address)
                && !(strings && is_certain && self.note_other_string(object, reloc, address))
            {
                self.conflict(object.sections[section].name, address, 0);
            }
            return;
        }
        if let Value::Address(at) | Value::Tls(at) | Value::Offset(at) = value {
            self.note_base(object, section, at.wrapping_sub(symbol.value));
        }
    }

    /// Records the string that the target has in place of one of the object; returns false if it has several.
    fn note_other_string(&mut self, object: &Object<'a>, reloc: &Reloc, address: u64) -> bool {
        let Site::Inside { section, anchor, .. } = object.site(reloc) else { return false };
        let symbol = &object.symbols[reloc.symbol];
        let at = if symbol.kind == SymbolType::Section { address.wrapping_add_signed(anchor) } else { address };
        let literal = object.literal(section, anchor);
        literal.is_some_and(|literal| *self.other_strings.entry(literal).or_insert(at) == at)
    }

    fn note_name(&mut self, target: &TargetElf, object: &Object<'a>, reloc: &Reloc, name: &'a str, value: Value) {
        let weak_absent = |at: u64| at == 0 && object.symbols[reloc.symbol].weak;
        if matches!(value, Value::Address(at) if weak_absent(at)) {
            self.absent.insert(name);
            return;
        }
        if let (Value::Address(at), Some((_, symbol))) = (value, object.defined(name))
            && let Home::Section(section) = symbol.home
            && object.sections[section].comdat | symbol_names::is_class_data(name)
        {
            self.named.entry(section).or_insert(at.wrapping_sub(symbol.value));
        }
        let entry = self.names.entry(name).or_default();
        let (place, value) = match value {
            Value::Address(at) if target.stubs.contains_key(&at) && target.stub_name(at).is_none_or(|n| n == name) => {
                (&mut entry.stub, at)
            }
            Value::Address(at) => (&mut entry.direct, at),
            Value::Slot(at) => {
                if let Some(Dynamic::Relative(to)) = target.dynamic.get(&at)
                    && entry.direct.is_none()
                {
                    entry.direct = Some(*to);
                }
                (&mut entry.slot, at)
            }
            Value::Tls(at) => (&mut entry.tls, at),
            Value::TlsSlot(at) => {
                if let Some(Dynamic::TlsOffset(to)) = target.dynamic.get(&at) {
                    entry.tls = Some(*to);
                }
                (&mut entry.tls_slot, at)
            }
            Value::Descriptor(at) => {
                if let Some(Dynamic::TlsDescriptor(None, to)) = target.dynamic.get(&at) {
                    entry.tls = Some(*to);
                }
                (&mut entry.tls_descriptor, at)
            }
            Value::Offset(at) => (&mut entry.tls, at),
            Value::Index(at) => (&mut entry.tls_index, at),
            Value::ModuleIndex(_) | Value::Unreadable => return,
        };
        // A name may have several stubs and slots (lazy and eager ones); the first is sufficient.
        let before = *place.get_or_insert(value);
        let is_address = entry.direct == Some(before) || entry.tls == Some(before);
        if before != value && is_address {
            self.conflict(name, before, value);
        }
    }
}
