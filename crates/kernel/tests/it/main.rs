//! Switches of an emulated machine's kernel.
//!
//! Each module runs as a process of its own: `cargo test -p stillpoint-kernel-tests --test it switch::`.

mod crash;
mod faults;
mod handover;
mod refused;
mod switch;
