//! Tests of tracing on small programs in C.

mod freeze;
mod killed;
mod refused;
mod remote;
mod stop;
mod storm;
mod support;
