//! The patches that are enabled for units, on disk: who may put them there, and what lies where.
//!
//! ```text
//! /var/lib/stillpoint/enabled/redis-server.service/0001-CVE-2026-25243.patch
//! /etc/systemd/system/redis-server.service.d/90-stillpoint.conf
//! ```

use super::exec::patch_files;
use super::processes::owned_by_root;
use anyhow::Context;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use stillpoint_host::systemd::ServiceName;
use stillpoint_patch_builder::{Readable, write_whole};

/// Below which directory everything lies.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Root {
    /// Take units and enabled patches from below this directory instead of the machine's own (an image, a test).
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
}

impl Root {
    /// A path of the machine, below the root.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Whether it is the machine's own.
    pub(crate) fn is_machine(&self) -> bool {
        self.root == Path::new("/")
    }
}

const STORE: &str = "/var/lib/stillpoint/enabled";

/// The directory of one unit's patches.
#[derive(Debug)]
pub(crate) struct Enabled {
    directory: PathBuf,
}

impl Enabled {
    /// Of a unit; whether there are any is another question.
    pub(crate) fn of(root: &Root, unit: &ServiceName) -> Enabled {
        Enabled { directory: root.at(STORE).join(unit.as_str()) }
    }

    /// Every unit that has a directory.
    pub(crate) fn units(root: &Root) -> anyhow::Result<Vec<ServiceName>> {
        let store = root.at(STORE);
        let entries = match fs::read_dir(&store) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| store.display().to_string())?,
        };
        let name = |entry: fs::DirEntry| ServiceName::complete(&entry.file_name().to_string_lossy()).ok();
        let mut names: Vec<ServiceName> = entries.flatten().filter_map(name).collect();
        names.sort();
        Ok(names)
    }

    /// The patch files in the order in which they are applied; refused when others than root could have put them there.
    pub(crate) fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        if !self.directory.exists() {
            return Ok(Vec::new());
        }
        owned_by_root(&self.directory)?;
        let files = patch_files(&self.directory)?;
        files.iter().try_for_each(|file| owned_by_root(file))?;
        Ok(files)
    }

    /// Adds a patch behind the others.
    pub(crate) fn add(&self, name: &str, bytes: &[u8]) -> anyhow::Result<PathBuf> {
        let at = || self.directory.display().to_string();
        make_directory(&self.directory).with_context(at)?;
        owned_by_root(&self.directory)?;
        let last = self.files()?.iter().filter_map(|file| number(file)).max().unwrap_or(0);
        let path = self.directory.join(format!("{:04}-{}.patch", last + 1, file_name(name)));
        write(&path, bytes)?;
        Ok(path)
    }

    /// Removes one of its files, and the directory with the last.
    pub(crate) fn remove(&self, file: &Path) -> anyhow::Result<()> {
        fs::remove_file(file).with_context(|| file.display().to_string())?;
        if patch_files(&self.directory)?.is_empty() {
            // Something else that lies there is somebody else's.
            let _ = fs::remove_dir(&self.directory);
        }
        Ok(())
    }
}

fn number(file: &Path) -> Option<u32> {
    file.file_name()?.to_str()?.split_once('-')?.0.parse().ok()
}

fn file_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.+".contains(c) { c } else { '_' }).collect()
}

/// A directory that a service's own user can read, whatever the mask.
pub(crate) fn make_directory(path: &Path) -> std::io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), make_directory)?;
    fs::create_dir(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

/// Writes a file that appears whole or not at all, and that a service's own user can read.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    write_whole(path, bytes, Readable::ByOthers)?;
    fs::set_permissions(path, Permissions::from_mode(0o644)).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_keep_the_order_in_which_they_were_added() {
        let directory = std::env::temp_dir().join(format!("stillpoint-enabled-{}", std::process::id()));
        let enabled = Enabled { directory: directory.clone() };
        assert_eq!(enabled.files().unwrap(), Vec::<PathBuf>::new());
        let first = enabled.add("zz/z", b"1").unwrap();
        let second = enabled.add("aa", b"2").unwrap();
        assert!(first.ends_with("0001-zz_z.patch") && second.ends_with("0002-aa.patch"));
        enabled.remove(&first).unwrap();
        let third = enabled.add("bb", b"3").unwrap();
        assert_eq!(enabled.files().unwrap(), [second.clone(), third.clone()]);
        enabled.remove(&second).unwrap();
        enabled.remove(&third).unwrap();
        assert!(!directory.exists());
    }
}
