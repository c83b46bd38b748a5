//! Every C++ program that the differ accepts, patched while it runs, as in `programs_live` for C.
//!
//! One case in all variants:
//! `PROGRAMS_ALL=1 cargo test -p stillpoint-patch-tests --test it -- --exact programs_cxx_live::NAME`.

use crate::live;

accepted_cxx_programs!(live::check);

#[test]
fn there_are_programs() {
    assert!(ACCEPTED.len() > 40, "only {} C++ programs are patched live", ACCEPTED.len());
}
