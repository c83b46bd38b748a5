//! Bytes that no server sends, at the decoders.

mod garbage;
