//! Image files: magic numbers, then entries, each after its length.

use crate::Error;
use prost::Message;

const COMMON: u32 = 0x5456_4319;
/// Limit in bytes: a longer entry is not valid.
const ENTRY_BYTES_MAX: usize = 64 << 20;

/// Kinds of images that are read or written here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `inventory.img`: data that all the others depend on.
    Inventory,
    /// `pstree.img`: the processes.
    Pstree,
    /// `files.img`: open files and sockets.
    Files,
    /// `pagemap-*.img`.
    Pagemap,
    /// `tcp-stream-*.img`: the queues of a connection.
    TcpStream,
}

impl Kind {
    fn magic(self) -> u32 {
        match self {
            Kind::Inventory => 0x5831_3116,
            Kind::Pstree => 0x5027_3030,
            Kind::Files => 0x5630_3138,
            Kind::Pagemap => 0x5608_4025,
            Kind::TcpStream => 0x5146_5506,
        }
    }

    /// Returns true if the common magic number is before its own: this holds for all but the inventory.
    fn has_common(self) -> bool {
        self != Kind::Inventory
    }
}

/// Returns the bytes of each entry of an image.
///
/// # Errors
/// The bytes are not an image of this kind, or end within an entry.
pub fn entries(kind: Kind, bytes: &[u8]) -> Result<Vec<&[u8]>, Error> {
    let mut reader = head(kind, bytes)?;
    let mut entries = Vec::new();
    while reader.at < bytes.len() {
        entries.push(entry(&mut reader)?);
    }
    Ok(entries)
}

/// Returns the bytes of the first entry of an image; other data may follow it.
///
/// # Errors
/// The bytes are not an image of this kind, or contain no complete entry.
pub fn first(kind: Kind, bytes: &[u8]) -> Result<&[u8], Error> {
    entry(&mut head(kind, bytes)?)
}

fn head(kind: Kind, bytes: &[u8]) -> Result<Reader<'_>, Error> {
    let mut reader = Reader { bytes, at: 0 };
    if kind.has_common() {
        reader.magic(COMMON)?;
    }
    reader.magic(kind.magic())?;
    Ok(reader)
}

fn entry<'b>(reader: &mut Reader<'b>) -> Result<&'b [u8], Error> {
    let length = reader.word()? as usize;
    if length > ENTRY_BYTES_MAX {
        return Err(Error::Short(reader.at));
    }
    reader.take(length)
}

/// Returns the head of an image file.
pub(crate) fn begin(kind: Kind) -> Vec<u8> {
    let mut bytes = Vec::new();
    if kind.has_common() {
        bytes.extend_from_slice(&COMMON.to_le_bytes());
    }
    bytes.extend_from_slice(&kind.magic().to_le_bytes());
    bytes
}

/// Appends an entry.
pub(crate) fn put(bytes: &mut Vec<u8>, entry: &impl Message) {
    bytes.extend_from_slice(&(entry.encoded_len() as u32).to_le_bytes());
    bytes.extend_from_slice(&entry.encode_to_vec());
}

/// Decodes one entry.
pub(crate) fn message<M: Message + Default>(what: &'static str, bytes: &[u8]) -> Result<M, Error> {
    M::decode(bytes).map_err(|error| Error::Message { what, why: error.to_string() })
}

struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Reader<'b> {
    fn take(&mut self, length: usize) -> Result<&'b [u8], Error> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.bytes.len()).ok_or(Error::Short(self.at))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn word(&mut self) -> Result<u32, Error> {
        let mut word = [0; 4];
        word.copy_from_slice(self.take(4)?);
        Ok(u32::from_le_bytes(word))
    }

    fn magic(&mut self, expected: u32) -> Result<(), Error> {
        match self.word()? {
            found if found == expected => Ok(()),
            found => Err(Error::Magic { found, expected }),
        }
    }
}

messages! {
    struct Inventory {
        dump_criu_run_id: Option<String> = (string, optional, tag = "13"),
    }
}

/// Returns the id of the criu run that made a checkpoint, from `inventory.img`.
///
/// # Errors
/// The bytes are not an inventory.
pub fn run_id(bytes: &[u8]) -> Result<Option<String>, Error> {
    let entries = entries(Kind::Inventory, bytes)?;
    let entry = entries.first().ok_or(Error::Short(bytes.len()))?;
    Ok(message::<Inventory>("the inventory", entry)?.dump_criu_run_id)
}

