//! Fills in every relocation, with range checks.

use super::Layout;
use stillpoint_patch_format::{Avma, Patch, Relocation, RelocationKind, Section, SectionKind, SymbolValue};
use stillpoint_patch_insn::{FAR_STUB_LEN, far_stub};

/// The reason why a patch cannot be linked at its address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// A value does not fit its place.
    #[error("{kind:?} to `{symbol}` in {section}+{offset:#x}: {value:#x} does not fit")]
    Range {
        /// Formula of the value.
        kind: RelocationKind,
        /// The symbol.
        symbol: String,
        /// The section.
        section: String,
        /// Offset in the section.
        offset: u32,
        /// The value.
        value: i128,
    },
    /// A symbol has no value.
    #[error("symbol `{0}` has no value")]
    NoValue(String),
    /// A far stub does not reach its slot.
    #[error("the far stub of `{symbol}` at {at} does not reach its slot at {slot}")]
    StubReach {
        /// The symbol.
        symbol: String,
        /// Address of the stub.
        at: Avma,
        /// Address of the slot.
        slot: Avma,
    },
    /// The unwind data of our own code does not reach that code.
    #[error("unwind data at {0} does not reach the code that it describes")]
    UnwindReach(Avma),
    /// A part of the arena needs more room than its layout reserves.
    #[error("{part} needs {needed} bytes, but the layout reserves {reserved}")]
    Room {
        /// Name of the part.
        part: &'static str,
        /// Length of its contents in bytes.
        needed: usize,
        /// Length of its room in bytes.
        reserved: usize,
    },
    /// The unwind data cannot be searched.
    #[error(transparent)]
    UnwindData(#[from] stillpoint_patch_unwind::TableError),
}

/// Value of a patch's symbol in the process: an address, or for thread-locals the offset from the thread pointer.
pub type SymbolAddress = u64;

/// Bytes of an arena, segment by segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Text, read-only, data; without the dispatchers at first.
    pub segments: [Vec<u8>; 3],
    /// Address of each symbol, including the patch's own.
    pub addresses: Vec<Option<SymbolAddress>>,
}

/// Links `patch` for an arena at `arena`; `values` holds the values of external symbols.
///
/// # Errors
/// A symbol has no value, or a value does not fit its place.
pub fn link(patch: &Patch, layout: &Layout, arena: Avma, values: &[Option<SymbolAddress>]) -> Result<Image, LinkError> {
    let addresses = patch.symbols.iter().zip(values).map(|(symbol, outside)| match symbol.value {
        SymbolValue::Patch { section, offset } => Some(arena.0 + layout.sections[section as usize] + offset),
        _ => *outside,
    });
    let addresses: Vec<Option<u64>> = addresses.collect();
    let mut bytes = vec![0u8; layout.len() as usize];
    bytes[..layout.lens[0] as usize].fill(0xcc);
    let linker = Linker { patch, layout, arena, addresses: &addresses };
    for (section, at) in patch.sections.iter().zip(&layout.sections) {
        if section.kind == SectionKind::Bss {
            continue;
        }
        let at = *at as usize;
        bytes[at..at + section.bytes.len()].copy_from_slice(&section.bytes);
        for relocation in &section.relocations {
            linker.relocate(section, at as u64, relocation, &mut bytes)?;
        }
    }
    linker.slots(&mut bytes)?;
    let [read_only, data] = layout.starts();
    let data = bytes.split_off(data as usize);
    let read_only = bytes.split_off(read_only as usize);
    Ok(Image { segments: [bytes, read_only, data], addresses })
}

/// Returns the `len` bytes at a symbol of the patch, which is code or read-only data.
pub(crate) fn contents(image: &Image, layout: &Layout, arena: Avma, symbol: u32, len: u64) -> Vec<u8> {
    let offset = image.addresses[symbol as usize].unwrap_or_default().wrapping_sub(arena.0);
    let [read_only, _] = layout.starts();
    // code is located before the read-only segment
    let (segment, start) = if offset < read_only { (0, offset) } else { (1, offset - read_only) };
    image.segments[segment][start as usize..][..len as usize].to_vec()
}

struct Linker<'a> {
    patch: &'a Patch,
    layout: &'a Layout,
    arena: Avma,
    addresses: &'a [Option<u64>],
}

