//! Every refusal of an entry, and fixed sequences decoded back.

use super::jump_target;
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};
use stillpoint_patch_format::{Avma, Svma};
use stillpoint_patch_insn::{
    DispatchState, Error, branch_targets, dispatch, displace, far_stub, is_padding, jump5, plan_entry,
};

fn decode(bytes: &[u8], at: u64) -> Vec<Instruction> {
    Decoder::with_ip(64, bytes, at, DecoderOptions::NONE).into_iter().collect()
}

#[test]
fn too_short_is_refused_and_padding_helps() {
    assert_eq!(plan_entry(&[0xc3], Svma(0x10)), Err(Error::TooShort { start: Svma(0x10), len: 1 }));
    let padded = [0xc3, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x0f, 0x1f, 0x44, 0, 0];
    assert!(is_padding(&padded[1..]) && !is_padding(&padded));
    assert_eq!(plan_entry(&padded, Svma(0x10)).map(|p| p.displaced_len), Ok(11));
}

#[test]
fn a_branch_into_the_entry_is_refused() {
    // xor eax,eax; inc eax; inc eax; cmp eax,edi; jne back to offset 2; ret
    let code = [0x31, 0xc0, 0xff, 0xc0, 0xff, 0xc0, 0x39, 0xf8, 0x75, 0xf8, 0xc3];
    let refused = Error::BranchIntoEntry { start: Svma(0x100), from: Svma(0x108), to: Svma(0x102) };
    assert_eq!(plan_entry(&code, Svma(0x100)), Err(refused));
    assert_eq!(branch_targets(&code, Svma(0x100)), Ok(vec![(Svma(0x108), Svma(0x102))]));
}

#[test]
fn a_loop_to_the_entry_is_told() {
    // dec edi; inc esi; inc esi; jne entry; ret
    let plan = plan_entry(&[0xff, 0xcf, 0xff, 0xc6, 0xff, 0xc6, 0x75, 0xf8, 0xc3], Svma(0x100)).expect("plan");
    assert!(plan.loops_to_entry);
    assert_eq!(plan.inner_boundaries, [2, 4]);
}

#[test]
fn an_interrupted_repetition_at_the_entry_is_told() {
    // rep stosb; mov rax,rdi; ret
    let plan = plan_entry(&[0xf3, 0xaa, 0x48, 0x89, 0xf8, 0xc3], Svma(0x100)).expect("plan");
    assert!(plan.loops_to_entry);
    // endbr64 carries the same byte and repeats nothing
    let plan = plan_entry(&[0xf3, 0x0f, 0x1e, 0xfa, 0x31, 0xc0, 0xc3], Svma(0x100)).expect("plan");
    assert!(!plan.loops_to_entry);
}

#[test]
fn what_cannot_move_is_named() {
    let name = |code: &[u8]| match plan_entry(code, Svma(0)) {
        Err(Error::NotRelocatable { why, .. }) => why.to_owned(),
        other => format!("{other:?}"),
    };
    // xor eax,eax; syscall; ret...
    assert_eq!(name(&[0x31, 0xc0, 0x0f, 0x05, 0xc3, 0x90]), "a system call restarts at its address");
    // push rax; call [rdi]; pop rax; ret
    assert_eq!(name(&[0x50, 0xff, 0x17, 0x58, 0xc3]), "it returns into the bytes that the jump needs");
    // sub rsp,8; call [rsp+16]
    assert_eq!(name(&[0x48, 0x83, 0xec, 0x08, 0xff, 0x54, 0x24, 0x10]), "its operand is relative to rsp");
    assert_eq!(
        plan_entry(&[0x06, 0x06, 0x06, 0x06, 0x06], Svma(7)),
        Err(Error::Undecodable { start: Svma(7), at: Svma(7) })
    );
}

#[test]
fn a_displaced_call_leaves_the_original_return_address() {
    // sub rsp,8; call +0x100; ret
    let code = [0x48, 0x83, 0xec, 0x08, 0xe8, 0x00, 0x01, 0x00, 0x00, 0xc3];
    let plan = plan_entry(&code, Svma(0x1000)).expect("plan");
    let (entry, at) = (Avma(0x40_1000), Avma(0x60_0000));
    let moved = displace(&code, Svma(0x1000), &plan, entry, at).expect("displace");
    let list = decode(&moved, at.0);
    assert_eq!(list[1].mnemonic(), Mnemonic::Push);
    let literal = (list[1].ip_rel_memory_address() - at.0) as usize;
    assert_eq!(moved[literal..literal + 8], (entry.0 + 9).to_le_bytes());
    assert_eq!((list[2].mnemonic(), list[2].near_branch_target()), (Mnemonic::Jmp, entry.0 + 9 + 0x100));
}

#[test]
fn an_indirect_displaced_call_jumps_through_the_same_operand() {
    // sub rsp,8; call [rip+0x20]; ret
    let code = [0x48, 0x83, 0xec, 0x08, 0xff, 0x15, 0x20, 0, 0, 0, 0xc3];
    let plan = plan_entry(&code, Svma(0)).expect("plan");
    let moved = displace(&code, Svma(0), &plan, Avma(0x40_1000), Avma(0x60_0000)).expect("displace");
    let list = decode(&moved, 0x60_0000);
    assert_eq!((list[2].mnemonic(), list[2].ip_rel_memory_address()), (Mnemonic::Jmp, 0x40_1000 + 10 + 0x20));
}

#[test]
fn fixed_sequences_decode_back() {
    let (at, then, otherwise) = (Avma(0x5000_0000), Avma(0x5100_0000), Avma(0x4f00_0000));
    let state = Avma(0x5000_2000);
    let list = decode(&dispatch(at, state, 0x278, 0xdead_beef, then, otherwise).expect("dispatch"), at.0);
    let mnemonics: Vec<_> = list.iter().map(Instruction::mnemonic).collect();
    use Mnemonic::{Cmp, Jb, Je, Jmp};
    assert_eq!(mnemonics, [Cmp, Jb, Je, Jmp, Cmp, Je, Jmp]);
    assert_eq!((list[0].ip_rel_memory_address(), list[0].immediate8()), (state.0, 1));
    assert_eq!(list[1].near_branch_target(), list[4].ip());
    assert_eq!(list[4].memory_segment(), iced_x86::Register::FS);
    assert_eq!((list[4].memory_displacement64(), list[4].immediate32()), (0x278, 0xdead_beef));
    for (je, jmp) in [(2, 3), (5, 6)] {
        assert_eq!((list[je].near_branch_target(), list[jmp].near_branch_target()), (then.0, otherwise.0));
    }
    assert_eq!(DispatchState::from_byte(2), Some(DispatchState::AllOtherwise));
    assert_eq!(DispatchState::from_byte(3), Some(DispatchState::DataChanging));
    assert_eq!(DispatchState::from_byte(4), None);
    assert_eq!(jump_target(&jump5(at, then).expect("jump"), at), Some(then));
    assert_eq!(jump_target(&[0xeb, 0, 0, 0, 0], at), None);
    let list = decode(&far_stub(at, otherwise).expect("stub"), at.0);
    assert_eq!(list[0].ip_rel_memory_address(), otherwise.0);
    let far = Avma(at.0 + (1 << 32));
    assert_eq!(jump5(at, far), Err(Error::OutOfReach { at, to: far }));
}
