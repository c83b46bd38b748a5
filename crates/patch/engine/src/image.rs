//! ELF files as they are mapped in a process: program headers, dynamic symbols, relocations. All is read from mapped memory, so a file that
//! was deleted or replaced on disk makes no difference.

use crate::Error;
use crate::ledger::Span;
use object::elf;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Memory, Module, Process, Segment, segments};
use stillpoint_patch_unwind::Section;

const TABLE_MAX: u64 = 64 << 20;
/// Limit of program headers of a module.
const HEADERS_MAX: usize = 256;
const CHAIN_MAX: u32 = 1 << 16;
/// Limit of the name of a symbol in bytes.
const NAME_MAX: usize = 4096;

/// A thread-local segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TlsSegment {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) align: u64,
}

/// A symbol found in a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) address: Avma,
    /// True if a resolver function returns its address.
    pub(crate) ifunc: bool,
    /// True if it is code.
    pub(crate) function: bool,
    /// True if it is a thread-local: `address` minus the bias is its offset in the module's segment.
    pub(crate) thread_local: bool,
    /// Length in bytes as its module states it.
    pub(crate) len: u64,
}

/// The dynamic section of one module.
pub(crate) struct Dynamic<'a> {
    memory: &'a Memory,
    bias: u64,
    tags: BTreeMap<u64, u64>,
    hash_table: OnceCell<Option<HashTable<'a>>>,
}

/// Table by which the loader finds a symbol of a module. Most names that are searched for are defined by none of many modules: the filter and
/// the buckets of a module are read once for all names.
struct HashTable<'a> {
    bloom_words: u32,
    bloom_shift: u32,
    buckets: u32,
    first_symbol: u32,
    /// The filter, then the buckets.
    words: Section<'a>,
    chains: Avma,
}

impl<'a> HashTable<'a> {
    const HEADER_LEN: u64 = 16;

    fn read(memory: &'a Memory, at: Avma) -> Option<Self> {
        let header = memory.read_vec(at, Self::HEADER_LEN as usize).ok()?;
        let (buckets, bloom_words) = (u32_of(&header, 0), u32_of(&header, 8));
        let len = u64::from(bloom_words) * 8 + u64::from(buckets) * 4;
        if buckets == 0 || len > TABLE_MAX {
            return None;
        }
        let words = Avma(at.0.wrapping_add(Self::HEADER_LEN));
        Some(HashTable {
            bloom_words,
            bloom_shift: u32_of(&header, 12),
            buckets,
            first_symbol: u32_of(&header, 4),
            words: section(memory, Span::new(words, len)),
            chains: Avma(words.0.wrapping_add(len)),
        })
    }

    /// Returns false if no symbol has this hash.
    fn may_have(&self, hash: u32) -> bool {
        let bit_of = |bit: u32| {
            let word = hash / 64 % self.bloom_words;
            let half = self.words.word((word * 8 + bit % 64 / 32 * 4) as usize);
            half.is_none_or(|half| half >> (bit % 32) & 1 != 0)
        };
        self.bloom_words == 0 || bit_of(hash) && bit_of(hash.checked_shr(self.bloom_shift).unwrap_or(0))
    }

    /// Returns the first symbol of the bucket of a hash.
    fn bucket(&self, hash: u32) -> Option<u32> {
        let start = self.words.word(self.bloom_words as usize * 8 + (hash % self.buckets) as usize * 4)?;
        (start >= self.first_symbol).then_some(start)
    }
}

fn u16_of(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_le_bytes)
}

