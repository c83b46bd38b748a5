//! A relocatable object, read once: sections, symbols, and the destination of every relocation.

use crate::{Refusal, symbol_names, unwind_records};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};
use object::elf;
use object::read::elf::{ElfFile64, FileHeader, Rela, SectionHeader, Sym};
use object::{Endianness, Object as _, ObjectComdat as _, ObjectSection as _};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Size limit of a section, in bytes, against damaged input.
const SIZE_MAX: u64 = 1 << 31;

/// Content of a section of an object, as relevant for a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nature {
    /// Executable code.
    Text,
    /// Constants, possibly holding relocated pointers (`.data.rel.ro`).
    Constant,
    /// Constants that the linker merges: by entry size, or by terminator when `strings`.
    Merged { entry: u64, strings: bool },
    /// Writable, initialised.
    Data,
    /// Writable, zero.
    Zero,
    /// Thread-local.
    Tls,
    /// Start-up code: `.init_array` and similar sections.
    StartUp,
    /// Unwind data: `.eh_frame`.
    Unwind,
    /// `.gcc_except_table*`.
    Exceptions,
    /// Sections that are not loaded, or have no effect on running code (notes, patchable entries).
    Aside,
    /// Loaded, with a section name chosen in the source (`__attribute__((section))`).
    Custom { write: bool },
}

#[derive(Debug)]
pub(crate) struct Section<'a> {
    pub(crate) name: &'a str,
    pub(crate) nature: Nature,
    pub(crate) align: u64,
    pub(crate) size: u64,
    /// Empty for `.bss`.
    pub(crate) bytes: &'a [u8],
    /// Sorted by offset.
    pub(crate) relocations: Vec<Reloc>,
    /// Indices of the functions and objects that it defines, sorted by value.
    pub(crate) symbols: Vec<usize>,
    /// True if the linker keeps one of several objects' copies (inline functions and similar code of C++).
    pub(crate) comdat: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Reloc {
    pub(crate) offset: u64,
    pub(crate) kind: u32,
    pub(crate) symbol: usize,
    pub(crate) addend: i64,
    /// Distance from the place to the base of its relative value: the end of its instruction; in data the place itself,
    /// or the start of the table of which it is a row.
    pub(crate) origin: i64,
    pub(crate) usage: Usage,
}

/// Use of a place's value by the instruction around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usage {
    Branch,
    /// `lea`: the address itself.
    Address,
    /// Another instruction, or none.
    Other,
}

impl Reloc {
    pub(crate) fn is_branch(&self) -> bool {
        self.usage == Usage::Branch
    }

    /// Returns the size of the place in bytes.
    pub(crate) fn width(&self) -> u64 {
        match elf::RelocationType(self.kind) {
            elf::R_X86_64_64 | elf::R_X86_64_PC64 => 8,
            // Marks an instruction without a field.
            elf::R_X86_64_TLSDESC_CALL => 0,
            _ => 4,
        }
    }

