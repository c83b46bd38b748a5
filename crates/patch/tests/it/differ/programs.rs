//! Every rule of the differ, as a C program with the expected result (see `driver`).
//!
//! Each case runs in three of nine variants of optimisation, linking, control-flow protection, patchable entries and
//! symbols; with `PROGRAMS_ALL=1` in all nine. One case:
//! `cargo test -p stillpoint-patch-tests --test it -- differ::programs::NAME`.

use crate::differ::{driver, verdict};

accepted_programs!(verdict::check);
other_programs!(verdict::check);

#[test]
fn every_program_is_listed_as_what_it_is() {
    let is_accepted = |name: &String| driver::read(name).expect == driver::Expect::Accept;
    let (accepted, others): (Vec<String>, Vec<String>) = driver::names("c").into_iter().partition(is_accepted);
    assert_eq!(accepted, ACCEPTED, "tests/it/driver/list.rs lists the accepted programs of tests/programs");
    assert_eq!(others, OTHERS, "tests/it/driver/list.rs lists the other programs of tests/programs");
}
