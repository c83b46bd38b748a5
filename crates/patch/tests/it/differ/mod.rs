//! Tests of the differ on objects that the machine's own compilers make.

#[macro_use]
pub(crate) mod driver;

mod garbage;
mod inline_code;
mod programs;
mod programs_cxx;
mod rules;
mod types;
mod types_cxx;
mod verdict;
