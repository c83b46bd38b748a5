//! Replies of a server under load, in the protocol of Redis.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};

// Not public in its crate; it is pure and has no dependencies, so this program can compile it directly.
#[allow(dead_code)]
#[path = "../../crates/measure/src/load/resp.rs"]
mod resp;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    if let Ok(Some((reply, len))) = resp::parse(input) {
        // bytes after a reply do not change it, and without its last byte it is incomplete
        assert_eq!(resp::parse(&input[..len]), Ok(Some((reply, len))));
        assert_eq!(resp::parse(&input[..len - 1]), Ok(None));
    }
    Corpus::Keep
});

fn seeds() -> Vec<Vec<u8>> {
    let nested = "*1\r\n".repeat(8) + "$-1\r\n";
    ["+OK\r\n", "-ERR no\r\n", ":-7\r\n", "$5\r\nvalue\r\n", "*3\r\n:1\r\n$-1\r\n*0\r\n", "*-1\r\n", &nested]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
}
