//! Small packages whose rules hide which command made which file. Each change ends with the right patch or with a
//! refusal; "nothing to patch" is reported only for files that are provably no part of the target.

use crate::build::{Built, Job, Report, Target};
use crate::commands::Recording;
use crate::debian::Diff;
use crate::includes::Includes;
use crate::outline::loaded_images;
use crate::package::BuiltPackage;
use crate::recorder;
use crate::regenerate::{Regenerated, RegeneratedSides, TargetLink};
use crate::statement::Statement;
use crate::wanted_program::Wanted;
use crate::{Builder, Cache, Error, Verdict};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::untrusted::Tree;

const LIMIT: &str = "#define LIMIT 100\n";
const CLAMP: &str = "#include \"limit.h\"\n\nint clamp(int value);\n\n\
__attribute__((noinline)) int clamp(int value)\n{\n#ifdef WIDE\n    value /= 7;\n#else\n    value *= 3;\n#endif\n    \
if (value > LIMIT)\n        return LIMIT;\n    return value + 11;\n}\n";
const MAIN: &str = "#include <stdio.h>\n#include \"limit.h\"\n\nint clamp(int value);\n\n\
int main(int argc, char **argv)\n{\n    (void)argv;\n    printf(\"%d\\n\", clamp(argc));\n    return argc > LIMIT;\n}\n";
const OTHER: &str = "#include <stdlib.h>\n\nint spare(int value);\n\n\
__attribute__((noinline)) int spare(int value)\n{\n    return abs(value) * 17 + rand();\n}\n";
const OTHER_MAIN: &str = "#include <stdio.h>\n\nint spare(int value);\n\n\
int main(int argc, char **argv)\n{\n    (void)argv;\n    printf(\"%d\\n\", spare(argc) + 5);\n    return argc * 3;\n}\n";

/// File, text, and the text in its place.
type Change<'a> = (&'a str, &'a str, &'a str);

/// Changes the code of `clamp` in every variant that is compiled.
const FIX: Change = ("src/clamp.c", "return value + 11", "return value + 12");
const HEADER_FIX: Change = ("src/limit.h", "100", "50");
const OTHER_FIX: Change = ("src/other.c", "* 17", "* 18");

/// A package that was built by the target `build` of its makefile, with the work of its compilers recorded.
struct Package {
    directory: tempfile::TempDir,
    /// True if compilations and links were put off.
    is_deferred: bool,
}

impl Package {
    /// Builds a package with these rules, once as usual and once with its compilations put off. None without a private
    /// mount namespace, which mounts trees at one another's path.
    fn both(test: &str, rules: &str) -> Vec<Self> {
        let mounts = Command::new("unshare").args(["--mount", "--propagation", "private", "true"]).status();
        if !mounts.is_ok_and(|status| status.success()) {
            stillpoint_testing::skipped(format!("{test}: no private mount namespace can be made"));
            return Vec::new();
        }
        [false, true].map(|is_deferred| Package::new(rules, is_deferred)).into()
    }

