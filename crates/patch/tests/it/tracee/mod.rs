//! Tests of tracing on small programs in C.

mod freeze;
mod killed_tool;
mod refusals;
mod remote;
mod stop;
mod storm;
mod support;
