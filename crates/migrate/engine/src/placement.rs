//! Properties that the target's database has of its own: the tablespaces of its objects, and its locale and encoding.
//!
//! They are written into the dump of the source's definitions, so that all that is made from it and compared with it has them.

use crate::archive;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{identifier, literal};

/// Options of CREATE DATABASE that a locale replaces. A collation's version is that of the source's library.
const LOCALE_OPTIONS: [&str; 8] = [
    "LOCALE_PROVIDER",
    "LOCALE",
    "LC_COLLATE",
    "LC_CTYPE",
    "ICU_LOCALE",
    "BUILTIN_LOCALE",
    "ICU_RULES",
    "COLLATION_VERSION",
];

/// Properties of the target's database that are not the source's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Puts all objects into the default tablespace of the target.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    no_tablespaces: bool,
    /// The target's tablespace for each of the source's that has another name there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tablespaces: BTreeMap<String, String>,
    /// Locale of the C library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    locale: Option<String>,
    /// Encoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encoding: Option<String>,
}

impl Placement {
    /// Makes a placement of options: `OLD=NEW` for tablespaces, or none of them; a locale and an encoding.
    ///
    /// # Errors
    ///
    /// The reason why one of them is not valid.
    pub fn parse(
        tablespaces: &[String],
        no_tablespaces: bool,
        locale: Option<String>,
        encoding: Option<String>,
    ) -> Result<Placement, String> {
        let mut map = BTreeMap::new();
        for text in tablespaces {
            let pair = text.split_once('=').filter(|(old, new)| !old.is_empty() && !new.is_empty());
            let (old, new) = pair.ok_or_else(|| format!("`{text}` is not OLD=NEW"))?;
            if map.insert(old.to_owned(), new.to_owned()).is_some() {
                return Err(format!("tablespace {old} has two places"));
            }
        }
        Ok(Placement { no_tablespaces, tablespaces: map, locale, encoding })
    }

    /// Returns true if everything is as on the source.
    pub fn is_same(&self) -> bool {
        *self == Placement::default()
    }

    /// Name on the target of a tablespace of the source; empty for the default one.
    pub(crate) fn tablespace<'n>(&'n self, name: &'n str) -> &'n str {
        match self.tablespaces.get(name) {
            _ if self.no_tablespaces => "",
            Some(other) if other == "pg_default" => "",
            Some(other) => other,
            None => name,
        }
    }

    /// The source's tablespaces that have another name on the target.
    pub(crate) fn named(&self) -> impl Iterator<Item = &str> {
        self.tablespaces.keys().map(String::as_str)
    }

    /// Writes the placement into an archive of pg_dump.
    ///
    /// # Errors
    ///
    /// [`Error::Program`] if it is no such archive.
    pub(crate) fn write_into(&self, dump: &[u8]) -> Result<Vec<u8>, Error> {
        let entries = archive::read(dump)?;
        let database = entries.iter().find(|entry| entry.kind == "DATABASE");
        let own = database.and_then(|entry| self.tablespace_of_database(&entry.definition)).unwrap_or_default();
        archive::rewritten(dump, |entry| {
            let is_database = entry.kind == "DATABASE";
            let definition = is_database.then(|| self.of_database(&entry.definition));
            // Servers refuse the database's own tablespace by name for partitioned tables.
            let space = Some(self.tablespace(&entry.storage.0)).filter(|space| *space != own).unwrap_or_default();
            (definition, (space != entry.storage.0).then(|| space.to_owned()))
        })
    }

    /// The target's tablespace of the database itself; `None` for the default one.
    fn tablespace_of_database(&self, statement: &str) -> Option<String> {
        let options = split_options(statement.trim_end().trim_end_matches(';'));
        let (_, value) = options.into_iter().find(|(name, _)| name == "TABLESPACE")?;
        Some(self.tablespace(&unquoted(&value)).to_owned()).filter(|space| !space.is_empty())
    }

