//! `.eh_frame` of the new code: the records of the functions that a patch contains, taken from their objects.

use crate::Refusal;
use crate::assemble::Assembly;
use crate::object_file::{Nature, Object, Reloc, Site};
use crate::unwind_records::{Record, records};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format::{Section, SectionKind};

/// Adds one `.eh_frame` section with the records of all text in the patch.
pub(crate) fn add(assembly: &mut Assembly<'_, '_>) {
    let text = assembly.added_text();
    let units: BTreeSet<usize> = text.iter().map(|((unit, _), _)| *unit).collect();
    let mut out = Section {
        name: ".eh_frame".to_owned(),
        kind: SectionKind::EhFrame,
        align: 8,
        size: 0,
        bytes: Vec::new(),
        relocations: Vec::new(),
    };
    for unit in units {
        let sections: BTreeSet<usize> = text.iter().filter(|((u, _), _)| *u == unit).map(|((_, s), _)| *s).collect();
        if let Err(refusal) = add_unit(assembly, unit, &sections, &mut out) {
            assembly.refusals.push(refusal);
        }
    }
    out.size = out.bytes.len() as u64;
    if out.size > 0 {
        assembly.sections.push(out);
    }
}

fn add_unit(
    assembly: &mut Assembly<'_, '_>,
    unit: usize,
    text: &BTreeSet<usize>,
    out: &mut Section,
) -> Result<(), Refusal> {
    let Some(after) = assembly.after(unit) else { return Ok(()) };
    let path = assembly.units[unit].path.to_owned();
    let mut covered = BTreeSet::new();
    for (index, section) in after.sections.iter().enumerate().filter(|(_, s)| s.nature == Nature::Unwind) {
        let damaged =
            || Refusal::UnwindData { unit: path.clone(), function: section.name.to_owned(), why: "damaged".to_owned() };
        let records = records(section.bytes).ok_or_else(damaged)?;
        let mut cies: BTreeMap<usize, usize> = BTreeMap::new();
        for record in &records {
            let Some(cie) = record.cie else { continue };
            let Some(code) = described(after, index, record).filter(|code| text.contains(code)) else { continue };
            covered.insert(code);
            let cie_at = match cies.get(&cie) {
                Some(at) => *at,
                None => {
                    let parent = records.iter().find(|r| r.start == cie && r.cie.is_none()).ok_or_else(damaged)?;
                    let at = copy(assembly, unit, index, parent, out);
                    cies.insert(cie, at);
                    at
                }
            };
            let at = copy(assembly, unit, index, record, out);
            let distance = u32::try_from(at + 4 - cie_at).map_err(|_| damaged())?;
            out.bytes[at + 4..at + 8].copy_from_slice(&distance.to_le_bytes());
        }
    }
    for section in text.difference(&covered) {
        let name =
            after.sections[*section].symbols.first().map_or(after.sections[*section].name, |s| after.symbols[*s].name);
        assembly.warnings.push(format!("`{name}` of {path} has no unwind data: debuggers cannot unwind through it"));
    }
    Ok(())
}

/// Returns the text section that an FDE describes.
fn described(object: &Object<'_>, index: usize, record: &Record) -> Option<usize> {
    let place = record.start as u64 + 8;
    let reloc = object.sections[index].relocations.iter().find(|r| r.offset == place)?;
    match object.site(reloc) {
        Site::Inside { section, .. } => Some(section),
        _ => None,
    }
}

/// Copies a record and its relocations; returns its new place.
fn copy(assembly: &mut Assembly<'_, '_>, unit: usize, index: usize, record: &Record, out: &mut Section) -> usize {
    let at = out.bytes.len();
    let Some(after) = assembly.after(unit) else { return at };
    let section = &after.sections[index];
    out.bytes.extend_from_slice(&section.bytes[record.start..record.end]);
    let inside = |r: &&Reloc| (record.start as u64..record.end as u64).contains(&r.offset);
    for reloc in section.relocations.iter().filter(inside) {
        let moved = (reloc.offset - record.start as u64) + at as u64;
        let found = if reloc.offset == record.start as u64 + 8 && record.cie.is_some() {
            code_start(assembly, unit, reloc)
        } else {
            assembly.relocation(unit, index, reloc)
        };
        if let (Some(found), Ok(offset)) = (found, u32::try_from(moved)) {
            out.relocations.push(stillpoint_patch_format::Relocation { offset, ..found });
        }
    }
    at
}

/// Returns the relocation to the code that an FDE describes: always the new code, never the entry in the target.
fn code_start(
    assembly: &mut Assembly<'_, '_>,
    unit: usize,
    reloc: &Reloc,
) -> Option<stillpoint_patch_format::Relocation> {
    let after = assembly.after(unit)?;
    let Site::Inside { section, .. } = after.site(reloc) else { return None };
    let index = assembly.add_section(unit, section);
    let name = after.sections[section].symbols.first().map_or(after.sections[section].name, |s| after.symbols[*s].name);
    let symbol = assembly.patch_symbol(name, index, 0);
    let kind = match reloc.width() {
        8 => stillpoint_patch_format::RelocationKind::Pc64,
        _ => stillpoint_patch_format::RelocationKind::Pc32,
    };
    let addend = (after.symbols[reloc.symbol].value as i64).wrapping_add(reloc.addend);
    Some(stillpoint_patch_format::Relocation { offset: 0, kind, symbol, addend })
}
