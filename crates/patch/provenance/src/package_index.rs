//! Versions of packages that this machine has seen: `.deb` files in apt's cache and in directories of the user, and binary packages that the
//! builder unpacked. The archive's lists have no build-ids, so this is where an older one is found.
//!
//! The contents of a package are not trusted: its archive is read as a stream, and of each file only the beginning.

use crate::deb822::Stanza;
use crate::{ElfIdentity, Error, Package, is_package, is_version};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_host::file::{list, open_regular};
use stillpoint_host::untrusted::{Entry, Tree};
use stillpoint_patch_format::BuildId;

/// Directory of apt's downloads.
pub const APT_ARCHIVES: &str = "/var/cache/apt/archives";
/// Bytes of a file that are read for its build-id: program headers and notes are at its beginning.
const HEAD: u64 = 64 << 10;
/// Limit of packages that are looked into for one build-id.
const PACKAGES_MAX: usize = 2_000;
/// Limit of a name in an archive, in bytes.
const NAME_MAX: u64 = 64 << 10;
/// Limit of a package's control fields, in bytes.
const FIELDS_MAX: u64 = 1 << 20;

/// End of the name of a directory with a directory for each binary package of a version.
const EACH: &str = "-each";

/// Returns the name of the directory for the unpacked binary packages of a version of a source package. `variant` distinguishes sources of
/// the same version: it is empty, or begins with `@`, which no version has.
pub fn unpacked_name(source: &str, version: &str, variant: &str) -> String {
    format!("{source}_{}{variant}{EACH}", version.replace([':', '/'], "%"))
}

/// Returns the source package and version of such a name.
fn parse_unpacked(name: &str) -> Option<(&str, String)> {
    let (source, version) = name.strip_suffix(EACH)?.split_once('_')?;
    let version = version.split('@').next().unwrap_or(version).replace('%', ":");
    (is_package(source) && is_version(&version)).then_some((source, version))
}

/// Directories with packages.
#[derive(Debug, Clone, Default)]
pub struct SeenPackages {
    /// Directories of `.deb` files.
    pub debs: Vec<PathBuf>,
    /// Directory of binary packages that the builder unpacked, `SOURCE_VERSION` each.
    pub unpacked: Option<PathBuf>,
}

/// Package with a file of a build-id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The package; of the builder's packages only the source is known.
    pub package: Package,
    /// The `.deb` file, or the directory.
    pub from: PathBuf,
}

impl SeenPackages {
    /// Finds a build-id in the versions of an installed package.
    pub fn find(&self, build_id: &BuildId, installed: &Package, file: &Path) -> Option<Seen> {
        let is_version_of =
            |name: &str| name.strip_prefix(installed.name.as_str()).is_some_and(|rest| rest.starts_with('_'));
        self.find_in_debs(build_id, is_version_of).or_else(|| self.find_unpacked(build_id, Some(installed), file))
    }

    /// Finds a build-id in every package, for a file that no installed package has. `file` is a path that ends in the name of the file.
    pub fn find_in_all(&self, build_id: &BuildId, file: &Path) -> Option<Seen> {
        self.find_in_debs(build_id, |_| true).or_else(|| self.find_unpacked(build_id, None, file))
    }

    fn find_in_debs(&self, build_id: &BuildId, is_wanted: impl Fn(&str) -> bool) -> Option<Seen> {
        let in_directory = |directory: &PathBuf| {
            let names = list(directory).unwrap_or_default();
            names
                .into_iter()
                .filter(|name| name.ends_with(".deb") && is_wanted(name))
                .map(|name| directory.join(name))
                .collect::<Vec<_>>()
        };
        let debs = self.debs.iter().flat_map(in_directory).take(PACKAGES_MAX);
        for deb in debs {
            // a file that is no package hides no other one
            if let Ok(true) = has_build_id(&deb, build_id)
                && let Ok(package) = package_of(&deb)
            {
                return Some(Seen { package, from: deb });
            }
        }
        None
    }

