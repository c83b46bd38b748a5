//! Functions that declare the static variables of an object: statics of one name are different ones in different functions.

use super::dwarf::{DebugInfoError, Side, address_of};
use super::{Sections, damaged};
use crate::Refusal;
use gimli::constants as dw;
use std::collections::HashMap;

/// Names of the functions that declare static variables, by the places of these.
#[derive(Debug, Default)]
pub(crate) struct Scopes(HashMap<u64, Option<String>>);

impl Scopes {
    /// Returns the function that declares the variable at a place, if one and only one is known.
    pub(crate) fn at(&self, section: usize, offset: u64) -> Option<&str> {
        self.0.get(&address_of(section, offset))?.as_deref()
    }
}

/// Reads the scopes from the debug information of an object; an object without it has none.
pub(crate) fn scopes(object: &[u8]) -> Result<Scopes, Refusal> {
    let sections = match Sections::load_with_places(object) {
        Err(DebugInfoError::Missing) => return Ok(Scopes::default()),
        other => other.map_err(damaged)?,
    };
    Side::index(&sections).and_then(|side| all(&side)).map_err(damaged)
}

fn all(side: &Side<'_>) -> Result<Scopes, DebugInfoError> {
    let mut found: HashMap<u64, Option<String>> = HashMap::new();
    side.placed_within(&[dw::DW_TAG_subprogram, dw::DW_TAG_inlined_subroutine], |function, address| {
        let entry = side.entry(function)?;
        let name = side.name_of(&entry, function.unit())?.map(str::to_owned);
        let known = found.entry(address).or_insert_with(|| name.clone());
        if *known != name {
            *known = None;
        }
        Ok(())
    })?;
    Ok(Scopes(found))
}
