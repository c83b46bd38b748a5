//! Tests of the patch file.
//!
//! Each module is a unit of scheduling: `xtask test` runs it as a process of its own.

mod file;
