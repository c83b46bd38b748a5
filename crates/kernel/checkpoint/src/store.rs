//! An unfinished checkpoint: FOAM files that grow, and the seal that completes them.

use crate::error::ErrorContext;
use crate::image::read_with_holes;
use crate::{Error, MachineKey};
use rustix::fs::FileType;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use stillpoint_base::PAGE;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_foam::{
    CompanionFile, Form, HEADER_BYTES, Index, Memory, Object, Origin, PageChecksum, Placement, Recorded, is_zero,
    page_checksum,
};

/// Prefix of the directories of criu's own passes.
pub(crate) const PASS_PREFIX: &str = "pass-";
/// Link of criu to the pass before.
const PARENT_LINK: &str = "parent";
/// Name of the file that makes a checkpoint of the files beside it.
pub(crate) const SEAL_FILE: &str = "foam.seal";
/// The end of what a process can address with four-level page tables.
const ADDRESS_SPACE_END: u64 = 1 << 47;

/// A checkpoint that has no seal yet.
#[derive(Debug)]
pub(crate) struct Store {
    directory: Directory,
    form: Form,
    memories: BTreeMap<Object, MemoryFile>,
    passes: u32,
    written: u64,
    zeros: u64,
    /// True if the passes so far were criu's own: only then may it omit pages.
    tracked: bool,
    /// Pages that earlier passes stored, while they are compared with new ones.
    stored: Vec<u8>,
    /// The checksum of a page of zeros.
    zero: PageChecksum,
}

#[derive(Debug)]
struct MemoryFile {
    memory: Memory,
    placement: Placement,
    file: File,
    path: PathBuf,
    /// True if the present pass has opened it.
    open: bool,
}

impl Store {
    /// Makes an empty one in `dir`, which is made if it is not there, and closed to other users. A `form` that is not
    /// given is detected: sparse, if the file system accepts files as long as an address space.
    ///
    /// # Errors
    /// Another user made the directory or can change it, or it is not empty.
    pub(crate) fn create(dir: &Path, form: Option<Form>) -> Result<Self, Error> {
        let directory = Directory::make(dir)?;
        let names = directory.names()?;
        if names.iter().any(|name| name == SEAL_FILE) {
            return Err(Error::Occupied(dir.to_owned()));
        }
        if let Some(name) = names.first() {
            return Err(Error::refused(format!("{} is not empty: it contains {name:?}", dir.display())));
        }
        directory.close()?;
        let form = match form {
            Some(form) => form,
            None if supports_sparse(&directory)? => Form::Sparse,
            None => Form::Dense,
        };
        Ok(Store {
            directory,
            form,
            memories: BTreeMap::new(),
            passes: 0,
            written: 0,
            zeros: 0,
            tracked: true,
            stored: Vec::new(),
            zero: page_checksum(&[0; PAGE as usize]),
        })
    }

    /// Returns true if criu may omit pages of a memory that an earlier pass has, because it knows that they have not
    /// changed.
    pub(crate) fn has_parent(&self, object: Object) -> bool {
        self.tracked && self.memories.get(&object).is_some_and(|memory_file| memory_file.memory.has_parent())
    }

    /// Declares that the passes were not made by criu: criu must send every page in its own pass, to be compared.
    pub(crate) fn disable_tracking(&mut self) {
        self.tracked = false;
    }

    /// Begins a pass over all memories.
    pub(crate) fn begin_pass(&mut self) {
        self.passes += 1;
        self.memories.values_mut().for_each(|memory_file| memory_file.open = false);
    }

    /// Opens a memory, whose pages follow in this pass.
    pub(crate) fn open(&mut self, object: Object) -> Result<(), Error> {
        if !self.memories.contains_key(&object) {
            let name = object.file_name();
            let (file, path) = (self.directory.create(&name)?, self.directory.path().join(name));
            let (memory, placement) = (Memory::new(object), Placement::new(self.form));
            self.memories.insert(object, MemoryFile { memory, placement, file, path, open: false });
        }
        let memory_file = self.memory_file(object)?;
        if !memory_file.open {
            memory_file.open = true;
            memory_file.memory.begin_pass();
        }
        Ok(())
    }

    /// Names pages of this pass.
    pub(crate) fn add(&mut self, object: Object, start: u64, pages: u64, flags: u8) -> Result<(), Error> {
        Ok(self.memory_file(object)?.memory.add(start, pages, flags)?)
    }

    /// Names pages that an earlier pass has.
    pub(crate) fn keep_unchanged(&mut self, object: Object, start: u64, pages: u64) -> Result<(), Error> {
        Ok(self.memory_file(object)?.memory.keep_unchanged(start, pages)?)
    }

