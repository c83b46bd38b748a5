//! Shared code of the fuzz targets: their first inputs, and headers with a correct checksum.
//!
//! The caller runs the targets through `make fuzz`. Guarantees: with `STILLPOINT_FUZZ_SEED=DIR` a target writes its first inputs into `DIR`
//! before it runs any. It judges nothing; a target panics when a property does not hold.

use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// Writes first inputs, made by `inputs`, if `STILLPOINT_FUZZ_SEED` is set; call it from `init:` of a target.
pub fn seed(inputs: impl FnOnce() -> Vec<Vec<u8>>) {
    let Some(dir) = std::env::var_os("STILLPOINT_FUZZ_SEED").map(PathBuf::from) else { return };
    for input in inputs() {
        let name: String = Sha256::digest(&input).iter().take(10).map(|b| format!("{b:02x}")).collect();
        std::fs::write(dir.join(name), input).expect("write a first input");
    }
}

/// ELF files of any Debian system: executables and a shared library, the smaller ones.
pub fn elf_files() -> Vec<Vec<u8>> {
    ["/usr/bin/true", "/usr/bin/setpriv", "/lib/x86_64-linux-gnu/libdl.so.2"]
        .iter()
        .filter_map(|path| std::fs::read(path).ok())
        .collect()
}
