//! FOAM images: checkpointed memory in files in which a page's place is its address.
//!
//! **The caller must** do all reading and writing: this crate says what goes where. It must write an [`Index`] only when
//! every page that the index names is on disk, and take a checkpoint without one for none.
//!
//! **Guaranteed:** incremental passes overwrite pages in place, so there is one file for a memory and no chain of images to
//! search; ranges that a later pass no longer has come back from [`Memory::end_pass`], to be punched out. An index that
//! [`Index::decode`] accepts names each page once, inside the address space, with its place and a digest of its checksum's
//! neighbours, and no file outside of its directory; one flipped bit anywhere is found, in checksums when they are read. [`Pending`] never leads back to the image of a page that
//! has come once or that the process has given up.
//!
//! **It does not** know what a page means, where files lie, or who is to be restored.
//!
//! ```text
//! sparse:  place(a) = a
//! dense:   place(a) = position of a's window * 1 GiB + a mod 1 GiB      (file systems whose files end at 16 TiB)
//! zeros:   not stored; a hole reads as zeros
//! ```
//!
//! An example:
//!
//! ```
//! use stillpoint_kernel_foam::{LAZY, Memory, Object, PRESENT, Pending};
//!
//! # fn main() -> Result<(), stillpoint_kernel_foam::Error> {
//! let mut memory = Memory::new(Object::Task(4121));
//! memory.begin_pass();
//! memory.add(0x7f00_0000_0000, 256, LAZY | PRESENT)?;
//! memory.end_pass();
//! memory.begin_pass(); // half of it has not changed, the rest is gone
//! memory.carry(0x7f00_0000_0000, 128)?;
//! assert_eq!(memory.end_pass(), [(0x7f00_0008_0000, 0x7f00_0010_0000)]);
//! assert_eq!(Pending::of(memory.extents()).bytes(), 128 * 4096);
//! # Ok(())
//! # }
//! ```
//!
//! Follows section 5.1 of "Instant OS Updates via Userspace Checkpoint-and-Restart" (ATC 2016), file-offset-based address
//! mapping; checksums, the seal and the dense form are ours.
#![forbid(unsafe_code)]

mod error;
mod extent;
mod groups;
mod index;
mod memory;
mod pending;
mod placement;
mod sums;

pub use error::Error;
pub use extent::{Extent, Extents, LAZY, PRESENT};
pub use groups::SumGroups;
pub use index::{Beside, HEADER, Index, Origin, Recorded};
pub use memory::Memory;
pub use pending::{Pending, Run};
pub use placement::{Form, Placement};
pub use sums::{PageSum, Sums, is_zero, sum};

use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Whose memory an image holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Object {
    /// The private memory of a process.
    Task(u32),
    /// A shared memory, by criu's number for it.
    Shmem(u64),
}

impl Object {
    /// The name of its file.
    pub fn file_name(&self) -> String {
        match self {
            Object::Task(pid) => format!("foam-task-{pid}.img"),
            Object::Shmem(id) => format!("foam-shmem-{id}.img"),
        }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Task(pid) => write!(f, "process {pid}"),
            Object::Shmem(id) => write!(f, "shared memory {id}"),
        }
    }
}
