//! The key of this machine, which identifies images that the machine sealed itself.
//!
//! An image is code that runs with the rights that it records. Its directory keeps other users from changing it; an
//! image that was made elsewhere, or was located elsewhere meanwhile, lacks a seal of this machine. The seal is a keyed
//! digest of the header of the index. The header has the digest of the index, and the index has those of criu's files
//! and of the checksums of pages, which are digests themselves: so the key covers all of the image, but only the bytes
//! of the header are digested under it in the freeze.

use crate::Error;
use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use stillpoint_host::trusted::Directory;

/// Path of the file that holds the key.
pub const MACHINE_KEY: &str = "/var/lib/stillpoint/image.key";

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Bytes of a seal.
pub(crate) const SEAL_BYTES: usize = 32;
/// Text for this use of the key: another use would have another text.
const DOMAIN_SEPARATOR: &[u8] = b"stillpoint image\0";

/// The key of a machine.
#[derive(Clone, PartialEq, Eq)]
pub struct MachineKey([u8; KEY_BYTES]);

impl fmt::Debug for MachineKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MachineKey")
    }
}

impl MachineKey {
    /// Reads a key; returns `None` if none has been made.
    ///
    /// # Errors
    /// Another user can read or change it, or the file does not hold a key.
    pub fn read(path: &Path) -> Result<Option<MachineKey>, Error> {
        let opened =
            Directory::of_file(path).and_then(|(directory, name)| Ok((directory.file(name)?, directory, name)));
        let (file, directory, name) = match opened {
            Err(error) if error.is_not_found() => return Ok(None),
            opened => opened?,
        };
        let damaged = |why: &str| Error::Damaged { path: path.to_owned(), why: why.into() };
        if file.metadata().is_ok_and(|file| file.mode() & 0o077 != 0) {
            return Err(damaged("other users can read it: remove it, and stillpoint creates a new one"));
        }
        let bytes = directory.read(name, KEY_BYTES as u64)?;
        let key =
            bytes.try_into().map_err(|_| damaged("it is not a key: remove it, and stillpoint creates a new one"))?;
        Ok(Some(MachineKey(key)))
    }

    /// Reads the key, and makes one at its first use.
    ///
    /// # Errors
    /// As [`MachineKey::read`], or it cannot be made.
    pub(crate) fn read_or_make(path: &Path) -> Result<MachineKey, Error> {
        if let Some(key) = MachineKey::read(path)? {
            return Ok(key);
        }
        let mut key = [0_u8; KEY_BYTES];
        let random = getrandom(&mut key[..], GetRandomFlags::empty());
        if random.map_err(|error| Error::System { action: "make a key", source: error.into() })? != KEY_BYTES {
            return Err(Error::Step { what: "make a key", why: "the kernel returned too few bytes".into() });
        }
        if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
            // enabled patches are also there, which services read
            Directory::make_readable(parent)?;
        }
        let (directory, name) = Directory::of_file(path)?;
        // if several checkpoints begin at the same time, one of them makes it
        directory.write_new(name, &key)?;
        let lost = || Error::Step { what: "make a key", why: format!("another process removed {}", path.display()) };
        MachineKey::read(path)?.ok_or_else(lost)
    }

    /// Returns the seal of an image whose index has this header.
    pub(crate) fn seal(&self, header: &[u8]) -> [u8; SEAL_BYTES] {
        self.mac(header).finalize().into_bytes().into()
    }

    /// Returns true if this key made the seal. The time does not depend on the position of a difference.
    pub(crate) fn is_seal(&self, seal: &[u8; SEAL_BYTES], header: &[u8]) -> bool {
        self.mac(header).verify_slice(seal).is_ok()
    }

    fn mac(&self, header: &[u8]) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.0);
        let mut mac = mac.unwrap_or_else(|_| unreachable!("any length is a key"));
        mac.update(DOMAIN_SEPARATOR);
        mac.update(header);
        mac
    }
}

#[cfg(test)]
impl MachineKey {
    /// Returns a key that all tests know.
    pub(crate) fn plain() -> Self {
        MachineKey([7; KEY_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_made_once_and_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.key");
        assert_eq!(MachineKey::read(&path).unwrap(), None);
        let keys: Vec<MachineKey> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..4).map(|_| scope.spawn(|| MachineKey::read_or_make(&path).unwrap())).collect();
            makers.into_iter().map(|maker| maker.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        let other = MachineKey::read_or_make(&dir.path().join("other.key")).unwrap();
        assert_ne!(other, keys[0]);
        let refused = |why: &str| {
            let error = MachineKey::read_or_make(&path).unwrap_err();
            assert!(error.is_refusal() && error.to_string().contains(why), "{error}");
        };
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        refused("other users can read it");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "short").unwrap();
        refused("it is not a key");
        fs::write(&path, [0; 33]).unwrap();
        refused("more than 32 bytes");
    }

    #[test]
    fn a_seal_is_of_one_key_and_one_header() {
        let (ours, theirs) = (MachineKey::plain(), MachineKey([8; KEY_BYTES]));
        let seal = ours.seal(b"header");
        assert!(ours.is_seal(&seal, b"header"));
        assert!(!theirs.is_seal(&seal, b"header") && !ours.is_seal(&seal, b"heades"));
        for at in 0..SEAL_BYTES {
            let mut other = seal;
            other[at] ^= 1;
            assert!(!ours.is_seal(&other, b"header"), "byte {at}");
        }
        assert_eq!(format!("{ours:?}"), "MachineKey");
    }
}
