//! Debian source packages: the series of diffs, the CVEs that each one fixes, and the names that users give them.

use crate::Error;
use sha2::{Digest, Sha256};
use std::path::Path;
use stillpoint_host::file::read_named;
use stillpoint_host::untrusted::Tree;
use stillpoint_patch_format::DiffFact;
use stillpoint_patch_provenance::cves;

/// Size limit of a diff that the user names, in bytes.
const DIFF_MAX: u64 = 256 << 20;

/// One diff: an entry of a series, or a file of the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diff {
    /// Name as in `debian/patches/series`, or the file's name.
    pub name: String,
    /// CVE identifiers in its name and header.
    pub cves: Vec<String>,
    /// The first line of its description.
    pub subject: String,
    /// Text of the diff.
    pub text: Vec<u8>,
}

impl Diff {
    /// Makes a diff from a text.
    pub fn new(name: &str, text: Vec<u8>) -> Self {
        let header = header(&text);
        let cves = cves(&format!("{name}\n{header}"));
        Diff { name: name.to_owned(), cves, subject: subject(&header), text }
    }

    /// Reads a diff from a file.
    ///
    /// # Errors
    /// The file cannot be read, is too large, or contains no unified diff ([`Error::Malformed`]).
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = read_named(path, DIFF_MAX)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        if crate::diff::split(&text).is_empty() {
            return Err(Error::Malformed { what: path.display().to_string(), why: "no unified diff in it".into() });
        }
        Ok(Diff::new(&name, text))
    }

    /// Returns the entry of a patch file for this diff.
    pub fn fact(&self) -> DiffFact {
        DiffFact { name: self.name.clone(), sha256: Sha256::digest(&self.text).into() }
    }

    /// Returns the name without directory and suffix.
    pub fn short_name(&self) -> &str {
        let base = self.name.rsplit('/').next().unwrap_or(&self.name);
        base.strip_suffix(".patch").or_else(|| base.strip_suffix(".diff")).unwrap_or(base)
    }
}

/// Returns the text before the first changed file.
fn header(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let end = |line: &&str| !line.starts_with("diff ") && !line.starts_with("--- a/") && !line.starts_with("--- /");
    text.lines().take_while(end).map(|l| format!("{l}\n")).collect()
}

fn subject(header: &str) -> String {
    let fields = ["Subject:", "Description:"];
    let line = header.lines().find_map(|l| fields.iter().find_map(|f| l.strip_prefix(f)));
    let line = line.or_else(|| header.lines().find(|l| !l.trim().is_empty() && !l.starts_with("From"))).unwrap_or("");
    let line = line.trim();
    match line.strip_prefix("[PATCH").and_then(|rest| rest.split_once(']')) {
        Some((_, rest)) => rest.trim().to_owned(),
        None => line.to_owned(),
    }
}

/// Number of entries that are proposed for an unknown name.
const CLOSEST_MAX: usize = 3;

