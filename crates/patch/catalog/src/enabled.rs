//! Patches that are enabled for a unit.

use crate::error::Error;
use crate::patch_file::PatchFile;
use crate::root::Root;
use std::path::{Path, PathBuf};
use stillpoint_host::systemd::ServiceName;
use stillpoint_host::trusted::Directory;

const ENABLED_DIRECTORY: &str = "/var/lib/stillpoint/enabled";

/// Directory of one unit's patches.
#[derive(Debug)]
pub struct Enabled {
    directory: PathBuf,
}

impl Enabled {
    /// Makes the value for a unit, also for one without patches.
    pub fn of(root: &Root, unit: &ServiceName) -> Enabled {
        Enabled { directory: root.at(ENABLED_DIRECTORY).join(unit.as_str()) }
    }

    /// Returns every unit that has a directory.
    ///
    /// # Errors
    /// Users other than root can change the directory of all units, or it cannot be read.
    pub fn units(root: &Root) -> Result<Vec<ServiceName>, Error> {
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
    pub fn patches(&self) -> Result<Vec<PatchFile>, Error> {
        opened(&self.directory)?.map_or(Ok(Vec::new()), |directory| PatchFile::all_in(&directory))
    }

    /// Adds a patch after the others; returns its path.
    ///
    /// # Errors
    /// Users other than root can change the directory, or the file cannot be written.
    pub fn add(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        let directory = Directory::make_readable(&self.directory)?;
        let last = directory.names()?.iter().filter_map(|name| number(name)).max().unwrap_or(0);
        Ok(directory.write_readable(&format!("{:04}-{}.patch", last + 1, file_name(name)), bytes)?)
    }

    /// Removes one of its patches, and the directory with the last one.
    ///
    /// # Errors
    /// Users other than root can change the directory, or the file cannot be removed.
    pub fn remove(&self, stored: &PatchFile) -> Result<(), Error> {
        let directory = Directory::open_of_root(&self.directory)?;
        let name = stored.path.file_name().and_then(|name| name.to_str());
        directory.remove(name.ok_or_else(|| Error::Refused("a patch file has a name".into()))?)?;
        if !directory.names()?.iter().any(|name| name.ends_with(".patch")) {
            // Other files in it belong to other programs.
            let _ = directory.remove_if_empty();
        }
        Ok(())
    }
}

/// Opens a directory of root's, if it exists.
fn opened(path: &Path) -> Result<Option<Directory>, Error> {
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