    fn find_unpacked(&self, build_id: &BuildId, installed: Option<&Package>, file: &Path) -> Option<Seen> {
        let all = self.unpacked.as_ref()?;
        for name in list(all).unwrap_or_default() {
            let Some((source, version)) = parse_unpacked(&name) else { continue };
            if installed.is_some_and(|installed| installed.source != source) {
                continue;
            }
            let Ok(tree) = Tree::open(&all.join(&name)) else { continue };
            let same_name = |entry: &&Entry| entry.is_file() && entry.name.file_name() == file.file_name();
            let identity = |entry: &Entry| ElfIdentity::of_file(&tree.file(&entry.name).ok()?)?.build_id;
            let entries = tree.entries().unwrap_or_default();
            if entries.iter().filter(same_name).any(|entry| identity(entry).as_ref() == Some(build_id)) {
                let package = Package {
                    name: installed.map_or(source, |installed| &installed.name).to_owned(),
                    architecture: installed.map_or("amd64", |installed| &installed.architecture).to_owned(),
                    version: version.clone(),
                    source: source.to_owned(),
                    source_version: version,
                };
                return Some(Seen { package, from: all.join(name) });
            }
        }
        None
    }
}

/// Starts `dpkg-deb` on an open file.
fn dpkg_deb(argument: &str, deb: &Path) -> Result<Command, Error> {
    let file = open_regular(deb)?;
    let mut command = Command::new("dpkg-deb");
    command.env_clear().env("LC_ALL", "C").envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    // by the open file: another user may exchange the one of that name
    command.args([argument, "/proc/self/fd/0"]).stdin(Stdio::from(file)).stderr(Stdio::null());
    Ok(command)
}

/// Reads the control fields of a `.deb` file.
///
/// # Errors
/// It is no package, or `dpkg-deb` cannot be run.
fn package_of(deb: &Path) -> Result<Package, Error> {
    let failed = |error: io::Error| Error::Program { program: "dpkg-deb", why: error.to_string() };
    let mut child = dpkg_deb("--field", deb)?.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut text = Vec::new();
    let read = child.stdout.take().map_or(Ok(0), |out| out.take(FIELDS_MAX).read_to_end(&mut text));
    let status = child.wait().map_err(failed)?;
    read.map_err(failed)?;
    let stanza = Stanza::parse(&String::from_utf8_lossy(&text));
    let package = Package::of_fields(|name| stanza.field(name)).filter(|_| status.success());
    package.ok_or_else(|| Error::Malformed { what: deb.display().to_string(), why: "it is no Debian package".into() })
}

/// Returns true if a `.deb` file has a file with this build-id.
fn has_build_id(deb: &Path, build_id: &BuildId) -> Result<bool, Error> {
    let failed = |error: io::Error| Error::Program { program: "dpkg-deb", why: error.to_string() };
    let mut child = dpkg_deb("--fsys-tarfile", deb)?.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut found = false;
    let read = child.stdout.take().map_or(Ok(()), |out| {
        each_archived_file(out, |head| {
            found = ElfIdentity::of_bytes(head).and_then(|identity| identity.build_id).as_ref() == Some(build_id);
            !found
        })
    });
    if found {
        let _ = child.kill();
    }
    child.wait().map_err(failed)?;
    read.map_err(failed).map(|()| found)
}

/// Passes the beginning of each regular file of a tar archive to `look`, until it returns false.
///
/// # Errors
/// The archive cannot be read, or states a size that no file has.
pub fn each_archived_file(mut archive: impl Read, mut look: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
    let mut header = [0; 512];
    loop {
        match archive.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        if header.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let size = size(&header[124..136]).ok_or(io::ErrorKind::InvalidData)?;
        let is_file = matches!(header[156], b'0' | 0);
        // a long name of another entry
        if matches!(header[156], b'L' | b'K' | b'x') && size > NAME_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut head = Vec::new();
        if is_file {
            (&mut archive).take(size.min(HEAD)).read_to_end(&mut head)?;
            if !look(&head) {
                return Ok(());
            }
        }
        let rest = size.checked_next_multiple_of(512).ok_or(io::ErrorKind::InvalidData)? - head.len() as u64;
        io::copy(&mut (&mut archive).take(rest), &mut io::sink())?;
    }
}

