//! Effect of straight-line code at a function's entry on the stack: the distance to the caller's frame at each instruction, and the
//! locations of the caller's saved registers.

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};
use stillpoint_patch_format::Avma;

/// State of the stack from one instruction on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackState {
    /// Offset of that instruction in bytes.
    pub offset: u32,
    /// Bytes from the stack pointer to the canonical frame address (the stack pointer before the call).
    pub frame: u64,
    /// Registers of the caller by DWARF number, each with the bytes from the canonical frame address *down* to its saved value.
    pub saved: Vec<(u8, u64)>,
}

/// States of the stack in a piece of code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackStates {
    /// States in ascending order, the first at offset 0; each holds until the next.
    pub states: Vec<StackState>,
    /// Number of bytes described; the code after them is not reached, or does something that this module does not understand.
    pub len: u32,
}

/// Callee-saved registers, with their DWARF numbers.
const CALLEE_SAVED: [(Register, u8); 6] = [
    (Register::RBX, 3),
    (Register::RBP, 6),
    (Register::R12, 12),
    (Register::R13, 13),
    (Register::R14, 14),
    (Register::R15, 15),
];

/// Follows `code`, which is entered by a call at its first byte and runs at `at`. It ends at the first jump away, or at the first
/// instruction whose effect on the stack is not understood (the state before that instruction is still known).
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

/// Returns true if `code`, a whole function, does not change the stack or the callee-saved registers. Unwinding through it is then the same
/// at each of its instructions.
pub fn leaves_stack_alone(code: &[u8], at: Avma) -> bool {
    let hands_back = |i: &Instruction| CALLEE_SAVED.iter().all(|(register, _)| !writes(i, *register));
    Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).iter().all(|instruction| {
        let returns = instruction.flow_control() == FlowControl::Return;
        !instruction.is_invalid() && hands_back(&instruction) && (returns || !writes(&instruction, Register::RSP))
    })
}

/// Returns true if the instruction after this one is not reached from here.
fn leaves(instruction: &Instruction) -> bool {
    matches!(
        instruction.flow_control(),
        FlowControl::UnconditionalBranch | FlowControl::IndirectBranch | FlowControl::Return
    ) || instruction.mnemonic() == Mnemonic::Int3
}

/// Applies the effect of an instruction to `state`; returns false if the effect is not understood.
fn follow(instruction: &Instruction, state: &mut StackState) -> bool {
    let first = instruction.op0_register();
    match instruction.mnemonic() {
        Mnemonic::Push if instruction.stack_pointer_increment() == -8 => {
            state.frame += 8;
            let kept = CALLEE_SAVED
                .iter()
                .find(|(register, _)| instruction.op0_kind() == OpKind::Register && *register == first);
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
        _ => CALLEE_SAVED.iter().all(|(register, number)| {
            !writes(instruction, *register) || state.saved.iter().any(|(saved, _)| saved == number)
        }),
    }
}

/// Returns true if an instruction may change a register, implicitly or by name.
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
