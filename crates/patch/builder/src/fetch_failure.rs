//! Failed downloads in the output of apt, mmdebstrap and other programs that run apt.
//!
//! The output is hostile: servers and proxies choose the text of an answer, and package scripts print any text. A line
//! that does not have apt's form is ignored; a name or version with characters that no package has is dropped.

use percent_encoding::percent_decode_str;
use std::borrow::Cow;

/// Prefixes of apt's lines.
const SEVERITIES: [&str; 2] = ["E: ", "W: "];
/// Answers by which a server or a method reports that it does not have a file. All other answers are network failures.
const ABSENT: [(&str, &str); 3] = [("404 ", "404"), ("410 ", "410"), ("File not found ", "no such file")];

/// One file that apt could not download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FetchFailure {
    /// File name, without directories.
    pub(crate) file: String,
    /// The server's answer when it does not have the file, for instance `404`; `None` for every other failure.
    pub(crate) absent: Option<&'static str>,
}

impl FetchFailure {
    /// Returns name and version of the binary package in the file. File names carry no epoch.
    pub(crate) fn binary(&self) -> Option<(&str, &str)> {
        let mut parts = self.file.strip_suffix(".deb")?.split('_');
        let (name, version, _architecture) = (parts.next()?, parts.next()?, parts.next()?);
        (parts.next().is_none() && is_package(name) && is_version(version)).then_some((name, version))
    }
}

/// Returns every failed download that the output names, each file once.
pub(crate) fn failures(output: &str) -> Vec<FetchFailure> {
    let mut found: Vec<FetchFailure> = Vec::new();
    for failure in output.lines().filter_map(parse) {
        match found.iter_mut().find(|f| f.file == failure.file) {
            // a file that failed with two different answers is not known to be absent
            Some(first) if first.absent != failure.absent => first.absent = None,
            Some(_) => {}
            None => found.push(failure),
        }
    }
    found
}

/// Returns the failed downloads, if there are any and the server has none of their files.
pub(crate) fn all_absent(output: &str) -> Option<Vec<FetchFailure>> {
    let failures = failures(output);
    (!failures.is_empty() && failures.iter().all(|f| f.absent.is_some())).then_some(failures)
}

fn parse(line: &str) -> Option<FetchFailure> {
    let line = SEVERITIES.iter().find_map(|severity| line.trim_start().strip_prefix(severity))?;
    let (uri, reason) = line.strip_prefix("Failed to fetch ")?.split_once("  ")?;
    let file = percent_decode_str(uri.rsplit('/').next()?).decode_utf8().ok().filter(|file| is_file_name(file));
    let file = file.map_or_else(|| "a file".to_owned(), Cow::into_owned);
    let absent = ABSENT.iter().find(|(prefix, _)| reason.starts_with(prefix)).map(|(_, answer)| *answer);
    Some(FetchFailure { file, absent })
}

fn is_file_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b".+~_:-".contains(&b))
}

/// Returns true for names that the distribution's policy allows.
pub(crate) fn is_package(text: &str) -> bool {
    let first = text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    first && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b))
}

/// Returns true for versions that the distribution's policy allows. No allowed character has a meaning in a pattern.
pub(crate) fn is_version(text: &str) -> bool {
    let first = text.bytes().next().is_some_and(|b| b.is_ascii_digit());
    first && text.bytes().all(|b| b.is_ascii_alphanumeric() || b".+~:-".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABSENT_DEB: &str = "E: Failed to fetch http://a.invalid/pool/o/openssl/libssl3_3.0.22-1%7edeb12u2%2bb1_amd64.deb  404  Not Found [IP: 192.0.2.1 80]";

    #[test]
    fn an_absent_file_is_told_from_an_unreachable_one() {
        let text = format!(
            "Err:1 http://a.invalid/debian bookworm/main amd64 libssl3 amd64 3.0.22\n  404  Not Found\n{ABSENT_DEB}\n\
             E: Failed to fetch http://a.invalid/x_1.dsc  Could not resolve 'a.invalid'\n\
             E: Failed to fetch http://a.invalid/y_1.dsc  Unable to connect to 127.0.0.1:9:\n\
             E: Failed to fetch http://a.invalid/z_1.dsc  410  Gone [IP: 192.0.2.1 80]\n\
             E: Failed to fetch file:/a/v_1.dsc  File not found - /a/v_1.dsc (2: No such file or directory)\n\
             E: Failed to fetch http://a.invalid/w_1.dsc  503  404 Not Found\nE: Failed to fetch some archives.\n"
        );
        let found = failures(&text);
        let shown: Vec<_> = found.iter().map(|f| (f.file.as_str(), f.absent)).collect();
        assert_eq!(
            shown,
            [
                ("libssl3_3.0.22-1~deb12u2+b1_amd64.deb", Some("404")),
                ("x_1.dsc", None),
                ("y_1.dsc", None),
                ("z_1.dsc", Some("410")),
                ("v_1.dsc", Some("no such file")),
                ("w_1.dsc", None),
            ]
        );
        assert_eq!(found[0].binary(), Some(("libssl3", "3.0.22-1~deb12u2+b1")));
        assert_eq!(found[1].binary(), None);
        assert_eq!(all_absent(&text), None);
        assert_eq!(all_absent(ABSENT_DEB).map(|f| f.len()), Some(1));
        assert_eq!(all_absent("E: Unable to locate package x\n"), None);
    }

    #[test]
    fn hostile_output_names_nothing() {
        for line in [
            "",
            "Failed to fetch http://a.invalid/x_1_amd64.deb  404  Not Found",
            "E: Failed to fetch http://a.invalid/x_1_amd64.deb 404 Not Found",
            "E: Failed to fetch ",
            "E: failed to fetch http://a.invalid/x_1_amd64.deb  404  Not Found",
            "N: Failed to fetch http://a.invalid/x_1_amd64.deb  404  Not Found",
        ] {
            assert_eq!(failures(line), [], "{line}");
        }
        for file in [
            "x_1_amd64.deb%",
            "x_1_amd64.deb%0",
            "x%0aPackage:%20*_1_amd64.deb",
            "x_1*_amd64.deb",
            "x_%2f1_amd64.deb",
            "%ff_1_amd64.deb",
            "*_1_amd64.deb",
            "X_1_amd64.deb",
            "x__amd64.deb",
            "_1_amd64.deb",
            "x_1.deb",
            "x_1_amd64_2.deb",
            "x_v1_amd64.deb",
            "x_1_amd64.udeb",
            "\u{1b}[2J_1_amd64.deb",
            "",
        ] {
            let found = failures(&format!("E: Failed to fetch http://a.invalid/{file}  404  Not Found"));
            assert_eq!(found.len(), 1, "{file:?}");
            assert_eq!(found[0].binary(), None, "{file:?}");
            assert!(found[0].file.bytes().all(|b| b.is_ascii_graphic() || b == b' '), "{file:?}");
        }
        let long = "x".repeat(1 << 20);
        assert_eq!(failures(&format!("E: Failed to fetch {long}")), []);
        let twice = format!("{ABSENT_DEB}\n{}", ABSENT_DEB.replace("404  Not Found", "Connection timed out"));
        assert_eq!(all_absent(&twice), None, "one file failed in two ways");
    }
}