    /// Returns true if it belongs to a call of a TLS descriptor.
    pub(crate) fn is_descriptor(&self) -> bool {
        [elf::R_X86_64_GOTPC32_TLSDESC, elf::R_X86_64_TLSDESC_CALL].contains(&elf::RelocationType(self.kind))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    Undefined,
    Absolute,
    Common,
    Section(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SymbolType {
    Function,
    Indirect,
    Object,
    Tls,
    Section,
    Other,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol<'a> {
    pub(crate) name: &'a str,
    pub(crate) home: Home,
    pub(crate) value: u64,
    pub(crate) size: u64,
    pub(crate) kind: SymbolType,
    pub(crate) local: bool,
    pub(crate) weak: bool,
}

impl Symbol<'_> {
    pub(crate) fn is_function(&self) -> bool {
        matches!(self.kind, SymbolType::Function | SymbolType::Indirect)
    }
}

/// Destination of a relocation, with the instruction's own bytes taken into account.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Site<'a> {
    /// A name that another object defines, and an offset from it in bytes.
    Extern(&'a str, i64),
    /// A byte of a section of this object. `anchor` is the byte that identifies it: the start of a literal when the
    /// reference is relative to one, else the byte itself.
    Inside { section: usize, offset: i64, anchor: i64 },
    /// An absolute value.
    Value(i64),
}

#[derive(Debug)]
pub(crate) struct Object<'a> {
    pub(crate) sections: Vec<Section<'a>>,
    pub(crate) symbols: Vec<Symbol<'a>>,
    /// Places of constant sections that code or data refers to.
    referenced: BTreeMap<usize, BTreeSet<i64>>,
    /// Exception tables, by the section of the code that they belong to, in the order of the code.
    tables: BTreeMap<usize, Vec<(usize, i64)>>,
    by_name: HashMap<&'a str, usize>,
    /// Cold parts, by the function that they belong to.
    cold: HashMap<&'a str, Vec<usize>>,
}

pub(crate) fn is_pc_relative(kind: u32) -> bool {
    matches!(
        elf::RelocationType(kind),
        elf::R_X86_64_PC32
            | elf::R_X86_64_PLT32
            | elf::R_X86_64_PC64
            | elf::R_X86_64_GOTPCREL
            | elf::R_X86_64_GOTPCRELX
            | elf::R_X86_64_REX_GOTPCRELX
            | elf::R_X86_64_GOTTPOFF
            | elf::R_X86_64_TLSGD
            | elf::R_X86_64_TLSLD
    )
}

/// Returns true if the place holds the distance to a slot with an address.
pub(crate) fn is_slot(kind: u32) -> bool {
    matches!(elf::RelocationType(kind), elf::R_X86_64_GOTPCREL | elf::R_X86_64_GOTPCRELX | elf::R_X86_64_REX_GOTPCRELX)
}

fn nature(name: &str, header: &elf::SectionHeader64<Endianness>) -> Nature {
    let (e, starts) = (Endianness::Little, |prefix: &str| name == prefix || name.starts_with(&format!("{prefix}.")));
    let flags = header.sh_flags(e).0;
    let has = |flag: elf::SectionFlags| flags & flag.0 != 0;
    let kind = header.sh_type(e);
    let for_tracers = ["__patchable_function_entries", "__mcount_loc"].contains(&name);
    if !has(elf::SHF_ALLOC) || kind == elf::SHT_NOTE || for_tracers || starts(".note") {
        return Nature::Aside;
    }
    let start_up = kind == elf::SHT_INIT_ARRAY || kind == elf::SHT_FINI_ARRAY || kind == elf::SHT_PREINIT_ARRAY;
    if start_up || [".init_array", ".fini_array", ".preinit_array", ".ctors", ".dtors"].iter().any(|p| starts(p)) {
        return Nature::StartUp;
    }
    if name == ".eh_frame" {
        return Nature::Unwind;
    }
    if starts(".gcc_except_table") {
        return Nature::Exceptions;
    }
    if has(elf::SHF_EXECINSTR) {
        return if name == ".init" || name == ".fini" { Nature::StartUp } else { Nature::Text };
    }
    if has(elf::SHF_TLS) {
        return Nature::Tls;
    }
    // A pointer for the unwinder, which no code writes to.
    if name.contains(".DW.ref.") {
        return Nature::Constant;
    }
    if has(elf::SHF_MERGE) && header.sh_entsize(e) > 0 {
        return Nature::Merged { entry: header.sh_entsize(e), strings: has(elf::SHF_STRINGS) };
    }
    if starts(".data.rel.ro") || starts(".rodata") {
        return Nature::Constant;
    }
    match (has(elf::SHF_WRITE), kind == elf::SHT_NOBITS) {
        (true, true) if starts(".bss") => Nature::Zero,
        (true, false) if starts(".data") => Nature::Data,
        (write, _) => Nature::Custom { write },
    }
}

/// Start of an object of clang's link-time optimisation, which is no ELF file.
const LLVM_BITCODE: &[u8] = b"BC\xc0\xde";

impl<'a> Object<'a> {
    /// Reads an object; never panics, for any input.
    pub(crate) fn parse(bytes: &'a [u8], unit: &str, side: &'static str) -> Result<Self, Refusal> {
        let bad = |why: String| Refusal::BadObject { unit: unit.to_owned(), side, why };
        if bytes.starts_with(LLVM_BITCODE) {
            let (unit, section, why) =
                (unit.to_owned(), "LLVM bitcode".to_owned(), "only gcc's can be patched".to_owned());
            return Err(Refusal::Lto { unit, side, section, why });
        }
        let file = ElfFile64::<Endianness>::parse(bytes).map_err(|e| bad(e.to_string()))?;
        let e = Endianness::Little;
        let header = file.elf_header();
        if file.endianness() != e || header.e_machine(e) != elf::EM_X86_64 || header.e_type(e) != elf::ET_REL {
            return Err(bad("not a relocatable x86-64 ELF file".to_owned()));
        }
        let mut sections = vec![empty_section()];
        for section in file.sections() {
            let name = section.name().map_err(|e| bad(e.to_string()))?;
            if name.starts_with(".gnu.lto_") {
                let (unit, section, why) =
                    (unit.to_owned(), name.to_owned(), "it has no machine code of its own".to_owned());
                return Err(Refusal::Lto { unit, side, section, why });
            }
            while sections.len() < section.index().0 {
                sections.push(empty_section());
            }
            let header = section.elf_section_header();
            let nature = nature(name, header);
            let data = if nature == Nature::Aside { &[] } else { section.data().map_err(|e| bad(e.to_string()))? };
            sections.push(Section {
                name,
                nature,
                align: section.align().max(1),
                size: section.size(),
                bytes: data,
                relocations: Vec::new(),
                symbols: Vec::new(),
                comdat: false,
            });
        }
        for section in file.comdats().flat_map(|comdat| comdat.sections()) {
            if let Some(entry) = sections.get_mut(section.0) {
                entry.comdat = true;
            }
        }
        let sizes: Vec<u64> = sections.iter().map(|s: &Section<'_>| s.size).collect();
        if let Some(size) = sizes.iter().find(|size| **size > SIZE_MAX) {
            return Err(bad(format!("a section of {size} bytes")));
        }
        let symbols = read_symbols(&file, &sizes).map_err(bad)?;
        let mut object = Object {
            symbols,
            sections,
            referenced: BTreeMap::new(),
            tables: BTreeMap::new(),
            by_name: HashMap::new(),
            cold: HashMap::new(),
        };
        object.read_relocations(&file).map_err(bad)?;
        object.index_symbols();
        object.find_tables();
        object.index_references();
        object.tables = unwind_records::exception_tables(&object);
        Ok(object)
    }

    fn read_relocations(&mut self, file: &ElfFile64<'a, Endianness>) -> Result<(), String> {
        for section in file.sections() {
            let Some(entry) = self.sections.get_mut(section.index().0) else { continue };
            if entry.nature == Nature::Aside {
                continue;
            }
            for rela in section.elf_linked_rela().map_err(|e| e.to_string())? {
                let e = Endianness::Little;
                let (offset, kind) = (Rela::r_offset(rela, e), rela.r_type(e, false).0);
                let (symbol, addend) = (rela.r_sym(e, false) as usize, rela.r_addend(e));
                if elf::RelocationType(kind) == elf::R_X86_64_NONE {
                    continue;
                }
                let reloc = Reloc { offset, kind, symbol, addend, origin: 0, usage: Usage::Other };
                let end = offset.checked_add(reloc.width()).ok_or("a relocation is past the end of its section")?;
                if symbol >= self.symbols.len() || end > entry.bytes.len() as u64 {
                    return Err(format!("relocation at {}+{offset:#x} is out of range", entry.name));
                }
                entry.relocations.push(reloc);
            }
            entry.relocations.sort_by_key(|r| r.offset);
            if let Nature::Merged { .. } = entry.nature
                && !entry.relocations.is_empty()
            {
                // No linker merges constants that it has to relocate.
                entry.nature = Nature::Constant;
            }
            if entry.nature == Nature::Text {
                mark_instructions(entry.bytes, &mut entry.relocations);
            }
        }
        Ok(())
    }

    fn index_symbols(&mut self) {
        for (index, symbol) in self.symbols.iter().enumerate() {
            let Home::Section(home) = symbol.home else { continue };
            if !matches!(symbol.kind, SymbolType::Section) && !symbol.name.is_empty() && !symbol.name.starts_with(".L")
            {
                self.sections[home].symbols.push(index);
            }
        }
        for section in &mut self.sections {
            let symbols = &self.symbols;
            section.symbols.sort_by_key(|&s| (symbols[s].value, symbols[s].local, s));
        }
        let (mut by_name, mut cold) = (HashMap::new(), HashMap::new());
        for (index, symbol) in self.symbols.iter().enumerate() {
            if matches!(symbol.home, Home::Section(_) | Home::Common) && symbol.kind != SymbolType::Section {
                by_name.entry(symbol.name).or_insert(index);
            }
        }
        for (index, parent) in self.functions().filter_map(|(i, s)| Some((i, symbol_names::cold_parent(s.name)?))) {
            cold.entry(parent).or_insert_with(Vec::new).push(index);
        }
        (self.by_name, self.cold) = (by_name, cold);
    }

    /// Finds tables of distances from the table's start, whose address code takes: compilers make them from switches
    /// and from arrays of constants.
    fn find_tables(&mut self) {
        let mut starts: BTreeMap<usize, BTreeSet<i64>> = BTreeMap::new();
        for section in self.sections.iter().filter(|s| s.nature == Nature::Text) {
            for reloc in section.relocations.iter().filter(|r| r.usage == Usage::Address) {
                if let Site::Inside { section, offset, .. } = self.site(reloc)
                    && self.sections[section].nature == Nature::Constant
                {
                    starts.entry(section).or_default().insert(offset);
                }
            }
        }
        for (index, section) in self.sections.iter_mut().enumerate().filter(|(_, s)| s.nature == Nature::Constant) {
            let starts = starts.get(&index);
            let named = section.symbols.iter().map(|s| &self.symbols[*s]);
            let named: Vec<_> = named.map(|s| (s.value as i64, s.value.saturating_add(s.size) as i64)).collect();
            for reloc in &mut section.relocations {
                if !matches!(elf::RelocationType(reloc.kind), elf::R_X86_64_PC32 | elf::R_X86_64_PLT32) {
                    continue;
                }
                let at = reloc.offset as i64;
                let shown = starts.and_then(|all| all.range(..=at).next_back()).copied();
                let owned = named.iter().filter(|(from, to)| (*from..*to).contains(&at)).map(|(from, _)| *from).max();
                reloc.origin = shown.max(owned).unwrap_or(at) - at;
            }
        }
    }

    fn index_references(&mut self) {
        let mut referenced: BTreeMap<usize, BTreeSet<i64>> = BTreeMap::new();
        for section in &self.sections {
            for reloc in &section.relocations {
                if let Site::Inside { section, anchor, .. } = self.site(reloc)
                    && matches!(self.sections[section].nature, Nature::Constant | Nature::Data | Nature::Exceptions)
                {
                    referenced.entry(section).or_default().insert(anchor);
                }
            }
        }
        self.referenced = referenced;
    }

    /// Returns the destination of the relocation.
    pub(crate) fn site(&self, reloc: &Reloc) -> Site<'a> {
        let symbol = &self.symbols[reloc.symbol];
        let shift = if is_pc_relative(reloc.kind) { reloc.addend.wrapping_add(reloc.origin) } else { reloc.addend };
        match symbol.home {
            Home::Undefined | Home::Common => Site::Extern(symbol.name, shift),
            Home::Absolute => Site::Value((symbol.value as i64).wrapping_add(shift)),
            Home::Section(section) => {
                let offset = (symbol.value as i64).wrapping_add(shift);
                let anchor = match self.sections[section].nature {
                    _ if symbol.kind != SymbolType::Section => symbol.value as i64,
                    // Code uses half of a constant as well, and the linker keeps constants whole.
                    Nature::Merged { entry, strings: false } => match i64::try_from(entry) {
                        Ok(entry) if entry > 0 => offset.wrapping_sub(offset.rem_euclid(entry)),
                        _ => offset,
                    },
                    _ => offset,
                };
                Site::Inside { section, offset, anchor }
            }
        }
    }

