//! The ledger in a target: finding it, reading it, appending to it.

use crate::Error;
use crate::ledger::{CAPACITY, HEADER_LEN, Ledger, LedgerError, MAGIC, Record, View, decode, encode_header};
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Mapping, Memory, Process};

const PAGE: u64 = 4096;
/// Anonymous read-only mappings larger than this are not searched page by page.
const SEARCH_MAX: u64 = 256 << 20;
const CHUNK: usize = 64 << 10;

/// The ledger of a target: where it lies, and what it says.
pub(crate) struct Store {
    pub(crate) at: Avma,
    pub(crate) ledger: Ledger,
}

/// Finds the ledger of a process. It lies in an anonymous read-only mapping, a kind that programs hardly ever have; the
/// kernel may have merged it with its neighbours, so that it need not begin where the mapping begins.
pub(crate) fn find(process: &Process) -> Result<Option<Store>, Error> {
    let mappings = process.mappings()?;
    find_in(process, &mappings)
}

pub(crate) fn find_in(process: &Process, mappings: &[Mapping]) -> Result<Option<Store>, Error> {
    let memory = process.memory();
    let candidates = mappings.iter().filter(|m| {
        m.read && !m.write && !m.execute && !m.shared && m.inode == 0 && m.path.is_none() && m.len() >= CAPACITY
    });
    let mut found = None;
    for mapping in candidates {
        let mut at = mapping.start.0;
        while at + CAPACITY <= mapping.end.0 && at - mapping.start.0 < SEARCH_MAX {
            let mut magic = [0; 16];
            if memory.read_some(Avma(at), &mut magic) == 16 && magic == *MAGIC {
                if found.replace(Avma(at)).is_some() {
                    return Err(Error::TwoLedgers(process.pid()));
                }
                at += CAPACITY;
            } else {
                at += PAGE;
            }
        }
    }
    found.map(|at| open(memory, at)).transpose()
}

/// Reads the ledger at `at`, as far as it is in use.
fn open(memory: &Memory, at: Avma) -> Result<Store, Error> {
    let mut bytes = Vec::new();
    loop {
        let have = bytes.len();
        bytes.resize((have * 2).clamp(CHUNK, CAPACITY as usize), 0);
        memory.read(Avma(at.0 + have as u64), &mut bytes[have..])?;
        let ledger = decode(&bytes)?;
        // a record that was cut off by our own reading looks like the end: read on until zeroes follow
        let rest = &bytes[ledger.end..];
        if bytes.len() as u64 == CAPACITY || (rest.len() >= 8 && rest[..8] == [0; 8]) {
            return Ok(Store { at, ledger });
        }
    }
}

impl Store {
    /// A new ledger in memory that was just mapped.
    pub(crate) fn create(memory: &Memory, at: Avma, word_offset: i32) -> Result<Self, Error> {
        let header = encode_header(word_offset);
        debug_assert_eq!(header.len(), HEADER_LEN);
        memory.write(at, &header)?;
        Ok(Store { at, ledger: Ledger::new(word_offset) })
    }

    /// Appends a record. When this returns, the record is in the target, whatever happens to us.
    pub(crate) fn append(&mut self, memory: &Memory, record: Record) -> Result<(), Error> {
        let bytes = self.ledger.encode(&record)?;
        memory.write(Avma(self.at.0 + self.ledger.end as u64), &bytes)?;
        self.ledger.appended(record, bytes.len());
        Ok(())
    }

    pub(crate) fn view(&self) -> Result<View, LedgerError> {
        self.ledger.view()
    }
}
