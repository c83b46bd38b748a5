//! Tests of instructions moved, read and described.
//!
//! Each module is a unit of scheduling: `xtask test` runs it as a process of its own.

mod displace_properties;
mod entry;
mod unwinding;