messages! {
    /// A process of a checkpoint.
    pub struct Process {
        /// Number of the process.
        pub pid: u32 = (uint32, required, tag = "1"),
        /// Number of its parent.
        pub ppid: u32 = (uint32, required, tag = "2"),
        /// Number of its process group.
        pub pgid: u32 = (uint32, required, tag = "3"),
        /// Number of its session.
        pub sid: u32 = (uint32, required, tag = "4"),
        /// Numbers of its threads.
        pub threads: Vec<u32> = (uint32, repeated, packed = "false", tag = "5"),
    }
}

/// Returns the processes that `pstree.img` names, the root first.
///
/// # Errors
/// The bytes are not a complete image of processes.
pub fn processes(bytes: &[u8]) -> Result<Vec<Process>, Error> {
    entries(Kind::Pstree, bytes)?.into_iter().map(|entry| message("a process", entry)).collect()
}

messages! {
    /// A socket of the internet families.
    pub struct InetSocket {
        /// Inode, which names the image of its stream.
        pub ino: u32 = (uint32, required, tag = "2"),
        /// Type of the socket: `SOCK_STREAM` and others.
        pub kind: u32 = (uint32, required, tag = "4"),
        /// State: `TCP_ESTABLISHED` is 1, `TCP_LISTEN` 10.
        pub state: u32 = (uint32, required, tag = "6"),
        /// Our port.
        pub src_port: u32 = (uint32, required, tag = "7"),
        /// The peer's port.
        pub dst_port: u32 = (uint32, required, tag = "8"),
        /// Our address, as words of the kernel's memory.
        pub src_addr: Vec<u32> = (uint32, repeated, packed = "false", tag = "11"),
        /// The peer's address, in the same form.
        pub dst_addr: Vec<u32> = (uint32, repeated, packed = "false", tag = "12"),
        pub(crate) ip: Option<IpOptions> = (message, optional, tag = "16"),
        /// Name of the interface that it is bound to.
        pub ifname: Option<String> = (string, optional, tag = "17"),
    }

    pub(crate) struct IpOptions {
        /// `IP_FREEBIND`: the address need not exist.
        pub(crate) freebind: Option<bool> = (bool, optional, tag = "1"),
    }
}

impl InetSocket {
    /// Returns true if it listens for connections.
    pub fn is_listening(&self) -> bool {
        (self.kind, self.state) == (1, 10)
    }
}

messages! {
    pub(crate) struct File {
        pub(crate) inet: Option<InetSocket> = (message, optional, tag = "4"),
    }
}

/// Returns the internet sockets that `files.img` names.
///
/// # Errors
/// The bytes are not a complete image of files.
pub fn inet_sockets(bytes: &[u8]) -> Result<Vec<InetSocket>, Error> {
    let files = entries(Kind::Files, bytes)?.into_iter().map(|entry| message::<File>("an open file", entry));
    files.filter_map(|file| file.map(|file| file.inet).transpose()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tree() -> Vec<u8> {
        let mut bytes = begin(Kind::Pstree);
        put(&mut bytes, &Process { pid: 7, ppid: 0, pgid: 7, sid: 7, threads: vec![7, 8, 9] });
        put(&mut bytes, &Process { pid: 12, ppid: 7, pgid: 7, sid: 7, threads: vec![12] });
        bytes
    }

    #[test]
    fn processes_are_read_as_they_were_written() {
        let processes = processes(&tree()).unwrap();
        assert_eq!(
            processes.iter().map(|p| (p.pid, p.ppid, p.threads.len())).collect::<Vec<_>>(),
            [(7, 0, 3), (12, 7, 1)]
        );
    }

    #[test]
    fn an_image_of_another_kind_or_a_cut_off_one_is_refused() {
        assert!(matches!(entries(Kind::Files, &tree()), Err(Error::Magic { .. })));
        let whole = tree();
        let ends: Vec<usize> = (8..whole.len()).filter(|end| entries(Kind::Pstree, &whole[..*end]).is_ok()).collect();
        assert_eq!(ends.len(), 2, "only where an entry ends: {ends:?}");
    }

    #[test]
    fn the_inventory_says_which_run_made_it() {
        let mut bytes = begin(Kind::Inventory);
        put(&mut bytes, &Inventory { dump_criu_run_id: Some("0f8aff69".into()) });
        assert_eq!(run_id(&bytes), Ok(Some("0f8aff69".into())));
        assert!(run_id(&[]).is_err());
        assert!(run_id(&bytes[..5]).is_err());
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_entries(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for kind in [Kind::Inventory, Kind::Pstree, Kind::Files, Kind::Pagemap] {
                let mut image = begin(kind);
                image.extend_from_slice(&bytes);
                let _ = entries(kind, &image);
            }
            let mut image = begin(Kind::Files);
            image.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            image.extend_from_slice(&bytes);
            let _ = inet_sockets(&image);
        }
    }
}
