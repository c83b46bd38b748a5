//! Every program that the differ accepts, patched while it runs: its answer changes with the patch, and back with the
//! revert (see the driver of the differ's tests for the programs' directives).
//!
//! One case in all variants:
//! `PROGRAMS_ALL=1 cargo test -p stillpoint-patch-tests --test it -- --exact programs_live::NAME`.

use crate::live;

accepted_programs!(live::check);

#[test]
fn there_are_programs() {
    assert!(ACCEPTED.len() > 60, "only {} programs are patched live", ACCEPTED.len());
}
