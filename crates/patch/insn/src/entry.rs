//! The bytes of a function that a jump at its entry displaces, and the checks that permit it.

use crate::{Error, JUMP_LEN};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Formatter, Instruction, IntelFormatter, Mnemonic, Register};
use stillpoint_patch_format::Svma;

/// The bytes that a jump at an entry displaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryPlan {
    /// Number of bytes from the entry to the first instruction boundary at or after the end of the jump.
    pub displaced_len: usize,
    /// Offsets of the displaced instructions after the first one. The jump must not be written while a thread is stopped at one of them, or
    /// while a signal frame points to one.
    pub inner_boundaries: Vec<u8>,
    /// True if a thread at the entry may have done part of the work: the function itself jumps back there, or its first instruction repeats
    /// (`rep stos`) and may have been interrupted halfway.
    pub loops_to_entry: bool,
}

/// Decodes all of `code`, which starts at `start`.
pub(crate) fn decode(code: &[u8], start: Svma) -> Result<Vec<Instruction>, Error> {
    let mut out = Vec::with_capacity(code.len() / 4);
    let mut decoder = Decoder::with_ip(64, code, start.0, DecoderOptions::NONE);
    while decoder.can_decode() {
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return Err(Error::Undecodable { start, at: Svma(instruction.ip()) });
        }
        out.push(instruction);
    }
    Ok(out)
}

/// Returns the target of a direct jump or conditional jump (not of a call, because a call returns).
fn jump_within(instruction: &Instruction) -> Option<Svma> {
    match instruction.flow_control() {
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch | FlowControl::XbeginXabortXend => {
            let near = instruction.near_branch_target();
            (near != 0).then_some(Svma(near))
        }
        _ => None,
    }
}

/// Returns every target of a direct jump in `code`, each as (address of the jump, target). Use it for the cold parts of a function:
/// [`plan_entry`] does not see their jumps into the displaced bytes of the hot part.
///
/// # Errors
/// [`Error::Undecodable`] at the first byte that is not an instruction.
pub fn branch_targets(code: &[u8], start: Svma) -> Result<Vec<(Svma, Svma)>, Error> {
    let jumps = decode(code, start)?;
    Ok(jumps.iter().filter_map(|i| jump_within(i).map(|to| (Svma(i.ip()), to))).collect())
}

/// Returns true if `bytes` are only padding: no-operations and int3.
pub fn is_padding(bytes: &[u8]) -> bool {
    let all = decode(bytes, Svma(0));
    all.is_ok_and(|all| all.iter().all(|i| matches!(i.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)))
}

/// Works out which bytes a jump at the entry displaces.
///
/// `code` is the whole hot part, in memory at `start`. For a function of fewer than five bytes the caller may append the padding after it
/// (see [`is_padding`]) if no other function owns that padding.
///
/// # Errors
/// The function is too short, a displaced instruction cannot be moved, or a branch goes into the displaced bytes.
pub fn plan_entry(code: &[u8], start: Svma) -> Result<EntryPlan, Error> {
    if code.len() < JUMP_LEN {
        return Err(Error::TooShort { start, len: code.len() });
    }
    let instructions = decode(code, start)?;
    let mut inner_boundaries = Vec::new();
    let mut displaced_len = 0;
    for instruction in &instructions {
        if displaced_len >= JUMP_LEN {
            break;
        }
        if displaced_len > 0 {
            inner_boundaries.push(displaced_len as u8);
        }
        displaced_len += instruction.len();
        movable(instruction, start, displaced_len)?;
    }
    let behind = start.0 + displaced_len as u64;
    let mut loops_to_entry = instructions.first().is_some_and(|i| i.has_rep_prefix() || i.has_repne_prefix());
    for instruction in &instructions {
        let Some(to) = jump_within(instruction) else { continue };
        if to.0 > start.0 && to.0 < behind && instruction.ip() >= behind {
            return Err(Error::BranchIntoEntry { start, from: Svma(instruction.ip()), to });
        }
        loops_to_entry |= to == start;
    }
    Ok(EntryPlan { displaced_len, inner_boundaries, loops_to_entry })
}

/// Refuses an instruction whose meaning changes when [`crate::displace`] moves it; `end` is the offset after the instruction.
fn movable(instruction: &Instruction, start: Svma, end: usize) -> Result<(), Error> {
    let refuse = |why| {
        let mut text = String::new();
        IntelFormatter::new().format(instruction, &mut text);
        Err(Error::NotRelocatable { start, at: Svma(instruction.ip()), instruction: text, why })
    };
    match instruction.flow_control() {
        FlowControl::Call if instruction.mnemonic() != Mnemonic::Call => {
            refuse("a system call restarts at its address")
        }
        FlowControl::Call | FlowControl::IndirectCall if end < JUMP_LEN => {
            refuse("it returns into the bytes that the jump needs")
        }
        FlowControl::IndirectCall if uses_stack_pointer(instruction) => refuse("its operand is relative to rsp"),
        FlowControl::Call | FlowControl::IndirectCall if !is_near_call(instruction) => refuse("a far call"),
        FlowControl::Interrupt if instruction.mnemonic() != Mnemonic::Int3 => refuse("it restarts at its address"),
        FlowControl::XbeginXabortXend => refuse("a transaction"),
        _ if matches!(instruction.mnemonic(), Mnemonic::Syscall | Mnemonic::Sysenter) => {
            refuse("a system call restarts at its address")
        }
        _ => Ok(()),
    }
}

fn uses_stack_pointer(instruction: &Instruction) -> bool {
    instruction.memory_base() == Register::RSP || instruction.op0_register() == Register::RSP
}

fn is_near_call(instruction: &Instruction) -> bool {
    instruction.is_call_near() || instruction.is_call_near_indirect()
}
