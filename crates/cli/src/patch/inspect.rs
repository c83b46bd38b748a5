//! `stillpoint patch inspect`: shows the contents of a patch file, with the reasons for them.

use super::processes::unusable_file;
use crate::output::{Failure, Output};
use anyhow::Context;
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;
use stillpoint_patch_catalog::PatchFile;
use stillpoint_patch_format::{
    DataChange, DiffFact, Patch, ResolvedBy, Scope, SectionKind, Signed, Symbol, SymbolValue, TargetKind, decode,
    readable,
};

/// Arguments of `stillpoint patch inspect`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A patch file.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(Serialize)]
struct InspectLine<'a> {
    digest: String,
    signed_by: Option<String>,
    #[serde(flatten)]
    patch: &'a Patch,
    data: &'a [DataChange],
}

/// Runs `stillpoint patch inspect`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let signed = read(&args.file).map_err(unusable_file)?;
    output.lines(text(&signed).trim_end());
    let (digest, signed_by) = (hex::encode(signed.digest), signed.key_id().map(|id| id.to_string()));
    output.result("patch", &InspectLine { digest, signed_by, patch: &signed.patch, data: &signed.patch.data });
    Ok(())
}

fn read(file: &std::path::Path) -> anyhow::Result<Signed> {
    let what = || format!("patch file {}", file.display());
    decode(&PatchFile::read(file).with_context(what)?.bytes).with_context(what)
}

/// Formats everything for people. Writing to a `String` does not fail.
fn text(signed: &Signed) -> String {
    let patch = &signed.patch;
    let mut out = String::new();
    head(&mut out, signed);
    functions(&mut out, patch);
    sections(&mut out, patch);
    symbols(&mut out, patch);
    if !patch.types.is_empty() {
        let _ = writeln!(out, "types compared member by member ({}):", patch.types.len());
        for fact in &patch.types {
            let _ = writeln!(out, "  {}: {} bytes, {} members", fact.name, fact.size, fact.members);
        }
    }
    let escaping: Vec<String> = patch.escaping.iter().map(|name| readable(name).into_owned()).collect();
    list(&mut out, "addresses that may stay in data after a revert", &escaping);
    list(&mut out, "warnings", &patch.warnings);
    out
}

fn head(out: &mut String, signed: &Signed) {
    let patch = &signed.patch;
    let _ = writeln!(out, "{}", patch.name);
    let mut field = |name: &str, value: String| {
        if !value.is_empty() {
            let _ = writeln!(out, "  {name:12} {value}");
        }
    };
    field("description", patch.description.clone());
    field("fixes", patch.cves.join(", "));
    field("replaces", patch.replaces.join(", "));
    field("digest", hex::encode(signed.digest));
    field("signature", signed.key_id().map_or("none".to_owned(), |id| format!("by key {id} (not verified here)")));
    let target = &patch.target;
    let kind = match target.kind {
        TargetKind::Executable => "executable",
        TargetKind::PieExecutable => "position-independent executable",
        TargetKind::SharedLibrary => "shared library",
    };
    field("target", format!("{}, {kind}", target.file_name));
    field("build-id", target.build_id.to_string());
    field("text", format!("sha256 {}", hex::encode(target.text_sha256)));
    let source = &patch.source;
    let package = [source.package.as_deref(), source.version.as_deref()];
    field("source", package.into_iter().flatten().collect::<Vec<_>>().join(" "));
    field("compiler", patch.toolchain.compiler.clone());
    field("built by", format!("stillpoint {}", patch.toolchain.stillpoint));
    let scope = match patch.scope {
        Scope::ThreadLocal => "each thread migrates by itself",
        Scope::ThreadGroup => "the threads of a group migrate together",
        Scope::Process => "all threads migrate together",
    };
    field("scope", format!("{scope} ({})", if patch.scope_stated { "stated" } else { "inferred" }));
    diffs(out, "diffs", &source.diffs);
    diffs(out, "based on", &patch.based_on);
    let units = source.units.iter().map(|u| {
        format!(
            "{}: {} of {} functions found in the target byte for byte",
            u.path, u.functions_placed, u.functions_total
        )
    });
    list(out, "units compiled", &units.collect::<Vec<_>>());
}

fn diffs(out: &mut String, title: &str, diffs: &[DiffFact]) {
    let lines: Vec<String> = diffs.iter().map(|d| format!("{} (sha256 {})", d.name, hex::encode(d.sha256))).collect();
    list(out, title, &lines);
}

