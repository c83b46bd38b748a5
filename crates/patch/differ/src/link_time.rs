//! Names of a program that was optimised when it was linked.
//!
//! The linker's step compiles the whole program again, in partitions. A partition has code of several source files, so that
//! statics of one name meet: the compiler numbers them (`f.lto_priv.3`), by an order that a change moves, and only where
//! they do meet. A number that moves would pair two different functions, and a stored pointer to one of them would lead to
//! the other. So each static gets the name of its source file in place of the number, from the debug information; a name
//! that the source shares between files has none, although the compiler may have made it local. Statics that became one function
//! are numbered, see the module `folded`.

use crate::folded::{self, MARK, Place};
use crate::types::{Owners, owners};
use crate::{Refusal, object_file, symbol_names};
use object::elf;
use object::read::elf::{ElfFile64, FileHeader, SectionHeader};
use object::{Endianness, Object, ObjectSymbol, SymbolKind, SymbolSection};
use std::collections::{BTreeMap, BTreeSet};

/// Size of an entry of a symbol table, and the place of the byte with the binding in it.
const ENTRY_SIZE: usize = 24;
const INFO_AT: usize = 4;
/// Size of a section's header, and the places of file offset and size in it.
const HEADER_OFFSET_AT: usize = 24;
const HEADER_SIZE_AT: usize = 32;

/// Part of a name that the compiler numbers where statics of one name meet.
const NUMBERED: &str = ".lto_priv.";

/// One symbol with a new name.
struct Named {
    index: usize,
    name: String,
    /// True for a symbol of one source file; `None` leaves the binding as it is.
    is_local: Option<bool>,
    place: Place,
    is_code: bool,
    /// Name in the object.
    old: String,
}

/// Gives the statics of a program's partitions, joined to one object, names that tell those of different source files
/// apart and that depend on no order.
///
/// # Errors
/// [`Refusal::BadObject`] for an object that cannot be read or has two functions that cannot be told apart,
/// [`Refusal::DebugInfo`] if it has no debug information.
pub fn distinguish_statics(joined: &[u8], unit: &str, side: &'static str) -> Result<Vec<u8>, Refusal> {
    let bad = |why: String| Refusal::BadObject { unit: unit.to_owned(), side, why };
    let file = ElfFile64::<Endianness>::parse(joined).map_err(|e| bad(e.to_string()))?;
    let owners = owners(joined)?;
    let object = object_file::Object::parse(joined, unit, side)?;
    let mut named: Vec<Named> = file.symbols().filter_map(|symbol| renamed(&symbol, &owners)).collect();
    number_again(&mut named, |places| folded::are_same(&object, places))
        .map_err(|name| bad(format!("two functions or variables `{name}` cannot be told apart")))?;
    rewritten(joined, &file, &named).ok_or_else(|| bad("its symbol table is damaged".to_owned()))
}

fn renamed<'d>(symbol: &impl ObjectSymbol<'d>, owners: &Owners) -> Option<Named> {
    let SymbolSection::Section(section) = symbol.section() else { return None };
    if matches!(symbol.kind(), SymbolKind::Section | SymbolKind::File) {
        return None;
    }
    let old = symbol.name().ok().filter(|name| !name.is_empty())?;
    let place = (section.0, symbol.address());
    let is_code = symbol.kind() == SymbolKind::Text;
    let (name, index) = (old.to_owned(), symbol.index().0);
    let same = Named { index, name: name.clone(), is_local: None, place, is_code, old: name };
    if symbol_names::is_anonymous(old) {
        return Some(same);
    }
    let plain = without_numbers_of_partitions(old);
    let Some(owner) = owners.at(place.0, place.1) else {
        let is_jump = is_code && old.contains(NUMBERED) && !symbol_names::is_cold(old);
        return Some(if is_jump { Named { name: plain + MARK, is_local: Some(true), ..same } } else { same });
    };
    let Some((own, rest)) = split(&plain, &owner.name) else { return Some(same) };
    Some(match &owner.file {
        // numbers tell statics of functions in C++ apart
        _ if plain.starts_with("_ZZ") || plain.starts_with("_ZGV") => Named { name: plain, ..same },
        Some(file) => Named { name: format!("{own}.{file}{rest}"), is_local: Some(true), ..same },
        None => Named { is_local: rest.is_empty().then_some(false), name: plain, ..same },
    })
}

