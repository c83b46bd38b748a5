//! Key files.

use crate::{Error, Readable, write_whole};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use stillpoint_host::At;
use stillpoint_host::file::open_regular;
use stillpoint_host::untrusted::Tree;
use stillpoint_patch_format::{PublicKey, SecretKey};

/// Size limit of a key file, in bytes; a longer one is no key.
const KEY_MAX: u64 = 64 << 10;

/// A pair of key files.
#[derive(Debug)]
pub struct KeyFiles {
    /// `stillpoint-ID.key`, mode 0600.
    pub secret: PathBuf,
    /// `stillpoint-ID.pub`, mode by the umask.
    pub public: PathBuf,
    /// The public half.
    pub key: PublicKey,
}

/// Makes a key from the system's random numbers and writes both halves into `directory`.
///
/// # Errors
/// The system gives no random numbers, or a file cannot be written.
pub fn generate_key(directory: &Path) -> Result<KeyFiles, Error> {
    let mut seed = [0u8; 32];
    let mut filled = 0;
    while filled < seed.len() {
        filled += rustix::rand::getrandom(&mut seed[filled..], rustix::rand::GetRandomFlags::empty())
            .map_err(std::io::Error::from)
            .at("reading", Path::new("getrandom"))?;
    }
    let secret_key = SecretKey::from_seed(seed);
    let key = secret_key.public();
    Tree::make(directory)?;
    let secret = directory.join(format!("stillpoint-{}.key", key.id()));
    let public = directory.join(format!("stillpoint-{}.pub", key.id()));
    write_whole(&secret, secret_key.to_text().as_bytes(), Readable::ByOwner)?;
    write_whole(&public, key.to_text().as_bytes(), Readable::ByOthers)?;
    Ok(KeyFiles { secret, public, key })
}

/// Reads a secret key file; a file that other users may read is refused.
///
/// # Errors
/// The file cannot be read, other users may read it ([`Error::Malformed`]), or it contains no key ([`Error::Format`]).
pub fn read_secret_key(path: &Path) -> Result<SecretKey, Error> {
    let file = open_regular(path)?;
    let mode = file.metadata().at("reading", path)?.permissions().mode();
    if mode & 0o077 != 0 {
        let why = format!("mode {:04o} lets others read a secret key; chmod 600", mode & 0o7777);
        return Err(Error::Malformed { what: path.display().to_string(), why });
    }
    let mut text = String::new();
    file.take(KEY_MAX).read_to_string(&mut text).at("reading", path)?;
    Ok(SecretKey::parse(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn keys_come_back_from_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let files = generate_key(dir.path()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&files.secret), 0o600);
        assert_ne!(mode(&files.public), 0o600, "the umask of a test run lets others read");
        assert_eq!(read_secret_key(&files.secret).unwrap().public().id(), files.key.id());
        let public = PublicKey::parse(&fs::read_to_string(&files.public).unwrap()).unwrap();
        assert_eq!(public.id(), files.key.id());
        fs::set_permissions(&files.secret, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read_secret_key(&files.secret).unwrap_err().to_string().contains("mode 0640"));
        assert_ne!(generate_key(dir.path()).unwrap().key.id(), files.key.id());
    }
}
