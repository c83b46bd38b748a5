//! What the builder wants to know of an ELF file before the differ reads it.

use object::{Object, ObjectKind};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Whether a file is an executable or a shared library.
pub(crate) fn is_loadable(path: &Path) -> bool {
    let mut magic = [0u8; 4];
    let starts = File::open(path).and_then(|mut f| f.read_exact(&mut magic)).is_ok() && &magic == b"\x7fELF";
    starts
        && std::fs::read(path).is_ok_and(|bytes| {
            object::File::parse(&bytes[..])
                .is_ok_and(|f| matches!(f.kind(), ObjectKind::Executable | ObjectKind::Dynamic))
        })
}

/// The GNU build-id of an ELF file.
pub(crate) fn build_id(bytes: &[u8]) -> Option<Vec<u8>> {
    object::File::parse(bytes).ok()?.build_id().ok()?.map(<[u8]>::to_vec)
}
