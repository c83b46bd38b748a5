//! The archive through apt, with directories of our own: the system's configuration and lists stay untouched.

use crate::error::At;
use crate::sandbox::run;
use crate::sources::Archives;
use crate::{Cache, Error};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Lists older than this are fetched again.
const FRESH: Duration = Duration::from_secs(6 * 3600);

/// A private view of the archive.
#[derive(Debug)]
pub(crate) struct Apt {
    /// Where the lists come from.
    pub(crate) archives: Archives,
    config: PathBuf,
    directory: PathBuf,
}

impl Apt {
    /// Prepares the directories and fetches the lists when they are missing or old. Without a network, old lists do.
    pub(crate) fn open(cache: &Cache, release: Option<&str>) -> Result<Self, Error> {
        let archives = Archives::of(release)?;
        let text = archives.to_text();
        let directory = cache.directory("apt", &stillpoint_host::cache::key([text.as_bytes()]))?;
        let apt = Apt { archives, config: directory.join("apt.conf"), directory };
        let _lock = cache.lock("apt")?;
        apt.prepare(&text)?;
        let stamp = apt.directory.join("updated");
        let age = fs::metadata(&stamp).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
        if age.is_none_or(|age| age > FRESH) {
            match run(apt.command("apt-get").args(["-q", "update"]), "fetching the package lists") {
                Ok(_) => fs::write(&stamp, "").at("writing", &stamp)?,
                Err(error) if age.is_some() => tracing::warn!(%error, "keeping older package lists"),
                Err(error) => return Err(error),
            }
        }
        Ok(apt)
    }

    fn prepare(&self, sources: &str) -> Result<(), Error> {
        for part in ["lists/partial", "archives/partial"] {
            let path = self.directory.join(part);
            fs::create_dir_all(&path).at("making", &path)?;
        }
        let list = self.directory.join("archive.sources");
        fs::write(&list, sources).at("writing", &list)?;
        let directory = self.directory.display();
        // apt insists on the extension for deb822, so the list is a part and the main file is none
        let parts = self.directory.join("parts");
        fs::create_dir_all(&parts).at("making", &parts)?;
        let part = parts.join("archive.sources");
        fs::rename(&list, &part).at("naming", &part)?;
        let config = format!(
            "Dir::State::lists \"{directory}/lists\";\nDir::Cache \"{directory}\";\nDir::Cache::archives \"archives\";\n\
             Dir::Etc::sourcelist \"/dev/null\";\nDir::Etc::sourceparts \"{directory}/parts\";\n\
             Acquire::Languages \"none\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             APT::Sandbox::User \"root\";\nAPT::Get::List-Cleanup \"0\";\nAPT::Update::Post-Invoke-Success \"\";\n"
        );
        fs::write(&self.config, config).at("writing", &self.config)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.config).env("LC_ALL", "C.UTF-8");
        command
    }

    /// Every version of a binary package, newest first.
    pub(crate) fn binary_versions(&self, package: &str) -> Result<Vec<String>, Error> {
        let output = run(self.command("apt-cache").args(["madison", package]), "asking for the versions")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines = text.lines().map(|l| l.split('|').map(str::trim).collect::<Vec<_>>());
        let named = lines.filter(|f| f.len() == 3 && f[0] == package && f[2].ends_with("Packages"));
        let mut versions: Vec<String> = named.map(|f| f[1].to_owned()).collect();
        versions.dedup();
        Ok(versions)
    }

    /// The stanzas of a source package, newest version first.
    pub(crate) fn sources(&self, package: &str) -> Result<Vec<SourceStanza>, Error> {
        let output = run(
            self.command("apt-cache").args(["showsrc", "--only-source", package]),
            &format!("asking for the source of {package}"),
        )?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut stanzas: Vec<SourceStanza> = text.split("\n\n").filter_map(SourceStanza::parse).collect();
        stanzas.sort_by(|a, b| compare_versions(&b.version, &a.version));
        stanzas.dedup_by(|a, b| a.version == b.version);
        Ok(stanzas)
    }

    /// One version of a source package: exactly the one asked for, or the newest.
    pub(crate) fn source(&self, package: &str, version: Option<&str>) -> Result<SourceStanza, Error> {
        let mut stanzas = self.sources(package)?;
        let available: Vec<String> = stanzas.iter().map(|s| s.version.clone()).collect();
        match stanzas.iter().position(|s| version.is_none_or(|v| v == s.version)) {
            Some(at) => Ok(stanzas.swap_remove(at)),
            None => Err(no_version(package, version, &available)),
        }
    }

    /// Downloads a source package's files into `into`; the name of the `.dsc` comes back.
    pub(crate) fn download_source(&self, stanza: &SourceStanza, into: &Path) -> Result<PathBuf, Error> {
        let what = format!("{}={}", stanza.package, stanza.version);
        let mut command = self.command("apt-get");
        command.args(["-q", "--download-only", "--only-source", "source", &what]).current_dir(into);
        run(&mut command, &format!("downloading the source of {what}"))?;
        find_with_suffix(into, ".dsc")
    }

    /// Downloads a binary package into `into`.
    pub(crate) fn download_binary(&self, package: &str, version: &str, into: &Path) -> Result<PathBuf, Error> {
        let available = self.binary_versions(package)?;
        if !available.iter().any(|v| v == version) {
            return Err(no_version(package, Some(version), &available));
        }
        let what = format!("{package}={version}");
        let mut command = self.command("apt-get");
        command.args(["-q", "download", &what]).current_dir(into);
        run(&mut command, &format!("downloading {what}"))?;
        find_with_suffix(into, ".deb")
    }

    /// `Acquire` options of the system that a clean root needs as well: proxies.
    pub(crate) fn proxies(&self) -> Result<String, Error> {
        let output = run(self.command("apt-config").arg("dump"), "reading apt's configuration")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let wanted = |line: &&str| line.starts_with("Acquire::") && line.to_ascii_lowercase().contains("proxy");
        Ok(text.lines().filter(wanted).map(|line| format!("{line}\n")).collect())
    }
}

