//! Errors for an entry that cannot be redirected, or code that cannot be placed.

use stillpoint_patch_format::{Avma, Svma};

/// The reason why an entry cannot be redirected, or why code cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The function has fewer bytes than a jump needs, and no padding follows it.
    #[error("the function at {start} has {len} bytes, but a jump needs {need}", need = crate::JUMP_LEN)]
    TooShort {
        /// Entry of the function.
        start: Svma,
        /// Length of the function in bytes.
        len: usize,
    },
    /// The rest of the function branches to bytes that the jump overwrites.
    #[error("function at {start}: the branch at {from} goes to {to}, which a jump at the entry overwrites")]
    BranchIntoEntry {
        /// Entry of the function.
        start: Svma,
        /// The branch.
        from: Svma,
        /// Target of the branch.
        to: Svma,
    },
    /// The bytes are not an instruction.
    #[error("function at {start}: no instruction can be decoded at {at}")]
    Undecodable {
        /// Entry of the function.
        start: Svma,
        /// Address at which decoding stopped.
        at: Svma,
    },
    /// An instruction of the prologue has another meaning at another address.
    #[error("function at {start}: `{instruction}` at {at} cannot be moved: {why}")]
    NotRelocatable {
        /// Entry of the function.
        start: Svma,
        /// The instruction.
        at: Svma,
        /// Text of the instruction.
        instruction: String,
        /// Reason.
        why: &'static str,
    },
    /// A 32-bit distance does not reach.
    #[error("{to} is out of reach of a jump at {at}")]
    OutOfReach {
        /// The jump.
        at: Avma,
        /// Target of the jump.
        to: Avma,
    },
}
