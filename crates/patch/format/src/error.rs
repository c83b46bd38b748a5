//! Errors for bytes that are not a usable patch file.

/// The reason why bytes are not a usable patch file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is shorter than its header, or than the header states.
    #[error("the patch file is truncated: {have} of {need} bytes")]
    Truncated {
        /// Bytes present.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// Bytes after the end.
    #[error("the patch file has {0} bytes after its end")]
    TrailingBytes(usize),
    /// The file does not start with the magic bytes of a patch file.
    #[error("not a stillpoint patch file")]
    Magic,
    /// Another version of the format.
    #[error("the patch file has format version {0}, but this program reads version {VERSION}", VERSION = crate::VERSION)]
    Version(u32),
    /// Header flags that this version does not know.
    #[error("the patch file has unknown flags {0:#x}")]
    Flags(u32),
    /// The checksum of the body does not match.
    #[error("the patch file is damaged: the checksum of its body does not match")]
    Checksum,
    /// The body does not decode.
    #[error("the patch file is damaged: {0}")]
    Body(#[from] postcard::Error),
    /// The body decodes, but it contradicts itself.
    #[error("the patch file is inconsistent: {0}")]
    Inconsistent(String),
    /// The signature is missing.
    #[error("the patch file is not signed")]
    Unsigned,
    /// The file is signed with a key that is not trusted.
    #[error("the patch file is signed by key {0}, which is not trusted")]
    UnknownKey(crate::KeyId),
    /// The signature is wrong.
    #[error("the signature of the patch file by key {0} is invalid")]
    Signature(crate::KeyId),
    /// The text is not an ed25519 key.
    #[error("not an ed25519 key: {0}")]
    Key(String),
}