impl Linker<'_> {
    fn value(&self, symbol: u32) -> Result<u64, LinkError> {
        let missing = || LinkError::NoValue(self.patch.symbols[symbol as usize].name.clone());
        self.addresses[symbol as usize].ok_or_else(missing)
    }

    fn slots(&self, bytes: &mut [u8]) -> Result<(), LinkError> {
        for (symbol, slot) in &self.layout.slots {
            put(bytes, *slot, &self.value(*symbol)?.to_le_bytes());
        }
        for (symbol, (stub, slot)) in &self.layout.stubs {
            put(bytes, *slot, &self.value(*symbol)?.to_le_bytes());
            let (at, to) = (Avma(self.arena.0 + stub), Avma(self.arena.0 + slot));
            put(bytes, *stub, &stub_of(&self.patch.symbols[*symbol as usize].name, at, to)?);
        }
        Ok(())
    }

    fn relocate(&self, section: &Section, at: u64, r: &Relocation, bytes: &mut [u8]) -> Result<(), LinkError> {
        let place_offset = at + u64::from(r.offset);
        let place = i128::from(self.arena.0 + place_offset);
        let addend = i128::from(r.addend);
        let slot = || self.layout.slots.get(&r.symbol).map(|s| i128::from(self.arena.0 + s));
        let symbol = i128::from(self.value(r.symbol)?);
        let signed = i128::from(self.value(r.symbol)? as i64);
        let stub = || self.layout.stubs.get(&r.symbol).map(|(stub, _)| i128::from(self.arena.0 + stub));
        // unwind data names only a function to be called: a personality routine
        let called = r.kind == RelocationKind::Branch32 || section.kind == SectionKind::EhFrame;
        let value = match r.kind {
            // the symbol look-up has refused an address that is out of reach and not code
            RelocationKind::Abs32 if u32::try_from(symbol + addend).is_err() => stub().unwrap_or(symbol) + addend,
            RelocationKind::Abs32Signed if i32::try_from(symbol + addend).is_err() => stub().unwrap_or(symbol) + addend,
            RelocationKind::Abs64 | RelocationKind::Abs32 | RelocationKind::Abs32Signed => symbol + addend,
            RelocationKind::Branch32 | RelocationKind::Pc32
                if called && i32::try_from(symbol + addend - place).is_err() =>
            {
                stub().unwrap_or(symbol) + addend - place
            }
            RelocationKind::Branch32 | RelocationKind::Pc32 | RelocationKind::Pc64 => symbol + addend - place,
            RelocationKind::TpOff32 => signed + addend,
            RelocationKind::GotPc32 | RelocationKind::GotTpOff32 => slot().unwrap_or(i128::MAX / 2) + addend - place,
        };
        let fits = match r.kind {
            RelocationKind::Abs64 | RelocationKind::Pc64 => true,
            RelocationKind::Abs32 => u32::try_from(value).is_ok(),
            _ => i32::try_from(value).is_ok(),
        };
        if !fits {
            return Err(LinkError::Range {
                kind: r.kind,
                symbol: self.patch.symbols[r.symbol as usize].name.clone(),
                section: section.name.clone(),
                offset: r.offset,
                value,
            });
        }
        let width = if matches!(r.kind, RelocationKind::Abs64 | RelocationKind::Pc64) { 8 } else { 4 };
        put(bytes, place_offset, &(value as u64).to_le_bytes()[..width]);
        Ok(())
    }
}

fn stub_of(symbol: &str, at: Avma, slot: Avma) -> Result<[u8; FAR_STUB_LEN], LinkError> {
    far_stub(at, slot).map_err(|_| LinkError::StubReach { symbol: symbol.to_owned(), at, slot })
}

fn put(bytes: &mut [u8], at: u64, value: &[u8]) {
    bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_out_of_reach_names_its_symbol() {
        assert!(stub_of("malloc", Avma(0x1000), Avma(0x2000)).is_ok());
        let error = stub_of("malloc", Avma(0x1000), Avma(1 << 40)).expect_err("too far for 32 bits");
        assert_eq!(error.to_string(), "the far stub of `malloc` at 0x1000 does not reach its slot at 0x10000000000");
    }
}