/// Splits a name into that of the source and what the compiler added. The debug information states the whole name of some parts of
/// functions, with their numbers; compilers of C++ do not state every mangled name.
fn split<'n>(name: &'n str, stated: &str) -> Option<(&'n str, &'n str)> {
    let stated = stated.split_once('.').map_or(stated, |(source, _)| source);
    let at = match name.strip_prefix(stated) {
        Some(rest) if rest.is_empty() || rest.starts_with('.') => stated.len(),
        _ if name.starts_with("_Z") => name.find('.').unwrap_or(name.len()),
        _ => return None,
    };
    name.split_at_checked(at)
}

/// Removes each `.lto_priv.N` from a name; a function that was numbered may be numbered again.
fn without_numbers_of_partitions(name: &str) -> String {
    let mut parts = name.split(NUMBERED);
    let start = parts.next().unwrap_or_default().to_owned();
    parts.fold(start, |start, rest| start + rest.trim_start_matches(|c: char| c.is_ascii_digit()))
}

/// Numbers names of the compiler that several partitions have, and functions of several places for which `are_same`. The error is a
/// name of something else at two places, or one of a function that is still numbered.
fn number_again(named: &mut [Named], are_same: impl Fn(&BTreeSet<Place>) -> bool) -> Result<(), String> {
    let mut places: BTreeMap<String, BTreeSet<Place>> = BTreeMap::new();
    for one in named.iter() {
        places.entry(one.name.clone()).or_default().insert(one.place);
    }
    let mut folded: BTreeMap<String, String> = BTreeMap::new();
    for one in named.iter_mut().filter(|one| one.is_code && !symbol_names::is_cold(&one.name)) {
        let all = &places[&one.name];
        let is_copy = all.len() > 1 && !one.name.starts_with("_ZZ");
        if !is_copy && !one.name.ends_with(MARK) || one.name.contains(NUMBERED) || !are_same(all) {
            continue;
        }
        let number = all.iter().position(|place| *place == one.place).unwrap_or_default();
        let name = format!("{}{MARK}.{number}", one.name.strip_suffix(MARK).unwrap_or(&one.name));
        folded.insert(one.old.clone(), name.clone());
        one.name = name;
    }
    for one in named.iter_mut() {
        // parts follow their function
        if let Some(whole) = symbol_names::cold_parent(&one.old).and_then(|parent| folded.get(parent)) {
            one.name = format!("{whole}.cold");
            continue;
        }
        let Some(all) = places.get(&one.name) else { continue };
        let has_number = one.is_code && one.name.contains(NUMBERED);
        if all.len() == 1 && !has_number && !one.name.ends_with(MARK) {
            continue;
        }
        let is_made = symbol_names::is_anonymous(&one.name) || !one.is_code && symbol_names::is_numbered(&one.name);
        let is_local = one.name.starts_with("_ZZ") || one.name.starts_with("_ZGV");
        if has_number || one.name.ends_with(MARK) || !is_made && !is_local {
            return Err(one.name.clone());
        }
        let number = all.iter().position(|place| *place == one.place).unwrap_or_default();
        one.name += &format!(".{number}");
    }
    Ok(())
}

