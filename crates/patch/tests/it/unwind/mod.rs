//! Tests of call-frame information.

mod handmade;
