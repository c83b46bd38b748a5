//! A sealed checkpoint: opened, verified, read.

use crate::error::ErrorContext;
use crate::machine_key::SEAL_BYTES;
use crate::store::{SEAL_FILE, digest, is_unsealed_file};
use crate::{Error, MachineKey};
use rustix::fs::{Advice, FileType, fadvise};
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use stillpoint_base::PAGE;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_foam::{Extent, HEADER_BYTES, Index, Object, PRESENT, PageChecksum, Recorded, page_checksum};

/// Bytes that are verified at a time.
const VERIFY_CHUNK_BYTES: u64 = 1 << 20;

/// A checkpoint on disk. Its index is verified when it is opened; [`Image::verify_criu_files`] and [`Image::verify_pages`]
/// verify the rest of it, and each read of a page verifies its checksum.
#[derive(Debug)]
pub struct Image {
    dir: PathBuf,
    directory: Directory,
    index: Index,
    files: Vec<File>,
    seal: File,
    /// Header of the index, which the seal is computed from.
    header: Vec<u8>,
    key_seal: [u8; SEAL_BYTES],
    /// Position of the checksums of each memory in the seal, and those that have been read, group by group.
    checksums: Vec<(u64, Vec<OnceLock<Vec<PageChecksum>>>)>,
}

