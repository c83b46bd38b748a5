//! Debug sections of a relocatable object, and an index of the names in them.

use gimli::{AttributeValue, DwAt, EndianSlice, LittleEndian, constants as dw};
use object::{Object, ObjectSection, ObjectSymbol, RelocationKind, RelocationTarget};
use std::collections::HashMap;

pub(super) type Reader<'a> = EndianSlice<'a, LittleEndian>;
pub(super) type Entry<'a> = gimli::DebuggingInformationEntry<Reader<'a>>;
type Node<'abbrev, 'tree, 'a> = gimli::EntriesTreeNode<'abbrev, 'tree, Reader<'a>>;

/// Limit of steps along a chain of references, against cycles.
pub(super) const NESTING_MAX: usize = 64;

/// Reason why debug information could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum DebugInfoError {
    #[error("no debug information, compile with -g")]
    Missing,
    #[error("{0}")]
    Object(#[from] object::Error),
    #[error("damaged: {0}")]
    Dwarf(#[from] gimli::Error),
    #[error("a reference to a type that does not exist")]
    NoType,
    #[error("types in a file of their own (-gsplit-dwarf) are not supported")]
    Split,
    #[error("types nested deeper than {NESTING_MAX}")]
    Nesting,
}

/// Beginning of the names of debug sections that the compiler wrote for link-time optimisation.
const EARLY: &str = ".gnu.debuglto_";

/// Number of bits of an offset in [`address_of`].
const OFFSET_BITS: u32 = 40;

/// Returns one number for a place in a section of an object.
pub(super) fn address_of(section: usize, offset: u64) -> u64 {
    ((section as u64) << OFFSET_BITS).wrapping_add(offset)
}

/// The debug sections of one object, relocated.
pub(super) struct Sections(gimli::DwarfSections<Vec<u8>>);

impl Sections {
    pub(super) fn load(object: &[u8]) -> Result<Self, DebugInfoError> {
        // The reader uses only names and types: it skips lists of locations and ranges, which have most of the
        // relocations. The header of the lines is part of a unit in gimli.
        const SECTIONS: &str = ".debug_info .debug_types .debug_abbrev .debug_str .debug_line_str .debug_str_offsets \
            .debug_addr .debug_line";
        Self::load_some(object, SECTIONS, false)
    }

    /// Loads also the ranges of code; addresses are those of [`address_of`].
    pub(super) fn load_with_places(object: &[u8]) -> Result<Self, DebugInfoError> {
        const SECTIONS: &str = ".debug_info .debug_types .debug_abbrev .debug_str .debug_line_str .debug_str_offsets \
            .debug_addr .debug_line .debug_ranges .debug_rnglists";
        Self::load_some(object, SECTIONS, true)
    }

    fn load_some(object: &[u8], wanted: &str, places: bool) -> Result<Self, DebugInfoError> {
        let file = object::File::parse(object)?;
        let named = |name: &str| file.sections().any(|s| s.name() == Ok(name));
        if named(".debug_info.dwo") {
            return Err(DebugInfoError::Split);
        }
        let is_early = !named(".debug_info") && named(&format!("{EARLY}.debug_info"));
        if !named(".debug_info") && !is_early {
            return Err(DebugInfoError::Missing);
        }
        let start = if is_early { EARLY } else { "" };
        let is_read = |name| wanted.split(' ').any(|section| section == name);
        let load = |id: gimli::SectionId| match is_read(id.name()) {
            true => relocated(&file, &format!("{start}{}", id.name()), places),
            false => Ok(Vec::new()),
        };
        gimli::DwarfSections::load(load).map(Sections)
    }
}

/// Returns all sections of that name, joined: each type unit has a section of its own, which others refer to by number.
/// With `places`, addresses are those of [`address_of`].
fn relocated(file: &object::File<'_>, name: &str, places: bool) -> Result<Vec<u8>, DebugInfoError> {
    let mut all = Vec::new();
    for section in file.sections().filter(|section| section.name() == Ok(name)) {
        let mut bytes = section.uncompressed_data()?.into_owned();
        for (offset, relocation) in section.relocations() {
            let RelocationTarget::Symbol(symbol) = relocation.target() else { continue };
            // Other kinds are offsets of thread-locals in location expressions, which this module does not read.
            if relocation.kind() != RelocationKind::Absolute {
                continue;
            }
            let symbol = file.symbol_by_index(symbol)?;
            let width = usize::from(relocation.size() / 8);
            let section = symbol.section_index().filter(|_| places && width == 8).map_or(0, |section| section.0);
            let value = address_of(section, symbol.address()).wrapping_add_signed(relocation.addend());
            let place = usize::try_from(offset).ok().and_then(|at| bytes.get_mut(at..at.checked_add(width)?));
            if let (Some(place), true) = (place, width <= 8) {
                place.copy_from_slice(&value.to_le_bytes()[..width]);
            }
        }
        all.append(&mut bytes);
    }
    Ok(all)
}

/// One debugging information entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Die {
    unit: usize,
    offset: usize,
}

