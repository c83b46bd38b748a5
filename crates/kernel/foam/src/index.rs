//! The index of a checkpoint: it is written last and is the seal. Without a valid index there is no checkpoint.
//!
//! ```text
//! "STPFOAM3"  length of the body (u64)  SHA-256 of the body  body (postcard)  checksums, group by group
//! ```
//!
//! The body has a digest of each group of checksums: a group is read when it is needed.

use crate::checksums::GroupDigest;
use crate::{ChecksumGroups, Error, Extent, Extents, Form, Memory, Object, PRESENT, Placement};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"STPFOAM3";
/// Bytes that suffice to compute the length of an index.
pub const HEADER_BYTES: usize = 8 + 8 + 32;
/// Limit in bytes, enough for the digests of 64 TiB of memory: a longer file is not an index.
const INDEX_BYTES_MAX: u64 = 1 << 30;

/// Origin of a checkpoint: a restore compares it with its own machine, kernel and criu.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Id of the machine, as in `/etc/machine-id`.
    pub machine: String,
    /// Release of the running kernel, as in `uname -r`.
    pub kernel: String,
    /// The processor's model and features, in short.
    pub processor: String,
    /// Version of the criu that wrote the files beside the index.
    pub criu: String,
    /// Seconds since 1970.
    pub made_s: u64,
    /// Number of the process at the root of the tree.
    pub pid: i32,
    /// Name of that process.
    pub name: String,
}

/// A file of criu, as it was when the checkpoint was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompanionFile {
    /// Name in the directory of the index.
    pub name: String,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file.
    pub digest: [u8; 32],
}

/// One memory, as the file beside the index holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// The process or shared memory that it belongs to.
    pub object: Object,
    /// Pages of the memory.
    pub extents: Extents,
    /// Positions of its pages in the file.
    pub placement: Placement,
    /// Groups of the checksums of its pages.
    pub checksums: ChecksumGroups,
}

/// A whole checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index<M = Recorded> {
    /// Machine, kernel, criu and time of the checkpoint.
    pub origin: Origin,
    /// The form of its files: sparse or dense.
    pub form: Form,
    /// Number of passes over the memory.
    pub passes: u32,
    /// Memories, by object.
    pub memories: Vec<M>,
    /// Files of criu in the same directory.
    pub beside: Vec<CompanionFile>,
}

/// A memory in the body of an index.
#[derive(Serialize, Deserialize)]
struct Entry {
    object: Object,
    windows: Vec<u64>,
    extents: Vec<Extent>,
    /// Digests of the groups of checksums.
    digests: Vec<GroupDigest>,
}

impl Recorded {
    /// Returns the record of a memory with the positions of its pages, and the bytes of its checksums.
    ///
    /// # Errors
    /// A page was announced but not stored.
    pub fn of(memory: &Memory, placement: Placement) -> Result<(Self, Vec<u8>), Error> {
        let (object, extents) = (memory.object(), memory.extents().clone());
        let (checksums, bytes) = ChecksumGroups::of(object, &extents, &memory.checksums)?;
        Ok((Recorded { object, extents, placement, checksums }, bytes))
    }

    fn to_entry(&self) -> Entry {
        Entry {
            object: self.object,
            windows: self.placement.windows().to_vec(),
            extents: self.extents.iter().copied().collect(),
            digests: self.checksums.digests().to_vec(),
        }
    }

    fn of_entry(entry: Entry, form: Form, passes: u32) -> Result<Self, Error> {
        let wrong = |what: &str| Error::Index(format!("{what} of {}", entry.object));
        let placement = Placement::of(form, &entry.windows)?;
        let mut end = 0;
        for extent in &entry.extents {
            Extent::check(extent.start, extent.pages)?;
            if extent.start < end || extent.flags & !(crate::LAZY | PRESENT) != 0 || extent.pass > passes {
                return Err(wrong("has impossible extents"));
            }
            end = extent.end();
            let mut at = extent.start;
            while extent.flags & PRESENT != 0 && at < end {
                let (_, until) = placement.locate(at).ok_or_else(|| wrong("has pages without a place"))?;
                at = until;
            }
        }
        let extents = Extents::of(entry.extents);
        let checksums = ChecksumGroups::from_digests(&extents, entry.digests)
            .ok_or_else(|| wrong("does not have one digest for each group of checksums"))?;
        Ok(Recorded { object: entry.object, extents, placement, checksums })
    }
}

