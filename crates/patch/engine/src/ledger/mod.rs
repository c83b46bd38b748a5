//! Records of a target's patches, located in its own memory, so that a killed tool leaves all data that the next call needs.
//!
//! ```text
//! magic 16 | version u32 | word offset i32 | check 8 | records ...
//! record: payload length u32 | sequence u32 | check 8 | payload (postcard), padded to 8
//! ```
//! Records are only appended. An incompletely written record fails its check, ends the list, and the next record overwrites it. The region
//! is mapped read-only into the target (the tool writes through `/proc/PID/mem`), so that no fault of the target damages it. But the target
//! may forge all of it, so a record that breaks a rule ([`validation`]) is invalid.

mod record;
pub(crate) mod store;
mod validation;
mod view;

pub use record::{
    ConstantRecord, Contents, DataTransition, ExportRecord, FunctionRecord, HookRecord, LookupRedirectRecord,
    NamedSpan, OffStackRecord, Phase, PlacedPatch, Record, Side, Site, Span, SymbolRecord, Transition,
};
pub(crate) use view::first_of;
pub use view::{OpenTransition, Origin, Version, View};

use sha2::{Digest, Sha256};

/// First bytes of a ledger.
pub const MAGIC: &[u8; 16] = b"STILLPOINT-LEDG\n";
/// Version of the layout.
pub const VERSION: u32 = 5;
/// Version of a ledger without changes of data: earlier programs read it too.
const VERSION_WITHOUT_DATA: u32 = 4;
/// Bytes reserved for a ledger in a target; only written pages use memory.
pub const CAPACITY: u64 = 16 << 20;
/// Bytes before the first record.
pub const HEADER_LEN: usize = 32;
const RECORD_HEADER_LEN: usize = 16;

/// The reason why bytes are not a ledger.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The bytes do not start with the magic bytes of a ledger.
    #[error("the memory holds no ledger")]
    Magic,
    /// Another version of stillpoint wrote it.
    #[error("the ledger has version {0}, but this program reads version {VERSION}")]
    Version(u32),
    /// The checksum of the header does not match.
    #[error("the header of the ledger is damaged")]
    Header,
    /// The records contradict each other.
    #[error("the ledger contradicts itself: {0}")]
    Inconsistent(String),
    /// There is no room for another record.
    #[error("the ledger is full ({0} of {CAPACITY} bytes)")]
    Full(usize),
    /// A record cannot be encoded.
    #[error("a ledger record cannot be encoded: {0}")]
    Encode(#[from] postcard::Error),
}

/// State from the records of a target, and the position of the next record.
#[derive(Debug, Clone, PartialEq)]
pub struct Ledger {
    /// Offset in bytes of the generation word from the thread pointer, the same in every thread.
    pub word_offset: i32,
    /// State that all records define together.
    pub view: View,
    /// Number of bytes used.
    pub end: usize,
    /// Number of records so far.
    count: u32,
    /// Version of the header.
    version: u32,
}

