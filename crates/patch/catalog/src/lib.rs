//! Patches on disk: patch files, the policy for their makers, and the patches that are enabled for units of systemd.
//!
//! ```text
//! /etc/stillpoint/keys/*.pub                                                       whose signatures the policy accepts
//! /var/lib/stillpoint/enabled/redis-server.service/0001-CVE-2026-25243.patch       enabled, in the order of their names
//! /etc/systemd/system/redis-server.service.d/90-stillpoint.conf                    starts the service through `patch exec`
//! ```
//!
//! The caller must run as root to enable patches. A patch file that any user may own is read once: the checked bytes are
//! the bytes that are stored and applied.
//!
//! The crate guarantees that keys and enabled patches are read only from files that root alone can change, that a patch
//! is enabled only if a start would activate it (its base is enabled below it, and the unit's program is the build that
//! it is for), and that each file is written completely or not at all.
//!
//! It changes no process, and prints nothing.
#![forbid(unsafe_code)]

mod addition;
mod bases;
pub mod drop_in;
mod enabled;
mod error;
mod executables;
mod patch_file;
mod policy;
mod root;
mod unit_file;

pub use addition::{Addition, Candidate};
pub use bases::{MissingBase, lost_base};
pub use enabled::Enabled;
pub use error::Error;
pub use executables::Executables;
pub use patch_file::PatchFile;
pub use policy::{Keys, Policy};
pub use root::Root;
pub use unit_file::Service;
