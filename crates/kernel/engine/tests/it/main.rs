//! Real programs, with their connections and their memory, into images and back.
//!
//! Each module runs as a process of its own: `cargo test -p stillpoint-kernel-engine --test it live::`.

mod addresses;
mod faults;
mod footprint;
mod guard;
mod images;
mod live;
mod ownership;
mod support;
mod wake;
