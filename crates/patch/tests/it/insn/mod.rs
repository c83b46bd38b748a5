//! Tests of instructions moved, read and described.

mod displace_properties;
mod entry;
mod unwinding;
