//! What criu may send or write that is not what its formats allow.

/// Why bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A page-server message with a command that there is not.
    #[error("page-server message with command {0:#x}")]
    Command(u32),
    /// A page-server message about a kind of memory that there is not.
    #[error("page-server message about memory {0:#x}, which is neither a process's nor shared")]
    Destination(u64),
    /// A message or an image with a range of pages that cannot be.
    #[error("range of {pages} pages at {start:#x}")]
    Pages {
        /// Where.
        start: u64,
        /// How many.
        pages: u64,
    },
    /// The first page-server message has neither form of header.
    #[error("first page-server message has a header of neither form")]
    Form,
    /// An image file is not of the kind that its name says.
    #[error("image begins with {found:#010x}, expected {expected:#010x}")]
    Magic {
        /// What stands there.
        found: u32,
        /// What should.
        expected: u32,
    },
    /// An image file ends in the middle of an entry.
    #[error("image ends within an entry at byte {0}")]
    Short(usize),
    /// An entry does not decode.
    #[error("{what} does not decode: {why}")]
    Message {
        /// Which.
        what: &'static str,
        /// What the decoder says.
        why: String,
    },
    /// The lazy-pages socket brought a number that means nothing.
    #[error("lazy-pages socket brought process id {0}")]
    Pid(i32),
}
