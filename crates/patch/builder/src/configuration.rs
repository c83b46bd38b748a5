//! Packages that are configured and not built: a build takes an hour, one unit five seconds.
//!
//! The package's own rules run its configuration in a clean root, and only that part of its build that makes sources
//! and headers. CMake's files show how each unit would be compiled and which objects would be linked. No build is
//! compared with the target; the byte check of every unit that a patch touches replaces this comparison.

use crate::commands::{RECORDER, Recording};
use crate::includes::Includes;
use crate::package::{BuiltPackage, Rules, Shipped, SourcePackage};
use crate::sandbox::{Sandbox, run};
use crate::{Builder, Error};
use std::ffi::OsString;
use std::path::Path;
use stillpoint_host::EntryName;
use stillpoint_host::untrusted::Tree;

/// Steps that configure one package.
#[derive(Debug)]
struct Recipe {
    package: &'static str,
    /// Targets of `debian/rules`, in this order.
    rules: &'static [&'static str],
    /// Build directory of CMake, relative to the source.
    build_directory: &'static str,
    /// Targets that make sources and headers.
    generators: &'static [&'static str],
    /// Directories that no compiler reads; otherwise every patched tree would hold a copy.
    left_out: &'static [&'static str],
}

/// The packages that are too large to build for one patch.
const RECIPES: [Recipe; 1] = [Recipe {
    package: "mariadb",
    rules: &["override_dh_auto_clean", "override_dh_auto_configure"],
    build_directory: "builddir",
    generators: &["GenError", "GenServerSource", "GenUnicodeDataSource"],
    left_out: &["mysql-test", "builddir/mysql-test", "storage/rocksdb/rocksdb/java", "sql-bench", "man"],
}];

/// Variable of the package's own build that a compiler reads, and the name of the file that keeps it.
const EPOCH: &str = "SOURCE_DATE_EPOCH";
const EPOCH_FILE: &str = "epoch";

impl Builder<'_> {
    /// Configures a package exactly as the archive does, and makes its generated sources. Returns `None` when there is
    /// no recipe to avoid its build. Runs once for each version.
    ///
    /// # Errors
    /// The clean root cannot be made, the package's own rules fail, or their results cannot be read.
    pub fn configure_package(&self, source: &SourcePackage) -> Result<Option<BuiltPackage>, Error> {
        if crate::outline::is_outlined(source.name()) {
            return self.outline_package(source).map(Some);
        }
        let Some(recipe) = RECIPES.iter().find(|r| r.package == source.name()) else { return Ok(None) };
        let diffs = Shipped::Full.diffs(&source.series)?;
        let identity = format!("{}-configured", self.identity(source, &diffs));
        let root = self.root_for(source)?;
        let build_path = source.build_path();
        let entry = self.cache.entry(&EntryName::new("built", &identity), |into| {
            let tree = self.shipped_tree(source, &diffs, into)?;
            self.progress(&format!("configuring {} {}", source.name(), source.version()));
            let environment = [("CMAKE_EXPORT_COMPILE_COMMANDS".to_owned(), OsString::from("ON"))];
            let rules =
                Rules { targets: recipe.rules, environment: &environment, recorder: RECORDER, integration: None };
            self.run_rules(&root, &build_path, into, &rules)?;
            let sandbox = Sandbox { root: Some(root.clone()), ..Sandbox::default() }.with(&tree, &build_path);
            self.progress(&format!("making the generated sources of {}", source.name()));
            let jobs = format!("-j{}", self.jobs);
            let argv = [&["make", &jobs][..], recipe.generators].concat();
            let directory = build_path.join(recipe.build_directory);
            run(&mut sandbox.command(&directory, &argv, &[]), "making the generated sources")?;
            let argv = ["dpkg-parsechangelog", "--show-field", "Timestamp"];
            let epoch = run(&mut sandbox.command(&build_path, &argv, &[]), "asking for the package's date")?;
            let own = Tree::open(into)?;
            own.write(EPOCH_FILE, epoch.stdout.trim_ascii())?;
            let tree = Tree::open(&tree)?.known_as(&build_path);
            for directory in recipe.left_out {
                tree.remove_all(directory)?;
            }
            Includes::of_tree(&tree)?.write(&own)
        })?;
        let (own, tree) = (Tree::open(&entry)?, Tree::open(&entry.join("tree"))?.known_as(&build_path));
        Ok(Some(BuiltPackage {
            shipped: diffs,
            root: Tree::open(&root)?.known_as(Path::new("/")),
            recording: recording(&tree, &build_path, recipe, &own.read_text(EPOCH_FILE)?)?,
            source: build_path,
            tree,
            identity,
            includes: Some(Includes::read(&own)?),
        }))
    }
}