impl Image {
    /// Opens a sealed image. A restored program has the rights that the image records: a user with write access to it
    /// would have those of root.
    ///
    /// # Errors
    /// There is no image, another user can change it, or its index is damaged.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(SEAL_FILE);
        let opened = Directory::open(dir).and_then(|directory| directory.file(SEAL_FILE).map(|seal| (directory, seal)));
        let (directory, seal) = match opened {
            Err(error) if error.is_not_found() => return Err(Error::Unsealed(dir.to_owned())),
            opened => opened?,
        };
        let damaged = |why: String| Error::Damaged { path: path.clone(), why };
        let length = seal.metadata().at("examine", &path)?.len();
        let read = |bytes: u64| {
            let mut all = vec![0; usize::try_from(bytes.min(length)).unwrap_or(usize::MAX)];
            seal.read_exact_at(&mut all, 0).map(|()| all).at("read", &path)
        };
        let header = read(HEADER_BYTES as u64)?;
        let bytes = Index::length(&header).map_err(|error| damaged(error.to_string()))?;
        let index = Index::decode(&read(bytes)?).map_err(|error| damaged(error.to_string()))?;
        let end = bytes + index.checksum_bytes();
        if length != end + SEAL_BYTES as u64 {
            let checksums = index.checksum_bytes();
            return Err(damaged(format!(
                "the index is not followed by {checksums} bytes of checksums and {SEAL_BYTES} bytes of a seal"
            )));
        }
        let mut key_seal = [0; SEAL_BYTES];
        seal.read_exact_at(&mut key_seal, end).at("read", &path)?;
        let open = |recorded: &Recorded| directory.file(&recorded.object.file_name());
        let files = index.memories.iter().map(open).collect::<Result<_, _>>()?;
        let mut begin = bytes;
        let unread = |recorded: &Recorded| {
            let at = begin;
            begin += recorded.checksums.bytes();
            (at, (0..recorded.checksums.len()).map(|_| OnceLock::new()).collect())
        };
        let checksums = index.memories.iter().map(unread).collect();
        Ok(Image { dir: dir.to_owned(), directory, index, files, seal, header, key_seal, checksums })
    }

    /// Returns true if the machine of this key sealed it as it is now: all that it holds is compared with the index
    /// before it is used.
    pub fn is_sealed_by(&self, key: &MachineKey) -> bool {
        key.is_seal(&self.key_seal, &self.header)
    }

    /// Returns its index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Returns the path of its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the directory, which no other user can change.
    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Compares criu's files with those at the time of the seal. An additional file would also be read by criu.
    ///
    /// # Errors
    /// A file differs, is gone, was not there, or can be changed by another user.
    pub fn verify_criu_files(&self) -> Result<(), Error> {
        let is_listed = |name: &String| self.index.beside.iter().any(|file| file.name == *name);
        for name in self.directory.names()?.iter().filter(|name| !is_unsealed_file(name) && !is_listed(name)) {
            match self.directory.kind(name) {
                // a socket of a daemon
                Ok(FileType::Socket) => {}
                Err(error) if error.is_not_found() => {}
                Ok(_) => {
                    let why = "it is not part of the sealed image".into();
                    return Err(Error::Damaged { path: self.dir.join(name), why });
                }
                Err(error) => return Err(error.into()),
            }
        }
        for file in &self.index.beside {
            let path = self.dir.join(&file.name);
            let (bytes, found) = digest(self.directory.file(&file.name)?, &path)?;
            if (bytes, found) != (file.bytes, file.digest) {
                let why = format!("its {bytes} bytes are not the {} bytes of the time of the seal", file.bytes);
                return Err(Error::Damaged { path, why });
            }
        }
        Ok(())
    }

    /// Compares every page with its checksum, on all processors; returns the number of pages.
    ///
    /// # Errors
    /// A page is not as it was sealed, or a file cannot be read.
    pub fn verify_pages(&self) -> Result<u64, Error> {
        self.verify_selected(|_, _| true)
    }

    /// Compares the pages of selected extents with their checksums, on all processors.
    pub(crate) fn verify_selected(&self, which: impl Fn(&Recorded, &Extent) -> bool) -> Result<u64, Error> {
        let mut parts = Vec::new();
        for recorded in &self.index.memories {
            let stored = recorded.extents.iter().filter(|extent| extent.flags & PRESENT != 0);
            for extent in stored.filter(|extent| which(recorded, extent)) {
                let starts = (extent.start..extent.end()).step_by(VERIFY_CHUNK_BYTES as usize);
                parts.extend(starts.map(|at| (recorded.object, at, (extent.end() - at).min(VERIFY_CHUNK_BYTES))));
            }
        }
        let next = AtomicUsize::new(0);
        let verify = || {
            let mut buffer = vec![0; VERIFY_CHUNK_BYTES as usize];
            while let Some(&(object, at, bytes)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.read(object, at, &mut buffer[..bytes as usize])?;
            }
            Ok(())
        };
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(parts.len()).max(1);
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..workers).map(|_| scope.spawn(verify)).collect();
            let own_result = verify();
            let other_results = others.into_iter().map(|other| {
                other.join().unwrap_or_else(|_| Err(Error::Daemon("a thread that verifies pages panicked".into())))
            });
            std::iter::once(own_result).chain(other_results.collect::<Vec<_>>()).collect::<Result<(), Error>>()
        })?;
        Ok(parts.iter().map(|(_, _, bytes)| bytes / PAGE).sum())
    }

    /// Reads stored pages, and compares each with its checksum.
    ///
    /// # Errors
    /// A page is not stored or not as it was sealed, or a file cannot be read.
    pub fn read(&self, object: Object, address: u64, into: &mut [u8]) -> Result<(), Error> {
        let memory = self.memory(object).ok_or(Error::Page { object, address })?;
        let file = &self.files[memory];
        let mut rest = &mut *into;
        for place in self.file_ranges(memory, address, rest.len() as u64) {
            let (place, bytes) = place?;
            let (now, later) = rest.split_at_mut(bytes as usize);
            read_with_holes(file, now, place).at("read", self.dir.join(object.file_name()))?;
            rest = later;
        }
        for (page, at) in into.chunks(PAGE as usize).zip((address..).step_by(PAGE as usize)) {
            if self.page_checksum(memory, at)? != Some(page_checksum(page)) {
                return Err(Error::Page { object, address: at });
            }
        }
        Ok(())
    }

    /// Drops stored pages that are not read again from the kernel's page cache. Otherwise they would be in memory
    /// twice, and push out of the cache what programs read of their own files.
    pub(crate) fn drop_cached_pages(&self, object: Object, address: u64, bytes: u64) {
        let Some(memory) = self.memory(object) else { return };
        for (place, bytes) in self.file_ranges(memory, address, bytes).map_while(Result::ok) {
            drop_cached(&self.files[memory], place, NonZeroU64::new(bytes));
        }
    }

    /// Drops all pages of the image from the kernel's page cache.
    pub(crate) fn drop_all_cached(&self) {
        self.files.iter().for_each(|file| drop_cached(file, 0, None));
    }

    /// Returns the number of this memory in the index.
    fn memory(&self, object: Object) -> Option<usize> {
        self.index.memories.iter().position(|recorded| recorded.object == object)
    }

    /// Returns the places of stored pages in their memory's file: pieces of a range, one after another.
    fn file_ranges(
        &self,
        memory: usize,
        address: u64,
        bytes: u64,
    ) -> impl Iterator<Item = Result<(u64, u64), Error>> + use<'_> {
        let Recorded { object, placement, .. } = &self.index.memories[memory];
        let (mut from, end) = (address, address + bytes);
        std::iter::from_fn(move || {
            let at = (from < end).then_some(from)?;
            let Some((place, until)) = placement.locate(at) else {
                from = end;
                return Some(Err(Error::Page { object: *object, address: at }));
            };
            from = until.min(end);
            Some(Ok((place, from - at)))
        })
    }

    /// Returns the checksum of a page as it was sealed; its group is read at the first request for one of them.
    fn page_checksum(&self, memory: usize, address: u64) -> Result<Option<PageChecksum>, Error> {
        let groups = &self.index.memories[memory].checksums;
        let Some((group, within)) = groups.place(address) else { return Ok(None) };
        let (begin, known) = &self.checksums[memory];
        if let Some(checksums) = known[group].get() {
            return Ok(checksums.get(within).copied());
        }
        let path = self.dir.join(SEAL_FILE);
        let (at, length) = groups.bytes_of(group);
        let mut bytes = vec![0; length];
        self.seal.read_exact_at(&mut bytes, begin + at).at("read", &path)?;
        let damaged = || Error::Damaged { path, why: format!("the checksums of pages near {address:#x} are wrong") };
        let checksums = groups.decode(group, &bytes).ok_or_else(damaged)?;
        Ok(known[group].get_or_init(|| checksums).get(within).copied())
    }
}

