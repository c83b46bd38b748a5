//! Comparison of the differ's result for a program with the program's directives.

use crate::differ::driver::{self, Built, Case, Expect, Server};
use object::{Object, ObjectSection, ObjectSymbol};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_differ::{Outcome, Refusal};
use stillpoint_patch_format::{Patch, SymbolValue, readable_short};

/// Number of variants of a case, unless all are requested.
const VARIANTS: usize = 2;

/// Runs one program in its variants; panics with every failure and the command that repeats it.
pub(crate) fn check(name: &str) {
    let case = driver::read(name);
    if let Some(flag) = driver::lacking(&case) {
        stillpoint_testing::skip!("{name}: this processor has no {flag}");
    }
    let mut failures = Vec::new();
    let mut missing: BTreeSet<String> = case.has.iter().cloned().collect();
    missing.extend((!case.folded.is_empty()).then(|| format!("common address of {:?}", case.folded)));
    let variants = driver::variants(&case, VARIANTS);
    println!("COUNT ways to compile {}", variants.len());
    for variant in variants {
        let built = Built::new(&case, &variant);
        missing = lacking(&case, &built, missing);
        if let Err(why) = check_built(&case, &built) {
            failures.push(format!("{variant}: {why}"));
        }
    }
    if !missing.is_empty() {
        failures.push(format!("no object of any variant has {missing:?}, so that the case shows nothing"));
    }
    assert!(
        failures.is_empty(),
        "{name} ({})\n{}\nrerun: PROGRAMS_ALL=1 cargo test -p stillpoint-patch-tests --test it -- --exact differ::{}::{name}",
        case.rule,
        failures.join("\n"),
        if case.is_cxx() { "programs_cxx" } else { "programs" },
    );
}

/// Returns the names of `missing` that the objects of `built` still lack.
fn lacking(case: &Case, built: &Built, mut missing: BTreeSet<String>) -> BTreeSet<String> {
    for unit in &built.units {
        for bytes in [&unit.shipped, &unit.after] {
            let file = object::File::parse(&**bytes).expect("an object");
            let symbols = file.symbols().filter_map(|s| s.name().ok());
            let names: Vec<&str> = symbols.chain(file.sections().filter_map(|s| s.name().ok())).collect();
            missing.retain(|wanted| !names.iter().any(|name| name.starts_with(wanted.as_str())));
        }
        let file = object::File::parse(&*unit.shipped).expect("an object");
        let place = |name: &String| file.symbol_by_name(name).map(|s| (s.section_index(), s.address()));
        let places: BTreeSet<_> = case.folded.iter().filter_map(place).map(|p| format!("{p:?}")).collect();
        if places.len() == 1 {
            missing.retain(|wanted| !wanted.starts_with("common address"));
        }
    }
    missing
}

fn check_built(case: &Case, built: &Built) -> Result<(), String> {
    let asked = Server::start(&built.program).ask_all(&case.before);
    expect_eq("the program as shipped answers", &asked, &case.before)?;
    if case.expect == Expect::Accept && case.is_stateless() && case.hooks.is_empty() {
        let asked = Server::start(&built.after_program).ask_all(&case.after);
        expect_eq("the after side, built as a whole, answers", &asked, &case.after)?;
    }
    let outcome = driver::diff(case, built);
    match (&case.expect, outcome) {
        (Expect::Accept, Ok(Outcome::Patch(patch))) => accepted(case, built, &patch),
        (Expect::Nothing, Ok(Outcome::NothingToPatch)) => Ok(()),
        (Expect::Refuse(code), Err(refusals)) => refused(case, code, &refusals),
        (expected, Ok(Outcome::NothingToPatch)) => Err(format!("nothing to patch, expected {expected:?}")),
        (expected, Ok(Outcome::Patch(patch))) => Err(format!("a patch of {:?}, expected {expected:?}", names(&patch))),
        (expected, Err(refusals)) => Err(format!("refused, expected {expected:?}: {}", texts(&refusals).join("; "))),
    }
}

fn expect_eq(what: &str, found: &[String], expected: &[String]) -> Result<(), String> {
    (found == expected).then_some(()).ok_or_else(|| format!("{what} {found:?}, expected {expected:?}"))
}

fn texts(refusals: &[Refusal]) -> Vec<String> {
    refusals.iter().map(|r| format!("{}: {r}", r.code())).collect()
}

fn refused(case: &Case, code: &str, refusals: &[Refusal]) -> Result<(), String> {
    let all = texts(refusals);
    if !refusals.iter().any(|r| r.code() == code) {
        return Err(format!("no {code} among: {}", all.join("; ")));
    }
    match case.refusals.iter().find(|fragment| !all.iter().any(|text| text.contains(*fragment))) {
        Some(fragment) => Err(format!("no refusal says {fragment:?}: {}", all.join("; "))),
        None => Ok(()),
    }
}

