//! Evaluates seccomp's classic BPF: takes a filter's instructions and one system call, returns the verdict. Pure.
//!
//! Follows `kernel/seccomp.c` (`seccomp_check_filter` for the permitted instructions) and `net/core/filter.c` for their meaning. The kernel
//! has checked every filter that it returns, so any other instruction is refused, not guessed.

/// `AUDIT_ARCH_X86_64`.
const ARCH_X86_64: u32 = 0xc000_003e;
/// Length of `struct seccomp_data`.
const DATA_LEN: u32 = 64;
/// The kernel's limit on the length of one filter, `BPF_MAXINSNS`.
const MAX_INSTRUCTIONS: usize = 4096;

// The instruction's class, in its lowest three bits.
const LD: u16 = 0x00;
const LDX: u16 = 0x01;
const ST: u16 = 0x02;
const STX: u16 = 0x03;
const ALU: u16 = 0x04;
const JMP: u16 = 0x05;
const RET: u16 = 0x06;
const MISC: u16 = 0x07;
// Modes of loads, and operands.
const IMM: u16 = 0x00;
const ABS: u16 = 0x20;
const MEM: u16 = 0x60;
const LEN: u16 = 0x80;
const X: u16 = 0x08;
const TXA: u16 = 0x80;
const RET_A: u16 = 0x10;

/// One system call as a filter sees it, `struct seccomp_data`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) nr: u32,
    /// Address after the `syscall` instruction.
    pub(crate) ip: u64,
    pub(crate) args: [u64; 6],
}

impl Call {
    /// Returns the 32-bit word at an offset of `struct seccomp_data`.
    fn word(&self, offset: u32) -> Option<u32> {
        let half = |value: u64| if offset.is_multiple_of(8) { value as u32 } else { (value >> 32) as u32 };
        match offset {
            0 => Some(self.nr),
            4 => Some(ARCH_X86_64),
            8 | 12 => Some(half(self.ip)),
            16..DATA_LEN if offset.is_multiple_of(4) => Some(half(self.args[(offset as usize - 16) / 8])),
            _ => None,
        }
    }
}

/// Return value of a filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict(pub(crate) u32);

impl Verdict {
    pub(crate) const ALLOW: Verdict = Verdict(0x7fff_0000);

    fn action(self) -> u32 {
        self.0 & 0xffff_0000
    }

    /// Returns true if the kernel executes the call and returns its result.
    pub(crate) fn allows(self) -> bool {
        const LOG: u32 = 0x7ffc_0000;
        matches!(self.action(), 0x7fff_0000 | LOG)
    }

    /// Returns the stricter of two: the kernel takes the lowest action as a signed number; among equals, the newer filter's.
    pub(crate) fn and(self, older: Verdict) -> Verdict {
        if (older.action() as i32) < (self.action() as i32) { older } else { self }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let data = self.0 & 0xffff;
        match self.action() {
            0x8000_0000 => f.write_str("it would kill the process"),
            0x0000_0000 => f.write_str("it would kill the thread"),
            0x0003_0000 => f.write_str("it would raise SIGSYS"),
            0x0005_0000 => write!(f, "it would return errno {data}"),
            0x7fc0_0000 => f.write_str("it would ask a supervisor"),
            0x7ff0_0000 => f.write_str("it would ask a tracer"),
            0x7ffc_0000 => f.write_str("allowed and logged"),
            0x7fff_0000 => f.write_str("allowed"),
            other => write!(f, "unknown action {other:#x}"),
        }
    }
}

/// One instruction, `struct sock_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) code: u16,
    pub(crate) jt: u8,
    pub(crate) jf: u8,
    pub(crate) k: u32,
}

/// Decodes a filter as the kernel returns it; `None` if the bytes are not a filter.
pub(crate) fn decode(bytes: &[u8]) -> Option<Vec<Instruction>> {
    let whole = !bytes.is_empty() && bytes.len().is_multiple_of(8) && bytes.len() / 8 <= MAX_INSTRUCTIONS;
    let instruction = |b: &[u8]| Instruction {
        code: u16::from_le_bytes([b[0], b[1]]),
        jt: b[2],
        jf: b[3],
        k: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
    };
    whole.then(|| bytes.chunks_exact(8).map(instruction).collect())
}

