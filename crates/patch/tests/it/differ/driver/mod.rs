//! Directive programs: one C or C++ file per rule, with the expected result at its top.
//!
//! A program is a small server: it reads a line on standard input and answers with one on standard output, by calling
//! `answer()` (`include/serve.c` does the rest). The shipped and the before side are compiled unchanged, the after side
//! with `SP_AFTER` defined. Directives:
//!
//! | `//#` | meaning |
//! |---|---|
//! | `Rule: TEXT` | subject of the case |
//! | `Expect: accept`, `refuse CODE`, `nothing` | required result of the differ |
//! | `Changed: NAMES`, `Unchanged: NAMES` | functions that must, must not be redirected; `f*` is any with this prefix |
//! | `Refusal: TEXT` | must be in a refusal's message; several lines: all |
//! | `Warning: TEXT` | must be in a warning of the patch |
//! | `Output-before`, `-after`, `-reverted: A \| B` | answers to as many questions; reverted is as before unless stated |
//! | `Output-base: A \| B` | answers between two patches of a series, and after the revert of the second (see below) |
//! | `Flags: ...`, `Libs: ...` | options of the compiler, of the linker |
//! | `Opt: -O2 ...`, `Link: pie nopie shared` | variants that apply to the case; all unless stated |
//! | `Has: NAME` | a symbol or section with this prefix must be in an object, in one variant at least |
//! | `Folded: NAMES` | functions that must share their address as shipped, in one variant at least |
//! | `In-place: NAMES` | constants that must change in place; allowed only with this directive |
//! | `Data: NAMES` | variables that must be written; allowed only with this directive |
//! | `May-stay: NAMES` | functions in which a thread may continue with the old version |
//! | `Needs: WORD` | a flag of /proc/cpuinfo |
//! | `Hook: PHASE FUNCTION` | a hook function of the after side |
//! | `Live: refused TEXT`, `busy FUNCTION` | the engine refuses trampolines with TEXT; a thread never leaves FUNCTION |
//! | `Main: own` | the program has its own `main` |
//! | `Compiler: gnu`, `clang` | only compiler of the case; C is compiled by the system's compiler, C++ by both |
//! | `Patchable: no` | compiled without `-fpatchable-function-entry` (see below) |
//! | `Unit: NAME`, `Header: NAME` | start of another file |
//!
//! With `Output-base` the patch is the second of a series: the side of the first one is compiled with `SP_BASE`, the side
//! of the second one with `SP_BASE` and `SP_AFTER`.
//!
//! With `-fpatchable-function-entry`, g++ 12 notes entries of copies that the linker drops, which it then refuses to
//! link, and puts functions at odd addresses, which pointers to members cannot hold.

// Two test programs share this module, and neither uses all of it.
#![allow(dead_code, unused_imports, unused_macros)]

mod build;
mod case;
#[macro_use]
mod list;
#[macro_use]
mod list_cxx;

pub(crate) use build::{Built, Server, Variant, diff, diff_base, variants};
pub(crate) use case::{Case, Compiler, Expect, Live};

use std::path::{Path, PathBuf};

/// Returns the directory of the programs.
pub(crate) fn directory() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let candidates = here.ancestors().map(|root| root.join("crates/patch/tests/programs/differ"));
    candidates.into_iter().find(|path| path.is_dir()).expect("the directory of the programs, above the manifest's")
}

/// Reads a program by its name.
pub(crate) fn read(name: &str) -> Case {
    let path = directory().join(name);
    let found = ["c", "cc"].map(|extension| path.with_extension(extension)).into_iter().find(|path| path.is_file());
    Case::read(&found.unwrap_or_else(|| panic!("no program {name}")))
}

/// Returns the names of all programs with this extension, sorted.
pub(crate) fn names(extension: &str) -> Vec<String> {
    let entries = std::fs::read_dir(directory()).expect("read the directory of the programs");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let sources = paths.filter(|path| path.extension().is_some_and(|found| found == extension));
    let mut names: Vec<String> =
        sources.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns a requirement of a program that this machine lacks.
pub(crate) fn lacking(case: &Case) -> Option<&str> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag: &str| {
        let mut lines = text.lines().filter(|line| line.starts_with("flags"));
        lines.any(|line| line.split_whitespace().any(|word| word == flag))
    };
    case.needs.iter().find(|flag| !has(flag)).map(String::as_str)
}
