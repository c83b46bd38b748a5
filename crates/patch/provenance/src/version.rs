//! Versions of packages, ordered as dpkg orders them (deb-version(7)).

use std::cmp::Ordering;

/// Compares two versions: epoch, upstream version, revision.
///
/// ```
/// use stillpoint_patch_provenance::compare_versions;
/// use std::cmp::Ordering;
/// assert_eq!(compare_versions("1.0~rc1-1", "1.0-1"), Ordering::Less);
/// assert_eq!(compare_versions("1:0.9-1", "1.0-1"), Ordering::Greater);
/// ```
pub fn compare(a: &str, b: &str) -> Ordering {
    let ((a_epoch, a_upstream, a_revision), (b_epoch, b_upstream, b_revision)) = (parts(a), parts(b));
    part(a_epoch, b_epoch).then_with(|| part(a_upstream, b_upstream)).then_with(|| part(a_revision, b_revision))
}

/// Returns epoch, upstream version and revision.
fn parts(version: &str) -> (&str, &str, &str) {
    let (epoch, rest) = version.split_once(':').unwrap_or(("0", version));
    let (upstream, revision) = rest.rsplit_once('-').unwrap_or((rest, ""));
    (epoch, upstream, revision)
}

/// Compares one part: by turns text without digits and a number.
fn part(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    while !a.is_empty() || !b.is_empty() {
        let ((a_text, a_rest), (b_text, b_rest)) =
            (split(a, |c| !c.is_ascii_digit()), split(b, |c| !c.is_ascii_digit()));
        for at in 0..a_text.len().max(b_text.len()) {
            let different = weight(a_text.get(at)).cmp(&weight(b_text.get(at)));
            if different != Ordering::Equal {
                return different;
            }
        }
        let ((a_number, a_rest), (b_number, b_rest)) =
            (split(a_rest, u8::is_ascii_digit), split(b_rest, u8::is_ascii_digit));
        let (a_number, b_number) = (without_zeros(a_number), without_zeros(b_number));
        // without leading zeros the longer number is the greater one, however long it is
        let different = a_number.len().cmp(&b_number.len()).then_with(|| a_number.cmp(b_number));
        if different != Ordering::Equal {
            return different;
        }
        (a, b) = (a_rest, b_rest);
    }
    Ordering::Equal
}

/// Order of a character in text: `~` before the end, letters before all others.
fn weight(character: Option<&u8>) -> i32 {
    match character {
        Some(b'~') => -1,
        None => 0,
        Some(letter) if letter.is_ascii_alphabetic() => i32::from(*letter),
        Some(other) => i32::from(*other) + 256,
    }
}

fn split(text: &[u8], belongs: impl Fn(&u8) -> bool) -> (&[u8], &[u8]) {
    text.split_at(text.iter().position(|c| !belongs(c)).unwrap_or(text.len()))
}

fn without_zeros(number: &[u8]) -> &[u8] {
    split(number, |c| *c == b'0').1
}

/// Returns a version of a binary package without the number of a rebuild: `1.2-3+b4` is a rebuild of `1.2-3`.
pub fn without_rebuild(version: &str) -> &str {
    match version.rsplit_once("+b") {
        Some((source, number)) if !number.is_empty() && number.bytes().all(|c| c.is_ascii_digit()) => source,
        _ => version,
    }
}

/// Returns true if a text may be a version: it becomes part of file names and of arguments of programs.
pub fn is_version(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b".+-~:".contains(&c);
    text.len() <= 255 && text.starts_with(|c: char| c.is_ascii_digit()) && text.bytes().all(allowed)
}

/// Returns true if a text may be the name of a package, without an architecture.
pub fn is_package(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b".+-".contains(&c);
    text.len() <= 255
        && text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Ascending.
    const ORDERED: [&str; 22] = [
        "0~~",
        "0~~a",
        "0~",
        "0",
        "0a",
        "0+",
        "1.0~rc1-1",
        "1.0-0",
        "1.0-1~deb12u1",
        "1.0-1",
        "1.0-1+b1",
        "1.0-1+b10",
        "1.0-1.1",
        "1.0a-1",
        "1.0+dfsg-1",
        "1.0.1-1",
        "1.2.3-4",
        "1.10-1",
        "99999999999999999999999999-1",
        "99999999999999999999999999-1+x",
        "1:0-1",
        "2:0",
    ];

    #[test]
    fn versions_are_ordered_as_the_manual_says() {
        for (i, a) in ORDERED.iter().enumerate() {
            for (j, b) in ORDERED.iter().enumerate() {
                assert_eq!(compare(a, b), i.cmp(&j), "{a} {b}");
            }
        }
        for (a, b) in [("1.0", "0:1.0"), ("1.01-1", "1.1-01"), ("1.0-", "1.0"), ("1.0-0", "1.0")] {
            assert_eq!(compare(a, b), Ordering::Equal, "{a} {b}");
        }
    }

    #[test]
    fn dpkg_orders_them_the_same() {
        for pair in ORDERED.windows(2) {
            let run = Command::new("dpkg").args(["--compare-versions", pair[0], "lt", pair[1]]).status();
            assert!(run.expect("dpkg").success(), "{pair:?}");
        }
    }

    #[test]
    fn a_rebuild_has_the_source_of_the_version_before() {
        for (binary, source) in
            [("1.2-3+b4", "1.2-3"), ("1.2-3", "1.2-3"), ("1.2+beta", "1.2+beta"), ("1+b", "1+b"), ("1+b1x", "1+b1x")]
        {
            assert_eq!(without_rebuild(binary), source);
        }
    }

    #[test]
    fn names_and_versions_that_could_be_options_or_paths_are_none() {
        assert!(is_version("5:7.0.15-1~deb12u10") && is_package("libstdc++6") && is_package("0ad"));
        for text in ["", "-1", "1/2", "1 2", "a1", "1\n", "../1"] {
            assert!(!is_version(text), "{text}");
        }
        for text in ["", "-x", "a/b", "A", "a b", "libc6:i386", "..", "a\n"] {
            assert!(!is_package(text), "{text}");
        }
    }
}