    /// Returns the function or object whose bytes include `offset` of `section`. A section with only one owns all bytes
    /// and those around it, as code refers to `array - 8` and `array + length`.
    pub(crate) fn owner(&self, section: usize, offset: i64) -> Option<usize> {
        let symbols = &self.sections[section].symbols;
        let first = *symbols.first()?;
        if symbols.iter().all(|&s| self.symbols[s].value == self.symbols[first].value) {
            return Some(first);
        }
        let inside = |s: usize| {
            let (symbol, at) = (&self.symbols[s], u64::try_from(offset).ok()?);
            (symbol.value <= at && at - symbol.value < symbol.size.max(1)).then_some(s)
        };
        symbols.iter().find_map(|&s| inside(s))
    }

    /// Returns true if a variable holds a distance from its own place to another.
    pub(crate) fn has_relative_pointer(&self, variable: usize) -> bool {
        let symbol = &self.symbols[variable];
        let Home::Section(section) = symbol.home else { return false };
        let within = symbol.value..symbol.value.saturating_add(symbol.size);
        let absolute = [elf::R_X86_64_64, elf::R_X86_64_32, elf::R_X86_64_32S];
        let mut inside = self.sections[section].relocations.iter().filter(|r| within.contains(&r.offset));
        inside.any(|r| !absolute.contains(&elf::RelocationType(r.kind)))
    }

