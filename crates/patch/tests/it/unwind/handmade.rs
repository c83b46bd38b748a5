//! Call-frame information made here: the walker walks it, and the table made for it finds it.

use stillpoint_patch_unwind::{
    COMMON_LEN, Described, End, Module, PIECE_MAX, PLAIN_LEN, Piece, Registers, Row, Section, TableError, Unwinder,
    count_described, describe, described, search_table, table_len,
};

const AT: u64 = 0x10_0000;
const CODE: u64 = 0x20_0000;

fn prologue() -> Piece {
    let rows = vec![
        Row { offset: 0, frame: 8, saved: vec![] },
        Row { offset: 1, frame: 16, saved: vec![(6, 16)] },
        Row { offset: 5, frame: 24, saved: vec![(6, 16), (3, 24)] },
        Row { offset: 105, frame: 0x1018, saved: vec![(6, 16), (3, 24)] },
    ];
    Piece { start: CODE, len: 110, rows }
}

/// Reads a stack of distinct words, each its own address with the lowest bit set.
fn word(at: u64) -> Option<u64> {
    Some(at | 1)
}

#[test]
fn each_row_leads_to_the_caller() {
    let bytes = describe(AT, &[Piece::plain(CODE - 64, 64), prologue()]).expect("within reach");
    let read = |from: u64, buf: &mut [u8]| {
        buf.copy_from_slice(&bytes[(from - AT) as usize..][..buf.len()]);
        buf.len()
    };
    let eh_frame = Section::new(AT, bytes.len(), read);
    let unwinder = Unwinder::new(vec![Module { eh_frame, eh_frame_hdr: None }]);
    let cases = [(CODE - 60, 8, false, false), (CODE, 8, false, false), (CODE + 1, 16, true, false)];
    let more = [(CODE + 5, 24, true, true), (CODE + 109, 0x1018, true, true)];
    for (pc, frame, rbp_saved, rbx_saved) in cases.into_iter().chain(more) {
        let sp = 0x7000_0000;
        let mut registers = Registers { pc, ..Registers::default() };
        registers.general[7] = sp;
        let walk = unwinder.walk(registers, word);
        let cfa = sp + frame;
        assert_eq!((walk.frames[1].address, walk.frames[1].sp), (word(cfa - 8).expect("word"), cfa), "at {pc:#x}");
        assert_eq!(walk.end, End::NoData((cfa - 8) | 1));
        // the words read are the return address and the registers saved, no others
        let mut read = Vec::new();
        unwinder.walk(registers, |at| {
            read.push(at);
            word(at)
        });
        let expected = [(rbx_saved, cfa - 24), (rbp_saved, cfa - 16), (true, cfa - 8)];
        assert_eq!(read, expected.iter().filter(|(yes, _)| *yes).map(|(_, at)| *at).collect::<Vec<_>>());
    }
}

#[test]
fn records_keep_to_their_room() {
    let plain = describe(AT, &[Piece::plain(CODE, 64)]).expect("within reach");
    assert_eq!(plain.len(), COMMON_LEN + PLAIN_LEN);
    let rows = (0..60).map(|i| Row { offset: i * 2, frame: 8 + u64::from(i) * 0x1_0000, saved: vec![] });
    let long = Piece { start: CODE, len: 200, rows: rows.collect() };
    let bytes = describe(AT, &[long]).expect("within reach");
    assert!(bytes.len() <= COMMON_LEN + PIECE_MAX);
    let covered = described(AT, &bytes).expect("understood");
    assert!(covered[0].end > CODE + 8 && covered[0].end < CODE + 120, "cut short where a row begins: {covered:?}");
    assert_eq!(describe(AT, &[Piece::plain(AT + (1 << 33), 8)]), None);
}

#[test]
fn the_table_leads_to_each_record_in_ascending_order() {
    let pieces = [Piece::plain(CODE + 512, 64), prologue(), Piece::plain(CODE + 256, 16)];
    let bytes = describe(AT, &pieces).expect("within reach");
    let hdr = AT + bytes.len() as u64 + 4;
    let all = described(AT, &bytes).expect("understood");
    assert_eq!(
        all.iter().map(|d| (d.start, d.end)).collect::<Vec<_>>(),
        [(CODE, CODE + 110), (CODE + 256, CODE + 272), (CODE + 512, CODE + 576)]
    );
    assert_eq!(count_described(&bytes), Ok(3));
    let table = search_table(AT, &bytes, hdr).expect("within reach");
    assert_eq!(table.len(), table_len(3));
    assert_eq!(table[..4], [1, 0x1b, 3, 0x3b]);
    let field = |at: usize| i64::from(i32::from_le_bytes(table[at..at + 4].try_into().expect("four bytes")));
    assert_eq!((hdr as i64 + 4 + field(4), field(8)), (AT as i64, 3));
    for (index, Described { start, record, .. }) in all.into_iter().enumerate() {
        let entry = 12 + index * 8;
        assert_eq!((hdr as i64 + field(entry)) as u64, start);
        assert_eq!((hdr as i64 + field(entry + 4)) as u64, AT + record as u64);
    }
}

#[test]
fn damaged_records_are_refused() {
    let bytes = describe(AT, &[Piece::plain(CODE, 64)]).expect("within reach");
    for cut in (1..bytes.len()).filter(|cut| *cut != COMMON_LEN) {
        assert!(matches!(count_described(&bytes[..cut]), Err(TableError::Record(_))), "cut at {cut}");
    }
    let mut wild = bytes.clone();
    wild[COMMON_LEN + 4] = 0xff;
    assert_eq!(search_table(AT, &wild, AT + 0x1000), Err(TableError::Record(0)));
    assert_eq!(search_table(AT, &bytes, AT + (1 << 33)), Err(TableError::Reach(AT)));
    assert_eq!(count_described(&[]), Ok(0));
}

/// Makes an unwinder of these records, which are located at [`AT`].
fn unwinder(bytes: &[u8]) -> Unwinder<'_> {
    let read = |from: u64, buf: &mut [u8]| {
        buf.copy_from_slice(&bytes[(from - AT) as usize..][..buf.len()]);
        buf.len()
    };
    Unwinder::new(vec![Module { eh_frame: Section::new(AT, bytes.len(), read), eh_frame_hdr: None }])
}

/// Walks the stack of a target's thread, which is stopped meanwhile.
#[test]
fn records_that_take_for_ever_end_the_walk() {
    let executing = Registers { pc: CODE, ..Registers::default() };
    let plain = describe(AT, &[Piece::plain(CODE, 64)]).expect("within reach");
    assert_eq!(unwinder(&plain).walk(executing, word).frames.len(), 2);
    let mut endless = plain.clone();
    // DW_CFA_def_cfa_expression of DW_OP_skip to itself; DW_CFA_offset of the return address
    endless[17..COMMON_LEN].copy_from_slice(&[0x0f, 3, 0x2f, 0xfd, 0xff, 0x90, 1]);
    assert_eq!(unwinder(&endless).walk(executing, word).end, End::NotUnderstood(CODE));
    let mut long = plain;
    let len: u32 = 1 << 20;
    long[COMMON_LEN..COMMON_LEN + 4].copy_from_slice(&len.to_le_bytes());
    long.resize(COMMON_LEN + 4 + len as usize, 0);
    assert_eq!(unwinder(&long).walk(executing, word).end, End::NotUnderstood(CODE));
}