impl Die {
    /// Returns the unit that its attributes refer to.
    pub(super) fn unit(self) -> usize {
        self.unit
    }
}

/// Key of a type: in C, tags (`struct s`) and plain names are separate.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct TypeKey {
    pub(super) tag: bool,
    pub(super) name: String,
}

/// One object's debug information, indexed by name.
pub(super) struct Side<'a> {
    dwarf: gimli::Dwarf<Reader<'a>>,
    units: Vec<gimli::Unit<Reader<'a>>>,
    /// True for each unit in another language than C.
    cxx: Vec<bool>,
    /// Types in units of their own, by signature.
    signatures: HashMap<u64, Die>,
    /// Types and variables outside functions with the namespaces and classes around them, declarations included.
    names: HashMap<Die, String>,
    /// Complete named types outside functions; the first one of a name counts.
    pub(super) types: HashMap<TypeKey, Die>,
    /// Every entry of a function: declaration, abstract and concrete instances; also by linkage name.
    pub(super) functions: HashMap<String, Vec<Die>>,
    /// Variables outside functions: declarations and definitions.
    pub(super) variables: HashMap<String, Vec<Die>>,
}

impl<'a> Side<'a> {
    pub(super) fn index(sections: &'a Sections) -> Result<Self, DebugInfoError> {
        let dwarf = sections.0.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
        let (mut units, mut signatures) = (Vec::new(), HashMap::new());
        let mut headers = Vec::new();
        let (mut first, mut second) = (dwarf.units(), dwarf.type_units());
        while let Some(header) = first.next()? {
            headers.push(header);
        }
        while let Some(header) = second.next()? {
            headers.push(header);
        }
        for header in headers {
            match header.type_() {
                gimli::UnitType::Type { type_signature, type_offset } => {
                    signatures.insert(type_signature.0, Die { unit: units.len(), offset: type_offset.0 });
                }
                gimli::UnitType::SplitType { .. } | gimli::UnitType::SplitCompilation(_) => {
                    return Err(DebugInfoError::Split);
                }
                _ => {}
            }
            units.push(dwarf.unit(header)?);
        }
        if units.is_empty() {
            return Err(DebugInfoError::Missing);
        }
        let cxx = units.iter().map(is_cxx).collect();
        let mut side = Side {
            dwarf,
            units,
            cxx,
            signatures,
            names: HashMap::new(),
            types: HashMap::new(),
            functions: HashMap::new(),
            variables: HashMap::new(),
        };
        let mut found = Vec::new();
        for unit in 0..side.units.len() {
            let mut tree = side.units[unit].entries_tree(None)?;
            side.scan(unit, tree.root()?, "", &mut found)?;
        }
        side.names = found.iter().filter_map(|(name, what)| Some((what.named()?, name.clone()))).collect();
        for (name, what) in found {
            // An entry that completes a declaration in a namespace or class has the declaration's full name.
            let completes = what.named().map(|die| Ok::<_, DebugInfoError>((die, side.root(die)?))).transpose()?;
            let name = match completes.filter(|(die, root)| die != root) {
                Some((die, root)) => {
                    let full = side.names.get(&root).cloned().unwrap_or(name);
                    side.names.insert(die, full.clone());
                    full
                }
                None => name,
            };
            match what {
                Found::Type { tag, die, complete: true } => _ = side.types.entry(TypeKey { tag, name }).or_insert(die),
                Found::Type { complete: false, .. } => {}
                Found::Function(die) => side.functions.entry(name).or_default().push(die),
                Found::Variable(die) => side.variables.entry(name).or_default().push(die),
                Found::Member(_) => {}
            }
        }
        Ok(side)
    }

