//! Evaluator of seccomp filters: the kernel returns them, but the target has chosen them. The first 60 bytes are the call, the rest is the
//! filter.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};

// Not public in its crate; it is pure and has no dependencies, so this program can compile it directly.
#[allow(dead_code)]
#[path = "../../crates/patch/tracee/src/bpf.rs"]
mod bpf;

const CALL: usize = 4 + 8 + 6 * 8;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((call, filter)) = input.split_at_checked(CALL) else { return Corpus::Reject };
    let word = |at: usize| u64::from_le_bytes(call[at..at + 8].try_into().expect("eight bytes"));
    let nr = u32::from_le_bytes(call[..4].try_into().expect("four bytes"));
    let call = bpf::Call { nr, ip: word(4), args: std::array::from_fn(|i| word(12 + 8 * i)) };
    if let Some(filter) = bpf::decode(filter)
        && let Some(verdict) = bpf::evaluate(&filter, &call)
    {
        // A second evaluation gives the same verdict, and a stricter filter never allows more.
        assert_eq!(bpf::evaluate(&filter, &call), Some(verdict));
        assert!(!verdict.and(bpf::Verdict(0x8000_0000)).allows());
        assert_eq!(verdict.and(bpf::Verdict::ALLOW).allows(), verdict.allows());
        let _ = verdict.to_string();
    }
    Corpus::Keep
});

/// Filter in the form that libseccomp writes: architecture, number, one argument, verdicts.
fn seeds() -> Vec<Vec<u8>> {
    let instructions: [(u16, u8, u8, u32); 9] = [
        (0x20, 0, 0, 4),
        (0x15, 0, 5, 0xc000_003e),
        (0x20, 0, 0, 0),
        (0x35, 3, 0, 0x4000_0000),
        (0x15, 0, 1, 9),
        (0x54, 0, 0, 7),
        (0x15, 0, 1, 1),
        (0x06, 0, 0, 0x0005_0001),
        (0x06, 0, 0, 0x7fff_0000),
    ];
    let mut input = vec![0; CALL];
    input[0] = 9;
    for (code, jt, jf, k) in instructions {
        input.extend_from_slice(&code.to_le_bytes());
        input.extend_from_slice(&[jt, jf]);
        input.extend_from_slice(&k.to_le_bytes());
    }
    vec![input]
}
