//! Properties of an ELF file that the builder needs before the differ reads it.

use crate::Error;
use object::{Architecture, Object, ObjectKind};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use stillpoint_host::untrusted::Tree;

/// Returns true for an executable or a shared library for x86-64. A package may build its libraries for other machines
/// too, with the same names.
pub(crate) fn is_loadable(tree: &Tree, name: &Path) -> bool {
    let mut magic = [0u8; 4];
    let starts = |file: File| file.read_exact_at(&mut magic, 0).is_ok() && &magic == b"\x7fELF";
    tree.file(name).is_ok_and(starts)
        && tree.read(name).is_ok_and(|bytes| {
            object::File::parse(&bytes[..]).is_ok_and(|file| {
                file.architecture() == Architecture::X86_64
                    && matches!(file.kind(), ObjectKind::Executable | ObjectKind::Dynamic)
            })
        })
}

/// Returns true for a file for x86-64; false for 32-bit programs on it.
pub(crate) fn is_for_x86_64(bytes: &[u8]) -> bool {
    object::File::parse(bytes).is_ok_and(|file| file.architecture() == Architecture::X86_64)
}

/// One object: a file of its own, or a member of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// Name of the member; empty for a file of its own.
    pub(crate) member: String,
    pub(crate) bytes: &'a [u8],
    /// Base names of the sources that it was compiled from, from its symbol table.
    pub(crate) sources: BTreeSet<String>,
    pub(crate) has_code: bool,
}

/// Returns the objects of an object file or an archive; `None` for any other file.
pub(crate) fn pieces(bytes: &[u8]) -> Option<Vec<Piece<'_>>> {
    use object::read::archive::ArchiveFile;
    if let Ok(archive) = ArchiveFile::parse(bytes) {
        let mut found = Vec::new();
        for member in archive.members().filter_map(Result::ok) {
            let name = String::from_utf8_lossy(member.name()).into_owned();
            found.extend(member.data(bytes).ok().and_then(|object| piece(name, object)));
        }
        return Some(found);
    }
    piece(String::new(), bytes).map(|one| vec![one])
}

fn piece(member: String, bytes: &[u8]) -> Option<Piece<'_>> {
    use object::{ObjectSection, SectionKind};
    let file = object::File::parse(bytes).ok().filter(|file| file.kind() == ObjectKind::Relocatable)?;
    let has_code = file.sections().any(|section| section.kind() == SectionKind::Text && section.size() > 0);
    Some(Piece { member, bytes, sources: sources(&file).into_iter().collect(), has_code })
}

/// Returns the base names of the sources of the objects in a linked file, as often as its symbol table has them; empty
/// when it has no symbol table.
pub(crate) fn linked_sources(bytes: &[u8]) -> Vec<String> {
    object::File::parse(bytes).map(|file| sources(&file)).unwrap_or_default()
}

fn sources(file: &object::File<'_>) -> Vec<String> {
    use object::{ObjectSymbol, SymbolKind};
    let names = file.symbols().filter(|s| s.kind() == SymbolKind::File).filter_map(|s| s.name().ok());
    names.filter(|name| !name.is_empty()).map(|name| name.rsplit('/').next().unwrap_or(name).to_owned()).collect()
}

/// Returns true if two libraries have the same `DT_SONAME`.
pub(crate) fn have_one_soname(one: &[u8], other: &[u8]) -> bool {
    soname(one).is_some_and(|name| soname(other) == Some(name))
}

/// Returns the `DT_SONAME` of a library.
pub(crate) fn soname(bytes: &[u8]) -> Option<String> {
    dynamic_strings(bytes, object::elf::DT_SONAME).into_iter().next()
}

/// Returns the GNU build-id of an ELF file.
pub(crate) fn build_id(bytes: &[u8]) -> Option<Vec<u8>> {
    object::File::parse(bytes).ok()?.build_id().ok()?.map(<[u8]>::to_vec)
}

