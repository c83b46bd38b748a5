//! Policy for the makers of patches, and the trusted keys.

use crate::error::{Error, Of};
use crate::patch_file::PatchFile;
use std::path::{Path, PathBuf};
use stillpoint_host::trusted::Directory;
use stillpoint_patch_format::{PublicKey, Signed};

/// Size limit of a public key's file in bytes.
const KEY_LEN_MAX: u64 = 4 << 10;

/// Patches to accept.
#[derive(Debug, Clone)]
pub enum Policy {
    /// Any file.
    Any,
    /// Files signed by a key whose public key is in this directory. Root alone may be able to change it.
    Signed(PathBuf),
}

/// Keys of which one must have signed a patch; `None` if any patch is accepted.
pub struct Keys(Option<Vec<PublicKey>>);

impl Policy {
    /// Reads the trusted keys.
    ///
    /// # Errors
    /// Users other than root can change the directory or one of its files, one is not a key, or there is none.
    pub fn keys(&self) -> Result<Keys, Error> {
        match self {
            Policy::Any => Ok(Keys(None)),
            Policy::Signed(directory) => trusted(directory).map(|keys| Keys(Some(keys))),
        }
    }

    /// Reads the trusted keys, and decodes a patch file as [`Keys::check`] does.
    ///
    /// # Errors
    /// Those of [`Policy::keys`] and [`Keys::check`].
    pub fn check(&self, file: &PatchFile) -> Result<(Signed, Option<String>), Error> {
        self.keys()?.check(file)
    }
}

impl Keys {
    /// Decodes a patch file; returns with it the key that signed it, verified, if the policy requires one.
    ///
    /// # Errors
    /// It is not a patch, or is not signed as the policy requires.
    pub fn check(&self, file: &PatchFile) -> Result<(Signed, Option<String>), Error> {
        let at = || file.path.display().to_string();
        let signed = stillpoint_patch_format::decode(&file.bytes).of(at)?;
        let signer = self.0.as_ref().map(|keys| signed.verify(keys).of(at)).transpose()?.map(|key| key.to_string());
        Ok((signed, signer))
    }
}

fn trusted(directory: &Path) -> Result<Vec<PublicKey>, Error> {
    let at = || format!("key directory {}", directory.display());
    let opened = Directory::open_of_root(directory).of(at)?;
    let mut keys = Vec::new();
    for name in opened.names().of(at)? {
        if Path::new(&name).extension().is_none_or(|e| e != "pub") {
            continue;
        }
        let at = || directory.join(&name).display().to_string();
        let text = String::from_utf8(opened.read(&name, KEY_LEN_MAX)?).of(at)?;
        keys.push(PublicKey::parse(&text).of(at)?);
    }
    if keys.is_empty() {
        return Err(Error::Refused(format!("{} contains no *.pub file", at())));
    }
    Ok(keys)
}
