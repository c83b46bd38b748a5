//! Why bytes are not a patch file that may be used.

/// Why bytes are not a patch file that may be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shorter than its header or its header's promise.
    #[error("patch file is truncated: {have} bytes of {need}")]
    Truncated {
        /// Bytes there.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// Bytes after the end.
    #[error("patch file has {0} bytes after its end")]
    TrailingBytes(usize),
    /// Not a patch file at all.
    #[error("not a stillpoint patch file")]
    Magic,
    /// Made by another version.
    #[error("patch file has format version {0}, this program reads version {VERSION}", VERSION = crate::VERSION)]
    Version(u32),
    /// Header flags that this version does not know.
    #[error("patch file has unknown flags {0:#x}")]
    Flags(u32),
    /// The body is not what was written.
    #[error("patch file is damaged: checksum of its body does not match")]
    Checksum,
    /// The body does not decode.
    #[error("patch file is damaged: {0}")]
    Body(#[from] postcard::Error),
    /// The body decodes, and contradicts itself.
    #[error("patch file is inconsistent: {0}")]
    Inconsistent(String),
    /// The signature is missing.
    #[error("patch file is not signed")]
    Unsigned,
    /// The signature is by a key that is not trusted.
    #[error("patch file is signed by key {0}, which is not trusted")]
    UnknownKey(crate::KeyId),
    /// The signature is wrong.
    #[error("signature of the patch file by key {0} is wrong")]
    Signature(crate::KeyId),
    /// A key is not one.
    #[error("not an ed25519 key: {0}")]
    Key(String),
}