fn u32_of(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_of(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Returns the program headers of a module, none if there are too many.
fn program_headers(memory: &Memory, module: &Module) -> Result<Vec<Segment>, Error> {
    let Some(first) = module.mappings.iter().find(|m| m.offset == 0) else { return Ok(Vec::new()) };
    let headers = segments(memory, first.start)?;
    Ok(if headers.len() > HEADERS_MAX { Vec::new() } else { headers })
}

/// Returns the thread-local segment of a module.
pub(crate) fn tls_segment(memory: &Memory, module: &Module) -> Result<Option<TlsSegment>, Error> {
    let headers = program_headers(memory, module)?;
    let tls = headers.iter().find(|h| h.kind == elf::PT_TLS.0);
    Ok(tls.map(|h| TlsSegment { address: h.address, len: h.len, align: h.align.max(1) }))
}

/// Returns the offset from the thread pointer of the first byte of the *executable's* thread-local segment (psABI, variant II).
pub(crate) fn executable_tls_offset(tls: TlsSegment) -> i64 {
    let len = tls.len.wrapping_add(tls.address & (tls.align - 1)).next_multiple_of(tls.align);
    (tls.address & (tls.align - 1)) as i64 - len as i64
}

/// Returns the offset from the thread pointer of the first byte of a module's thread-local segment, if it is the same in every thread. It
/// is read from the loader's list, by means of the symbols that glibc exports for debuggers.
pub(crate) fn static_tls_offset(process: &Process, modules: &[Module], module: &Module) -> Result<Option<i64>, Error> {
    const OFFSET_MAX: u64 = 1 << 24;
    let memory = process.memory();
    for candidate in modules {
        let Some(dynamic) = Dynamic::of(memory, candidate)? else { continue };
        let Some(found) = dynamic.find("_thread_db_link_map_l_tls_offset", None) else { continue };
        // number of bits of the field, number of fields, offset of the field
        let field = memory.read_vec(found.address, 12)?;
        let (bits, at) = (u32_of(&field, 0), u32_of(&field, 8));
        let Some(map) = link_map(process, modules, module).filter(|_| bits == 64 && at < 1 << 16) else { break };
        let offset = memory.read_u64(Avma(map.0 + u64::from(at)))?;
        // 0: none was assigned; all ones: none ever will be
        return Ok((1..OFFSET_MAX).contains(&offset).then(|| -(offset as i64)));
    }
    Ok(None)
}

/// Returns the executable segments of a module, in memory.
pub(crate) fn text_segments(memory: &Memory, module: &Module) -> Result<Vec<Span>, Error> {
    let headers = program_headers(memory, module)?;
    let text = headers.iter().filter(|h| h.kind == elf::PT_LOAD.0 && h.flags & 1 != 0);
    Ok(text.map(|h| Span::new(Avma(h.address.wrapping_add(module.bias)), h.file_len)).collect())
}

/// Returns the locations of `.eh_frame_hdr` and `.eh_frame`; the latter ends with its terminator, at the latest with the mapping.
pub(crate) fn unwind_sections(memory: &Memory, module: &Module) -> Result<Option<(Span, Span)>, Error> {
    let headers = program_headers(memory, module)?;
    let Some(hdr) = headers.iter().find(|h| h.kind == elf::PT_GNU_EH_FRAME.0) else { return Ok(None) };
    let at = Avma(hdr.address.wrapping_add(module.bias));
    let bytes = memory.read_vec(at, 8)?;
    // version 1, eh_frame_ptr as pcrel sdata4: the form that every x86-64 linker writes
    if bytes[0] != 1 || bytes[1] != 0x1b {
        return Ok(None);
    }
    let start = Avma((at.0 + 4).wrapping_add_signed(i64::from(u32_of(&bytes, 4) as i32)));
    let rest = |at: Avma| module.mappings.iter().find(|m| m.contains(at)).map(|m| m.end.0 - at.0);
    let hdr_len = rest(at).map_or(0, |rest| rest.min(hdr.len));
    Ok(rest(start).map(|len| (Span::new(at, hdr_len), Span::new(start, len))))
}

impl<'a> Dynamic<'a> {
    pub(crate) fn of(memory: &'a Memory, module: &Module) -> Result<Option<Self>, Error> {
        let Some(at) = module.dynamic else { return Ok(None) };
        let mut bytes = vec![0; 1024];
        let len = memory.read_some(at, &mut bytes);
        let entries = bytes[..len].chunks_exact(16).map(|e| (u64_of(e, 0), u64_of(e, 8)));
        let tags = entries.take_while(|(tag, _)| *tag != 0).collect();
        Ok(Some(Dynamic { memory, bias: module.bias, tags, hash_table: OnceCell::new() }))
    }

    fn value(&self, tag: elf::DynamicTag) -> Option<u64> {
        self.tags.get(&(tag.0 as u64)).copied()
    }

    /// Returns an address of the dynamic section: the loader adds the bias in place, except if the section is read-only.
    fn address(&self, tag: elf::DynamicTag) -> Option<Avma> {
        let value = self.value(tag)?;
        Some(Avma(if value < self.bias { value + self.bias } else { value }))
    }

    fn string(&self, offset: u64) -> Option<Vec<u8>> {
        let at = self.address(elf::DT_STRTAB)?;
        self.memory.read_c_string(Avma(at.0.wrapping_add(offset)), NAME_MAX).ok()
    }

    fn symbol(&self, index: u32) -> Option<Vec<u8>> {
        let at = self.address(elf::DT_SYMTAB)?;
        self.memory.read_vec(Avma(at.0 + u64::from(index) * 24), 24).ok()
    }

    /// Returns a symbol that this module defines, of this version; without a version the default one.
    pub(crate) fn find(&self, name: &str, version: Option<&str>) -> Option<Found> {
        let table = || HashTable::read(self.memory, self.address(elf::DT_GNU_HASH)?);
        let table = self.hash_table.get_or_init(table).as_ref()?;
        let hash = elf::gnu_hash(name.as_bytes());
        if !table.may_have(hash) {
            return None;
        }
        let start = table.bucket(hash)?;
        for index in start..start.saturating_add(CHAIN_MAX) {
            let entry = table.chains.0.wrapping_add(u64::from(index - table.first_symbol) * 4);
            let entry = self.memory.read_vec(Avma(entry), 4).ok()?;
            let entry = u32_of(&entry, 0);
            if entry | 1 == hash | 1
                && let Some(found) = self.matches(index, name, version)
            {
                return Some(found);
            }
            if entry & 1 != 0 {
                return None;
            }
        }
        None
    }

    fn matches(&self, index: u32, name: &str, version: Option<&str>) -> Option<Found> {
        let symbol = self.symbol(index)?;
        let (kind, section) = (symbol[4] & 15, u16_of(&symbol, 6));
        if section == 0 || self.string(u64::from(u32_of(&symbol, 0)))? != name.as_bytes() {
            return None;
        }
        if let Some(versions) = self.address(elf::DT_VERSYM) {
            let raw = u16_of(&self.memory.read_vec(Avma(versions.0 + u64::from(index) * 2), 2).ok()?, 0);
            match version {
                None if raw & 0x8000 != 0 => return None,
                // an unversioned definition satisfies every reference, as in the loader
                Some(wanted) if raw & 0x7fff > 1 && self.version_name(raw & 0x7fff)? != wanted.as_bytes() => {
                    return None;
                }
                _ => {}
            }
        }
        let value = u64_of(&symbol, 8);
        Some(Found {
            address: Avma(value.wrapping_add(self.bias)),
            ifunc: kind == 10,
            function: matches!(kind, 2 | 10),
            thread_local: kind == 6,
            len: u64_of(&symbol, 16),
        })
    }

    fn version_name(&self, wanted: u16) -> Option<Vec<u8>> {
        let mut at = self.address(elf::DT_VERDEF)?;
        for _ in 0..self.value(elf::DT_VERDEFNUM)?.min(4096) {
            let definition = self.memory.read_vec(at, 20).ok()?;
            if u16_of(&definition, 4) == wanted {
                let aux = Avma(at.0 + u64::from(u32_of(&definition, 12)));
                return self.string(u64::from(u32_of(&self.memory.read_vec(aux, 4).ok()?, 0)));
            }
            at = Avma(at.0 + u64::from(u32_of(&definition, 16)));
        }
        None
    }

    /// Returns the slots that the loader binds to names: address of the slot and name.
    pub(crate) fn bound_slots(&self, mut wanted: impl FnMut(&[u8]) -> bool) -> Vec<(Avma, Vec<u8>)> {
        let bound = |rela: &&[u8]| [elf::R_X86_64_JUMP_SLOT.0, elf::R_X86_64_GLOB_DAT.0].contains(&u32_of(rela, 8));
        let slot = |rela: &[u8]| (Avma(u64_of(rela, 0).wrapping_add(self.bias)), u32_of(rela, 12));
        let tables = self.relocations();
        let slots: Vec<(Avma, u32)> =
            tables.iter().flat_map(|table| table.chunks_exact(24).filter(bound).map(slot)).collect();
        let last = slots.iter().map(|(_, symbol)| *symbol).max();
        let (Some(last), Some(at)) = (last, self.address(elf::DT_SYMTAB)) else { return Vec::new() };
        // imported symbols are at the beginning of the module's table; names are located throughout it
        let symbols = section(self.memory, Span::new(at, (u64::from(last) + 1) * 24));
        let len = self.value(elf::DT_STRSZ).unwrap_or(0).min(TABLE_MAX);
        let Some(strings) = self.address(elf::DT_STRTAB) else { return Vec::new() };
        let strings = section(self.memory, Span::new(strings, len));
        let name = |symbol: u32| strings.c_string(symbols.word(symbol as usize * 24)? as usize, NAME_MAX);
        let named = slots.into_iter().filter_map(|(slot, symbol)| Some((slot, name(symbol)?)));
        named.filter(|(_, name)| wanted(name)).collect()
    }

    /// Returns the function that the module itself has bound to the indirect function whose resolver is at `resolver`.
    pub(crate) fn bound_within(&self, resolver: Avma) -> Option<Avma> {
        let tables = self.relocations();
        let slot = tables.iter().flat_map(|table| table.chunks_exact(24)).find(|rela| {
            u32_of(rela, 8) == elf::R_X86_64_IRELATIVE.0 && u64_of(rela, 16).wrapping_add(self.bias) == resolver.0
        });
        self.memory.read_u64(Avma(u64_of(slot?, 0).wrapping_add(self.bias))).ok().map(Avma)
    }

    /// Returns the module's tables of relocations, without those that only add the bias. The latter come first, their number is stated, and
    /// they take megabytes in a large program.
    fn relocations(&self) -> Vec<Vec<u8>> {
        let plain = self.value(elf::DT_RELACOUNT).unwrap_or(0).saturating_mul(24);
        let tables = [(elf::DT_JMPREL, elf::DT_PLTRELSZ, 0), (elf::DT_RELA, elf::DT_RELASZ, plain)];
        let read = |(table, size, skipped): (elf::DynamicTag, elf::DynamicTag, u64)| {
            let len = self.value(size)?.min(TABLE_MAX).checked_sub(skipped)?;
            self.memory.read_vec(Avma(self.address(table)?.0.wrapping_add(skipped)), len as usize).ok()
        };
        tables.into_iter().filter_map(read).collect()
    }
}

/// Returns bytes of a process; each page of them is read at first use.
pub(crate) fn section(memory: &Memory, span: Span) -> Section<'_> {
    Section::new(span.start.0, span.len as usize, |at, buf| memory.read_some(Avma(at), buf))
}

/// Returns the loader's list of modules, in its search order: link map and dynamic section.
fn link_maps(process: &Process, modules: &[Module]) -> Vec<(Avma, Avma)> {
    let memory = process.memory();
    let chain = || -> Option<Vec<(Avma, Avma)>> {
        let executable = modules.iter().find(|m| m.executable)?;
        let dynamic = Dynamic::of(memory, executable).ok()??;
        let debug = dynamic.value(elf::DT_DEBUG)?;
        let mut map = memory.read_u64(Avma(debug + 8)).ok()?;
        let mut out = Vec::new();
        while map != 0 && out.len() < 4096 {
            out.push((Avma(map), Avma(memory.read_u64(Avma(map + 16)).ok()?)));
            map = memory.read_u64(Avma(map + 24)).ok()?;
        }
        Some(out)
    };
    chain().unwrap_or_default()
}

/// Returns the loader's link map of a module, if it has one.
pub(crate) fn link_map(process: &Process, modules: &[Module], module: &Module) -> Option<Avma> {
    let maps = link_maps(process, modules);
    maps.into_iter().find(|(_, dynamic)| Some(*dynamic) == module.dynamic).map(|(map, _)| map)
}

/// Returns the indices of the modules in the loader's search order; modules unknown to the loader are last.
pub(crate) fn search_order(process: &Process, modules: &[Module]) -> Vec<usize> {
    let chain = link_maps(process, modules);
    let place =
        |module: &Module| module.dynamic.and_then(|d| chain.iter().position(|c| c.1 == d)).unwrap_or(chain.len());
    let mut order: Vec<usize> = (0..modules.len()).collect();
    order.sort_by_key(|i| place(&modules[*i]));
    order
}
