//! Token of the live page's button, from a file that only the proxy's user can read.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use stillpoint_host::file;
use stillpoint_migrate_control::ConfigError;
use zeroize::Zeroizing;

/// Lengths of a token, in bytes: a shorter one may be guessed.
const TOKEN_BYTES_MIN: usize = 32;
const TOKEN_BYTES_MAX: usize = 256;

/// A token.
pub(crate) struct PageToken(Zeroizing<Vec<u8>>);

impl PageToken {
    /// Reads a token from the first line of a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Read`] if the file cannot be read, [`ConfigError::Invalid`] if others may read it, or if it holds no
    /// token.
    pub(crate) fn load(path: &Path) -> Result<PageToken, ConfigError> {
        let invalid = |why: String| ConfigError::Invalid(format!("{}: {why}", path.display()));
        let failed = |source: io::Error| ConfigError::Read { path: path.into(), source };
        let opened = file::open_named(path).map_err(|error| failed(error.into()))?;
        let metadata = opened.metadata().map_err(failed)?;
        let owner = metadata.uid();
        if metadata.mode() & 0o077 != 0 || (owner != rustix::process::geteuid().as_raw() && owner != 0) {
            return Err(invalid(
                "others may read or change the token: it must be the proxy's own, with mode 0600".into(),
            ));
        }
        let limit = TOKEN_BYTES_MAX as u64 + 2;
        let bytes = file::bounded(&opened, path, limit).map_err(|error| failed(error.into()))?;
        let bytes = Zeroizing::new(bytes);
        let token = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let fits = (TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len());
        if !fits || !token.iter().all(u8::is_ascii_graphic) {
            return Err(invalid(format!(
                "a token is one line of {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} letters, digits and signs, such as \
                 that of `openssl rand -hex 32`"
            )));
        }
        Ok(PageToken(Zeroizing::new(token.to_vec())))
    }

    /// Returns true if `other` is the token. The time does not depend on where the two differ, nor on the token's length.
    pub(crate) fn is(&self, other: &[u8]) -> bool {
        let byte = |bytes: &[u8], at: usize| bytes.get(at).copied().unwrap_or_default();
        let differences =
            (0..TOKEN_BYTES_MAX).fold(0, |all, at| std::hint::black_box(all | (byte(&self.0, at) ^ byte(other, at))));
        differences == 0 && self.0.len() == other.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_a_long_token_in_a_private_file_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let put = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            PageToken::load(&path)
        };
        assert!(PageToken::load(&path).is_err(), "the file does not exist");
        let token = "0123456789abcdef".repeat(2);
        for mode in [0o640, 0o604, 0o602, 0o660, 0o644] {
            assert!(
                matches!(put(&token, mode), Err(ConfigError::Invalid(why)) if why.contains("mode 0600")),
                "{mode:o}"
            );
        }
        for text in [&token[1..], "", &"a".repeat(257), &format!("{token} {token}"), &format!("{token}\n\n"), "\u{e4}"]
        {
            assert!(put(text, 0o600).is_err(), "{text:?}");
        }
        for text in [token.clone(), format!("{token}\n")] {
            assert!(put(&text, 0o400).unwrap().is(token.as_bytes()));
        }
        let read = put(&token, 0o600).unwrap();
        for wrong in ["", &token[1..], &format!("{token}0"), &token.to_uppercase(), &format!("{token}\0")] {
            assert!(!read.is(wrong.as_bytes()), "{wrong:?}");
        }
    }
}
