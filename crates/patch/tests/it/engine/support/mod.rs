//! Patches made by hand: from a compiled object and a target with symbols to a patch. No diffing, no checks; tests of
//! the engine do not need the differ's work for real programs.
#![allow(dead_code, unreachable_pub)]

use object::read::elf::ElfFile64;
use object::{
    Object, ObjectSection, ObjectSegment, ObjectSymbol, RelocationFlags, RelocationTarget, SectionFlags, elf,
};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_patch_engine::{Error, Outcome};
use stillpoint_patch_format::*;

/// Inputs of a handmade patch.
pub struct Handmade<'a> {
    pub name: &'a str,
    /// The ELF file to be patched, with `.symtab`.
    pub target: &'a Path,
    /// The object with the new functions, compiled with `-ffunction-sections`.
    pub object: &'a Path,
    /// Names of hooks: pre_apply, post_apply, pre_revert, post_revert.
    pub hooks: [&'a [&'a str]; 4],
    pub scope: Scope,
    /// Names of the patches that it is built upon.
    pub based_on: &'a [&'a str],
}

impl<'a> Handmade<'a> {
    pub fn new(name: &'a str, target: &'a Path, object: &'a Path) -> Self {
        Handmade { name, target, object, hooks: [&[]; 4], scope: Scope::ThreadLocal, based_on: &[] }
    }

    /// Builds the patch: it redirects every function of the object that the target has as well.
    pub fn build(&self) -> Patch {
        let target_bytes = std::fs::read(self.target).expect("target is readable");
        let object_bytes = std::fs::read(self.object).expect("object is readable");
        let target = ElfFile64::<object::Endianness>::parse(&*target_bytes).expect("target is ELF");
        let object = ElfFile64::<object::Endianness>::parse(&*object_bytes).expect("object is ELF");
        let mut maker = Maker {
            target: &target,
            object: &object,
            patch: empty(self.name, &target, self),
            symbols: BTreeMap::new(),
            sections: BTreeMap::new(),
        };
        maker.sections();
        maker.relocations();
        maker.functions();
        for (list, names) in [0, 1, 2, 3].into_iter().zip(self.hooks) {
            let found: Vec<u32> = names.iter().map(|n| maker.own(n)).collect();
            let hooks = &mut maker.patch.hooks;
            *[&mut hooks.pre_apply, &mut hooks.post_apply, &mut hooks.pre_revert, &mut hooks.post_revert][list] = found;
        }
        maker.patch
    }

    /// Returns the patch as a file without signature.
    pub fn file(&self) -> Signed {
        decode(&encode(&self.build()).expect("patch is valid")).expect("what was encoded decodes")
    }
}

type Elf<'a> = ElfFile64<'a, object::Endianness>;

/// Returns the diff that the patch of a name brings.
fn diff_of(name: &str) -> DiffFact {
    DiffFact { name: format!("{name}.diff"), sha256: Sha256::digest(name).into() }
}

fn empty(name: &str, target: &Elf<'_>, from: &Handmade<'_>) -> Patch {
    let text = target.segments().find(|s| matches!(s.flags(), object::SegmentFlags::Elf { p_flags, .. } if format!("{p_flags:?}").contains('X') || p_flags.0 & 1 != 0));
    let interpreter = target.section_by_name(".interp").is_some();
    let kind = match (target.kind(), interpreter) {
        (object::ObjectKind::Executable, _) => TargetKind::Executable,
        (_, true) => TargetKind::PieExecutable,
        _ => TargetKind::SharedLibrary,
    };
    Patch {
        name: name.into(),
        description: format!("{name}, made by hand"),
        cves: vec![],
        replaces: vec![],
        source: Source { diffs: vec![diff_of(name)], ..Source::default() },
        based_on: from.based_on.iter().map(|name| diff_of(name)).collect(),
        toolchain: Toolchain::default(),
        target: Target {
            build_id: BuildId(target.build_id().expect("notes are readable").unwrap_or_default().to_vec()),
            text_sha256: Sha256::digest(text.expect("an executable segment").data().expect("its bytes")).into(),
            file_name: from.target.file_name().expect("a file name").to_string_lossy().into_owned(),
            kind,
        },
        scope: from.scope,
        scope_stated: true,
        sections: vec![],
        symbols: vec![],
        exports: vec![],
        functions: vec![],
        constants: Vec::new(),
        data: Vec::new(),
        off_stack: vec![],
        staying: vec![],
        hooks: Hooks::default(),
        types: vec![],
        escaping: vec![],
        warnings: vec![],
    }
}