/// Runs a filter on a call. Returns `None` if the filter holds an instruction that is not permitted: the caller must then refuse.
///
/// The loop terminates because jumps only go forward.
pub(crate) fn evaluate(filter: &[Instruction], call: &Call) -> Option<Verdict> {
    let (mut a, mut x) = (0u32, 0u32);
    let mut scratch = [0u32; 16];
    let mut pc = 0usize;
    loop {
        let Instruction { code, jt, jf, k } = *filter.get(pc)?;
        pc += 1;
        let operand = if code & X != 0 { x } else { k };
        match code & 7 {
            LD => a = load(code, k, call, &scratch, ABS)?,
            LDX => x = load(code, k, call, &scratch, LEN)?,
            ST if code == ST => *scratch.get_mut(k as usize)? = a,
            STX if code == STX => *scratch.get_mut(k as usize)? = x,
            ALU => match arithmetic(code & 0xf0, a, operand)? {
                Some(result) => a = result,
                // Division by zero ends the filter with 0, which kills.
                None => return Some(Verdict(0)),
            },
            JMP if code == JMP => pc = pc.checked_add(k as usize)?,
            JMP => pc += usize::from(if compare(code & 0xf0, a, operand)? { jt } else { jf }),
            RET if code == RET => return Some(Verdict(k)),
            RET if code == RET | RET_A => return Some(Verdict(a)),
            MISC if code == MISC => x = a,
            MISC if code == MISC | TXA => a = x,
            _ => return None,
        }
    }
}

/// Loads to A or X: a constant, scratch memory, the call's length, or (A only) a word of the call.
fn load(code: u16, k: u32, call: &Call, scratch: &[u32; 16], own: u16) -> Option<u32> {
    const SIZE: u16 = 0x18;
    if code & SIZE != 0 {
        return None;
    }
    match code & 0xe0 {
        IMM => Some(k),
        MEM => scratch.get(k as usize).copied(),
        ABS if own == ABS => call.word(k),
        LEN => Some(DATA_LEN),
        _ => None,
    }
}

/// Returns `None` for an operation that is not permitted in a filter, `Some(None)` for a division by zero.
fn arithmetic(operation: u16, a: u32, operand: u32) -> Option<Option<u32>> {
    Some(match operation {
        0x00 => Some(a.wrapping_add(operand)),
        0x10 => Some(a.wrapping_sub(operand)),
        0x20 => Some(a.wrapping_mul(operand)),
        0x30 => a.checked_div(operand),
        0x40 => Some(a | operand),
        0x50 => Some(a & operand),
        // The kernel's own BPF masks the shift count.
        0x60 => Some(a.wrapping_shl(operand)),
        0x70 => Some(a.wrapping_shr(operand)),
        0x80 => Some(a.wrapping_neg()),
        0xa0 => Some(a ^ operand),
        _ => return None,
    })
}