fn names(patch: &Patch) -> Vec<&str> {
    patch.functions.iter().map(|f| f.name.as_str()).collect()
}

/// Returns the plain name: a clone's is that of its function; a C++ name has no parameters or spaces, and its mangled
/// form counts too.
fn plain(name: &str) -> String {
    let name = name.split_once('.').map_or(name, |(plain, _)| plain);
    readable_short(name).replace(' ', "")
}

/// Returns true if a name, or one with the prefix before its `*`, is among those redirected.
fn is_among(name: &str, redirected: &BTreeSet<String>) -> bool {
    match name.strip_suffix('*') {
        Some(start) => redirected.iter().any(|name| name.starts_with(start)),
        None => redirected.contains(name),
    }
}

fn accepted(case: &Case, built: &Built, patch: &Patch) -> Result<(), String> {
    let redirected: BTreeSet<String> = patch.functions.iter().map(|f| plain(&f.name)).collect();
    if let Some(name) = case.changed.iter().find(|name| !is_among(name, &redirected)) {
        return Err(format!("{name} is not redirected, only {redirected:?}"));
    }
    if let Some(name) = case.unchanged.iter().find(|name| is_among(name, &redirected)) {
        return Err(format!(
            "{name} is redirected: {:?}",
            patch.functions.iter().map(|f| (&f.name, &f.reasons)).collect::<Vec<_>>()
        ));
    }
    if let Some(text) = case.warnings.iter().find(|text| !patch.warnings.iter().any(|w| w.contains(*text))) {
        return Err(format!("no warning says {text:?}: {:?}", patch.warnings));
    }
    let in_place: Vec<&str> = patch.constants.iter().map(|c| c.name.as_str()).collect();
    if in_place != case.in_place {
        return Err(format!("{in_place:?} change where they lie, expected {:?}", case.in_place));
    }
    let data: BTreeSet<&str> = patch.data.iter().map(|c| c.name.as_str()).collect();
    if data != case.data.iter().map(String::as_str).collect() {
        return Err(format!("{data:?} are written, expected {:?}", case.data));
    }
    if patch.staying != case.staying {
        return Err(format!("threads may stay in {:?}, expected {:?}", patch.staying, case.staying));
    }
    if let Some(f) = patch.functions.iter().find(|f| f.reasons.is_empty()) {
        return Err(format!("{} is redirected without a reason", f.name));
    }
    let bytes = stillpoint_patch_format::encode(patch).map_err(|e| format!("the patch does not encode: {e}"))?;
    let decoded = stillpoint_patch_format::decode(&bytes).map_err(|e| format!("the patch does not decode: {e}"))?;
    if decoded.patch != *patch {
        return Err("the patch decodes to another one".to_owned());
    }
    addresses(built, patch)
}

/// Compares addresses with the linker's own symbol table, which the differ of a stripped target never read.
fn addresses(built: &Built, patch: &Patch) -> Result<(), String> {
    let bytes = std::fs::read(&built.full).map_err(|e| e.to_string())?;
    let file = object::File::parse(&*bytes).map_err(|e| e.to_string())?;
    let mut known: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    let mut tls: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for symbol in file.symbols().filter(|s| !s.is_undefined()) {
        let name = symbol.name().unwrap_or_default();
        let map = if symbol.kind() == object::SymbolKind::Tls { &mut tls } else { &mut known };
        map.entry(name.to_owned()).or_default().insert(symbol.address());
        map.entry(plain(name)).or_default().insert(symbol.address());
    }
    let functions = patch.functions.iter().map(|f| (&f.name, f.old.start));
    let constants = patch.constants.iter().map(|c| (&c.name, c.old.start));
    for (name, at) in functions.chain(constants).chain(patch.data.iter().map(|c| (&c.name, c.old.start))) {
        let all = known.get(name).ok_or_else(|| format!("the target has no {name}"))?;
        if !all.contains(&at.0) {
            return Err(format!("{name} is said to be at {at}, and is at {all:x?}"));
        }
    }
    let stubs: Vec<_> = file.sections().filter(|s| s.name().is_ok_and(|name| name.starts_with(".plt"))).collect();
    let is_stub = |at: u64| stubs.iter().any(|s| (s.address()..s.address() + s.size()).contains(&at));
    for symbol in &patch.symbols {
        let (all, at) = match symbol.value {
            SymbolValue::Target(at) => (known.get(&symbol.name), at.0),
            SymbolValue::TargetTls(at) => (tls.get(&symbol.name), at),
            _ => continue,
        };
        if let Some(all) = all
            && !all.contains(&at)
            && !is_stub(at)
        {
            return Err(format!("{} is said to be at {at:#x}, and is at {all:x?}", symbol.name));
        }
    }
    Ok(())
}
