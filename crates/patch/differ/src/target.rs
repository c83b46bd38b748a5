//! The ELF file to be patched, parsed once.

use crate::Refusal;
use gimli::{BaseAddresses, CieOrFde, EhFrame, LittleEndian, UnwindSection};
use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};
use object::elf;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader, Sym};
use object::{Endianness, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationFlags, RelocationTarget};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use stillpoint_patch_format::{BuildId, Range, ResolvedBy, Target, TargetKind};

/// Size limit of a target, in bytes: addresses of code and data stay within the range of 32-bit displacements.
const SIZE_MAX: u64 = 2 << 30;

/// Upper bound of user-space addresses.
const ADDRESS_MAX: u64 = 1 << 47;

/// An entry of the target's own symbol tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TargetSymbol {
    pub(crate) at: u64,
    pub(crate) how: ResolvedBy,
    pub(crate) tls: bool,
    pub(crate) global: bool,
}

/// Value that the dynamic linker writes at an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Dynamic {
    /// The address of a name (`GLOB_DAT`, `JUMP_SLOT`, `64`).
    Name(String),
    /// An address within the file.
    Relative(u64),
    /// The result of an indirect function.
    Indirect,
    /// The offset of a thread-local from the thread pointer: another module's by name, or this module's by offset.
    TlsName(String),
    TlsOffset(u64),
    /// The module of a `tls_index`, without a name: this one.
    TlsModule,
    /// A TLS descriptor: of a name, or of an offset in this module's segment.
    TlsDescriptor(Option<String>, u64),
    /// A value that no code of the target uses.
    Other,
}

#[derive(Debug, Clone)]
struct Load {
    start: u64,
    size: u64,
    bytes: Vec<u8>,
    executable: bool,
}

/// The `PT_TLS` segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tls {
    pub(crate) size: u64,
    pub(crate) align: u64,
}

impl Tls {
    /// Returns the distance from the start of the segment to the thread pointer.
    pub(crate) fn span(self) -> u64 {
        self.size.next_multiple_of(self.align.max(1))
    }
}

/// The ELF file to be patched, parsed once: text, symbols, unwind ranges, PLT and GOT, thread-locals, identity.
#[derive(Debug, Clone)]
pub struct TargetElf {
    identity: Target,
    loads: Vec<Load>,
    /// Length of every range that `.eh_frame` describes, by its start.
    pub(crate) frames: BTreeMap<u64, u64>,
    pub(crate) symbols: HashMap<String, Vec<TargetSymbol>>,
    pub(crate) dynamic: BTreeMap<u64, Dynamic>,
    /// Copy-relocated address of a name.
    pub(crate) copies: HashMap<String, u64>,
    /// GOT slot of a PLT stub, by the stub's start.
    pub(crate) stubs: BTreeMap<u64, u64>,
    pub(crate) tls: Option<Tls>,
    /// Sources of direct jumps into the first bytes of a function, after its first byte; by their destination.
    inner_branches: BTreeMap<u64, u64>,
}

type File<'a> = ElfFile64<'a, Endianness>;
const ENDIAN: Endianness = Endianness::Little;

fn bad<T>(why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::BadTarget(why.into()))
}

impl TargetElf {
    /// Parses an executable or shared library. `file_name` is for messages and [`Target::file_name`]. Never panics, for
    /// any input.
    ///
    /// # Errors
    /// [`Refusal::BadTarget`] if it is not a dynamic x86-64 ELF file, or if it is damaged.
    pub fn parse(bytes: &[u8], file_name: &str) -> Result<Self, Refusal> {
        let text = |e: object::Error| Refusal::BadTarget(format!("{file_name}: {e}"));
        let file = File::parse(bytes).map_err(text)?;
        let header = file.elf_header();
        if file.endianness() != ENDIAN || header.e_machine(ENDIAN) != elf::EM_X86_64 {
            return bad(format!("{file_name} is not an x86-64 ELF file"));
        }
        let loads = read_loads(&file, bytes)?;
        let build_id = BuildId(file.build_id().map_err(text)?.unwrap_or_default().to_vec());
        let mut digest = Sha256::new();
        loads.iter().filter(|load| load.executable).for_each(|load| digest.update(&load.bytes));
        let kind = kind(&file, file_name)?;
        let identity =
            Target { build_id, text_sha256: digest.finalize().into(), file_name: file_name.to_owned(), kind };
        let mut target = TargetElf {
            identity,
            frames: read_frames(&file),
            symbols: HashMap::new(),
            dynamic: BTreeMap::new(),
            copies: HashMap::new(),
            stubs: BTreeMap::new(),
            tls: read_tls(&file)?,
            inner_branches: BTreeMap::new(),
            loads,
        };
        target.read_symbols(&file);
        target.read_dynamic(&file);
        target.read_stubs(&file);
        target.read_branches();
        Ok(target)
    }

