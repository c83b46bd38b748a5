//! Tests: switches of an emulated machine's kernel, and the engine on this machine.
//!
//! Each module, in the folder each of its modules, runs as a process of its own: `cargo test -p stillpoint-kernel-tests --test it switch::`.

mod engine;

mod crash;
mod faults;
mod handover;
mod refusals;
mod switch;
