//! Secret of the mock exchanges by which a client cannot tell which roles exist.

use std::fmt;
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_migrate_postgres::fill_random;
use stillpoint_migrate_wire::scram::Verifier;

/// Size limit of the file of the secret, in bytes; one of another length is replaced.
const FILE_MAX: u64 = 4096;

/// Secret from which mock exchanges are built: a reader of it can tell which roles exist.
pub(crate) struct MockSecret([u8; 32]);

impl fmt::Debug for MockSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MockSecret")
    }
}

impl MockSecret {
    /// Reads the secret from a file beside the routes, or creates it: the next proxy must ask a role without a verifier
    /// the same. The caller must hold the lock of the routes.
    pub(crate) fn load(routes: &Path) -> Result<MockSecret, stillpoint_host::Error> {
        let path = routes.with_extension("secret");
        let (directory, name) = Directory::of_file(&path)?;
        match directory.read(name, FILE_MAX) {
            Ok(bytes) => {
                if let Ok(secret) = bytes.try_into() {
                    return Ok(MockSecret(secret));
                }
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        let mut secret = [0; 32];
        fill_random(&mut secret);
        directory.write_synced(name, &secret)?;
        Ok(MockSecret(secret))
    }

    /// Mock verifier for a role that has none.
    pub(crate) fn verifier(&self, user: &str, like: Option<&Verifier>) -> Verifier {
        Verifier::mock(&self.0, user, like)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_secret_of_mock_exchanges_outlives_the_proxy() {
        let dir = tempfile::tempdir().unwrap();
        let routes = dir.path().join("routes.json");
        let secret = MockSecret::load(&routes).unwrap();
        assert!(secret.0 != [0; 32] && format!("{secret:?}") == "MockSecret");
        assert!(MockSecret::load(&routes).unwrap().0 == secret.0);
        let path = dir.path().join("routes.secret");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "cut").unwrap();
        assert!(MockSecret::load(&routes).unwrap().0 != secret.0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