    /// Returns the identity that a patch binds to.
    pub fn identity(&self) -> &Target {
        &self.identity
    }

    /// Returns bytes of the file; `None` when not all of them are in one segment of the file.
    pub(crate) fn bytes(&self, at: u64, len: u64) -> Option<&[u8]> {
        let load = self.loads.iter().find(|l| l.start <= at && at - l.start < l.size)?;
        let start = usize::try_from(at - load.start).ok()?;
        load.bytes.get(start..start.checked_add(usize::try_from(len).ok()?)?)
    }

    /// Returns initial bytes of data: those of the file, and zeros where a segment has more memory than bytes in the file.
    pub(crate) fn initial_bytes(&self, at: u64, len: u64) -> Option<Vec<u8>> {
        let load = self.loads.iter().find(|l| l.start <= at && at - l.start < l.size && !l.executable)?;
        let (start, end) = (at - load.start, (at - load.start).checked_add(len).filter(|end| *end <= load.size)?);
        let present = load.bytes.len() as u64;
        let mut bytes = load.bytes[start.min(present) as usize..end.min(present) as usize].to_vec();
        bytes.resize(usize::try_from(len).ok()?, 0);
        Some(bytes)
    }

    /// Returns the address of a pointer in data outside of `place` that points into it. In a file without addresses of its own, the dynamic
    /// linker's list names all pointers.
    pub(crate) fn pointer_into(&self, place: Range) -> Option<u64> {
        let inside = |at: &u64| (place.start.0..place.start.0 + place.len).contains(at);
        let listed =
            self.dynamic.iter().find(|(at, d)| matches!(d, Dynamic::Relative(to) if inside(to)) && !inside(at));
        if listed.is_some() || self.identity.kind != TargetKind::Executable {
            return listed.map(|(at, _)| *at);
        }
        self.loads.iter().filter(|load| !load.executable).find_map(|load| {
            let words = load.bytes.chunks_exact(8).enumerate();
            let mut words =
                words.map(|(i, word)| (load.start + 8 * i as u64, word.try_into().map_or(0, u64::from_le_bytes)));
            words.find(|(at, to)| inside(to) && !inside(at)).map(|(at, _)| at)
        })
    }

    /// Returns the ranges of code with an instruction that names a byte of `place`, or a byte shortly before it: compilers name the place
    /// before the first element of an array too.
    pub(crate) fn code_that_names(&self, place: Range) -> Vec<(u64, u64)> {
        const BEFORE: u64 = 8;
        let named = place.start.0.saturating_sub(BEFORE)..place.start.0 + place.len;
        // elsewhere an address of 32 bits is an offset in a structure
        let absolute = self.identity.kind == TargetKind::Executable;
        let mut found = Vec::new();
        let mut covered = 0;
        for (&start, &len) in &self.frames {
            let Some(code) = self.bytes(start, len).filter(|_| start >= covered) else { continue };
            covered = start + len;
            let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
            let mut instruction = Instruction::default();
            while decoder.can_decode() {
                decoder.decode_out(&mut instruction);
                let names = (0..instruction.op_count()).any(|i| match instruction.op_kind(i) {
                    OpKind::Memory => {
                        let whole = absolute || instruction.memory_base() == Register::RIP;
                        whole && named.contains(&instruction.memory_displacement64())
                    }
                    OpKind::Immediate32 | OpKind::Immediate64 | OpKind::Immediate32to64 => {
                        absolute && named.contains(&instruction.immediate(i))
                    }
                    _ => false,
                });
                if names {
                    found.push((start, len));
                    break;
                }
            }
        }
        found
    }

