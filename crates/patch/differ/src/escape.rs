//! Functions that keep the address of a variable to themselves: they load from it, compare it and step along it, but do not store
//! it, return it, or give it to another function.
//!
//! Registers are followed along all paths. What a register may hold is a set of variables, and every result of an address is
//! one. What is not understood counts as a use that lets the address out.

use crate::clobbers;
use crate::object_file::{Object, Site, is_slot};
use iced_x86::{
    ConstantOffsets, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};
use std::collections::BTreeMap;

/// Limit of variables that are followed at once: the bits of a [`Mask`].
pub(crate) const VARIABLES_MAX: usize = 64;

/// A set of variables.
pub(crate) type Mask = u64;

/// The variables whose addresses are followed.
#[derive(Debug, Default)]
pub(crate) struct Followed {
    /// Symbols of the variables; the index is the bit in a [`Mask`].
    pub(crate) symbols: Vec<usize>,
    /// Variables whose addresses each variable holds.
    pub(crate) holds: Vec<Mask>,
}

impl Followed {
    /// Returns the variable at a site.
    pub(crate) fn at(&self, object: &Object<'_>, site: Site<'_>) -> Mask {
        let Site::Inside { section, offset, anchor } = site else { return 0 };
        let owner = object.owner(section, anchor).or_else(|| object.owner(section, offset));
        let bit = owner.and_then(|owner| self.symbols.iter().position(|known| *known == owner));
        bit.map_or(0, |bit| 1 << bit)
    }

    /// Returns the addresses that a load from one of `variables` may give.
    fn loaded(&self, variables: Mask) -> Mask {
        let from = self.holds.iter().enumerate().filter(|(bit, _)| variables & 1 << bit != 0);
        from.fold(0, |all, (_, held)| all | held)
    }
}

const REGISTERS: usize = 16;
/// Registers that pass parameters.
const PARAMETERS: [Register; 6] =
    [Register::RDI, Register::RSI, Register::RDX, Register::RCX, Register::R8, Register::R9];
const RESULTS: [Register; 2] = [Register::RAX, Register::RDX];
/// Registers that a call of foreign code changes.
const CALLER_SAVED: [&str; 9] = ["rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11"];

/// Variables that each general register may point to.
type State = [Mask; REGISTERS];
/// Section and offset of an instruction.
type Place = (usize, u64);

/// Returns the use by which a function may let out the address of one of the variables.
pub(crate) fn of(object: &Object<'_>, function: usize, followed: &Followed) -> Option<&'static str> {
    let parts = object.parts(function).unwrap_or_default();
    if parts.iter().any(|part| !object.exception_tables(*part).is_empty()) {
        return Some("handles exceptions, along which its address was not followed");
    }
    let mut walk = Walk { object, followed, parts, states: BTreeMap::new(), open: Vec::new() };
    walk.enter_all();
    while let Some(place) = walk.open.pop() {
        if let Err(why) = walk.step(place) {
            return Some(why);
        }
    }
    None
}

struct Walk<'w, 'a> {
    object: &'w Object<'a>,
    followed: &'w Followed,
    parts: Vec<usize>,
    states: BTreeMap<Place, State>,
    open: Vec<Place>,
}

/// One instruction and the variables that its constants name.
struct Step {
    instruction: Instruction,
    displacement: Mask,
    immediate: Mask,
}

impl Walk<'_, '_> {
    /// Begins at every instruction: those that only a table of jumps leads to are not known.
    fn enter_all(&mut self) {
        for part in self.parts.clone() {
            let decoder = Decoder::with_ip(64, self.object.sections[part].bytes, 0, DecoderOptions::NONE);
            let all: Vec<u64> = decoder.into_iter().map(|instruction| instruction.ip()).collect();
            all.into_iter().for_each(|at| self.enter((part, at), &[0; REGISTERS]));
        }
    }

    fn enter(&mut self, place: Place, state: &State) {
        let known = self.states.get(&place).copied();
        let mut joined = known.unwrap_or_default();
        joined.iter_mut().zip(state).for_each(|(one, other)| *one |= other);
        if known != Some(joined) {
            self.states.insert(place, joined);
            self.open.push(place);
        }
    }

    fn step(&mut self, place: Place) -> Result<(), &'static str> {
        let section = &self.object.sections[place.0];
        let rest = usize::try_from(place.1).ok().and_then(|at| section.bytes.get(at..)).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        let mut decoder = Decoder::with_ip(64, rest, place.1, DecoderOptions::NONE);
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return Err("has bytes that are no instruction");
        }
        let step = self.named(place.0, instruction, &decoder.get_constant_offsets(&instruction))?;
        let mut state = self.states.get(&place).copied().unwrap_or_default();
        let next = (place.0, instruction.next_ip());
        match instruction.flow_control() {
            FlowControl::Call | FlowControl::IndirectCall
                if instruction.is_call_near() || instruction.is_call_near_indirect() =>
            {
                gives(&state)?;
                self.after_call(place.0, &step, &mut state);
                self.enter(next, &state);
            }
            FlowControl::Return if RESULTS.iter().any(|r| state[r.number()] != 0) => return Err("returns its address"),
            FlowControl::Return | FlowControl::Exception => {}
            FlowControl::IndirectBranch if state.iter().any(|mask| *mask != 0) => {
                return Err("jumps by a table while a register holds its address");
            }
            FlowControl::IndirectBranch => {}
            FlowControl::UnconditionalBranch => self.branch(place.0, &instruction, &state)?,
            FlowControl::ConditionalBranch => {
                self.branch(place.0, &instruction, &state)?;
                self.enter(next, &state);
            }
            FlowControl::Next => {
                transfer(&step, &mut state, self.followed)?;
                self.enter(next, &state);
            }
            _ => return Err("has an instruction that was not followed"),
        }
        Ok(())
    }

    /// Finds the variables that an instruction names.
    fn named(&self, part: usize, instruction: Instruction, at: &ConstantOffsets) -> Result<Step, &'static str> {
        let mut step = Step { instruction, displacement: 0, immediate: 0 };
        let inside = instruction.ip()..instruction.next_ip();
        for reloc in self.object.sections[part].relocations.iter().filter(|r| inside.contains(&r.offset)) {
            let mask = self.followed.at(self.object, self.object.site(reloc));
            if mask != 0 && is_slot(reloc.kind) {
                return Err("takes its address from a slot");
            }
            let field = reloc.offset - instruction.ip();
            if at.has_displacement() && field == at.displacement_offset() as u64 {
                step.displacement |= mask;
            } else {
                step.immediate |= mask;
            }
        }
        Ok(step)
    }

    fn destination(&self, part: usize, instruction: &Instruction) -> Option<Site<'_>> {
        let inside = instruction.ip()..instruction.next_ip();
        let reloc = self.object.sections[part].relocations.iter().find(|r| inside.contains(&r.offset));
        reloc.map(|reloc| self.object.site(reloc))
    }

    fn branch(&mut self, part: usize, instruction: &Instruction, state: &State) -> Result<(), &'static str> {
        let place = match self.destination(part, instruction) {
            Some(Site::Inside { section, offset, .. }) if self.parts.contains(&section) => (section, offset as u64),
            None => (part, instruction.near_branch_target()),
            // a call in place of a return
            Some(_) => return gives(state),
        };
        self.enter(place, state);
        Ok(())
    }

    /// Removes what a call overwrites. The compiler knows which registers a function of the same unit leaves alone.
    fn after_call(&self, part: usize, step: &Step, state: &mut State) {
        let callee = match self.destination(part, &step.instruction) {
            Some(Site::Inside { section, offset, .. }) if step.instruction.is_call_near() => {
                self.object.owner(section, offset)
            }
            _ => None,
        };
        let changed = match callee {
            Some(callee) => clobbers::of(self.object, callee),
            None => CALLER_SAVED.map(str::to_owned).into(),
        };
        for register in PARAMETERS.iter().chain(&[Register::RAX, Register::R10, Register::R11]) {
            if changed.contains(&format!("{register:?}").to_lowercase()) {
                state[register.number()] = 0;
            }
        }
    }
}

