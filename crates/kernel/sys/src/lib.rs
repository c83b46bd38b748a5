//! System calls that checkpoints and switches need and no library has, one module for each.

pub mod handover;
pub mod repair;
pub mod uffd;
