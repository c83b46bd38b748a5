//! Types and static variables that a function's code uses.

use super::dwarf::{DebugInfoError, Die, NESTING_MAX, Side, TypeKey, is_tagged};
use super::shape::Shape;
use gimli::{AttributeValue, constants as dw};
use std::collections::{HashMap, HashSet};

/// Named types and static locals, of several functions together.
#[derive(Default)]
pub(super) struct References {
    pub(super) types: HashMap<TypeKey, Die>,
    /// Static locals by `function::variable`, as several functions may have one of a name.
    pub(super) statics: HashMap<String, Vec<Die>>,
    functions: HashSet<Die>,
    seen: HashSet<Die>,
}

/// Adds the types of `function`: parameters, result, locals, and the same of every function that it calls or inlines.
pub(super) fn references(side: &Side<'_>, function: &str, out: &mut References) -> Result<(), DebugInfoError> {
    let mut todo: Vec<Die> = side.functions.get(function).cloned().unwrap_or_default();
    while let Some(die) = todo.pop() {
        if !out.functions.insert(die) {
            continue;
        }
        let entry = side.entry(die)?;
        todo.extend(side.origin(&entry, die.unit())?);
        let owner = side.name_of(&entry, die.unit())?.unwrap_or(function).to_owned();
        let scope = if side.is_cxx(die.unit()) { format!("{owner}::") } else { String::new() };
        let scope = scope.as_str();
        reach(side, side.type_of(die)?, scope, out, 0)?;
        side.below(die, true, |die, entry| {
            if let Some(inlined) = side.reference(entry, dw::DW_AT_abstract_origin, die.unit())?
                && side.entry(inlined)?.tag() == dw::DW_TAG_subprogram
            {
                todo.push(inlined);
            }
            if let Some(called) = side.reference(entry, dw::DW_AT_call_origin, die.unit())? {
                reach_call(side, called, scope, out, 0)?;
            }
            if is_tagged(entry.tag()) || entry.tag() == dw::DW_TAG_typedef {
                return reach(side, Some(die), scope, out, 0);
            }
            if entry.tag() == dw::DW_TAG_variable && is_static(entry) {
                let (name, root) = (side.name_of(entry, die.unit())?.unwrap_or_default(), side.root(die)?);
                let all = out.statics.entry(format!("{owner}::{name}")).or_default();
                if !all.contains(&root) {
                    all.push(root);
                }
            }
            reach(side, side.type_of(die)?, scope, out, 0)
        })?;
    }
    Ok(())
}

/// Returns true for a location that is one address: `DW_OP_addr` alone. Other locals are in registers and on the stack.
pub(super) fn is_static(entry: &super::dwarf::Entry<'_>) -> bool {
    match entry.attr_value(dw::DW_AT_location) {
        Some(AttributeValue::Exprloc(location)) => {
            location.0.slice().first().is_some_and(|op| [dw::DW_OP_addr.0, dw::DW_OP_addrx.0].contains(op))
        }
        _ => false,
    }
}

/// Adds the named types that `ty` consists of, up to their names. `scope` precedes the name of a class within a
/// function.
fn reach(
    side: &Side<'_>,
    ty: Option<Die>,
    scope: &str,
    out: &mut References,
    depth: usize,
) -> Result<(), DebugInfoError> {
    let Some(die) = ty else { return Ok(()) };
    if depth > NESTING_MAX {
        return Err(DebugInfoError::Nesting);
    }
    if !out.seen.insert(die) {
        return Ok(());
    }
    match side.shape(Some(die))? {
        Shape::Pointer { to, .. } | Shape::Array { element: to, .. } => reach(side, to, scope, out, depth + 1),
        Shape::Member { class, to } => {
            reach(side, class, scope, out, depth + 1)?;
            reach(side, to, scope, out, depth + 1)
        }
        Shape::Function { die } => reach_call(side, die, scope, out, depth + 1),
        // Several closures of one function have one name: they are compared with the functions that have them.
        Shape::Aggregate { name: Some(name), .. } if is_closure(&name) => Ok(()),
        Shape::Aggregate { die: inner, name: Some(name), .. } | Shape::Enumeration { die: inner, name: Some(name) } => {
            let entry = side.entry(inner)?;
            let tag = entry.has_attr(dw::DW_AT_name);
            let named = if tag { inner } else { die };
            if !entry.has_attr(dw::DW_AT_declaration) {
                let name = if side.is_local(named) { format!("{scope}{name}") } else { name };
                out.types.entry(TypeKey { tag, name }).or_insert(named);
            }
            Ok(())
        }
        Shape::Aggregate { die: inner, name: None, .. } => {
            let members = side.members(inner)?;
            members.into_iter().try_for_each(|member| reach(side, member.ty, scope, out, depth + 1))
        }
        _ => Ok(()),
    }
}

/// Returns true if g++ made the name from the parameters of a lambda.
fn is_closure(name: &str) -> bool {
    name.starts_with("<lambda") || name.contains("::<lambda")
}

/// Adds the types that pass between a function and its callers.
fn reach_call(
    side: &Side<'_>,
    function: Die,
    scope: &str,
    out: &mut References,
    depth: usize,
) -> Result<(), DebugInfoError> {
    let (parameters, _) = side.parameters(function)?;
    reach(side, side.type_of(function)?, scope, out, depth)?;
    parameters.into_iter().try_for_each(|ty| reach(side, ty, scope, out, depth))
}
