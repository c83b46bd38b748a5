//! Files by which gdb and perf see code that is in no file on disk.

use crate::Error;
use crate::ledger::store;
use crate::ledger::{PlacedPatch, SymbolRecord};
use object::write::{Object, StandardSection, Symbol, SymbolSection};
use object::{Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope};
use std::collections::HashSet;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use stillpoint_host::file::{bounded, open_below};
use stillpoint_host::kernel_files;
use stillpoint_host::trusted::Directory;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Memory, Pid, Process};

/// Files written for debuggers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebuggerFiles {
    /// Script for gdb's command `source`.
    pub script: PathBuf,
    /// One ELF file for each patch: code, symbols, unwind data.
    pub images: Vec<PathBuf>,
    /// File in which perf looks for names, in the target's own view of the file system.
    pub perf_map: PathBuf,
}

/// Largest perf map, in bytes, that is extended; it is located in the target's `/tmp`.
const PERF_MAP_MAX: u64 = 64 << 20;

/// Writes ELF files and a gdb script into `directory`, and the perf map into the target's `/tmp`. They cover all patches ever placed:
/// frames of a reverted patch may still be on a stack. A missing directory is created. gdb executes the script, so no other user may be
/// able to change it.
///
/// # Errors
/// Another user can change the directory or a part of its path, the target holds no patch, or a file cannot be written.
pub fn debugger_files(pid: Pid, directory: &Path) -> Result<DebuggerFiles, Error> {
    let process = Process::open(pid)?;
    let store = store::find(&process)?.ok_or(Error::NothingActive(pid))?;
    let view = store.view();
    let directory = Directory::make(directory)?;
    let place = quoted(directory.path())?;
    let mut script = String::from("set confirm off\n");
    let mut images = Vec::new();
    let mut map = String::new();
    for (number, patch) in view.placed.iter().enumerate() {
        let name = format!("{}-{number}.elf", patch.name);
        let (bytes, text) = image(process.memory(), patch)?;
        images.push(directory.write(&name, &bytes)?);
        script +=
            &format!("add-symbol-file \"{place}/{name}\" -s .text {text} -s .eh_frame {}\n", patch.eh_frame.start);
        for symbol in patch.symbols.iter().filter(|s| s.code) {
            map += &format!("{:x} {:x} {} [{}]\n", symbol.span.start.0, symbol.span.len, symbol.name, patch.name);
        }
        for function in &patch.functions {
            let len = stillpoint_patch_insn::DISPLACED_MAX;
            map += &format!("{:x} {len:x} {} [displaced]\n", function.displaced.0, function.name);
        }
    }
    let script = directory.write("stillpoint.gdb", script.as_bytes())?;
    let perf_map = write_perf_map(&process, &map)?;
    Ok(DebuggerFiles { script, images, perf_map })
}

/// Returns the path as text, if it may be put between a script's quotes.
fn quoted(path: &Path) -> Result<&str, Error> {
    let fits = |text: &&str| !text.chars().any(|c| c.is_control() || matches!(c, '"' | '\\'));
    path.to_str().filter(fits).ok_or_else(|| Error::File {
        path: path.display().to_string(),
        source: std::io::Error::other("a gdb script cannot name this directory"),
    })
}

/// Returns an ELF file of a patch's code, and the address of its `.text`.
fn image(memory: &Memory, patch: &PlacedPatch) -> Result<(Vec<u8>, Avma), Error> {
    let start = patch.arena.start;
    let end = patch.states.start.0;
    let text = memory.read_vec(start, (end - start.0) as usize)?;
    let frames = memory.read_vec(patch.eh_frame.start, patch.eh_frame.len as usize)?;
    let mut object = Object::new(BinaryFormat::Elf, Architecture::X86_64, Endianness::Little);
    let text_section = object.section_id(StandardSection::Text);
    object.append_section_data(text_section, &text, 16);
    let eh_frame = object.add_section(Vec::new(), b".eh_frame".to_vec(), SectionKind::ReadOnlyData);
    object.append_section_data(eh_frame, &frames, 8);
    let mut add = |name: &str, at: Avma, len: u64, code: bool| {
        let inside = code && at >= start && at.0 < end;
        object.add_symbol(Symbol {
            name: name.as_bytes().to_vec(),
            value: if inside { at.0 - start.0 } else { at.0 },
            size: len,
            kind: if code { SymbolKind::Text } else { SymbolKind::Data },
            scope: SymbolScope::Compilation,
            weak: false,
            section: if inside { SymbolSection::Section(text_section) } else { SymbolSection::Absolute },
            flags: SymbolFlags::None,
        });
    };
    for SymbolRecord { name, span, code } in &patch.symbols {
        add(name, span.start, span.len, *code);
    }
    for function in &patch.functions {
        let len = stillpoint_patch_insn::DISPLACED_MAX as u64;
        add(&format!("{}.displaced", function.name), function.displaced, len, true);
    }
    let bytes = object.write().map_err(|e| Error::File {
        path: format!("symbols of {}", patch.name),
        source: std::io::Error::other(e.to_string()),
    })?;
    Ok((bytes, start))
}

/// Adds lines to `/tmp/perf-N.map` as the target sees it. The target owns its `/tmp`: no link in it is followed, because a root tool could
/// be made to write to any file. At most [`PERF_MAP_MAX`] bytes are read.
fn write_perf_map(process: &Process, lines: &str) -> Result<PathBuf, Error> {
    let pid = process.pid();
    let inner = process.status()?.ns_pids.last().copied().unwrap_or(pid.0);
    let shown = PathBuf::from(format!("/proc/{pid}/root/tmp/perf-{inner}.map"));
    let io = |source: std::io::Error| Error::File { path: shown.display().to_string(), source };
    let root = kernel_files::open(format!("/proc/{pid}/root")).map_err(io)?;
    let mut file = open_below(&root, Path::new(&format!("tmp/perf-{inner}.map")))?;
    let old = bounded(&file, &shown, PERF_MAP_MAX)?;
    let old = String::from_utf8_lossy(&old);
    let known: HashSet<&str> = old.lines().collect();
    let new: String = lines.split_inclusive('\n').filter(|line| !known.contains(line.trim_end())).collect();
    file.seek(SeekFrom::End(0)).map_err(io)?;
    file.write_all(new.as_bytes()).map_err(io)?;
    Ok(shown)
}
