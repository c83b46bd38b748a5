//! The program of a package that a patch is for, as far as it is known before the package's rules have run.

use crate::package::BuiltPackage;
use crate::request::DebianRequest;
use crate::{Builder, Error, SourcePackage, elf};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use stillpoint_host::file::{list, read_regular};
use stillpoint_host::untrusted::{FILE_MAX, Tree};

/// Names under which a package's rules may link a program.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    names: BTreeSet<OsString>,
}

impl Wanted {
    /// Makes a program with one name.
    #[cfg(test)]
    pub(crate) fn named(name: &str) -> Self {
        Wanted { names: BTreeSet::from([OsString::from(name)]) }
    }

    /// Reads the names from a request; a file also has the name by which programs load it.
    pub(crate) fn of(request: &DebianRequest) -> Result<Self, Error> {
        let files = request.binary.iter().map(PathBuf::as_path).chain(request.names.iter().map(Path::new));
        let mut names: BTreeSet<OsString> = files.filter_map(|file| file.file_name()).map(OsStr::to_owned).collect();
        if let Some(file) = request.binary.as_ref().filter(|file| file.is_file()) {
            names.extend(elf::soname(&read_regular(file, FILE_MAX)?).map(OsString::from));
        }
        Ok(Wanted { names })
    }

    /// Returns the outputs of the build with one of the names.
    pub(crate) fn outputs(&self, built: &BuiltPackage) -> Vec<PathBuf> {
        let is_named = |output: &PathBuf| {
            let name = output.file_name().unwrap_or_default();
            self.names.iter().any(|wanted| wanted == name || built.is_library(output, wanted))
        };
        built.outputs().into_iter().filter(is_named).collect()
    }
}

impl Builder<'_> {
    /// Returns the outputs that are the wanted program, if the rules have come as far as to link each file of its name in
    /// the archive's binary packages; else none.
    pub(crate) fn linked(
        &self,
        source: &SourcePackage,
        wanted: &Wanted,
        built: &BuiltPackage,
    ) -> Result<Vec<PathBuf>, Error> {
        let outputs = wanted.outputs(built);
        if outputs.is_empty() {
            return Ok(outputs);
        }
        let shipped = match self.fetch_binaries(source) {
            Ok(binaries) => files_named(&binaries, wanted)?,
            // how many flavours of it there are is not known
            Err(Error::Withheld { .. } | Error::NoSuchVersion { .. }) => return Ok(Vec::new()),
            Err(other) => return Err(other),
        };
        Ok(if outputs.len() >= shipped { outputs } else { Vec::new() })
    }
}

/// Returns the number of different programs and libraries, in unpacked packages, that have one of the names.
fn files_named(packages: &Path, wanted: &Wanted) -> Result<usize, Error> {
    let mut found = BTreeSet::new();
    for package in list(packages)? {
        let tree = Tree::open(&packages.join(package))?;
        let entries = tree.entries()?;
        let is_named = |name: &Path| name.file_name().is_some_and(|name| wanted.names.contains(name));
        for entry in entries.iter().filter(|entry| entry.is_file() && is_named(&entry.name)) {
            if elf::is_loadable(&tree, &entry.name) {
                found.insert(tree.read(&entry.name)?);
            }
        }
    }
    Ok(found.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn each_flavour_that_the_packages_have_is_counted_once() {
        let packages = tempfile::tempdir().unwrap();
        let files = [
            ("one/usr/bin/prog", "/bin/true"),
            ("two/usr/bin/prog", "/bin/false"),
            ("same/usr/lib/prog", "/bin/true"),
            ("docs/usr/share/doc/prog", "/etc/passwd"),
            ("one/usr/bin/other", "/bin/false"),
        ];
        for (path, from) in files {
            let path = packages.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::copy(from, path).unwrap();
        }
        let count = |name: &str| files_named(packages.path(), &Wanted::named(name)).unwrap();
        assert_eq!((count("prog"), count("other"), count("absent")), (2, 1, 0));
    }
}
