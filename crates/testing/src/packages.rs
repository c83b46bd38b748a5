//! Debian's own binaries, unpacked and never installed.
//!
//! The obvious way is to install the package; that starts a service, changes the machine, and keeps one version only.
//! Instead the archive of the package and its dependencies (those that are not installed) are downloaded and unpacked
//! below the cache.

mod availability;
mod release;

pub use release::foreign_release;

use crate::{Unavailable, recipes, workspace_root};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program and the directories in which it finds its libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// The executable.
    pub path: PathBuf,
    /// Directories of libraries that are not installed on this machine.
    pub libraries: Vec<PathBuf>,
}

impl Binary {
    /// Returns the environment that the program needs in addition to the caller's.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let joined = std::env::join_paths(&self.libraries).expect("paths of the cache contain no colon");
        if joined.is_empty() { Vec::new() } else { vec![("LD_LIBRARY_PATH", joined)] }
    }
}

/// Returns Debian's `redis-server`, in `version` or the newest that the archive serves.
///
/// # Errors
/// The archive serves no suitable version, or a package cannot be downloaded.
pub fn redis(version: Option<&str>) -> Result<Binary, Unavailable> {
    binary(&["redis-server", "redis-tools"], version, "usr/bin/redis-server")
}

/// Returns Debian's `memcached`, in `version` or the newest that the archive serves.
///
/// # Errors
/// The archive serves no suitable version, or a package cannot be downloaded.
pub fn memcached(version: Option<&str>) -> Result<Binary, Unavailable> {
    binary(&["memcached"], version, "usr/bin/memcached")
}

/// Returns a program of our own build, with the libraries that Debian's package of the same program uses.
pub fn with_libraries_of(path: &Path, packaged: &Binary) -> Binary {
    Binary { path: path.to_owned(), libraries: packaged.libraries.clone() }
}

/// Returns the file `path` (a program or a library) of `packages`, which are all of one version, with all that they
/// depend on.
///
/// # Errors
/// The archive serves no suitable version, or a package cannot be downloaded.
pub fn binary(packages: &[&str], version: Option<&str>, path: &str) -> Result<Binary, Unavailable> {
    let version = match version {
        Some(version) => version.to_owned(),
        None => newest(packages)?,
    };
    let root = unpacked(packages, &version)?;
    let directories = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|name| root.join(name));
    Ok(Binary { path: root.join(path), libraries: directories.into_iter().filter(|path| path.is_dir()).collect() })
}

/// Returns the newest version in which `packages` are all served: apt's own choice, or else the newest other one.
fn newest(packages: &[&str]) -> Result<String, Unavailable> {
    let package = packages[0];
    let out = run(release::command("apt-cache")?.args(["policy", package]))?;
    let candidate = out.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    let candidate = candidate.filter(|version| *version != "(none)");
    let candidate = candidate.ok_or_else(|| format!("the package lists know no {package}; try `make setup`"))?;
    let others = availability::listed_versions(package)?.into_iter().filter(|version| version != candidate);
    availability::first_available(package, std::iter::once(candidate.to_owned()).chain(others), |version| {
        availability::all_binaries(packages, version)
    })
}

/// Returns the versions of `package` that the archive serves, newest first.
///
/// # Errors
/// The archive serves no version, or gives no answer.
pub fn versions(package: &str) -> Result<Vec<String>, Unavailable> {
    availability::available(package, |version| availability::all_binaries(&[package], version))
}

/// Returns the versions of which the archive serves `packages` (all of one version) and the source that they were built
/// from, newest first.
///
/// # Errors
/// The archive serves no such version, or gives no answer.
pub fn versions_with_source(packages: &[&str]) -> Result<Vec<String>, Unavailable> {
    let package = packages[0];
    availability::available(package, |version| match availability::all_binaries(packages, version)? {
        Ok(()) => availability::source_of(package, version),
        withheld => Ok(withheld),
    })
}

