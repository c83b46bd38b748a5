//! Registers that a function changes and that its callers may rely on if the compiler has analysed it (`-fipa-ra`).
//!
//! A caller compiled against the old callee may keep a value in such a register across the call. Its code on the after
//! side was compiled against the new callee, so it differs whenever it must; this module names the cause.

use crate::object_file::{Object, Site};
use iced_x86::{Decoder, DecoderOptions, FlowControl, InstructionInfoFactory, OpAccess, Register};
use std::collections::BTreeSet;

/// Registers that the ABI allows a call to change.
const CALLER_SAVED: [Register; 9] = {
    use Register::*;
    [RAX, RCX, RDX, RSI, RDI, R8, R9, R10, R11]
};

/// Depth limit of calls; deeper calls count as changing every register.
const DEPTH_MAX: u32 = 8;

/// Returns the names of the caller-saved registers that `function` and its callees within the unit may change.
pub(crate) fn of(object: &Object<'_>, function: usize) -> BTreeSet<String> {
    collect(object, function, 0).into_iter().map(|register| format!("{register:?}").to_lowercase()).collect()
}

fn collect(object: &Object<'_>, function: usize, depth: u32) -> BTreeSet<Register> {
    if depth > DEPTH_MAX {
        return CALLER_SAVED.into();
    }
    let mut found = BTreeSet::new();
    let mut factory = InstructionInfoFactory::new();
    for part in object.parts(function).unwrap_or_default() {
        let section = &object.sections[part];
        for instruction in &mut Decoder::with_ip(64, section.bytes, 0, DecoderOptions::NONE) {
            for used in factory.info(&instruction).used_registers() {
                let writes = !matches!(used.access(), OpAccess::Read | OpAccess::CondRead | OpAccess::None);
                let full = used.register().full_register();
                found.extend(CALLER_SAVED.into_iter().filter(|register| writes && *register == full));
            }
            let leaves = matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall);
            let jumps = matches!(instruction.flow_control(), FlowControl::UnconditionalBranch);
            if !leaves && !jumps {
                continue;
            }
            let inside = instruction.ip()..instruction.next_ip();
            let reloc = section.relocations.iter().find(|r| inside.contains(&r.offset));
            match reloc.map(|r| object.site(r)) {
                Some(Site::Inside { section, offset, .. }) if section != part => match object.owner(section, offset) {
                    Some(callee) if callee != function => found.extend(collect(object, callee, depth + 1)),
                    _ => {}
                },
                Some(Site::Inside { .. }) => {}
                None if jumps => {}
                _ => return CALLER_SAVED.into(),
            }
        }
    }
    found
}