    /// Returns the function whose inner addresses a variable holds (labels of a computed `goto`): such a table belongs to one version of the
    /// function.
    pub(crate) fn label_holder(&self, variable: usize) -> Option<&'a str> {
        let symbol = &self.symbols[variable];
        let Home::Section(section) = symbol.home else { return None };
        let within = symbol.value..symbol.value.saturating_add(symbol.size);
        self.sections[section].relocations.iter().filter(|r| within.contains(&r.offset)).find_map(|reloc| {
            let Site::Inside { section: to, offset, .. } = self.site(reloc) else { return None };
            let code = self.sections[to].nature == Nature::Text;
            let owner = self.owner(to, offset).filter(|_| code)?;
            let entry = self.sections[to].symbols.iter().any(|s| self.symbols[*s].value as i64 == offset);
            (!entry).then(|| self.symbols[owner].name)
        })
    }

    /// Returns all functions that it defines, cold parts included.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (usize, &Symbol<'a>)> {
        self.symbols.iter().enumerate().filter(|(_, symbol)| {
            let Home::Section(home) = symbol.home else { return false };
            symbol.is_function() && self.sections[home].nature == Nature::Text && !symbol.name.starts_with(".L")
        })
    }

    /// Returns the defined symbol of that name, if any.
    pub(crate) fn defined(&self, name: &str) -> Option<(usize, &Symbol<'a>)> {
        self.by_name.get(name).map(|index| (*index, &self.symbols[*index]))
    }

    /// Returns the cold parts of the function called `name`.
    pub(crate) fn cold_parts(&self, name: &str) -> impl Iterator<Item = (usize, &Symbol<'a>)> {
        self.cold.get(name).into_iter().flatten().map(|index| (*index, &self.symbols[*index]))
    }

    /// Returns true if the linker keeps one of several objects' copies of a symbol's section.
    pub(crate) fn is_comdat(&self, symbol: usize) -> bool {
        matches!(self.symbols[symbol].home, Home::Section(section) if self.sections[section].comdat)
    }

    /// Returns the exception tables of the code in a section: the section and start of each.
    pub(crate) fn exception_tables(&self, section: usize) -> &[(usize, i64)] {
        self.tables.get(&section).map_or(&[], Vec::as_slice)
    }

    /// Returns all function symbols at the place of `function`: its aliases, and functions folded into it.
    pub(crate) fn same_place(&self, function: usize) -> impl Iterator<Item = &Symbol<'a>> {
        let place = (self.symbols[function].home, self.symbols[function].value);
        self.functions().map(|(_, s)| s).filter(move |s| (s.home, s.value) == place)
    }

    /// Returns the sections that hold a function: its own first, then those of its cold parts by name.
    pub(crate) fn parts(&self, function: usize) -> Option<Vec<usize>> {
        let home = |s: &Symbol<'_>| match s.home {
            Home::Section(section) => Some(section),
            _ => None,
        };
        let own = home(&self.symbols[function])?;
        let names = self.sections[own].symbols.iter().map(|s| self.symbols[*s].name);
        let mut cold: Vec<(&str, usize)> = names
            .flat_map(|name| self.cold_parts(name))
            .filter_map(|(_, s)| Some((s.name, home(s)?)))
            .filter(|(_, s)| *s != own)
            .collect();
        cold.sort_unstable();
        Some(std::iter::once(own).chain(cold.into_iter().map(|(_, section)| section)).collect())
    }

    /// Returns the end of the anonymous constant at `start`: the next place with a reference or a name.
    pub(crate) fn extent(&self, section: usize, start: i64) -> i64 {
        let size = i64::try_from(self.sections[section].size).unwrap_or(i64::MAX);
        let named = self.sections[section].symbols.iter().map(|s| self.symbols[*s].value as i64);
        let next = self.referenced.get(&section).into_iter().flatten().copied().chain(named).filter(|at| *at > start);
        next.min().unwrap_or(size).min(size)
    }

    /// Returns the literal at `at` of a merged section: up to its terminator, or one entry.
    pub(crate) fn literal(&self, section: usize, at: i64) -> Option<&'a [u8]> {
        let Section { bytes, nature: Nature::Merged { entry, strings }, .. } = self.sections[section] else {
            return None;
        };
        let (rest, width) = (bytes.get(usize::try_from(at).ok()?..)?, usize::try_from(entry).ok()?);
        if !strings {
            // a name may belong to half of a constant, and the bytes after a constant are another one in the target
            return rest.get(..width - usize::try_from(at).ok()?.checked_rem(width)?);
        }
        let end = rest.chunks_exact(width).position(|unit| unit.iter().all(|b| *b == 0))?;
        rest.get(..(end + 1) * width)
    }
}