    /// Stores whole pages in their place. Zeros become holes; a page that an earlier pass has stored with the same
    /// bytes stays.
    pub(crate) fn put(&mut self, object: Object, start: u64, bytes: &[u8]) -> Result<(), Error> {
        let (first_pass, zero) = (self.passes == 1, self.zero);
        let mut stored = std::mem::take(&mut self.stored);
        let memory_file = self.memory_file(object)?;
        let known = if first_pass { Vec::new() } else { memory_file.read_stored(start, bytes.len(), &mut stored)? };
        let (mut written, mut zeros) = (0, 0);
        let what = |at: usize| {
            let page = at..(at + PAGE as usize).min(bytes.len());
            match known.get(at / PAGE as usize) {
                Some(true) if bytes[page.clone()] == stored[page.clone()] => PageState::Same,
                _ if is_zero(&bytes[page]) => PageState::Zero,
                _ => PageState::New,
            }
        };
        let (mut at, mut next) = (0, what(0));
        while at < bytes.len() {
            let (begin, now) = (at, next);
            while at < bytes.len() && next == now {
                at += PAGE as usize;
                next = if at < bytes.len() { what(at) } else { now };
            }
            let (address, run) = (start + begin as u64, &bytes[begin..at.min(bytes.len())]);
            if now == PageState::Same {
                memory_file.memory.keep(address, run.len() as u64 / PAGE);
                continue;
            }
            for (page, place) in run.chunks(PAGE as usize).zip((address..).step_by(PAGE as usize)) {
                memory_file
                    .memory
                    .checksums
                    .set(place, if now == PageState::Zero { zero } else { page_checksum(page) });
            }
            match now {
                PageState::New => {
                    memory_file.write(address, run)?;
                    written += run.len() as u64;
                }
                _ if first_pass => memory_file.assign(address, run.len() as u64),
                _ => memory_file.punch_hole(address, address + run.len() as u64)?,
            }
            zeros += if now == PageState::Zero { run.len() as u64 } else { 0 };
        }
        self.stored = stored;
        self.written += written;
        self.zeros += zeros;
        Ok(())
    }

    /// Ends a pass, which has named everything: ranges that memories no longer have are punched out.
    pub(crate) fn end_pass(&mut self) -> Result<(), Error> {
        // A memory that the pass did not open belongs to a process that has ended.
        let gone: Vec<Object> = self.memories.iter().filter(|(_, g)| !g.open).map(|(object, _)| *object).collect();
        for object in gone {
            if self.memories.remove(&object).is_some() {
                self.directory.remove(&object.file_name())?;
            }
        }
        for memory_file in self.memories.values_mut() {
            for (start, end) in memory_file.memory.end_pass() {
                memory_file.punch_hole(start, end)?;
            }
        }
        Ok(())
    }

    /// Writes the data of the passes so far to disk, so that the seal need not wait for it, nor for its checksums.
    pub(crate) fn sync(&mut self) -> Result<(), Error> {
        for memory_file in self.memories.values_mut() {
            memory_file.memory.checksums.compute_digests();
            memory_file.file.sync_data().at("write to disk", &memory_file.path)?;
        }
        Ok(())
    }

    /// Returns the bytes written in all passes, and the bytes of pages that held only zeros.
    pub(crate) fn written(&self) -> (u64, u64) {
        (self.written, self.zeros)
    }

    /// Writes everything to disk, and then the seal. From then on it is a checkpoint, of this machine by its key.
    ///
    /// The processes are stopped meanwhile, so little is digested here: criu's files, and checksums of pages that
    /// changed in the last pass. Checksums are computed when pages are written, for most pages while the program runs.
    ///
    /// # Errors
    /// A file cannot be written or read, or a page was never stored.
    pub(crate) fn seal(self, origin: Origin, key: &MachineKey) -> Result<Index, Error> {
        for memory_file in self.memories.values() {
            memory_file.file.sync_all().at("write to disk", &memory_file.path)?;
        }
        self.remove_passes()?;
        let beside = companion_files(&self.directory)?;
        let recorded = |memory_file: &MemoryFile| Recorded::of(&memory_file.memory, memory_file.placement.clone());
        let recorded: Vec<_> = self.memories.values().map(recorded).collect::<Result<_, _>>()?;
        let (memories, checksums): (Vec<Recorded>, Vec<Vec<u8>>) = recorded.into_iter().unzip();
        let index = Index { origin, form: self.form, passes: self.passes, memories, beside };
        let encoded = index.encode()?;
        let new = "foam.seal.new";
        let mut file = self.directory.create(new)?;
        let by_key = key.seal(&encoded[..HEADER_BYTES]).to_vec();
        let mut parts = std::iter::once(&encoded).chain(&checksums).chain([&by_key]);
        parts.try_for_each(|part| file.write_all(part)).and_then(|()| file.sync_all()).with_action("write a seal")?;
        // all names are on disk before the one that makes them count
        self.directory.sync()?;
        self.directory.rename(new, SEAL_FILE)?;
        self.directory.sync()?;
        Ok(index)
    }