    pub(crate) fn i32_at(&self, at: u64) -> Option<i32> {
        Some(i32::from_le_bytes(self.bytes(at, 4)?.try_into().ok()?))
    }

    /// Returns the pointer at `at` after relocation, if it points into the file.
    pub(crate) fn pointer_at(&self, at: u64) -> Option<u64> {
        match self.dynamic.get(&at) {
            Some(Dynamic::Relative(value)) => Some(*value),
            Some(Dynamic::Name(name)) => self.symbols.get(name)?.first().map(|s| s.at),
            Some(_) => None,
            None => Some(u64::from_le_bytes(self.bytes(at, 8)?.try_into().ok()?)),
        }
    }

    pub(crate) fn is_text(&self, at: u64) -> bool {
        self.loads.iter().any(|l| l.executable && l.start <= at && at - l.start < l.bytes.len() as u64)
    }

    /// Returns a direct jump from other text to one of the bytes after `entry` that a jump there would overwrite.
    pub(crate) fn branch_into(&self, entry: u64) -> Option<(u64, u64)> {
        let end = entry.checked_add(5)?;
        self.inner_branches.range(entry + 1..end).next().map(|(to, from)| (*from, *to))
    }

    /// Returns the name of the function that the stub at `at` calls, if the dynamic linker resolves it by name.
    pub(crate) fn stub_name(&self, at: u64) -> Option<&str> {
        match self.dynamic.get(self.stubs.get(&at)?)? {
            Dynamic::Name(name) => Some(name),
            _ => None,
        }
    }

    /// Returns the PLT stub of an imported function.
    pub(crate) fn stub_of(&self, name: &str) -> Option<u64> {
        self.stubs.keys().copied().find(|at| self.stub_name(*at) == Some(name))
    }

    /// Returns a GOT slot that holds the address of `name`.
    pub(crate) fn slot_of(&self, name: &str) -> Option<u64> {
        self.dynamic.iter().find(|(_, d)| matches!(d, Dynamic::Name(n) if n == name)).map(|(at, _)| *at)
    }

    /// Returns a GOT slot that holds the thread pointer's distance to another module's thread-local.
    pub(crate) fn tls_slot_of(&self, name: &str) -> Option<u64> {
        self.dynamic.iter().find(|(_, d)| matches!(d, Dynamic::TlsName(n) if n == name)).map(|(at, _)| *at)
    }

    /// Returns the module's own `tls_index`: the one with offset zero that no relocation fills in.
    pub(crate) fn module_index(&self) -> Option<u64> {
        let module = |at: &u64| {
            let offset = at.wrapping_add(8);
            let zero = self.bytes(offset, 8).is_some_and(|b| b.iter().all(|b| *b == 0));
            zero && !self.dynamic.contains_key(&offset)
        };
        let modules = self.dynamic.iter().filter(|(_, d)| **d == Dynamic::TlsModule).map(|(at, _)| *at);
        modules.into_iter().find(module)
    }

    /// Returns the TLS descriptor of a name.
    pub(crate) fn tls_descriptor_of(&self, name: &str) -> Option<u64> {
        let of_name = |d: &Dynamic| matches!(d, Dynamic::TlsDescriptor(Some(n), 0) if n == name);
        self.dynamic.iter().find(|(_, d)| of_name(d)).map(|(at, _)| *at)
    }

    /// Returns the TLS descriptor of a byte of the module's own segment; that of the first byte represents the segment.
    pub(crate) fn tls_descriptor_at(&self, offset: u64) -> Option<u64> {
        self.dynamic.iter().find(|(_, d)| **d == Dynamic::TlsDescriptor(None, offset)).map(|(at, _)| *at)
    }

    fn read_symbols(&mut self, file: &File<'_>) {
        let tables = [
            (file.symbols().collect::<Vec<_>>(), ResolvedBy::Symtab),
            (file.dynamic_symbols().collect::<Vec<_>>(), ResolvedBy::Dynsym),
        ];
        for (symbols, how) in tables {
            for symbol in symbols {
                let raw = symbol.elf_symbol();
                let kind = raw.st_type();
                let named = [elf::STT_FUNC, elf::STT_OBJECT, elf::STT_NOTYPE, elf::STT_TLS, elf::STT_GNU_IFUNC];
                let Ok(name) = symbol.name() else { continue };
                if named.contains(&kind)
                    && symbol.is_definition()
                    && !name.is_empty()
                    && raw.st_shndx(ENDIAN) != elf::SHN_ABS
                {
                    let tls = kind == elf::STT_TLS;
                    let entry = TargetSymbol { at: symbol.address(), how, tls, global: symbol.is_global() };
                    self.symbols.entry(name.to_owned()).or_default().push(entry);
                }
            }
        }
    }