fn empty_section<'a>() -> Section<'a> {
    let (relocations, symbols) = (Vec::new(), Vec::new());
    Section { name: "", nature: Nature::Aside, align: 1, size: 0, bytes: &[], relocations, symbols, comdat: false }
}

fn read_symbols<'a>(file: &ElfFile64<'a, Endianness>, sections: &[u64]) -> Result<Vec<Symbol<'a>>, String> {
    let (e, table) = (Endianness::Little, file.elf_symbol_table());
    let null = Symbol {
        name: "",
        home: Home::Undefined,
        value: 0,
        size: 0,
        kind: SymbolType::Other,
        local: true,
        weak: false,
    };
    let mut out = vec![null];
    for (index, symbol) in table.enumerate().filter(|(index, _)| index.0 > 0) {
        let name = Sym::name(symbol, e, table.strings()).map_err(|e| e.to_string())?;
        let name = std::str::from_utf8(name).map_err(|_| "a symbol name is not UTF-8".to_owned())?;
        let home = match symbol.st_shndx(e) {
            elf::SHN_UNDEF => Home::Undefined,
            elf::SHN_ABS => Home::Absolute,
            elf::SHN_COMMON => Home::Common,
            _ => match table.symbol_section(e, symbol, index).map_err(|e| e.to_string())? {
                Some(s) if sections.get(s.0).is_some_and(|size| symbol.st_value(e) <= *size) => Home::Section(s.0),
                _ => return Err(format!("symbol `{name}` is in a section that does not exist, or past its end")),
            },
        };
        let kind = match symbol.st_type() {
            elf::STT_FUNC => SymbolType::Function,
            elf::STT_GNU_IFUNC => SymbolType::Indirect,
            elf::STT_OBJECT | elf::STT_COMMON => SymbolType::Object,
            elf::STT_TLS => SymbolType::Tls,
            elf::STT_SECTION => SymbolType::Section,
            _ => SymbolType::Other,
        };
        let (local, weak) = (symbol.st_bind() == elf::STB_LOCAL, symbol.st_bind() == elf::STB_WEAK);
        out.push(Symbol { name, home, value: symbol.st_value(e), size: symbol.st_size(e), kind, local, weak });
    }
    Ok(out)
}

