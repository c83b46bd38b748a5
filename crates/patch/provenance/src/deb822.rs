//! Stanzas of Debian's control files.
//!
//! Written by hand: `deb822-fast` 0.2 takes the indentation off continued lines, which an inline key must keep, and one line
//! that it does not know, as around a signed `.dsc`, is an error for the whole text.

/// Fields in their order; a continued value has the lines as they were.
#[derive(Debug, Default)]
pub struct Stanza(pub Vec<(String, String)>);

impl Stanza {
    /// Parses one stanza; lines that are no fields are left out.
    pub fn parse(text: &str) -> Stanza {
        let mut fields: Vec<(String, String)> = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            match (line.split_once(':'), fields.last_mut()) {
                (_, Some((_, value))) if line.starts_with([' ', '\t']) => *value += &format!("\n{line}"),
                (Some((name, value)), _) => fields.push((name.trim().to_owned(), value.trim().to_owned())),
                (None, _) => {}
            }
        }
        Stanza(fields)
    }

    /// Returns the value of a field; upper and lower case are the same in its name.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// Parses stanzas, which empty lines part.
pub fn stanzas(text: &str) -> Vec<Stanza> {
    let lines: Vec<&str> = text.lines().collect();
    lines.split(|line| line.trim().is_empty()).map(|lines| Stanza::parse(&lines.join("\n"))).collect()
}