    fn read_dynamic(&mut self, file: &File<'_>) {
        for (at, reloc) in file.dynamic_relocations().into_iter().flatten() {
            let RelocationFlags::Elf { r_type } = reloc.flags() else { continue };
            let name = match reloc.target() {
                RelocationTarget::Symbol(index) => file
                    .dynamic_symbol_table()
                    .and_then(|t| object::ObjectSymbolTable::symbol_by_index(&t, index).ok())
                    .and_then(|s| s.name().ok().map(str::to_owned))
                    .filter(|n| !n.is_empty()),
                _ => None,
            };
            let addend = reloc.addend();
            let value = match (r_type, name) {
                (elf::R_X86_64_RELATIVE, _) => Dynamic::Relative(addend as u64),
                (elf::R_X86_64_IRELATIVE, _) => Dynamic::Indirect,
                (elf::R_X86_64_COPY, Some(name)) => {
                    self.copies.insert(name, at);
                    continue;
                }
                (elf::R_X86_64_GLOB_DAT | elf::R_X86_64_JUMP_SLOT, Some(name)) => Dynamic::Name(name),
                (elf::R_X86_64_64, Some(name)) if addend == 0 => Dynamic::Name(name),
                (elf::R_X86_64_TPOFF64, Some(name)) => Dynamic::TlsName(name),
                (elf::R_X86_64_TPOFF64, None) => Dynamic::TlsOffset(addend as u64),
                (elf::R_X86_64_DTPMOD64, None) => Dynamic::TlsModule,
                (elf::R_X86_64_TLSDESC, name) => Dynamic::TlsDescriptor(name, addend as u64),
                _ => Dynamic::Other,
            };
            self.dynamic.insert(at, value);
        }
    }

    /// Reads PLT stubs: the code before an indirect jump through a slot that the dynamic linker fills.
    fn read_stubs(&mut self, file: &File<'_>) {
        for section in file.sections() {
            let Ok(name) = section.name() else { continue };
            if !(name == ".plt" || name.starts_with(".plt.") || name == ".iplt") {
                continue;
            }
            let Ok(code) = section.data() else { continue };
            let mut decoder = Decoder::with_ip(64, code, section.address(), DecoderOptions::NONE);
            let mut instruction = Instruction::default();
            let mut landing = None;
            while decoder.can_decode() {
                decoder.decode_out(&mut instruction);
                if instruction.code() == Code::Endbr64 {
                    landing = Some(instruction.ip());
                    continue;
                }
                if let Some(slot) = indirect_jump_slot(&instruction).filter(|slot| self.dynamic.contains_key(slot)) {
                    self.stubs.insert(landing.unwrap_or(instruction.ip()), slot);
                }
                landing = None;
            }
        }
    }

    fn read_branches(&mut self) {
        let mut found = BTreeMap::new();
        let mut covered = 0;
        for (&start, &len) in &self.frames {
            // Overlapping ranges are damage; decoding each once bounds the work by the size of the file.
            let Some(code) = self.bytes(start, len).filter(|_| start >= covered) else { continue };
            covered = start + len;
            let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
            let mut instruction = Instruction::default();
            while decoder.can_decode() {
                decoder.decode_out(&mut instruction);
                let jumps = matches!(
                    instruction.flow_control(),
                    FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch | FlowControl::Call
                );
                let to = if jumps { instruction.near_branch_target() } else { 0 };
                if to == 0 {
                    continue;
                }
                if let Some((&entry, _)) = self.frames.range(..=to).next_back()
                    && to > entry
                    && to - entry < 5
                {
                    found.insert(to, instruction.ip());
                }
            }
        }
        self.inner_branches = found;
    }
}

fn indirect_jump_slot(instruction: &Instruction) -> Option<u64> {
    let indirect = instruction.code() == Code::Jmp_rm64
        && instruction.op0_kind() == OpKind::Memory
        && instruction.memory_base() == Register::RIP;
    indirect.then(|| instruction.ip_rel_memory_address())
}

