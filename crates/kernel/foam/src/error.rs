//! What can be wrong with an image, or with what is to be put into one.

use crate::Object;

/// Why memory cannot be recorded, or an index cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A range is empty, not of whole pages, or beyond the address space.
    #[error("range of {pages} pages at {start:#x} is no range of memory")]
    Range {
        /// Where it begins.
        start: u64,
        /// How many pages it claims to have.
        pages: u64,
    },
    /// An incremental pass says that a page has not changed, and no earlier pass has it.
    #[error("page {start:#x} of {object} is said to be in an earlier pass, and is not")]
    NotInParent {
        /// Whose page.
        object: Object,
        /// The first such page.
        start: u64,
    },
    /// Pages that were never stored are asked for, or stored twice in one pass.
    #[error("page {start:#x} of {object} {why}")]
    Page {
        /// Whose page.
        object: Object,
        /// Its address.
        start: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The bytes are no index, or not a whole one.
    #[error("the index {0}")]
    Index(String),
}
