//! ELF files mapped by a process, identified by the contents of memory.

use crate::{Error, Mapping, Memory};
use libc::{PT_DYNAMIC, PT_INTERP, PT_LOAD, PT_NOTE};
use memchr::memmem;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use stillpoint_base::page_start;
use stillpoint_patch_format::{Avma, BuildId, Svma};

const NT_GNU_BUILD_ID: u32 = 3;
const PHDR_LEN: usize = 56;

/// An ELF file mapped into a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Path as the process's namespace sees it, or `[vdso]`.
    pub path: String,
    /// True if it is the main executable.
    pub executable: bool,
    /// Difference between the actual and the stated address, in bytes.
    pub bias: u64,
    /// Build-id from the note in the *mapped* memory; `None` if there is no note.
    pub build_id: Option<BuildId>,
    /// Dynamic section, if it has one.
    pub dynamic: Option<Avma>,
    /// Mappings of the file, ascending.
    pub mappings: Vec<Mapping>,
    /// Device and inode of the file.
    pub file: ((u32, u32), u64),
    /// True if the file on disk was deleted or replaced.
    pub deleted: bool,
}

impl Module {
    /// Returns the actual address of a stated one.
    pub fn avma(&self, at: Svma) -> Avma {
        Avma(at.0.wrapping_add(self.bias))
    }

    /// Returns the stated address of an actual one.
    pub fn svma(&self, at: Avma) -> Svma {
        Svma(at.0.wrapping_sub(self.bias))
    }

    /// Returns true if one of its mappings contains an address.
    pub fn contains(&self, at: Avma) -> bool {
        self.mappings.iter().any(|m| m.contains(at))
    }
}

/// C library that a process maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Libc {
    /// The GNU C library.
    Glibc {
        /// Version, for instance `(2, 36)`.
        version: (u32, u32),
        /// Banner of the library, for instance `GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36.`.
        banner: String,
    },
    /// The musl C library.
    Musl,
    /// No known C library.
    Unknown,
}

pub(crate) enum Class {
    X86_64,
    Other(String),
}

/// Returns the kind of program that an ELF header belongs to.
pub(crate) fn classify(head: &[u8]) -> Class {
    if head.len() < 64 || head[..4] != *b"\x7fELF" {
        return Class::Other("something that is no ELF file".to_owned());
    }
    let machine = u16::from_le_bytes([head[18], head[19]]);
    match (head[4], head[5], machine) {
        (2, 1, 62) => Class::X86_64,
        (1, _, 62) => Class::Other("an x32 program".to_owned()),
        (1, _, 3) => Class::Other("a 32-bit x86 program".to_owned()),
        (class, _, machine) => Class::Other(format!("a program of ELF class {class}, machine {machine}")),
    }
}

/// Returns true if an executable asks for a dynamic loader.
pub(crate) fn has_interpreter(exe: &File, head: &[u8; 64]) -> bool {
    let (offset, count) = program_header_table(head);
    let mut table = vec![0; count * PHDR_LEN];
    let read = exe.read_at(&mut table, offset).unwrap_or(0);
    table[..read].chunks_exact(PHDR_LEN).any(|header| u32_at(header, 0) == PT_INTERP)
}

/// Finds the modules among the mappings: each begins with a mapping of its ELF header.
pub(crate) fn find(mappings: &[Mapping], memory: &Memory, exe_inode: u64, entry: Option<u64>) -> Vec<Module> {
    let mut modules: Vec<Module> = Vec::new();
    for (index, first) in mappings.iter().enumerate() {
        let vdso = first.path.as_deref() == Some("[vdso]");
        if !(vdso || first.inode != 0 && first.offset == 0) || !first.read {
            continue;
        }
        if let Some(module) = read_module(index, mappings, memory) {
            modules.push(module);
        }
    }
    let main = modules
        .iter()
        .position(|m| entry.is_some_and(|entry| m.contains(Avma(entry))))
        .or_else(|| modules.iter().position(|m| m.file.1 == exe_inode));
    if let Some(main) = main {
        modules[main].executable = true;
        modules[..=main].rotate_right(1);
    }
    modules
}