/// Drops pages from the page cache; only a hint, pages that cannot be dropped stay.
fn drop_cached(file: &File, place: u64, bytes: Option<NonZeroU64>) {
    if let Err(error) = fadvise(file, place, bytes, Advice::DontNeed) {
        tracing::debug!("cached pages of an image: {error}");
    }
}

/// Reads, and treats everything after the end of the file as a hole.
pub(crate) fn read_with_holes(file: &File, mut into: &mut [u8], mut place: u64) -> std::io::Result<()> {
    while !into.is_empty() {
        match file.read_at(into, place) {
            Ok(0) => {
                into.fill(0);
                return Ok(());
            }
            Ok(n) => {
                place += n as u64;
                into = &mut into[n..];
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu_files::{RestoreMode, is_read_by_criu};
    use crate::store::Store;
    use std::fs;
    use std::process::Command;
    use stillpoint_kernel_foam::{Form, LAZY, Origin};

    const HEAP: u64 = 0x5555_5555_5000;
    const STACK: u64 = 0x7fff_ffff_0000;

    fn origin() -> Origin {
        let (machine, kernel, processor, criu, name) = Default::default();
        Origin { machine, kernel, processor, criu, made_s: 0, pid: 7, name }
    }

    fn page(fill: u8) -> Vec<u8> {
        vec![fill; PAGE as usize]
    }

    /// Makes two passes: the second one stores one page again, makes one zero and drops one.
    fn two_passes(dir: &Path, form: Form) -> (Image, u64) {
        let object = Object::Task(7);
        let mut store = Store::create(dir, Some(form)).unwrap();
        fs::write(dir.join("inventory.img"), "criu's").unwrap();
        store.begin_pass();
        store.open(object).unwrap();
        assert!(!store.has_parent(object));
        store.add(object, HEAP, 4, LAZY | PRESENT).unwrap();
        store.put(object, HEAP, &[page(1), page(2), page(0), page(4)].concat()).unwrap();
        store.add(object, STACK, 1, PRESENT).unwrap();
        store.put(object, STACK, &page(9)).unwrap();
        store.end_pass().unwrap();
        store.begin_pass();
        assert!(store.has_parent(object));
        store.open(object).unwrap();
        store.keep_unchanged(object, HEAP, 1).unwrap();
        store.add(object, HEAP + PAGE, 2, LAZY | PRESENT).unwrap();
        store.put(object, HEAP + PAGE, &[page(0), page(7)].concat()).unwrap();
        store.keep_unchanged(object, STACK, 1).unwrap();
        store.end_pass().unwrap();
        let (written, _) = store.written();
        store.seal(origin(), &MachineKey::plain()).unwrap();
        (Image::open(dir).unwrap(), written / PAGE)
    }

    fn read(image: &Image, address: u64) -> Option<u8> {
        let mut bytes = page(0xee);
        image.read(Object::Task(7), address, &mut bytes).ok().map(|()| bytes[17])
    }

    /// Returns the forms to test: memory file systems accept files of any length; without one, only the dense form is
    /// tested.
    fn forms() -> Vec<(Form, tempfile::TempDir)> {
        let mut forms = vec![(Form::Dense, tempfile::tempdir().unwrap())];
        forms.extend(tempfile::tempdir_in("/dev/shm").ok().map(|dir| (Form::Sparse, dir)));
        forms
    }

    /// Returns the bytes of a file that are in the page cache.
    fn cached(path: &Path) -> u64 {
        let told = Command::new("fincore").args(["--bytes", "--noheadings", "--output", "RES"]).arg(path).output();
        String::from_utf8(told.unwrap().stdout).unwrap().trim().parse().unwrap()
    }

    #[test]
    fn the_cache_of_files_forgets_what_has_come() {
        // beside the test program, as /tmp may be in memory, whose pages cannot be dropped
        let built = std::env::current_exe().unwrap();
        let parent = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
        let (object, dir, pages) = (Object::Task(7), parent.path().join("image"), 64);
        let mut store = Store::create(&dir, Some(Form::Dense)).unwrap();
        store.begin_pass();
        store.open(object).unwrap();
        store.add(object, HEAP, pages, PRESENT).unwrap();
        store.put(object, HEAP, &page(3).repeat(pages as usize)).unwrap();
        store.end_pass().unwrap();
        store.seal(origin(), &MachineKey::plain()).unwrap();
        let (image, path) = (Image::open(&dir).unwrap(), dir.join(object.file_name()));
        image.drop_all_cached();
        if cached(&path) != 0 {
            return stillpoint_testing::skipped(format!("{} keeps its files in memory", dir.display()));
        }
        assert_eq!(read(&image, HEAP), Some(3));
        assert!(cached(&path) >= PAGE);
        image.drop_cached_pages(object, HEAP, pages * PAGE);
        assert_eq!((cached(&path), read(&image, HEAP)), (0, Some(3)));
        image.drop_all_cached();
        assert_eq!(cached(&path), 0);
    }

    #[test]
    fn passes_overwrite_in_place_and_leave_no_trace_of_what_is_gone() {
        for (form, parent) in forms() {
            let dir = parent.path().join("image");
            let (image, written) = two_passes(&dir, form);
            assert_eq!(written, 5, "zeros are not written");
            let found: Vec<Option<u8>> = (0..4).map(|n| read(&image, HEAP + n * PAGE)).collect();
            assert_eq!(found, [Some(1), Some(0), Some(7), None], "{form:?}");
            assert_eq!(read(&image, STACK), Some(9));
            assert_eq!(image.verify_pages().unwrap(), 4);
            image.verify_criu_files().unwrap();
            let passes: Vec<u32> = image.index().memories[0].extents.iter().map(|extent| extent.pass).collect();
            assert_eq!(passes, [1, 2, 1]);
            use std::os::unix::fs::MetadataExt;
            let blocks = fs::metadata(dir.join("foam-task-7.img")).unwrap().blocks();
            assert!(blocks * 512 <= 4 * PAGE, "{form:?}: {blocks} blocks: holes were punched");
        }
    }

    /// Passes in which pages appear, disappear, become zero and appear again unchanged, compared with a list of pages.
    #[test]
    fn an_image_is_what_its_last_pass_contains() {
        let object = Object::Task(7);
        for seed in 1..=60u64 {
            let mut generator = stillpoint_base::Random::new(seed);
            let mut random = |below: u64| generator.below(below);
            let parent = tempfile::tempdir().unwrap();
            let dir = parent.path().join("image");
            let mut store = Store::create(&dir, Some(Form::Dense)).unwrap();
            store.disable_tracking();
            let mut plain = [None; 24];
            for _ in 0..1 + random(4) {
                store.begin_pass();
                store.open(object).unwrap();
                plain = plain.map(|before| match random(4) {
                    0 => None,
                    1 => before,
                    _ => Some(random(3) as u8),
                });
                let mut at = 0;
                while at < plain.len() {
                    let run = plain[at..].iter().take_while(|page| page.is_some()).count();
                    if run > 0 {
                        let start = HEAP + at as u64 * PAGE;
                        store.add(object, start, run as u64, LAZY | PRESENT).unwrap();
                        let pages: Vec<u8> =
                            plain[at..at + run].iter().flatten().flat_map(|fill| page(*fill)).collect();
                        store.put(object, start, &pages).unwrap();
                    }
                    at += run.max(1);
                }
                store.end_pass().unwrap();
            }
            store.seal(origin(), &MachineKey::plain()).unwrap();
            let image = Image::open(&dir).unwrap();
            let found: Vec<Option<u8>> = (0..24).map(|n| read(&image, HEAP + n * PAGE)).collect();
            assert_eq!(found, plain, "seed {seed}");
            assert_eq!(image.verify_pages().unwrap(), plain.iter().flatten().count() as u64, "seed {seed}");
        }
    }

    #[test]
    fn what_is_not_part_of_an_image_damages_it_but_not_what_is_written_beside_it() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("image");
        let (image, _) = two_passes(&dir, Form::Dense);
        // of the daemon, in the middle of a write, or left when it was killed there
        for name in ["foam.fill", ".foam.fill.4121-7", "restore.log", "stats-restore", "pages-1.img"] {
            fs::write(dir.join(name), "x").unwrap();
            image.verify_criu_files().unwrap();
        }
        for name in ["ids-7.img", ".inventory.img"] {
            fs::write(dir.join(name), "x").unwrap();
            let error = image.verify_criu_files().unwrap_err();
            assert!(error.is_refusal() && error.to_string().contains("not part of the sealed image"), "{error}");
            fs::remove_file(dir.join(name)).unwrap();
        }
    }

    #[test]
    fn damage_anywhere_is_found_and_named() {
        for (form, parent) in forms() {
            let dir = parent.path().join("image");
            let (image, _) = two_passes(&dir, form);
            let (place, _) = image.index().memories[0].placement.locate(HEAP).unwrap();
            let data = fs::OpenOptions::new().read(true).write(true).open(dir.join("foam-task-7.img")).unwrap();
            let mut whole = [0];
            data.read_exact_at(&mut whole, place + 100).unwrap();
            data.write_all_at(&[0xff], place + 100).unwrap();
            let error = Image::open(&dir).unwrap().verify_pages().unwrap_err();
            assert_eq!(error.to_string(), format!("page {HEAP:#x} of process 7 is damaged"));
            assert!(error.is_refusal());
            fs::write(dir.join("inventory.img"), "critter").unwrap();
            assert!(image.verify_criu_files().unwrap_err().to_string().contains("inventory.img is damaged"));
            let seal = fs::read(dir.join(SEAL_FILE)).unwrap();
            let damaged = |bytes: &[u8]| {
                fs::write(dir.join(SEAL_FILE), bytes).unwrap();
                Image::open(&dir).and_then(|image| image.verify_pages()).unwrap_err().to_string()
            };
            let turned = |at: usize| {
                let mut seal = seal.clone();
                seal[at] ^= 1;
                damaged(&seal)
            };
            for error in [turned(60), damaged(&seal[..40]), damaged(&seal[..60]), damaged(&seal[..seal.len() - 1])] {
                assert!(error.contains("foam.seal is damaged"), "{error}");
            }
            data.write_all_at(&whole, place + 100).unwrap();
            // a checksum is read with its page
            let error = turned(seal.len() - 1 - SEAL_BYTES);
            assert!(error.contains("foam.seal is damaged: the checksums of pages near 0x7ff"), "{form:?}: {error}");
        }
    }

    #[test]
    fn what_criu_reads_by_itself_is_compared_before() {
        let Some((form, parent)) = forms().into_iter().find(|(form, _)| *form == Form::Sparse) else { return };
        let dir = parent.path().join("image");
        let (image, _) = two_passes(&dir, form);
        let data = fs::OpenOptions::new().write(true).open(dir.join("foam-task-7.img")).unwrap();
        let damage = |address| {
            let (place, _) = image.index().memories[0].placement.locate(address).unwrap();
            data.write_all_at(&[0xff], place + 100).unwrap();
        };
        let verify = |restore| image.verify_selected(|recorded, extent| is_read_by_criu(recorded, extent, restore));
        assert_eq!((verify(RestoreMode::OnDemand).unwrap(), verify(RestoreMode::Eager).unwrap()), (1, 0));
        // a page that may wait is compared when it is fetched
        damage(HEAP);
        assert_eq!(verify(RestoreMode::OnDemand).unwrap(), 1);
        damage(STACK);
        let error = verify(RestoreMode::OnDemand).unwrap_err();
        assert_eq!(error.to_string(), format!("page {STACK:#x} of process 7 is damaged"));
    }

    /// Everything is made by the code of the tool, except what needs the key.
    #[test]
    fn an_image_that_was_made_without_the_key_lacks_the_seal_of_this_machine() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("image");
        let (image, _) = two_passes(&dir, Form::Dense);
        let (ours, other_results) =
            (MachineKey::plain(), MachineKey::read_or_make(&parent.path().join("key")).unwrap());
        assert!(image.is_sealed_by(&ours) && !image.is_sealed_by(&other_results));
        let key_seal = image.key_seal;
        // one with the same record of its pages, or another one, with the old seal
        for pid in [7, 8] {
            let mut index = image.index().clone();
            index.origin.pid = pid;
            let bytes = index.encode().unwrap();
            let checksums = fs::read(dir.join(SEAL_FILE)).unwrap()[image.index().encode().unwrap().len()..].to_vec();
            fs::write(dir.join(SEAL_FILE), [bytes, checksums].concat()).unwrap();
            let found = Image::open(&dir).unwrap();
            assert_eq!((found.is_sealed_by(&ours), found.key_seal), (pid == 7, key_seal));
        }
    }

    #[test]
    fn without_a_seal_there_is_no_checkpoint() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("image");
        let mut store = Store::create(&dir, None).unwrap();
        store.begin_pass();
        store.open(Object::Task(7)).unwrap();
        assert!(matches!(Image::open(&dir), Err(Error::Unsealed(_))));
        store.end_pass().unwrap();
        store.seal(origin(), &MachineKey::plain()).unwrap();
        assert!(Image::open(&dir).is_ok());
        assert!(matches!(Store::create(&dir, None), Err(Error::Occupied(_))));
    }
}
