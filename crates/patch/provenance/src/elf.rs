//! Identity of an ELF file: its build-id and the name that programs request it by. Read from its program headers, so that files of 32 and of
//! 64 bits are known, and those without section headers.
//!
//! Written by hand: `object` reads whole tables of the size that a header states, and this looks at files of every process.

use std::fs::File;
use std::os::unix::fs::FileExt;
use stillpoint_patch_format::BuildId;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_NOTE: u32 = 4;
const NT_GNU_BUILD_ID: u32 = 3;
const DT_STRTAB: u64 = 5;
const DT_SONAME: u64 = 14;
/// Limit of program headers.
const HEADERS_MAX: usize = 256;
/// Limit of a segment of notes in bytes.
const NOTES_MAX: u64 = 64 << 10;
/// Limit of a dynamic section in bytes.
const DYNAMIC_MAX: u64 = 64 << 10;
/// Limit of the name of a library in bytes.
const NAME_MAX: usize = 255;
/// Limit of a build-id in bytes.
const BUILD_ID_MAX: usize = 64;

/// Identity of an ELF file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ElfIdentity {
    /// Build-id; `None` if it has none.
    pub build_id: Option<BuildId>,
    /// Name of a library (`DT_SONAME`).
    pub soname: Option<String>,
    /// True for files of 64 bits.
    pub is_64: bool,
}

impl ElfIdentity {
    /// Reads the identity of a file; `None` if it is no ELF file for a little-endian machine.
    pub fn of_file(file: &File) -> Option<ElfIdentity> {
        identity(|at, buffer| file.read_exact_at(buffer, at).ok())
    }

    /// Reads the identity from the first bytes of a file; what is behind them is unknown.
    pub fn of_bytes(bytes: &[u8]) -> Option<ElfIdentity> {
        identity(|at, buffer| {
            let start = usize::try_from(at).ok()?;
            buffer.copy_from_slice(bytes.get(start..start.checked_add(buffer.len())?)?);
            Some(())
        })
    }
}

struct Header {
    kind: u32,
    offset: u64,
    address: u64,
    length: u64,
}

fn identity(read: impl Fn(u64, &mut [u8]) -> Option<()>) -> Option<ElfIdentity> {
    let mut head = [0; 64];
    // a file of 32 bits may end before
    read(0, &mut head).or_else(|| read(0, &mut head[..52]))?;
    if head[..4] != *b"\x7fELF" || head[5] != 1 {
        return None;
    }
    let is_64 = match head[4] {
        1 => false,
        2 => true,
        _ => return None,
    };
    let headers = headers(&head, is_64, &read).unwrap_or_default();
    let notes = headers.iter().filter(|header| header.kind == PT_NOTE);
    let build_id = notes
        .filter_map(|header| bytes(header.offset, header.length.min(NOTES_MAX), &read))
        .find_map(|notes| build_id(&notes));
    let soname = soname(&headers, is_64, &read);
    Some(ElfIdentity { build_id, soname, is_64 })
}

fn bytes(at: u64, length: u64, read: impl Fn(u64, &mut [u8]) -> Option<()>) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).ok()?];
    read(at, &mut bytes)?;
    Some(bytes)
}

fn headers(head: &[u8; 64], is_64: bool, read: impl Fn(u64, &mut [u8]) -> Option<()>) -> Option<Vec<Header>> {
    let (table, size, count, length) = match is_64 {
        true => (u64_at(head, 32)?, u16_at(head, 54)?, u16_at(head, 56)?, 56),
        false => (u64::from(u32_at(head, 28)?), u16_at(head, 42)?, u16_at(head, 44)?, 32),
    };
    if usize::from(size) != length || usize::from(count) > HEADERS_MAX {
        return None;
    }
    let table = bytes(table, (length * usize::from(count)) as u64, read)?;
    let header = |h: &[u8]| {
        Some(match is_64 {
            true => {
                Header { kind: u32_at(h, 0)?, offset: u64_at(h, 8)?, address: u64_at(h, 16)?, length: u64_at(h, 32)? }
            }
            false => {
                let word = |at| u32_at(h, at).map(u64::from);
                Header { kind: u32_at(h, 0)?, offset: word(4)?, address: word(8)?, length: word(16)? }
            }
        })
    };
    table.chunks_exact(length).map(header).collect()
}

