//! Shared libraries that running programs use, patched in the processes that map them.

use std::path::Path;
use std::process::Command;
use stillpoint_patch_tests::victim::{Kind, Phase, Program, Victim, apply, revert, soak};

/// Builds the library, and a program that uses it.
fn library(strip: bool) -> (Program, Program) {
    let mut library = Program::build_as("library", Kind::Library, &[], &[]);
    if strip {
        library = library.strip();
    }
    let directory = library.elf().parent().expect("a directory").display().to_string();
    let flags = [format!("-L{directory}"), "-llibrary".to_owned(), format!("-Wl,-rpath,{directory}")];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let program = Program::build_as("caller", Kind::Pie, &[], &flags);
    (library, program)
}

#[test]
fn a_library_in_use() {
    for strip in [false, true] {
        let (library, program) = library(strip);
        let patch = library.patch(2);
        let mut victim = program.start(&[]);
        for _ in 0..if soak() { 100 } else { 4 } {
            victim.there_and_back(&patch);
        }
    }
}

/// Patches one process, not the file: another process that maps the same library runs unchanged.
#[test]
fn another_process_with_the_same_library_is_left_alone() {
    let (library, program) = library(false);
    let patch = library.patch(2);
    let mut patched = program.start(&[]);
    let mut other = program.start(&[]);
    patched.announce(Phase::Over(1, 2));
    apply(&patch, patched.pid()).succeed();
    patched.assert_settled(2);
    other.assert_settled(1);
    other.assert_pristine();
}

/// Upgrades the package: the file is replaced while the process continues with the old one.
#[test]
fn a_library_that_was_replaced_on_disk() {
    let (library, program) = library(false);
    let patch = library.patch(2);
    let mut victim = program.start(&[]);
    let copy = library.dir().join("newer.so");
    let status = Command::new("strip").arg("-o").arg(&copy).arg(library.elf()).status().expect("run strip");
    assert!(status.success());
    std::fs::rename(&copy, library.elf()).expect("replace the library");
    victim.there_and_back(&patch);
}

/// Builds a library and a program with a copy of the same inline code each; `compile` are flags for the compiler of the
/// library.
fn sharing(compile: &[&str]) -> (Program, Program) {
    let library = Program::build_as("sharing", Kind::Library, compile, &[]);
    let directory = library.dir().display().to_string();
    let flags = [format!("-L{directory}"), "-lsharing".to_owned(), format!("-Wl,-rpath,{directory}")];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let program = Program::build_as("sharer", Kind::Pie, &[], &flags);
    (library, program)
}

/// Applies a patch and returns the versions that the program's own calls and those of its library reach.
#[track_caller]
fn apply_to(victim: &mut Victim, patch: &Path) -> (u32, u32) {
    victim.announce(Phase::Either(1, 2));
    apply(patch, victim.pid()).succeed();
    // a call that had begun before is complete
    victim.assert_answering();
    victim.assert_answering();
    let slots = victim.slots();
    let version = |role: &str| slots.iter().find(|slot| slot.role == role).expect("a thread of this role").version;
    (version("own"), version("library"))
}

/// Patches one of two modules that each call their own remaining copy: the other's calls do not change.
#[test]
fn inline_code_of_which_each_module_has_a_copy() {
    let (library, program) = sharing(&["-fvisibility-inlines-hidden"]);
    let (of_library, of_program) = (library.patch(2), program.patch(2));
    let mut victim = program.start(&[]);
    assert_eq!(apply_to(&mut victim, &of_library), (1, 2));
    assert_eq!(apply_to(&mut victim, &of_program), (2, 2));
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    for _ in 0..2 {
        revert(victim.pid()).succeed();
    }
    victim.assert_settled(1);
    victim.assert_pristine();
}

/// Lets the dynamic linker redirect the library's calls to the program's copy: the tool names that copy as the one to
/// patch.
#[test]
fn inline_code_of_which_the_program_has_the_copy_that_all_call() {
    let (library, program) = sharing(&[]);
    let file = library.dir().join("library.patch");
    let built = library.builder(2, &file).succeed();
    assert!(built.stderr.contains("`shared_rule(long)` is inline and exported"), "{built}");
    let of_program = program.patch(2);
    let mut victim = program.start(&[]);
    assert_eq!(apply_to(&mut victim, &file), (1, 1));
    assert_eq!(apply_to(&mut victim, &of_program), (2, 2));
    victim.assert_settled(2);
}