/// Result of the comparison of a build of the whole program with the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reproduced {
    /// The build-id is the same.
    BitForBit,
    /// Code and data are the same. The build-id differs: it covers debug information and the compiler's version.
    CodeAndData,
    /// Some code or data differs. The code that a patch replaces or uses is still compared byte for byte.
    Differs,
}

/// Compares a rebuilt program with the target.
pub(crate) fn compare(rebuilt: &[u8], target: &[u8]) -> Reproduced {
    let id = build_id(target);
    if id.is_some() && build_id(rebuilt) == id {
        return Reproduced::BitForBit;
    }
    match (contents(rebuilt), contents(target)) {
        (Some(one), Some(two)) if one == two => Reproduced::CodeAndData,
        _ => Reproduced::Differs,
    }
}

/// Returns the loaded sections without notes: names and bytes.
fn contents(bytes: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    use object::{ObjectSection, SectionKind};
    let file = object::File::parse(bytes).ok()?;
    let mut all = Vec::new();
    for section in file.sections() {
        // only loaded sections have an address
        let loaded = section.address() != 0;
        if loaded && section.kind() != SectionKind::Note {
            all.push((section.name().ok()?.to_owned(), section.data().ok()?.to_vec()));
        }
    }
    (!all.is_empty()).then_some(all)
}

/// Returns true if two objects have the same code and data, with the same relocations by the names of their symbols.
pub(crate) fn are_equal(one: &[u8], other: &[u8]) -> bool {
    let (one, other) = (loaded_sections(one), loaded_sections(other));
    one.is_some() && one == other
}

/// A section that is loaded: name, size, bytes, and relocations as text.
type LoadedSection = (String, u64, Vec<u8>, Vec<String>);

fn loaded_sections(bytes: &[u8]) -> Option<Vec<LoadedSection>> {
    use object::{ObjectSection, ObjectSymbol, RelocationTarget, SectionFlags, elf::SHF_ALLOC};
    let file = object::File::parse(bytes).ok()?;
    let is_loaded = |flags| matches!(flags, SectionFlags::Elf { sh_flags, .. } if sh_flags.contains(SHF_ALLOC));
    let name = |target| match target {
        RelocationTarget::Symbol(index) => {
            let symbol = file.symbol_by_index(index).ok()?;
            let section = symbol.section_index().and_then(|index| file.section_by_index(index).ok());
            let section = section.and_then(|section| section.name().ok().map(str::to_owned));
            Some(format!("{} {section:?}", symbol.name().ok()?))
        }
        other => Some(format!("{other:?}")),
    };
    let mut found = Vec::new();
    for section in file.sections().filter(|section| is_loaded(section.flags())) {
        let relocations = section.relocations().map(|(at, relocation)| {
            let target = name(relocation.target())?;
            Some(format!("{at} {:?} {target} {}", relocation.flags(), relocation.addend()))
        });
        let (size, data) = (section.size(), section.data().ok()?.to_vec());
        found.push((section.name().ok()?.to_owned(), size, data, relocations.collect::<Option<_>>()?));
    }
    Some(found)
}

/// Returns true if an object defines a global of one of these names.
pub(crate) fn defines_any(object: &[u8], names: &BTreeSet<&str>) -> bool {
    use object::ObjectSymbol;
    let Ok(file) = object::File::parse(object) else { return false };
    file.symbols().any(|s| s.is_global() && s.is_definition() && s.name().is_ok_and(|n| names.contains(n)))
}

/// Default directories of the loader.
const LIBRARY_DIRECTORIES: [&str; 6] =
    ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib"];

