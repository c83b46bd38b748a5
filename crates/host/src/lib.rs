//! Services of the machine that all pillars share: the cache of everything that is downloaded or built, files that are written completely
//! or not at all, directories that no other user can redirect, trees whose contents others wrote, the kernel's own files, the filter for
//! untrusted text, the processes of systemd's services, and the C library's look-up of names.
//!
//! The caller guarantees that a maker of a cache entry writes only into the directory that it is given, and that an entry's name ends in a
//! hash of everything that its contents depend on.
//!
//! The crate guarantees that an entry is returned only when everything that its manifest lists is there, even after a process was killed or
//! files were truncated or removed; that eviction keeps entries that a process uses; that no removal follows a link or enters a mount; and
//! that a process counts as a service's only if it is in the control group that the system's manager made for the service. After a failure
//! the cache holds complete entries, and remains that the next use removes.
//!
//! It does not compare the contents of directory entries: other bytes in a file of the same size are not detected. File entries carry a
//! checksum.
//!
//! ```text
//!   absent --make into NAME.half--> half --rename--> NAME --NAME.manifest--> whole --used--> whole
//!     ^                              |                |                       |
//!     +---- ROOT/trash, removed -----+----------------+---- damaged, evicted -+
//! ```
//!
//! ```
//! use stillpoint_host::{Cache, Error, EntryName};
//! let dir = tempfile::tempdir().unwrap();
//! let cache = Cache::at(&dir.path().join("cache"))?;
//! let path = cache.entry(&EntryName::new("demo", "greeting-1"), |into| {
//!     std::fs::write(into.join("text"), "hello").unwrap();
//!     Ok::<(), Error>(())
//! })?;
//! assert!(path.join("text").exists());
//! # Ok::<(), Error>(())
//! ```
#![deny(unsafe_code)]

pub mod cache;
pub mod clock;
mod error;
pub mod file;
pub mod kernel_files;
#[allow(unsafe_code)]
pub mod names;
pub mod systemd;
pub mod text;
pub mod trusted;
pub mod untrusted;

pub use cache::{Cache, EntryName};
pub use error::{At, Error};
