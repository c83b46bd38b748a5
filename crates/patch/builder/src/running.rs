//! Builds for a running program without knowledge of its package: from the bytes that run to the request for a patch.

use crate::apt::Apt;
use crate::{Builder, DebianRequest, Error, Event, Parts, Shipped, ShippedAs};
use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use stillpoint_host::EntryName;
use stillpoint_host::file::read_regular_text;
use stillpoint_host::untrusted::Tree;
use stillpoint_patch_provenance::{
    APT_ARCHIVES, Error as Unknown, Package, Program, Release, SeenPackages, compare_versions,
};

/// Size limit of `/etc/os-release`, in bytes.
const OS_RELEASE_MAX: u64 = 1 << 20;

/// Work for a running program.
#[derive(Debug, Clone)]
pub enum Plan {
    /// It runs the newest version that the archive serves: there is nothing to build.
    Newest {
        /// Source package.
        package: String,
        /// Version of the source package.
        version: String,
    },
    /// A patch is to be built.
    Build(Box<DebianRequest>),
}

impl Builder<'_> {
    /// Returns the packages that this machine has seen: in apt's cache, in the directories of the caller, and in the cache.
    pub fn seen_packages(&self) -> SeenPackages {
        let mut debs = self.local.clone();
        debs.push(PathBuf::from(APT_ARCHIVES));
        SeenPackages { debs, unpacked: Some(self.cache.root().join("binaries")) }
    }

    /// Returns a builder of packages of the release that a program runs in, unless the caller selected one: a container may be of another
    /// release than this system. Another distribution's packages are not in this system's archives.
    ///
    /// # Errors
    /// The release of this system cannot be read.
    pub fn of_program(self, program: &Program) -> Result<Self, Error> {
        let own = own_release()?;
        let other = program.release.as_ref().filter(|there| {
            own.as_ref().is_some_and(|own| own.distribution == there.distribution && own.codename != there.codename)
        });
        let release = self.release.clone().or_else(|| other.map(|release| release.codename.clone()));
        Ok(self.of_release(release))
    }

    /// Returns the package and version of a running program: by what this machine has seen, else by the packages that the archive still
    /// has.
    ///
    /// # Errors
    /// [`Error::Provenance`] if they are not known; or the program is of another release, or for another machine; or a download fails.
    pub fn package_of(&self, program: &Program) -> Result<Package, Error> {
        self.check_kind(program)?;
        let (package, evidence) = match program.running() {
            Ok((package, evidence)) => (package.clone(), evidence.to_string()),
            Err(unknown) => {
                let found = self.find_in_archive(program)?.ok_or(unknown)?;
                let evidence = format!("its build-id is in {} {} of the archive", found.name, found.version);
                (found, evidence)
            }
        };
        self.report(Event::VersionFound {
            process: program.pid.map(|pid| pid.0),
            path: program.path.display().to_string(),
            package: package.name.clone(),
            version: package.version.clone(),
            source: package.source.clone(),
            source_version: package.source_version.clone(),
            evidence,
            container: program.has_other_root,
        });
        Ok(package)
    }

    /// Plans the patch that brings a running program to the newest version, or that makes the named diffs active in it.
    ///
    /// # Errors
    /// Those of [`Builder::package_of`]; [`Error::NewerThanArchive`]; [`Error::NoRunningSource`]; or a package cannot be fetched.
    pub fn plan(&self, program: &Program, request: DebianRequest) -> Result<Plan, Error> {
        let running = self.package_of(program)?;
        let package = running.source.clone();
        let build = |version: String, shipped: ShippedAs| {
            let (version, binary, names) = (Some(version), Some(self.keep(program)?), program.names.clone());
            Ok(Plan::Build(Box::new(DebianRequest {
                package: package.clone(),
                version,
                shipped,
                binary,
                names,
                is_partial: request.is_partial && request.quilt.is_empty() && request.diffs.is_empty(),
                ..request.clone()
            })))
        };
        if request.quilt.is_empty() && !request.diffs.is_empty() {
            self.fetch_running(&running)?;
            return build(running.source_version, ShippedAs::Series(Shipped::Full));
        }
        let newest = self.fetch_source(&package, None, Parts::Source)?.version().to_owned();
        let shipped = match compare_versions(&running.source_version, &newest) {
            Ordering::Equal if request.quilt.is_empty() => return Ok(Plan::Newest { package, version: newest }),
            Ordering::Equal => ShippedAs::Series(Shipped::Full),
            Ordering::Less => {
                self.fetch_running(&running)?;
                ShippedAs::Version(running.source_version)
            }
            Ordering::Greater => {
                return Err(Error::NewerThanArchive { package, version: running.source_version, newest });
            }
        };
        build(newest, shipped)
    }

    /// Refuses programs that no patch can be built for, before anything is fetched.
    fn check_kind(&self, program: &Program) -> Result<(), Error> {
        let refused = |why| Err(Error::Kind { path: program.path.display().to_string(), why });
        match &program.origin.identity {
            None => return refused("is no ELF file"),
            Some(identity) if !identity.is_64 => {
                return refused("is a 32-bit program: only x86-64 programs can be patched");
            }
            Some(_) => {}
        }
        let own = match &self.release {
            Some(codename) => Some(codename.clone()),
            None => own_release()?.map(|release| release.codename),
        };
        match &program.release {
            Some(release) if own.as_ref() != Some(&release.codename) => {
                let path = program.path.display().to_string();
                Err(Error::OtherRelease { path, release: release.codename.clone(), own: own.unwrap_or_default() })
            }
            _ => Ok(()),
        }
    }

    /// Finds the version of a replaced file among those that the archive serves.
    fn find_in_archive(&self, program: &Program) -> Result<Option<Package>, Error> {
        let build_id = program.origin.identity.as_ref().and_then(|identity| identity.build_id.as_ref());
        let (Some(build_id), Some(installed)) = (build_id, &program.origin.installed) else { return Ok(None) };
        self.progress(&format!("looking for build-id {build_id} in the archive's versions of {}", installed.name));
        let apt = Apt::open(&self.cache, self.release.as_deref())?;
        for version in apt.binary_versions(&installed.name)? {
            let name = format!("{}_{}", installed.name, version.replace(':', "%"));
            let fetched = self.cache.entry(&EntryName::new("debs", &name), |into| {
                apt.download_binary(&installed.name, &version, into).map(drop)
            });
            let directory = match fetched {
                Ok(directory) => directory,
                // listed and not served, or not listed any more: another version may be there
                Err(Error::Withheld { .. } | Error::NoSuchVersion { .. }) => continue,
                Err(error) => return Err(error),
            };
            let seen = SeenPackages { debs: vec![directory], unpacked: None };
            if let Some(found) = seen.find(build_id, installed, &program.path) {
                return Ok(Some(found.package));
            }
        }
        Ok(None)
    }

    /// Fetches the source of the version that runs.
    fn fetch_running(&self, running: &Package) -> Result<(), Error> {
        match self.fetch_source(&running.source, Some(&running.source_version), Parts::Source) {
            Err(error @ (Error::NoSuchVersion { .. } | Error::Withheld { .. })) => Err(Error::NoRunningSource {
                package: running.source.clone(),
                version: running.source_version.clone(),
                directories: self.local.clone(),
                source: Box::new(error),
            }),
            fetched => fetched.map(drop),
        }
    }

    /// Keeps the bytes that run as a file: the process may end while the patch is built.
    fn keep(&self, program: &Program) -> Result<PathBuf, Error> {
        let file_name = program
            .path
            .file_name()
            .ok_or_else(|| Unknown::NoPackage { path: program.path.clone(), why: "it is no path of a file".into() })?;
        let key = stillpoint_host::cache::key([program.path.as_os_str().as_encoded_bytes(), &program.bytes]);
        let directory = self.cache.entry(&EntryName::new("running", &key), |into| {
            Ok::<(), Error>(Tree::open(into)?.write_program(file_name, &program.bytes)?)
        })?;
        Ok(directory.join(file_name))
    }
}