struct Maker<'a> {
    target: &'a Elf<'a>,
    object: &'a Elf<'a>,
    patch: Patch,
    /// Patch symbol of each object symbol, by index.
    symbols: BTreeMap<usize, u32>,
    /// Patch section of each object section, by index.
    sections: BTreeMap<usize, u32>,
}

impl Maker<'_> {
    fn sections(&mut self) {
        for section in self.object.sections() {
            let name = section.name().unwrap_or_default().to_owned();
            let SectionFlags::Elf { sh_flags, .. } = section.flags() else { continue };
            let (alloc, write, exec) = (sh_flags.0 & 2 != 0, sh_flags.0 & 1 != 0, sh_flags.0 & 4 != 0);
            if !alloc || section.size() == 0 || name.starts_with(".note") {
                continue;
            }
            let bss = section.kind().is_bss();
            let kind = match (name.as_str(), exec, write) {
                (".eh_frame", ..) => SectionKind::EhFrame,
                (name, ..) if name.starts_with(".gcc_except_table") => SectionKind::ExceptTable,
                (_, true, _) => SectionKind::Text,
                _ if bss => SectionKind::Bss,
                (_, _, true) => SectionKind::Data,
                _ => SectionKind::RoData,
            };
            self.sections.insert(section.index().0, self.patch.sections.len() as u32);
            self.patch.sections.push(Section {
                name,
                kind,
                align: section.align().max(1) as u32,
                size: section.size(),
                bytes: if bss { vec![] } else { section.data().expect("section bytes").to_vec() },
                relocations: vec![],
            });
        }
    }

    fn relocations(&mut self) {
        let list: Vec<_> = self.sections.iter().map(|(a, b)| (*a, *b)).collect();
        for (from, to) in list {
            let section = self.object.section_by_index(object::SectionIndex(from)).expect("section");
            for (offset, relocation) in section.relocations() {
                let RelocationTarget::Symbol(index) = relocation.target() else { panic!("relocation without symbol") };
                let RelocationFlags::Elf { r_type } = relocation.flags() else { panic!("no ELF relocation") };
                let kind = match r_type {
                    elf::R_X86_64_64 => RelocationKind::Abs64,
                    elf::R_X86_64_32 => RelocationKind::Abs32,
                    elf::R_X86_64_32S => RelocationKind::Abs32Signed,
                    elf::R_X86_64_PC32 => RelocationKind::Pc32,
                    elf::R_X86_64_PC64 => RelocationKind::Pc64,
                    elf::R_X86_64_PLT32 => RelocationKind::Branch32,
                    elf::R_X86_64_GOTPCREL | elf::R_X86_64_GOTPCRELX | elf::R_X86_64_REX_GOTPCRELX => {
                        RelocationKind::GotPc32
                    }
                    elf::R_X86_64_TPOFF32 => RelocationKind::TpOff32,
                    elf::R_X86_64_GOTTPOFF => RelocationKind::GotTpOff32,
                    other => panic!("relocation type {other:?}"),
                };
                let symbol = self.symbol(index);
                self.patch.sections[to as usize].relocations.push(Relocation {
                    offset: offset as u32,
                    kind,
                    symbol,
                    addend: relocation.addend(),
                });
            }
        }
    }

    fn in_target(&self, name: &str) -> Option<(u64, u64, bool)> {
        let found = self.target.symbols().find(|s| s.name() == Ok(name) && !s.is_undefined());
        found.map(|s| (s.address(), s.size(), s.kind() == object::SymbolKind::Tls))
    }

    /// Returns the patch's symbol for one of the object: a data symbol that the target has is the target's.
    fn symbol(&mut self, index: object::SymbolIndex) -> u32 {
        if let Some(known) = self.symbols.get(&index.0) {
            return *known;
        }
        let symbol = self.object.symbol_by_index(index).expect("symbol");
        let name = symbol.name().unwrap_or_default().to_owned();
        let (value, resolved_by) = match symbol.section_index() {
            Some(section) => {
                let section = self.sections[&section.0];
                (SymbolValue::Patch { section, offset: symbol.address() }, ResolvedBy::Patch)
            }
            None => match self.in_target(&name) {
                Some((offset, _, true)) => (SymbolValue::TargetTls(offset), ResolvedBy::Symtab),
                Some((address, _, _)) => (SymbolValue::Target(Svma(address)), ResolvedBy::Symtab),
                None if name.starts_with("other_") => (SymbolValue::OtherPatch, ResolvedBy::Runtime),
                None => (SymbolValue::Import { version: None }, ResolvedBy::Runtime),
            },
        };
        self.push(index.0, name, value, resolved_by)
    }

    fn push(&mut self, index: usize, name: String, value: SymbolValue, resolved_by: ResolvedBy) -> u32 {
        let number = self.patch.symbols.len() as u32;
        self.symbols.insert(index, number);
        self.patch.symbols.push(Symbol { name, value, resolved_by });
        number
    }

    fn own(&mut self, name: &str) -> u32 {
        let symbol = self.object.symbols().find(|s| s.name() == Ok(name) && s.is_definition());
        self.symbol(symbol.unwrap_or_else(|| panic!("object defines {name}")).index())
    }

    fn functions(&mut self) {
        let names: BTreeSet<String> = self
            .object
            .symbols()
            .filter(|s| s.kind() == object::SymbolKind::Text && s.is_definition() && !s.is_weak())
            .filter_map(|s| s.name().ok().map(str::to_owned))
            .filter(|name| !name.contains(".cold"))
            .collect();
        for name in names {
            let new = self.own(&name);
            if name.starts_with("other_") {
                self.patch.exports.push(new);
            }
            let Some((start, len, _)) = self.in_target(&name) else { continue };
            let text = self.target.sections().find(|s| (s.address()..s.address() + s.size()).contains(&start));
            let bytes = text.expect("text section").data_range(start, len).expect("bytes").expect("in range").to_vec();
            let cold = self.in_target(&format!("{name}.cold"));
            self.patch.functions.push(Function {
                name,
                unit: "victim.c".into(),
                old: Range { start: Svma(start), len },
                old_parts: cold.iter().map(|c| Range { start: Svma(c.0), len: c.1 }).collect(),
                old_bytes: bytes,
                new,
                reasons: vec!["made by hand".into()],
            });
        }
    }
}

