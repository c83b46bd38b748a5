//! Tests of the differ on objects that the machine's own compilers make.
//!
//! Each module is a unit of scheduling: `xtask test` runs it as a process of its own.

#[macro_use]
mod driver;

mod garbage;
mod inline_code;
mod programs;
mod programs_cxx;
mod rules;
mod types;
mod types_cxx;
mod verdict;
