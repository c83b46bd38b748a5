//! Origin of mapped files: the package and version that each of them came from.
//!
//! ```text
//!   path + root ---> owner in dpkg's database ---> the same file is on disk? --yes--> checksum of the package --equal--> installed version
//!                          |                              | no                             | differs: altered
//!                          v                              v
//!                     library of this name       build-id in packages that were seen; else the file's time in the changelog
//! ```
//!
//! Builds of Debian give each file the time of the newest entry of the changelog, so the time of a deleted file, whose inode a mapping keeps,
//! names its version. The caller of [`Origin`] learns which evidence there was.

use crate::changelog::Changelog;
use crate::package_index::SeenPackages;
use crate::version::{compare, without_rebuild};
use crate::{Database, ElfIdentity, Error, Owner, Package};
use md5::{Digest, Md5};
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::fs::Metadata;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_host::untrusted::FILE_MAX;

/// File whose origin is wanted.
#[derive(Debug)]
pub struct Subject {
    /// Path in its root file system, without links.
    pub path: PathBuf,
    /// True if the kernel states that the file has no name any more.
    pub deleted: bool,
    /// The file itself; `None` if this user may not read it.
    pub file: Option<File>,
}

/// Evidence for the version of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Evidence {
    /// Its bytes are those that the installed package has for it.
    Checksum,
    /// It is the file of the installed package, which states no checksum.
    Path,
    /// Its build-id is in a package that was seen: the `.deb` file, or the directory of the unpacked package.
    BuildId(String),
    /// Its time is that of this version in the changelog.
    Changelog,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Evidence::Checksum => f.write_str("its bytes are those of the installed package"),
            Evidence::Path => f.write_str("it is the file of the installed package, which states no checksum"),
            Evidence::BuildId(from) => write!(f, "its build-id is in {from}"),
            Evidence::Changelog => f.write_str("its time is that of this version in the changelog"),
        }
    }
}

/// Relation of a mapped file to the file of that name on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnDisk {
    /// It is the same file, or one with the same bytes.
    Same,
    /// Another file has its name.
    Replaced,
    /// No file has its name.
    Deleted,
    /// Another file has its name, and it was not deleted: the process sees other mounts.
    Elsewhere,
}

/// Origin of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Relation to the file on disk.
    pub on_disk: OnDisk,
    /// False if this user may not read the mapped file.
    pub is_read: bool,
    /// Identity of the mapped file; `None` if it is no ELF file, or could not be read.
    pub identity: Option<ElfIdentity>,
    /// Package that has the file now; `None` if none has it.
    pub installed: Option<Package>,
    /// Package and version that the mapped file came from, with the evidence; `None` if they are not known.
    pub running: Option<(Package, Evidence)>,
    /// True if the file on disk is the mapped one, and is not as its package has it.
    pub is_altered: bool,
}

/// Finds origins in one root file system.
#[derive(Debug)]
pub struct Origins {
    database: Database,
    seen: SeenPackages,
}

impl Origins {
    /// Makes a finder with the database of a root file system, and packages that were seen.
    pub fn new(database: Database, seen: SeenPackages) -> Origins {
        Origins { database, seen }
    }

    /// Database of the installed packages.
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// Packages that were seen.
    pub fn seen(&self) -> &SeenPackages {
        &self.seen
    }

    /// Finds the origin of each file, in the order of the files.
    ///
    /// # Errors
    /// The database cannot be read. A single file that cannot be read has an unknown origin.
    pub fn of(&self, subjects: &[Subject]) -> Result<Vec<Origin>, Error> {
        let looked: Vec<Look> = subjects.iter().map(|subject| self.look(subject)).collect();
        let paths: BTreeSet<PathBuf> = looked.iter().flat_map(|look| &look.names).cloned().collect();
        let owners = self.database.owners(&paths)?;
        let mut origins = Vec::new();
        for (subject, look) in subjects.iter().zip(looked) {
            origins.push(self.origin(subject, look, &owners)?);
        }
        Ok(origins)
    }

    /// Looks at the file and at that of its name on disk.
    fn look(&self, subject: &Subject) -> Look {
        let root = self.database.root();
        let own = subject.file.as_ref().and_then(|file| file.metadata().ok());
        let identity = subject.file.as_ref().and_then(ElfIdentity::of_file);
        let disk = root.file(&subject.path).ok();
        let found = disk.as_ref().and_then(|file| file.metadata().ok());
        let on_disk = match (&own, &found) {
            (_, None) => OnDisk::Deleted,
            (Some(own), Some(found)) if inode(own) == inode(found) => OnDisk::Same,
            // without the right to open it: the kernel's word
            (None, Some(_)) if !subject.deleted => OnDisk::Same,
            (Some(_), Some(_)) if !subject.deleted => OnDisk::Elsewhere,
            _ => OnDisk::Replaced,
        };
        let mut names = vec![subject.path.clone()];
        // a library of another minor version has another file name, and the same name for programs
        let soname = identity.as_ref().and_then(|identity| identity.soname.as_deref());
        if let (OnDisk::Deleted, Some(soname), Some(directory)) = (on_disk, soname, subject.path.parent()) {
            let link = directory.join(soname);
            names.extend(root.file(&link).and_then(|_| root.real(&link)).ok().map(|real| Path::new("/").join(real)));
        }
        Look { names, identity, on_disk, modified_s: own.map(|own| own.mtime()) }
    }

