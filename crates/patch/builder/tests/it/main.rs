//! Tests of the builder with the machine's own compiler.
//!
//! Each module is a unit of scheduling: `xtask test` runs it as a process of its own.

mod shadow;
mod source_trees;
mod withheld_versions;
