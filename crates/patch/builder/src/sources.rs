//! The system's own source lists, read at run time: the archives of this release's packages and sources.

use crate::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use stillpoint_host::file::{list, read_regular_text};
use stillpoint_patch_provenance::deb822::{Stanza, stanzas};

/// Size limit of a file of the system, in bytes.
const FILE_MAX: u64 = 16 << 20;

/// One archive, as a deb822 stanza describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Archive {
    uris: String,
    suites: Vec<String>,
    signed_by: Option<String>,
}

/// The archives of one release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Archives {
    /// Name of the release, for instance `bookworm`.
    pub(crate) codename: String,
    archives: Vec<Archive>,
}

impl Archives {
    /// Reads `/etc/os-release`, `/etc/apt/sources.list` and `/etc/apt/sources.list.d`.
    fn of_this_system() -> Result<Self, Error> {
        let text = read_regular_text(Path::new("/etc/os-release"), FILE_MAX)?;
        let codename = text
            .lines()
            .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
            .map(|v| v.trim_matches('"').to_owned())
            .ok_or_else(|| Error::NoSources("a release: /etc/os-release has no VERSION_CODENAME".into()))?;
        let mut archives = Vec::new();
        for path in list_files()? {
            let text = read_regular_text(&path, FILE_MAX)?;
            let found = match path.extension().and_then(|e| e.to_str()) {
                Some("sources") => deb822(&text),
                _ => one_line(&text),
            };
            archives.extend(found.into_iter().filter_map(|a| a.of_release(&codename)));
        }
        archives.dedup();
        if archives.is_empty() {
            return Err(Error::NoSources(format!("{codename}, component main")));
        }
        Ok(Archives { codename, archives })
    }

    /// Returns the archives of a release of the distribution: this system's own release, or another one in the same
    /// archives.
    pub(crate) fn of(release: Option<&str>) -> Result<Self, Error> {
        let own = Archives::of_this_system()?;
        match release {
            Some(other) if !is_codename(other) => Err(Error::NoSources(format!("a release {other:?}"))),
            Some(other) => Ok(own.renamed(other)),
            None => Ok(own),
        }
    }

    fn renamed(mut self, codename: &str) -> Self {
        for suite in self.archives.iter_mut().flat_map(|a| &mut a.suites) {
            let suffix = suite.strip_prefix(&self.codename).unwrap_or_default();
            *suite = format!("{codename}{suffix}");
        }
        self.codename = codename.to_owned();
        self
    }

    /// Returns the same archives as a deb822 file, with packages and sources.
    pub(crate) fn to_text(&self) -> String {
        let mut out = String::new();
        for archive in &self.archives {
            let _ = writeln!(
                out,
                "Types: deb deb-src\nURIs: {}\nSuites: {}\nComponents: main",
                archive.uris,
                archive.suites.join(" ")
            );
            if let Some(signed_by) = &archive.signed_by {
                let _ = writeln!(out, "Signed-By: {signed_by}");
            }
            out.push('\n');
        }
        out
    }

    /// Returns the key rings that the archives name by path.
    pub(crate) fn key_rings(&self) -> Vec<PathBuf> {
        let signed_by = self.archives.iter().filter_map(|a| a.signed_by.as_deref());
        signed_by.flat_map(str::split_whitespace).filter(|w| w.starts_with('/')).map(PathBuf::from).collect()
    }
}

impl Archive {
    /// Keeps the part that belongs to a release; archives of third parties have other suites and no sources of Debian.
    fn of_release(mut self, codename: &str) -> Option<Archive> {
        let wanted = ["", "-updates", "-security", "/updates"].map(|suffix| format!("{codename}{suffix}"));
        self.suites.retain(|suite| wanted.contains(suite));
        (!self.suites.is_empty()).then_some(self)
    }
}

/// Returns true if a text may become part of file names and of apt's configuration.
fn is_codename(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase())
}

fn list_files() -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    let main = PathBuf::from("/etc/apt/sources.list");
    if main.exists() {
        files.push(main);
    }
    let parts = Path::new("/etc/apt/sources.list.d");
    if parts.exists() {
        let lists = list(parts)?.into_iter().filter(|name| name.ends_with(".list") || name.ends_with(".sources"));
        files.extend(lists.map(|name| parts.join(name)));
    }
    files.sort();
    Ok(files)
}