fn read_module(index: usize, mappings: &[Mapping], memory: &Memory) -> Option<Module> {
    let first = &mappings[index];
    let head = memory.read_array(first.start).ok()?;
    if !matches!(classify(&head), Class::X86_64) {
        return None;
    }
    let segments = segments_of(memory, first.start, &head).ok()?;
    let loads = || segments.iter().filter(|s| s.kind == PT_LOAD);
    let lowest = loads().map(|s| s.address).min()?;
    let bias = first.start.0.wrapping_sub(page_start(lowest));
    let end = loads().filter_map(|s| s.address.checked_add(s.len)).max()?.wrapping_add(bias);
    let dynamic = segments.iter().find(|s| s.kind == PT_DYNAMIC).map(|s| Avma(bias.wrapping_add(s.address)));
    let mut notes = segments.iter().filter(|s| s.kind == PT_NOTE);
    let build_id = notes.find_map(|s| build_id(memory, bias.wrapping_add(s.address), s.file_len));
    let own = |m: &&Mapping| m.start.0 < end && (m.inode, m.device) == (first.inode, first.device);
    Some(Module {
        path: first.path.clone()?,
        executable: false,
        bias,
        build_id,
        dynamic,
        mappings: mappings[index..].iter().filter(own).cloned().collect(),
        file: (first.device, first.inode),
        deleted: first.deleted,
    })
}

/// Program header of a mapped ELF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Kind (`PT_*`).
    pub kind: u32,
    /// Flags (`PF_*`).
    pub flags: u32,
    /// Stated address.
    pub address: u64,
    /// Bytes from the file.
    pub file_len: u64,
    /// Bytes in memory.
    pub len: u64,
    /// Alignment in bytes.
    pub align: u64,
}

/// Returns the program headers of the ELF file mapped at `head`; none if their form is unknown.
///
/// # Errors
/// They cannot be read.
pub fn segments(memory: &Memory, head: Avma) -> Result<Vec<Segment>, Error> {
    segments_of(memory, head, &memory.read_array(head)?)
}

fn segments_of(memory: &Memory, at: Avma, head: &[u8; 64]) -> Result<Vec<Segment>, Error> {
    let (offset, count) = program_header_table(head);
    let table = memory.read_vec(Avma(at.0.wrapping_add(offset)), count * PHDR_LEN)?;
    let segment = |h: &[u8]| Segment {
        kind: u32_at(h, 0),
        flags: u32_at(h, 4),
        address: u64_at(h, 16),
        file_len: u64_at(h, 32),
        len: u64_at(h, 40),
        align: u64_at(h, 48),
    };
    Ok(table.chunks_exact(PHDR_LEN).map(segment).collect())
}

/// Limit of the notes of a file in bytes. Real notes have some hundred; a hostile header may request gigabytes.
const NOTES_MAX: u64 = 64 << 10;

fn build_id(memory: &Memory, at: u64, len: u64) -> Option<BuildId> {
    build_id_among(&memory.read_vec(Avma(at), len.min(NOTES_MAX) as usize).ok()?)
}

/// Reads the build-id of an ELF file, `None` if it has none.
///
/// # Errors
/// The kind of the file, if it is not an ELF file for x86-64.
pub fn build_id_of(file: &File) -> Result<Option<BuildId>, String> {
    let mut head = [0; 64];
    let len = file.read_at(&mut head, 0).unwrap_or(0);
    if let Class::Other(kind) = classify(&head[..len]) {
        return Err(kind);
    }
    let (offset, count) = program_header_table(&head);
    let mut table = vec![0; count * PHDR_LEN];
    let len = file.read_at(&mut table, offset).unwrap_or(0);
    let notes = table[..len].chunks_exact(PHDR_LEN).filter(|header| u32_at(header, 0) == PT_NOTE);
    Ok(notes.map(|header| (u64_at(header, 8), u64_at(header, 32))).find_map(|(at, len)| {
        let mut notes = vec![0; len.min(NOTES_MAX) as usize];
        let len = file.read_at(&mut notes, at).ok()?;
        build_id_among(&notes[..len])
    }))
}

