//! Functions that the compiler found to be the same, in a program that was optimised when it was linked.
//!
//! Statics of one name and one code in several source files become one function. Where their addresses matter, each has a
//! copy, or a jump to the one that stays; the debug information of such a copy is that of the one, or missing. Copies with the
//! same code are interchangeable. They are numbered by their places, and a change must not tell some of them from others.

use crate::object_file::{Home, Object, Site};
use crate::symbol_names;
use iced_x86::{Decoder, DecoderOptions};
use std::collections::BTreeSet;

/// Part of the name of such a copy.
pub(crate) const MARK: &str = ".folded";

/// Place of a function: section and offset.
pub(crate) type Place = (usize, u64);

/// Returns true if the functions at all places have the same code: the same instructions, with the same destinations.
pub(crate) fn are_same(object: &Object<'_>, places: &BTreeSet<Place>) -> bool {
    let mut all = places.iter().map(|place| code(object, *place));
    let Some(first) = all.next().flatten() else { return false };
    all.all(|other| other.as_ref() == Some(&first))
}

/// One instruction: its bytes without what depends on the place, and its destination.
#[derive(Debug, PartialEq)]
struct Normal<'a> {
    bytes: Vec<u8>,
    destination: Destination<'a>,
}

#[derive(Debug, PartialEq)]
enum Destination<'a> {
    None,
    /// A byte of the function itself.
    Own(u64),
    /// A byte of another function of the section.
    Other(usize, u64),
    /// A byte of a literal.
    Literal(&'a [u8], i64),
    Site(Site<'a>),
}

/// Returns the code of a function without what depends on its place.
fn code<'a>(object: &Object<'a>, (section, start): Place) -> Option<Vec<Normal<'a>>> {
    let at = |s: &&crate::object_file::Symbol<'_>| s.home == Home::Section(section) && s.value == start;
    let size = object.functions().map(|(_, s)| s).filter(at).map(|s| s.size).max().filter(|size| *size > 0)?;
    let entry = &object.sections[section];
    let bytes = entry.bytes.get(usize::try_from(start).ok()?..usize::try_from(start.checked_add(size)?).ok()?)?;
    let own = start..start + size;
    let mut out = Vec::new();
    let mut decoder = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE);
    while decoder.can_decode() {
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return None;
        }
        let (from, end) = (instruction.ip(), instruction.next_ip());
        let mut text = bytes[(from - start) as usize..(end - start) as usize].to_vec();
        let mut hide = |at: u64, width: u64| {
            let first = (at - from) as usize;
            if let Some(field) = text.get_mut(first..first + width as usize) {
                field.fill(0);
            }
        };
        let mut destination = Destination::None;
        let relocations = entry.relocations.iter().filter(|r| (from..end).contains(&r.offset));
        for reloc in relocations {
            hide(reloc.offset, reloc.width());
            destination = match object.site(reloc) {
                Site::Inside { section: to, offset, .. } if to == section && own.contains(&(offset as u64)) => {
                    Destination::Own(offset as u64 - start)
                }
                Site::Inside { section: to, offset, anchor } if object.literal(to, anchor).is_some() => {
                    Destination::Literal(object.literal(to, anchor).unwrap_or_default(), offset.wrapping_sub(anchor))
                }
                site => Destination::Site(site),
            };
        }
        let is_direct =
            instruction.is_jcc_short_or_near() || instruction.is_jmp_short_or_near() || instruction.is_call_near();
        if is_direct && destination == Destination::None {
            let to = instruction.near_branch_target();
            destination =
                if own.contains(&to) { Destination::Own(to - start) } else { Destination::Other(section, to) };
            // an own jump has the same distance in each copy
            if let (Destination::Other(..), Some(from_end)) = (&destination, text.len().checked_sub(4)) {
                text[from_end..].fill(0);
            }
        }
        out.push(Normal { bytes: text, destination });
    }
    Some(out)
}

/// Returns the name of functions that are folded in another way in one of two objects, and one that only one of them has.
pub(crate) fn difference(one: &Object<'_>, other: &Object<'_>) -> Option<(String, String)> {
    let names = |object: &Object<'_>, base: Option<&str>| -> BTreeSet<String> {
        let hot = object.functions().map(|(_, s)| s.name).filter(|name| !symbol_names::is_cold(name));
        let wanted = |name: &&str| base.map_or(name.contains(MARK), |base| base_name(name) == base);
        hot.filter(wanted).map(str::to_owned).collect()
    };
    let marked: BTreeSet<String> = names(one, None).union(&names(other, None)).cloned().collect();
    let bases: BTreeSet<&str> = marked.iter().map(|name| base_name(name)).collect();
    bases.into_iter().find_map(|base| {
        let (a, b) = (names(one, Some(base)), names(other, Some(base)));
        let only = a.symmetric_difference(&b).next().cloned();
        only.map(|only| (base.to_owned(), only))
    })
}

/// Returns the name of the source.
fn base_name(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}
