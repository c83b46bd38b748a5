//! ELF files mapped by a process, judged by what is in memory.

use crate::Mapping;
use stillpoint_patch_format::{Avma, BuildId, Svma};

/// An ELF file mapped into a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Path as the process's namespace sees it, or `[vdso]`.
    pub path: String,
    /// Whether it is the main executable.
    pub executable: bool,
    /// What to add to a stated address to get the actual one.
    pub bias: u64,
    /// From the note in the *mapped* memory; `None` when it has none.
    pub build_id: Option<BuildId>,
    /// Its dynamic section, if it has one.
    pub dynamic: Option<Avma>,
    /// Its mappings, ascending.
    pub mappings: Vec<Mapping>,
    /// Device and inode of the file.
    pub file: ((u32, u32), u64),
    /// The file on disk was deleted or replaced.
    pub deleted: bool,
}

impl Module {
    /// Actual address of a stated one.
    pub fn avma(&self, at: Svma) -> Avma {
        Avma(at.0.wrapping_add(self.bias))
    }

    /// Stated address of an actual one.
    pub fn svma(&self, at: Avma) -> Svma {
        Svma(at.0.wrapping_sub(self.bias))
    }

    /// Whether one of its mappings contains an address.
    pub fn contains(&self, at: Avma) -> bool {
        self.mappings.iter().any(|m| m.contains(at))
    }
}

/// Which C library a process maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Libc {
    /// The GNU C library.
    Glibc {
        /// Version, for instance `(2, 36)`.
        version: (u32, u32),
        /// Its banner, for instance `GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36.`.
        banner: String,
    },
    /// musl.
    Musl,
    /// None that is known.
    Unknown,
}
