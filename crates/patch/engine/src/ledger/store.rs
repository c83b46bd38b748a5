//! Ledger in a target: finding, reading and appending.

use super::{CAPACITY, HEADER_LEN, Ledger, MAGIC, Record, View, decode_header, encode_header, is_truncated};
use crate::Error;
use stillpoint_base::PAGE;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Mapping, Memory, Pagemap, Process};

/// Largest searched memory of one process in bytes, counted in touched pages.
const SEARCHED_BYTES_MAX: u64 = 1 << 30;
/// Largest size of the mappings that are walked for such pages, in bytes.
const WALKED_BYTES_MAX: u64 = 64 << 30;
/// Bytes of the first read; each further read is twice as long.
const FIRST_READ_LEN: usize = 4 << 10;

/// Ledger of a target: its address and contents.
pub(crate) struct Store {
    pub(crate) at: Avma,
    pub(crate) ledger: Ledger,
}

/// Finds the ledger of a process. It is in an anonymous read-only mapping, which programs hardly ever have. The kernel may have merged it
/// with its neighbours, so it need not begin where the mapping begins.
pub(crate) fn find(process: &Process) -> Result<Option<Store>, Error> {
    let mappings = process.mappings()?;
    find_in(process, &mappings)
}

pub(crate) fn find_in(process: &Process, mappings: &[Mapping]) -> Result<Option<Store>, Error> {
    locate(process, mappings)?.map(|at| Store::open(process.memory(), at)).transpose()
}

fn may_hold_ledger(m: &Mapping) -> bool {
    m.read && !m.write && !m.execute && !m.shared && m.inode == 0 && m.path.is_none() && m.len() >= CAPACITY
}

/// Returns false for the mappings of a process that certainly has no ledger.
pub(crate) fn has_place_for_ledger(mappings: &[Mapping]) -> bool {
    mappings.iter().any(may_hold_ledger)
}

/// Returns the address of the ledger.
fn locate(process: &Process, mappings: &[Mapping]) -> Result<Option<Avma>, Error> {
    let memory = process.memory();
    let candidates = mappings.iter().filter(|mapping| may_hold_ledger(mapping));
    let mut pages = Pagemap::of(process.pid());
    let (mut walked, mut searched) = (0, 0);
    let mut found = None;
    for mapping in candidates {
        walked += mapping.len();
        let mut at = mapping.start.0;
        while at + CAPACITY <= mapping.end.0 {
            if walked > WALKED_BYTES_MAX || searched > SEARCHED_BYTES_MAX {
                return Err(Error::TooMuchMemory(process.pid()));
            }
            if !pages.is_held(Avma(at)) {
                at += PAGE;
                continue;
            }
            searched += PAGE;
            let mut magic = [0; 16];
            if memory.read_some(Avma(at), &mut magic) == 16 && magic == *MAGIC {
                if found.replace(Avma(at)).is_some() {
                    return Err(Error::MultipleLedgers(process.pid()));
                }
                at += CAPACITY;
            } else {
                at += PAGE;
            }
        }
    }
    Ok(found)
}

/// Reads the present ledger; `known` holds the earlier records. Records are only appended, so the earlier ones stay valid.
pub(crate) fn refresh(process: &Process, mappings: &[Mapping], known: Option<Store>) -> Result<Option<Store>, Error> {
    let Some(at) = locate(process, mappings)? else { return Ok(None) };
    let mut store = match known {
        Some(known) if known.at == at => known,
        _ => return Store::open(process.memory(), at).map(Some),
    };
    store.read_more(process.memory())?;
    Ok(Some(store))
}

impl Store {
    fn open(memory: &Memory, at: Avma) -> Result<Self, Error> {
        let mut store = Store { at, ledger: decode_header(&memory.read_array::<HEADER_LEN>(at)?)? };
        store.read_more(memory)?;
        Ok(store)
    }

    /// Reads the records after the known ones, as far as the ledger is in use.
    fn read_more(&mut self, memory: &Memory) -> Result<(), Error> {
        let mut len = FIRST_READ_LEN;
        loop {
            let (end, room) = (self.ledger.end, CAPACITY as usize - self.ledger.end);
            let bytes = memory.read_vec(Avma(self.at.0 + end as u64), len.min(room))?;
            self.ledger.read_more(&bytes)?;
            if bytes.len() == room || !is_truncated(&bytes[self.ledger.end - end..]) {
                return Ok(());
            }
            len *= 2;
        }
    }

    /// Creates a new ledger in memory that was just mapped.
    pub(crate) fn create(memory: &Memory, at: Avma, word_offset: i32) -> Result<Self, Error> {
        memory.write(at, &encode_header(word_offset))?;
        Ok(Store { at, ledger: Ledger::new(word_offset) })
    }

    /// Appends a record. When this returns, the record is in the target, even if the tool is killed afterwards.
    pub(crate) fn append(&mut self, memory: &Memory, record: Record) -> Result<(), Error> {
        let bytes = self.ledger.encode(&record)?;
        if let Some(header) = self.ledger.newer_header(&record) {
            memory.write(self.at, &header)?;
            self.ledger.note_newer_header();
        }
        memory.write(Avma(self.at.0 + self.ledger.end as u64), &bytes)?;
        Ok(self.ledger.advance(record, bytes.len())?)
    }

    /// Address of the ledger in the target.
    pub(crate) fn at(&self) -> Avma {
        self.at
    }

    pub(crate) fn view(&self) -> &View {
        &self.ledger.view
    }
}