/// Sets for each relocation the end of its instruction and the use of the value. A place outside of every decoded
/// instruction (data in text) counts from itself.
fn mark_instructions(code: &[u8], relocations: &mut [Reloc]) {
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut rest = relocations.iter_mut().peekable();
    while decoder.can_decode() && rest.peek().is_some() {
        decoder.decode_out(&mut instruction);
        let end = instruction.next_ip();
        while let Some(reloc) = rest.next_if(|r| r.offset < end) {
            if reloc.offset >= instruction.ip() && !instruction.is_invalid() {
                reloc.origin = (end - reloc.offset) as i64;
                reloc.usage = usage(&instruction);
            }
        }
    }
}

fn usage(instruction: &Instruction) -> Usage {
    let direct = instruction.is_jcc_short_or_near() || instruction.is_jmp_short_or_near() || instruction.is_call_near();
    match instruction.mnemonic() {
        _ if direct && instruction.flow_control() != FlowControl::Next => Usage::Branch,
        Mnemonic::Lea => Usage::Address,
        _ => Usage::Other,
    }
}

/// Returns the name of a relocation type as in the psABI.
pub(crate) fn relocation_name(kind: u32) -> String {
    let known = elf::machine_names(elf::EM_X86_64).r.name(elf::RelocationType(kind));
    known.map_or_else(|| format!("of type {kind}"), ToOwned::to_owned)
}
