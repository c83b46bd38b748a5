//! Secrets with which a session can log in at a server. They are wiped when dropped and never shown.

use crate::error::AuthenticationError;
use std::fmt;
use stillpoint_migrate_wire::md5;
use stillpoint_migrate_wire::scram::{Keys, Secret, Transcript, Verifier};
use zeroize::Zeroizing;

/// Random bytes for a SCRAM nonce.
pub fn nonce() -> [u8; 18] {
    let mut bytes = [0; 18];
    fill_random(&mut bytes);
    bytes
}

/// Fills `bytes` with random bytes.
pub fn fill_random(bytes: &mut [u8]) {
    let mut at = 0;
    while at < bytes.len() {
        // The kernel has entropy long before a server runs; an interrupted call is repeated.
        if let Ok(n) = rustix::rand::getrandom(&mut bytes[at..], rustix::rand::GetRandomFlags::empty()) {
            at += n;
        }
    }
}

/// Secret or proof of a role.
#[derive(Clone, Default)]
pub enum Login {
    /// There is none: the role was let in without a password.
    #[default]
    Trusted,
    /// The password.
    Password(Zeroizing<Vec<u8>>),
    /// The client proved its password by MD5, from which no secret can be computed.
    Md5,
    /// The client proved its password to the server by SCRAM, in an exchange that was observed.
    Observed(Transcript),
    /// The client proved its password by SCRAM to an owner of the verifier.
    Keys(Keys),
}

/// A login, with the role's stored password if it was given.
#[derive(Clone, Default)]
pub struct Credential {
    /// Secret or proof of the role.
    pub login: Login,
    /// Stored password of the role, as in `pg_authid`, or its password if only that is known.
    pub stored: Option<Zeroizing<String>>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.login {
            Login::Trusted => "Credential(trusted)",
            Login::Password(_) => "Credential(password)",
            Login::Md5 => "Credential(md5)",
            Login::Observed(_) | Login::Keys(_) => "Credential(scram)",
        })
    }
}

/// Returns true for a text that a server would store as it is, and not as a password in plain text.
fn is_stored_form(stored: &str) -> bool {
    let is_md5 = |hash: &str| hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    stored.strip_prefix("md5").is_some_and(is_md5) || Verifier::parse(stored).is_ok()
}

impl Credential {
    /// Returns true if the proxy can log in with it again at a server that knows the same secret.
    pub fn is_repeatable(&self) -> bool {
        match self.login {
            Login::Trusted | Login::Password(_) | Login::Keys(_) => true,
            Login::Md5 | Login::Observed(_) => self.stored.is_some(),
        }
    }

    /// Password in plain text, if there is one.
    pub(crate) fn password(&self) -> Option<&[u8]> {
        match &self.login {
            Login::Password(password) => Some(password),
            _ => self.stored.as_ref().filter(|stored| !is_stored_form(stored)).map(|password| password.as_bytes()),
        }
    }

    /// Stored form of MD5.
    pub(crate) fn md5(&self, user: &str) -> Option<Zeroizing<String>> {
        let stored = self.stored.as_ref().filter(|stored| stored.starts_with("md5") && is_stored_form(stored)).cloned();
        stored.or_else(|| self.password().map(|password| md5::stored(password, user.as_bytes())))
    }

    /// Secret for a SCRAM login.
    pub(crate) fn scram(&self) -> Result<Secret, AuthenticationError> {
        if let Some(password) = self.password() {
            return Ok(Secret::Password(Zeroizing::new(password.to_vec())));
        }
        match &self.login {
            Login::Keys(keys) => Ok(Secret::Keys(keys.clone())),
            Login::Observed(transcript) => {
                let lacking = AuthenticationError::NoSecret("no verifier for this role was given");
                let verifier = Verifier::parse(self.stored.as_ref().ok_or(lacking)?)?;
                Ok(Secret::Keys(transcript.recover(&verifier)?))
            }
            Login::Trusted | Login::Md5 | Login::Password(_) => Err(AuthenticationError::NoSecret(
                "it requires a password, and a client that logs in by SCRAM does not send one",
            )),
        }
    }
}
