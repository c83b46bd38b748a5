//! Patches on disk that are enabled for units: their owners and their paths.
//!
//! ```text
//! /var/lib/stillpoint/enabled/redis-server.service/0001-CVE-2026-25243.patch
//! /etc/systemd/system/redis-server.service.d/90-stillpoint.conf
//! ```

use super::processes::{PATCH_LEN_MAX, read_patch};
use anyhow::Context;
use std::path::{Path, PathBuf};
use stillpoint_host::systemd::ServiceName;
use stillpoint_host::trusted::Directory;
use stillpoint_patch_format::Patch;

/// Root directory of all paths.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Root {
    /// Root directory of units and enabled patches, for example of a machine's image.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
}

impl Root {
    /// Returns a path of the machine, below the root.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns true if it is the machine's own root.
    pub(crate) fn is_machine(&self) -> bool {
        self.root == Path::new("/")
    }
}

const ENABLED_DIRECTORY: &str = "/var/lib/stillpoint/enabled";

/// Patch file that was read: the checked bytes are the used bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PatchFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

impl PatchFile {
    /// Reads a file that any user may own.
    ///
    /// # Errors
    /// It is not a regular file, is larger than a patch can be, or cannot be read.
    pub(crate) fn read(path: &Path) -> anyhow::Result<PatchFile> {
        Ok(PatchFile { path: path.to_owned(), bytes: read_patch(path)? })
    }

    /// Reads the `*.patch` files of a directory that root alone can change, in the order of their names.
    ///
    /// # Errors
    /// Another user can change the directory or one of the files, or one cannot be read.
    pub(crate) fn all_in(directory: &Directory) -> anyhow::Result<Vec<PatchFile>> {
        let names = directory.names()?.into_iter().filter(|name| name.ends_with(".patch"));
        let read = |name: String| {
            let bytes = directory.read(&name, PATCH_LEN_MAX)?;
            Ok(PatchFile { path: directory.path().join(name), bytes })
        };
        names.map(read).collect()
    }

    /// Decodes the patch without checking its signature.
    ///
    /// # Errors
    /// It is not a patch.
    pub(crate) fn patch(&self) -> anyhow::Result<Patch> {
        let decoded = stillpoint_patch_format::decode(&self.bytes);
        Ok(decoded.with_context(|| self.path.display().to_string())?.patch)
    }
}

/// Directory of one unit's patches.
#[derive(Debug)]
pub(crate) struct Enabled {
    directory: PathBuf,
}

impl Enabled {
    /// Makes the value for a unit, also for one without patches.
    pub(crate) fn of(root: &Root, unit: &ServiceName) -> Enabled {
        Enabled { directory: root.at(ENABLED_DIRECTORY).join(unit.as_str()) }
    }

    /// Returns every unit that has a directory.
    pub(crate) fn units(root: &Root) -> anyhow::Result<Vec<ServiceName>> {
        let Some(store) = opened(&root.at(ENABLED_DIRECTORY))? else { return Ok(Vec::new()) };
        let mut names: Vec<ServiceName> =
            store.names()?.iter().filter_map(|name| ServiceName::complete(name).ok()).collect();
        names.sort();
        Ok(names)
    }

    /// Returns the patches in the order in which they are applied.
    ///
    /// # Errors
    /// Users other than root can change the directory or one of its files, or one cannot be read.
    pub(crate) fn patches(&self) -> anyhow::Result<Vec<PatchFile>> {
        opened(&self.directory)?.map_or(Ok(Vec::new()), |directory| PatchFile::all_in(&directory))
    }

    /// Adds a patch after the others; returns its path.
    ///
    /// # Errors
    /// Users other than root can change the directory, or the file cannot be written.
    pub(crate) fn add(&self, name: &str, bytes: &[u8]) -> anyhow::Result<PathBuf> {
        let directory = Directory::make_readable(&self.directory)?;
        let last = directory.names()?.iter().filter_map(|name| number(name)).max().unwrap_or(0);
        Ok(directory.write_readable(&format!("{:04}-{}.patch", last + 1, file_name(name)), bytes)?)
    }

    /// Removes one of its patches, and the directory with the last one.
    ///
    /// # Errors
    /// Users other than root can change the directory, or the file cannot be removed.
    pub(crate) fn remove(&self, stored: &PatchFile) -> anyhow::Result<()> {
        let directory = Directory::open_of_root(&self.directory)?;
        let name = stored.path.file_name().and_then(|name| name.to_str()).context("a patch file has a name")?;
        directory.remove(name)?;
        if !directory.names()?.iter().any(|name| name.ends_with(".patch")) {
            // Other files in it belong to other programs.
            let _ = directory.remove_if_empty();
        }
        Ok(())
    }
}

/// Opens a directory of root's, if it exists.
fn opened(path: &Path) -> anyhow::Result<Option<Directory>> {
    match Directory::open_of_root(path) {
        Err(error) if error.is_not_found() => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

/// Number at the start of a patch's file name.
fn number(name: &str) -> Option<u32> {
    name.strip_suffix(".patch")?.split_once('-')?.0.parse().ok()
}

fn file_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.+".contains(c) { c } else { '_' }).collect()
}

/// Writes a file completely or not at all, in a directory that root alone can change. A service's own user can read both.
///
/// # Errors
/// Users other than root can change the directory, or the file cannot be written.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let directory = path.parent().context("a file lies in a directory")?;
    let name = path.file_name().and_then(|name| name.to_str()).context("a file has a name")?;
    Directory::make_readable(directory)?.write_readable(name, bytes)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_keep_the_order_in_which_they_were_added() {
        let directory = std::env::temp_dir().join(format!("stillpoint-enabled-{}", std::process::id()));
        let enabled = Enabled { directory: directory.clone() };
        let names = || enabled.patches().unwrap().into_iter().map(|stored| stored.path).collect::<Vec<_>>();
        assert_eq!(names(), Vec::<PathBuf>::new());
        let first = enabled.add("zz/z", b"1").unwrap();
        let second = enabled.add("aa", b"2").unwrap();
        assert!(first.ends_with("0001-zz_z.patch") && second.ends_with("0002-aa.patch"));
        let remove = |path: &PathBuf| enabled.remove(&PatchFile::read(path).unwrap()).unwrap();
        remove(&first);
        let third = enabled.add("bb", b"3").unwrap();
        assert_eq!(names(), [second.clone(), third.clone()]);
        remove(&second);
        remove(&third);
        assert!(!directory.exists());
    }
}
