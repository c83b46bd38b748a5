//! Ledger: bytes in the memory of a target, which may be hostile, read by a tool that runs as root. Each record carries a checksum, so the
//! first byte of the input selects raw bytes or records with correct checksums. The decoded data is used in the same way as the tool uses
//! it: nothing in it may harm its reader.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use sha2::{Digest, Sha256};
use stillpoint_patch_engine::ledger::{self, Phase, Record, Version, View};

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((&mode, bytes)) = input.split_first() else { return Corpus::Reject };
    let found = if mode & 1 == 0 { ledger::decode(bytes) } else { ledger::decode(&under_checksums(bytes)) };
    if let Ok(found) = found {
        read(&found.view);
        // a new record is appended after the existing ones, or is refused
        let number = found.view.last_transition;
        let record = Record::Phase { transition: number, phase: Phase::Aborted };
        assert!(found.encode(&record).is_ok_and(|bytes| bytes.len() % 8 == 0));
    }
    Corpus::Keep
});

/// Reads everything that scripts, tables and plans are made of.
fn read(view: &View) {
    for patch in &view.placed {
        let is_plain = |text: &str| !text.chars().any(char::is_control);
        // names of files and words of a script
        assert!(!patch.name.is_empty() && !patch.name.contains(['/', '"', '\\', ' ']) && is_plain(&patch.name));
        assert!(patch.symbols.iter().all(|symbol| is_plain(&symbol.name)));
        assert!(patch.functions.iter().all(|function| is_plain(&function.name) && is_plain(&function.unit)));
        // memory that the tool reads in one call
        assert!(patch.states.start >= patch.arena.start && patch.arena.len <= 1 << 30);
        assert!(patch.eh_frame.len <= patch.arena.len && patch.search_table.len <= patch.arena.len);
    }
    let versions = view.versions(&view.active);
    for (entry, origin) in view.origins() {
        assert_eq!(versions.contains_key(&entry), matches!(view.version(&view.active, entry), Version::Patched(..)));
        let _ = origin.displaced;
    }
    for constant in view.constants() {
        let now = view.contents(&view.active, constant.at).expect("a constant is known by its place");
        assert!(now.len() <= 16 << 20);
    }
    assert!(view.active.iter().all(|number| view.patch(*number).is_some()));
    assert!(view.bytes_kept() <= 4 << 30);
    let _ = view.trampolines();
}

/// Splits the input into records (each after a length of two bytes) and writes a ledger around them.
fn under_checksums(mut bytes: &[u8]) -> Vec<u8> {
    let mut file = ledger::encode_header(0x80).to_vec();
    let mut sequence = 1u32;
    while let Some((len, rest)) = bytes.split_first_chunk::<2>() {
        let (payload, rest) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
        let digest = Sha256::new().chain_update(sequence.to_le_bytes()).chain_update(payload).finalize();
        file.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        file.extend_from_slice(&sequence.to_le_bytes());
        file.extend_from_slice(&digest[..8]);
        file.extend_from_slice(payload);
        file.resize(file.len().next_multiple_of(8), 0);
        (bytes, sequence) = (rest, sequence + 1);
    }
    file
}

fn seeds() -> Vec<Vec<u8>> {
    let header = ledger::encode_header(0x80);
    vec![
        [&[0], &header[..]].concat(),
        b"\x01\x04\x00\x00\x00\x00\x00".to_vec(),
        b"\x01\x02\x00\x01\x01\x02\x00\x02\x02".to_vec(),
    ]
}
