//! Log of the events of memories, in memory that processes share: a server can be killed at any instruction, and the
//! next one continues from the log.
//!
//! The obvious way is to read an event and then to record it. A process that is killed in between has lost it, and the
//! thread that was blocked in `madvise` has continued: the next server would restore pages that were given up. So the
//! kernel itself writes the event into the log: the buffer that `read` gets *is* the next record.

use super::event::{BYTES, Event};
use super::{Error, Memory};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// One record; its number is one higher than that of the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// An event of a memory.
    Event {
        /// Number of the memory in the log.
        memory: u32,
        /// The event.
        event: Event,
    },
    /// A memory is served from now on; memories are numbered from 0 in the order of these records and of forks.
    Memory {
        /// Process number.
        pid: u32,
        /// Its userfaultfd.
        memory: Memory,
    },
    /// A memory is about to be closed: everything is resident.
    Closing(u32),
    /// A memory has been closed.
    Closed(u32),
    /// A note of the server itself.
    Note {
        /// Kind, chosen by the server.
        kind: u32,
        /// Value, depending on the kind.
        value: u64,
    },
}

const EVENT: u32 = 1;
const MEMORY: u32 = 2;
const CLOSING: u32 = 3;
const CLOSED: u32 = 4;
const NOTE: u32 = 5;

#[repr(C)]
struct Slot {
    kind: u32,
    number: u32,
    value: u64,
    message: [u8; BYTES],
}

#[repr(C)]
struct Head {
    /// Number of complete records.
    count: AtomicU64,
    /// Bytes that servers have made resident.
    resident: AtomicU64,
}

/// Bytes before the first record: a page, so that records never share one with the head.
const HEAD_BYTES: usize = 4096;

/// The log. It stays mapped until the process ends; a process that shares it sees the same records.
#[derive(Debug)]
pub struct Log {
    base: NonNull<u8>,
    records: usize,
}