fn compare(operation: u16, a: u32, operand: u32) -> Option<bool> {
    match operation {
        0x10 => Some(a == operand),
        0x20 => Some(a > operand),
        0x30 => Some(a >= operand),
        0x40 => Some(a & operand != 0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: Call =
        Call { nr: 9, ip: 0x7f12_3456_789a, args: [0x1_0000_0002, 0x4000, 7, 0x22, u64::MAX, 0xdead_beef_0000_0001] };

    fn op(code: u16, k: u32) -> Instruction {
        Instruction { code, jt: 0, jf: 0, k }
    }

    fn jump(code: u16, k: u32, jt: u8, jf: u8) -> Instruction {
        Instruction { code, jt, jf, k }
    }

    /// Runs instructions and returns A.
    fn a_after(instructions: &[Instruction]) -> Option<u32> {
        let mut filter = instructions.to_vec();
        filter.push(op(0x16, 0));
        evaluate(&filter, &CALL).map(|verdict| verdict.0)
    }

    #[test]
    fn loads_every_word_of_the_call() {
        let words: Vec<u32> = (0..64).step_by(4).map(|offset| a_after(&[op(0x20, offset)]).unwrap()).collect();
        let expected =
            [9, ARCH_X86_64, 0x3456_789a, 0x7f12, 2, 1, 0x4000, 0, 7, 0, 0x22, 0, u32::MAX, u32::MAX, 1, 0xdead_beef];
        assert_eq!(words, expected);
        assert_eq!(a_after(&[op(0x20, 64)]), None);
        assert_eq!(a_after(&[op(0x20, 2)]), None);
    }

    #[test]
    fn loads_constants_length_and_scratch() {
        assert_eq!(a_after(&[op(0x00, 77)]), Some(77));
        assert_eq!(a_after(&[op(0x80, 0)]), Some(64));
        assert_eq!(a_after(&[op(0x81, 0), op(0x87, 0)]), Some(64));
        assert_eq!(a_after(&[op(0x01, 5), op(0x87, 0)]), Some(5));
        assert_eq!(a_after(&[op(0x00, 6), op(0x02, 15), op(0x00, 0), op(0x60, 15)]), Some(6));
        assert_eq!(a_after(&[op(0x01, 8), op(0x03, 3), op(0x61, 3), op(0x87, 0)]), Some(8));
        assert_eq!(a_after(&[op(0x00, 9), op(0x07, 0), op(0x00, 0), op(0x87, 0)]), Some(9));
        assert_eq!(a_after(&[op(0x02, 16)]), None);
        assert_eq!(a_after(&[op(0x60, 16)]), None);
    }

    #[test]
    fn computes_with_constants_and_with_x() {
        let cases: [(u16, u32, u32, u32); 9] = [
            (0x00, 3, u32::MAX, 2),
            (0x10, 3, 5, u32::MAX - 1),
            (0x20, 0x10000, 0x10001, 0x10000),
            (0x30, 17, 5, 3),
            (0x40, 0xf0, 0x0f, 0xff),
            (0x50, 0xfc, 0x3f, 0x3c),
            (0x60, 1, 31, 1 << 31),
            (0x70, 1 << 31, 31, 1),
            (0xa0, 0xff, 0x0f, 0xf0),
        ];
        for (operation, a, operand, result) in cases {
            assert_eq!(a_after(&[op(0, a), op(0x04 | operation, operand)]), Some(result), "{operation:#x} k");
            let with_x = [op(0, a), op(1, operand), op(0x0c | operation, 0)];
            assert_eq!(a_after(&with_x), Some(result), "{operation:#x} x");
        }
        assert_eq!(a_after(&[op(0, 1), op(0x84, 0)]), Some(u32::MAX));
        assert_eq!(a_after(&[op(0, 1), op(1, 33), op(0x6c, 0)]), Some(2));
        assert_eq!(a_after(&[op(0, 7), op(1, 0), op(0x3c, 0), op(0, 0x7fff_0000)]), Some(0));
        // A remainder is not permitted in a filter.
        assert_eq!(a_after(&[op(0, 7), op(0x94, 2)]), None);
    }

    #[test]
    fn jumps_both_ways_and_always() {
        let taken = |code: u16, a: u32, k: u32| {
            let filter = [op(0, a), op(1, k), jump(code, k, 0, 1), op(0x06, 1), op(0x06, 0)];
            evaluate(&filter, &CALL).unwrap().0 == 1
        };
        for x in [0x00, 0x08] {
            assert!(taken(0x15 | x, 4, 4) && !taken(0x15 | x, 4, 5));
            assert!(taken(0x25 | x, 5, 4) && !taken(0x25 | x, 4, 4));
            assert!(taken(0x35 | x, 4, 4) && !taken(0x35 | x, 3, 4));
            assert!(taken(0x45 | x, 6, 4) && !taken(0x45 | x, 3, 4));
        }
        assert_eq!(evaluate(&[op(0x05, 1), op(0x06, 1), op(0x06, 2)], &CALL), Some(Verdict(2)));
        assert_eq!(evaluate(&[op(0x05, u32::MAX)], &CALL), None);
        assert_eq!(evaluate(&[], &CALL), None);
    }

    #[test]
    fn refuses_what_no_filter_may_hold() {
        // Loads of bytes, indirect loads, and the offset of a header's end.
        for code in [0x28, 0x30, 0x40, 0x48, 0x50, 0xb1, 0xa1, 0x21] {
            assert_eq!(a_after(&[op(code, 0)]), None, "{code:#x}");
        }
        assert_eq!(decode(&[0; 7]), None);
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[0x06, 0, 0, 0, 0, 0, 0xff, 0x7f]).unwrap(), [op(0x06, 0x7fff_0000)]);
    }

    #[test]
    fn strictest_verdict_wins() {
        let verdicts = [0x8000_0000, 0x0000_0000, 0x0003_0000, 0x0005_0001, 0x7fc0_0000, 0x7ff0_0000, 0x7ffc_0000];
        for pair in verdicts.windows(2) {
            let (strict, lax) = (Verdict(pair[0]), Verdict(pair[1]));
            assert_eq!(strict.and(lax), strict);
            assert_eq!(lax.and(strict), strict);
            assert_eq!(Verdict::ALLOW.and(strict), strict);
        }
        assert!(Verdict(0x7ffc_0000).allows() && Verdict::ALLOW.allows());
        assert!(verdicts[..6].iter().all(|&v| !Verdict(v).allows()));
        // Among equals the newer one's data counts.
        assert_eq!(Verdict(0x0005_0001).and(Verdict(0x0005_0002)), Verdict(0x0005_0001));
        assert_eq!(Verdict(0x0005_000d).to_string(), "it would return errno 13");
    }
}
