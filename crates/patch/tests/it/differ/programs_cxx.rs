//! Every rule of the differ for C++, as a program with the expected result (see `driver`), by g++ and clang.
//!
//! Each case runs in three of nine variants, the compilers in turn; with `PROGRAMS_ALL=1` in all nine with both, and with
//! `STILLPOINT_ALL=1` or `STILLPOINT_SOAK=1` in every combination of the variants' factors (some hours).

use crate::differ::{driver, verdict};

accepted_cxx_programs!(verdict::check);
other_cxx_programs!(verdict::check);

#[test]
fn every_program_is_listed_as_what_it_is() {
    let is_accepted = |name: &String| driver::read(name).expect == driver::Expect::Accept;
    let (accepted, others): (Vec<String>, Vec<String>) = driver::names("cc").into_iter().partition(is_accepted);
    assert_eq!(accepted, ACCEPTED, "tests/it/driver/list_cxx.rs lists the accepted programs of tests/programs");
    assert_eq!(others, OTHERS, "tests/it/driver/list_cxx.rs lists the other programs of tests/programs");
    assert!(accepted.len() + others.len() >= 60, "only {} C++ programs", accepted.len() + others.len());
}