    fn new(rules: &str, is_deferred: bool) -> Self {
        let package = Package { directory: tempfile::tempdir().unwrap(), is_deferred };
        for name in ["original/src", "tree", "bin", "records", "out"] {
            fs::create_dir_all(package.path(name)).unwrap();
        }
        let makefile = format!("LINK = gcc -Wl,--build-id\n{}\n", rules.replace("\n    ", "\n\t"));
        let sources = [
            ("src/limit.h", LIMIT),
            ("src/clamp.c", CLAMP),
            ("src/main.c", MAIN),
            ("src/other.c", OTHER),
            ("src/other_main.c", OTHER_MAIN),
            ("Makefile", &makefile),
            ("src/codes.txt", "1 one\n"),
            ("src/test.tcl", "puts 1\n"),
        ];
        for (name, text) in sources {
            fs::write(package.path("original").join(name), text).unwrap();
        }
        let own = format!("my $own = '{}';", package.directory.path().display());
        let recorder = recorder::PROGRAM.replace("my $own = '/stillpoint';", &own);
        let tools = ["gcc", "ar", "nm", "objcopy", recorder::REALIZE];
        for name in tools.iter().filter(|name| is_deferred || recorder::stands_in(name, false)) {
            let path = package.path("bin").join(name);
            fs::write(&path, &recorder).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        package.copy("original/.", "tree");
        if is_deferred {
            package.make("tree", "build", "/usr/bin:/bin");
            fs::rename(package.path("tree"), package.path("built")).unwrap();
            fs::create_dir(package.path("tree")).unwrap();
            package.copy("original/.", "tree");
            fs::write(package.path("records").join(recorder::DEFER), "").unwrap();
        }
        package.make("tree", "build", &format!("{}:/usr/bin:/bin", package.path("bin").display()));
        package
    }

    fn copy(&self, from: &str, to: &str) {
        let copy = Command::new("cp").args(["-a", from, to]).current_dir(self.directory.path()).status();
        assert!(copy.unwrap().success());
    }

    /// Returns the path of the tree that has the programs.
    fn programs(&self) -> PathBuf {
        self.path(if self.is_deferred { "built" } else { "tree" })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn make(&self, tree: &str, target: &str, path: &str) {
        self.try_make(tree, target, path).unwrap();
    }

    /// Runs a rule; the error is its output.
    fn try_make(&self, tree: &str, target: &str, path: &str) -> Result<(), String> {
        let mut make = Command::new("make");
        make.args(["-s", target]).current_dir(self.path(tree)).env("PATH", path).env_remove("MAKEFLAGS");
        let output = make.output().unwrap();
        output.status.success().then_some(()).ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn diff(&self, (file, from, to): Change) -> Diff {
        let before = self.path("original").join(file);
        let text = fs::read_to_string(&before).unwrap();
        assert!(text.contains(from), "{file} has no {from:?}");
        let after = self.path("after");
        fs::write(&after, text.replacen(from, to, 1)).unwrap();
        let labels = [format!("--label=a/{file}"), format!("--label=b/{file}")];
        let output = Command::new("diff").arg("-u").args(labels).args([&before, &after]).output().unwrap();
        Diff::new("fix.patch", output.stdout)
    }

    /// Builds a patch of the program, as the program's package would contain it.
    fn patch(&self, program: &str, change: Change) -> Result<Built, Error> {
        self.patch_of(program, &[change])
    }

    /// Builds a patch from changes of several files.
    fn patch_of(&self, program: &str, changes: &[Change]) -> Result<Built, Error> {
        self.patch_with(program, &[], changes, None)
    }

    /// Builds a patch on top of another change.
    fn patch_above(&self, program: &str, base: Change, change: Change) -> Result<Built, Error> {
        self.patch_with(program, &[base], &[change], None)
    }

    /// Builds a patch after the rules ran with the changes.
    fn patch_regenerated(&self, program: &str, changes: &[Change]) -> Result<Built, Error> {
        let kept = ["tree", "records"].map(|name| (self.path(name), self.path(&format!("shipped-{name}"))));
        kept.iter().for_each(|(path, aside)| fs::rename(path, aside).unwrap());
        for name in ["tree", "records"] {
            fs::create_dir(self.path(name)).unwrap();
        }
        self.copy("original/.", "tree");
        for (file, from, to) in changes {
            let text = fs::read_to_string(self.path("original").join(file)).unwrap();
            fs::write(self.path("tree").join(file), text.replacen(from, to, 1)).unwrap();
        }
        if self.is_deferred {
            fs::write(self.path("records").join(recorder::DEFER), "").unwrap();
        }
        self.make("tree", "build", &format!("{}:/usr/bin:/bin", self.path("bin").display()));
        let made = ["tree", "records"].map(|name| (self.path(name), self.path(&format!("after-{name}"))));
        made.iter().for_each(|(path, aside)| fs::rename(path, aside).unwrap());
        kept.iter().for_each(|(path, aside)| fs::rename(aside, path).unwrap());
        let after = self.built("after-tree", "after-records")?;
        let inside = [self.path("tree").join(program)];
        let commands = after.project(Ok(&inside), &self.path("original"), Cache::at(&self.path("trees"))?).commands;
        let link = TargetLink::of(&after, Ok(&inside));
        let after = Regenerated { tree: after.tree, commands, link };
        let shipped_link = TargetLink::of(&self.built("tree", "records")?, Ok(&inside));
        let built =
            self.patch_with(program, &[], changes, Some(&RegeneratedSides { before: None, after, shipped_link }));
        made.iter().for_each(|(_, aside)| fs::remove_dir_all(aside).unwrap());
        built
    }

    fn built(&self, tree: &str, records: &str) -> Result<BuiltPackage, Error> {
        Ok(BuiltPackage {
            shipped: Vec::new(),
            root: Tree::open(Path::new("/"))?,
            source: self.path("tree"),
            tree: Tree::open(&self.path(tree))?.known_as(&self.path("tree")),
            identity: "test".to_owned(),
            recording: Recording::read(&self.path(records))?,
            includes: self.is_deferred.then(|| Includes::of_tree(&Tree::open(&self.path(tree))?)).transpose()?,
            runs_deferred: true,
            link_put_off: false,
        })
    }

    fn patch_with(
        &self,
        program: &str,
        base: &[Change],
        changes: &[Change],
        regenerated: Option<&RegeneratedSides>,
    ) -> Result<Built, Error> {
        let target = self.path("out").join(Path::new(program).file_name().unwrap());
        let strip = Command::new("strip").arg("-o").args([&target, &self.programs().join(program)]).status();
        assert!(strip.unwrap().success());
        let built = self.built("tree", "records")?;
        let target = Target::read(&target)?;
        let cache = Cache::at(&self.path("cache"))?;
        let builder = Builder::new(cache, 2, &|_| {});
        let output = builder.output_of(&target, &[&target.path], &built, &self.path("original"))?;
        let mut project = built.project(
            output.as_deref().map_err(Clone::clone),
            &self.path("original"),
            Cache::at(&self.path("trees"))?,
        );
        // the tree is mounted at its path: the system's own compiler reaches it
        project.root = None;
        let job = Job {
            project,
            base: base.iter().map(|change| self.diff(*change)).collect(),
            diffs: changes.iter().map(|change| self.diff(*change)).collect(),
            is_part: false,
            target,
            unit_filter: &[],
            package: None,
            statement: &Statement::default(),
            regenerated,
            report: Report::default(),
        };
        builder.build(job)
    }
}

#[track_caller]
fn assert_patches(built: Result<Built, Error>, functions: &[&str]) {
    let built = built.unwrap_or_else(|error| panic!("{error}"));
    let verdicts: Vec<Verdict> = built.report.files.iter().map(|file| file.verdict).collect();
    assert_eq!(verdicts, [Verdict::Compiled], "{:?}", built.report.files);
    let patch = built.patch.unwrap_or_else(|| panic!("nothing to patch: {:?}", built.report.files));
    let names: Vec<&str> = patch.functions.iter().map(|function| function.name.as_str()).collect();
    assert_eq!(names, functions);
}

#[track_caller]
fn assert_no_part(built: Result<Built, Error>) {
    let built = built.unwrap_or_else(|error| panic!("{error}"));
    let verdicts: Vec<Verdict> = built.report.files.iter().map(|file| file.verdict).collect();
    assert_eq!(verdicts, [Verdict::NoPart], "{:?}", built.report.files);
    assert!(built.patch.is_none());
}

/// Asserts a refusal whose text has all these parts.
#[track_caller]
fn assert_unaccounted(built: Result<Built, Error>, parts: &[&str]) {
    let error = match built {
        Ok(built) => panic!("{:?}: {:?}", built.patch.map(|patch| patch.functions), built.report.files),
        Err(error) => error,
    };
    assert!(matches!(error, Error::Unaccounted { .. }) && error.is_refusal(), "{error}");
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

/// Compiles the program from a copy of the source.
const COPY: &str = "build:
    mkdir -p build/flavour && cp -r src build/flavour/
    cd build/flavour && gcc -O2 -g -c -o clamp.o src/clamp.c && gcc -O2 -g -c -o main.o src/main.c
    cd build/flavour && $(LINK) -o prog main.o clamp.o";

#[test]
fn a_change_reaches_the_copy_that_is_compiled() {
    for package in Package::both("a_change_reaches_the_copy_that_is_compiled", COPY) {
        assert_patches(package.patch("build/flavour/prog", FIX), &["clamp"]);
        assert_patches(package.patch("build/flavour/prog", HEADER_FIX), &["clamp", "main"]);
        assert_no_part(package.patch("build/flavour/prog", OTHER_FIX));
        let original = fs::read_to_string(package.path("tree/build/flavour/src/clamp.c")).unwrap();
        assert_eq!(original, CLAMP, "the package's own build is only read");
    }
}

/// Compiles each unit twice, and renames the objects of one variant to the names that the link has.
const RENAME: &str = "build:
    mkdir -p objs
    for unit in main clamp; do gcc -O1 -c -o $$unit.o src/$$unit.c || exit; done
    for unit in main clamp; do \\
      gcc -O2 -DWIDE -c -o objs/$$unit.o src/$$unit.c && mv objs/$$unit.o $$unit.lo || exit; done
    $(LINK) -o prog main.lo clamp.lo";

#[test]
fn objects_that_are_renamed_after_compiling_keep_their_command() {
    for package in Package::both("objects_that_are_renamed_after_compiling_keep_their_command", RENAME) {
        assert_patches(package.patch("prog", FIX), &["clamp"]);
        assert_patches(package.patch("prog", ("src/clamp.c", "value /= 7", "value /= 5")), &["clamp"]);
        assert_no_part(package.patch("prog", OTHER_FIX));
    }
}

/// Compiles one program for the rule `build`, and the target for the rule `install`.
const INSTALL: &str = "build:
    gcc -O2 -c -o other.o src/other.c && gcc -O2 -c -o other_main.o src/other_main.c
    $(LINK) -o other other.o other_main.o
install:
    gcc -O2 -c -o main.o src/main.c && gcc -O2 -c -o clamp.o src/clamp.c && $(LINK) -o prog main.o clamp.o";

#[test]
fn a_target_that_no_recorded_step_links_is_not_called_unchanged() {
    let test = "a_target_that_no_recorded_step_links_is_not_called_unchanged";
    for package in Package::both(test, INSTALL) {
        package.make(if package.is_deferred { "built" } else { "tree" }, "install", "/usr/bin:/bin");
        for change in [FIX, HEADER_FIX] {
            assert_unaccounted(package.patch("prog", change), &[change.0, "cannot be attributed to prog", "linked no"]);
        }
        let error = package.patch("prog", OTHER_FIX).expect_err("another program's unit");
        assert!(error.is_refusal(), "{error}");
        assert_patches(package.patch("other", OTHER_FIX), &["spare"]);
        assert_no_part(package.patch("other", FIX));
    }
}

/// Builds two programs; the package links an archive by `-l`, of which one program needs a part.
const TWO: &str = "build:
    for unit in main clamp other other_main; do gcc -O2 -c -o $$unit.o src/$$unit.c || exit; done
    mkdir -p lib && ar rcs lib/libboth.a clamp.o other.o
    $(LINK) -o prog main.o -Llib -lboth
    $(LINK) -o other other_main.o lib/libboth.a";

#[test]
fn members_of_archives_count_where_the_link_took_them() {
    for package in Package::both("members_of_archives_count_where_the_link_took_them", TWO) {
        assert_patches(package.patch("prog", FIX), &["clamp"]);
        assert_no_part(package.patch("prog", OTHER_FIX));
        assert_patches(package.patch("other", OTHER_FIX), &["spare"]);
        assert_no_part(package.patch("other", FIX));
        assert_no_part(package.patch("other", ("src/main.c", "argc > LIMIT", "argc > 7")));
    }
}

/// Builds two programs that share nothing.
const APART: &str = "build:
    for unit in main clamp other other_main; do gcc -O2 -c -o $$unit.o src/$$unit.c || exit; done
    $(LINK) -o prog main.o clamp.o
    $(LINK) -o other other_main.o other.o";

#[test]
fn a_base_that_is_no_part_of_the_target_need_not_be_active() {
    for package in Package::both("a_base_that_is_no_part_of_the_target_need_not_be_active", APART) {
        let based_on = |base| {
            let patch = package.patch_above("prog", base, FIX).unwrap().patch.unwrap();
            patch.based_on.into_iter().map(|diff| diff.name).collect::<Vec<_>>()
        };
        assert_eq!(based_on(OTHER_FIX), [""; 0]);
        assert_eq!(based_on(HEADER_FIX), ["fix.patch"]);
        assert_eq!(based_on(("src/main.c", "argc > LIMIT", "argc > 7")), ["fix.patch"]);
    }
}

/// Makes a source that is too long for a test of the configuration, removes it, and runs a program that is linked with
/// it.
const REMOVED: &str = "build:
    (seq -f '/* line %g */' 2000; cat src/other.c) > made.c
    gcc -O2 -c -o made.o made.c && rm made.c
    gcc -O2 -c -o other_main.o src/other_main.c && $(LINK) -o tool made.o other_main.o
    ./tool > numbers; test $$? = 3
    for unit in main clamp; do gcc -O2 -c -o $$unit.o src/$$unit.c || exit; done
    $(LINK) -o prog main.o clamp.o";

#[test]
fn a_long_source_that_the_build_removes_is_compiled_when_it_is_needed() {
    for package in Package::both("a_long_source_that_the_build_removes_is_compiled_when_it_is_needed", REMOVED) {
        let number = fs::read_to_string(package.path("tree/numbers")).unwrap();
        assert!(number.trim().parse::<i64>().is_ok(), "the program ran: {number:?}");
        let records = fs::read_dir(package.path("records")).unwrap().flatten();
        let kept = records.filter(|file| file.path().extension().is_some_and(|name| name == "source")).count();
        assert_eq!(kept > 0, package.is_deferred, "its compilation was put off");
        assert_patches(package.patch("prog", FIX), &["clamp"]);
    }
}

/// Compiles one unit with a compiler that no recorder replaces.
const PARTLY: &str = "build:
    /usr/bin/gcc -O2 -c -o main.o src/main.c
    gcc -O2 -c -o clamp.o src/clamp.c
    $(LINK) -o prog main.o clamp.o";

#[test]
fn what_no_recorded_command_made_is_listed() {
    for package in Package::both("what_no_recorded_command_made_is_listed", PARTLY) {
        assert_patches(package.patch("prog", FIX), &["clamp"]);
        let listed = "no recorded command made 1 of 2 inputs of its link: main.o";
        assert_unaccounted(package.patch("prog", HEADER_FIX), &["src/limit.h", listed]);
        assert_unaccounted(package.patch("prog", ("src/main.c", "argc > LIMIT", "argc > 7")), &["src/main.c", listed]);
        assert_unaccounted(package.patch("prog", OTHER_FIX), &["src/other.c", listed]);
    }
}

/// Compiles and links in one step, and links objects that a response file lists, which is then removed.
const AT_ONCE: &str = "build:
    $(LINK) -O2 -o once src/main.c src/clamp.c
    gcc -O2 -c -o main.o src/main.c && gcc -O2 -c -o clamp.o src/clamp.c
    echo main.o clamp.o > list && $(LINK) -o prog @list && rm list";

#[test]
fn programs_made_at_once_and_by_response_files_are_known() {
    for package in Package::both("programs_made_at_once_and_by_response_files_are_known", AT_ONCE) {
        for program in ["once", "prog"] {
            assert_patches(package.patch(program, FIX), &["clamp"]);
            assert_no_part(package.patch(program, OTHER_FIX));
        }
    }
}

/// Compiles links to the source that have other names and are located in another directory.
const LINKS: &str = "build:
    mkdir farm && ln -s ../src/clamp.c farm/impl.c && ln -s $(CURDIR)/src/main.c farm/start.c && ln -s ../src farm/inc
    cd farm && gcc -O2 -Iinc -c impl.c && gcc -O2 -Iinc -c start.c && $(LINK) -o prog start.o impl.o";

#[test]
fn a_change_is_seen_through_links() {
    for package in Package::both("a_change_is_seen_through_links", LINKS) {
        assert_patches(package.patch("farm/prog", FIX), &["clamp"]);
        assert_patches(package.patch("farm/prog", HEADER_FIX), &["clamp", "main"]);
    }
}

/// Joins two units to one.
const JOIN: &str = "build:
    cat src/clamp.c src/main.c > all.c && gcc -O2 -Isrc -c all.c && $(LINK) -o prog all.o";

#[test]
fn a_file_that_a_generator_may_read_is_not_called_unchanged() {
    for package in Package::both("a_file_that_a_generator_may_read_is_not_called_unchanged", JOIN) {
        assert_unaccounted(package.patch("prog", FIX), &["src/clamp.c", "all.c, which may be made of it"]);
        assert_no_part(package.patch("prog", OTHER_FIX));
        assert_patches(package.patch("prog", HEADER_FIX), &["clamp", "main"]);
    }
}

/// Makes a unit of another one, for another program.
const ELSEWHERE: &str = "build:
    gcc -O2 -c -o clamp.o src/clamp.c && gcc -O2 -c -o main.o src/main.c && $(LINK) -o prog main.o clamp.o
    (echo '#define CUSTOM 1'; cat src/other.c) > custom.c && gcc -O2 -c -o custom.o custom.c
    gcc -O2 -c -o other_main.o src/other_main.c && $(LINK) -o second other_main.o custom.o";

#[test]
fn a_file_made_for_another_program_is_no_part_of_this_one() {
    for package in Package::both("a_file_made_for_another_program_is_no_part_of_this_one", ELSEWHERE) {
        assert_no_part(package.patch("prog", OTHER_FIX));
        assert_unaccounted(package.patch("second", OTHER_FIX), &["src/other.c", "custom.c, which may be made of it"]);
        assert_patches(package.patch("prog", FIX), &["clamp"]);
    }
}

/// Makes a unit for another program, which a unit of this one includes.
const INCLUDED_ELSEWHERE: &str = "build:
    (echo '#define CUSTOM 1'; cat src/other.c) > custom.c && gcc -O2 -c -o custom.o custom.c
    echo '#include \"custom.c\"' > wrapper.c && gcc -O2 -c -o wrapper.o wrapper.c
    gcc -O2 -c -o other_main.o src/other_main.c && $(LINK) -o second other_main.o custom.o
    $(LINK) -o third other_main.o wrapper.o";

#[test]
fn a_file_made_for_another_program_may_be_read_by_this_one() {
    for package in Package::both("a_file_made_for_another_program_may_be_read_by_this_one", INCLUDED_ELSEWHERE) {
        assert_unaccounted(package.patch("third", OTHER_FIX), &["src/other.c", "custom.c, which may be made of it"]);
    }
}

/// Compiles one object twice, for two programs.
const TWICE: &str = "build:
    gcc -O2 -c -o main.o src/main.c
    gcc -O2 -DWIDE -c -o clamp.o src/clamp.c && $(LINK) -o wide main.o clamp.o
    gcc -O2 -c -o clamp.o src/clamp.c && $(LINK) -o narrow main.o clamp.o";

#[test]
fn an_object_that_is_compiled_in_two_ways_is_taken_as_the_target_has_it() {
    let test = "an_object_that_is_compiled_in_two_ways_is_taken_as_the_target_has_it";
    for package in Package::both(test, TWICE) {
        for program in ["wide", "narrow"] {
            assert_patches(package.patch(program, FIX), &["clamp"]);
        }
        assert_patches(package.patch("wide", ("src/clamp.c", "value /= 7", "value /= 5")), &["clamp"]);
        assert_patches(package.patch("narrow", ("src/clamp.c", "value *= 3", "value *= 5")), &["clamp"]);
    }
}

/// Generates a source from a table.
const TABLE: &str = "build:
    sed 's/^/#define CODE /' src/codes.txt > codes.h
    gcc -O2 -I. -include codes.h -c -o clamp.o src/clamp.c && gcc -O2 -c -o main.o src/main.c
    $(LINK) -o prog main.o clamp.o";

#[test]
fn a_table_that_a_rule_names_is_not_called_unchanged() {
    for package in Package::both("a_table_that_a_rule_names_is_not_called_unchanged", TABLE) {
        assert_unaccounted(
            package.patch("prog", ("src/codes.txt", "1 one", "2 two")),
            &["src/codes.txt", "Makefile names it"],
        );
        let test = ("src/test.tcl", "puts 1", "puts 2");
        assert_no_part(package.patch("prog", test));
        // the same, beside a change of code
        let table = ("src/codes.txt", "1 one", "2 two");
        assert_unaccounted(package.patch_of("prog", &[FIX, table]), &["src/codes.txt", "Makefile names it"]);
        let files = package.patch_of("prog", &[FIX, test]).unwrap().report.files;
        let verdicts: Vec<Verdict> = files.iter().map(|file| file.verdict).collect();
        assert_eq!(verdicts, [Verdict::Compiled, Verdict::NoPart], "{files:?}");
    }
}

fn verdicts(built: &Built) -> Vec<(&str, Verdict)> {
    built.report.files.iter().map(|file| (file.path.as_str(), file.verdict)).collect()
}

fn functions(built: &Built) -> Vec<&str> {
    built.patch.iter().flat_map(|patch| &patch.functions).map(|function| function.name.as_str()).collect()
}

#[test]
fn a_source_that_a_generator_makes_is_compared() {
    let test = "a_source_that_a_generator_makes_is_compared";
    for package in Package::both(test, JOIN) {
        let built = package.patch_regenerated("prog", &[FIX]).unwrap();
        assert_eq!(functions(&built), ["clamp"]);
        assert!(verdicts(&built).contains(&("all.c", Verdict::Compiled)), "{:?}", built.report.files);
    }
    for package in Package::both(test, TABLE) {
        let table = ("src/codes.txt", "1 one", "2 two");
        let built = package.patch_regenerated("prog", &[table]).unwrap();
        assert!(built.patch.is_none(), "no code uses the table");
        assert!(verdicts(&built).contains(&("codes.h", Verdict::NoDifference)), "{:?}", built.report.files);
        assert!(verdicts(&built).contains(&("src/codes.txt", Verdict::NoDifference)), "{:?}", built.report.files);
        let built = package.patch_regenerated("prog", &[table, FIX]).unwrap();
        assert_eq!(functions(&built), ["clamp"]);
    }
}

/// Compiles the units of a program one by one.
const PLAIN: &str = "build:
    gcc -O2 -c -o main.o src/main.c
    gcc -O2 -c -o clamp.o src/clamp.c
    $(LINK) -o prog main.o clamp.o";

#[test]
fn build_files_are_compared_by_the_commands_that_they_give() {
    let test = "build_files_are_compared_by_the_commands_that_they_give";
    for package in Package::both(test, PLAIN) {
        let comment = ("Makefile", "build:", "# a list of tests\nbuild:");
        let built = package.patch_regenerated("prog", &[FIX, comment]).unwrap();
        assert_eq!(functions(&built), ["clamp"]);
        assert_eq!(verdicts(&built), [("src/clamp.c", Verdict::Compiled), ("Makefile", Verdict::NoDifference)]);
        let flags = ("Makefile", "-O2 -c -o clamp.o", "-O2 -DWIDE -c -o clamp.o");
        let built = package.patch_regenerated("prog", &[flags]).unwrap();
        assert_eq!(functions(&built), ["clamp"], "the same source with another macro");
        let link = ("Makefile", "$(LINK) -o prog", "$(LINK) -Wl,-z,now -o prog");
        let error = package.patch_regenerated("prog", &[link]).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("now"), "{error}");
        let warnings = package.patch_regenerated("prog", &[link, FIX]).unwrap().patch.unwrap().warnings;
        assert!(warnings.iter().any(|warning| warning.contains("link changes too")), "{warnings:?}");
        let unit = ("Makefile", "$(LINK) -o prog", "gcc -O2 -c -o other.o src/other.c\n\t$(LINK) -o prog other.o");
        let use_of_it = ("src/main.c", "argc > LIMIT", "spare(argc) > LIMIT");
        let declaration = ("src/limit.h", "#define", "int spare(int value);\n#define");
        let built = package.patch_regenerated("prog", &[unit, use_of_it, declaration]).unwrap();
        assert!(functions(&built).contains(&"main"), "{:?}", built.report.files);
        let patch = built.patch.unwrap();
        assert!(patch.symbols.iter().any(|symbol| symbol.name == "spare"), "the new unit is part of the patch");
    }
}

/// Executes a program that it has built, takes an archive apart, renames and joins its members, and reads symbols.
const WINDING: &str = "build:
    mkdir lib && gcc -O2 -c -o lib/other.o src/other.c && gcc -O2 -c -o other_main.o src/other_main.c
    ar csrDT lib/libother.a lib/other.o && $(LINK) -o generator other_main.o lib/libother.a
    ./generator | sed 's/^/#define FROM_GENERATOR /' > made.h
    gcc -O2 -c -o main.o src/main.c && gcc -O2 -include made.h -c -o clamp.o src/clamp.c
    ar rcs libclamp.a clamp.o && test \"$$(ar t libclamp.a)\" = clamp.o
    mkdir apart && cd apart && ar x ../libclamp.a && mv clamp.o renamed.o
    printf 'CREATE libjoined.a\\nADDMOD apart/renamed.o\\nSAVE\\nEND\\n' | ar -M
    $(LINK) -o prog main.o libjoined.a && $(LINK) -o again main.o libjoined.a
    nm prog | grep -q ' T clamp'";

#[test]
fn results_that_the_rules_need_are_made() {
    for package in Package::both("results_that_the_rules_need_are_made", WINDING) {
        let made = fs::read_to_string(package.path("tree/made.h")).unwrap();
        assert_eq!(made, fs::read_to_string(package.programs().join("made.h")).unwrap(), "the generator ran");
        for program in ["prog", "again"] {
            assert_patches(package.patch(program, FIX), &["clamp"]);
            assert_no_part(package.patch(program, OTHER_FIX));
        }
        let is_program = |name: &str| fs::read(package.path("tree").join(name)).unwrap().starts_with(b"\x7fELF");
        assert!(is_program("generator") && is_program("prog"));
        assert_eq!(is_program("again"), !package.is_deferred, "nothing needs it");
    }
}

/// Tries which of several numbers compiles, as a unit and as a program, without showing messages; a script of libtool's kind compiles
/// without messages too.
const TRIES: &str = "build:
    for number in 200 100; do \\
      if gcc -Werror -DLIMIT=$$number -o trial src/main.c src/clamp.c >trial.out 2>&1; then \\
        echo \"#define TRIED $$number\" >tried.h; break; fi; done
    if gcc -Werror -DLIMIT=300 -c -o trial.o src/clamp.c 2>/dev/null; then echo '#define WIDE' >>tried.h; fi
    grep -q 'TRIED 100' tried.h && echo '#define WIDE' >>tried.h
    gcc -O2 -c -o main.o src/main.c && gcc -O2 -include tried.h -c -o clamp.o src/clamp.c
    echo 'shift; \"$$@\" 2>/dev/null' >script
    sh script --mode=compile gcc -O2 -c -o other.o src/other.c
    $(LINK) -o prog main.o clamp.o";

#[test]
fn calls_of_which_the_rules_ask_if_they_succeed_are_made() {
    for package in Package::both("calls_of_which_the_rules_ask_if_they_succeed_are_made", TRIES) {
        let made = fs::read_to_string(package.path("tree/tried.h")).unwrap();
        assert_eq!(made, fs::read_to_string(package.programs().join("tried.h")).unwrap());
        assert_eq!(made, "#define TRIED 100\n#define WIDE\n");
        assert_patches(package.patch("prog", FIX), &["clamp"]);
        let is_object = |name: &str| fs::read(package.path("tree").join(name)).unwrap().starts_with(b"\x7fELF");
        assert_eq!(is_object("other.o"), !package.is_deferred, "nothing needs it");
    }
}

/// Joins a member that it extracts from a library with other objects, and removes what it extracted.
const JOINED: &str = "build:
    cp src/clamp.c made.c && touch -d 'next hour' made.c && gcc -O2 -Isrc -c -o made.o made.c && ar cr libone.a made.o
    mkdir apart && cd apart && ar x ../libone.a
    mkdir debian && touch debian/rules
    gcc -O2 -c -o main.o src/main.c && cd apart && ar cr ../libboth.a ../main.o made.o && cd .. && rm -r apart made.o
    $(LINK) -o prog -Wl,--whole-archive libboth.a -Wl,--no-whole-archive && ./prog >answer";

#[test]
fn a_member_of_a_library_is_known_after_its_copy_was_removed() {
    for package in Package::both("a_member_of_a_library_is_known_after_its_copy_was_removed", JOINED) {
        assert_patches(package.patch("prog", FIX), &["clamp"]);
        assert_no_part(package.patch("prog", OTHER_FIX));
    }
}

/// Links the program with a library whose name ends in its version.
const VERSIONED: &str = "build:
    gcc -O2 -fPIC -c -o other.o src/other.c && $(LINK) -shared -Wl,-soname,libother.so.0 -o libother.so.0.1 other.o
    gcc -O2 -c -o main.o src/main.c && gcc -O2 -c -o clamp.o src/clamp.c
    $(LINK) -o prog main.o clamp.o ./libother.so.0.1";

#[test]
fn a_library_that_is_linked_again_is_no_change_of_the_link() {
    for package in Package::both("a_library_that_is_linked_again_is_no_change_of_the_link", VERSIONED) {
        assert_no_part(package.patch_regenerated("prog", &[OTHER_FIX]));
    }
}

#[test]
fn a_built_library_is_found_by_the_name_that_programs_load() {
    for package in Package::both("a_built_library_is_found_by_the_name_that_programs_load", VERSIONED) {
        let built = package.built("tree", "records").unwrap();
        for name in ["libother.so.0.1", "libother.so.0"] {
            let output = built.output_named(OsStr::new(name)).unwrap();
            assert_eq!(output.file_name().unwrap(), "libother.so.0.1");
        }
        let other = built.output_named(OsStr::new("libother.so"));
        assert!(matches!(&other, Err(Error::Target(why)) if why.contains("prog")), "{other:?}");
    }
}

/// Builds a program twice, with a declaration and a macro that make no difference to its code.
const TWO_WAYS: &str = "build:
    for way in 1 2; do mkdir -p way$$way && echo \"int way$$way(void);\" >way$$way/way.h && \\
      for unit in main clamp; do \\
        gcc -O2 -c -DEXTRA=$$way -include way$$way/way.h -o way$$way/$$unit.o src/$$unit.c || exit; \\
      done && (cd way$$way && $(LINK) -o prog main.o clamp.o) || exit; done";

#[test]
fn a_target_that_may_be_either_of_two_outputs_is_patched_where_both_agree() {
    let test = "a_target_that_may_be_either_of_two_outputs_is_patched_where_both_agree";
    for package in Package::both(test, TWO_WAYS) {
        assert_no_part(package.patch("way2/prog", OTHER_FIX));
        assert_patches(package.patch("way2/prog", FIX), &["clamp"]);
        let differs = package.patch("way2/prog", ("src/clamp.c", "value + 11", "value + 11 + EXTRA"));
        match package.is_deferred {
            true => assert!(matches!(differs, Err(Error::Ambiguous { .. })), "{differs:?}"),
            // the content of the second program is the target's
            false => assert_patches(differs, &["clamp"]),
        }
    }
}

/// Builds two flavours of a program under one name, and installs one under another.
const FLAVOURS: &str = "build:
    for flavour in wide narrow; do mkdir -p $$flavour && cp -r src $$flavour/; done
    cd wide && gcc -O2 -DWIDE -c -o clamp.o src/clamp.c && gcc -O2 -c -o main.o src/main.c
    cd wide && $(LINK) -o prog main.o clamp.o
    cd narrow && gcc -O2 -c -o clamp.o src/clamp.c && gcc -O2 -c -o main.o src/main.c
    cd narrow && $(LINK) -o prog main.o clamp.o && cp prog installed";

#[test]
fn a_flavour_is_told_by_its_code() {
    for package in Package::both("a_flavour_is_told_by_its_code", FLAVOURS) {
        let wide = ("src/clamp.c", "value /= 7", "value /= 5");
        let narrow = ("src/clamp.c", "value *= 3", "value *= 5");
        assert_patches(package.patch("wide/prog", wide), &["clamp"]);
        for program in ["narrow/prog", "narrow/installed"] {
            assert_patches(package.patch(program, narrow), &["clamp"]);
            let built = package.patch(program, wide).unwrap();
            assert!(built.patch.is_none(), "{:?}", built.report.files);
        }
    }
}

/// Builds two libraries, and loads one of them by a link to it.
const LOADS: &str = "build:
    mkdir -p lib && for unit in clamp other; do gcc -O2 -fPIC -c -o lib/$$unit.o src/$$unit.c || exit; done
    cd lib && gcc -shared -o ../lib/libclamp.so.1.2 clamp.o && ln -s libclamp.so.1.2 libclamp.so.1
    gcc -shared -o lib/libother.so.1 lib/other.o
load:
    perl -MDynaLoader -e 'DynaLoader::dl_load_file($$ARGV[0]) or die DynaLoader::dl_error()' $$PWD/lib/libclamp.so.1";

#[test]
fn a_library_that_the_rules_load_is_linked_at_once() {
    let package = Package::new(LOADS, true);
    let path = format!("{}:/usr/bin:/bin", package.path("bin").display());
    let error = package.try_make("tree", "load", &path).unwrap_err();
    let built = package.built("tree", "records").unwrap();
    // what the rules linked before they failed is known
    let other = |name: &str| Wanted::named(name).outputs(&built);
    assert_eq!(other("libother.so.1"), [package.path("tree").join("lib/libother.so.1")]);
    assert!(other("libmore.so.1").is_empty());
    let loaded = loaded_images(&error, built.recording.images(), &built.tree);
    assert_eq!(loaded, [package.path("tree").join("lib/libclamp.so.1.2")], "{error}");
    for name in ["tree", "records"] {
        fs::remove_dir_all(package.path(name)).unwrap();
        fs::create_dir(package.path(name)).unwrap();
    }
    package.copy("original/.", "tree");
    fs::write(package.path("records").join(recorder::DEFER), "").unwrap();
    let list = format!("{}\0", loaded[0].display());
    fs::write(package.path("records").join(recorder::LOADED), list).unwrap();
    for target in ["build", "load"] {
        package.make("tree", target, &path);
    }
    let other = fs::read(package.path("tree").join("lib/libother.so.1")).unwrap();
    assert_eq!(recorder::records_of(&other).len(), 1);
}

/// Compiles a text that comes from a pipe.
const PIPED: &str = "build:
    gcc -O2 -c -o main.o src/main.c && gcc -O2 -c -o clamp.o src/clamp.c
    { echo '#include \"src/limit.h\"'; echo 'int piped(int value) { return value * LIMIT + 17; }'; } | \
      gcc -O2 -x c -c -o piped.o -
    $(LINK) -o prog main.o clamp.o piped.o";

#[test]
fn a_source_from_a_pipe_is_compiled_again() {
    for package in Package::both("a_source_from_a_pipe_is_compiled_again", PIPED) {
        assert_no_part(package.patch("prog", OTHER_FIX));
        assert_patches(package.patch("prog", HEADER_FIX), &["clamp", "main", "piped"]);
    }
}

/// Links what a line of a source names.
const KEYWORD: &str = "build:
    gcc -O2 -c -o main.o src/main.c && gcc -O2 -c -o clamp.o src/clamp.c
    $(LINK) -o prog main.o clamp.o $$(sed -n 's/.*[$$]Libraries: \\(.*\\) [$$].*/\\1/p' src/clamp.c)";

#[test]
fn a_comment_that_the_rules_read_is_no_mere_comment() {
    let keyword = ("src/clamp.c", "#include", "/* $Libraries: -Wl,--no-as-needed -lm $ */\n#include");
    let comment = ("src/clamp.c", "#include", "/* $Id: 1 $ Libraries: -lm */\n#include");
    for package in Package::both("a_comment_that_the_rules_read_is_no_mere_comment", KEYWORD) {
        let error = package.patch("prog", keyword).unwrap_err();
        assert!(
            error.is_refusal() && error.to_string().contains("src/clamp.c (its `$Libraries:`, which Makefile reads)")
        );
        let error = package.patch_regenerated("prog", &[keyword]).unwrap_err();
        assert!(matches!(&error, Error::ChangesBuild { file, .. } if file.contains("target's link")), "{error}");
        assert!(package.patch("prog", comment).unwrap().patch.is_none());
    }
}