/// Reads from CMake's files the commands that it would run.
fn recording(tree: &Tree, build_path: &Path, recipe: &Recipe, epoch: &str) -> Result<Recording, Error> {
    let directory = Path::new(recipe.build_directory);
    let mut recording = Recording::default();
    let commands = directory.join("compile_commands.json");
    for mut command in crate::commands::parse_json(&tree.read(&commands)?, &commands)? {
        command.env = vec![(EPOCH.to_owned(), OsString::from(epoch))];
        recording.commands.push(command);
    }
    let is_script = |path: &Path| path.starts_with(directory) && path.ends_with("link.txt");
    for entry in tree.entries()?.iter().filter(|entry| entry.is_file() && is_script(&entry.name)) {
        let script = tree.read_text(&entry.name)?;
        // DIRECTORY/CMakeFiles/NAME.dir/link.txt is run in DIRECTORY
        let Some(at) = entry.name.ancestors().nth(3) else { continue };
        for line in script.lines() {
            let response = |name: &str| tree.read_text(at.join(name)).ok();
            let argv = crate::link::expanded(shlex::split(line).unwrap_or_default(), response);
            recording.link(&build_path.join(at), &argv, &[]);
        }
    }
    Ok(recording)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::{Account, Place};
    use std::fs;
    use std::path::PathBuf;

    /// Files of CMake for a library, a program and one unit that is compiled for both.
    #[test]
    fn cmakes_files_tell_what_would_be_run() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        let write = |name: &str, text: &str| {
            let path = tree.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let unit = |at: &str, object: &str| {
            format!(
                r#"{{"directory":"/b/builddir/{at}","command":"/usr/bin/c++ -O2 -o {object} -c /b/sql/a.cc","file":"/b/sql/a.cc","output":"{at}/{object}"}}"#
            )
        };
        let json = [unit("sql", "CMakeFiles/sql.dir/a.cc.o"), unit("lib", "CMakeFiles/emb.dir/a.cc.o")];
        write("builddir/compile_commands.json", &format!("[{}]", json.join(",")));
        write(
            "builddir/sql/CMakeFiles/sql.dir/link.txt",
            "/usr/bin/ar qc libsql.a \"CMakeFiles/sql.dir/a.cc.o\"\n/usr/bin/ranlib libsql.a\n",
        );
        write("builddir/srv/CMakeFiles/d.dir/link.txt", "/usr/bin/c++ CMakeFiles/d.dir/m.o -o d ../sql/libsql.a -lm\n");
        let root = Tree::open(dir.path()).unwrap().known_as(Path::new("/"));
        let tree = Tree::open(&tree).unwrap().known_as(Path::new("/b"));
        let recording = recording(&tree, Path::new("/b"), &RECIPES[0], "77").unwrap();
        assert_eq!(recording.commands.len(), 2);
        assert_eq!(recording.commands[0].env, [(EPOCH.to_owned(), OsString::from("77"))]);
        let outputs: Vec<_> = recording.outputs().collect();
        assert_eq!(outputs, [Path::new("/b/builddir/sql/libsql.a"), Path::new("/b/builddir/srv/d")]);
        let place = Place { source: Path::new("/b"), tree: &tree, root: &root };
        let account = Account::of(&recording, Path::new("/b/builddir/srv/d"), &place);
        let objects: Vec<&Path> = account.objects.keys().map(PathBuf::as_path).collect();
        let wanted = Path::new("/b/builddir/sql/CMakeFiles/sql.dir/a.cc.o");
        assert_eq!(objects, [wanted], "the embedded copy is no part of it");
        let missing = account.missing.iter().map(String::as_str);
        assert!(missing.eq(["builddir/srv/CMakeFiles/d.dir/m.o"]), "no command makes it: {account:?}");
    }
}
