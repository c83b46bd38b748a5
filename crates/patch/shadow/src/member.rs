//! Statement of an author: a member to move, and its initial value.

use std::fmt;

/// `TYPE.MEMBER[=VALUE]`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShadowMember {
    /// Tag of the structure without `struct`, or the name of a typedef.
    pub type_name: String,
    /// The member.
    pub member: String,
    /// Constant expression of C; zero if it is empty.
    pub value: String,
}

impl ShadowMember {
    /// Parses `[struct ]TYPE.MEMBER[=VALUE]`.
    ///
    /// # Errors
    /// A text of another form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let name = name.trim();
        let parts = name.strip_prefix("struct ").unwrap_or(name).trim().split_once('.');
        let Some((type_name, member)) = parts.filter(|(a, b)| is_identifier(a) && is_identifier(b)) else {
            return Err(format!("{text:?} is not TYPE.MEMBER[=VALUE]"));
        };
        let value = value.trim();
        let is_constant = |c: char| c.is_ascii_alphanumeric() || "_+-*/|&^~<>()'. ".contains(c);
        if value.len() > VALUE_MAX || !value.chars().all(is_constant) {
            return Err(format!("{value:?} is no constant expression"));
        }
        let value = if value == "0" { "" } else { value };
        Ok(ShadowMember { type_name: type_name.into(), member: member.into(), value: value.into() })
    }

    /// Returns the number that identifies the member in the table: 16 bits, not zero.
    pub fn id(&self) -> u16 {
        let text = format!("{}.{}", self.type_name, self.member);
        let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        // the upper half of a user address is zero: so is the number of no member
        ((hash >> 16) as u16 ^ hash as u16).max(1)
    }
}

impl fmt::Display for ShadowMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.type_name, self.member)
    }
}

const VALUE_MAX: usize = 200;

fn is_identifier(text: &str) -> bool {
    let mut letters = text.chars();
    letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
        && text.len() <= 200
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_parsed_or_refused() {
        let parsed = ShadowMember::parse("struct UrlState.creds_from=-1").unwrap();
        assert_eq!((parsed.to_string(), parsed.value.as_str()), ("UrlState.creds_from".into(), "-1"));
        assert_eq!(ShadowMember::parse("a.b=0").unwrap(), ShadowMember::parse("a.b").unwrap());
        assert_ne!(ShadowMember::parse("a.b").unwrap().id(), ShadowMember::parse("a.c").unwrap().id());
        for text in ["", "a", "a.", ".b", "a.b.c", "a b.c", "a.b=}; int x = {", "a.b=\"x\"", "a.b=x\ny"] {
            assert!(ShadowMember::parse(text).is_err(), "{text:?}");
        }
    }
}