impl Index {
    /// Encodes the index; the bytes of the checksums follow it in the file.
    ///
    /// # Errors
    /// The index cannot be serialized.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        let memories: Vec<Entry> = self.memories.iter().map(Recorded::to_entry).collect();
        let (origin, beside) = (self.origin.clone(), self.beside.clone());
        let body = Index { origin, form: self.form, passes: self.passes, memories, beside };
        let body = postcard::to_stdvec(&body).map_err(|error| Error::Index(error.to_string()))?;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&Sha256::digest(&body));
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }

    /// Returns the length of an index in bytes, from its first [`HEADER_BYTES`] bytes.
    ///
    /// # Errors
    /// The bytes are not the header of an index.
    pub fn length(header: &[u8]) -> Result<u64, Error> {
        let wrong = |what: &str| Error::Index(what.into());
        let header = header.get(..HEADER_BYTES).ok_or_else(|| wrong("ends within its header"))?;
        if header[..8] != MAGIC[..] {
            return Err(wrong("does not begin with its magic number"));
        }
        let length: [u8; 8] = header[8..16].try_into().map_err(|_| wrong("ends within its header"))?;
        match u64::from_le_bytes(length) {
            length if length <= INDEX_BYTES_MAX => Ok(HEADER_BYTES as u64 + length),
            length => Err(Error::Index(format!("has an impossible length of {length} bytes"))),
        }
    }

    /// Decodes an index, and refuses one that is not whole.
    ///
    /// # Errors
    /// The bytes are not a complete and undamaged index.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let wrong = |what: &str| Error::Index(what.into());
        let length = Self::length(bytes)?;
        if length != bytes.len() as u64 {
            return Err(Error::Index(format!("is {} bytes long, and its header contains {length}", bytes.len())));
        }
        let (header, body) = bytes.split_at(HEADER_BYTES);
        if Sha256::digest(body)[..] != header[16..] {
            return Err(wrong("is damaged: its digest is wrong"));
        }
        let body: Index<Entry> = postcard::from_bytes(body).map_err(|error| Error::Index(error.to_string()))?;
        let Index { origin, form, passes, memories, beside } = body;
        let memories = memories.into_iter().map(|entry| Recorded::of_entry(entry, form, passes));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        if memories.windows(2).any(|two| two[0].object >= two[1].object) {
            return Err(Error::Index("names a memory twice".into()));
        }
        if let Some(file) = beside.iter().find(|file| !is_file_name(&file.name)) {
            return Err(Error::Index(format!("names a file outside of the image: {:?}", file.name)));
        }
        Ok(Index { origin, form, passes, memories, beside })
    }

    /// Returns the bytes of checksums that follow the index, for all memories together.
    pub fn checksum_bytes(&self) -> u64 {
        self.memories.iter().map(|recorded| recorded.checksums.bytes()).sum()
    }

    /// Returns the memory of an object.
    pub fn memory(&self, object: Object) -> Option<&Recorded> {
        self.memories.iter().find(|memory| memory.object == object)
    }
}

/// Returns true if a name is that of a file in the directory itself.
fn is_file_name(name: &str) -> bool {
    !name.is_empty() && name.len() < 256 && !name.contains(['/', '\0']) && name != "." && name != ".."
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LAZY;
    use proptest::prelude::*;
    use stillpoint_base::PAGE;

    fn memory(form: Form) -> (Memory, Placement) {
        let mut placement = Placement::new(form);
        let mut memory = Memory::new(Object::Task(7));
        memory.begin_pass();
        for (page, pages, flags) in
            [(0x55_0000, 3, LAZY | PRESENT), (0x7f_0000_0000, 2, PRESENT), (0x7f_0000_0010, 1, LAZY)]
        {
            memory.add(page * PAGE, pages, flags).unwrap();
            for page in (page..page + pages).filter(|_| flags & PRESENT != 0) {
                memory.checksums.set(page * PAGE, [page as u8; 16]);
                placement.assign(page * PAGE);
            }
        }
        memory.end_pass();
        (memory, placement)
    }

    fn index(form: Form) -> Index {
        let (memory, placement) = memory(form);
        let (recorded, checksums) = Recorded::of(&memory, placement).unwrap();
        assert_eq!(recorded.checksums.bytes(), checksums.len() as u64);
        Index {
            origin: Origin {
                machine: "m".into(),
                kernel: "6.18".into(),
                processor: "p".into(),
                criu: "4.2".into(),
                made_s: 1,
                pid: 7,
                name: "redis-server".into(),
            },
            form,
            passes: 1,
            memories: vec![recorded],
            beside: vec![CompanionFile { name: "inventory.img".into(), bytes: 9, digest: [7; 32] }],
        }
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        for form in [Form::Sparse, Form::Dense] {
            let index = index(form);
            assert_eq!(Index::decode(&index.encode().unwrap()).unwrap(), index);
        }
    }

    #[test]
    fn no_byte_can_be_changed_or_left_out() {
        let bytes = index(Form::Dense).encode().unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(Index::decode(&damaged).is_err(), "byte {at}");
            assert!(Index::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn a_page_that_was_announced_and_never_stored_is_refused() {
        let (mut memory, placement) = memory(Form::Sparse);
        memory.checksums.remove(0x55_0000 * PAGE, 0x55_0001 * PAGE);
        assert!(Recorded::of(&memory, placement).unwrap_err().to_string().contains("not stored"));
    }

    #[test]
    fn what_a_digest_covers_is_still_looked_at() {
        let mut outside = index(Form::Sparse);
        outside.beside[0].name = "../../etc/passwd".into();
        assert!(Index::decode(&outside.encode().unwrap()).unwrap_err().to_string().contains("outside"));
        let mut twice = index(Form::Sparse);
        twice.memories.push(twice.memories[0].clone());
        assert!(Index::decode(&twice.encode().unwrap()).unwrap_err().to_string().contains("twice"));
    }

    proptest! {
        #[test]
        fn garbage_is_no_index(body in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = MAGIC.to_vec();
            bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
            bytes.extend_from_slice(&Sha256::digest(&body));
            bytes.extend_from_slice(&body);
            if let Ok(index) = Index::decode(&bytes) {
                prop_assert_eq!(Index::decode(&index.encode().unwrap()).unwrap(), index);
            }
        }
    }
}