fn list(out: &mut String, title: &str, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(out, "{title} ({}):", lines.len());
    for line in lines {
        let _ = writeln!(out, "  {line}");
    }
}

fn functions(out: &mut String, patch: &Patch) {
    let _ = writeln!(out, "functions ({}):", patch.functions.len());
    for function in &patch.functions {
        let size = patch.symbols.get(function.new as usize).and_then(|symbol| match symbol.value {
            SymbolValue::Patch { section, .. } => patch.sections.get(section as usize).map(|s| s.size),
            _ => None,
        });
        let _ = writeln!(
            out,
            "  {} ({}) at {}: {} bytes, new code {} bytes",
            readable(&function.name),
            function.unit,
            function.old.start,
            function.old.len,
            size.unwrap_or(0)
        );
        for part in &function.old_parts {
            let _ = writeln!(out, "    part of it at {}: {} bytes", part.start, part.len);
        }
        for reason in &function.reasons {
            let _ = writeln!(out, "    because {reason}");
        }
    }
    let constants = patch
        .constants
        .iter()
        .map(|c| format!("{} ({}) at {}: {} bytes", readable(&c.name), c.unit, c.old.start, c.old.len));
    list(out, "constants and functions changed in place, by --view generation only", &constants.collect::<Vec<_>>());
    for (is_copied, what) in
        [(false, "data written while all threads are stopped"), (true, "data of which new code has a copy")]
    {
        let of_kind = patch.data.iter().filter(|c| c.is_copied() == is_copied);
        let data =
            of_kind.map(|c| format!("{} ({}) at {}: {} bytes", readable(&c.name), c.unit, c.old.start, c.old.len));
        list(out, what, &data.collect::<Vec<_>>());
    }
    let off_stack: Vec<String> = patch
        .off_stack
        .iter()
        .map(|o| format!("{} at {}, {} bytes: {}", readable(&o.name), o.range.start, o.range.len, o.reason))
        .collect();
    list(out, "must also not be on the stack", &off_stack);
    list(out, "functions in which threads may keep the old version, by --view generation only", &patch.staying);
    let hooks = &patch.hooks;
    for (when, hooks) in [
        ("before applying", &hooks.pre_apply),
        ("after applying", &hooks.post_apply),
        ("before reverting", &hooks.pre_revert),
        ("after reverting", &hooks.post_revert),
    ] {
        let names = hooks.iter().filter_map(|&i| patch.symbols.get(i as usize)).map(|s| readable(&s.name).into_owned());
        list(out, &format!("hooks {when}"), &names.collect::<Vec<_>>());
    }
}

fn sections(out: &mut String, patch: &Patch) {
    let total: u64 = patch.sections.iter().map(|s| s.size).sum();
    let _ = writeln!(out, "sections ({}, {total} bytes):", patch.sections.len());
    for section in &patch.sections {
        let kind = match section.kind {
            SectionKind::Text => "code",
            SectionKind::RoData => "constants",
            SectionKind::Data => "data",
            SectionKind::Bss => "zero data",
            SectionKind::EhFrame => "unwind data",
            SectionKind::ExceptTable => "exception table",
        };
        let _ = writeln!(
            out,
            "  {}: {kind}, {} bytes, aligned to {}, {} relocations",
            section.name,
            section.size,
            section.align,
            section.relocations.len()
        );
    }
}

fn symbols(out: &mut String, patch: &Patch) {
    let _ = writeln!(out, "symbols ({}):", patch.symbols.len());
    for (index, symbol) in patch.symbols.iter().enumerate() {
        let exported = if patch.exports.contains(&(index as u32)) { ", offered to later patches" } else { "" };
        let _ = writeln!(out, "  {}: {}{exported}", readable(&symbol.name), value(patch, symbol));
    }
}

