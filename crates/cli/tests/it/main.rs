//! The command line as its user meets it.

mod help;
mod names;