/// Returns the object with other names and bindings: a new table of strings is at its end.
fn rewritten(joined: &[u8], file: &ElfFile64<'_, Endianness>, named: &[Named]) -> Option<Vec<u8>> {
    let e = Endianness::Little;
    let table = file.elf_symbol_table();
    let headers = usize::try_from(file.elf_header().e_shoff(e)).ok()?;
    let header_size = usize::from(file.elf_header().e_shentsize(e));
    let sections = file.elf_section_table();
    let at = usize::try_from(sections.section(table.section()).ok()?.sh_offset(e)).ok()?;
    let mut out = joined.to_vec();
    let of_table = sections.section(table.string_section()).ok()?;
    let old = joined
        .get(usize::try_from(of_table.sh_offset(e)).ok()?..)?
        .get(..usize::try_from(of_table.sh_size(e)).ok()?)?;
    let (start, mut text) = (out.len(), old.to_vec());
    for one in named {
        let entry = out.get_mut(at + one.index * ENTRY_SIZE..)?.get_mut(..ENTRY_SIZE)?;
        entry[..INFO_AT].copy_from_slice(&u32::try_from(text.len()).ok()?.to_le_bytes());
        text.extend_from_slice(one.name.as_bytes());
        text.push(0);
        if let Some(is_local) = one.is_local {
            let binding = if is_local { elf::STB_LOCAL } else { elf::STB_GLOBAL };
            entry[INFO_AT] = entry[INFO_AT] & 0xf | binding.0 << 4;
        }
    }
    let header = headers + table.string_section().0 * header_size;
    let mut write = |at: usize, value: usize| {
        out.get_mut(header + at..)?.get_mut(..8)?.copy_from_slice(&(value as u64).to_le_bytes());
        Some(())
    };
    write(HEADER_OFFSET_AT, start)?;
    write(HEADER_SIZE_AT, text.len())?;
    out.extend(text);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_partitions_are_removed() {
        assert_eq!(without_numbers_of_partitions("f.lto_priv.12"), "f");
        assert_eq!(without_numbers_of_partitions("f.lto_priv.0.cold"), "f.cold");
        assert_eq!(without_numbers_of_partitions("f.constprop.0"), "f.constprop.0");
        assert_eq!(without_numbers_of_partitions("f.lto_priv.1.lto_priv.0.cold"), "f.cold");
    }

    #[test]
    fn an_object_of_clang_is_refused_by_name() {
        let refusal = crate::object_file::Object::parse(b"BC\xc0\xde\x35\x14", "unit.c", "shipped").unwrap_err();
        assert_eq!(refusal.code(), "lto");
        assert!(refusal.to_string().contains("LLVM bitcode"), "{refusal}");
    }

    #[test]
    fn names_are_split_where_the_compiler_added_to_them() {
        assert_eq!(split("f.part.0", "f"), Some(("f", ".part.0")));
        assert_eq!(split("_ZL5count.0", "count"), Some(("_ZL5count", ".0")));
        assert_eq!(split("first", "f"), None);
        assert_eq!(split("f.part.0", "f.part.0.lto_priv.0"), Some(("f", ".part.0")));
    }

    #[test]
    fn only_names_that_the_compiler_makes_may_repeat() {
        let one = |name: &str, section, is_code| Named {
            index: 0,
            name: name.to_owned(),
            is_local: None,
            place: (section, 0),
            is_code,
            old: name.to_owned(),
        };
        let mut named = [one(".LC0", 1, false), one(".LC0", 2, false), one("f.a_c", 3, true), one("f.a_c", 3, true)];
        number_again(&mut named, |_| false).unwrap();
        assert_eq!(named.map(|one| one.name), [".LC0.0", ".LC0.1", "f.a_c", "f.a_c"]);
        assert_eq!(number_again(&mut [one("f", 1, true), one("f", 2, true)], |_| false), Err("f".to_owned()));
        let numbered = "f.lto_priv.1";
        assert_eq!(number_again(&mut [one(numbered, 1, true)], |_| true), Err(numbered.to_owned()));
    }

    #[test]
    fn copies_of_one_function_are_numbered_with_their_parts() {
        let one = |name: &str, old: &str, section| Named {
            index: 0,
            name: name.to_owned(),
            is_local: None,
            place: (section, 0),
            is_code: true,
            old: old.to_owned(),
        };
        let all = [
            one("f.a_c", "f.lto_priv.0", 1),
            one("f.a_c", "f.lto_priv.1", 2),
            one("f.a_c.cold", "f.lto_priv.1.cold", 3),
            one("f.folded", "f.lto_priv.2", 4),
            one("g.a_c", "g", 5),
        ];
        let mut named = all;
        number_again(&mut named, |_| true).unwrap();
        let names = named.each_ref().map(|one| one.name.as_str());
        assert_eq!(names, ["f.a_c.folded.0", "f.a_c.folded.1", "f.a_c.folded.1.cold", "f.folded.0", "g.a_c"]);
        let mut jump = [one("f.folded", "f.lto_priv.2", 4)];
        assert_eq!(number_again(&mut jump, |_| false), Err("f.folded".to_owned()));
    }
}
