//! Changelogs of Debian packages: versions, their dates, and the CVEs that they name.

use crate::{compare_versions, cves, is_version};
use flate2::read::MultiGzDecoder;
use std::cmp::Ordering;
use std::io::Read;
use std::path::{Path, PathBuf};
use stillpoint_host::file::bounded;
use stillpoint_host::untrusted::Tree;

/// Size limit of a compressed changelog, in bytes.
const FILE_MAX: u64 = 16 << 20;
/// Limit of the text of a changelog in bytes; its newest entries come first.
const TEXT_MAX: u64 = 32 << 20;

/// One version in a changelog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Version of the source package, or of a rebuild.
    pub version: String,
    /// Seconds since 1970. Builds give this time to every file that they make.
    pub date_s: Option<i64>,
    /// CVE identifiers in its text.
    pub cves: Vec<String>,
}

/// Changelog of an installed package, newest entry first; empty if the machine has none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changelog(pub Vec<Entry>);

impl Changelog {
    /// Reads the changelog of an installed package, with the entry of its rebuild.
    pub fn of_installed(root: &Tree, package: &str, architecture: &str) -> Changelog {
        let directory = Path::new("usr/share/doc").join(package);
        // a native package has no other changelog than its own
        let names = ["changelog.Debian.gz", "changelog.gz", "changelog.Debian", "changelog"];
        let rebuild = format!("changelog.Debian.{architecture}.gz");
        let text = |name: &str| read(root, &directory.join(name));
        let mut all = text(&rebuild).map(|text| entries(&text)).unwrap_or_default();
        let own = names.iter().filter_map(|name| text(name)).map(|text| entries(&text)).find(|own| !own.is_empty());
        all.extend(own.unwrap_or_default());
        Changelog(all)
    }

    /// Parses a changelog; lines of other forms are left out.
    pub fn parse(text: &str) -> Changelog {
        Changelog(entries(text))
    }

    /// Returns the version whose date is the time of a file, if it is a single one.
    pub fn version_of(&self, modified_s: i64) -> Option<&str> {
        let mut dated = self.0.iter().filter(|entry| entry.date_s == Some(modified_s));
        let found = dated.next()?;
        dated.all(|other| other.version == found.version).then_some(found.version.as_str())
    }

    /// Returns those CVEs between two versions that the changelog of an older package does not name.
    pub fn cves_gained(&self, older: &Changelog, from: &str, to: &str) -> Option<Vec<String>> {
        let mut found = self.cves_between(from, to)?;
        found.retain(|cve| older.0.iter().all(|entry| !entry.cves.contains(cve)));
        Some(found)
    }

    /// Returns the CVEs that versions above `from`, up to `to`, name; `None` if the changelog does not reach back to `from`.
    pub fn cves_between(&self, from: &str, to: &str) -> Option<Vec<String>> {
        self.0.iter().find(|entry| compare_versions(&entry.version, from) != Ordering::Greater)?;
        let within = |entry: &&Entry| {
            compare_versions(&entry.version, from) == Ordering::Greater
                && compare_versions(&entry.version, to) != Ordering::Greater
        };
        let mut found: Vec<String> = self.0.iter().filter(within).flat_map(|entry| entry.cves.clone()).collect();
        found.sort();
        found.dedup();
        Some(found)
    }
}

