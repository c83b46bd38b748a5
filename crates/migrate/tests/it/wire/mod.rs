//! Tests of the decoders with bytes that no server sends.

mod garbage;