fn own_release() -> Result<Option<Release>, Error> {
    Ok(Release::parse(&read_regular_text(Path::new("/etc/os-release"), OS_RELEASE_MAX)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cache;
    use std::fs;
    use std::process::Command;

    /// Makes a source package in a directory.
    fn source(dir: &Path, version: &str, text: &str) {
        let tree = dir.join(format!("sp-demo-{version}"));
        fs::create_dir_all(tree.join("debian/source")).unwrap();
        let write = |name: &str, text: &str| fs::write(tree.join(name), text).unwrap();
        write("debian/source/format", "3.0 (native)\n");
        write(
            "debian/control",
            "Source: sp-demo\nMaintainer: A <a@b.invalid>\n\nPackage: sp-demo\nArchitecture: any\nDescription: x\n",
        );
        let trailer = "  * x\n\n -- A <a@b.invalid>  Fri, 03 Apr 2026 14:29:32 +0200\n";
        write("debian/changelog", &format!("sp-demo ({version}) stable; urgency=low\n\n{trailer}"));
        write("demo.c", text);
        let made = Command::new("dpkg-source").arg("-b").arg(&tree).current_dir(dir).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        fs::remove_dir_all(tree).unwrap();
    }

    #[test]
    fn sources_of_a_directory_are_taken_by_their_version_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for (name, text) in [("one", "int one;"), ("two", "int two;")] {
            fs::create_dir(path(name)).unwrap();
            source(&path(name), "1.0", text);
        }
        source(&path("one"), "1.1", "int newer;");
        let fetch = |directory: &str, version: &str| {
            let builder =
                Builder::new(Cache::at(&path("cache")).unwrap(), 1, &|_| {}).with_sources(vec![path(directory)]);
            let source = builder.fetch_source("sp-demo", Some(version), Parts::Source)?;
            Ok::<_, Error>((source.version().to_owned(), fs::read_to_string(source.tree().join("demo.c")).unwrap()))
        };
        let text = |directory: &str, version: &str| fetch(directory, version).unwrap();
        assert_eq!(text("one", "1.0"), ("1.0".to_owned(), "int one;".to_owned()));
        assert_eq!(text("one", "1.1").1, "int newer;");
        assert_eq!(text("two", "1.0").1, "int two;", "one cache, and another source of that version");
        fs::create_dir(path("three")).unwrap();
        source(&path("three"), "1.0", "int three;");
        let archive = path("three").join("sp-demo_1.0.tar.xz");
        let mut bytes = fs::read(&archive).unwrap();
        bytes[20] ^= 1;
        fs::write(&archive, bytes).unwrap();
        assert!(fetch("three", "1.0").is_err(), "its checksum is another one");
    }

    #[test]
    fn the_error_for_a_missing_source_names_the_places() {
        let source = || {
            Box::new(Error::NoSuchVersion {
                package: "sp-demo".into(),
                version: "1.0".into(),
                available: "1.1".into(),
                proposed: None,
                source_package: None,
            })
        };
        let error = |directories: Vec<PathBuf>| Error::NoRunningSource {
            package: "sp-demo".into(),
            version: "1.0".into(),
            directories,
            source: source(),
        };
        assert_eq!(
            error(vec!["/srv/a".into(), "/srv/b".into()]).to_string(),
            "the source of sp-demo 1.0, which runs, was not found in /srv/a, /srv/b, nor in the archive: package sp-demo 1.0 is not in the \
             archive; it has 1.1"
        );
        assert!(error(Vec::new()).to_string().contains("was not found: package") && error(Vec::new()).is_refusal());
    }
}
