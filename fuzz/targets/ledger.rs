//! The ledger: bytes in the memory of a target, which may be hostile, read by a tool that runs as root. Each record
//! carries a checksum, so the first byte of the input chooses between bytes as they come and records under right ones.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use sha2::{Digest, Sha256};
use stillpoint_patch_engine::ledger;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((&mode, bytes)) = input.split_first() else { return Corpus::Reject };
    let _ = if mode & 1 == 0 { ledger::decode(bytes) } else { ledger::decode(&under_checksums(bytes)) };
    Corpus::Keep
});

/// Cuts the input into records (a length byte pair before each) and writes a ledger around them.
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
