//! Tests of the record format: records are read as they were written, and no byte sequence does harm.

use proptest::prelude::*;
use stillpoint_measure::record::{End, Header, Item, Mark, MarkKind, Outcome, Reader, Record, Sample, Writer};

fn header() -> Header {
    Header {
        protocol: "redis".into(),
        target: "127.0.0.1:6379".into(),
        started_ns: 1_000_000,
        started_unix_s: 1_700_000_000,
        kinds: (0..32).map(|n| format!("kind{n}")).collect(),
        rate: 1234.5,
        arrivals: "poisson".into(),
        connections: 50,
        idle: 3,
        blocking: 2,
        pipeline: 16,
        keys: 1_000_000,
        value_bytes: 64,
    }
}

const END: End = End { ended_ns: 77, dropped: 1, reconnect_failures: 2, idle_alive: 3, blocking_alive: 4 };

fn mark() -> Mark {
    Mark { t_ns: 5, connection: 9, what: MarkKind::Dropped, text: "closed by the server".into() }
}

fn written(samples: &[Sample], end: bool) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &header()).unwrap();
    let half = samples.len() / 2;
    samples[..half].iter().for_each(|sample| writer.sample(sample).unwrap());
    writer.mark(&mark()).unwrap();
    samples[half..].iter().for_each(|sample| writer.sample(sample).unwrap());
    let whole = writer.end(&END).unwrap();
    if end {
        return whole;
    }
    let end_block = 9 + serde_json::to_vec(&END).unwrap().len();
    whole[..whole.len() - end_block].to_vec()
}

fn any_sample() -> impl Strategy<Value = Sample> {
    let any_number = prop_oneof![any::<u64>(), 0u64..1000, Just(u64::MAX), 1_000_000_000u64..2_000_000_000];
    (any_number.clone(), any_number, any::<u32>(), any::<u32>(), 0u8..32, 0usize..5).prop_map(
        |(scheduled_ns, latency_ns, late_us, connection, kind, outcome)| Sample {
            scheduled_ns,
            latency_ns,
            late_us,
            connection,
            kind,
            outcome: Outcome::ALL[outcome],
        },
    )
}

fn some_samples(count: u64) -> Vec<Sample> {
    let sample = |n: u64| Sample {
        scheduled_ns: 1_000_000 + n * 50_000 - (n % 7) * 90_000 % 300_000,
        latency_ns: 60_000 + n * 37 % 400_000,
        late_us: (n % 30) as u32,
        connection: (n % 50) as u32,
        kind: (n % 4) as u8,
        outcome: Outcome::Ok,
    };
    (0..count).map(sample).collect()
}

/// Returns everything that can be read before the reader ends or refuses.
fn readable(bytes: &[u8]) -> (Vec<Sample>, Option<Result<Item, String>>) {
    let mut samples = Vec::new();
    let mut reader = match Reader::new(bytes) {
        Ok(reader) => reader,
        Err(error) => return (samples, Some(Err(error.to_string()))),
    };
    loop {
        match reader.next_item() {
            Ok(Some(Item::Samples(mut more))) => samples.append(&mut more),
            Ok(Some(Item::Mark(_))) => {}
            Ok(Some(last)) => return (samples, Some(Ok(last))),
            Ok(None) => return (samples, None),
            Err(error) => return (samples, Some(Err(error.to_string()))),
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read(samples in proptest::collection::vec(any_sample(), 0..500)) {
        let record = Record::read(written(&samples, true).as_slice()).unwrap();
        prop_assert_eq!(record, Record { header: header(), samples, marks: vec![mark()], end: Some(END) });
    }

    #[test]
    fn a_flipped_bit_never_passes_for_the_original(
        samples in proptest::collection::vec(any_sample(), 1..100),
        position in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let mut bytes = written(&samples, true);
        let original = Record::read(bytes.as_slice()).unwrap();
        let at = position.index(bytes.len());
        bytes[at] ^= 1 << bit;
        match Record::read(bytes.as_slice()) {
            Err(_) => {}
            // A length that now points after the end looks like a truncated file, and is reported as such.
            Ok(record) => {
                prop_assert_eq!(record.end, None);
                prop_assert!(original.samples.starts_with(&record.samples));
            }
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400), lead in any::<bool>()) {
        let mut all = if lead { written(&[], false) } else { Vec::new() };
        all.extend_from_slice(&bytes);
        let _ = Record::read(all.as_slice());
    }
}

#[test]
fn a_cut_off_record_gives_all_whole_blocks() {
    let samples = some_samples(20_000);
    let bytes = written(&samples, true);
    let record = Record::read(bytes.as_slice()).unwrap();
    assert_eq!(record.samples, samples);
    let mut counts = Vec::new();
    let header_len = written(&[], false).len();
    for cut in (header_len..bytes.len()).step_by(997) {
        let record = Record::read(&bytes[..cut]).unwrap();
        assert_eq!(record.end, None, "cut at {cut}");
        assert!(samples.starts_with(&record.samples), "cut at {cut}");
        counts.push(record.samples.len());
    }
    assert!(counts.is_sorted() && counts[0] == 0);
    assert!(*counts.last().unwrap() >= 15_000, "blocks are small enough that a crash loses little: {counts:?}");
}

#[test]
fn a_record_cut_off_in_its_header_is_refused() {
    let bytes = written(&[], false);
    let first_block = 10 + 9 + serde_json::to_vec(&header()).unwrap().len();
    for cut in 0..first_block {
        assert!(Record::read(&bytes[..cut]).is_err(), "cut at {cut}");
    }
}

#[test]
fn zeros_at_the_end_are_what_a_crash_of_the_machine_leaves() {
    let samples = some_samples(100);
    let mut bytes = written(&samples, false);
    bytes.resize(bytes.len() + 9000, 0);
    assert!(matches!(readable(&bytes), (read, Some(Ok(Item::CutOff))) if read == samples));
    // The last block's tail was never written.
    let whole = written(&samples, false).len();
    bytes[whole - 100..whole].fill(0);
    assert!(matches!(readable(&bytes).1, Some(Ok(Item::CutOff))));
    // Zeros with other bytes after them are damage.
    bytes.push(1);
    assert!(matches!(readable(&bytes).1, Some(Err(_))));
}

#[test]
fn damage_names_the_offset() {
    let mut bytes = written(&some_samples(20_000), true);
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    let error = Record::read(bytes.as_slice()).unwrap_err();
    assert!(error.to_string().starts_with("block at offset "), "{error}");
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(cause.contains("checksum"), "{cause}");
}

#[test]
fn other_files_and_later_versions_are_refused() {
    let error = Record::read(b"\x7fELF\x02\x01\x01\x00\x00\x00\x00".as_slice()).unwrap_err();
    assert!(error.to_string().contains("not those of a record"), "{error}");
    let mut later = written(&[], true);
    later[8] = 9;
    let error = Record::read(later.as_slice()).unwrap_err();
    assert!(error.to_string().contains("version 9"), "{error}");
}

#[test]
fn a_sample_of_a_kind_without_a_name_is_refused() {
    let mut few = header();
    few.kinds.truncate(2);
    let mut writer = Writer::new(Vec::new(), &few).unwrap();
    writer.sample(&Sample { kind: 2, ..some_samples(1)[0] }).unwrap();
    let bytes = writer.end(&END).unwrap();
    assert!(Record::read(bytes.as_slice()).is_err());
}
