//! Tests of the engine on small victims, with patches made by hand.

mod abi_header;
mod apply;
mod exceptions;
mod faults;
mod hostile;
mod support;
mod threads;
