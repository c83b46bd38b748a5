//! A file of stored passwords: lines `USER VERIFIER`, one for each role.

use crate::mock_secret::MockSecret;
use std::io;
use std::path::Path;
use stillpoint_host::file::read_regular_text;
use stillpoint_migrate_wire::scram::Verifier;
use zeroize::Zeroizing;

/// Size limit of the file, in bytes.
const FILE_MAX: u64 = 64 << 20;

/// Reads the file.
pub(crate) fn read(path: &Path) -> io::Result<Zeroizing<String>> {
    Ok(Zeroizing::new(read_regular_text(path, FILE_MAX)?))
}

/// Returns the verifier for an exchange with a client.
///
/// There is always one. For a role that has no verifier in `text`, or more than one, the exchange takes place all the
/// same, and fails at its end: the proxy's answers do not show which roles exist.
pub(crate) fn find(text: &str, user: &str, secret: &MockSecret) -> Verifier {
    let (mut found, mut like, mut count) = (None, None, 0);
    for (name, stored) in lines(text).filter_map(|(_, line)| line) {
        let is_asked_for = name == user;
        count += usize::from(is_asked_for);
        if like.is_none() || is_asked_for {
            let verifier = Verifier::parse(stored).ok();
            if is_asked_for {
                found.clone_from(&verifier);
            }
            like = like.or(verifier);
        }
    }
    match found {
        Some(verifier) if count == 1 => verifier,
        _ => secret.verifier(user, like.as_ref()),
    }
}

/// Faults of a file, one text each.
pub(crate) fn faults(text: &str) -> Vec<String> {
    let (mut faults, mut seen) = (Vec::new(), std::collections::BTreeMap::new());
    for (number, line) in lines(text) {
        match line {
            Some((name, stored)) if Verifier::parse(stored).is_ok() => {
                if let Some(before) = seen.insert(name, number) {
                    faults.push(format!("lines {before} and {number} name the same role, which cannot log in"));
                }
            }
            // A comment need not hold a role.
            Some((name, _)) if name.starts_with('#') => {}
            _ => faults.push(format!("line {number} is not a role with a SCRAM-SHA-256 verifier")),
        }
    }
    faults
}

/// Lines with their numbers: name and verifier.
fn lines(text: &str) -> impl Iterator<Item = (usize, Option<(&str, &str)>)> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| (at + 1, line.split_once(char::is_whitespace).map(|(name, stored)| (name, stored.trim()))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::LazyLock;
    use stillpoint_migrate_wire::scram::Server;

    const A: &str = "SCRAM-SHA-256$4096:AAAAAAAAAAAAAAAAAAAAAA==$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

    /// The proxy's question to a client, without the part that differs each time.
    fn question(text: &str, user: &str) -> String {
        static SECRET: LazyLock<MockSecret> = LazyLock::new(|| {
            let dir = tempfile::tempdir().unwrap();
            MockSecret::load(&dir.path().join("routes.json")).unwrap()
        });
        let server = Server::begin(find(text, user, &SECRET), b"n,,n=,r=abc", &[2; 18]).unwrap();
        server.first().split_once(",s=").unwrap().1.to_owned()
    }

    #[test]
    fn a_role_without_a_verifier_is_asked_as_one_with_it() {
        let text = format!("alice {A}\nbob md5x\n\ncarol {A}\ncarol {A}\nerin\n");
        let real = question(&text, "alice");
        assert_eq!(real, "AAAAAAAAAAAAAAAAAAAAAA==,i=4096");
        for user in ["bob", "carol", "dave", "erin", ""] {
            let mock = question(&text, user);
            assert_eq!((mock.len(), mock.ends_with(",i=4096")), (real.len(), true), "{user}");
            assert_ne!(mock, real, "{user}");
            assert_eq!(mock, question(&text, user), "{user}");
        }
        assert_eq!(question("", "dave"), question(&text, "dave"));
        assert!(question(&format!("alice {}", A.replace("4096", "9")), "dave").ends_with(",i=9"));
    }

    #[test]
    fn what_is_wrong_is_named_by_its_line() {
        let text = format!("# who\nalice {A}\nbob md5x\n\nalice {A}\nerin\n");
        assert_eq!(
            faults(&text),
            [
                "line 3 is not a role with a SCRAM-SHA-256 verifier",
                "lines 2 and 5 name the same role, which cannot log in",
                "line 6 is not a role with a SCRAM-SHA-256 verifier",
            ]
        );
        assert_eq!(faults(&format!("alice {A}\n")), [""; 0]);
    }
}
