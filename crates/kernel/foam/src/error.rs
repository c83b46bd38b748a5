//! Errors of an image, or of memory that is to be put into one.

use crate::Object;

/// Reason for which memory cannot be recorded, or an index cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A range is empty, not of whole pages, or beyond the address space.
    #[error("range of {pages} pages at {start:#x} is not a range of memory")]
    Range {
        /// Address of its first page.
        start: u64,
        /// Number of pages that it claims to have.
        pages: u64,
    },
    /// An incremental pass says that a page has not changed, but no earlier pass has it.
    #[error("page {start:#x} of {object} is not in an earlier pass, as criu reports")]
    NotInParent {
        /// The memory that the page belongs to.
        object: Object,
        /// Address of the first such page.
        start: u64,
    },
    /// A page that was never stored is requested, or a page is stored twice in one pass.
    #[error("page {start:#x} of {object} {why}")]
    Page {
        /// The memory that the page belongs to.
        object: Object,
        /// Its address.
        start: u64,
        /// Description of the fault.
        why: &'static str,
    },
    /// The bytes are not an index, or not a whole one.
    #[error("the index {0}")]
    Index(String),
}
