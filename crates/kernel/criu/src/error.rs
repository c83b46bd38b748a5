//! Errors of messages and images that violate criu's formats.

/// Reason for which bytes are not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A page-server message has an unknown command.
    #[error("page-server message with command {0:#x}")]
    Command(u32),
    /// A page-server message names an unknown kind of memory.
    #[error("page-server message about memory {0:#x}, which is neither a process's nor shared")]
    Destination(u64),
    /// A message or an image has an impossible range of pages.
    #[error("range of {pages} pages at {start:#x}")]
    Pages {
        /// Address of its first page.
        start: u64,
        /// Number of its pages.
        pages: u64,
    },
    /// The first page-server message has neither form of header.
    #[error("first page-server message has a header of neither form")]
    Form,
    /// An image file is not of the kind in its name.
    #[error("image begins with {found:#010x}, expected {expected:#010x}")]
    Magic {
        /// Number at the start of the file.
        found: u32,
        /// Number for this kind.
        expected: u32,
    },
    /// An image file ends in the middle of an entry.
    #[error("image ends within an entry at byte {0}")]
    Short(usize),
    /// An entry cannot be decoded.
    #[error("{what} does not decode: {why}")]
    Message {
        /// Kind of the entry.
        what: &'static str,
        /// Reason from the decoder.
        why: String,
    },
    /// The lazy-pages socket sent a number without a meaning.
    #[error("lazy-pages socket received process id {0}")]
    Pid(i32),
}
