//! Checks of every rule of a [`Patch`], so that no later step has to check again.

use crate::{DATA_MAX, Error, Patch, Range, Relocation, RelocationKind, Scope, Section, SectionKind, SymbolValue};

const NAME_MAX: usize = 128;
const TEXT_MAX: usize = 64 << 10;
const SECTION_SIZE_MAX: u64 = 64 << 20;

fn refuse<T>(why: impl Into<String>) -> Result<T, Error> {
    Err(Error::Inconsistent(why.into()))
}

/// Checks all of `patch`; the error names the first broken rule and the item that breaks it.
pub(crate) fn validate(patch: &Patch) -> Result<(), Error> {
    name(&patch.name)?;
    patch.replaces.iter().try_for_each(|n| name(n))?;
    let texts = patch.warnings.iter().chain(&patch.escaping).chain(&patch.cves).chain([&patch.description]);
    for text in texts {
        if text.len() > TEXT_MAX {
            return refuse(format!("a text of {} bytes exceeds {TEXT_MAX}", text.len()));
        }
    }
    if patch.functions.is_empty() && patch.constants.is_empty() && patch.data.is_empty() {
        return refuse("neither a function nor a constant is patched");
    }
    if patch.target.build_id.0.len() > 64 {
        return refuse("build-id longer than 64 bytes");
    }
    patch.sections.iter().try_for_each(|s| section(patch, s))?;
    symbols(patch)?;
    for &export in &patch.exports {
        if !matches!(patch.symbols.get(export as usize).map(|s| &s.value), Some(SymbolValue::Patch { .. })) {
            return refuse(format!("export {export} is not a symbol of this patch"));
        }
    }
    functions(patch)?;
    constants(patch)?;
    data(patch)?;
    let hooks = &patch.hooks;
    for &hook in hooks.pre_apply.iter().chain(&hooks.post_apply).chain(&hooks.pre_revert).chain(&hooks.post_revert) {
        text_symbol(patch, hook, "hook")?;
    }
    patch.off_stack.iter().try_for_each(|o| range(&o.name, o.range))?;
    let known = |n: &String| {
        patch.functions.iter().map(|f| &f.name).chain(patch.off_stack.iter().map(|o| &o.name)).any(|k| k == n)
    };
    match patch.staying.iter().find(|n| !known(n)) {
        Some(name) => refuse(format!("a thread may stay in {name}, which does not change")),
        None => Ok(()),
    }
}

/// Returns true if a patch may have this name: it cannot be a path, a line of a script or an escape sequence.
pub fn is_patch_name(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"._+:~-".contains(&b);
    !name.is_empty() && name.len() <= NAME_MAX && name.bytes().all(fits)
}

fn name(name: &str) -> Result<(), Error> {
    if !is_patch_name(name) {
        return refuse(format!("patch name {name:?} is not 1 to {NAME_MAX} characters of A-Z a-z 0-9 . _ + : ~ -"));
    }
    Ok(())
}

fn section(patch: &Patch, s: &Section) -> Result<(), Error> {
    if !s.align.is_power_of_two() || s.align > 4096 {
        return refuse(format!("section {}: alignment {}", s.name, s.align));
    }
    if s.size > SECTION_SIZE_MAX {
        return refuse(format!("section {}: size {} exceeds {SECTION_SIZE_MAX}", s.name, s.size));
    }
    let stored = if s.kind == SectionKind::Bss { 0 } else { s.size };
    if s.bytes.len() as u64 != stored {
        return refuse(format!("section {}: {} bytes stored, {stored} stated", s.name, s.bytes.len()));
    }
    s.relocations.iter().try_for_each(|r| relocation(patch, s, r))
}

fn relocation(patch: &Patch, s: &Section, r: &Relocation) -> Result<(), Error> {
    let width = match r.kind {
        RelocationKind::Abs64 | RelocationKind::Pc64 => 8,
        _ => 4,
    };
    if u64::from(r.offset) + width > s.bytes.len() as u64 {
        return refuse(format!("section {}: relocation at {:#x} reaches past its end", s.name, r.offset));
    }
    let Some(symbol) = patch.symbols.get(r.symbol as usize) else {
        return refuse(format!("section {}: relocation names symbol {} of {}", s.name, r.symbol, patch.symbols.len()));
    };
    let tls_kind = matches!(r.kind, RelocationKind::TpOff32 | RelocationKind::GotTpOff32);
    let tls_symbol = matches!(symbol.value, SymbolValue::TargetTls(_) | SymbolValue::TargetTlsSlot(_));
    // only the library that defines an import knows if it is a thread-local
    let import = r.kind == RelocationKind::GotTpOff32 && matches!(symbol.value, SymbolValue::Import { .. });
    if tls_kind != tls_symbol && !import {
        return refuse(format!("section {}: {:?} against {}", s.name, r.kind, symbol.name));
    }
    Ok(())
}

