//! Connection strings: removes options that their parser does not know, and builds one for a database name.

/// Makes a connection string that names only a database, for programs of libpq. These read a name that looks like a connection
/// string as one, with any host in it; inside a connection string it is a value.
pub fn of_database(name: &str) -> String {
    let mut text = "dbname='".to_owned();
    for character in name.chars() {
        if matches!(character, '\'' | '\\') {
            text.push('\\');
        }
        text.push(character);
    }
    text.push('\'');
    text
}

/// Removes one option from a connection string of either form. Returns the rest, and the option's value. Malformed parts are
/// left for the parser to report.
pub(super) fn take(conninfo: &str, option: &str) -> (String, Option<String>) {
    if conninfo.starts_with("postgres://") || conninfo.starts_with("postgresql://") {
        take_from_url(conninfo, option)
    } else {
        take_from_words(conninfo, option)
    }
}

fn take_from_url(url: &str, option: &str) -> (String, Option<String>) {
    let Some((place, query)) = url.split_once('?') else { return (url.into(), None) };
    let is_it = |pair: &&str| pair.split_once('=').is_some_and(|(name, _)| name == option);
    let (taken, kept): (Vec<&str>, Vec<&str>) = query.split('&').partition(is_it);
    let value = taken.last().and_then(|pair| pair.split_once('=')).map(|(_, value)| unescape(value));
    let mark = if kept.is_empty() { "" } else { "?" };
    (format!("{place}{mark}{}", kept.join("&")), value)
}

/// Decodes `%` escapes: `%20` is a space.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = (first == b'%').then(|| after.get(..2)).flatten();
        let code = code.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn take_from_words(words: &str, option: &str) -> (String, Option<String>) {
    let (mut kept, mut value) = (String::new(), None);
    let mut rest = words.trim_start();
    while !rest.is_empty() {
        let Some((name, after)) = rest.split_once('=') else {
            kept.push_str(rest);
            break;
        };
        let (taken, length) = word(after.trim_start());
        let end = rest.len() - after.trim_start().len() + length;
        if name.trim() == option {
            value = Some(taken);
        } else {
            kept.push_str(&rest[..end]);
            kept.push(' ');
        }
        rest = rest[end..].trim_start();
    }
    (kept.trim_end().into(), value)
}

/// Returns the value at the beginning of a text, and its length there in bytes; quotes and backslashes as in libpq.
fn word(text: &str) -> (String, usize) {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut characters = text.char_indices().skip(usize::from(quoted));
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            '\'' if quoted => return (value, at + 1),
            _ if !quoted && character.is_whitespace() => return (value, at),
            _ => value.push(character),
        }
    }
    (value, text.len())
}

#[cfg(test)]
mod tests {
    use super::{of_database, take};

    #[test]
    fn any_name_of_a_database_is_a_value() {
        for (name, text) in [
            ("shop", "dbname='shop'"),
            ("host=x port=1 dbname=y", "dbname='host=x port=1 dbname=y'"),
            ("postgresql://u@x/y", "dbname='postgresql://u@x/y'"),
            ("--file=/tmp/x", "dbname='--file=/tmp/x'"),
            ("a'b\\c", "dbname='a\\'b\\\\c'"),
            ("x' host='y", "dbname='x\\' host=\\'y'"),
            ("\\", "dbname='\\\\'"),
            ("a\nb", "dbname='a\nb'"),
        ] {
            assert_eq!(of_database(name), text);
            let config: tokio_postgres::Config = text.parse().unwrap();
            assert_eq!((config.get_dbname(), config.get_hosts()), (Some(name), &[][..]));
        }
        let long = "'".repeat(63);
        let config: tokio_postgres::Config = of_database(&long).parse().unwrap();
        assert_eq!(config.get_dbname(), Some(&long[..]));
    }

    #[test]
    fn an_option_is_taken_and_all_others_stay_as_they_are() {
        for (text, left, value) in [
            ("host=a sslmode=require dbname=x", "host=a dbname=x", Some("require")),
            ("host=a password='s p\\'=x' sslmode = 'a b'", "host=a password='s p\\'=x'", Some("a b")),
            ("password=sslmode=no host=a", "password=sslmode=no host=a", None),
            ("nonsense", "nonsense", None),
            (
                "postgresql://u:p@a/x?sslmode=require&connect_timeout=3",
                "postgresql://u:p@a/x?connect_timeout=3",
                Some("require"),
            ),
            ("postgres://a/x?sslmode=%72equire", "postgres://a/x", Some("require")),
            ("postgres://a/x", "postgres://a/x", None),
        ] {
            assert_eq!(take(text, "sslmode"), (left.to_owned(), value.map(str::to_owned)), "{text}");
        }
    }
}
