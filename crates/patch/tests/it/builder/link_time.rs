//! Patches for programs that were optimised when they were linked (`-flto`), in one partition and in several.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_patch_builder::{Builder, Built, Cache, Error, SourceRequest, Statement};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_testing::{child::ChildGuard, wait};

/// A program whose units have statics of the same names; it prints its answer until it ends.
const MAIN: &str = "#include <stdio.h>\n#include <unistd.h>\n#include \"state.h\"\n\n\
static int count;\n\n\
static __attribute__((noinline)) int step(int value)\n{\n    count += 3;\n    return value + count;\n}\n\n\
int main(void)\n{\n    struct state state = {getppid() >= 0, 1 + (getppid() >= 0)};\n    for (;;) {\n        int own = step(0), last = answer(&state);\n\
        printf(\"%d %d\\n\", last, own - answered());\n        fflush(stdout);\n        usleep(10000);\n    }\n}\n";
const ANSWER: &str = "#include \"state.h\"\n\n\
static int count;\n\n\
static __attribute__((noinline)) int step(int value)\n{\n    count += 3;\n    return value * 5;\n}\n\n\
__attribute__((noinline)) int answer(struct state *state)\n{\n    return step(state->first) + scaled(state->second);\n}\n\n\
__attribute__((noinline)) int answered(void)\n{\n    return count;\n}\n";
const SCALE: &str = "#include \"state.h\"\n\n\
__attribute__((noinline)) int scaled(int value)\n{\n    return value * 100;\n}\n";
const STATE: &str = "struct state {\n    int first;\n    int second;\n};\n\
int answer(struct state *state);\nint answered(void);\nint scaled(int value);\n";
/// The same in C++: the step throws its result.
const ANSWER_CXX: &str = "#include \"state.h\"\n\n\
static int count;\n\n\
static __attribute__((noinline)) int step(int value)\n{\n    count += 3;\n    throw value * 5;\n}\n\n\
__attribute__((noinline)) int answer(struct state *state)\n{\n    try {\n        return step(state->first);\n\
    } catch (int result) {\n        return result + scaled(state->second);\n    }\n}\n\n\
__attribute__((noinline)) int answered()\n{\n    return count;\n}\n";

struct Program {
    directory: tempfile::TempDir,
}

impl Program {
    fn new(suffix: &'static str, link_options: &[&str]) -> Program {
        Program::with_archive(suffix, link_options, "rc")
    }

    /// Builds the program; `archive` has the options of the archiver.
    fn with_archive(suffix: &'static str, link_options: &[&str], archive: &str) -> Program {
        let program = Program { directory: tempfile::tempdir().unwrap() };
        let source = program.source();
        fs::create_dir(&source).unwrap();
        let answer = if suffix == "c" { ANSWER } else { ANSWER_CXX };
        let units = [("main", MAIN), ("answer", answer), ("scale", SCALE)];
        fs::write(source.join("state.h"), STATE).unwrap();
        let mut entries = Vec::new();
        let mut call = |file: &str, arguments: &[&str]| {
            let mut command = Command::new(arguments[0]);
            assert!(command.args(&arguments[1..]).current_dir(&source).status().unwrap().success());
            entries.push(serde_json::json!({ "directory": source, "file": file, "arguments": arguments }));
        };
        let compiler = if suffix == "c" { "gcc" } else { "g++" };
        for (name, text) in units {
            let (file, object) = (format!("{name}.{suffix}"), format!("{name}.o"));
            fs::write(source.join(&file), text).unwrap();
            call(&file, &[compiler, "-O2", "-flto", "-c", &file, "-o", &object]);
        }
        call("scale.o", &["gcc-ar", archive, "libscale.a", "scale.o"]);
        let mut link = vec![compiler, "-O2", "-flto", "-Wl,--build-id", "-s", "-o", "program", "main.o", "answer.o"];
        link.extend(["-L.", "-lscale"].iter().chain(link_options));
        call("main.o", &link);
        fs::write(source.join("compile_commands.json"), serde_json::to_vec(&entries).unwrap()).unwrap();
        program
    }

    fn source(&self) -> PathBuf {
        self.directory.path().join("source")
    }

