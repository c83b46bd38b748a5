//! Tests of the command line as a user sees it.

mod help;
mod names;
mod packages;
mod units;
