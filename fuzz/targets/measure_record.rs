//! Record of latencies. A checksum protects each block: the first byte of the input selects a whole file or one block's payload with a
//! correct head.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use stillpoint_measure::record::{
    BlockHead, End, Header, Mark, MarkKind, Outcome, Record, Sample, Writer, decode_block, decode_head,
};

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((&mode, bytes)) = input.split_first() else { return Corpus::Reject };
    match mode {
        0 => drop(Record::read(bytes)),
        kind => {
            if let Ok(head) = decode_head(&head_of(kind, bytes)) {
                let _ = decode_block(head, bytes);
            }
        }
    }
    Corpus::Keep
});

fn head_of(kind: u8, payload: &[u8]) -> [u8; BlockHead::LEN] {
    let mut head = [0; BlockHead::LEN];
    head[0] = kind;
    head[1..5].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    let checked = [&head[..5], payload].concat();
    head[5..].copy_from_slice(&crc32fast::hash(&checked).to_le_bytes());
    head
}

/// A record with one block of each kind, whole and block by block.
fn seeds() -> Vec<Vec<u8>> {
    let file = example().expect("writing to memory does not fail");
    let mut seeds = vec![[&[0], &file[..]].concat()];
    let mut rest = &file[PREAMBLE..];
    while let Some((head, after)) = rest.split_first_chunk::<{ BlockHead::LEN }>() {
        let len = decode_head(head).expect("our own head").payload_len();
        seeds.push([&head[..1], &after[..len]].concat());
        rest = &after[len..];
    }
    seeds
}

/// Magic and version.
const PREAMBLE: usize = 10;

fn example() -> std::io::Result<Vec<u8>> {
    let header = Header {
        protocol: "redis".into(),
        target: "127.0.0.1:6379".into(),
        started_ns: 1_000,
        started_unix_s: 1_700_000_000,
        kinds: vec!["get".into(), "set".into()],
        rate: 1e4,
        arrivals: "poisson".into(),
        connections: 50,
        idle: 10,
        blocking: 1,
        pipeline: 16,
        keys: 1_000,
        value_bytes: 64,
    };
    let mut writer = Writer::new(Vec::new(), &header)?;
    for i in 0..40u64 {
        let outcome = Outcome::ALL[i as usize % Outcome::ALL.len()];
        let (scheduled_ns, latency_ns) = (2_000 + 100 * (i ^ 1), 50_000 * i);
        writer.sample(&Sample {
            scheduled_ns,
            latency_ns,
            late_us: 3,
            connection: i as u32,
            kind: (i % 2) as u8,
            outcome,
        })?;
    }
    writer.mark(&Mark { t_ns: 5_000, connection: 3, what: MarkKind::Dropped, text: "end of file".into() })?;
    writer.end(&End { ended_ns: 9_000, dropped: 1, ..End::default() })
}
