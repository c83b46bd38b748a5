//! Functions whose parameters or result changed while code or data that stays holds their address.
//!
//! A call is no such use: code that the compiler made for the new declaration, and that is the same as before, calls the
//! function as the new one wants it. An address may be given to code that knows nothing of the change.

use super::dwarf::{DebugInfoError, Die, Side};
use super::layout::Comparison;
use super::source_name;
use crate::Refusal;
use gimli::constants as dw;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex, SectionKind, SymbolKind};
use std::collections::BTreeMap;

/// Refuses each of `functions` whose parameters or result changed, if unchanged code or data has its address.
pub(super) fn compare(
    comparison: &mut Comparison<'_, '_>,
    shipped: &[u8],
    after: &[u8],
    functions: &BTreeMap<&str, &str>,
) -> Result<(), DebugInfoError> {
    let mut changed = Vec::new();
    for (function, shipped) in functions {
        let old = prototype(comparison.old, shipped)?;
        let new = prototype(comparison.new, function)?;
        if let (Some(old), Some(new)) = (old, new)
            && !comparison.same_call(old, new, function, 0)?
        {
            changed.push((*function, comparison.old.describe(Some(old))?, comparison.new.describe(Some(new))?));
        }
    }
    if changed.is_empty() {
        return Ok(());
    }
    let (old_users, new_users) = (users(shipped)?, users(after)?);
    for (function, before, now) in changed {
        let code =
            new_users.get(function).into_iter().flatten().filter(|user| !functions.contains_key(user.name.as_str()));
        let data = old_users.get(functions[function]).into_iter().flatten().filter(|user| user.is_data);
        if let Some(user) = code.chain(data).next() {
            let user = if user.is_data {
                format!("data `{}` holds its address", user.name)
            } else {
                format!("`{}`, which did not change, takes its address", user.name)
            };
            comparison.refuse(Refusal::SignatureChanged { function: function.to_owned(), before, after: now, user });
        }
    }
    Ok(())
}

/// Returns the entry with the parameters of a function: one with a body here.
fn prototype(side: &Side<'_>, function: &str) -> Result<Option<Die>, DebugInfoError> {
    let mut found = None;
    for &die in side.functions.get(function).into_iter().flatten() {
        let entry = side.entry(die)?;
        // An instance repeats the parameters of its abstract original, or omits those that are not passed.
        if !entry.has_attr(dw::DW_AT_declaration) && !entry.has_attr(dw::DW_AT_abstract_origin) {
            found = Some(die);
        }
    }
    Ok(found)
}

/// Code or data that has the address of a function.
struct User {
    name: String,
    is_data: bool,
}

/// Returns every reference from code and data of an object to a function that is no call, by the function's name.
fn users(object: &[u8]) -> Result<BTreeMap<String, Vec<User>>, DebugInfoError> {
    let file = object::File::parse(object)?;
    let mut defined = BTreeMap::new();
    for symbol in file.symbols().filter(|s| matches!(s.kind(), SymbolKind::Text | SymbolKind::Data)) {
        if let (Some(section), Ok(name)) = (symbol.section_index(), symbol.name()) {
            defined.insert((section.0, symbol.address()), (name, symbol.size()));
        }
    }
    // a symbol without a size reaches to the next one
    let covering = |section: SectionIndex, address: u64| {
        let ((_, start), (name, size)) = defined.range((section.0, 0)..=(section.0, address)).next_back()?;
        (*size == 0 || address - start < *size).then_some((*name, *start))
    };
    let mut users: BTreeMap<String, Vec<User>> = BTreeMap::new();
    for section in file.sections() {
        let is_data = match section.kind() {
            SectionKind::Text => false,
            SectionKind::Data | SectionKind::ReadOnlyData | SectionKind::ReadOnlyDataWithRel => true,
            _ => continue,
        };
        // Sections that describe code do not call it.
        let describes = [".eh_frame", ".gcc_except_table", "__patchable_function_entries"];
        if section.name().is_ok_and(|name| describes.iter().any(|prefix| name.starts_with(prefix))) {
            continue;
        }
        let data = section.data()?;
        for (offset, relocation) in section.relocations() {
            let RelocationTarget::Symbol(index) = relocation.target() else { continue };
            if !is_data && is_branch(data, offset) {
                continue;
            }
            let symbol = file.symbol_by_index(index)?;
            let user = covering(section.index(), offset).map(|(name, _)| name);
            let target = match (symbol.kind(), symbol.section_index()) {
                // a jump table, which has no name: distances to places in the function that it belongs to
                (SymbolKind::Section, _) if is_data && user.is_none() && relocation.size() == 32 => continue,
                (SymbolKind::Section, Some(target)) => {
                    // A displacement counts from the end of its four bytes.
                    let end = if is_data { 0 } else { 4 };
                    let address = u64::try_from(relocation.addend() + end).unwrap_or(0);
                    // a label inside a function is no address to call
                    covering(target, address).filter(|(_, start)| !is_data || *start == address).map(|(name, _)| name)
                }
                _ => symbol.name().ok(),
            };
            let own = user.map(source_name);
            if let Some(target) = target
                && own.is_none_or(|own| own != source_name(target))
            {
                let name = own.or(section.name().ok()).unwrap_or_default().to_owned();
                let user = User { name, is_data };
                users.entry(source_name(target).to_owned()).or_default().push(user);
            }
        }
    }
    Ok(users)
}

/// Returns true if the four bytes at an offset of code are the distance of a call or a jump: `e8`, `e9` or `0f 8x` stands before them. Every
/// other operand of that form follows a ModRM byte below `40`.
fn is_branch(code: &[u8], offset: u64) -> bool {
    let before = usize::try_from(offset).ok().and_then(|offset| code.get(..offset)).unwrap_or_default();
    matches!(before, [.., 0xe8 | 0xe9] | [.., 0x0f, 0x80..=0x8f])
}