    /// Removes the directories of criu's passes: everything is in one place now, and nothing refers to them any more.
    fn remove_passes(&self) -> Result<(), Error> {
        match self.directory.remove(PARENT_LINK) {
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
        for name in self.directory.names()?.iter().filter(|name| name.starts_with(PASS_PREFIX)) {
            Directory::open(&self.directory.path().join(name))?.remove_all()?;
        }
        Ok(())
    }

    fn memory_file(&mut self, object: Object) -> Result<&mut MemoryFile, Error> {
        let path = self.directory.path().join(object.file_name());
        self.memories
            .get_mut(&object)
            .ok_or(Error::Damaged { path, why: "criu sent pages before it opened this memory".into() })
    }
}

/// Result of comparing a page with earlier passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageState {
    Same,
    Zero,
    New,
}

impl MemoryFile {
    /// Reads the stored pages of a range, and returns for each page whether earlier passes stored it.
    fn read_stored(&self, start: u64, bytes: usize, into: &mut Vec<u8>) -> Result<Vec<bool>, Error> {
        into.resize(bytes.max(into.len()), 0);
        let mut known = vec![false; bytes.div_ceil(PAGE as usize)];
        for part in self.memory.stored_extents(start, bytes as u64 / PAGE) {
            let (mut address, end) = (part.start, part.end());
            while address < end {
                let Some((place, until)) = self.placement.locate(address) else { break };
                let (from, to) = ((address - start) as usize, (end.min(until) - start) as usize);
                read_with_holes(&self.file, &mut into[from..to], place).at("read", &self.path)?;
                known[from / PAGE as usize..to / PAGE as usize].fill(true);
                address = end.min(until);
            }
        }
        Ok(known)
    }

    /// Assigns places to addresses whose pages are holes.
    fn assign(&mut self, mut address: u64, bytes: u64) {
        let end = address + bytes;
        while address < end {
            address = self.placement.assign(address).1;
        }
    }

    fn write(&mut self, mut address: u64, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let (place, until) = self.placement.assign(address);
            let part = bytes.len().min(usize::try_from(until - address).unwrap_or(usize::MAX));
            self.file.write_all_at(&bytes[..part], place).at("write", &self.path)?;
            address += part as u64;
            bytes = &bytes[part..];
        }
        Ok(())
    }

    fn punch_hole(&mut self, mut address: u64, end: u64) -> Result<(), Error> {
        use rustix::fs::{FallocateFlags, fallocate};
        while address < end {
            let (place, until) = self.placement.assign(address);
            let part = (end - address).min(until - address);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, flags, place, part).at("punch a hole into", &self.path)?;
            address += part;
        }
        Ok(())
    }
}

/// Removes what an unfinished checkpoint has left, except criu's logs.
pub(crate) fn discard(dir: &Path) {
    let Ok(directory) = Directory::open(dir) else { return };
    for name in directory.names().unwrap_or_default() {
        if name.starts_with(PASS_PREFIX) && directory.kind(&name).is_ok_and(|kind| kind == FileType::Directory) {
            let _ = Directory::open(&directory.path().join(name)).and_then(Directory::remove_all);
        } else if !name.ends_with(".log") {
            let _ = directory.remove(&name);
        }
    }
}

fn supports_sparse(directory: &Directory) -> Result<bool, Error> {
    let name = "foam.probe";
    let probed = directory.create(name)?.set_len(ADDRESS_SPACE_END);
    directory.remove(name)?;
    match probed {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(code) if code == rustix::io::Errno::FBIG.raw_os_error()) => {
            Ok(false)
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(error).at("extend", directory.path().join(name)),
    }
}

/// Returns true for names that are not part of a checkpoint: logs, and files that a restore makes.
pub(crate) fn is_unsealed_file(name: &str) -> bool {
    // a file of ours has a dot before its name until it is completely written
    let ours = name.strip_prefix('.').unwrap_or(name).starts_with("foam");
    ours || name.starts_with("stats-") || name.ends_with(".log") || is_derived(name)
}

/// Returns true for names of files that a restore makes from the image for criu.
pub(crate) fn is_derived(name: &str) -> bool {
    name.starts_with("pagemap-") || name.starts_with("pages-")
}

fn companion_files(directory: &Directory) -> Result<Vec<CompanionFile>, Error> {
    let mut files = Vec::new();
    for name in directory.names()?.into_iter().filter(|name| !is_unsealed_file(name)) {
        if directory.kind(&name)? != FileType::RegularFile {
            continue;
        }
        let (path, file) = (directory.path().join(&name), directory.file(&name)?);
        file.sync_all().at("write to disk", &path)?;
        let (bytes, digest) = digest(file, &path)?;
        files.push(CompanionFile { name, bytes, digest });
    }
    Ok(files)
}

/// Returns length and SHA-256 of a file.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn digest(mut file: File, path: &Path) -> Result<(u64, [u8; 32]), Error> {
    let (mut hasher, mut buffer, mut bytes) = (Sha256::new(), vec![0; 1 << 16], 0);
    loop {
        match file.read(&mut buffer).at("read", path)? {
            0 => return Ok((bytes, hasher.finalize().into())),
            n => {
                hasher.update(&buffer[..n]);
                bytes += n as u64;
            }
        }
    }
}
