//! Shared libraries that running programs use are patched in the processes that map them.

use std::process::Command;
use stillpoint_e2e::victim::{Kind, Phase, Program, apply, soak};

/// The library, and a program that uses it.
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

/// The patch is for one process, not for the file: another process that maps the same library runs on unchanged.
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

/// The package is upgraded: the file is replaced while the process goes on with the old one.
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