fn one_line(text: &str) -> Vec<Archive> {
    text.lines().filter_map(one_entry).collect()
}

fn one_entry(line: &str) -> Option<Archive> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb ").or_else(|| line.strip_prefix("deb-src "))?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace();
    let (uri, suite) = (words.next()?, words.next()?);
    let signed_by = options.split_whitespace().find_map(|o| o.strip_prefix("signed-by=")).map(|v| v.replace(',', " "));
    words.any(|component| component == "main").then(|| Archive {
        uris: uri.to_owned(),
        suites: vec![suite.to_owned()],
        signed_by,
    })
}

fn deb822(text: &str) -> Vec<Archive> {
    stanzas(text).iter().filter_map(archive).collect()
}

fn archive(stanza: &Stanza) -> Option<Archive> {
    let words = |name: &str| stanza.field(name).into_iter().flat_map(str::split_whitespace);
    let wanted = stanza.field("Enabled").is_none_or(|value| !value.eq_ignore_ascii_case("no"));
    (wanted && words("Components").any(|component| component == "main")).then_some(())?;
    Some(Archive {
        uris: words("URIs").collect::<Vec<_>>().join(" "),
        suites: words("Suites").map(str::to_owned).collect(),
        signed_by: stanza.field("Signed-By").map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_release_and_leaves_third_parties_out() {
        let lines = "# deb http://a.invalid/x bookworm main\n\
            deb [arch=amd64 signed-by=/k/a.gpg] http://a.invalid/debian bookworm main contrib\n\
            deb http://b.invalid/apt cloud-bookworm main\n\
            deb-src http://a.invalid/security bookworm-security main\n";
        let kept: Vec<Archive> = one_line(lines).into_iter().filter_map(|a| a.of_release("bookworm")).collect();
        let archives = Archives { codename: "bookworm".into(), archives: kept };
        assert_eq!(
            archives.to_text(),
            "Types: deb deb-src\nURIs: http://a.invalid/debian\nSuites: bookworm\nComponents: main\nSigned-By: /k/a.gpg\n\n\
             Types: deb deb-src\nURIs: http://a.invalid/security\nSuites: bookworm-security\nComponents: main\n\n"
        );
        assert_eq!(archives.key_rings(), [PathBuf::from("/k/a.gpg")]);
    }

    #[test]
    fn another_release_lies_in_the_same_places() {
        let line = "deb http://a.invalid/security bookworm-security main\ndeb http://a.invalid/debian bookworm main\n";
        let kept: Vec<Archive> = one_line(line).into_iter().filter_map(|a| a.of_release("bookworm")).collect();
        let older = Archives { codename: "bookworm".into(), archives: kept }.renamed("bullseye");
        assert_eq!(older.codename, "bullseye");
        let suites: Vec<&String> = older.archives.iter().flat_map(|a| &a.suites).collect();
        assert_eq!(suites, ["bullseye-security", "bullseye"]);
        assert!(is_codename("trixie") && !is_codename("") && !is_codename("../x") && !is_codename("a b"));
    }

    #[test]
    fn reads_stanzas_with_inline_keys() {
        let text = "Types: deb\n# a comment\nURIs: http://a.invalid/debian\nSuites: bookworm bookworm-updates other\n\
            Components: main\nSigned-By:\n -----BEGIN-----\n .\n abc\n\nTypes: deb\nURIs: http://x.invalid\nSuites: nodistro\n\
            Components: main\n\nTypes: deb\nURIs: http://y.invalid\nSuites: bookworm\nComponents: main\nEnabled: no\n";
        let kept: Vec<Archive> = deb822(text).into_iter().filter_map(|a| a.of_release("bookworm")).collect();
        assert_eq!(
            kept,
            [Archive {
                uris: "http://a.invalid/debian".into(),
                suites: vec!["bookworm".into(), "bookworm-updates".into()],
                signed_by: Some("\n -----BEGIN-----\n .\n abc".into()),
            }]
        );
    }
}
