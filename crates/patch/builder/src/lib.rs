//! Drives compilers and Debian source packages: from source diffs to a live patch.
//!
//! The caller names a program as it runs ("Debian's redis-server without its CVE fixes", or a source directory with its
//! compile commands), the diffs that are already active, and the diffs that make the patch. The builder finds the units
//! that change, compiles each of them three times, and passes the objects to [`stillpoint_patch_differ`].
//!
//! ```text
//!   shipped ----- base diffs -----> before ----- the patch's diffs -----> after      three source trees
//!      |                              |                                     |
//!   exact flags               sections, -g                          sections, -g     one object of a unit in each
//!      |                              |                                     |
//!   placed in the target              +---- code compared -----------------+         the differ
//!      +---------------- types compared ------------------------------------+
//! ```
//!
//! A unit is compiled only if its preprocessed text differs between *before* and *after* in more than declarations of C
//! functions that nothing in it uses. Code that a diff does not touch keeps the line numbers it was shipped with
//! ([`numbering`]), so that `__LINE__` in an assert makes no difference. Every tree is mounted at the same path while
//! it is compiled, in a private mount namespace; for packages inside a clean root that holds the build dependencies and
//! nothing else.
//!
//! Each file that a diff changes gets a verdict ([`Verdict`]). A file that no unit of the target reads is left out only
//! if the target's objects are all accounted for ([`account`]): a recorded command made each input of its link. Links,
//! and copies that the build made, count as the same file (`aliases`). A file that cannot be attributed refuses the patch
//! ([`Error::Unaccounted`]), so that "nothing to patch" is reported only for known files.
//!
//! **The caller must guarantee** that the source is the one that the program was built from. The differ verifies it:
//! machine code that is not in the target, byte for byte, refuses the patch.
//!
//! **It guarantees** that the user's sources and the system's package configuration are never written to, that cached
//! results are complete or absent, and that several builders may share one cache. A failure leaves nothing but cached
//! intermediate results.
//!
//! **Versions.** An archive may list a version and answer 404 for its files. Without a version the builder takes the
//! newest one that is served, and reports it ([`Event::VersionChosen`]); with one, [`Error::Withheld`] names the newest
//! that is served. Only an answer of a server counts as absence: a network failure is an error.
//!
//! **It does not** run configure steps or generators again for the *after* side: a diff of a build file is refused.
//! Nothing of an unpacked package is installed or run on this system; package builds run in the clean root, without
//! network.
//!
//! ```no_run
//! use stillpoint_patch_builder::{Builder, Cache, DebianRequest, Shipped, ShippedAs, Statement};
//! let builder = Builder::new(Cache::open()?, 2, &|event| eprintln!("{event}"));
//! let request = DebianRequest {
//!     package: "redis".into(),
//!     version: None,
//!     quilt: vec!["CVE-2025-49844".into()],
//!     diffs: Vec::new(),
//!     on_top_of: Vec::new(),
//!     shipped: ShippedAs::Series(Shipped::WithoutCves),
//!     integrated: None,
//!     binary: Some("redis-server".into()),
//!     names: Vec::new(),
//!     is_partial: false,
//! };
//! let built = builder.build_debian(&request, &Statement::default())?;
//! println!("{:?}", built.report.changed);
//! # Ok::<(), stillpoint_patch_builder::Error>(())
//! ```
//!
//! The comparison of objects follows kpatch; the recovery of a stripped program's names by compiling it again is ours.
#![forbid(unsafe_code)]

mod account;
mod aliases;
mod apt;
#[cfg(test)]
mod attribution_tests;
mod build;
mod builder;
mod commands;
mod compile;
mod debian;
pub mod diff;
mod elf;
mod error;
mod event;
mod evidence;
mod exclusions;
mod fetch_failure;
mod generators;
mod includes;
mod integration;
mod keys;
mod keywords;
mod lenders;
mod link;
mod lto;
pub mod numbering;
mod older_packages;
mod outline;
mod output_search;
mod package;
mod partial;
mod preprocess;
mod recorder;
mod regenerate;
mod request;
mod root;
mod running;
mod sandbox;
mod shadow_members;
mod sources;
mod statement;
mod tree;

mod unused_declarations;
mod verdict;
mod version_difference;
mod wanted_program;

pub use build::{Built, LeftOut, Report};
pub use builder::Builder;
pub use debian::{Diff, Series};
pub use elf::Reproduced;
pub use error::Error;
pub use event::{Event, Withheld};
pub use exclusions::Parts;
pub use integration::Integrated;
pub use keys::{KeyFiles, generate_key, read_secret_key};
pub use older_packages::OlderPackages;
pub use package::{BuiltPackage, Shipped, SourcePackage};
pub use request::{DebianRequest, ShippedAs, SourceRequest};
pub use running::Plan;
pub use shadow_members::{Proposal, ShadowMembers};
pub use statement::Statement;
pub use stillpoint_host::Cache;
pub use stillpoint_host::file::{Readable, write_whole};
pub use stillpoint_patch_differ::{HookNames, Refusal};
pub use stillpoint_patch_shadow::ShadowMember;
pub use verdict::{ChangedFile, Verdict};

/// Header and source of shadow variables, for hooks.
pub const SHADOW_SOURCES: [(&str, &str); 2] = [
    ("stillpoint-shadow.h", include_str!("../hooks/stillpoint-shadow.h")),
    ("stillpoint-shadow.c", include_str!("../hooks/stillpoint-shadow.c")),
];
