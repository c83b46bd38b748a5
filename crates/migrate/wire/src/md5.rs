//! MD5 authentication: `"md5" + hex(md5(hex(md5(password + user)) + salt))`.

use md5::{Digest, Md5};
use zeroize::Zeroizing;

/// The stored form of a password: `md5` and 32 digits.
pub fn stored(password: &[u8], user: &[u8]) -> Zeroizing<String> {
    Zeroizing::new(format!("md5{}", hex::encode(Md5::new().chain_update(password).chain_update(user).finalize())))
}

/// Answer of a client, from the stored form: no password is needed. `None` if that is not an MD5 hash.
pub fn answer(stored: &str, salt: [u8; 4]) -> Option<Zeroizing<String>> {
    let inner = stored.strip_prefix("md5").filter(|digits| digits.len() == 32)?;
    Some(Zeroizing::new(format!("md5{}", hex::encode(Md5::new().chain_update(inner).chain_update(salt).finalize()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_form_is_postgresqls() {
        // select 'md5' || md5('secret' || 'alice')
        assert_eq!(stored(b"secret", b"alice").as_str(), format!("md5{}", hex::encode(Md5::digest(b"secretalice"))));
        assert_eq!(stored(b"", b"").as_str(), "md5d41d8cd98f00b204e9800998ecf8427e");
        assert!(answer("SCRAM-SHA-256$", [0; 4]).is_none());
        let answer = answer("md5d41d8cd98f00b204e9800998ecf8427e", *b"abcd").unwrap();
        assert_eq!(
            answer.as_str(),
            format!("md5{}", hex::encode(Md5::digest(b"d41d8cd98f00b204e9800998ecf8427eabcd")))
        );
    }
}