    fn origin(
        &self,
        subject: &Subject,
        look: Look,
        owners: &BTreeMap<PathBuf, Vec<Owner<'_>>>,
    ) -> Result<Origin, Error> {
        let candidates = look.names.iter().find_map(|name| owners.get(name)).map_or(&[][..], |owners| &owners[..]);
        let sum = match candidates {
            [] => None,
            _ => subject.file.as_ref().and_then(checksum),
        };
        // of several packages with the file, the one that has these bytes
        let (mut exact, mut without_sum) = (None, None);
        for owner in candidates {
            match self.database.checksum(owner)? {
                Some(expected) if Some(expected) == sum => exact = exact.or(Some(owner)),
                None => without_sum = without_sum.or(Some(owner)),
                Some(_) => {}
            }
        }
        let owner = exact.or(without_sum).or(candidates.first());
        let installed = owner.map(|owner| owner.package.clone());
        let mut origin = Origin {
            on_disk: look.on_disk,
            is_read: subject.file.is_some(),
            identity: look.identity,
            installed,
            running: None,
            is_altered: false,
        };
        if exact.is_some() {
            // also after the same version was installed again, and in other mounts
            origin.on_disk = OnDisk::Same;
            origin.running = origin.installed.clone().map(|package| (package, Evidence::Checksum));
            return Ok(origin);
        }
        if origin.on_disk == OnDisk::Same {
            origin.is_altered = sum.is_some() && without_sum.is_none();
            if !origin.is_altered {
                // without the right to read it, nothing is known but its name
                let installed = origin.installed.clone().filter(|_| sum.is_some());
                origin.running = installed.map(|package| (package, Evidence::Path));
                return Ok(origin);
            }
        }
        let build_id = origin.identity.as_ref().and_then(|identity| identity.build_id.as_ref());
        let seen = build_id.and_then(|id| self.seen.find(id, origin.installed.as_ref()?, &subject.path));
        origin.running = match (seen, &origin.installed, look.modified_s) {
            (Some(seen), ..) => Some((seen.package, Evidence::BuildId(seen.from.display().to_string()))),
            (None, Some(installed), Some(modified_s)) if !origin.is_altered => self.by_changelog(installed, modified_s),
            _ => None,
        };
        Ok(origin)
    }

    /// Finds the version of a replaced file by its time. The changelog is that of the version that is installed now.
    fn by_changelog(&self, installed: &Package, modified_s: i64) -> Option<(Package, Evidence)> {
        let log = Changelog::of_installed(self.database.root(), &installed.name, &installed.architecture);
        let version = log.version_of(modified_s)?.to_owned();
        if compare(&version, &installed.version) != Ordering::Less {
            return None;
        }
        let source_version = without_rebuild(&version).to_owned();
        Some((Package { version, source_version, ..installed.clone() }, Evidence::Changelog))
    }
}

/// First look at a subject.
struct Look {
    /// Names under which a package may have it.
    names: Vec<PathBuf>,
    identity: Option<ElfIdentity>,
    on_disk: OnDisk,
    modified_s: Option<i64>,
}

