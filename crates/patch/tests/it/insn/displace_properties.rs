//! Random prologues, moved, decoded back and compared instruction by instruction.

use super::jump_target;
use iced_x86::{Decoder, DecoderOptions, Instruction, OpKind};
use proptest::prelude::*;
use stillpoint_patch_format::{Avma, Svma};
use stillpoint_patch_insn::{DISPLACED_MAX, displace, plan_entry};

/// Generates instructions as compilers put them into prologues; `{d}` bytes are filled with a displacement.
fn instruction() -> impl Strategy<Value = Vec<u8>> {
    let fixed = prop::sample::select(vec![
        vec![0xf3, 0x0f, 0x1e, 0xfa],
        vec![0x55],
        vec![0x48, 0x89, 0xe5],
        vec![0x41, 0x57],
        vec![0x31, 0xc0],
        vec![0x48, 0x83, 0xec, 0x18],
        vec![0x48, 0x81, 0xec, 0x88, 0, 0, 0],
        vec![0x85, 0xff],
        vec![0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0],
        vec![0x66, 0x0f, 0xef, 0xc0],
        vec![0xb8, 1, 0, 0, 0],
    ]);
    let relative = (
        prop::sample::select(vec![vec![0x48, 0x8b, 0x05], vec![0x8b, 0x05], vec![0x48, 0x8d, 0x3d], vec![0x83, 0x3d]]),
        -0x10_0000..0x10_0000i32,
    )
        .prop_map(|(mut op, d)| {
            op.extend_from_slice(&d.to_le_bytes());
            if op[0] == 0x83 {
                op.push(7);
            }
            op
        });
    let branch = prop_oneof![
        (0x70..0x80u8, 0x20..0x70i8).prop_map(|(op, d)| vec![op, d as u8]),
        (0x80..0x90u8, 0x100..0x10_0000i32).prop_map(|(op, d)| [&[0x0f, op][..], &d.to_le_bytes()].concat()),
        (0x20..0x70i8).prop_map(|d| vec![0xe3, d as u8]),
    ];
    prop_oneof![4 => fixed, 2 => relative, 2 => branch]
}

/// Returns the meaning of an instruction, independent of its address and the width of its displacement.
fn meaning(i: &Instruction) -> (String, Option<u64>, Option<u64>) {
    let branch = matches!(i.op0_kind(), OpKind::NearBranch64).then(|| i.near_branch_target());
    let memory = i.is_ip_rel_memory_operand().then(|| i.ip_rel_memory_address());
    let text = if branch.is_some() || memory.is_some() {
        format!("{:?} {:?}", i.mnemonic(), i.op0_register())
    } else {
        i.to_string()
    };
    (text, branch, memory)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn displaced_code_means_the_same(body in prop::collection::vec(instruction(), 5..9), high in any::<bool>(), near in 0x10_0000u64..0x7000_0000) {
        let code: Vec<u8> = body.concat();
        let entry = Avma(if high { 0x5555_5555_4000 } else { 0x40_1000 });
        let at = Avma(entry.0 + near);
        let Ok(plan) = plan_entry(&code, Svma(0x1000)) else { return Ok(()) };
        let moved = displace(&code, Svma(0x1000), &plan, entry, at).expect("within reach");
        prop_assert!(moved.len() <= DISPLACED_MAX);
        let before: Vec<_> = Decoder::with_ip(64, &code[..plan.displaced_len], entry.0, DecoderOptions::NONE).into_iter().collect();
        let after: Vec<_> = Decoder::with_ip(64, &moved, at.0, DecoderOptions::NONE).into_iter().collect();
        let mut rest = &after[..];
        for i in &before {
            let (first, tail) = rest.split_first().expect("no instruction is lost");
            rest = tail;
            let (was, mut is) = (meaning(i), meaning(first));
            if i.mnemonic() == iced_x86::Mnemonic::Jrcxz && rest.len() >= 2 && first.near_branch_target() != i.near_branch_target() {
                // jrcxz reaches 127 bytes: its replacement is jrcxz over; jmp behind; jmp target
                is.1 = Some(rest[1].near_branch_target());
                rest = &rest[2..];
            }
            prop_assert_eq!(was, is);
        }
        let back = rest.first().expect("a jump back");
        prop_assert_eq!(jump_target(&moved[(back.ip() - at.0) as usize..], Avma(back.ip())), Some(Avma(entry.0 + plan.displaced_len as u64)));
    }
}