    /// Indexes the children of a file, namespace or class; skips the bodies of functions.
    fn scan(
        &self,
        unit: usize,
        node: Node<'_, '_, 'a>,
        scope: &str,
        found: &mut Vec<(String, Found)>,
    ) -> Result<(), DebugInfoError> {
        let mut children = node.children();
        while let Some(child) = children.next()? {
            let entry = child.entry();
            let die = Die { unit, offset: entry.offset().0 };
            let tag = entry.tag();
            match tag {
                dw::DW_TAG_subprogram => {
                    let linkage = self.linkage_name(entry, unit)?;
                    let names = [self.name_of(entry, unit)?, linkage];
                    found.extend(names.into_iter().flatten().map(|name| (name.to_owned(), Found::Function(die))));
                    continue;
                }
                dw::DW_TAG_variable => {
                    let name = self.name_of(entry, unit)?;
                    found.extend(name.map(|name| (format!("{scope}{name}"), Found::Variable(die))));
                    continue;
                }
                // Before DWARF 5 the declaration of a static member is like any other.
                dw::DW_TAG_member if entry.has_attr(dw::DW_AT_declaration) => {
                    let name = self.name_of(entry, unit)?;
                    found.extend(name.map(|name| (format!("{scope}{name}"), Found::Member(die))));
                    continue;
                }
                dw::DW_TAG_namespace => {}
                dw::DW_TAG_typedef => {}
                tag if is_tagged(tag) => {}
                _ => continue,
            }
            let qualified = self.string(entry, dw::DW_AT_name, unit)?.map(|name| format!("{scope}{name}"));
            let complete = !entry.has_attr(dw::DW_AT_declaration);
            if let (Some(name), true) = (&qualified, tag != dw::DW_TAG_namespace) {
                let tag = tag != dw::DW_TAG_typedef;
                // All instances of an alias template have one name: other names of types count where they are used.
                let complete = complete && (tag || !self.is_cxx(unit));
                found.push((name.clone(), Found::Type { tag, die, complete }));
            }
            // In C, types do not nest: a structure contains only members.
            if tag == dw::DW_TAG_namespace || (self.is_cxx(unit) && is_aggregate(tag)) {
                let inner = qualified.unwrap_or_else(|| format!("{scope}(anonymous)")) + "::";
                self.scan(unit, child, &inner, found)?;
            }
        }
        Ok(())
    }

    /// Returns true if a unit is in another language than C.
    pub(super) fn is_cxx(&self, unit: usize) -> bool {
        self.cxx.get(unit).copied().unwrap_or(true)
    }

    /// Returns the full name of a type outside functions; for any other type its own name, if any.
    pub(super) fn full_name(&self, die: Die) -> Result<Option<String>, DebugInfoError> {
        match self.names.get(&die) {
            Some(name) => Ok(Some(name.clone())),
            None => Ok(self.string(&self.entry(die)?, dw::DW_AT_name, die.unit)?.map(str::to_owned)),
        }
    }

    /// Returns true if a type is within a function.
    pub(super) fn is_local(&self, die: Die) -> bool {
        !self.names.contains_key(&die)
    }

