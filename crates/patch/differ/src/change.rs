//! Changes in one unit: functions to patch, and data that must be unchanged.

use crate::compare::Pair;
use crate::object_file::{Home, Nature, Object, Reloc, Section, Site, SymbolType};
use crate::unit::{Ancestor, Unit};
use crate::{Options, Refusal, clobbers, symbol_names, unnamed_types};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format::readable;

/// Functions of the after side that differ, each with its reasons.
pub(crate) type ChangedFunctions = BTreeMap<usize, Vec<String>>;

/// Data with different contents in one unit, as far as it may change.
#[derive(Debug, Default)]
pub(crate) struct ChangedData {
    /// Constants that change in place.
    pub(crate) constants: Vec<usize>,
    /// Variables and constants that are written while all threads are stopped.
    pub(crate) data: Vec<usize>,
}

/// Compares one unit's two sides. Collects refusals in `refusals`, and in `data` the changed data that `options` permit.
pub(crate) fn find(
    unit: &Unit<'_>,
    options: &Options,
    refusals: &mut Vec<Refusal>,
    data: &mut ChangedData,
) -> ChangedFunctions {
    let mut changed = ChangedFunctions::new();
    let Some(after) = &unit.after else { return changed };
    start_up(unit, after, refusals);
    let Some(pair) = unit.pair() else { return changed };
    for function in unit.functions() {
        let Some(old) = unit.older(function) else { continue };
        let Err(why) = pair.functions(old, function) else { continue };
        if after.symbols[function].kind == SymbolType::Indirect {
            let function = after.symbols[function].name.to_owned();
            refusals.push(Refusal::IndirectFunction { unit: unit.path.to_owned(), function });
        } else if symbol_names::is_static_initialiser(after.symbols[function].name) {
            let function = after.symbols[function].name.to_owned();
            refusals.push(Refusal::StaticInitialiser { unit: unit.path.to_owned(), function, why });
        } else {
            changed.insert(function, vec![why]);
        }
    }
    name_register_users(&pair, unit, &mut changed);
    // those that still have a pair are refused already
    let resized: BTreeSet<usize> = unit.resized().into_iter().map(|(new, _)| new).collect();
    for variable in unit.variables().filter(|variable| !resized.contains(variable)) {
        match self_contained(unit, &pair, variable, changed.is_empty()) {
            Some(Refusal::DataChanged { .. }) if options.in_place && kind_of(pair.new, variable) == "constant" => {
                data.constants.push(variable);
            }
            Some(Refusal::DataChanged { writable: true, .. }) if options.write_data => data.data.push(variable),
            Some(refusal) => refusals.push(refusal),
            None => {}
        }
    }
    custom_sections(unit, &pair, refusals);
    changed
}

/// Adds a reason to changed callers: a static callee now clobbers registers in which they could keep values before.
fn name_register_users(pair: &Pair<'_, '_>, unit: &Unit<'_>, changed: &mut ChangedFunctions) {
    let mut grown: BTreeMap<usize, String> = BTreeMap::new();
    for &function in changed.keys().filter(|f| pair.new.symbols[**f].local) {
        let Some(old) = unit.older(function) else { continue };
        let before = clobbers::of(pair.old, old);
        let more: Vec<String> = clobbers::of(pair.new, function).difference(&before).cloned().collect();
        if !more.is_empty() {
            grown.insert(function, more.join(", "));
        }
    }
    for (&caller, reasons) in changed.iter_mut() {
        for section in pair.new.parts(caller).unwrap_or_default() {
            for reloc in pair.new.sections[section].relocations.iter().filter(|r| r.is_branch()) {
                let Site::Inside { section: to, offset, .. } = pair.new.site(reloc) else { continue };
                let callee = pair.new.owner(to, offset).filter(|callee| *callee != caller);
                let Some((callee, more)) = callee.and_then(|c| Some((c, grown.get(&c)?))) else { continue };
                let name = readable(pair.new.symbols[callee].name);
                let reason = format!("it calls `{name}`, which now also clobbers {more} (-fipa-ra)");
                if !reasons.contains(&reason) {
                    reasons.push(reason);
                }
            }
        }
    }
}

/// Refuses changes of code that runs at start-up: in the running process it has run already.
fn start_up(unit: &Unit<'_>, after: &Object<'_>, refusals: &mut Vec<Refusal>) {
    let describe = |object: &Object<'_>, section: &Section<'_>| -> Vec<(u64, u64, String)> {
        let target = |r: &Reloc| match object.site(r) {
            Site::Extern(name, _) => name.to_owned(),
            Site::Inside { section, offset, .. } => {
                let name =
                    |s: usize| symbol_names::initialiser_kind(symbol_names::stem(object.symbols[s].name)).to_owned();
                object.owner(section, offset).map_or(String::new(), name)
            }
            Site::Value(_) => String::new(),
        };
        section.relocations.iter().map(|r| (r.offset, r.width(), target(r))).collect()
    };
    for section in after.sections.iter().filter(|s| s.nature == Nature::StartUp && s.size > 0) {
        let same = |old: &Object<'_>| {
            let twins = old.sections.iter().filter(|s| s.name == section.name && s.nature == Nature::StartUp);
            let mut twins = twins.filter(|s| s.size == section.size);
            twins.any(|twin| describe(old, twin) == describe(after, section))
        };
        if !unit.before.as_ref().is_some_and(same) {
            refusals.push(Refusal::InitArray { unit: unit.path.to_owned(), section: section.name.to_owned() });
        }
    }
}

