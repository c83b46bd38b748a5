//! The patch file: what it holds, how it is encoded, checked and signed.
//!
//! The builder makes a [`Patch`], [`encode`] turns it into bytes, [`decode`] turns bytes from anywhere back into a
//! `Patch` or one clear [`Error`]. Decoding validates: every index, range, alignment and size that a later step
//! relies on has been checked when `decode` returns, so that an engine never has to.
//!
//! The caller guarantees nothing: input is hostile. The crate guarantees that decoding neither panics nor allocates
//! more than a small multiple of the input's length. It does not judge whether the code inside is good: that is the
//! differ's work, and trust is the signature's ([`Signed`]).
//!
//! ```text
//! magic "STILLPT\n" | version u32 | flags u32 | body length u64 | SHA-256 of body | [key id 8 | ed25519 signature 64] | body
//! ```
//! Integers are little-endian; the body is `postcard`. The signature covers everything before it.
#![forbid(unsafe_code)]

mod error;
mod file;
mod model;
mod names;
mod validate;

pub use error::Error;
pub use file::{KeyId, PublicKey, SecretKey, Signed, VERSION, decode, encode, encode_signed};
pub use model::*;
pub use names::{readable, readable_short};
pub use validate::is_patch_name;