fn read_loads(file: &File<'_>, bytes: &[u8]) -> Result<Vec<Load>, Refusal> {
    let mut loads = Vec::new();
    for segment in file.elf_program_headers().iter().filter(|s| s.p_type(ENDIAN) == elf::PT_LOAD) {
        let data = segment.data(ENDIAN, bytes).map_err(|()| Refusal::BadTarget("truncated segment".to_owned()))?;
        let (start, size) = (segment.p_vaddr(ENDIAN), segment.p_memsz(ENDIAN));
        if size > SIZE_MAX || start > ADDRESS_MAX || data.len() as u64 > size {
            return bad(format!("segment of {size} bytes at {start:#x}"));
        }
        let flags = segment.p_flags(ENDIAN);
        let executable = flags.0 & elf::PF_X.0 != 0;
        loads.push(Load { start, size, bytes: data.to_vec(), executable });
    }
    if !loads.iter().any(|load| load.executable) {
        return bad("no executable segment");
    }
    Ok(loads)
}

fn kind(file: &File<'_>, name: &str) -> Result<TargetKind, Refusal> {
    let segment = |kind| file.elf_program_headers().iter().any(|s| s.p_type(ENDIAN) == kind);
    let (interpreted, dynamic) = (segment(elf::PT_INTERP), segment(elf::PT_DYNAMIC));
    match file.elf_header().e_type(ENDIAN) {
        elf::ET_EXEC if !interpreted => bad(format!("{name} is statically linked")),
        elf::ET_EXEC => Ok(TargetKind::Executable),
        elf::ET_DYN if !dynamic => bad(format!("{name} has no dynamic section")),
        elf::ET_DYN if interpreted && !has_soname(file) => Ok(TargetKind::PieExecutable),
        elf::ET_DYN if dynamic_flag(file, elf::DT_FLAGS_1) & elf::DF_1_PIE.0 != 0 && !interpreted => {
            bad(format!("{name} is statically linked (static PIE)"))
        }
        elf::ET_DYN => Ok(TargetKind::SharedLibrary),
        other => bad(format!("{name} has ELF type {}", other.0)),
    }
}

fn dynamic_entries(file: &File<'_>) -> Vec<(elf::DynamicTag, u64)> {
    let table = file.elf_dynamic_table();
    table.map(|t| t.iter().map(|d| (d.tag, d.val)).collect()).unwrap_or_default()
}

fn dynamic_flag(file: &File<'_>, tag: elf::DynamicTag) -> u64 {
    dynamic_entries(file).iter().find(|(t, _)| *t == tag).map_or(0, |(_, v)| *v)
}

fn has_soname(file: &File<'_>) -> bool {
    dynamic_entries(file).iter().any(|(t, _)| *t == elf::DT_SONAME)
}

fn read_frames(file: &File<'_>) -> BTreeMap<u64, u64> {
    let mut out = BTreeMap::new();
    let Some(section) = file.section_by_name(".eh_frame") else { return out };
    let Ok(data) = section.data() else { return out };
    let frames = EhFrame::new(data, LittleEndian);
    let mut bases = BaseAddresses::default().set_eh_frame(section.address());
    if let Some(text) = file.section_by_name(".text") {
        bases = bases.set_text(text.address());
    }
    let mut entries = frames.entries(&bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else { continue };
        if let Ok(fde) = partial.parse(EhFrame::cie_from_offset)
            && fde.len() > 0
            && fde.initial_address().checked_add(fde.len()).is_some()
        {
            out.insert(fde.initial_address(), fde.len());
        }
    }
    out
}

fn read_tls(file: &File<'_>) -> Result<Option<Tls>, Refusal> {
    let Some(segment) = file.elf_program_headers().iter().find(|s| s.p_type(ENDIAN) == elf::PT_TLS) else {
        return Ok(None);
    };
    let (size, align) = (segment.p_memsz(ENDIAN), segment.p_align(ENDIAN).max(1));
    if size > SIZE_MAX || align > SIZE_MAX || !align.is_power_of_two() {
        return bad(format!("thread-local segment of {size} bytes aligned to {align}"));
    }
    Ok(Some(Tls { size, align }))
}