    /// The statement that creates the database.
    fn of_database(&self, statement: &str) -> String {
        let Some(statement) = statement.strip_suffix(";\n") else { return statement.to_owned() };
        let mut words = split_options(statement);
        words.retain(|(name, _)| self.locale.is_none() || !LOCALE_OPTIONS.contains(&name.as_str()));
        words.retain(|(name, _)| self.encoding.is_none() || name != "ENCODING");
        for (name, value) in &mut words {
            if name == "TABLESPACE" {
                let space = self.tablespace(&unquoted(value)).to_owned();
                *value = if space.is_empty() { "DEFAULT".into() } else { identifier(&space) };
            }
        }
        let mut text = words
            .iter()
            .map(|(name, value)| if value.is_empty() { name.clone() } else { format!("{name} = {value}") })
            .collect::<Vec<_>>()
            .join(" ");
        if let Some(encoding) = &self.encoding {
            text.push_str(&format!(" ENCODING = {}", literal(encoding)));
        }
        if let Some(locale) = &self.locale {
            let locale = literal(locale);
            text.push_str(&format!(" LC_COLLATE = {locale} LC_CTYPE = {locale}"));
        }
        text + ";\n"
    }
}

/// Splits `CREATE DATABASE name WITH A = b C = 'd'` into its beginning, without a value, and its options.
fn split_options(statement: &str) -> Vec<(String, String)> {
    let words = words(statement);
    let mut options: Vec<(String, String)> = Vec::new();
    let mut at = 0;
    while at < words.len() {
        match words.get(at + 1).zip(words.get(at + 2)) {
            Some((sign, value)) if sign == "=" => {
                options.push((words[at].clone(), value.clone()));
                at += 3;
            }
            _ => {
                options.push((words[at].clone(), String::new()));
                at += 1;
            }
        }
    }
    options
}

/// Words of a statement, with quoted ones whole.
fn words(statement: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for character in statement.chars() {
        match quote {
            None if character.is_whitespace() => {
                words.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
                continue;
            }
            None if character == '\'' || character == '"' => quote = Some(character),
            Some(open) if open == character => quote = None,
            _ => {}
        }
        word.push(character);
    }
    words.extend((!word.is_empty()).then_some(word));
    words
}

fn unquoted(name: &str) -> String {
    match name.strip_prefix('"').and_then(|name| name.strip_suffix('"')) {
        Some(name) => name.replace("\"\"", "\""),
        None => name.to_owned(),
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.no_tablespaces.then(|| "--no-tablespaces".to_owned()));
        parts.extend(self.tablespaces.iter().map(|(old, new)| format!("--tablespace {old}={new}")));
        parts.extend(self.locale.iter().map(|locale| format!("--locale {locale}")));
        parts.extend(self.encoding.iter().map(|encoding| format!("--encoding {encoding}")));
        f.write_str(&if parts.is_empty() { "the source's own".to_owned() } else { parts.join(" ") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement(tablespaces: &[&str]) -> Placement {
        let texts: Vec<String> = tablespaces.iter().map(|text| (*text).to_owned()).collect();
        Placement::parse(&texts, false, None, None).unwrap()
    }

    #[test]
    fn the_statement_of_a_database_gets_what_is_said() {
        let statement = "CREATE DATABASE \"my = shop\" WITH TEMPLATE = template0 ENCODING = 'UTF8' LOCALE_PROVIDER = icu \
                         LOCALE = 'en_US.UTF-8' ICU_LOCALE = 'en-US' TABLESPACE = \"a \"\"b\";\n";
        assert_eq!(Placement::default().of_database(statement), statement);
        let moved = placement(&["a \"b=fast", "x=pg_default"]);
        assert!(moved.of_database(statement).ends_with(" TABLESPACE = \"fast\";\n"));
        let plain = Placement::parse(&[], true, Some("C.UTF-8".into()), Some("UTF8".into())).unwrap();
        assert_eq!(
            plain.of_database(statement),
            "CREATE DATABASE \"my = shop\" WITH TEMPLATE = template0 TABLESPACE = DEFAULT ENCODING = 'UTF8' \
             LC_COLLATE = 'C.UTF-8' LC_CTYPE = 'C.UTF-8';\n"
        );
        assert_eq!((moved.tablespace("x"), moved.tablespace("y"), plain.tablespace("y")), ("", "y", ""));
    }

    #[test]
    fn a_tablespace_has_one_place() {
        for wrong in [&["a"][..], &["=b"], &["a="], &["a=b", "a=c"]] {
            let texts: Vec<String> = wrong.iter().map(|text| (*text).to_owned()).collect();
            assert!(Placement::parse(&texts, false, None, None).is_err(), "{wrong:?}");
        }
    }
}