fn check(sequence: u32, payload: &[u8]) -> [u8; 8] {
    let digest = Sha256::new().chain_update(sequence.to_le_bytes()).chain_update(payload).finalize();
    std::array::from_fn(|i| digest[i])
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

/// Returns the header of a new ledger, without changes of data.
pub fn encode_header(word_offset: i32) -> [u8; HEADER_LEN] {
    header(word_offset, VERSION_WITHOUT_DATA)
}

fn header(word_offset: i32, version: u32) -> [u8; HEADER_LEN] {
    let mut out = [0; HEADER_LEN];
    out[..16].copy_from_slice(MAGIC);
    out[16..20].copy_from_slice(&version.to_le_bytes());
    out[20..24].copy_from_slice(&word_offset.to_le_bytes());
    let check = check(0, &out[..24]);
    out[24..].copy_from_slice(&check);
    out
}

/// Reads a ledger; never panics, never allocates more than a small multiple of the input.
///
/// # Errors
/// The header is not that of a ledger of this version, or a complete record contradicts an earlier one.
pub fn decode(bytes: &[u8]) -> Result<Ledger, LedgerError> {
    let mut ledger = decode_header(bytes)?;
    ledger.read_more(&bytes[HEADER_LEN..])?;
    Ok(ledger)
}

/// Reads the header of a ledger; the records are not read yet.
///
/// # Errors
/// The magic bytes, the version or the checksum are wrong, or `bytes` is shorter than a header.
pub fn decode_header(bytes: &[u8]) -> Result<Ledger, LedgerError> {
    if bytes.get(..16) != Some(MAGIC) {
        return Err(LedgerError::Magic);
    }
    let version = u32_at(bytes, 16).ok_or(LedgerError::Header)?;
    if ![VERSION_WITHOUT_DATA, VERSION].contains(&version) {
        return Err(LedgerError::Version(version));
    }
    let header = bytes.get(..HEADER_LEN).ok_or(LedgerError::Header)?;
    if header[24..] != check(0, &header[..24]) {
        return Err(LedgerError::Header);
    }
    let word_offset = u32_at(bytes, 20).ok_or(LedgerError::Header)? as i32;
    Ok(Ledger { version, ..Ledger::new(word_offset) })
}

/// Returns the length in bytes of a record with a payload of this length.
fn padded(payload_len: usize) -> usize {
    (RECORD_HEADER_LEN + payload_len).next_multiple_of(8)
}

/// Returns true if a record begins in `bytes` whose stated length exceeds them.
pub fn is_truncated(bytes: &[u8]) -> bool {
    u32_at(bytes, 0).is_none_or(|len| len > 0 && padded(len as usize) > bytes.len())
}

/// Decodes the record at the start of `bytes`, if it is complete; returns it with its padded length.
fn decode_record(bytes: &[u8], sequence: u32) -> Option<(Record, usize)> {
    let payload_len = u32_at(bytes, 0)? as usize;
    if payload_len == 0 || u32_at(bytes, 4)? != sequence {
        return None;
    }
    let payload = bytes.get(RECORD_HEADER_LEN..RECORD_HEADER_LEN + payload_len)?;
    if bytes[8..16] != check(sequence, payload) {
        return None;
    }
    let (record, rest) = postcard::take_from_bytes(payload).ok()?;
    let len = padded(payload_len);
    (rest.is_empty() && len <= bytes.len()).then_some((record, len))
}

impl Ledger {
    /// Returns a ledger without records.
    pub fn new(word_offset: i32) -> Self {
        Ledger { word_offset, view: View::default(), end: HEADER_LEN, count: 0, version: VERSION_WITHOUT_DATA }
    }

    /// Returns the header to be written before a record that earlier programs cannot read, if the present one is of theirs.
    pub(crate) fn newer_header(&self, record: &Record) -> Option<[u8; HEADER_LEN]> {
        let needs = matches!(record, Record::PlacedData(_) | Record::BeginWithData(..));
        (needs && self.version < VERSION).then(|| header(self.word_offset, VERSION))
    }

    /// Records that [`Ledger::newer_header`] has been written.
    pub(crate) fn note_newer_header(&mut self) {
        self.version = VERSION;
    }

    /// Returns the bytes of one more record, to be written at `self.end` before [`Ledger::advance`] is called.
    ///
    /// # Errors
    /// The record breaks a rule, or there is no room for it: then nothing may be written.
    pub fn encode(&self, record: &Record) -> Result<Vec<u8>, LedgerError> {
        validation::check(&self.view, record)?;
        let payload = postcard::to_stdvec(record)?;
        let sequence = self.count + 1;
        let mut out = Vec::with_capacity(payload.len() + 24);
        out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        out.extend_from_slice(&sequence.to_le_bytes());
        out.extend_from_slice(&check(sequence, &payload));
        out.extend_from_slice(&payload);
        out.resize(out.len().next_multiple_of(8), 0);
        if (self.end + out.len()) as u64 > CAPACITY {
            return Err(LedgerError::Full(self.end));
        }
        Ok(out)
    }

    /// Records that the `len` bytes of `record` have been written.
    ///
    /// # Errors
    /// [`LedgerError::Inconsistent`] if the record contradicts earlier ones.
    pub fn advance(&mut self, record: Record, len: usize) -> Result<(), LedgerError> {
        self.view.add(record)?;
        self.count += 1;
        self.end += len;
        Ok(())
    }

    /// Reads the complete records in `bytes`, which are located at `self.end`; refuses a record that this tool would never write.
    ///
    /// # Errors
    /// [`LedgerError::Inconsistent`] for a complete record that contradicts earlier ones.
    pub fn read_more(&mut self, bytes: &[u8]) -> Result<(), LedgerError> {
        let start = self.end;
        while let Some((record, len)) = decode_record(&bytes[self.end - start..], self.count + 1) {
            self.advance(record, len)?;
        }
        Ok(())
    }
}

/// Returns the first transition of a process, which changes nothing.
#[cfg(test)]
fn first_transition() -> Transition {
    Transition {
        number: 1,
        operation: "apply".into(),
        state: stillpoint_patch_format::Avma(0x1000),
        before: vec![],
        after: vec![],
        sites: vec![],
        constants: vec![],
        data: None,
        trampolines: vec![],
        leave: vec![],
        enter: vec![],
        staying: vec![],
        loop_entries: vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_patch_format::Avma;

    fn records() -> [Record; 2] {
        let transition = first_transition();
        [Record::Begin(Box::new(transition)), Record::Phase { transition: 1, phase: Phase::Migrating }]
    }

    fn image(ledger: &mut Ledger, records: &[Record]) -> Vec<u8> {
        let mut bytes = encode_header(ledger.word_offset).to_vec();
        for record in records {
            let encoded = ledger.encode(record).expect("encodes");
            bytes.extend_from_slice(&encoded);
            ledger.advance(record.clone(), encoded.len()).expect("consistent");
        }
        bytes
    }

    #[test]
    fn what_was_written_is_read_back_with_any_rest() {
        let mut ledger = Ledger::new(0x278);
        let mut bytes = image(&mut ledger, &records());
        assert_eq!(decode(&bytes), Ok(ledger.clone()));
        bytes.resize(4096, 0);
        assert_eq!(decode(&bytes), Ok(ledger));
    }

    #[test]
    fn what_is_read_on_is_what_is_read_at_once() {
        let mut ledger = Ledger::new(0x278);
        let bytes = image(&mut ledger, &records());
        for cut in HEADER_LEN..bytes.len() {
            let mut read = decode(&bytes[..cut]).expect("header is whole");
            assert!(is_truncated(&bytes[read.end..cut]), "cut at {cut}");
            read.read_more(&bytes[read.end..]).expect("records are consistent");
            assert_eq!(read, ledger, "cut at {cut}");
        }
    }

    #[test]
    fn records_that_contradict_each_other_are_refused() {
        let [_, phase] = records();
        let mut ledger = Ledger::new(0x278);
        let encoded = ledger.encode(&phase).expect("encodes");
        assert!(matches!(ledger.read_more(&encoded), Err(LedgerError::Inconsistent(_))));
    }

    #[test]
    fn only_a_commit_leaves_older_transitions_behind() {
        let [begin, _] = records();
        let mut view = View::default();
        let mut recent = Vec::new();
        for (number, end) in [(1, Phase::Committed), (2, Phase::Aborted), (3, Phase::Aborted), (4, Phase::Committed)] {
            let Record::Begin(first) = begin.clone() else { unreachable!("the first record begins") };
            view.add(Record::Begin(Box::new(Transition { number, ..*first }))).expect("begins");
            view.add(Record::Phase { transition: number, phase: end }).expect("ends");
            recent.push(view.recent.iter().map(|t| t.number).collect::<Vec<_>>());
        }
        assert_eq!(recent, [vec![1], vec![1, 2], vec![1, 2, 3], vec![4]]);
    }

    #[test]
    fn changes_of_data_are_read_back_and_raise_the_version() {
        let [begin, _] = records();
        let Record::Begin(begin) = begin else { unreachable!("the first record begins") };
        let changes = vec![Contents { name: "limits".into(), at: Avma(0x4000), from: vec![1], to: vec![2] }];
        let data = DataTransition { changes, opened: vec![], completer: Avma(0x9000) };
        let record = Record::BeginWithData(begin, Box::new(data.clone()));
        let mut ledger = Ledger::new(0x278);
        let encoded = ledger.encode(&record).expect("encodes");
        let header = ledger.newer_header(&record).expect("earlier programs would take the record for the end");
        ledger.note_newer_header();
        assert_eq!(ledger.newer_header(&record), None);
        ledger.advance(record, encoded.len()).expect("consistent");
        let read = decode(&[&header[..], &encoded].concat()).expect("decodes");
        assert_eq!(read, ledger);
        let open = read.view.unfinished.expect("it has begun");
        assert_eq!(open.transition.data.as_deref(), Some(&data));
        assert_eq!(decode(&encode_header(0x278)).expect("an earlier program's").version, VERSION_WITHOUT_DATA);
    }

    #[test]
    fn a_header_cut_short_is_refused() {
        let header = encode_header(0x278);
        for len in 0..HEADER_LEN {
            assert!(decode(&header[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_torn_record_ends_the_list_and_is_written_over() {
        let mut ledger = Ledger::new(0x278);
        let bytes = image(&mut ledger, &records());
        let mut one = Ledger::new(0x278);
        image(&mut one, &records()[..1]);
        for cut in one.end..bytes.len() - 1 {
            let mut torn = bytes[..cut].to_vec();
            torn.resize(8192, 0);
            let read = decode(&torn).expect("header is whole");
            // the padding at the end of a record is zero in both cases
            assert!(read == one || (read == ledger && cut + 8 > bytes.len()), "cut at {cut}");
        }
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let mut ledger = Ledger::new(0x278);
        let bytes = image(&mut ledger, &records()[..1]);
        let payload_end = HEADER_LEN + RECORD_HEADER_LEN + u32_at(&bytes, HEADER_LEN).expect("length") as usize;
        for bit in 0..payload_end * 8 {
            let mut spoilt = bytes.clone();
            spoilt[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(decode(&spoilt), Ok(ledger.clone()), "bit {bit}");
        }
    }
}