fn no_version(package: &str, version: Option<&str>, available: &[String]) -> Error {
    Error::NoSuchVersion {
        package: package.to_owned(),
        version: version.unwrap_or("(any)").to_owned(),
        available: if available.is_empty() { "none".to_owned() } else { available.join(", ") },
    }
}

fn find_with_suffix(directory: &Path, suffix: &str) -> Result<PathBuf, Error> {
    for entry in fs::read_dir(directory).at("reading", directory)? {
        let path = entry.at("reading", directory)?.path();
        if path.to_string_lossy().ends_with(suffix) {
            return Ok(path);
        }
    }
    Err(Error::Malformed { what: directory.display().to_string(), why: format!("apt left no {suffix} file there") })
}

/// Orders versions as dpkg does.
fn compare_versions(a: &str, b: &str) -> std::cmp::Ordering {
    let holds = |relation: &str| {
        let status = Command::new("dpkg").args(["--compare-versions", a, relation, b]).status();
        status.is_ok_and(|s| s.success())
    };
    if a == b {
        std::cmp::Ordering::Equal
    } else if holds("lt") {
        std::cmp::Ordering::Less
    } else {
        std::cmp::Ordering::Greater
    }
}

/// What the archive says of one version of a source package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceStanza {
    /// For instance `redis`.
    pub(crate) package: String,
    /// For instance `5:7.0.15-1~deb12u10`.
    pub(crate) version: String,
    /// Packages built from it.
    pub(crate) binaries: Vec<String>,
    /// Everything that decides what a clean root for it holds.
    pub(crate) build_depends: String,
}

impl SourceStanza {
    fn parse(text: &str) -> Option<Self> {
        let mut fields: Vec<(&str, String)> = Vec::new();
        for line in text.lines() {
            match line.split_once(':') {
                _ if line.starts_with(' ') => fields.last_mut()?.1.push_str(line),
                Some((name, value)) => fields.push((name, value.trim().to_owned())),
                None => {}
            }
        }
        let field = |name: &str| fields.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone());
        let depends = fields.iter().filter(|(n, _)| n.starts_with("Build-"));
        Some(SourceStanza {
            package: field("Package")?,
            version: field("Version")?,
            binaries: field("Binary")?.split(',').map(|b| b.trim().to_owned()).collect(),
            build_depends: depends.map(|(n, v)| format!("{n}: {v}\n")).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_stanza_with_folded_fields() {
        let text =
            "Package: demo\nBinary: demo,\n demo-tools\nVersion: 1:2-3\nBuild-Depends: a (>= 1), b\nFiles:\n x y\n";
        let stanza = SourceStanza::parse(text).unwrap();
        assert_eq!(stanza.binaries, ["demo", "demo-tools"]);
        assert_eq!(stanza.version, "1:2-3");
        assert_eq!(stanza.build_depends, "Build-Depends: a (>= 1), b\n");
        assert_eq!(SourceStanza::parse("nothing here"), None);
    }
}
