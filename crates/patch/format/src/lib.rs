//! The patch file: its contents, encoding, checks and signature.
//!
//! The builder makes a [`Patch`], [`encode`] turns it into bytes, [`decode`] turns bytes from any source back into a `Patch` or returns one
//! clear [`Error`]. Decoding validates: when `decode` returns, it has checked every index, range, alignment and size that a later step
//! relies on. An engine need not check them again.
//!
//! The caller guarantees nothing: input is hostile. The crate guarantees that decoding does not panic, and that it allocates at most a
//! small multiple of the input's length. It does not judge whether the code inside is good: the differ does that. The signature establishes
//! trust ([`Signed`]).
//!
//! ```text
//! magic "STILLPT\n" | version u32 | flags u32 | body length u64 | SHA-256 of body | [key id 8 | ed25519 signature 64] | body
//! ```
//! Integers are little-endian; the body is `postcard`: a [`Patch`], and from version 4 on its changes of data. The signature covers everything before it.
#![forbid(unsafe_code)]

mod demangle;
mod error;
mod file;
mod model;
mod validate;

pub use demangle::{readable, readable_short};
pub use error::Error;
pub use file::{DATA_MAX, KeyId, PublicKey, SecretKey, Signed, VERSION, decode, encode, encode_signed};
pub use model::*;
pub use validate::is_patch_name;