fn symbols(patch: &Patch) -> Result<(), Error> {
    for symbol in &patch.symbols {
        if symbol.name.len() > TEXT_MAX {
            return refuse(format!("a symbol name of {} bytes exceeds {TEXT_MAX}", symbol.name.len()));
        }
        if let SymbolValue::Patch { section, offset } = symbol.value {
            match patch.sections.get(section as usize) {
                Some(s) if offset <= s.size => {}
                _ => {
                    return refuse(format!(
                        "symbol {}: section {section} offset {offset:#x} does not exist",
                        symbol.name
                    ));
                }
            }
        }
    }
    Ok(())
}

fn text_symbol(patch: &Patch, index: u32, what: &str) -> Result<(), Error> {
    let section = match patch.symbols.get(index as usize).map(|s| &s.value) {
        Some(SymbolValue::Patch { section, offset: _ }) => patch.sections.get(*section as usize),
        _ => None,
    };
    match section {
        Some(s) if s.kind == SectionKind::Text => Ok(()),
        _ => refuse(format!("{what}: symbol {index} is not code of this patch")),
    }
}

fn range(name: &str, r: Range) -> Result<(), Error> {
    if r.len == 0 || r.start.0.checked_add(r.len).is_none() {
        return refuse(format!("{name}: range of {} bytes at {}", r.len, r.start));
    }
    Ok(())
}

fn constants(patch: &Patch) -> Result<(), Error> {
    let mut all: Vec<(Range, &str)> = Vec::new();
    for c in &patch.constants {
        range(&c.name, c.old)?;
        let fits = match patch.symbols.get(c.new as usize).map(|s| &s.value) {
            Some(SymbolValue::Patch { section, offset }) => patch.sections.get(*section as usize).is_some_and(|s| {
                let code = s.kind == SectionKind::Text && s.relocations.is_empty();
                (s.kind == SectionKind::RoData || code)
                    && offset.checked_add(c.old.len).is_some_and(|end| end <= s.size)
            }),
            _ => false,
        };
        if !fits {
            return refuse(format!(
                "{}: symbol {} is not {} bytes of constants of this patch",
                c.name, c.new, c.old.len
            ));
        }
        all.push((c.old, &c.name));
    }
    apart(all)
}

fn data(patch: &Patch) -> Result<(), Error> {
    let mut all: Vec<(Range, &str)> = patch.constants.iter().map(|c| (c.old, c.name.as_str())).collect();
    for change in &patch.data {
        range(&change.name, change.old)?;
        for (index, what) in [(change.shipped, "shipped"), (change.new, "new")] {
            let fits = match patch.symbols.get(index as usize).map(|s| &s.value) {
                Some(SymbolValue::Patch { section, offset }) => {
                    patch.sections.get(*section as usize).is_some_and(|s| {
                        let end = offset.checked_add(change.old.len).filter(|end| *end <= s.size);
                        // the bytes are copied to another place
                        let within =
                            |r: &&Relocation| end.is_some_and(|end| (*offset..end).contains(&u64::from(r.offset)));
                        let mut relocations = s.relocations.iter().filter(within);
                        let absolute = [RelocationKind::Abs64, RelocationKind::Abs32, RelocationKind::Abs32Signed];
                        s.kind == SectionKind::RoData
                            && end.is_some()
                            && relocations.all(|r| absolute.contains(&r.kind))
                    })
                }
                _ => false,
            };
            if !fits {
                return refuse(format!(
                    "{}: symbol {index} is not {} bytes of {what} contents",
                    change.name, change.old.len
                ));
            }
        }
        all.push((change.old, &change.name));
    }
    let len = patch.data.iter().fold(0, |sum: u64, change| sum.saturating_add(change.old.len));
    if len > DATA_MAX {
        return refuse(format!("{len} bytes of data change, more than {DATA_MAX}"));
    }
    if !patch.data.is_empty() && patch.scope != Scope::Process {
        return refuse("data changes, and the scope is not the process");
    }
    apart(all)
}

/// Returns an error if two ranges overlap.
fn apart(mut ranges: Vec<(Range, &str)>) -> Result<(), Error> {
    ranges.sort_by_key(|(r, _)| r.start);
    for pair in ranges.windows(2) {
        let ((a, a_name), (b, b_name)) = (pair[0], pair[1]);
        if a.start.0 + a.len > b.start.0 {
            return refuse(format!("{a_name} and {b_name} overlap"));
        }
    }
    Ok(())
}

fn functions(patch: &Patch) -> Result<(), Error> {
    let mut hot: Vec<(Range, &str)> = Vec::new();
    for f in &patch.functions {
        range(&f.name, f.old)?;
        f.old_parts.iter().try_for_each(|part| range(&f.name, *part))?;
        if f.old_bytes.len() as u64 != f.old.len {
            return refuse(format!("{}: {} old bytes stored, {} stated", f.name, f.old_bytes.len(), f.old.len));
        }
        text_symbol(patch, f.new, &f.name)?;
        hot.push((f.old, &f.name));
    }
    apart(hot)
}