fn inode(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Returns the MD5 sum of a file; `None` if it cannot be read, or is too long.
fn checksum(file: &File) -> Option<[u8; 16]> {
    let mut file = file.try_clone().ok()?;
    if file.metadata().ok()?.len() > FILE_MAX {
        return None;
    }
    file.seek(SeekFrom::Start(0)).ok()?;
    let (mut sum, mut buffer, mut file) = (Md5::new(), vec![0; 256 << 10], file.take(FILE_MAX));
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(sum.finalize().into()),
            read => sum.update(&buffer[..read]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    const CHANGELOG: &str = "\
demo (1-3) stable; urgency=low

  * CVE-2026-33333

 -- A <a@b.invalid>  Fri, 03 Apr 2026 14:29:32 +0200

demo (1-2) stable; urgency=low

  * Older.

 -- A <a@b.invalid>  Mon, 02 Jan 2023 13:06:21 +0100
";

    /// Root with a package `demo` 1-3, whose file is `/usr/bin/demo`.
    fn root() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["var/lib/dpkg/info", "usr/bin", "usr/lib", "usr/share/doc/demo"] {
            fs::create_dir_all(path(name)).unwrap();
        }
        fs::copy("/bin/true", path("usr/bin/demo")).unwrap();
        let status = "Package: demo\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1-3\n";
        fs::write(path("var/lib/dpkg/status"), status).unwrap();
        fs::write(path("var/lib/dpkg/info/demo.list"), "/usr/bin/demo\n/usr/lib/libx.so.1.3\n").unwrap();
        let sum = hex::encode(checksum(&File::open("/bin/true").unwrap()).unwrap());
        fs::write(
            path("var/lib/dpkg/info/demo.md5sums"),
            format!("{sum}  usr/bin/demo\n{}  usr/lib/libx.so.1.3\n", "0".repeat(32)),
        )
        .unwrap();
        fs::write(path("usr/share/doc/demo/changelog.Debian"), CHANGELOG).unwrap();
        dir
    }

    fn origin(root: &Path, path: &str, deleted: bool, file: &Path) -> Origin {
        let origins = Origins::new(Database::open(root).unwrap(), SeenPackages::default());
        let subject = Subject { path: path.into(), deleted, file: Some(File::open(file).unwrap()) };
        origins.of(&[subject]).unwrap().remove(0)
    }

    fn running(origin: &Origin) -> Option<(&str, &Evidence)> {
        origin.running.as_ref().map(|(package, evidence)| (package.version.as_str(), evidence))
    }

    #[test]
    fn the_file_of_a_package_is_known_by_its_checksum_only() {
        let dir = root();
        let disk = dir.path().join("usr/bin/demo");
        let found = origin(dir.path(), "/usr/bin/demo", false, &disk);
        assert_eq!((found.on_disk, running(&found)), (OnDisk::Same, Some(("1-3", &Evidence::Checksum))));
        let again = origin(dir.path(), "/usr/bin/demo", true, Path::new("/bin/true"));
        assert_eq!(
            (again.on_disk, running(&again)),
            (OnDisk::Same, Some(("1-3", &Evidence::Checksum))),
            "installed again"
        );
        fs::write(&disk, "other").unwrap();
        let altered = origin(dir.path(), "/usr/bin/demo", false, &disk);
        assert!(altered.is_altered && altered.running.is_none() && altered.installed.is_some());
        let own = origin(dir.path(), "/usr/lib/libown.so", false, Path::new("/bin/sleep"));
        assert!(own.installed.is_none() && own.running.is_none());
    }

    #[test]
    fn a_replaced_file_has_the_version_of_its_time() {
        let dir = root();
        let old = dir.path().join("old");
        fs::copy("/bin/sleep", &old).unwrap();
        let touch =
            |date: &str| assert!(Command::new("touch").args(["-d", date]).arg(&old).status().unwrap().success());
        touch("2023-01-02 12:06:21 UTC");
        let found = origin(dir.path(), "/usr/bin/demo", true, &old);
        assert_eq!((found.on_disk, running(&found)), (OnDisk::Replaced, Some(("1-2", &Evidence::Changelog))));
        touch("2023-01-02 12:06:22 UTC");
        assert_eq!(running(&origin(dir.path(), "/usr/bin/demo", true, &old)), None);
        touch("2026-04-03 12:29:32 UTC");
        assert_eq!(
            running(&origin(dir.path(), "/usr/bin/demo", true, &old)),
            None,
            "the installed version has other bytes"
        );
        let elsewhere = origin(dir.path(), "/usr/bin/demo", false, &old);
        assert_eq!(elsewhere.on_disk, OnDisk::Elsewhere, "the kernel does not say deleted");
        fs::remove_file(dir.path().join("usr/bin/demo")).unwrap();
        assert_eq!(origin(dir.path(), "/usr/bin/demo", true, &old).on_disk, OnDisk::Deleted);
    }

    #[test]
    fn a_deleted_library_is_found_by_the_name_that_programs_request() {
        let dir = root();
        let lib = dir.path().join("usr/lib");
        let old = dir.path().join("libx.so.1.2");
        let cc = |path: &Path, text: &str| {
            let source = dir.path().join("x.c");
            fs::write(&source, text).unwrap();
            let mut cc = Command::new("cc");
            assert!(
                cc.args(["-shared", "-Wl,-soname,libx.so.1", "-o"]).args([path, &source]).status().unwrap().success()
            );
        };
        cc(&old, "int a;");
        cc(&lib.join("libx.so.1.3"), "int b;");
        symlink("libx.so.1.3", lib.join("libx.so.1")).unwrap();
        let found = origin(dir.path(), "/usr/lib/libx.so.1.2", true, &old);
        assert_eq!(found.on_disk, OnDisk::Deleted);
        assert_eq!(found.installed.map(|package| package.name).as_deref(), Some("demo"));
    }

    #[test]
    fn a_build_id_that_was_seen_names_an_older_version() {
        let dir = root();
        let old = dir.path().join("cache/demo_1-1-each/demo/usr/bin");
        fs::create_dir_all(&old).unwrap();
        fs::copy("/bin/sleep", old.join("demo")).unwrap();
        let seen = SeenPackages { debs: Vec::new(), unpacked: Some(dir.path().join("cache")) };
        let origins = Origins::new(Database::open(dir.path()).unwrap(), seen);
        let subject =
            Subject { path: "/usr/bin/demo".into(), deleted: true, file: Some(File::open("/bin/sleep").unwrap()) };
        let found = origins.of(&[subject]).unwrap().remove(0);
        let from = Evidence::BuildId(dir.path().join("cache/demo_1-1-each").display().to_string());
        assert_eq!(running(&found), Some(("1-1", &from)));
    }
}
