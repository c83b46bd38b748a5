//! Unwind data in the memory of a target, by which the stack of a stopped thread is walked. The input is a header (offsets of the pieces,
//! registers), the search table, and the records; the stack is made of the input as well.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use stillpoint_patch_unwind::{
    Module, Piece, Registers, Row, Section, Unwinder, count_described, describe, described, search_table, table_len,
};

/// Length of the search table, address of the records, address of the table, program counter, stack pointer.
const HEAD: usize = 2 + 4 * 8;
/// Limit of frames in a walk.
const FRAMES_MAX: usize = 4096;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((head, rest)) = input.split_at_checked(HEAD) else { return Corpus::Reject };
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    let table = usize::from(u16::from_le_bytes([head[0], head[1]])).min(rest.len());
    let (table, records) = rest.split_at(table);
    let (at, table_at) = (word(2), word(10));
    let known = described(at, records);
    if let (Ok(known), Ok(made)) = (&known, search_table(at, records, table_at)) {
        assert_eq!(made.len(), table_len(known.len()));
    }
    let _ = count_described(records);
    let mut registers = Registers { pc: word(18), ..Registers::default() };
    registers.general[7] = word(26);
    registers.general[6] = word(26).wrapping_add(64);
    let stack = |address: u64| {
        let from = usize::try_from(address.checked_sub(word(26))?).ok()?;
        Some(u64::from_le_bytes(rest.get(from..from.checked_add(8)?)?.try_into().ok()?))
    };
    for with_table in [false, true] {
        let eh_frame_hdr = with_table.then(|| section(table_at, table));
        let unwinder = Unwinder::new(vec![Module { eh_frame: section(at, records), eh_frame_hdr }]);
        let walk = unwinder.walk(registers, stack);
        assert!(!walk.frames.is_empty() && walk.frames.len() <= FRAMES_MAX);
    }
    Corpus::Keep
});

fn section(at: u64, bytes: &[u8]) -> Section<'_> {
    Section::new(at, bytes.len(), move |from, buf| {
        let from = from.wrapping_sub(at) as usize;
        let part = &bytes[from.min(bytes.len())..];
        let len = buf.len().min(part.len());
        buf[..len].copy_from_slice(&part[..len]);
        len
    })
}

fn seeds() -> Vec<Vec<u8>> {
    const AT: u64 = 0x10_0000;
    const CODE: u64 = 0x20_0000;
    const STACK: u64 = 0x7000_0000;
    let rows = vec![
        Row { offset: 0, frame: 8, saved: vec![] },
        Row { offset: 1, frame: 16, saved: vec![(6, 16)] },
        Row { offset: 5, frame: 24, saved: vec![(6, 16), (3, 24)] },
    ];
    let pieces = [Piece::plain(CODE - 64, 64), Piece { start: CODE, len: 110, rows }];
    let records = describe(AT, &pieces).unwrap_or_default();
    let table_at = AT + records.len() as u64 + 4;
    let table = search_table(AT, &records, table_at).unwrap_or_default();
    let mut seed = (table.len() as u16).to_le_bytes().to_vec();
    [AT, table_at, CODE + 6, STACK].iter().for_each(|word| seed.extend_from_slice(&word.to_le_bytes()));
    seed.extend_from_slice(&table);
    seed.extend_from_slice(&records);
    vec![seed]
}