impl Log {
    /// Makes an empty log in memory that children share.
    ///
    /// # Errors
    /// The kernel maps no memory for it.
    pub fn new(records: usize) -> Result<Self, Error> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let bytes = HEAD_BYTES + records * size_of::<Slot>();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping, at an address that the kernel chooses; no other code knows it.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) };
        let base = base.map_err(|source| Error::Call { what: "map the log", source: source.into() })?;
        let base = NonNull::new(base.cast()).ok_or(Error::Full(records))?;
        Ok(Log { base, records })
    }

    fn head(&self) -> &Head {
        // SAFETY: the mapping is page-aligned, longer than a head, zeroed by the kernel (a valid `Head`) and never unmapped;
        // the head is only used through its atomics.
        unsafe { self.base.cast::<Head>().as_ref() }
    }

    /// Returns the number of complete records.
    pub fn len(&self) -> usize {
        self.head().count.load(Ordering::Acquire) as usize
    }

    /// Returns true if nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes that servers have made resident, as they recorded by [`Log::add_resident`].
    pub fn resident(&self) -> u64 {
        self.head().resident.load(Ordering::Acquire)
    }

    /// Records that a server has made this number of bytes resident.
    pub fn add_resident(&self, bytes: u64) {
        self.head().resident.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Returns the number of records for which there is room.
    pub fn free_records(&self) -> usize {
        self.records - self.len()
    }

    fn slot(&self, at: usize) -> Result<*mut Slot, Error> {
        if at >= self.records {
            return Err(Error::Full(self.records));
        }
        // SAFETY: `at` is below the number of slots that were mapped after the head, and slots are aligned there.
        Ok(unsafe { self.base.as_ptr().add(HEAD_BYTES).cast::<Slot>().add(at) })
    }

    /// Appends a record that is not an event.
    ///
    /// # Errors
    /// The log is full.
    pub fn append(&self, record: Record) -> Result<(), Error> {
        let (kind, number, value) = match record {
            Record::Memory { pid, memory } => (MEMORY, pid, memory.descriptor() as u32 as u64),
            Record::Closing(memory) => (CLOSING, memory, 0),
            Record::Closed(memory) => (CLOSED, memory, 0),
            Record::Note { kind, value } => (NOTE, kind, value),
            Record::Event { .. } => return Err(Error::Event(0)),
        };
        let at = self.len();
        let slot = self.slot(at)?;
        // SAFETY: the slot is ours: only one process at a time serves (its successor begins after its death), and readers
        // stay below `count`, which rises afterwards.
        unsafe { slot.write(Slot { kind, number, value, message: [0; BYTES] }) };
        self.head().count.store(at as u64 + 1, Ordering::Release);
        Ok(())
    }

    /// Reads one event of a memory into the log. It is not a complete record until [`Log::commit`]; [`Log::discard`] drops
    /// it.
    ///
    /// # Errors
    /// The log is full, or the userfaultfd cannot be read or sends an unknown event.
    pub fn read(&self, number: u32, memory: Memory) -> Result<Option<Event>, Error> {
        let slot = self.slot(self.len())?;
        // SAFETY: as in `append`: the slot after the last complete record is ours. The kernel writes at most `BYTES`
        // bytes into `message`, which is that long.
        let read = unsafe {
            slot.write(Slot { kind: EVENT, number, value: 0, message: [0; BYTES] });
            // the record names the memory of the event before the event can be there
            fence(Ordering::SeqCst);
            libc::read(memory.descriptor(), (&raw mut (*slot).message).cast(), BYTES)
        };
        match read {
            32 => self.uncommitted().map(|found| found.map(|(_, event)| event)),
            _ => Ok(None),
        }
    }

    /// Returns the event that was read last and neither kept nor passed, with the number of its memory: a killed server
    /// left it.
    ///
    /// # Errors
    /// The log is full, or the event is unknown.
    pub fn uncommitted(&self) -> Result<Option<(u32, Event)>, Error> {
        let at = self.len();
        if at >= self.records {
            return Ok(None);
        }
        let slot = self.slot(at)?;
        // SAFETY: the slot is mapped and zeroed or written by `append` or `read` before; any bytes are a valid `Slot`.
        let slot = unsafe { slot.read() };
        if slot.kind != EVENT {
            return Ok(None);
        }
        Ok(Event::decode(&slot.message)?.map(|event| (slot.number, event)))
    }

    /// Makes the event that was read a complete record.
    pub fn commit(&self) {
        let at = self.head().count.load(Ordering::Relaxed);
        self.head().count.store(at + 1, Ordering::Release);
    }

    /// Drops the event that was read: it has been handled and is not needed later.
    ///
    /// # Errors
    /// The log is full.
    pub fn discard(&self) -> Result<(), Error> {
        let slot = self.slot(self.len())?;
        // SAFETY: as in `append`.
        unsafe { (&raw mut (*slot).kind).write(0) };
        Ok(())
    }

    /// Returns all complete records.
    ///
    /// # Errors
    /// A record contains an unknown event.
    pub fn records(&self) -> Result<Vec<Record>, Error> {
        (0..self.len()).map(|at| self.record(at)).collect()
    }

    fn record(&self, at: usize) -> Result<Record, Error> {
        let slot = self.slot(at)?;
        // SAFETY: a slot below `count` was written as a whole before `count` rose, and is never written again.
        let slot = unsafe { slot.read() };
        Ok(match slot.kind {
            EVENT => {
                Record::Event { memory: slot.number, event: Event::decode(&slot.message)?.ok_or(Error::Event(0))? }
            }
            MEMORY => Record::Memory { pid: slot.number, memory: Memory::of(slot.value as u32 as i32) },
            CLOSING => Record::Closing(slot.number),
            CLOSED => Record::Closed(slot.number),
            _ => Record::Note { kind: slot.number, value: slot.value },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_in_their_order() {
        let log = Log::new(3).unwrap();
        assert!(log.is_empty());
        let written =
            [Record::Memory { pid: 7, memory: Memory::of(5) }, Record::Closing(0), Record::Note { kind: 2, value: 9 }];
        written.iter().for_each(|record| log.append(*record).unwrap());
        assert_eq!(log.records().unwrap(), written);
        assert!(matches!(log.append(written[0]), Err(Error::Full(3))));
        assert_eq!(log.uncommitted().unwrap(), None);
        log.add_resident(4096);
        log.add_resident(8192);
        assert_eq!((log.resident(), log.len()), (12_288, 3));
    }

    #[test]
    fn an_event_that_was_read_is_there_until_it_is_kept_or_passed() {
        let log = Log::new(4).unwrap();
        // a pipe replaces the kernel's side: the test is about the place where `read` puts the bytes
        let (ours, theirs) = rustix::pipe::pipe().unwrap();
        let memory = Memory::of(std::os::fd::AsRawFd::as_raw_fd(&ours));
        let mut message = [0u8; BYTES];
        (message[0], message[9], message[17]) = (0x15, 0x10, 0x20);
        let event = Event::Remove { start: 0x1000, end: 0x2000 };
        for keep in [true, false] {
            rustix::io::write(&theirs, &message).unwrap();
            assert_eq!(log.read(3, memory).unwrap(), Some(event));
            assert_eq!(log.uncommitted().unwrap(), Some((3, event)));
            if keep {
                log.commit()
            } else {
                log.discard().unwrap()
            }
            assert_eq!(log.uncommitted().unwrap(), None);
            assert_eq!(log.records().unwrap(), [Record::Event { memory: 3, event }]);
        }
    }
}
