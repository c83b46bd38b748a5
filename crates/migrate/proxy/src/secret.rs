//! Secrets with which a session can log in at another server. They are wiped when dropped and never shown.

use std::fmt;
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_migrate_wire::md5;
use stillpoint_migrate_wire::scram::{Keys, Secret, Transcript, Verifier};
use zeroize::Zeroizing;

/// Size limit of the file of the secret, in bytes; one of another length is replaced.
const FILE_MAX: u64 = 4096;

/// Random bytes for a SCRAM nonce.
pub(crate) fn nonce() -> [u8; 18] {
    let mut bytes = [0; 18];
    random(&mut bytes);
    bytes
}

/// Fills `bytes` with random bytes.
pub(crate) fn random(bytes: &mut [u8]) {
    let mut at = 0;
    while at < bytes.len() {
        // The kernel has entropy long before a proxy starts; an interrupted call is repeated.
        if let Ok(n) = rustix::rand::getrandom(&mut bytes[at..], rustix::rand::GetRandomFlags::empty()) {
            at += n;
        }
    }
}

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
        random(&mut secret);
        directory.write_synced(name, &secret)?;
        Ok(MockSecret(secret))
    }

    /// Mock verifier for a role that has none.
    pub(crate) fn verifier(&self, user: &str, like: Option<&Verifier>) -> Verifier {
        Verifier::mock(&self.0, user, like)
    }
}

/// Secret or proof that the client's login left in the proxy.
#[derive(Clone, Default)]
pub(crate) enum Login {
    /// The client was let in without a password.
    #[default]
    Trusted,
    /// The client sent its password.
    Password(Zeroizing<Vec<u8>>),
    /// The client proved its password by MD5, from which no secret can be computed.
    Md5,
    /// The client proved its password to the server by SCRAM, in an exchange that passed through the proxy.
    Heard(Transcript),
    /// The client proved its password to the proxy by SCRAM.
    Keys(Keys),
}

/// A login, with the role's stored password if it was given.
#[derive(Clone, Default)]
pub(crate) struct Credential {
    pub(crate) login: Login,
    pub(crate) stored: Option<Zeroizing<String>>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.login {
            Login::Trusted => "Credential(trusted)",
            Login::Password(_) => "Credential(password)",
            Login::Md5 => "Credential(md5)",
            Login::Heard(_) | Login::Keys(_) => "Credential(scram)",
        })
    }
}

impl Credential {
    /// Password in plain text, if the client sent it.
    pub(crate) fn password(&self) -> Option<&[u8]> {
        match &self.login {
            Login::Password(password) => Some(password),
            _ => None,
        }
    }

    /// Stored form of MD5.
    pub(crate) fn md5(&self, user: &str) -> Option<Zeroizing<String>> {
        let stored = self.stored.as_ref().filter(|stored| stored.starts_with("md5")).cloned();
        stored.or_else(|| self.password().map(|password| md5::stored(password, user.as_bytes())))
    }

    /// Secret for a SCRAM login.
    pub(crate) fn scram(&self) -> Result<Secret, String> {
        match &self.login {
            Login::Password(password) => Ok(Secret::Password(password.clone())),
            Login::Keys(keys) => Ok(Secret::Keys(keys.clone())),
            Login::Heard(transcript) => {
                let stored = self.stored.as_ref().ok_or("the verifier of this role was not given")?;
                let verifier = Verifier::parse(stored).map_err(|error| error.to_string())?;
                transcript.recover(&verifier).map(Secret::Keys).map_err(|error| error.to_string())
            }
            Login::Trusted | Login::Md5 => Err("it asks for a password, and the client gave none by SCRAM".into()),
        }
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
