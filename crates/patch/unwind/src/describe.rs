//! Call-frame information for code that no compiler made: dispatchers, stubs, displaced prologues.

use gimli::{X86_64, constants};

/// Bytes of the common record of [`describe`].
pub const COMMON_LEN: usize = 24;
/// Size of one record for a piece that never moves the stack pointer, in bytes.
pub const PLAIN_LEN: usize = 24;
/// Size limit of one record for any piece, in bytes; a piece with too many rows is described only as far as its rows fit.
pub const PIECE_MAX: usize = 96;

const PCREL_SDATA4: u8 = constants::DW_EH_PE_pcrel.0 | constants::DW_EH_PE_sdata4.0;
const RETURN_ADDRESS: u8 = X86_64::RA.0 as u8;
const WORD: u64 = 8;

/// Location of the caller's frame and of its saved registers, from one instruction of a piece on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Offset of the instruction in bytes; less than 256 after the previous row.
    pub offset: u32,
    /// Bytes from the stack pointer to the canonical frame address.
    pub frame: u64,
    /// Registers by DWARF number (below 64), each with the bytes from the canonical frame address down to its saved value.
    pub saved: Vec<(u8, u64)>,
}

/// A piece of code that is entered like a function, by a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Address of its first byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Rows in ascending order, the first at offset 0.
    pub rows: Vec<Row>,
}

impl Piece {
    /// Returns a piece that never moves the stack pointer.
    pub fn plain(start: u64, len: u64) -> Self {
        Piece { start, len, rows: vec![Row { offset: 0, frame: WORD, saved: Vec::new() }] }
    }
}

/// Returns the `.eh_frame` records of `pieces` for the address `at`, without a terminator; `None` if a piece is out of reach.
pub fn describe(at: u64, pieces: &[Piece]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(COMMON_LEN + pieces.len() * PLAIN_LEN);
    // version 1, augmentation "zR", code factor 1, data factor -8, return address, encoding of addresses
    let head = [1, b'z', b'R', 0, 1, 0x78, RETURN_ADDRESS, 1, PCREL_SDATA4];
    let at_call =
        [constants::DW_CFA_def_cfa.0, X86_64::RSP.0 as u8, WORD as u8, constants::DW_CFA_offset.0 | RETURN_ADDRESS, 1];
    record(&mut out, &[&0u32.to_le_bytes()[..], &head, &at_call].concat());
    for piece in pieces {
        let start = out.len();
        let (rules, len) = rules(piece);
        let distance = i32::try_from(piece.start.wrapping_sub(at + start as u64 + 8) as i64).ok()?;
        let common = u32::try_from(start + 4).ok()?;
        let range = u32::try_from(len).ok()?;
        let head = [common.to_le_bytes(), distance.to_le_bytes(), range.to_le_bytes()].concat();
        record(&mut out, &[&head[..], &[0], &rules].concat());
    }
    Some(out)
}

/// Appends a record, padded with no-operations (zeroes) to whole words.
fn record(out: &mut Vec<u8>, body: &[u8]) {
    let len = (body.len() + 4).next_multiple_of(8);
    out.extend_from_slice(&(len as u32 - 4).to_le_bytes());
    out.extend_from_slice(body);
    out.resize(out.len() + len - 4 - body.len(), 0);
}

/// Returns the instructions of a record, and the number of code bytes that they describe.
fn rules(piece: &Piece) -> (Vec<u8>, u64) {
    const ROOM: usize = PIECE_MAX - 17 - 8;
    let mut out = Vec::new();
    let mut previous = Row { offset: 0, frame: WORD, saved: Vec::new() };
    for row in &piece.rows {
        let mut step = Vec::new();
        match row.offset - previous.offset {
            0 => {}
            by @ 1..0x40 => step.push(constants::DW_CFA_advance_loc.0 | by as u8),
            by => step.extend([constants::DW_CFA_advance_loc1.0, by as u8]),
        }
        if row.frame != previous.frame {
            step.push(constants::DW_CFA_def_cfa_offset.0);
            leb(&mut step, row.frame);
        }
        for (register, down) in row.saved.iter().filter(|saved| !previous.saved.contains(saved)) {
            step.push(constants::DW_CFA_offset.0 | register & 0x3f);
            leb(&mut step, down / WORD);
        }
        if out.len() + step.len() > ROOM {
            return (out, u64::from(row.offset));
        }
        out.extend(step);
        previous = row.clone();
    }
    (out, piece.len)
}

fn leb(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