    fn diff(&self, file: &str, from: &str, to: &str) -> PathBuf {
        let before = fs::read_to_string(self.source().join(file)).unwrap();
        assert!(before.contains(from), "{file} has no {from:?}");
        let after = self.directory.path().join("after");
        fs::write(&after, before.replacen(from, to, 1)).unwrap();
        let labels = [format!("--label=a/{file}"), format!("--label=b/{file}")];
        let output = Command::new("diff").arg("-u").args(labels).arg(self.source().join(file)).arg(&after).output();
        let path = self.directory.path().join("fix.diff");
        fs::write(&path, output.unwrap().stdout).unwrap();
        path
    }

    fn build(&self, diff: PathBuf) -> Result<Built, Error> {
        let request = SourceRequest {
            directory: self.source(),
            compile_commands: self.source().join("compile_commands.json"),
            diffs: vec![diff],
            on_top_of: Vec::new(),
            target: self.source().join("program"),
            unit_filter: Vec::new(),
        };
        let cache = Cache::at(&self.directory.path().join("cache")).unwrap();
        Builder::new(cache, 2, &|_| {}).build_source(&request, &Statement::default())
    }

    fn answer_file(&self) -> PathBuf {
        self.directory.path().join("answers")
    }

    fn start(&self) -> ChildGuard {
        let answers = fs::File::create(self.answer_file()).unwrap();
        let mut command = Command::new(self.source().join("program"));
        ChildGuard::from_child(command.stdout(Stdio::from(answers)).spawn().unwrap())
    }

    fn last_answer(&self) -> Option<String> {
        let text = fs::read_to_string(self.answer_file()).unwrap();
        let complete = text.rfind('\n')?;
        text[..complete].lines().last().map(str::to_owned)
    }

    fn answers(&self, wanted: &str) {
        wait::until(&format!("the answer {wanted}"), || (self.last_answer()?.as_str() == wanted).then_some(()));
    }
}

fn functions(built: &Built) -> Vec<&str> {
    built.patch.iter().flat_map(|p| &p.functions).map(|f| f.name.as_str()).collect()
}

fn write(built: Built, path: &Path) {
    fs::write(path, stillpoint_patch_format::encode(&built.patch.unwrap()).unwrap()).unwrap();
}

/// Changes the step of one unit; the static of the same name in the other unit, and both counts, stay as they are.
fn changes_and_returns(suffix: &'static str, link_options: &[&str]) {
    let program = Program::new(suffix, link_options);
    let built = program.build(program.diff(&format!("answer.{suffix}"), "value * 5;", "value * 6;")).unwrap();
    let found = functions(&built);
    assert!(
        found.len() == 1 && found[0].contains(&format!("step.answer_{suffix}")) || found[0].contains("_ZL4stepi"),
        "{found:?}"
    );
    let patch = program.directory.path().join("fix.patch");
    write(built, &patch);
    let child = program.start();
    program.answers("205 0");
    let pid = child.pid();
    Stillpoint::new().args(["patch", "apply"]).arg(&patch).arg("--pid").arg(pid).succeed();
    program.answers("206 0");
    Stillpoint::new().args(["patch", "revert", "--pid"]).arg(pid).succeed();
    program.answers("205 0");
}

#[test]
fn a_static_changes_in_one_partition() {
    changes_and_returns("c", &[]);
}

#[test]
fn a_static_changes_among_partitions() {
    changes_and_returns("c", &["-flto-partition=1to1"]);
}

#[test]
fn a_function_that_throws_changes() {
    changes_and_returns("cc", &["-flto-partition=1to1"]);
}

#[test]
fn a_member_of_an_archive_changes() {
    // `T`: a thin one has the paths of its members
    for archive in ["rc", "rcT"] {
        let program = Program::with_archive("c", &[], archive);
        let built = program.build(program.diff("scale.c", "value * 100", "value * 200")).unwrap();
        assert_eq!(functions(&built), ["scaled"]);
    }
}

#[test]
fn a_changed_layout_is_refused() {
    let program = Program::new("c", &[]);
    let diff = program.diff("state.h", "    int first;\n", "    int zeroth;\n    int first;\n");
    let Err(Error::Refused(refusals)) = program.build(diff) else { panic!("it is not refused") };
    assert!(refusals.iter().any(|refusal| refusal.code() == "type-layout-changed"), "{refusals:?}");
}