/// Returns the unpacked source of a source package, with the diffs of its series applied.
///
/// # Errors
/// The archive does not serve it, or it cannot be unpacked.
pub fn source(package: &str, version: &str) -> Result<PathBuf, Unavailable> {
    let name = format!("{package}_{}", version.replace(':', "%3a"));
    let release = foreign_release().unwrap_or_default();
    let inputs = [package, version, release].map(|word| word.as_bytes().to_vec());
    let lists = availability::source_lists()?;
    let directory = recipes::entry("unpacked", &name, &inputs, |tree| {
        let mut apt = release::command("apt-get")?;
        apt.args(&lists).args(["source", "-qq", "--only-source", &format!("{package}={version}")]);
        run(apt.current_dir(tree)).map(drop).map_err(Unavailable::from)
    })?;
    let entries = std::fs::read_dir(&directory).map_err(|e| format!("list {}: {e}", directory.display()))?;
    let tree = entries.flatten().map(|entry| entry.path()).find(|path| path.is_dir());
    tree.ok_or_else(|| format!("the source of {package} has no directory").into())
}

/// Returns the reason that the archive serves too few versions of a package of which two are needed.
pub fn too_few(package: &str, served: &[String]) -> Unavailable {
    let why = format!("the archive serves one version of {package} that would do: {}", served.join(", "));
    match availability::listed_versions(package) {
        Ok(listed) if listed.len() > served.len() => Unavailable::Withheld(why),
        _ => Unavailable::Missing(why),
    }
}

/// Prefix of the C library's package: a program's loader is that of the system, and works only with its own C library.
const NOT_UNPACKED: &str = "libc6_";

/// Returns the directory into which the packages (all of one version) and their missing dependencies are unpacked.
fn unpacked(packages: &[&str], version: &str) -> Result<PathBuf, Unavailable> {
    let name = format!("{}_{}", packages[0], version.replace(':', "%3a"));
    let release = foreign_release().unwrap_or_default();
    let words = packages.iter().chain([&version, &release, &NOT_UNPACKED]);
    let inputs: Vec<Vec<u8>> = words.map(|word| word.as_bytes().to_vec()).collect();
    recipes::entry("packages", &name, &inputs, |tree| {
        let work = tempfile::tempdir().map_err(|e| format!("make a directory: {e}"))?;
        let archives = work.path().join("archives");
        let partial = archives.join("partial");
        std::fs::create_dir_all(&partial).map_err(|e| format!("make {}: {e}", partial.display()))?;
        download(packages, version, &archives)?;
        for entry in std::fs::read_dir(&archives).map_err(|e| format!("list {}: {e}", archives.display()))?.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.ends_with(".deb") && !name.starts_with(NOT_UNPACKED) {
                run(Command::new("dpkg-deb").arg("-x").args([&entry.path(), tree]))?;
            }
        }
        Ok(())
    })
}

/// Downloads packages; a dependency whose newest version the archive withholds is used in an older one
/// (`setup/served.sh`).
fn download(packages: &[&str], version: &str, archives: &Path) -> Result<(), Unavailable> {
    let mut apt = release::command(workspace_root().join("setup/served.sh"))?;
    apt.args(["apt", "install", "-y", "--download-only", "--reinstall", "--no-install-recommends"]);
    apt.arg("--allow-downgrades");
    // Nothing is installed, so the system's locks are not needed, and neither is root.
    apt.args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]);
    apt.args(["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]);
    apt.arg("-o").arg(format!("Dir::Cache::archives={}", archives.display()));
    apt.args(packages.iter().map(|package| format!("{package}={version}")));
    let out = apt.env("DEBIAN_FRONTEND", "noninteractive").output().map_err(|e| format!("run setup/served.sh: {e}"))?;
    if out.status.success() {
        Ok(())
    } else {
        let why = String::from_utf8_lossy(&out.stderr).trim().to_owned();
        Err(Unavailable::of_code(out.status.code(), why))
    }
}

fn run(command: &mut Command) -> Result<String, String> {
    let out = command.output().map_err(|e| format!("run {:?}: {e}", command.get_program()))?;
    if !out.status.success() {
        let errors = String::from_utf8_lossy(&out.stderr);
        return Err(format!("{command:?} ended with {}: {}", out.status, errors.trim()));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}
