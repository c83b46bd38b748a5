//! FOAM images: checkpointed memory in files in which the place of a page is its address.
//!
//! **The caller must** do all reading and writing: this crate only computes the places. The caller must write an
//! [`Index`] only when every page that the index names is on disk, and must treat a directory without an index as no
//! checkpoint.
//!
//! **Guaranteed:** incremental passes overwrite pages in place, so a memory has one file and no chain of images to
//! search; [`Memory::end_pass`] returns the ranges that the last pass no longer has, so that the caller punches them
//! out. An index that [`Index::decode`] accepts names each page once, inside the address space, with its place and a
//! digest of the group of its checksum, and no file outside of its directory; one flipped bit anywhere is found, in
//! checksums when they are read. [`Pending`] never returns the image of a page that has been settled once or that the
//! process has given up.
//!
//! **It does not** know the meaning of a page, the location of files, or the process that is to be restored.
//!
//! ```text
//! sparse:  place(a) = a
//! dense:   place(a) = position of a's window * 1 GiB + a mod 1 GiB      (file systems that limit files to 16 TiB)
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
//! memory.keep_unchanged(0x7f00_0000_0000, 128)?;
//! assert_eq!(memory.end_pass(), [(0x7f00_0008_0000, 0x7f00_0010_0000)]);
//! assert_eq!(Pending::of(memory.extents()).bytes(), 128 * 4096);
//! # Ok(())
//! # }
//! ```
//!
//! Follows section 5.1 of "Instant OS Updates via Userspace Checkpoint-and-Restart" (ATC 2016), file-offset-based address
//! mapping; checksums, the seal and the dense form are ours.
#![forbid(unsafe_code)]

mod checksum_groups;
mod checksums;
mod error;
mod extent;
mod index;
mod memory;
mod object;
mod pending;
mod placement;

pub use checksum_groups::ChecksumGroups;
pub use checksums::{Checksums, PageChecksum, is_zero, page_checksum};
pub use error::Error;
pub use extent::{Extent, Extents, LAZY, PRESENT};
pub use index::{CompanionFile, HEADER_BYTES, Index, Origin, Recorded};
pub use memory::Memory;
pub use object::Object;
pub use pending::{Pending, Run};
pub use placement::{Form, Placement};