/// Returns the names exported by the needed libraries of a program and by the libraries that these need in turn, each
/// name with its default version. The first library that has a name wins, as with the loader. Returns `None` when one
/// of the libraries is not below `root`, and for a plug-in: the program that loads it provides names that none of its
/// libraries has.
pub(crate) fn imports(program: &[u8], root: &Tree) -> Result<Option<BTreeMap<String, Option<String>>>, Error> {
    let (mut found, mut libraries, mut next) = (BTreeMap::new(), needed(program), 0);
    while let Some(library) = libraries.get(next) {
        let mut places = LIBRARY_DIRECTORIES.iter().map(|directory| Path::new(directory).join(library));
        let Some(bytes) = places.find_map(|path| root.read(path).ok()) else {
            tracing::warn!(library, "needed library not found");
            return Ok(None);
        };
        let exports = stillpoint_patch_differ::exports(&bytes).map_err(|r| Error::Refused(vec![r]))?;
        for (name, version) in exports {
            found.entry(name).or_insert(version);
        }
        let further: Vec<String> = needed(&bytes).into_iter().filter(|name| !libraries.contains(name)).collect();
        libraries.extend(further);
        next += 1;
    }
    let is_plug_in = undefined(program).iter().any(|name| !found.contains_key(name));
    Ok((!is_plug_in).then_some(found))
}

/// Returns names that an ELF file must find in other files.
fn undefined(bytes: &[u8]) -> Vec<String> {
    use object::{Object, ObjectSymbol};
    let Ok(file) = object::File::parse(bytes) else { return Vec::new() };
    let names = file.dynamic_symbols().filter(|s| s.is_undefined() && !s.is_weak());
    names.filter_map(|s| s.name().ok()).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Returns the `DT_NEEDED` entries of an ELF file.
fn needed(bytes: &[u8]) -> Vec<String> {
    dynamic_strings(bytes, object::elf::DT_NEEDED)
}

/// Returns the strings that entries of one kind of the dynamic section name.
fn dynamic_strings(bytes: &[u8], kind: object::elf::DynamicTag) -> Vec<String> {
    use object::read::elf::{Dyn, ElfFile64};
    let Ok(file) = ElfFile64::<object::Endianness>::parse(bytes) else { return Vec::new() };
    let endian = file.endianness();
    let sections = file.elf_section_table();
    let Ok(Some((entries, strings))) = sections.dynamic(endian, bytes) else { return Vec::new() };
    let strings = sections.strings(endian, bytes, strings).unwrap_or_default();
    let names = entries.iter().filter(|e| e.d_tag(endian) == kind);
    let names = names.filter_map(|e| strings.get(u32::try_from(e.d_val(endian)).ok()?).ok());
    names.map(|name| String::from_utf8_lossy(name).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_for_another_machine_is_no_target() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("own");
        let mut bytes = std::fs::read("/proc/self/exe").unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let tree = Tree::open(dir.path()).unwrap();
        assert!(is_loadable(&tree, Path::new("own")));
        // the field e_machine
        bytes[18..20].copy_from_slice(&object::elf::EM_AARCH64.0.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        assert!(!is_loadable(&tree, Path::new("own")));
    }

    #[test]
    fn this_test_may_import_from_its_libc() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        let names = imports(&own, &Tree::open(Path::new("/")).unwrap()).unwrap().unwrap();
        assert!(names.get("malloc").is_some_and(|v| v.as_deref().is_some_and(|v| v.starts_with("GLIBC_"))));
        assert!(!names.contains_key("sp_no_such_function"));
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(imports(&own, &Tree::open(empty.path()).unwrap()).unwrap(), None);
    }

    #[test]
    fn what_a_plug_in_finds_in_its_host_is_not_known() {
        let dir = tempfile::tempdir().unwrap();
        let made = |name: &str, text: &str| {
            let (source, library) = (dir.path().join(name).with_extension("c"), dir.path().join(name));
            std::fs::write(&source, text).unwrap();
            let mut cc = std::process::Command::new("cc");
            assert!(cc.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap().success());
            imports(&std::fs::read(&library).unwrap(), &Tree::open(Path::new("/")).unwrap()).unwrap()
        };
        let whole = made("whole.so", "#include <stdlib.h>\nint own(void) { return rand(); }\n");
        assert!(whole.is_some_and(|names| names.contains_key("malloc")));
        assert_eq!(made("plugin.so", "int of_the_host(void);\nint own(void) { return of_the_host(); }\n"), None);
    }
}
