//! Tests of the engine on small victims, with patches made by hand.
//!
//! Each module is a unit of scheduling: `xtask test` runs it as a process of its own.

mod abi_header;
mod apply;
mod exceptions;
mod faults;
mod hostile;
mod support;
mod threads;
