//! The displaced prologue at its new address.

use crate::entry::decode;
use crate::{EntryPlan, Error, jump5};
use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, FlowControl, Formatter, Instruction, InstructionBlock, IntelFormatter,
    MemoryOperand, Register,
};
use stillpoint_patch_format::{Avma, Svma};

/// Upper bound of the length that [`displace`] returns, in bytes; used for the layout before the addresses are known.
pub const DISPLACED_MAX: usize = 96;

/// Returns the displaced instructions, made for the address `at`, followed by a jump to the first instruction that is not displaced. `code`
/// (at least the displaced bytes) belongs to the function that is stated at `start` and runs at `entry`.
///
/// # Errors
/// An instruction cannot run at `at`, or the jump back is out of reach.
pub fn displace(code: &[u8], start: Svma, plan: &EntryPlan, entry: Avma, at: Avma) -> Result<Vec<u8>, Error> {
    let code = code.get(..plan.displaced_len).ok_or(Error::TooShort { start, len: code.len() })?;
    let instructions = decode(code, Svma(entry.0)).map_err(|_| Error::Undecodable { start, at: start })?;
    let last = instructions.last().ok_or(Error::TooShort { start, len: 0 })?;
    let back = Avma(entry.0 + plan.displaced_len as u64);
    // the address of the literal depends on the length; the length does not depend on the address of the literal
    let probe = encode(&instructions, start, at, Avma(at.0 + DISPLACED_MAX as u64))?;
    let tail = if falls_through(last) { 5 } else { 0 };
    let literal = Avma((at.0 + (probe.len() + tail) as u64).next_multiple_of(8));
    let mut out = encode(&instructions, start, at, literal)?;
    if falls_through(last) {
        out.extend_from_slice(&jump5(Avma(at.0 + out.len() as u64), back)?);
    }
    if instructions.iter().any(is_call) {
        out.resize((literal.0 - at.0) as usize, 0xcc);
        out.extend_from_slice(&back.0.to_le_bytes());
    }
    Ok(out)
}

fn is_call(instruction: &Instruction) -> bool {
    instruction.is_call_near() || instruction.is_call_near_indirect()
}

fn falls_through(last: &Instruction) -> bool {
    !is_call(last)
        && !matches!(
            last.flow_control(),
            FlowControl::UnconditionalBranch | FlowControl::IndirectBranch | FlowControl::Return
        )
}

fn encode(instructions: &[Instruction], start: Svma, at: Avma, literal: Avma) -> Result<Vec<u8>, Error> {
    let mut list = Vec::with_capacity(instructions.len() + 1);
    for instruction in instructions {
        if is_call(instruction) {
            // push [rip+literal] keeps the original return address in one atomic step; plan_entry made sure that the call is the last
            // displaced instruction
            let slot = MemoryOperand::with_base_displ(Register::RIP, literal.0 as i64);
            let mut push = Instruction::with1(Code::Push_rm64, slot).map_err(|_| not_movable(instruction, start))?;
            push.set_ip(instruction.ip());
            list.push(push);
            list.push(tail_jump(instruction).ok_or_else(|| not_movable(instruction, start))?);
        } else {
            list.push(*instruction);
        }
    }
    let block = InstructionBlock::new(&list, at.0);
    let encoded = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE);
    encoded.map(|e| e.code_buffer).map_err(|_| not_movable(&instructions[0], start))
}

/// Returns the jump with the same target as `call`.
fn tail_jump(call: &Instruction) -> Option<Instruction> {
    let mut jump = if call.is_call_near() {
        Instruction::with_branch(Code::Jmp_rel32_64, call.near_branch_target()).ok()?
    } else {
        let mut jump = *call;
        jump.set_code(Code::Jmp_rm64);
        jump
    };
    // it needs a different address: the block encoder maps branches to instructions by their addresses
    jump.set_ip(call.ip() + 1);
    Some(jump)
}

fn not_movable(instruction: &Instruction, start: Svma) -> Error {
    let mut text = String::new();
    IntelFormatter::new().format(instruction, &mut text);
    let at = Svma(instruction.ip());
    Error::NotRelocatable { start, at, instruction: text, why: "its operand is out of reach from the new address" }
}
