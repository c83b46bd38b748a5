//! Versions that the archives of this machine offer, by the lists that apt has fetched.

use crate::version::compare;
use crate::{Error, is_package, is_version};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};
use stillpoint_host::file::list;

/// Packages of one call.
const BATCH: usize = 400;

/// Versions of one package.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Version that an upgrade would install, by the priorities of this machine.
    pub(crate) candidate: String,
    rows: Vec<Row>,
}

/// One version in the lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Row {
    version: String,
    /// True if a list of an archive has it, and not the database of installed packages alone.
    is_archived: bool,
    /// True if a list of security updates has it.
    is_security: bool,
}

impl Offer {
    /// Returns true if a list of an archive has the package.
    pub(crate) fn is_archived(&self) -> bool {
        self.rows.iter().any(|row| row.is_archived)
    }

    /// Returns true if a list of security updates has a version above `version`, up to the candidate.
    pub(crate) fn has_security_update(&self, version: &str) -> bool {
        let is_wanted = |row: &&Row| {
            row.is_security
                && compare(&row.version, version) == Ordering::Greater
                && compare(&row.version, &self.candidate) != Ordering::Greater
        };
        self.rows.iter().any(|row| is_wanted(&row))
    }
}

/// Returns the offers for packages, named with their architecture if it is not the machine's own: `libc6:i386`. A package that no list has
/// is left out.
///
/// # Errors
/// [`Error::Program`] if `apt-cache` fails.
pub(crate) fn offers(packages: &[String]) -> Result<BTreeMap<String, Offer>, Error> {
    let mut found = BTreeMap::new();
    let sound: Vec<&String> =
        packages.iter().filter(|name| is_package(name.split(':').next().unwrap_or_default())).collect();
    for batch in sound.chunks(BATCH) {
        let mut command = Command::new("apt-cache");
        command.env_clear().env("LC_ALL", "C").envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        let output = command.args(["policy", "--"]).args(batch).stdin(Stdio::null()).output();
        let failed = |why: String| Error::Program { program: "apt-cache", why };
        let output = output.map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            return Err(failed(format!("{}: {}", output.status, text.trim().chars().take(400).collect::<String>())));
        }
        found.extend(parse(&String::from_utf8_lossy(&output.stdout)));
    }
    Ok(found)
}

/// Directory of the lists that apt has fetched.
const LISTS: &str = "/var/lib/apt/lists";

/// Returns the age of the newest signed index among the lists; `None` if there is none. An archive signs the indexes of updates several times
/// a day, and apt gives its copy the archive's time: an update that failed changes nothing here.
pub(crate) fn lists_age() -> Option<Duration> {
    let names = list(Path::new(LISTS)).unwrap_or_default();
    let indexes = names.iter().filter(|name| name.ends_with("InRelease") || name.ends_with("_Release"));
    let modified = |name: &String| Path::new(LISTS).join(name).metadata().and_then(|found| found.modified()).ok();
    let newest = indexes.filter_map(modified).max()?;
    Some(SystemTime::now().duration_since(newest).unwrap_or_default())
}

/// Parses the output of `apt-cache policy`.
fn parse(text: &str) -> BTreeMap<String, Offer> {
    let (mut found, mut name) = (BTreeMap::<String, Offer>::new(), String::new());
    for line in text.lines() {
        if !line.starts_with(' ') {
            name = line.strip_suffix(':').unwrap_or_default().to_owned();
            if !name.is_empty() {
                found.entry(name.clone()).or_default();
            }
            continue;
        }
        let Some(offer) = found.get_mut(&name) else { continue };
        if let Some(version) = line.strip_prefix("  Candidate: ") {
            version.clone_into(&mut offer.candidate);
        } else if let Some(origin) = line.strip_prefix("        ") {
            // `500 http://archive.invalid/debian bookworm/main amd64 Packages`
            let mut words = origin.split_ascii_whitespace().skip(1);
            let (place, suite) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            if let Some(row) = offer.rows.last_mut() {
                row.is_archived |= place.contains("://") || place.starts_with("file:") || place.starts_with("cdrom:");
                let suite = suite.split('/').next().unwrap_or_default();
                row.is_security |= suite.ends_with("-security") || place.contains("security.");
            }
        } else if let Some(row) = line.strip_prefix("     ").or_else(|| line.strip_prefix(" *** ")) {
            let version = row.split_ascii_whitespace().next().unwrap_or_default();
            if is_version(version) {
                offer.rows.push(Row { version: version.to_owned(), ..Row::default() });
            }
        }
    }
    found.retain(|_, offer| is_version(&offer.candidate));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "\
libssl3:
  Installed: 3.0.19-1~deb12u2
  Candidate: 3.0.22-1~deb12u2
  Version table:
     3.0.22-1~deb12u2 500
        500 http://archive.invalid/debian-security bookworm-security/main amd64 Packages
     3.0.20-1~deb12u2 500
        500 http://archive.invalid/debian bookworm/main amd64 Packages
 *** 3.0.19-1~deb12u2 100
        100 /var/lib/dpkg/status
own:
  Installed: 1-1
  Candidate: 1-1
  Version table:
 *** 1-1 100
        100 /var/lib/dpkg/status
none:
  Installed: (none)
  Candidate: (none)
  Version table:
libc6:i386:
  Installed: 2.36-9
  Candidate: 2.36-9+b1
  Version table:
     2.36-9+b1 500
        500 http://archive.invalid/debian bookworm/main i386 Packages
";

    #[test]
    fn offers_have_the_candidate_and_its_origin() {
        let found = parse(POLICY);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["libc6:i386", "libssl3", "own"]);
        let ssl = &found["libssl3"];
        assert_eq!(ssl.candidate, "3.0.22-1~deb12u2");
        assert!(ssl.is_archived() && ssl.has_security_update("3.0.19-1~deb12u2"));
        assert!(!ssl.has_security_update("3.0.22-1~deb12u2"));
        assert!(!found["own"].is_archived(), "only installed");
        assert!(found["libc6:i386"].is_archived() && !found["libc6:i386"].has_security_update("2.36-9"));
        assert!(parse("x\n y\n     1 2\n").is_empty());
    }

    #[test]
    fn this_machine_answers() {
        let found = offers(&["dpkg".into(), "no-such-package-of-anyone".into(), "-o".into()]).unwrap();
        assert!(found["dpkg"].candidate.starts_with(|c: char| c.is_ascii_digit()));
        assert_eq!(found.len(), 1);
    }
}