fn build_id(notes: &[u8]) -> Option<BuildId> {
    let mut rest = notes;
    while rest.len() >= 12 {
        let (name, description) = (u32_at(rest, 0)? as usize, u32_at(rest, 4)? as usize);
        let start = 12usize.checked_add(name.checked_next_multiple_of(4)?)?;
        let end = start.checked_add(description)?;
        if u32_at(rest, 8) == Some(NT_GNU_BUILD_ID) && name == 4 && rest.get(12..16) == Some(b"GNU\0") {
            let id = rest.get(start..end)?;
            return (1..=BUILD_ID_MAX).contains(&id.len()).then(|| BuildId(id.to_vec()));
        }
        rest = rest.get(start.checked_add(description.checked_next_multiple_of(4)?)?..)?;
    }
    None
}

fn soname(headers: &[Header], is_64: bool, read: impl Fn(u64, &mut [u8]) -> Option<()>) -> Option<String> {
    let dynamic = headers.iter().find(|header| header.kind == PT_DYNAMIC)?;
    let section = bytes(dynamic.offset, dynamic.length.min(DYNAMIC_MAX), &read)?;
    let half = if is_64 { 8 } else { 4 };
    let word = |bytes: &[u8], at| if is_64 { u64_at(bytes, at) } else { u32_at(bytes, at).map(u64::from) };
    let value = |tag| {
        let entries = section.chunks_exact(2 * half).map(|entry| Some((word(entry, 0)?, word(entry, half)?)));
        entries.flatten().take_while(|(found, _)| *found != 0).find(|(found, _)| *found == tag).map(|(_, value)| value)
    };
    let address = value(DT_STRTAB)?.checked_add(value(DT_SONAME)?)?;
    let mut loads = headers.iter().filter(|header| header.kind == PT_LOAD);
    let load = loads.find(|load| address >= load.address && address - load.address < load.length)?;
    let start = load.offset.checked_add(address - load.address)?;
    let rest = (load.length - (address - load.address)).min(NAME_MAX as u64 + 1);
    let text = bytes(start, rest, &read)?;
    let name = &text[..text.iter().position(|byte| *byte == 0)?];
    String::from_utf8(name.to_vec()).ok().filter(|name| !name.is_empty() && !name.contains('/'))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str) -> ElfIdentity {
        ElfIdentity::of_file(&File::open(path).unwrap()).unwrap()
    }

    #[test]
    fn the_c_library_and_a_program_are_known() {
        let libc = of("/lib/x86_64-linux-gnu/libc.so.6");
        assert_eq!(libc.soname.as_deref(), Some("libc.so.6"));
        assert!(libc.is_64 && libc.build_id.as_ref().is_some_and(|id| id.0.len() == 20));
        let program = of("/bin/true");
        assert!(program.soname.is_none() && program.build_id.is_some() && program.build_id != libc.build_id);
        let bytes = std::fs::read("/bin/true").unwrap();
        assert_eq!(ElfIdentity::of_bytes(&bytes[..4096.min(bytes.len())]).unwrap().build_id, program.build_id);
    }

    #[test]
    fn no_header_makes_it_panic_or_read_much() {
        let bytes = std::fs::read("/bin/true").unwrap();
        let head = &bytes[..2048];
        for at in 0..head.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut hostile = head.to_vec();
                hostile[at] = value;
                ElfIdentity::of_bytes(&hostile);
            }
        }
        for length in 0..100 {
            ElfIdentity::of_bytes(&head[..length]);
        }
        assert_eq!(ElfIdentity::of_bytes(b"#!/bin/sh"), None);
    }
}
