//! Tests of edits placed by anchors.
//!
//! Each module is a unit of scheduling: `xtask test` runs it as a process of its own.

mod anchors;
