//! What straight-line code at a function's entry does to the stack: how far the caller's frame is away at each
//! instruction, and which of the caller's registers lie where.

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};
use stillpoint_patch_format::Avma;

/// The stack from one instruction on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackState {
    /// Offset of that instruction.
    pub offset: u32,
    /// Bytes from the stack pointer to the canonical frame address (the stack pointer before the call).
    pub frame: u64,
    /// Registers of the caller by DWARF number, with the bytes from the canonical frame address *down* to where each
    /// lies.
    pub saved: Vec<(u8, u64)>,
}

/// What is known of a piece of code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackStates {
    /// Ascending, the first at offset 0; each holds up to the next.
    pub states: Vec<StackState>,
    /// Bytes that are described; what follows does something that is not understood here, or is not reached.
    pub len: u32,
}

/// Registers that a function must hand back unchanged, with their DWARF numbers.
const KEPT: [(Register, u8); 6] = [
    (Register::RBX, 3),
    (Register::RBP, 6),
    (Register::R12, 12),
    (Register::R13, 13),
    (Register::R14, 14),
    (Register::R15, 15),
];

/// Follows `code`, which is entered by a call at its first byte and runs at `at`, up to the first jump away or to the
/// first instruction whose effect on the stack is not understood (that instruction itself still stands in a known state).
pub fn stack_states(code: &[u8], at: Avma) -> StackStates {
    let mut now = StackState { offset: 0, frame: 8, saved: Vec::new() };
    let mut states = vec![now.clone()];
    let mut len = 0;
    for instruction in &mut Decoder::with_ip(64, code, at.0, DecoderOptions::NONE) {
        if instruction.is_invalid() {
            break;
        }
        len = (instruction.next_ip() - at.0) as u32;
        let before = (now.frame, now.saved.len());
        if leaves(&instruction) || !follow(&instruction, &mut now) {
            break;
        }
        if (now.frame, now.saved.len()) != before {
            now.offset = len;
            states.push(now.clone());
        }
    }
    // a state that begins where the description ends describes nothing
    states.retain(|state| state.offset < len.max(1));
    StackStates { states, len }
}

/// Whether code, of a whole function, leaves the stack and the registers that it must hand back alone: unwinding through it is the
/// same at each instruction, whatever the others are.
pub fn leaves_stack_alone(code: &[u8], at: Avma) -> bool {
    let hands_back = |i: &Instruction| KEPT.iter().all(|(register, _)| !writes(i, *register));
    Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).iter().all(|instruction| {
        let returns = instruction.flow_control() == FlowControl::Return;
        !instruction.is_invalid() && hands_back(&instruction) && (returns || !writes(&instruction, Register::RSP))
    })
}

/// Nothing behind it is reached from here.
fn leaves(instruction: &Instruction) -> bool {
    matches!(
        instruction.flow_control(),
        FlowControl::UnconditionalBranch | FlowControl::IndirectBranch | FlowControl::Return
    ) || instruction.mnemonic() == Mnemonic::Int3
}

/// Takes an instruction's effect into `state`; false when it has one that is not understood.
fn follow(instruction: &Instruction, state: &mut StackState) -> bool {
    let first = instruction.op0_register();
    match instruction.mnemonic() {
        Mnemonic::Push if instruction.stack_pointer_increment() == -8 => {
            state.frame += 8;
            let kept =
                KEPT.iter().find(|(register, _)| instruction.op0_kind() == OpKind::Register && *register == first);
            if let Some((_, number)) = kept.filter(|(_, n)| state.saved.iter().all(|(saved, _)| saved != n)) {
                state.saved.push((*number, state.frame));
            }
            true
        }
        Mnemonic::Sub if first == Register::RSP && instruction.op1_kind() != OpKind::Register => {
            let by = instruction.immediate(1) as i64;
            let immediate = matches!(instruction.op1_kind(), OpKind::Immediate8to64 | OpKind::Immediate32to64);
            match u64::try_from(by) {
                Ok(by) if immediate => {
                    state.frame += by;
                    true
                }
                _ => false,
            }
        }
        _ if writes(instruction, Register::RSP) => false,
        // a register of the caller that is overwritten must have been saved
        _ => KEPT.iter().all(|(register, number)| {
            !writes(instruction, *register) || state.saved.iter().any(|(saved, _)| saved == number)
        }),
    }
}

/// Whether an instruction may change a register of its own accord or by name.
fn writes(instruction: &Instruction, register: Register) -> bool {
    let mut factory = InstructionInfoFactory::new();
    let mut used = factory.info(instruction).used_registers().iter();
    used.any(|u| {
        let read_only =
            matches!(u.access(), OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess);
        !read_only && u.register().full_register() == register
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_that_unwinds_alike_everywhere_is_told_from_other_code() {
        let alone = |code: &[u8]| leaves_stack_alone(code, Avma(0x1000));
        assert!(alone(&[0x89, 0xf8, 0xc3]), "mov eax,edi; ret");
        assert!(!alone(&[0x53, 0x5b, 0xc3]), "push rbx; pop rbx; ret");
        assert!(!alone(&[0x31, 0xdb, 0xc3]), "xor ebx,ebx; ret");
        assert!(!alone(&[0xe8, 0, 0, 0, 0, 0xc3]), "a call");
    }
}
