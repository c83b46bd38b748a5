//! Security trackers as files: the JSON of Debian's security tracker, or records of OSV.
//!
//! Of a file of a hundred megabytes only the wanted source packages and release are held in memory.

use crate::version::compare;
use crate::{Error, cves, is_version};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use stillpoint_host::file::read_named;

/// Size limit of a tracker's file, in bytes.
const FILE_MAX: u64 = 1 << 30;

/// Release of the distribution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// Code name, for instance `bookworm`.
    pub codename: String,
    /// Number, for instance `12`.
    pub number: String,
    /// Distribution, for instance `debian`.
    pub distribution: String,
}

impl Release {
    /// Parses the text of `/etc/os-release`; `None` without a code name.
    pub fn parse(text: &str) -> Option<Release> {
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
            Some(value.trim_matches('"').to_owned())
        };
        let [number, distribution] = ["VERSION_ID", "ID"].map(|name| field(name).unwrap_or_default());
        Some(Release { codename: field("VERSION_CODENAME")?, number, distribution })
    }
}

/// Versions of source packages that fix CVEs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tracker {
    /// By source package: CVE and the version of the release that fixes it.
    fixed: BTreeMap<String, BTreeMap<String, String>>,
}

impl Tracker {
    /// Reads a file of a tracker for the wanted source packages.
    ///
    /// # Errors
    /// It cannot be read, or is neither the security tracker's JSON nor OSV's ([`Error::Malformed`]).
    pub fn read(path: &Path, release: &Release, sources: &BTreeSet<&str>) -> Result<Tracker, Error> {
        let bytes = read_named(path, FILE_MAX)?;
        let malformed = |why: String| Error::Malformed { what: format!("tracker file {}", path.display()), why };
        Tracker::parse(&bytes, release, sources).map_err(malformed)
    }

    /// Parses the contents of a tracker's file.
    ///
    /// # Errors
    /// The first fault, for people.
    pub fn parse(bytes: &[u8], release: &Release, sources: &BTreeSet<&str>) -> Result<Tracker, String> {
        let mut tracker = Tracker::default();
        let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Document>();
        let mut known = 0usize;
        for value in &mut values {
            match value.map_err(|error| error.to_string())? {
                Document::Records(records) => {
                    known += records.len();
                    records.iter().for_each(|record| tracker.add(record, release, sources));
                }
                Document::Packages(packages) => {
                    known += packages.len();
                    for (source, problems) in
                        packages.into_iter().filter(|(source, _)| sources.contains(source.as_str()))
                    {
                        tracker.add_package(&source, problems, release);
                    }
                }
            }
        }
        match known {
            0 => Err("it has no records".into()),
            _ => Ok(tracker),
        }
    }

    fn add_package(&mut self, source: &str, problems: BTreeMap<String, Problem>, release: &Release) {
        let of_package = self.fixed.entry(source.to_owned()).or_default();
        for (name, mut problem) in problems {
            let Some(state) = problem.releases.remove(&release.codename) else { continue };
            // version 0: this release never had the problem
            let fixed = state.fixed_version.filter(|version| is_version(version) && version != "0");
            if let (true, Some(version)) = (state.status == "resolved" && name.starts_with("CVE-"), fixed) {
                of_package.insert(name, version);
            }
        }
    }

    fn add(&mut self, record: &Record, release: &Release, sources: &BTreeSet<&str>) {
        let names = [&record.id].into_iter().chain(&record.aliases).chain(&record.upstream).chain(&record.related);
        let names = cves(&names.map(String::as_str).collect::<Vec<_>>().join(" "));
        let ecosystem = format!("Debian:{}", release.number);
        let affected = |affected: &&Affected| {
            let package = affected.package.as_ref();
            package.is_some_and(|package| package.ecosystem == ecosystem && sources.contains(package.name.as_str()))
        };
        for affected in record.affected.iter().filter(affected) {
            let Some(package) = &affected.package else { continue };
            let events =
                affected.ranges.iter().filter(|range| range.kind == "ECOSYSTEM").flat_map(|range| &range.events);
            let fixed = events.filter_map(|event| event.fixed.as_deref()).filter(|version| is_version(version));
            let Some(version) = fixed.max_by(|a, b| compare(a, b)) else { continue };
            let of_package = self.fixed.entry(package.name.clone()).or_default();
            for name in &names {
                let known = of_package.entry(name.clone()).or_insert_with(|| version.to_owned());
                // an advisory and the record of its CVE may differ: the first version that has the fix counts
                if compare(version, known) == Ordering::Less {
                    version.clone_into(known);
                }
            }
        }
    }

    /// Returns the CVEs that a version of a source package has, and a later version of this release has not, each with the version that
    /// fixes it; `None` if the file does not have the package.
    pub fn fixed_after(&self, source: &str, version: &str) -> Option<BTreeMap<String, String>> {
        let is_later = |fixed: &String| compare(fixed, version) == Ordering::Greater;
        let later = self.fixed.get(source)?.iter().filter(|(_, fixed)| is_later(fixed));
        Some(later.map(|(name, fixed)| (name.clone(), fixed.clone())).collect())
    }
}

/// JSON value at the top of a file.
enum Document {
    /// Records of OSV: one, a list, or the reply `{"vulns": [...]}`.
    Records(Vec<Record>),
    /// Security tracker: problems by source package.
    Packages(BTreeMap<String, BTreeMap<String, Problem>>),
}

#[derive(Deserialize)]
struct Problem {
    releases: BTreeMap<String, State>,
}

#[derive(Deserialize)]
struct State {
    status: String,
    fixed_version: Option<String>,
}