    /// Calls `visit` for every entry of code or data that has a place: with its first address, for code with that of
    /// each of its parts.
    pub(super) fn placed(
        &self,
        mut visit: impl FnMut(Die, u64) -> Result<(), DebugInfoError>,
    ) -> Result<(), DebugInfoError> {
        for (index, unit) in self.units.iter().enumerate() {
            let mut entries = unit.entries();
            while let Some(entry) = entries.next_dfs()? {
                let die = Die { unit: index, offset: entry.offset().0 };
                match entry.tag() {
                    dw::DW_TAG_subprogram => {
                        let mut ranges = self.dwarf.die_ranges(unit, entry)?;
                        while let Some(range) = ranges.next()? {
                            visit(die, range.begin)?;
                        }
                    }
                    dw::DW_TAG_variable => {
                        if let Some(address) = static_address(entry) {
                            visit(die, address)?;
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Calls `visit` for every variable that has an address, with the innermost entry around it that has one of these tags.
    pub(super) fn placed_within(
        &self,
        tags: &[gimli::DwTag],
        mut visit: impl FnMut(Die, u64) -> Result<(), DebugInfoError>,
    ) -> Result<(), DebugInfoError> {
        for (index, unit) in self.units.iter().enumerate() {
            let (mut entries, mut around) = (unit.entries(), Vec::<(isize, Die)>::new());
            while let Some(entry) = entries.next_dfs()? {
                while around.last().is_some_and(|(depth, _)| *depth >= entry.depth()) {
                    around.pop();
                }
                if tags.contains(&entry.tag()) {
                    around.push((entry.depth(), Die { unit: index, offset: entry.offset().0 }));
                }
                let address = static_address(entry).filter(|_| entry.tag() == dw::DW_TAG_variable);
                if let (Some(address), Some((_, within))) = (address, around.last()) {
                    visit(*within, address)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the name of the source file of a unit, as the compiler was given it.
    pub(super) fn file_of(&self, unit: usize) -> String {
        let name = self.units.get(unit).and_then(|unit| unit.name);
        name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns the source file's name.
    pub(super) fn unit_name(&self) -> Option<String> {
        let name = self.units.first()?.name?;
        Some(name.to_string_lossy().into_owned())
    }

    pub(super) fn entry(&self, die: Die) -> Result<Entry<'a>, DebugInfoError> {
        Ok(self.units[die.unit].entry(gimli::UnitOffset(die.offset))?)
    }

    /// Returns the entry of each unit, which contains all others.
    pub(super) fn roots(&self) -> Result<Vec<Die>, DebugInfoError> {
        let root = |(unit, of): (usize, &gimli::Unit<Reader<'a>>)| {
            let offset = of.entries_tree(None)?.root()?.entry().offset().0;
            Ok::<_, DebugInfoError>(Die { unit, offset })
        };
        self.units.iter().enumerate().map(root).collect()
    }

    /// Calls `visit` for the entries below `die`, its direct children alone or all.
    pub(super) fn below(
        &self,
        die: Die,
        all: bool,
        mut visit: impl FnMut(Die, &Entry<'a>) -> Result<(), DebugInfoError>,
    ) -> Result<(), DebugInfoError> {
        let mut tree = self.units[die.unit].entries_tree(Some(gimli::UnitOffset(die.offset)))?;
        walk(tree.root()?, die.unit, all, &mut visit)
    }

    /// Returns the entry that an attribute of an entry in `unit` refers to; for a reference to a type in a unit of its
    /// own, that type.
    pub(super) fn reference(&self, entry: &Entry<'a>, at: DwAt, unit: usize) -> Result<Option<Die>, DebugInfoError> {
        let by_signature = |signature: u64| self.signatures.get(&signature).copied().ok_or(DebugInfoError::NoType);
        let found = match entry.attr_value(at) {
            None => return Ok(None),
            Some(AttributeValue::UnitRef(offset)) => Die { unit, offset: offset.0 },
            Some(AttributeValue::DebugInfoRef(offset)) => {
                let holds = |u: &gimli::Unit<Reader<'a>>| offset.to_unit_offset(&u.header).map(|o| o.0);
                let hit = self.units.iter().enumerate().find_map(|(unit, u)| Some(Die { unit, offset: holds(u)? }));
                hit.ok_or(gimli::Error::NoEntryAtGivenOffset(offset.0 as u64))?
            }
            Some(AttributeValue::DebugTypesRef(signature)) => return by_signature(signature.0).map(Some),
            Some(_) => return Err(DebugInfoError::NoType),
        };
        match self.entry(found)?.attr_value(dw::DW_AT_signature) {
            Some(AttributeValue::DebugTypesRef(signature)) => by_signature(signature.0).map(Some),
            _ => Ok(Some(found)),
        }
    }

    /// Returns the type of an entry; `None` is `void`.
    pub(super) fn type_of(&self, die: Die) -> Result<Option<Die>, DebugInfoError> {
        let mut at = die;
        for _ in 0..NESTING_MAX {
            let entry = self.entry(at)?;
            if entry.has_attr(dw::DW_AT_type) {
                return self.reference(&entry, dw::DW_AT_type, at.unit);
            }
            match self.origin(&entry, at.unit)? {
                Some(origin) => at = origin,
                None => return Ok(None),
            }
        }
        Err(DebugInfoError::Nesting)
    }

    /// Returns the first entry in the chain from an instance or definition to its origin; itself if there is none.
    pub(super) fn root(&self, die: Die) -> Result<Die, DebugInfoError> {
        let mut at = die;
        for _ in 0..NESTING_MAX {
            match self.origin(&self.entry(at)?, at.unit)? {
                Some(origin) => at = origin,
                None => return Ok(at),
            }
        }
        Err(DebugInfoError::Nesting)
    }

    /// Returns the entry that an instance or definition completes.
    pub(super) fn origin(&self, entry: &Entry<'a>, unit: usize) -> Result<Option<Die>, DebugInfoError> {
        match self.reference(entry, dw::DW_AT_abstract_origin, unit)? {
            Some(die) => Ok(Some(die)),
            None => self.reference(entry, dw::DW_AT_specification, unit),
        }
    }

    /// Returns the name of an entry, its own or that of the entry it completes.
    pub(super) fn name_of(&self, entry: &Entry<'a>, unit: usize) -> Result<Option<&'a str>, DebugInfoError> {
        self.inherited(entry, unit, &[dw::DW_AT_name])
    }

    pub(super) fn linkage_name(&self, entry: &Entry<'a>, unit: usize) -> Result<Option<&'a str>, DebugInfoError> {
        self.inherited(entry, unit, &[dw::DW_AT_linkage_name, dw::DW_AT_MIPS_linkage_name])
    }

    fn inherited(&self, entry: &Entry<'a>, unit: usize, names: &[DwAt]) -> Result<Option<&'a str>, DebugInfoError> {
        let (mut entry, mut unit) = (entry.clone(), unit);
        for _ in 0..NESTING_MAX {
            for name in names {
                if let Some(text) = self.string(&entry, *name, unit)? {
                    return Ok(Some(text));
                }
            }
            let Some(origin) = self.origin(&entry, unit)? else { return Ok(None) };
            (entry, unit) = (self.entry(origin)?, origin.unit);
        }
        Err(DebugInfoError::Nesting)
    }

    pub(super) fn string(&self, entry: &Entry<'a>, at: DwAt, unit: usize) -> Result<Option<&'a str>, DebugInfoError> {
        let Some(value) = entry.attr_value(at) else { return Ok(None) };
        Ok(Some(self.dwarf.attr_string(&self.units[unit], value)?.to_string()?))
    }
}

enum Found {
    Type {
        tag: bool,
        die: Die,
        complete: bool,
    },
    Function(Die),
    Variable(Die),
    /// Declaration of a static member of a class.
    Member(Die),
}

impl Found {
    /// Returns the entry, unless it is a function; linkage names distinguish functions.
    fn named(&self) -> Option<Die> {
        match self {
            Found::Type { die, .. } | Found::Variable(die) | Found::Member(die) => Some(*die),
            Found::Function(_) => None,
        }
    }
}

fn is_cxx(unit: &gimli::Unit<Reader<'_>>) -> bool {
    let root = unit.entries_tree(None).and_then(|mut tree| Ok(tree.root()?.entry().clone()));
    match root.ok().and_then(|root| root.attr_value(dw::DW_AT_language)) {
        Some(AttributeValue::Language(language)) => {
            let c = [dw::DW_LANG_C, dw::DW_LANG_C89, dw::DW_LANG_C99, dw::DW_LANG_C11, dw::DW_LANG_C17];
            !c.contains(&language)
        }
        _ => true,
    }
}

/// Returns the address of a variable whose location is one address.
fn static_address(entry: &Entry<'_>) -> Option<u64> {
    let Some(AttributeValue::Exprloc(location)) = entry.attr_value(dw::DW_AT_location) else { return None };
    let (&op, address) = location.0.slice().split_first()?;
    let address = address.try_into().ok().filter(|_| op == dw::DW_OP_addr.0)?;
    Some(u64::from_le_bytes(address))
}

pub(super) fn is_aggregate(tag: gimli::DwTag) -> bool {
    matches!(tag, dw::DW_TAG_structure_type | dw::DW_TAG_class_type | dw::DW_TAG_union_type)
}

pub(super) fn is_tagged(tag: gimli::DwTag) -> bool {
    is_aggregate(tag) || tag == dw::DW_TAG_enumeration_type
}

fn walk<'a>(
    node: Node<'_, '_, 'a>,
    unit: usize,
    all: bool,
    visit: &mut impl FnMut(Die, &Entry<'a>) -> Result<(), DebugInfoError>,
) -> Result<(), DebugInfoError> {
    let mut children = node.children();
    while let Some(child) = children.next()? {
        visit(Die { unit, offset: child.entry().offset().0 }, child.entry())?;
        if all {
            walk(child, unit, all, visit)?;
        }
    }
    Ok(())
}