/// Refuses a call while a register that may be a parameter holds an address.
fn gives(state: &State) -> Result<(), &'static str> {
    let given = PARAMETERS.iter().chain(&[Register::R10]).any(|register| state[register.number()] != 0);
    if given { Err("may give its address to a function that it calls") } else { Ok(()) }
}

/// Applies an instruction that continues with the next one.
fn transfer(step: &Step, state: &mut State, followed: &Followed) -> Result<(), &'static str> {
    let instruction = &step.instruction;
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(instruction);
    let holds = |register: Register| if register.is_gpr() { state[register.full_register().number()] } else { 0 };
    let pointed = step.displacement | holds(instruction.memory_base()) | holds(instruction.memory_index());
    let explicit = |register: Register| {
        let operand = |i| instruction.op_kind(i) == OpKind::Register && instruction.op_register(i) == register;
        (0..instruction.op_count()).any(operand)
            || [instruction.memory_base(), instruction.memory_index()].contains(&register)
    };
    let implicit = info.used_registers().iter().filter(|used| reads(used.access()) && !explicit(used.register()));
    let mut value =
        implicit.filter(|used| used.register() != Register::RSP).fold(0, |all, used| all | holds(used.register()));
    let operand = |i: u32| match instruction.op_kind(i) {
        OpKind::Register if reads(info.op_access(i)) => holds(instruction.op_register(i)),
        OpKind::Memory if instruction.mnemonic() == Mnemonic::Lea => pointed,
        OpKind::Memory if reads(info.op_access(i)) => followed.loaded(pointed),
        OpKind::Immediate32 | OpKind::Immediate64 | OpKind::Immediate32to64 => step.immediate,
        _ => 0,
    };
    value |= (0..instruction.op_count()).fold(0, |all, i| all | operand(i));
    // the distance of two places in a variable is no address
    let is_distance = instruction.mnemonic() == Mnemonic::Sub && operand(0) == operand(1);
    let clears = matches!(instruction.mnemonic(), Mnemonic::Xor | Mnemonic::Sub)
        && instruction.op1_kind() == OpKind::Register
        && instruction.op0_register() == instruction.op1_register();
    if clears || is_distance {
        value = 0;
    }
    if value != 0 && info.used_memory().iter().any(|used| writes(used.access())) {
        return Err("stores its address");
    }
    let mut results = Vec::new();
    for used in info.used_registers().iter().filter(|used| writes(used.access())) {
        let register = used.register();
        if register.is_gpr() {
            let whole = used.access() != OpAccess::CondWrite && register.size() >= 4;
            let rest = if whole { 0 } else { holds(register) };
            results.push((register.full_register().number(), value | rest));
        } else if value != 0 && register.is_vector_register() {
            return Err("moves its address to a vector");
        }
    }
    results
        .into_iter()
        .filter(|(number, _)| *number != Register::RSP.number())
        .for_each(|(number, mask)| state[number] = mask);
    Ok(())
}

fn reads(access: OpAccess) -> bool {
    matches!(access, OpAccess::Read | OpAccess::CondRead | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
}

fn writes(access: OpAccess) -> bool {
    matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
}