#[derive(Deserialize, Default)]
struct Record {
    id: String,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default)]
    upstream: Vec<String>,
    #[serde(default)]
    related: Vec<String>,
    #[serde(default)]
    affected: Vec<Affected>,
}

#[derive(Deserialize)]
struct Affected {
    package: Option<Package>,
    #[serde(default)]
    ranges: Vec<Range>,
}

#[derive(Deserialize)]
struct Package {
    ecosystem: String,
    name: String,
}

#[derive(Deserialize)]
struct Range {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    fixed: Option<String>,
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Document, D::Error> {
        deserializer.deserialize_any(DocumentVisitor)
    }
}

struct DocumentVisitor;

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("problems by source package, or records of OSV")
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Document, A::Error> {
        let mut records = Vec::new();
        while let Some(record) = list.next_element()? {
            records.push(record);
        }
        Ok(Document::Records(records))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
        let (mut record, mut is_record) = (Record::default(), false);
        let mut packages = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "vulns" => {
                    let records = map.next_value()?;
                    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                    return Ok(Document::Records(records));
                }
                "id" => (record.id, is_record) = (map.next_value()?, true),
                // no source package has the name of a field whose value is a list or a text
                "aliases" => record.aliases = map.next_value()?,
                "upstream" => record.upstream = map.next_value()?,
                "related" => record.related = map.next_value()?,
                "affected" => (record.affected, is_record) = (map.next_value()?, true),
                "schema_version" | "modified" | "published" | "withdrawn" | "summary" | "details" | "references"
                | "severity" | "credits" | "database_specific" => {
                    map.next_value::<IgnoredAny>()?;
                }
                _ if is_record => {
                    map.next_value::<IgnoredAny>()?;
                }
                _ => {
                    packages.insert(key, map.next_value()?);
                }
            }
        }
        Ok(match is_record {
            true => Document::Records(vec![record]),
            false => Document::Packages(packages),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release() -> Release {
        Release::parse("NAME=x\nVERSION_CODENAME=bookworm\nVERSION_ID=\"12\"\n").unwrap()
    }

    fn parse(text: &str) -> Result<Tracker, String> {
        Tracker::parse(text.as_bytes(), &release(), &BTreeSet::from(["redis", "openssl"]))
    }

    fn fixed(name: &str, version: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(name.to_owned(), version.to_owned())])
    }

    #[test]
    fn the_security_trackers_problems_count_for_one_release() {
        let state =
            |status: &str, fixed: &str| format!(r#"{{"status":"{status}","fixed_version":"{fixed}","urgency":"low"}}"#);
        let problem =
            |release: &str, state: String| format!(r#"{{"description":"x","releases":{{"{release}":{state}}}}}"#);
        let text = format!(
            r#"{{"redis":{{"CVE-2025-1111":{},"CVE-2025-2222":{},"CVE-2025-3333":{},"CVE-2025-4444":{},"TEMP-1":{}}},"other":{{"CVE-1":{}}}}}"#,
            problem("bookworm", state("resolved", "5:7.0.15-1~deb12u3")),
            problem("trixie", state("resolved", "9")),
            problem("bookworm", state("open", "1")),
            problem("bookworm", state("resolved", "0")),
            problem("bookworm", state("resolved", "5:9")),
            problem("bookworm", state("resolved", "9")),
        );
        let tracker = parse(&text).unwrap();
        assert_eq!(
            tracker.fixed_after("redis", "5:7.0.15-1~deb12u2").unwrap(),
            fixed("CVE-2025-1111", "5:7.0.15-1~deb12u3")
        );
        assert_eq!(tracker.fixed_after("redis", "5:7.0.15-1~deb12u3").unwrap(), BTreeMap::new());
        assert_eq!(tracker.fixed_after("other", "1"), None, "not asked for");
        assert_eq!(tracker.fixed_after("openssl", "1"), None, "not in the file");
    }

    #[test]
    fn records_of_osv_count_by_ecosystem_and_may_be_lists() {
        let record = |id: &str, ecosystem: &str, fixed: &str| {
            format!(
                r#"{{"id":"{id}","summary":"x","upstream":["CVE-2025-9999"],"affected":[{{"package":{{"ecosystem":"{ecosystem}","name":"openssl"}},"ranges":[{{"type":"ECOSYSTEM","events":[{{"introduced":"0"}},{{"fixed":"{fixed}"}}]}}]}}]}}"#
            )
        };
        let one = record("DEBIAN-CVE-2025-9999", "Debian:12", "3.0.20-1");
        let two = record("DSA-1-1", "Debian:12", "3.0.22-1");
        let other = record("DSA-2-1", "Debian:13", "9");
        for text in [
            one.clone(),
            format!("[{one},{two},{other}]"),
            format!(r#"{{"vulns":[{one}],"next":"x"}}"#),
            format!("{one}\n{two}\n"),
        ] {
            let tracker = parse(&text).unwrap();
            assert_eq!(
                tracker.fixed_after("openssl", "3.0.19-1").unwrap(),
                fixed("CVE-2025-9999", "3.0.20-1"),
                "{text}"
            );
            assert_eq!(tracker.fixed_after("openssl", "3.0.20-1").unwrap(), BTreeMap::new(), "{text}");
        }
    }

    #[test]
    fn what_is_no_tracker_is_an_error() {
        for text in [
            "",
            "{}",
            "[]",
            "x",
            "[1]",
            r#"{"a":1}"#,
            r#"{"redis":{"CVE-1":{}}}"#,
            r#"{"id":"a","affected":7}"#,
            "{\"redis\":{",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