/// Reads a size: octal digits, or a binary number for large files.
fn size(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        return field[4..].iter().try_fold(0u64, |number, byte| Some(number.checked_mul(256)? + u64::from(*byte)));
    }
    let digits = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    u64::from_str_radix(digits, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Makes a package with `/bin/true` in it.
    fn package(dir: &Path, name: &str, version: &str) -> PathBuf {
        let tree = dir.join(format!("tree-{name}-{version}"));
        fs::create_dir_all(tree.join("DEBIAN")).unwrap();
        fs::create_dir_all(tree.join("usr/bin")).unwrap();
        let source = "Maintainer: A <a@b.invalid>\nSource: src (1-1)\nDescription: x\n";
        let control = format!("Package: {name}\nVersion: {version}\nArchitecture: amd64\n{source}");
        fs::write(tree.join("DEBIAN/control"), control).unwrap();
        let long = "a".repeat(150);
        fs::write(tree.join("usr/bin").join(long), "x").unwrap();
        fs::copy("/bin/true", tree.join("usr/bin/true")).unwrap();
        let deb = dir.join(format!("{name}_{version}_amd64.deb"));
        let made = Command::new("dpkg-deb")
            .args(["--root-owner-group", "-Znone", "--build"])
            .args([&tree, &deb])
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        deb
    }

    fn build_id(path: &str) -> BuildId {
        ElfIdentity::of_file(&fs::File::open(path).unwrap()).unwrap().build_id.unwrap()
    }

    #[test]
    fn an_older_version_is_found_by_the_build_id_of_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let deb = package(dir.path(), "demo", "1-1+b1");
        fs::write(dir.path().join("demo_0_amd64.deb"), "no package").unwrap();
        let seen = SeenPackages { debs: vec![dir.path().into()], unpacked: None };
        let installed = Package { name: "demo".into(), version: "2-1".into(), ..package_of(&deb).unwrap() };
        let found = seen.find(&build_id("/bin/true"), &installed, Path::new("/usr/bin/true")).unwrap();
        assert_eq!(
            (found.from, found.package.version.as_str(), found.package.source_version.as_str()),
            (deb, "1-1+b1", "1-1")
        );
        assert_eq!(seen.find(&build_id("/bin/sleep"), &installed, Path::new("/usr/bin/true")), None);
        let other = Package { name: "dem".into(), ..installed };
        assert_eq!(seen.find(&build_id("/bin/true"), &other, Path::new("/usr/bin/true")), None);
        assert!(seen.find_in_all(&build_id("/bin/true"), Path::new("/x/true")).is_some());
    }

    #[test]
    fn a_package_that_the_builder_unpacked_is_known_by_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let entry = dir.path().join(unpacked_name("src", "2:1.0-1", "@abc"));
        fs::create_dir_all(entry.join("usr/bin")).unwrap();
        fs::copy("/bin/true", entry.join("usr/bin/true")).unwrap();
        let seen = SeenPackages { debs: Vec::new(), unpacked: Some(dir.path().into()) };
        let installed = Package {
            name: "demo".into(),
            architecture: "amd64".into(),
            version: "3".into(),
            source: "src".into(),
            source_version: "3".into(),
        };
        let found = seen.find(&build_id("/bin/true"), &installed, Path::new("/usr/bin/true")).unwrap();
        assert_eq!(found.package.source_version, "2:1.0-1");
        let alone = seen.find_in_all(&build_id("/bin/true"), Path::new("/tmp/true")).unwrap();
        assert_eq!((alone.package.source.as_str(), alone.package.version.as_str()), ("src", "2:1.0-1"));
        assert_eq!(seen.find_in_all(&build_id("/bin/true"), Path::new("/tmp/false")), None);
    }

    #[test]
    fn an_archive_that_states_any_size_is_read_in_pieces() {
        let mut header = [0u8; 512];
        header[124..136].copy_from_slice(b"77777777777\0");
        header[156] = b'0';
        let mut looked = 0;
        each_archived_file(&[&header[..], b"short"].concat()[..], |head| {
            looked = head.len();
            true
        })
        .unwrap();
        assert_eq!(looked, 5);
        header[124] = 0xff;
        header[128..136].fill(0xff);
        assert!(each_archived_file(&header[..], |_| true).is_err());
        header[124..136].copy_from_slice(b"not a number");
        assert!(each_archived_file(&header[..], |_| true).is_err());
        header[124..136].copy_from_slice(b"00010000000\0");
        header[156] = b'L';
        assert!(each_archived_file(&header[..], |_| true).is_err(), "a name of two megabytes");
    }
}
