//! The code that completes a change of data if the tool dies in the middle: threads execute it before anything else.

use crate::Error;
use crate::jump::{DispatchState, rel32};
use stillpoint_patch_format::Avma;

/// Bytes of the code that completes a change of data.
pub const COMPLETE_DATA_LEN: usize = 72;

/// Bytes of one entry of the list.
const ENTRY_LEN: usize = 24;

/// The code with empty distances, see [`complete_data`].
#[rustfmt::skip]
const CODE: [u8; COMPLETE_DATA_LEN] = [
    0x80, 0x3d, 0, 0, 0, 0, DispatchState::DataChanging as u8, 0x75, 50,
    0xb0, 1, 0x86, 0x05, 0, 0, 0, 0, 0x84, 0xc0, 0x75, 39,
    0x48, 0x8d, 0x15, 0, 0, 0, 0,
    0x48, 0x8b, 0x0a, 0x48, 0x85, 0xc9, 0x74, 16,
    0x48, 0x8b, 0x7a, 0x08, 0x48, 0x8b, 0x72, 0x10, 0xf3, 0xa4, 0x48, 0x83, 0xc2, ENTRY_LEN as u8, 0xeb, 0xe8,
    0xc6, 0x05, 0, 0, 0, 0, DispatchState::AllThen as u8, 0xc3,
    0xf3, 0x90, 0x80, 0x3d, 0, 0, 0, 0, DispatchState::DataChanging as u8, 0x74, 0xf5, 0xc3,
];

/// Returns the code, placed at `at`, that completes a change of data:
///
/// ```text
///       cmpb $3, state(%rip)         the tool has not begun, or has ended: nothing to do
///       jne  done
///       mov  $1, %al
///       xchg %al, claim(%rip)
///       test %al, %al
///       jnz  wait                    another thread does it
///       lea  list(%rip), %rdx
/// next: mov  (%rdx), %rcx            length, 0 ends the list
///       test %rcx, %rcx
///       jz   last
///       mov  8(%rdx), %rdi           destination
///       mov  16(%rdx), %rsi          source
///       rep movsb
///       add  $24, %rdx
///       jmp  next
/// last: movb $1, state(%rip)
/// done: ret
/// wait: pause
///       cmpb $3, state(%rip)
///       je   wait
///       ret
/// ```
///
/// It uses no stack and any of the registers, with the direction flag clear: the caller restores them. The list is at `list`, see
/// [`data_list`]. `state` and `claim` are bytes of writable memory; the claim is 0 at first.
///
/// # Errors
/// [`Error::OutOfReach`] if 32 bits cannot hold one of the distances.
pub fn complete_data(at: Avma, list: Avma, state: Avma, claim: Avma) -> Result<[u8; COMPLETE_DATA_LEN], Error> {
    let mut out = CODE;
    // place of the distance, and the end of its instruction
    for (place, end, to) in [(2, 7, state), (13, 17, claim), (24, 28, list), (54, 59, state), (64, 69, state)] {
        out[place..place + 4].copy_from_slice(&rel32(at, end, to)?);
    }
    Ok(out)
}

/// Returns the list for [`complete_data`], placed at `at`: each piece of data with its destination, and after the entries all bytes.
pub fn data_list(at: Avma, pieces: &[(Avma, &[u8])]) -> Vec<u8> {
    let mut source = at.0 + ((pieces.len() + 1) * ENTRY_LEN) as u64;
    let mut out = Vec::new();
    for (to, bytes) in pieces {
        let entry = [bytes.len() as u64, to.0, source];
        out.extend(entry.iter().flat_map(|word| word.to_le_bytes()));
        source += bytes.len() as u64;
    }
    out.resize(out.len() + ENTRY_LEN, 0);
    pieces.iter().for_each(|(_, bytes)| out.extend_from_slice(bytes));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};

    #[test]
    fn every_instruction_names_its_place() {
        let (at, list, state, claim) = (Avma(0x1000), Avma(0x2000), Avma(0x3000), Avma(0x3001));
        let code = complete_data(at, list, state, claim).expect("in reach");
        let all: Vec<Instruction> = Decoder::with_ip(64, &code, at.0, DecoderOptions::NONE).into_iter().collect();
        assert_eq!(all.iter().map(|i| i.len()).sum::<usize>(), COMPLETE_DATA_LEN);
        let places: Vec<u64> =
            all.iter().filter(|i| i.is_ip_rel_memory_operand()).map(|i| i.ip_rel_memory_address()).collect();
        assert_eq!(places, [state.0, claim.0, list.0, state.0, state.0]);
        let starts: Vec<u64> = all.iter().map(|i| i.ip()).collect();
        let jumps: Vec<u64> =
            all.iter().filter(|i| i.op0_kind() == OpKind::NearBranch64).map(|i| i.near_branch_target()).collect();
        assert!(jumps.iter().all(|to| starts.contains(to)), "{jumps:x?} {starts:x?}");
        let at_jump = |n: usize| all.iter().find(|i| i.ip() == jumps[n]).map(|i| i.mnemonic());
        let wanted = [Mnemonic::Ret, Mnemonic::Pause, Mnemonic::Mov, Mnemonic::Mov, Mnemonic::Pause];
        assert_eq!([0, 1, 2, 3, 4].map(at_jump), wanted.map(Some));
    }

    #[test]
    fn a_list_holds_its_bytes_and_ends() {
        let list = data_list(Avma(0x2000), &[(Avma(0x10), b"abc"), (Avma(0x20), b"de")]);
        let word = |i: usize| list[8 * i..8 * i + 8].try_into().map(u64::from_le_bytes).expect("a word");
        assert_eq!([word(0), word(1), word(2)], [3, 0x10, 0x2000 + 72]);
        assert_eq!([word(3), word(4), word(5)], [2, 0x20, 0x2000 + 75]);
        assert_eq!([word(6), word(7), word(8)], [0; 3]);
        assert_eq!(&list[72..], b"abcde");
        assert_eq!(data_list(Avma(0), &[]), [0; 24]);
    }
}