#[test]
fn a_program_whose_link_is_not_known_is_refused() {
    let program = Program::new("c", &[]);
    let commands = program.source().join("compile_commands.json");
    let mut entries: Vec<serde_json::Value> = serde_json::from_slice(&fs::read(&commands).unwrap()).unwrap();
    entries.pop();
    fs::write(&commands, serde_json::to_vec(&entries).unwrap()).unwrap();
    let Err(Error::Refused(refusals)) = program.build(program.diff("scale.c", "100", "200")) else {
        panic!("it is not refused")
    };
    let text = refusals.iter().map(ToString::to_string).collect::<String>();
    assert!(refusals[0].code() == "lto" && text.contains("scale.c") && text.contains("its link"), "{text}");
}

/// Sorts by a static function that both units have, so that the compiler makes it one.
const ORDER: &str = "#include <stdlib.h>\n#include \"order.h\"\n\n\
static int compare(const void *one, const void *other)\n{\n    const int *a = *(const int *const *)one, *b = *(const int *const *)other;\n\
    int all = a[0] < b[0] ? a[0] : b[0];\n    for (int i = 1; i < all; i++)\n        if (a[i] != b[i])\n            return a[i] > b[i] ? 1 : -1;\n\
    return a[0] > b[0] ? 1 : a[0] < b[0] ? -1 : 0;\n}\n\n\
__attribute__((noinline)) void NAME(const int **all, int count)\n{\n    qsort(all, count, sizeof *all, compare);\n}\n";
const ORDER_HEADER: &str =
    "void first(const int **all, int count);\nvoid second(const int **all, int count);\nint weight(int value);\n";
const ORDER_MAIN: &str = "#include <stdio.h>\n#include <unistd.h>\n#include \"order.h\"\n\n\
int main(void)\n{\n    static const int one[] = {2, 7}, other[] = {3, 5, 1};\n    for (;;) {\n        const int *a[] = {one, other}, *b[] = {one, other};\n\
        first(a, 2);\n        second(b, 2);\n        printf(\"%d %d\\n\", a[0][1], weight(b[0][1]));\n        fflush(stdout);\n        usleep(10000);\n\
    }\n}\n";
const WEIGHT: &str =
    "#include \"order.h\"\n\n__attribute__((noinline)) int weight(int value)\n{\n    return value * 2;\n}\n";

/// A program in which statics of two files are one function.
fn folded() -> Program {
    let units = [
        ("main.c", ORDER_MAIN.to_owned()),
        ("first.c", ORDER.replace("NAME", "first")),
        ("second.c", ORDER.replace("NAME", "second")),
        ("weight.c", WEIGHT.to_owned()),
        ("order.h", ORDER_HEADER.to_owned()),
    ];
    let program = Program { directory: tempfile::tempdir().unwrap() };
    let source = program.source();
    fs::create_dir(&source).unwrap();
    let mut entries = Vec::new();
    let mut call = |file: &str, arguments: Vec<String>| {
        let mut command = Command::new(&arguments[0]);
        assert!(command.args(&arguments[1..]).current_dir(&source).status().unwrap().success());
        entries.push(serde_json::json!({ "directory": source, "file": file, "arguments": arguments }));
    };
    units.iter().for_each(|(file, text)| fs::write(source.join(file), text).unwrap());
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    for name in ["main", "first", "second", "weight"] {
        call(&format!("{name}.c"), words(&format!("gcc -O2 -flto -c {name}.c -o {name}.o")));
    }
    call("main.o", words("gcc -O2 -flto -Wl,--build-id -s -o program main.o first.o second.o weight.o"));
    fs::write(source.join("compile_commands.json"), serde_json::to_vec(&entries).unwrap()).unwrap();
    program
}

#[test]
fn statics_that_became_one_function_do_not_stand_in_the_way() {
    let program = folded();
    let built = program.build(program.diff("weight.c", "value * 2", "value * 3")).unwrap();
    assert_eq!(functions(&built), ["weight"]);
    let patch = program.directory.path().join("fix.patch");
    write(built, &patch);
    let child = program.start();
    program.answers("5 10");
    Stillpoint::new().args(["patch", "apply"]).arg(&patch).arg("--pid").arg(child.pid()).succeed();
    program.answers("5 15");
}

#[test]
fn a_change_of_one_of_them_is_refused() {
    let program = folded();
    let diff = program.diff("first.c", "return a[i] > b[i] ? 1 : -1;", "return a[i] > b[i] ? -1 : 1;");
    let Err(Error::Refused(refusals)) = program.build(diff) else { panic!("it is not refused") };
    let text = refusals.iter().map(ToString::to_string).collect::<String>();
    assert!(refusals.iter().any(|r| r.code() == "identical-code-folded") && text.contains("compare"), "{text}");
}
