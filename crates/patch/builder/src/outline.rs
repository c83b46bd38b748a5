//! Packages whose rules run without compilation: a build takes half an hour, one unit two seconds.
//!
//! The package's own rules run in a clean root as for a build: they configure, and make generated sources. The program
//! that replaces every compiler records each compilation and each link, and leaves an empty file in place of the
//! result. All packages listed here compile and link the programs that the build itself runs from source in one step; a
//! package that links them from objects cannot be outlined. The target as a whole is not compared with a build; the
//! byte check of every unit that a patch touches replaces this comparison.

use crate::commands::Recording;
use crate::includes::Includes;
use crate::package::{BuiltPackage, Rules, Shipped, SourcePackage};
use crate::{Builder, Error};
use std::ffi::OsString;
use std::path::Path;
use stillpoint_host::EntryName;
use stillpoint_host::untrusted::Tree;

/// The program that replaces the compilers. It executes tests of the configuration (`conftest`), queries, and calls
/// that make a program from source in one step; it only records all other calls.
pub(crate) const OUTLINER: &str = include_str!("outliner.sh");
/// Size limit, in bytes, of an archive without members.
const EMPTY_MAX: u64 = 8;

/// Directories that no compiler of the patched program reads; otherwise every patched tree would hold a copy.
const LEFT_OUT: [&str; 4] = ["doc", "build/doc", "src/test", "build/src/test"];

/// Returns settings for the rules of packages that make more than programs. Documentation and the bitcode of
/// just-in-time compilation are no part of a program's text.
pub(crate) fn environment(package: &str) -> Vec<(String, OsString)> {
    match is_outlined(package) {
        true => vec![("MAKEFLAGS".into(), "CLANG=/bin/true XSLTPROC=/bin/true".into())],
        false => Vec::new(),
    }
}

/// Returns true if a package can be outlined.
pub(crate) fn is_outlined(package: &str) -> bool {
    package.strip_prefix("postgresql-").is_some_and(|version| version.bytes().all(|b| b.is_ascii_digit()))
}

impl Builder<'_> {
    /// Configures a package, makes its generated sources, and returns the recorded calls of its compilers. Runs once
    /// for each version.
    pub(crate) fn outline_package(&self, source: &SourcePackage) -> Result<BuiltPackage, Error> {
        let shipped = Shipped::Full.diffs(&source.series)?;
        let identity = format!("{}-outlined", self.identity(source, &shipped));
        let root = self.root_for(source)?;
        let entry = self.cache.entry(&EntryName::new("built", &identity), |into| {
            let tree = self.shipped_tree(source, &shipped, into)?;
            self.follow_rules(source, &root, into)?;
            Includes::of_tree(&Tree::open(&tree)?)?.write(&Tree::open(into)?)
        })?;
        Ok(BuiltPackage {
            shipped,
            root: Tree::open(&root)?.known_as(Path::new("/")),
            source: source.build_path(),
            tree: Tree::open(&entry.join("tree"))?.known_as(&source.build_path()),
            identity,
            recording: Recording::read(&entry.join("records"))?,
            includes: Some(Includes::read(&Tree::open(&entry)?)?),
        })
    }

    fn follow_rules(&self, source: &SourcePackage, root: &Path, into: &Path) -> Result<(), Error> {
        self.progress(&format!("following the rules of {} {}", source.name(), source.version()));
        let environment = environment(source.name());
        let rules =
            Rules { targets: &["build-arch"], environment: &environment, recorder: OUTLINER, integration: None };
        let build_path = source.build_path();
        self.run_rules(root, &build_path, into, &rules)?;
        let tree = Tree::open(&into.join("tree"))?.known_as(&build_path);
        for directory in LEFT_OUT {
            tree.remove_all(directory)?;
        }
        let recording = Recording::read(&into.join("records"))?;
        let objects = recording.commands.iter().filter_map(|c| c.object.as_deref());
        for made in objects.chain(recording.outputs()) {
            // empty files replace results
            if tree.length(made).is_some_and(|length| length <= EMPTY_MAX) {
                tree.remove(made)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_servers_of_one_major_version_are_outlined() {
        assert!(is_outlined("postgresql-15") && !is_outlined("postgresql-common") && !is_outlined("redis"));
        assert!(environment("redis").is_empty());
    }

    /// Runs the script alone, with another shell program in place of the compiler.
    #[test]
    fn compilations_and_links_are_noted_and_not_done() {
        use std::os::unix::fs::PermissionsExt;
        use std::process::Command;
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let records = at.join("records");
        fs::create_dir(&records).unwrap();
        let script = OUTLINER.replace("/stillpoint/records", &records.display().to_string());
        let script = script.replace("/usr/bin/$name", "/bin/true");
        for name in ["gcc", "ar"] {
            fs::write(at.join(name), &script).unwrap();
            fs::set_permissions(at.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let run = |line: &str| {
            let mut words = line.split(' ');
            let program = at.join(words.next().unwrap());
            assert!(Command::new(program).args(words).current_dir(at).status().unwrap().success(), "{line}");
        };
        for line in [
            "gcc -O2 -c -o a.o a.c",
            "gcc -c b.c",
            "ar crs lib.a a.o",
            "gcc -shared -o x.so b.o lib.a",
            "gcc -o tool tool.c",
            "gcc -c conftest.c",
            "gcc --version",
        ] {
            run(line);
        }
        for (name, there) in
            [("a.o", true), ("b.o", true), ("lib.a", true), ("x.so", true), ("tool", false), ("conftest.o", false)]
        {
            assert_eq!(at.join(name).exists(), there, "{name}");
        }
        let recording = Recording::read(&records).unwrap();
        assert_eq!(recording.commands.len(), 2);
        let [root, tree] = [Path::new("/"), at].map(|path| Tree::open(path).unwrap());
        let place = crate::account::Place { source: at, tree: &tree, root: &root };
        let account = crate::account::Account::of(&recording, &at.join("x.so"), &place);
        let objects: Vec<_> = account.objects.keys().cloned().collect();
        assert_eq!(objects, [at.join("a.o"), at.join("b.o")], "{account:?}");
        assert!(account.is_complete(), "{account:?}");
    }
}
