//! Enumerations whose values changed: what may hold an old one.
//!
//! Data that lives between calls is found by its type. Frames hold values too: a function that stays must be on no stack
//! when a thread changes over. A value in an integer is a meaning that no type states, as that of a macro is.

use super::dwarf::{DebugInfoError, Die, Entry, NESTING_MAX, Side, is_aggregate};
use super::references::is_static;
use super::shape::Shape;
use gimli::constants as dw;
use std::collections::BTreeSet;

/// Data and functions with the type of an enumeration.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// One member or variable that lives outside of calls, if any has it.
    pub(super) data: Option<String>,
    /// Functions with a parameter, result, variable or call that has it.
    pub(super) functions: BTreeSet<String>,
}

/// Finds all uses of the enumeration called `name` in one object.
pub(super) fn uses(side: &Side<'_>, name: &str) -> Result<Uses, DebugInfoError> {
    let mut search = Search { side, name, uses: Uses::default() };
    for root in side.roots()? {
        search.scan(root, None, None, 0)?;
    }
    Ok(search.uses)
}

struct Search<'s, 'a> {
    side: &'s Side<'a>,
    name: &'s str,
    uses: Uses,
}

impl<'a> Search<'_, 'a> {
    fn scan(
        &mut self,
        parent: Die,
        function: Option<&str>,
        aggregate: Option<&str>,
        depth: usize,
    ) -> Result<(), DebugInfoError> {
        if depth > NESTING_MAX {
            return Err(DebugInfoError::Nesting);
        }
        let mut children = Vec::new();
        self.side.below(parent, false, |die, entry| {
            children.push((die, entry.clone()));
            Ok(())
        })?;
        for (die, entry) in children {
            let tag = entry.tag();
            if tag == dw::DW_TAG_subprogram {
                // an original without code has the static variables of its instances
                let is_here = !entry.has_attr(dw::DW_AT_declaration);
                let name = self.side.name_of(&entry, die.unit())?.filter(|_| is_here);
                if let Some(name) = name {
                    self.note(die, Some(name), "")?;
                    self.scan(die, Some(name), None, depth + 1)?;
                }
            } else if is_aggregate(tag) {
                let name = self.side.describe(Some(die))?;
                self.scan(die, function, Some(&name), depth + 1)?;
            } else if tag == dw::DW_TAG_member {
                let name = self.side.name_of(&entry, die.unit())?.unwrap_or_default();
                self.note(die, None, &format!("member `{name}` of {}", aggregate.unwrap_or("a type")))?;
            } else if tag == dw::DW_TAG_variable || tag == dw::DW_TAG_formal_parameter {
                let name = self.side.name_of(&entry, die.unit())?.unwrap_or_default();
                let within = function.filter(|_| !is_static(&entry) && !entry.has_attr(dw::DW_AT_external));
                self.note(die, within, &format!("variable `{name}`"))?;
            } else if let Some(function) = function {
                self.called(die, &entry, function)?;
                self.scan(die, Some(function), None, depth + 1)?;
            }
        }
        Ok(())
    }

    /// Notes an entry that has the type: one of a function, or data.
    fn note(&mut self, die: Die, function: Option<&str>, what: &str) -> Result<(), DebugInfoError> {
        if self.reaches(self.side.type_of(die)?, 0)? {
            match function {
                Some(function) => drop(self.uses.functions.insert(function.to_owned())),
                None => self.uses.data = self.uses.data.take().or(Some(what.to_owned())),
            }
        }
        Ok(())
    }

    /// Notes a call whose result or parameter has the type: the caller has it in a register.
    fn called(&mut self, die: Die, entry: &Entry<'a>, function: &str) -> Result<(), DebugInfoError> {
        if !matches!(entry.tag(), dw::DW_TAG_call_site | dw::DW_TAG_GNU_call_site) {
            return Ok(());
        }
        let callee = match self.side.reference(entry, dw::DW_AT_call_origin, die.unit())? {
            Some(callee) => Some(callee),
            None => self.side.reference(entry, dw::DW_AT_abstract_origin, die.unit())?,
        };
        let Some(callee) = callee else { return Ok(()) };
        let (mut types, _) = self.side.parameters(callee)?;
        types.push(self.side.type_of(callee)?);
        for ty in types {
            if self.reaches(ty, 0)? {
                self.uses.functions.insert(function.to_owned());
            }
        }
        Ok(())
    }

    /// Returns true if a type is the enumeration, an array of it, or leads to it by a pointer.
    fn reaches(&self, ty: Option<Die>, depth: usize) -> Result<bool, DebugInfoError> {
        if depth > NESTING_MAX {
            return Err(DebugInfoError::Nesting);
        }
        Ok(match self.side.shape(ty)? {
            Shape::Enumeration { name, .. } => name.as_deref() == Some(self.name),
            Shape::Pointer { to, .. } | Shape::Array { element: to, .. } => self.reaches(to, depth + 1)?,
            Shape::Function { die } => {
                let (mut types, _) = self.side.parameters(die)?;
                types.push(self.side.type_of(die)?);
                let mut found = false;
                for ty in types {
                    found |= self.reaches(ty, depth + 1)?;
                }
                found
            }
            _ => false,
        })
    }
}
