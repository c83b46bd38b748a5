//! Provenance: from a running process to the package and version of every file that it maps, and to what the archive offers instead.
//!
//! Compiles nothing and needs no compiler; nothing on the machine is changed, and no process is stopped.
//!
//! The caller chooses processes and directories of packages. What dpkg's database, packages, trackers and processes contain is not trusted:
//! files are read through `stillpoint_host`'s checked openers, up to limits, and a damaged entry hides no other one.
//!
//! **It guarantees** that a version is stated only with its [`Evidence`]: the package's checksum, a build-id, or the time that the build gave to the file.
//! What it could not look at is a result of its own ([`scan::Unseen`]), never a file that is up to date.
#![forbid(unsafe_code)]

mod archive;
mod changelog;
mod cve;
mod database;
pub mod deb822;
mod elf;
mod error;
mod mapped;
mod origin;
mod package_index;
mod program;
pub mod scan;
mod tracker;
mod version;

pub use changelog::Changelog;
pub use cve::cves;
pub use database::{Database, Owner, Package};
pub use elf::ElfIdentity;
pub use error::Error;
pub use mapped::{MappedFile, ProcessFiles, all_processes};
pub use origin::{Evidence, OnDisk, Origin, Origins, Subject};
pub use package_index::{APT_ARCHIVES, Seen, SeenPackages, each_archived_file, unpacked_name};
pub use program::Program;
pub use tracker::{Release, Tracker};
pub use version::{compare as compare_versions, is_package, is_version, without_rebuild};
