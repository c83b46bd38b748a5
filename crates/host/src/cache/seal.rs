//! Seals: the list of a directory's contents at the end of its use. The next user detects by it files that were removed or truncated since.
//! For directories that are used again and change, which are not entries.

use super::manifest::Manifest;
use super::{is_whole_by, remove, write_listed};
use crate::Error;
use std::path::Path;

const SUFFIX: &str = "seal";

/// Writes the list of the contents of `directory` to `DIRECTORY.seal`. Contents of the directories `changing` (relative paths) are left
/// out.
///
/// # Errors
/// The directory cannot be read, or the seal cannot be written.
pub fn seal(directory: &Path, changing: &[&str]) -> Result<(), Error> {
    write_listed(directory, SUFFIX, &Manifest::of_tree(directory, changing)?)
}

/// Returns true if the directory has a seal, and still has everything in it. Files that were added since do not count.
pub fn is_sealed(directory: &Path) -> bool {
    is_whole_by(directory, SUFFIX)
}

/// Removes the seal, before the directory is changed.
///
/// # Errors
/// The seal cannot be removed.
pub fn unseal(directory: &Path) -> Result<(), Error> {
    remove(&super::beside(directory, SUFFIX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_seal_shows_what_was_truncated_or_removed_since() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("partial")).unwrap();
        fs::write(tree.join("one"), "1234").unwrap();
        fs::write(tree.join("partial/two"), "1234").unwrap();
        assert!(!is_sealed(&tree));
        seal(&tree, &["partial"]).unwrap();
        fs::write(tree.join("partial/two"), "").unwrap();
        fs::write(tree.join("three"), "new").unwrap();
        assert!(is_sealed(&tree), "what changes does not count");
        fs::write(tree.join("one"), "12").unwrap();
        assert!(!is_sealed(&tree), "a truncated file");
        fs::write(tree.join("one"), "1234").unwrap();
        assert!(is_sealed(&tree));
        fs::remove_file(tree.join("one")).unwrap();
        assert!(!is_sealed(&tree), "a removed file");
        fs::write(tree.join("one"), "1234").unwrap();
        unseal(&tree).unwrap();
        unseal(&tree).unwrap();
        assert!(!is_sealed(&tree));
    }
}
