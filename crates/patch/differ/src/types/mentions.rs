//! What a function mentions: the types and static variables that its code works with.

use super::dwarf::{Die, NESTING_MAX, Side, TypeKey, Unreadable, is_tagged};
use super::shape::Shape;
use gimli::{AttributeValue, constants as dw};
use std::collections::{HashMap, HashSet};

/// Named types and static locals, of several functions together.
#[derive(Default)]
pub(super) struct Mentions {
    pub(super) types: HashMap<TypeKey, Die>,
    /// `function::variable`, as several functions have one of a name.
    pub(super) statics: HashMap<String, Vec<Die>>,
    functions: HashSet<Die>,
    seen: HashSet<Die>,
}

/// Adds what `function` mentions: parameters, result, locals, and the same of every function that it calls or inlines.
pub(super) fn mentions(side: &Side<'_>, function: &str, out: &mut Mentions) -> Result<(), Unreadable> {
    let mut todo: Vec<Die> = side.functions.get(function).cloned().unwrap_or_default();
    while let Some(die) = todo.pop() {
        if !out.functions.insert(die) {
            continue;
        }
        let entry = side.entry(die)?;
        todo.extend(side.origin(&entry, die.unit())?);
        let owner = side.name_of(&entry, die.unit())?.unwrap_or(function).to_owned();
        reach(side, side.type_of(die)?, out, 0)?;
        side.below(die, true, |die, entry| {
            if let Some(inlined) = side.reference(entry, dw::DW_AT_abstract_origin, die.unit())?
                && side.entry(inlined)?.tag() == dw::DW_TAG_subprogram
            {
                todo.push(inlined);
            }
            if let Some(called) = side.reference(entry, dw::DW_AT_call_origin, die.unit())? {
                reach_call(side, called, out, 0)?;
            }
            if is_tagged(entry.tag()) || entry.tag() == dw::DW_TAG_typedef {
                return reach(side, Some(die), out, 0);
            }
            if entry.tag() == dw::DW_TAG_variable && is_static(entry) {
                let (name, root) = (side.name_of(entry, die.unit())?.unwrap_or_default(), side.root(die)?);
                let all = out.statics.entry(format!("{owner}::{name}")).or_default();
                if !all.contains(&root) {
                    all.push(root);
                }
            }
            reach(side, side.type_of(die)?, out, 0)
        })?;
    }
    Ok(())
}

/// A location that is one address: `DW_OP_addr` alone. Locals live in registers and on the stack.
fn is_static(entry: &super::dwarf::Entry<'_>) -> bool {
    match entry.attr_value(dw::DW_AT_location) {
        Some(AttributeValue::Exprloc(location)) => location.0.slice().first() == Some(&dw::DW_OP_addr.0),
        _ => false,
    }
}

/// The named types that `ty` is made of, up to their names.
fn reach(side: &Side<'_>, ty: Option<Die>, out: &mut Mentions, depth: usize) -> Result<(), Unreadable> {
    let Some(die) = ty else { return Ok(()) };
    if depth > NESTING_MAX {
        return Err(Unreadable::Nesting);
    }
    if !out.seen.insert(die) {
        return Ok(());
    }
    match side.shape(Some(die))? {
        Shape::Pointer { to, .. } | Shape::Array { element: to, .. } => reach(side, to, out, depth + 1),
        Shape::Function { die } => reach_call(side, die, out, depth + 1),
        Shape::Aggregate { die: inner, name: Some(name), .. } | Shape::Enumeration { die: inner, name: Some(name) } => {
            let entry = side.entry(inner)?;
            let tag = entry.has_attr(dw::DW_AT_name);
            if !entry.has_attr(dw::DW_AT_declaration) {
                out.types.entry(TypeKey { tag, name }).or_insert(if tag { inner } else { die });
            }
            Ok(())
        }
        Shape::Aggregate { die: inner, name: None, .. } => {
            let members = side.members(inner)?;
            members.into_iter().try_for_each(|member| reach(side, member.ty, out, depth + 1))
        }
        _ => Ok(()),
    }
}

/// What passes between a function and who calls it.
fn reach_call(side: &Side<'_>, function: Die, out: &mut Mentions, depth: usize) -> Result<(), Unreadable> {
    let (parameters, _) = side.parameters(function)?;
    reach(side, side.type_of(function)?, out, depth)?;
    parameters.into_iter().try_for_each(|ty| reach(side, ty, out, depth))
}