/// Returns the number of bytes to insert, delete or replace.
fn edit_distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (at, byte) in from.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in to.bytes().enumerate() {
            let replaced = diagonal + usize::from(byte != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

/// The diffs of a source package, in the order in which they are applied.
#[derive(Debug, Clone)]
pub struct Series {
    /// Package and version, for messages.
    pub of: String,
    /// The diffs.
    pub diffs: Vec<Diff>,
}

impl Series {
    /// Reads `debian/patches/series`. A package without one has an empty series.
    pub(crate) fn read(of: String, source: &Path) -> Result<Self, Error> {
        let (tree, patches) = (Tree::open(source)?, Path::new("debian/patches"));
        let list = patches.join("series");
        let text = tree.read_existing(&list)?.unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let entries = text.lines().map(|l| l.split('#').next().unwrap_or("").trim()).filter(|l| !l.is_empty());
        let mut diffs = Vec::new();
        for entry in entries {
            let mut words = entry.split_whitespace();
            let name = words.next().unwrap_or(entry);
            if let Some(option) = words.find(|o| *o != "-p1") {
                let why = format!("{name} has option {option}, only -p1 is supported");
                return Err(Error::Malformed { what: source.join(list).display().to_string(), why });
            }
            diffs.push(Diff::new(name, tree.read(patches.join(name))?));
        }
        Ok(Series { of, diffs })
    }

    /// Finds an entry by its name, with or without directory and suffix, or by a CVE it fixes.
    ///
    /// # Errors
    /// [`Error::Quilt`] if no entry fits, or several.
    pub fn position(&self, name: &str) -> Result<usize, Error> {
        let exact = |d: &Diff| d.name == name || d.short_name() == name || d.name.rsplit('/').next() == Some(name);
        let by_cve = |d: &Diff| d.cves.iter().any(|c| c.eq_ignore_ascii_case(name));
        let find = |wanted: &dyn Fn(&Diff) -> bool| -> Vec<usize> {
            (0..self.diffs.len()).filter(|i| wanted(&self.diffs[*i])).collect()
        };
        let mut found = find(&exact);
        if found.is_empty() {
            found = find(&by_cve);
        }
        if let [one] = found[..] {
            return Ok(one);
        }
        let named =
            |indices: &[usize]| indices.iter().map(|i| self.diffs[*i].name.clone()).collect::<Vec<_>>().join(", ");
        let (many, candidates) = match found.len() {
            0 if self.diffs.is_empty() => ("no patch".to_owned(), "it has none".to_owned()),
            0 => {
                let closest = named(&self.closest(name));
                ("no patch".to_owned(), format!("the closest of its {} are {closest}", self.diffs.len()))
            }
            n => (format!("{n} patches"), named(&found)),
        };
        Err(Error::Quilt { name: name.to_owned(), package: self.of.clone(), found: many, entries: candidates })
    }

    /// Returns the entries of which a name, or a CVE that they fix, differs least from `name`.
    fn closest(&self, name: &str) -> Vec<usize> {
        let wanted = name.to_ascii_lowercase();
        let distance = |diff: &Diff| {
            let names = [diff.name.as_str(), diff.short_name()].into_iter().chain(diff.cves.iter().map(String::as_str));
            names.map(|name| edit_distance(&name.to_ascii_lowercase(), &wanted)).min()
        };
        let mut all: Vec<usize> = (0..self.diffs.len()).collect();
        all.sort_by_cached_key(|index| distance(&self.diffs[*index]));
        all.truncate(CLOSEST_MAX);
        all
    }

    /// Returns the named entries, in the order of the series, each once.
    ///
    /// # Errors
    /// As [`Series::position`], for any of the names.
    pub fn select(&self, names: &[String]) -> Result<Vec<Diff>, Error> {
        let mut positions = names.iter().map(|n| self.position(n)).collect::<Result<Vec<_>, _>>()?;
        positions.sort_unstable();
        positions.dedup();
        Ok(positions.into_iter().map(|i| self.diffs[i].clone()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series() -> Series {
        let diff = |name: &str, header: &str| {
            Diff::new(name, format!("{header}\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n").into())
        };
        Series {
            of: "demo 1-1".into(),
            diffs: vec![
                diff("debian/0001-paths.patch", "From: a\nSubject: [PATCH 1/9] Set paths"),
                diff("0002-fix.patch", "Description: Bound the length\nBug: cve-2024-12345, CVE-2024-99999"),
                diff("CVE-2025-1111.patch", ""),
                diff("CVE-2025-1111-followup.patch", ""),
            ],
        }
    }

    #[test]
    fn cves_come_from_names_and_headers() {
        let series = series();
        assert_eq!(series.diffs[0].cves, [""; 0]);
        assert_eq!(series.diffs[0].subject, "Set paths");
        assert_eq!(series.diffs[1].cves, ["CVE-2024-12345", "CVE-2024-99999"]);
        assert_eq!(series.diffs[2].cves, ["CVE-2025-1111"]);
    }

    #[test]
    fn names_are_found_as_people_write_them() {
        let series = series();
        assert_eq!(series.position("0001-paths").unwrap(), 0);
        assert_eq!(series.position("CVE-2024-99999").unwrap(), 1);
        assert_eq!(series.position("CVE-2025-1111").unwrap(), 2, "an exact name goes before a CVE");
        let error = series.position("CVE-1999-0001").unwrap_err().to_string();
        assert!(error.contains("no patch of the series of demo 1-1"), "{error}");
        let error = series.position("CVE-2024-99990").unwrap_err().to_string();
        assert!(error.contains("the closest of its 4 are 0002-fix.patch, CVE-2025-1111.patch, "), "{error}");
        assert_eq!(error.matches(".patch").count(), CLOSEST_MAX, "{error}");
        assert_eq!((edit_distance("", "ab"), edit_distance("kitten", "sitting")), (2, 3));
        let names = ["CVE-2025-1111".to_owned(), "0001-paths".to_owned(), "0001-paths.patch".to_owned()];
        let selected = series.select(&names).unwrap();
        assert_eq!(selected.len(), 2);
        assert_eq!(selected[0].short_name(), "0001-paths", "the order is the series', not the caller's");
    }

    #[test]
    fn a_series_has_no_file_from_outside_of_its_package() {
        let dir = tempfile::tempdir().unwrap();
        let package = dir.path().join("package");
        std::fs::create_dir_all(package.join("debian/patches")).unwrap();
        std::fs::write(dir.path().join("secret"), "x").unwrap();
        std::os::unix::fs::symlink("../../../secret", package.join("debian/patches/link")).unwrap();
        assert!(Series::read("p".into(), &package).unwrap().diffs.is_empty(), "it has none");
        for name in ["link", "../../../secret", "/etc/passwd"] {
            std::fs::write(package.join("debian/patches/series"), name).unwrap();
            let refused = Series::read("p".into(), &package).unwrap_err().to_string();
            assert!(refused.contains("leads out of"), "{name}: {refused}");
        }
    }
}