/// Reads a changelog, compressed or not; `None` if it is not there or cannot be read.
fn read(root: &Tree, path: &PathBuf) -> Option<String> {
    let bytes = bounded(&root.file(path).ok()?, path, FILE_MAX).ok()?;
    let mut text = Vec::new();
    match path.extension().is_some_and(|extension| extension == "gz") {
        true => MultiGzDecoder::new(&bytes[..]).take(TEXT_MAX).read_to_end(&mut text).ok()?,
        false => (&bytes[..]).take(TEXT_MAX).read_to_end(&mut text).ok()?,
    };
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Parses the entries of a changelog, newest first.
fn entries(text: &str) -> Vec<Entry> {
    let (mut found, mut open) = (Vec::new(), None::<(String, String)>);
    for line in text.lines() {
        if let Some(version) = heading(line) {
            open = Some((version.to_owned(), String::new()));
        } else if let Some(trailer) = line.strip_prefix(" -- ") {
            if let Some((version, body)) = open.take() {
                let date_s = trailer.rsplit_once("  ").and_then(|(_, date)| seconds(date));
                found.push(Entry { version, date_s, cves: cves(&body) });
            }
        } else if let Some((_, body)) = &mut open {
            body.push_str(line);
            body.push('\n');
        }
    }
    found
}

/// Returns the version in `PACKAGE (VERSION) DISTRIBUTION; urgency=...`.
fn heading(line: &str) -> Option<&str> {
    let (package, rest) = line.split_once(" (")?;
    let (version, rest) = rest.split_once(')')?;
    (!package.starts_with(' ') && rest.contains(';') && is_version(version)).then_some(version)
}

/// Converts `Mon, 02 Jan 2023 13:06:21 +0100` to seconds since 1970.
fn seconds(date: &str) -> Option<i64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (_, date) = date.split_once(',')?;
    let mut words = date.split_ascii_whitespace();
    let day: i64 = words.next()?.parse().ok().filter(|day| (1..=31).contains(day))?;
    let name = words.next()?;
    let month = MONTHS.iter().position(|month| *month == name)? as i64 + 1;
    let year: i64 = words.next()?.parse().ok().filter(|year| (1970..=9999).contains(year))?;
    let mut clock =
        words.next()?.split(':').map(|part| part.parse::<i64>().ok().filter(|part| (0..=60).contains(part)));
    let (hours, minutes, seconds) = (clock.next()??, clock.next()??, clock.next()??);
    let zone: i64 = words.next()?.parse().ok().filter(|zone: &i64| zone.abs() <= 2400)?;
    let zone_s = (zone / 100) * 3600 + (zone % 100) * 60;
    // days of the calendar with years that begin in March (H. Hinnant, "chrono-compatible low-level date algorithms")
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(days * 86_400 + hours * 3600 + minutes * 60 + seconds - zone_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
demo (2:1.0-1+deb12u3) bookworm-security; urgency=high

  * Non-maintainer upload.
  * CVE-2026-11111: bound the length
    (Closes: #1) CVE-2026-22222

 -- A B <a@b.invalid>  Fri, 03 Apr 2026 14:29:32 +0200

demo (2:1.0-1+deb12u2) bookworm; urgency=medium

  * cve-2025-33333

 -- A -- B <a@b.invalid>  Mon, 02 Jan 2023 13:06:21 +0100

demo (2:1.0-1) unstable; urgency=medium
  * First. CVE-2020-12345
 -- A B <a@b.invalid>  Thu, 29 Feb 2024 00:00:00 -0130
";

    fn changelog() -> Changelog {
        Changelog::parse(TEXT)
    }

    #[test]
    fn entries_have_versions_dates_and_cves() {
        let log = changelog();
        let versions: Vec<&str> = log.0.iter().map(|entry| entry.version.as_str()).collect();
        assert_eq!(versions, ["2:1.0-1+deb12u3", "2:1.0-1+deb12u2", "2:1.0-1"]);
        // date -d '...' +%s
        let dates: Vec<_> = log.0.iter().map(|entry| entry.date_s).collect();
        assert_eq!(dates, [Some(1_775_219_372), Some(1_672_661_181), Some(1_709_170_200)]);
        assert_eq!(log.version_of(1_775_219_372), Some("2:1.0-1+deb12u3"));
        assert_eq!(log.version_of(1), None);
        let twice = Changelog([log.0[..1].to_vec(), vec![Entry { version: "9".into(), ..log.0[0].clone() }]].concat());
        assert_eq!(twice.version_of(1_775_219_372), None, "two versions have this date");
    }

    #[test]
    fn cves_are_those_after_the_version_that_runs() {
        let log = changelog();
        let between = |from, to| log.cves_between(from, to);
        assert_eq!(between("2:1.0-1+deb12u2", "2:1.0-1+deb12u3").unwrap(), ["CVE-2026-11111", "CVE-2026-22222"]);
        assert_eq!(between("2:1.0-1", "2:1.0-1+deb12u2").unwrap(), ["CVE-2025-33333"]);
        assert_eq!(between("2:1.0-1+deb12u3", "2:1.0-1+deb12u3").unwrap(), [""; 0]);
        assert_eq!(between("2:0.9-1", "2:1.0-1+deb12u3"), None, "it does not reach back");
        assert_eq!(Changelog::default().cves_between("1", "2"), None);
    }

    #[test]
    fn a_rebuilt_older_version_has_what_its_own_changelog_names() {
        let (log, to) = (changelog(), "2:1.0-1+deb12u3");
        // a build of the same source without some diffs, at a version below it
        let rebuilt = Changelog::parse(&TEXT.replace("CVE-2026-22222", ""));
        assert_eq!(log.cves_gained(&rebuilt, "2:1.0-1+deb12u3~1", to).unwrap(), ["CVE-2026-22222"]);
        assert_eq!(log.cves_gained(&log, "2:1.0-1+deb12u3~1", to).unwrap(), [""; 0]);
    }

    #[test]
    fn what_is_no_changelog_has_no_entries() {
        for text in ["", "a (b) c; d\n -- x  y\n", " -- a <b>  Fri, 03 Apr 2026 14:29:32 +0200\n", "x (1) y\n"] {
            assert_eq!(entries(text), [], "{text}");
        }
        for date in [
            "",
            "Fri, 3",
            "Fri, 32 Jan 2026 00:00:00 +0000",
            "Fri, 01 Jan 99999999999 00:00:00 +0000",
            "x, 1 Jan 2026 1:2 +0",
        ] {
            assert_eq!(seconds(date), None, "{date}");
        }
    }
}
