//! Exports of a shared library.

use crate::Refusal;
use object::elf;
use object::read::elf::{ElfFile64, Sym};
use object::{Endianness, Object as _};
use std::collections::BTreeMap;

/// Returns the names that a shared library exports, each with its default version, for
/// [`Options::imports`](crate::Options). Never panics, for any input.
///
/// # Errors
/// [`Refusal::BadTarget`] if the bytes are not an ELF file that can be parsed.
pub fn exports(bytes: &[u8]) -> Result<BTreeMap<String, Option<String>>, Refusal> {
    let bad = |e: object::Error| Refusal::BadTarget(format!("library: {e}"));
    let file = ElfFile64::<Endianness>::parse(bytes).map_err(bad)?;
    let e = file.endianness();
    let versions = file.elf_section_table().versions(e, bytes).map_err(bad)?;
    let table = file.elf_dynamic_symbol_table();
    let mut out = BTreeMap::new();
    for (index, symbol) in table.enumerate() {
        let (bind, kind) = (symbol.st_bind(), symbol.st_type());
        let defined =
            [elf::STT_FUNC, elf::STT_OBJECT, elf::STT_TLS, elf::STT_GNU_IFUNC, elf::STT_NOTYPE].contains(&kind);
        if symbol.st_shndx(e) == elf::SHN_UNDEF || bind == elf::STB_LOCAL || !defined {
            continue;
        }
        let Ok(name) = symbol.name(e, table.strings()) else { continue };
        let name = String::from_utf8_lossy(name).into_owned();
        let Some(versions) = &versions else {
            out.insert(name, None);
            continue;
        };
        let version = versions.version_index(e, index);
        if version.is_hidden() {
            continue;
        }
        let version = versions.version(version.index()).map_err(bad)?;
        out.insert(name, version.map(|v| String::from_utf8_lossy(v.name()).into_owned()));
    }
    Ok(out)
}
