//! Source files that the code and data of one object are from: link-time optimisation puts those of several files into one.

use super::dwarf::{DebugInfoError, Side, address_of};
use super::{Sections, damaged};
use crate::Refusal;
use gimli::constants as dw;
use std::collections::{BTreeMap, HashMap};

/// Origin of a function or variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Name for the linker, as the source file has it.
    pub(crate) name: String,
    /// Short name of the source file, different from that of every other; `None` for a name that all files share.
    pub(crate) file: Option<String>,
}

/// Owners of the code and data of an object, by place.
#[derive(Debug, Default)]
pub(crate) struct Owners(HashMap<u64, Owner>);

impl Owners {
    /// Returns the owner of what begins at a place.
    pub(crate) fn at(&self, section: usize, offset: u64) -> Option<&Owner> {
        self.0.get(&address_of(section, offset))
    }
}

/// Reads the owners from the debug information of an object.
pub(crate) fn owners(object: &[u8]) -> Result<Owners, Refusal> {
    let sections = Sections::load_with_places(object).map_err(damaged)?;
    Side::index(&sections).and_then(|side| all(&side)).map_err(damaged)
}

fn all(side: &Side<'_>) -> Result<Owners, DebugInfoError> {
    let mut files = Files { side, of_unit: BTreeMap::new() };
    let mut found = HashMap::new();
    side.placed(|die, address| {
        let entry = side.entry(die)?;
        let linkage = side.linkage_name(&entry, die.unit())?;
        let name = linkage.map_or_else(|| side.name_of(&entry, die.unit()), |name| Ok(Some(name)))?;
        let root = side.root(die)?;
        let is_shared = side.entry(root)?.has_attr(dw::DW_AT_external) || entry.has_attr(dw::DW_AT_external);
        if let Some(name) = name {
            let file = (!is_shared).then(|| files.short_name(root.unit()));
            found.insert(address, Owner { name: name.to_owned(), file });
        }
        Ok(())
    })?;
    Ok(Owners(found))
}

struct Files<'s, 'a> {
    side: &'s Side<'a>,
    of_unit: BTreeMap<usize, String>,
}

impl Files<'_, '_> {
    /// Returns a name that fits into a symbol: `cli_c` for `src/cli.c`, `cli_c_2` for the second unit of this name.
    fn short_name(&mut self, unit: usize) -> String {
        let plain = |unit: usize| {
            let path = self.side.file_of(unit);
            let name = path.rsplit('/').next().unwrap_or_default().to_owned();
            name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect::<String>()
        };
        if let Some(known) = self.of_unit.get(&unit) {
            return known.clone();
        }
        let name = plain(unit);
        let same = (0..unit).filter(|other| plain(*other) == name).count();
        let name = if same == 0 { name } else { format!("{name}_{}", same + 1) };
        self.of_unit.insert(unit, name.clone());
        name
    }
}