fn value(patch: &Patch, symbol: &Symbol) -> String {
    let how = match symbol.resolved_by {
        ResolvedBy::Patch => "in the patch",
        ResolvedBy::Symtab => "from the symbol table",
        ResolvedBy::Dynsym => "from the dynamic symbol table",
        ResolvedBy::Placement => "its code was found byte for byte",
        ResolvedBy::ReverseRelocation => "read back from the shipped code",
        ResolvedBy::Runtime => "at run time",
    };
    match &symbol.value {
        SymbolValue::Patch { section, offset } => {
            let name = patch.sections.get(*section as usize).map_or("?", |s| s.name.as_str());
            format!("{name}+{offset:#x}, {how}")
        }
        SymbolValue::Target(at) => format!("{at}, {how}"),
        SymbolValue::TargetSlot(at) => format!("value of the slot at {at}, {how}"),
        SymbolValue::TargetTls(offset) => format!("thread-local variable at offset {offset:#x}, {how}"),
        SymbolValue::TargetTlsSlot(at) => format!("thread-local variable whose offset is in the slot at {at}, {how}"),
        SymbolValue::Import { version: Some(version) } => format!("imported, version {version}, {how}"),
        SymbolValue::Import { version: None } => format!("imported, {how}"),
        SymbolValue::OtherPatch => format!("another patch of the series, {how}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_patch_format::{
        BuildId, Function, Hooks, Range, Section, Source, Svma, Target, Toolchain, TypeFact, UnitFact, encode,
    };

    fn sample() -> Patch {
        let symbol = |name: &str, value, resolved_by| Symbol { name: name.into(), value, resolved_by };
        Patch {
            name: "CVE-2030-1".into(),
            description: "Bound the length".into(),
            cves: vec!["CVE-2030-1".into()],
            replaces: Vec::new(),
            source: Source {
                package: Some("demo".into()),
                version: Some("1-1".into()),
                diffs: vec![DiffFact { name: "fix.patch".into(), sha256: [0xab; 32] }],
                units: vec![UnitFact { path: "a.c".into(), functions_placed: 3, functions_total: 3 }],
            },
            based_on: Vec::new(),
            toolchain: Toolchain { compiler: "gcc 12".into(), stillpoint: "0.1.0".into() },
            target: Target {
                build_id: BuildId(vec![1, 2, 0xff]),
                text_sha256: [0; 32],
                file_name: "demo".into(),
                kind: TargetKind::PieExecutable,
            },
            scope: Scope::ThreadLocal,
            scope_stated: false,
            sections: vec![Section {
                name: ".text.f".into(),
                kind: SectionKind::Text,
                align: 16,
                size: 3,
                bytes: vec![0x31, 0xc0, 0xc3],
                relocations: Vec::new(),
            }],
            symbols: vec![
                symbol("f", SymbolValue::Patch { section: 0, offset: 0 }, ResolvedBy::Patch),
                symbol("counter", SymbolValue::Target(Svma(0x4010)), ResolvedBy::ReverseRelocation),
                symbol("malloc", SymbolValue::TargetSlot(Svma(0x3fe8)), ResolvedBy::ReverseRelocation),
            ],
            exports: vec![0],
            functions: vec![Function {
                name: "f".into(),
                unit: "a.c".into(),
                old: Range { start: Svma(0x1130), len: 6 },
                old_parts: Vec::new(),
                old_bytes: vec![0x90; 6],
                new: 0,
                reasons: vec!["instructions differ".into()],
            }],
            constants: Vec::new(),
            data: Vec::new(),
            off_stack: Vec::new(),
            staying: Vec::new(),
            hooks: Hooks { pre_apply: vec![0], ..Hooks::default() },
            types: vec![TypeFact { name: "struct s".into(), size: 16, members: 2 }],
            escaping: Vec::new(),
            warnings: vec!["new code writes a new global".into()],
        }
    }

    #[test]
    fn everything_is_shown() {
        let shown = text(&decode(&encode(&sample()).unwrap()).unwrap());
        let digest = shown.lines().find(|l| l.trim_start().starts_with("digest")).unwrap().to_owned() + "\n";
        let expected = include_str!("inspect.golden");
        assert_eq!(shown.replace(&digest, ""), expected, "got:\n{shown}");
    }

    #[test]
    fn names_of_cxx_are_shown_as_in_the_source() {
        let mut patch = sample();
        patch.functions[0].name = "_ZN4Pool4growEm".into();
        patch.symbols[1].name = "pool.cc:_ZL7counter".into();
        let shown = text(&decode(&encode(&patch).unwrap()).unwrap());
        assert!(shown.contains("  Pool::grow(unsigned long) (a.c) at 0x1130"), "got:\n{shown}");
        assert!(shown.contains("  pool.cc:counter: 0x4010"), "got:\n{shown}");
    }

    #[test]
    fn what_is_no_patch_file_is_named() {
        let error = |path: &str| format!("{:#}", read(std::path::Path::new(path)).unwrap_err());
        assert!(error("/nowhere/x.patch").starts_with("patch file /nowhere/x.patch: "));
        assert!(error("/dev/zero").ends_with("/dev/zero is not used: it is no regular file"));
    }
}