/// Compiles C text to `dir/name`.
pub fn compile(dir: &Path, name: &str, text: &str, flags: &[&str]) -> PathBuf {
    compile_with("gcc", "c", dir, name, text, flags)
}

/// Compiles C++ text to `dir/name`.
pub fn compile_cxx(dir: &Path, name: &str, text: &str, flags: &[&str]) -> PathBuf {
    compile_with("g++", "cc", dir, name, text, flags)
}

fn compile_with(compiler: &str, suffix: &str, dir: &Path, name: &str, text: &str, flags: &[&str]) -> PathBuf {
    let source = dir.join(format!("{name}.{suffix}"));
    std::fs::write(&source, text).expect("source is written");
    let out = dir.join(name);
    let mut command = Command::new(compiler);
    command.args(["-O2", "-Wall", "-o"]).arg(&out).arg(&source).args(flags);
    let done = command.output().unwrap_or_else(|error| panic!("{compiler} runs: {error}"));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    out
}

const OBJECT: [&str; 3] = ["-c", "-ffunction-sections", "-fdata-sections"];

/// Compiles C text to an object for a handmade patch.
pub fn object(dir: &Path, name: &str, text: &str, flags: &[&str]) -> PathBuf {
    compile(dir, &format!("{name}.o"), text, &[&OBJECT, flags].concat())
}

/// Compiles C++ text to an object for a handmade patch.
pub fn object_cxx(dir: &Path, name: &str, text: &str, flags: &[&str]) -> PathBuf {
    compile_cxx(dir, &format!("{name}.o"), text, &[&OBJECT, flags].concat())
}

/// Checks that an operation was carried out.
pub fn committed(outcome: Result<Outcome, Error>) {
    match outcome {
        Ok(Outcome::Committed { .. }) => {}
        Ok(other) => panic!("{other:?}"),
        Err(error) => panic!("{error}: {error:?}"),
    }
}
