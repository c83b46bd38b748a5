//! `/proc/PID/maps`.

use stillpoint_patch_format::Avma;

/// One line of `maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First byte.
    pub start: Avma,
    /// One past the last byte.
    pub end: Avma,
    /// Readable.
    pub read: bool,
    /// Writable.
    pub write: bool,
    /// Executable.
    pub execute: bool,
    /// Shared with whoever maps the same file.
    pub shared: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Device, major and minor.
    pub device: (u32, u32),
    /// Inode, 0 where there is no file.
    pub inode: u64,
    /// Path as the process's namespace sees it, or a name in brackets; without the kernel's ` (deleted)`.
    pub path: Option<String>,
    /// The file was deleted or replaced.
    pub deleted: bool,
}

impl Mapping {
    /// Whether it contains an address.
    pub fn contains(&self, at: Avma) -> bool {
        self.start <= at && at < self.end
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Mappings are never empty.
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }
}
