//! Packages built with quiescence points: edits of our own are placed in the source before its rules run, and every
//! program is linked with libstillpoint. All other steps are those of the archive.

use crate::Error;
use crate::root::OWN_PATH;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Edits and library that a package is built with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Integrated {
    /// Directory of edits and files, see `stillpoint_integrations`.
    pub edits: PathBuf,
    /// Directory that holds `libstillpoint.so` and `libstillpoint.so.1`.
    pub libraries: PathBuf,
}

/// Edits and library of a package, read and verified.
#[derive(Debug)]
pub(crate) struct Integration {
    edits: stillpoint_integrations::Integration,
    libraries: PathBuf,
}

impl Integrated {
    pub(crate) fn read(&self) -> Result<Integration, Error> {
        for name in ["libstillpoint.so", "libstillpoint.so.1"] {
            if !self.libraries.join(name).is_file() {
                let what = self.libraries.display().to_string();
                return Err(Error::Malformed { what, why: format!("it holds no {name}") });
            }
        }
        let edits = stillpoint_integrations::Integration::read(&self.edits)?;
        Ok(Integration { edits, libraries: self.libraries.clone() })
    }
}

impl Integration {
    /// Returns a digest that distinguishes packages with different edits. The library itself is not part of it: the
    /// loader loads the library when the program starts, so its content does not change the program's text.
    pub(crate) fn digest(&self) -> &str {
        self.edits.digest()
    }

    /// Returns the paths of the edited files.
    pub(crate) fn edited(&self) -> impl Iterator<Item = &str> {
        self.edits.edited()
    }

    /// Places the edits in a tree before its build.
    pub(crate) fn place(&self, tree: &Path) -> Result<(), Error> {
        self.edits.apply(tree, tree)?;
        Ok(())
    }

    /// Returns the library's directory, and its path inside the build.
    pub(crate) fn mount(&self) -> (PathBuf, PathBuf) {
        (self.libraries.clone(), Path::new(OWN_PATH).join("lib"))
    }

    /// Returns variables that make Debian's build flags link with the library, and programs of the build find it.
    pub(crate) fn environment(&self) -> [(String, OsString); 2] {
        let (_, inside) = self.mount();
        let flags = format!("-L{} -Wl,--no-as-needed -lstillpoint", inside.display());
        [("DEB_LDFLAGS_APPEND".into(), flags.into()), ("LD_LIBRARY_PATH".into(), inside.into())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_directory_without_the_library_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let integrated = Integrated { edits: dir.path().to_owned(), libraries: dir.path().to_owned() };
        let error = integrated.read().unwrap_err().to_string();
        assert!(error.contains("it holds no libstillpoint.so"), "{error}");
    }

    #[test]
    fn edits_are_placed_and_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let (edits, libraries, tree) = (dir.path().join("edits"), dir.path().join("lib"), dir.path().join("tree"));
        for made in [&edits, &libraries, &tree] {
            fs::create_dir(made).unwrap();
        }
        for name in ["libstillpoint.so", "libstillpoint.so.1"] {
            fs::write(libraries.join(name), "").unwrap();
        }
        fs::write(tree.join("a.c"), "int main(void)\n{\n    serve();\n}\n").unwrap();
        let write = |call: &str| {
            fs::write(edits.join("a.edits"), format!("file a.c\nin main\n  before serve (\n    | {call}\n")).unwrap();
            Integrated { edits: edits.clone(), libraries: libraries.clone() }.read().unwrap()
        };
        let (one, other) = (write("one();"), write("other();"));
        assert_ne!(one.digest(), other.digest());
        other.place(&tree).unwrap();
        let text = fs::read_to_string(tree.join("a.c")).unwrap();
        assert!(text.contains("    other();\n    serve();"), "{text}");
        assert!(other.environment()[0].1.to_str().unwrap().ends_with("-lstillpoint"));
    }
}
