//! The frame from which `rt_sigreturn` restores a thread, as the kernel lays it out for a signal handler. Pure.
//!
//! `arch/x86/kernel/signal_64.c` (`struct rt_sigframe`) and `arch/x86/kernel/fpu/signal.c` (`struct _fpx_sw_bytes`).
//!
//! ```text
//! sp - 128   end of the red zone
//!            extended state: fxsave area 512 | xsave header 64 | components | FP_XSTATE_MAGIC2     aligned to 64
//!            struct ucontext: flags, link, stack, registers, pointer to the extended state, signal mask
//! base       return address: the restorer                                                            aligned to 16
//! base - 8   (calls of functions only) their return address
//! ```

use crate::registers::{RED_ZONE, Registers};

const FXSAVE_LEN: usize = 512;
const XSAVE_HEADER_LEN: usize = 64;
const SW_RESERVED: usize = 464;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// Length of the frame up to the signal mask, including the return address.
const CONTEXT_LEN: u64 = 8 + 304;
/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS`.
const FLAGS: u64 = 7;
/// An invalid mode of an alternate stack. `rt_sigreturn` would set the stack found in the frame. It ignores an invalid one, and the thread
/// keeps its alternate stack, which ptrace cannot read.
const NO_STACK_MODE: u64 = 0x7f;
/// AMX tile data: large, and present only after a thread has requested it.
const TILE_DATA: u32 = 18;

/// Location and contents of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Address of the return address; the stack pointer for the return.
    pub(crate) base: u64,
    pub(crate) bytes: Vec<u8>,
}

/// Returns the length of the extended state that a thread uses, from its image in the kernel's non-compacted format. `component` returns
/// offset and size of a component on this processor.
pub(crate) fn extended_len(state: &[u8], component: impl Fn(u32) -> (usize, usize)) -> usize {
    // The kernel stores the components that it supports where the frame will store the ones that it holds.
    let supported = u64_at(state, SW_RESERVED);
    let in_use = u64_at(state, FXSAVE_LEN);
    let held = supported & !(1 << TILE_DATA) | in_use;
    let component_end = |index: u32| {
        let (offset, size) = component(index);
        offset + size
    };
    let ends = (2..63).filter(|index| held >> index & 1 != 0).map(component_end);
    ends.max().unwrap_or(0).max(FXSAVE_LEN + XSAVE_HEADER_LEN).min(state.len())
}

/// Builds the frame that restores `registers`, `mask` and `state` (cut to its length in use), for the thread's own stack below its red
/// zone.
pub(crate) fn build(registers: &Registers, mask: u64, state: &[u8], restorer: u64) -> Frame {
    let end = registers.rsp - RED_ZONE;
    let state_at = (end - state.len() as u64 - 4) & !63;
    let base = (state_at - CONTEXT_LEN) & !15;
    let mut bytes = vec![0; (state_at - base) as usize];

    let r = registers;
    let segments = r.cs & 0xffff | (r.gs & 0xffff) << 16 | (r.fs & 0xffff) << 32 | (r.ss & 0xffff) << 48;
    let head = [restorer, FLAGS, 0, 0, NO_STACK_MODE, 0];
    let context = [
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx, r.rsp,
        r.rip, r.eflags, segments, 0, 0, 0, 0, state_at,
    ];
    let reserved = [0; 8];
    let words = head.iter().chain(&context).chain(&reserved).chain([&mask]);
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }

    let mut state = state.to_vec();
    let features = u64_at(&state, SW_RESERVED);
    let len = state.len() as u32;
    state[SW_RESERVED..SW_RESERVED + 4].copy_from_slice(&FP_XSTATE_MAGIC1.to_le_bytes());
    state[SW_RESERVED + 4..SW_RESERVED + 8].copy_from_slice(&(len + 4).to_le_bytes());
    state[SW_RESERVED + 8..SW_RESERVED + 16].copy_from_slice(&features.to_le_bytes());
    state[SW_RESERVED + 16..SW_RESERVED + 20].copy_from_slice(&len.to_le_bytes());
    state[SW_RESERVED + 20..FXSAVE_LEN].fill(0);
    bytes.extend_from_slice(&state);
    bytes.extend_from_slice(&FP_XSTATE_MAGIC2.to_le_bytes());
    Frame { base, bytes }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(len: usize, supported: u64, in_use: u64) -> Vec<u8> {
        let mut state = vec![0; len];
        state[SW_RESERVED..SW_RESERVED + 8].copy_from_slice(&supported.to_le_bytes());
        state[FXSAVE_LEN..FXSAVE_LEN + 8].copy_from_slice(&in_use.to_le_bytes());
        state
    }

    fn component(index: u32) -> (usize, usize) {
        match index {
            2 => (576, 256),
            5 => (1088, 64),
            9 => (2688, 8),
            18 => (2816, 8192),
            _ => (0, 0),
        }
    }

    #[test]
    fn length_covers_supported_components_and_tiles_only_when_in_use() {
        assert_eq!(extended_len(&state(11008, 0b111, 0), component), 832);
        assert_eq!(extended_len(&state(11008, 1 << 18 | 1 << 9 | 7, 7), component), 2696);
        assert_eq!(extended_len(&state(11008, 1 << 18 | 1 << 9 | 7, 1 << 18), component), 11008);
        assert_eq!(extended_len(&state(576, 3, 3), component), 576);
    }

    #[test]
    fn lies_below_the_red_zone_and_is_aligned() {
        for sp in 0x7fff_0000_1000u64..0x7fff_0000_1080 {
            let registers = Registers { rsp: sp, rip: 0x1234, rax: 5, ..Registers::default() };
            let frame = build(&registers, 0xabcd, &state(2696, 7, 7), 0x7777);
            let end = frame.base + frame.bytes.len() as u64;
            assert!(end <= sp - 128 && sp - 128 - end < 64 + 16);
            assert_eq!(frame.base % 16, 0);
            let word = |at: usize| u64_at(&frame.bytes, at);
            assert_eq!((word(0), word(8)), (0x7777, 7));
            // sigcontext begins at 48; rax is its 14th word, rsp its 16th, rip its 17th, the state's address its 24th.
            assert_eq!((word(48 + 13 * 8), word(48 + 15 * 8), word(48 + 16 * 8)), (5, sp, 0x1234));
            let state_at = word(48 + 23 * 8);
            assert_eq!(state_at % 64, 0);
            assert_eq!(word(CONTEXT_LEN as usize - 8), 0xabcd);
            let held = &frame.bytes[(state_at - frame.base) as usize..];
            assert_eq!(held[SW_RESERVED..SW_RESERVED + 4], FP_XSTATE_MAGIC1.to_le_bytes());
            assert_eq!(held[2696..], FP_XSTATE_MAGIC2.to_le_bytes());
        }
    }
}
