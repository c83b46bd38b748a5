//! Why an entry cannot be redirected, or code cannot be placed.

use stillpoint_patch_format::{Avma, Svma};

/// Why an entry cannot be redirected, or code cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Fewer bytes than a jump needs, and no padding behind them.
    #[error("function at {start} has {len} bytes, a jump needs {need}", need = crate::JUMP_LEN)]
    TooShort {
        /// Entry of the function.
        start: Svma,
        /// Its bytes.
        len: usize,
    },
    /// The rest of the function jumps to bytes that the jump overwrites.
    #[error("function at {start}: the branch at {from} goes to {to}, which the jump at the entry overwrites")]
    BranchIntoEntry {
        /// Entry of the function.
        start: Svma,
        /// The branch.
        from: Svma,
        /// Where it goes.
        to: Svma,
    },
    /// Not an instruction.
    #[error("function at {start}: no instruction can be decoded at {at}")]
    Undecodable {
        /// Entry of the function.
        start: Svma,
        /// Where decoding stopped.
        at: Svma,
    },
    /// An instruction of the prologue means something else elsewhere.
    #[error("function at {start}: `{instruction}` at {at} cannot be moved: {why}")]
    NotRelocatable {
        /// Entry of the function.
        start: Svma,
        /// The instruction.
        at: Svma,
        /// Its text.
        instruction: String,
        /// Why.
        why: &'static str,
    },
    /// A 32-bit distance does not reach.
    #[error("{to} is out of reach of a jump at {at}")]
    OutOfReach {
        /// The jump.
        at: Avma,
        /// Where it should go.
        to: Avma,
    },
}
