//! Tests of tracing on small programs in C.
//!
//! Each module is a unit of scheduling: `xtask test` runs it as a process of its own.

mod freeze;
mod killed;
mod refused;
mod remote;
mod stop;
mod storm;
mod support;
