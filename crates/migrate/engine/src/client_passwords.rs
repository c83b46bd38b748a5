//! Passwords of clients' roles, for servers that do not show the stored ones: a session that is moved logs in again on the other
//! side, and a client that logged in by SCRAM has not shown its password.

use std::collections::BTreeMap;
use std::fmt;
use zeroize::Zeroizing;

/// Passwords by role: in plain text, or as a server stores them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ClientPasswords(BTreeMap<String, Zeroizing<String>>);

impl fmt::Debug for ClientPasswords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientPasswords({} roles)", self.0.len())
    }
}

impl ClientPasswords {
    /// Reads lines `ROLE PASSWORD`; a line that begins with `#` is a comment.
    ///
    /// # Errors
    ///
    /// The number of a line without a password, or with a role that has one already.
    pub fn parse(text: &str) -> Result<ClientPasswords, String> {
        let mut passwords = BTreeMap::new();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
        {
            let (role, password) = line.split_once([' ', '\t']).unwrap_or((line, ""));
            let password = password.trim_start_matches([' ', '\t']);
            if password.is_empty() {
                return Err(format!("line {} has no password after the role", at + 1));
            }
            if passwords.insert(role.to_owned(), Zeroizing::new(password.to_owned())).is_some() {
                return Err(format!("line {} names a role that has a password already", at + 1));
            }
        }
        Ok(ClientPasswords(passwords))
    }

    /// Adds them to those that a server has stored, and takes their place.
    pub(crate) fn add_to(&self, stored: &mut BTreeMap<String, String>) {
        stored.extend(self.0.iter().map(|(role, password)| (role.clone(), password.as_str().to_owned())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_roles_and_passwords() {
        let passwords = ClientPasswords::parse("# of the shop\napp  p w\n\nOther\tSCRAM-SHA-256$1:a$b:c\n").unwrap();
        let mut stored = BTreeMap::from([("app".into(), "old".into()), ("third".into(), "x".into())]);
        passwords.add_to(&mut stored);
        let all: Vec<_> = stored.iter().map(|(role, password)| (role.as_str(), password.as_str())).collect();
        assert_eq!(all, [("Other", "SCRAM-SHA-256$1:a$b:c"), ("app", "p w"), ("third", "x")]);
        assert_eq!(format!("{passwords:?}"), "ClientPasswords(2 roles)");
        assert_eq!(ClientPasswords::parse("a b\nc\n"), Err("line 2 has no password after the role".into()));
        assert_eq!(ClientPasswords::parse("a b\na c\n"), Err("line 2 names a role that has a password already".into()));
    }
}