/// Checks that a variable of the running program is unchanged. `is_code_same` if no function of the unit changed.
fn self_contained(unit: &Unit<'_>, pair: &Pair<'_, '_>, variable: usize, is_code_same: bool) -> Option<Refusal> {
    let old = unit.older(variable)?;
    let (one, other) = (&pair.old.symbols[old], &pair.new.symbols[variable]);
    if other.name.starts_with("DW.ref.") {
        return None;
    }
    if symbol_names::is_class_data(other.name) {
        if other.name.starts_with("_ZTS") && unnamed_types::Name::parse(other.name).is_some() {
            return None;
        }
        return class_data(unit, pair, old, variable);
    }
    let kinds = (kind_of(pair.old, old), kind_of(pair.new, variable));
    let private = pair.is_private_constant(variable);
    if private && kinds.0 == kinds.1 {
        // Functions that use it count as changed and add the new one to the patch; data that points to it is compared.
        return None;
    }
    let changed = |before: String, after: String| {
        Some(Refusal::VariableChanged {
            unit: unit.path.to_owned(),
            object: symbol_names::stem(other.name).to_owned(),
            before,
            after,
            copyable: false,
        })
    };
    if one.size != other.size {
        return changed(format!("{} bytes", one.size), format!("{} bytes", other.size));
    }
    let loose = |kind: &str| kind == "zero" || kind == "initialised";
    // New code only reads what became constant. What is constant in the program can get no writer where no code changed.
    let is_only_qualified =
        loose(kinds.0) && kinds.1 == "constant" || kinds.0 == "constant" && loose(kinds.1) && is_code_same;
    if is_only_qualified && pair.constant_equal(old, variable) {
        return None;
    }
    if kinds.0 != kinds.1 && !(loose(kinds.0) && loose(kinds.1)) {
        return changed(kinds.0.to_owned(), kinds.1.to_owned());
    }
    if pair.constant_equal(old, variable) {
        return None;
    }
    Some(Refusal::DataChanged {
        unit: unit.path.to_owned(),
        object: symbol_names::stem(other.name).to_owned(),
        why: format!("its initial value differs; {}", used_by(pair.new, variable)),
        writable: kinds.1 == "constant" || loose(kinds.1),
    })
}

/// Refuses changes of class data: live objects point to their class's table of virtual functions, and unwinding uses
/// its type.
fn class_data(unit: &Unit<'_>, pair: &Pair<'_, '_>, old: usize, new: usize) -> Option<Refusal> {
    let (one, other) = (&pair.old.symbols[old], &pair.new.symbols[new]);
    let entries = |symbol: &crate::object_file::Symbol<'_>| symbol.size / 8;
    let what = if other.name.starts_with("_ZTI") || other.name.starts_with("_ZTS") {
        "its bases or its name"
    } else {
        "its table of virtual functions"
    };
    let what = if one.size != other.size {
        format!("{what} (from {} to {} entries)", entries(one), entries(other))
    } else if pair.constant_equal(old, new) {
        return None;
    } else {
        pair.first_difference(old, new).map_or_else(|| what.to_owned(), |difference| format!("{what} ({difference})"))
    };
    Some(Refusal::ClassChanged { unit: unit.path.to_owned(), class: symbol_names::class_of(other.name), what })
}

fn kind_of(object: &Object<'_>, symbol: usize) -> &'static str {
    let Home::Section(section) = object.symbols[symbol].home else { return "zero" };
    match object.sections[section].nature {
        Nature::Constant | Nature::Merged { .. } => "constant",
        Nature::Data => "initialised",
        Nature::Zero => "zero",
        Nature::Tls => "thread-local",
        Nature::Custom { write: true } => "in a section of its own",
        Nature::Custom { write: false } => "constant in a section of its own",
        Nature::Text | Nature::StartUp | Nature::Unwind | Nature::Exceptions | Nature::Aside => "of another kind",
    }
}

/// Makes the text "used by `a`, `b` and 3 more".
fn used_by(object: &Object<'_>, variable: usize) -> String {
    let mut users = BTreeSet::new();
    for (index, section) in object.sections.iter().enumerate() {
        for reloc in &section.relocations {
            let found = match object.site(reloc) {
                Site::Inside { section, offset, .. } => object.owner(section, offset),
                _ => None,
            };
            if found == Some(variable)
                && let Some(user) = object.owner(index, reloc.offset as i64)
            {
                users.insert(symbol_names::stem(object.symbols[user].name));
            }
        }
    }
    let named: Vec<String> = users.iter().take(3).map(|u| format!("`{}`", readable(u))).collect();
    match users.len() {
        0 => "no code of the unit uses it".to_owned(),
        n if n > 3 => format!("used by {} and {} more", named.join(", "), n - 3),
        _ => format!("used by {}", named.join(", ")),
    }
}

/// Checks sections that the source names: their variables are compared one by one elsewhere, bytes without a name here.
fn custom_sections(unit: &Unit<'_>, pair: &Pair<'_, '_>, refusals: &mut Vec<Refusal>) {
    for section in pair.new.sections.iter().filter(|s| matches!(s.nature, Nature::Custom { .. }) && s.size > 0) {
        let known = section.symbols.iter().all(|s| unit.ancestor(*s) != Ancestor::None);
        let twin = pair.old.sections.iter().any(|old| {
            old.name == section.name && old.size == section.size && old.relocations.len() == section.relocations.len()
        });
        if !twin || !known {
            let (unit, section) = (unit.path.to_owned(), section.name.to_owned());
            refusals.push(Refusal::UnknownSection { unit, section });
        }
    }
}