fn build_id_among(notes: &[u8]) -> Option<BuildId> {
    let mut rest = notes;
    while rest.len() >= 12 {
        let (name_len, desc_len) = (u32_at(rest, 0) as usize, u32_at(rest, 4) as usize);
        let desc = 12usize.checked_add(name_len.checked_next_multiple_of(4)?)?;
        let next = desc.checked_add(desc_len.checked_next_multiple_of(4)?)?;
        if u32_at(rest, 8) == NT_GNU_BUILD_ID && rest.get(12..12 + 4) == Some(b"GNU\0") && name_len == 4 {
            return Some(BuildId(rest.get(desc..desc.checked_add(desc_len)?)?.to_vec()));
        }
        rest = rest.get(next..)?;
    }
    None
}

/// Finds the C library among the mappings; reads its version from its text in memory.
pub(crate) fn libc_kind(mappings: &[Mapping], memory: &Memory) -> Libc {
    let named = |m: &&Mapping, name: &str| {
        m.path.as_deref().and_then(|p| p.rsplit('/').next()).is_some_and(|f| f.starts_with(name))
    };
    if mappings.iter().any(|m| named(&m, "ld-musl-") || named(&m, "libc.musl-")) {
        return Libc::Musl;
    }
    let glibc = |m: &&Mapping| named(m, "libc.so.6") || named(m, "libc-2.");
    for mapping in mappings.iter().filter(glibc).filter(|m| m.read && !m.write && !m.execute) {
        let mut found = None;
        memory.look_through(mapping.start, mapping.len(), BANNER_MAX, |_, bytes| {
            found = banner(bytes);
            if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if let Some(libc) = found {
            return libc;
        }
    }
    Libc::Unknown
}

/// Longest banner in bytes; a banner is one line.
const BANNER_MAX: usize = 512;

fn banner(bytes: &[u8]) -> Option<Libc> {
    const START: &[u8] = b"GNU C Library (";
    const VERSION: &str = "release version ";
    let at = memmem::find(bytes, START)?;
    let end = bytes[at..].iter().position(|&b| b == b'\n' || b == 0)?;
    let banner = String::from_utf8_lossy(&bytes[at..at + end]).into_owned();
    let version = &banner[banner.find(VERSION)? + VERSION.len()..];
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let version = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(Libc::Glibc { version, banner })
}

fn program_header_table(head: &[u8; 64]) -> (u64, usize) {
    if head[..4] != *b"\x7fELF" || u16::from_le_bytes([head[54], head[55]]) as usize != PHDR_LEN {
        return (0, 0);
    }
    (u64_at(head, 32), u16::from_le_bytes([head[56], head[57]]) as usize)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_glibc_from_its_banner() {
        let text = b"xx\0GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36.\nCopyright";
        let Some(Libc::Glibc { version, banner }) = banner(text) else { panic!("no banner") };
        assert_eq!(version, (2, 36));
        assert_eq!(banner, "GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36.");
        assert_eq!(super::banner(b"GNU C Library (no number)"), None);
    }

    #[test]
    fn names_other_programs() {
        let mut head = [0; 64];
        head[..6].copy_from_slice(b"\x7fELF\x01\x01");
        head[18] = 3;
        assert!(matches!(classify(&head), Class::Other(what) if what == "a 32-bit x86 program"));
        assert!(matches!(classify(b"#!/bin/sh"), Class::Other(_)));
    }

    #[test]
    fn build_id_of_a_file_is_that_of_the_mapped_one() {
        let own = std::fs::File::open("/proc/self/exe").unwrap();
        let in_file = build_id_of(&own).unwrap();
        let pid = crate::Pid(std::process::id() as i32);
        let mappings = crate::mappings_of(pid).unwrap();
        let memory = Memory::new(pid, std::fs::File::open("/proc/self/mem").unwrap());
        let inode = std::os::unix::fs::MetadataExt::ino(&own.metadata().unwrap());
        let module = find(&mappings, &memory, inode, None).into_iter().find(|m| m.executable).unwrap();
        assert_eq!(in_file, module.build_id);
        assert!(in_file.is_some_and(|id| id.0.len() >= 8));
        assert!(build_id_of(&std::fs::File::open("/proc/self/maps").unwrap()).is_err());
    }
}
