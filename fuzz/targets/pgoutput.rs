//! Stream of changes of a source, whose server may be untrusted.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::{Corpus, fuzz_target};

// Not public in its crate; it is pure and has no dependencies, so this program can compile it directly.
#[allow(dead_code)]
#[path = "../../crates/migrate/apply/src/pgoutput.rs"]
mod pgoutput;

/// Subset of the crate's errors that the parser returns.
#[derive(Debug, PartialEq, Eq)]
enum Error {
    Pgoutput(String),
}

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let bytes = Bytes::copy_from_slice(input);
    if let Ok(message) = pgoutput::message(bytes.clone()) {
        // a message in the stream decodes to the same as the message alone
        let mut streamed = vec![b'w'];
        streamed.extend_from_slice(&[0; 24]);
        streamed.extend_from_slice(input);
        let expected = pgoutput::Streamed::Data { end: 0, message };
        assert_eq!(pgoutput::streamed(streamed.into()), Ok(expected));
    }
    if let Err(Error::Pgoutput(why)) = pgoutput::streamed(bytes) {
        assert!(why.len() < 1024 + input.len());
    }
    Corpus::Keep
});

fn seeds() -> Vec<Vec<u8>> {
    let relation = [&b"R\0\0\0\x07public\0item\0d\0\x02\x01id\0\0\0\0\x17\0\0\0\0\0v\0\0\0\0\x19\0\0\0\0"[..]].concat();
    let tuple = b"N\0\x03t\0\0\0\x011nu";
    let insert = [&b"I\0\0\0\x07"[..], tuple].concat();
    let update = [&b"U\0\0\0\x07K\0\x01t\0\0\0\x011"[..], tuple].concat();
    let delete = b"D\0\0\0\x07O\0\x01n".to_vec();
    let truncate = b"T\0\0\0\x02\x03\0\0\0\x07\0\0\0\x08".to_vec();
    let emitted = [&b"M\0"[..], &[0; 8], b"prefix\0\0\0\0\x02ab"].concat();
    let begin = [&b"B"[..], &[0; 20]].concat();
    let commit = [&b"C"[..], &[0; 25]].concat();
    let alive = [&b"k"[..], &[0; 16], &[1]].concat();
    vec![relation, insert, update, delete, truncate, emitted, begin, commit, alive]
}
