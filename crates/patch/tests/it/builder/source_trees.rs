//! Patches for small programs, built with the real compiler from a source directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_patch_builder::{Builder, Built, Cache, Error, HookNames, SourceRequest, Statement, Verdict};

/// A program of two units and a header, built as its user would build it.
struct Program {
    directory: tempfile::TempDir,
}

const MAIN: &str = "#include <stdio.h>\n#include <assert.h>\n#include \"limit.h\"\n\n\
int clamp(int value);\nint unrelated(int value);\nint spare = 7;\n\n\
int main(int argc, char **argv)\n{\n    (void)argv;\n    assert(argc > 0);\n    printf(\"%d %d %d\\n\", clamp(argc), unrelated(argc), spare);\n    return 0;\n}\n";
const CLAMP: &str = "#include <assert.h>\n#include \"limit.h\"\n\nint clamp(int value);\nint unrelated(int value);\n\n\
__attribute__((noinline)) int clamp(int value)\n{\n    if (value > LIMIT)\n        return LIMIT;\n    return value;\n}\n\n\
__attribute__((noinline)) int unrelated(int value)\n{\n    assert(value != 12345);\n    return value * 3 + __LINE__;\n}\n";
const LIMIT: &str = "#ifndef LIMIT_H\n#define LIMIT_H\n#define LIMIT 100\n#endif\n";

impl Program {
    fn new() -> Self {
        let program = Program { directory: tempfile::tempdir().unwrap() };
        for (name, text) in [("main.c", MAIN), ("clamp.c", CLAMP), ("limit.h", LIMIT)] {
            fs::write(program.source().join(name), text).unwrap();
        }
        program.link();
        program
    }

    fn source(&self) -> PathBuf {
        let source = self.directory.path().join("source");
        fs::create_dir_all(&source).unwrap();
        source
    }

    fn link(&self) {
        let source = self.source();
        let mut entries = Vec::new();
        for unit in ["main", "clamp"] {
            let arguments = ["cc", "-O2", "-c", &format!("{unit}.c"), "-o", &format!("{unit}.o")].map(str::to_owned);
            assert!(Command::new("cc").args(&arguments[1..]).current_dir(&source).status().unwrap().success());
            let file = format!("{unit}.c");
            entries.push(serde_json::json!({ "directory": source, "file": file, "arguments": arguments }));
        }
        let mut link = Command::new("cc");
        link.args(["-Wl,--build-id", "-s", "-o", "program", "main.o", "clamp.o"]).current_dir(&source);
        assert!(link.status().unwrap().success());
        fs::write(source.join("compile_commands.json"), serde_json::to_vec(&entries).unwrap()).unwrap();
    }

    /// Writes a diff that replaces text, in the form of `diff -u`.
    fn diff(&self, name: &str, changes: &[(&str, &str, &str)]) -> PathBuf {
        let mut text = Vec::new();
        for (file, from, to) in changes {
            let before = fs::read_to_string(self.source().join(file)).unwrap();
            assert!(before.contains(from), "{file} has no {from:?}");
            let after = self.directory.path().join("after");
            fs::write(&after, before.replacen(from, to, 1)).unwrap();
            let labels = [format!("--label=a/{file}"), format!("--label=b/{file}")];
            let output = Command::new("diff").arg("-u").args(labels).arg(self.source().join(file)).arg(&after).output();
            text.extend(output.unwrap().stdout);
        }
        let path = self.directory.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn request(&self, diffs: Vec<PathBuf>) -> SourceRequest {
        SourceRequest {
            directory: self.source(),
            compile_commands: self.source().join("compile_commands.json"),
            diffs,
            on_top_of: Vec::new(),
            target: self.source().join("program"),
            unit_filter: Vec::new(),
        }
    }

    /// Runs the command; returns the exit code and the last line of its JSON.
    fn call(&self, diff: &Path) -> (Option<i32>, serde_json::Value) {
        let mut command = Command::new(stillpoint_testing::binary::stillpoint());
        command.args(["--json", "patch", "build", "--dry-run", "--cache"]).arg(self.directory.path().join("cache"));
        command.arg("--source").arg(self.source()).arg("--compile-commands");
        command.arg(self.source().join("compile_commands.json")).arg("--target").arg(self.source().join("program"));
        let output = command.arg("--diff").arg(diff).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<serde_json::Value> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let is_result = |line: &&serde_json::Value| line["event"] != "failed";
        (output.status.code(), lines.iter().rfind(is_result).cloned().unwrap_or_default())
    }

    fn build(&self, request: &SourceRequest) -> Result<Built, Error> {
        self.build_as(request, &Statement::default())
    }

    fn build_as(&self, request: &SourceRequest, statement: &Statement) -> Result<Built, Error> {
        let cache = Cache::at(&self.directory.path().join("cache")).unwrap();
        Builder::new(cache, 2, &|_| {}).build_source(request, statement)
    }
}

/// Returns true if trees can be mounted at one another's path here; prints the reason if not.
fn can_run(test: &str) -> bool {
    let mounts = Command::new("unshare").args(["--mount", "--propagation", "private", "true"]).status();
    let can = mounts.is_ok_and(|s| s.success());
    if !can {
        stillpoint_testing::skipped(format!("{test}: no private mount namespace can be made"));
    }
    can
}

fn functions(built: &Built) -> Vec<&str> {
    built.patch.iter().flat_map(|p| &p.functions).map(|f| f.name.as_str()).collect()
}

fn snapshot(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|e| e.unwrap().path())
        .map(|p| (p.clone(), fs::read(p).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn a_change_of_one_function_patches_that_function() {
    if !can_run("a_change_of_one_function_patches_that_function") {
        return;
    }
    let program = Program::new();
    let before = snapshot(&program.source());
    let added = "    int limit = LIMIT / 2;\n\n    if (value > limit)";
    let fix = program.diff("fix.patch", &[("clamp.c", "    if (value > LIMIT)", added)]);
    let built = program.build(&program.request(vec![fix])).unwrap();
    // the lines below moved, and `unrelated` has both an assert and __LINE__
    assert_eq!(functions(&built), ["clamp"]);
    assert_eq!(built.report.changed, ["clamp.c"]);
    assert_eq!(built.patch.unwrap().name, "fix");
    assert_eq!(snapshot(&program.source()), before, "the user's tree is only read");
}

#[test]
fn a_header_changes_units_that_the_diff_does_not_touch() {
    if !can_run("a_header_changes_units_that_the_diff_does_not_touch") {
        return;
    }
    let program = Program::new();
    let fix = program.diff("limit.patch", &[("limit.h", "LIMIT 100", "LIMIT 50")]);
    let built = program.build(&program.request(vec![fix])).unwrap();
    assert_eq!(built.report.changed, ["clamp.c"], "main.c reads the header, and its text stays the same");
    assert_eq!(functions(&built), ["clamp"]);
}

#[test]
fn comments_are_nothing_to_patch() {
    if !can_run("comments_are_nothing_to_patch") {
        return;
    }
    let program = Program::new();
    let change =
        program.diff("comment.patch", &[("clamp.c", "#include <assert.h>\n", "/* note\n */\n#include <assert.h>\n")]);
    let built = program.build(&program.request(vec![change.clone()])).unwrap();
    assert!(built.patch.is_none());
    assert_eq!(built.report.changed, [""; 0]);
    let (code, line) = program.call(&change);
    assert_eq!(code, Some(6), "{line}");
    assert_eq!(line["event"], "nothing-to-patch");
    let file = &line["files"][0];
    assert_eq!((&file["path"], &file["verdict"]), (&"clamp.c".into(), &"no-difference".into()), "{file}");
    assert!(file["reason"].as_str().is_some_and(|reason| reason.contains("clamp.c")), "{file}");
}

/// Links the program with a unit that the compile commands do not have, and changes that unit.
#[test]
fn a_unit_that_no_command_compiles_is_not_called_unchanged() {
    if !can_run("a_unit_that_no_command_compiles_is_not_called_unchanged") {
        return;
    }
    let program = Program::new();
    let source = program.source();
    fs::write(source.join("more.c"), "int more(int value);\nint more(int value) { return value ^ 77; }\n").unwrap();
    fs::write(source.join("test.c"), "int test(int value);\nint test(int value) { return value ^ 78; }\n").unwrap();
    let link = |words: &[&str]| {
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-Wl,--build-id", "-o", "program"]).args(words).current_dir(&source);
        assert!(cc.status().unwrap().success());
    };
    let more = program.diff("more.patch", &[("more.c", "77", "99")]);
    let test = program.diff("test.patch", &[("test.c", "78", "99")]);
    let header = program.diff("limit.patch", &[("limit.h", "LIMIT 100", "LIMIT 50")]);
    let refused = |diff: &PathBuf, part: &str| {
        let error = program.build(&program.request(vec![diff.clone()])).unwrap_err();
        assert!(matches!(error, Error::Unaccounted { .. }) && error.to_string().contains(part), "{error}");
    };

    // a stripped target gives no evidence
    refused(&test, "no symbol table");
    let (code, line) = program.call(&test);
    assert_eq!((code, &line["event"]), (Some(3), &"refused".into()), "{line}");
    assert_eq!(line["refusals"][0]["code"], "unaccounted-file");
    assert_eq!((&line["files"][0]["path"], &line["files"][0]["verdict"]), (&"test.c".into(), &"unaccounted".into()));
    let left_out = Statement { leave_out: vec!["test.c".into()], ..Statement::default() };
    let built = program.build_as(&program.request(vec![test.clone()]), &left_out).unwrap();
    assert_eq!((built.patch.is_none(), built.report.files[0].verdict), (true, Verdict::LeftOut));

    // the names of sources in its symbol table do
    link(&["main.o", "clamp.o"]);
    let built = program.build(&program.request(vec![test.clone()])).unwrap();
    assert_eq!((built.patch.is_none(), built.report.files[0].verdict), (true, Verdict::NoPart));
    assert_eq!(program.call(&test).0, Some(6));

    // and show a unit that the commands do not have
    link(&["main.o", "clamp.o", "more.c"]);
    refused(&more, "more.c");
    refused(&test, "more.c");
    let built = program.build(&program.request(vec![header])).unwrap();
    assert_eq!(functions(&built), ["clamp"]);
    assert!(built.report.warnings.iter().any(|w| w.contains("more.c")), "{:?}", built.report.warnings);
}

#[test]
fn a_copy_in_the_users_tree_refuses_a_change_of_the_file_that_is_not_compiled() {
    if !can_run("a_copy_in_the_users_tree_refuses_a_change_of_the_file_that_is_not_compiled") {
        return;
    }
    let program = Program::new();
    fs::create_dir(program.source().join("upstream")).unwrap();
    fs::copy(program.source().join("clamp.c"), program.source().join("upstream/clamp.c")).unwrap();
    let fix = program.diff("fix.patch", &[("upstream/clamp.c", "value > LIMIT", "value >= LIMIT - 1")]);
    let error = program.build(&program.request(vec![fix])).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Unaccounted { .. }) && text.contains("clamp.c, which may be made of it"), "{text}");
}

#[test]
fn a_series_is_built_one_upon_the_other() {
    if !can_run("a_series_is_built_one_upon_the_other") {
        return;
    }
    let program = Program::new();
    let first = program.diff("first.patch", &[("clamp.c", "LIMIT;\n", "LIMIT - 1;\n")]);
    let applied = Command::new("patch").args(["-p1", "-s", "-i"]).arg(&first).current_dir(program.source()).status();
    assert!(applied.unwrap().success());
    let second = program.diff("second.patch", &[("clamp.c", "value * 3", "value * 4")]);
    fs::write(program.source().join("clamp.c"), CLAMP).unwrap();
    let mut request = program.request(vec![second]);
    request.on_top_of = vec![first];
    let built = program.build(&request).unwrap();
    assert_eq!(functions(&built), ["unrelated"]);
    let patch = built.patch.unwrap();
    assert_eq!(patch.based_on.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["first.patch"]);
}

#[test]
fn a_global_of_another_unit_is_found() {
    if !can_run("a_global_of_another_unit_is_found") {
        return;
    }
    let program = Program::new();
    let changes = [
        ("clamp.c", "int unrelated(int value);\n", "int unrelated(int value);\nextern int spare;\n"),
        ("clamp.c", "return LIMIT;", "return spare;"),
    ];
    // two changes of one file make one diff
    let text = CLAMP.replacen(changes[0].1, changes[0].2, 1).replacen(changes[1].1, changes[1].2, 1);
    let fix = program.diff("spare.patch", &[("clamp.c", CLAMP, &text)]);
    let built = program.build(&program.request(vec![fix])).unwrap();
    assert_eq!(functions(&built), ["clamp"]);
}

#[test]
fn hooks_and_shadow_variables_come_along() {
    if !can_run("hooks_and_shadow_variables_come_along") {
        return;
    }
    let program = Program::new();
    let text = CLAMP
        .replace("#include <assert.h>\n", "#include <assert.h>\n#include \"stillpoint-shadow.h\"\n")
        .replace("        return LIMIT;\n", "        return sp_shadow_get(&value, 1) ? 1 : LIMIT;\n");
    let fix = program.diff("shadow.patch", &[("clamp.c", CLAMP, &text)]);
    let hooks = program.directory.path().join("hooks.c");
    fs::write(
        &hooks,
        "#include \"stillpoint-shadow.h\"\nstatic int done;\n\
         int make(void) { return sp_shadow_get_or_alloc(&done, 1, 8) ? 0 : 1; }\n\
         int forget(void) { sp_shadow_free_all(1); return 0; }\n",
    )
    .unwrap();
    let statement = Statement {
        hooks: HookNames { pre_apply: vec!["make".into()], post_revert: vec!["forget".into()], ..HookNames::default() },
        extra_units: vec![hooks],
        shadow_variables: true,
        ..Statement::default()
    };
    let patch = program.build_as(&program.request(vec![fix]), &statement).unwrap().patch.unwrap();
    let name = |hooks: &[u32]| patch.symbols[hooks[0] as usize].name.clone();
    assert_eq!((name(&patch.hooks.pre_apply), name(&patch.hooks.post_revert)), ("make".into(), "forget".into()));
    let exports: Vec<&str> = patch.exports.iter().map(|&i| patch.symbols[i as usize].name.as_str()).collect();
    assert!(exports.contains(&"sp_shadow_get"), "later patches share the shadows: {exports:?}");
}

#[test]
fn what_cannot_be_built_is_named() {
    if !can_run("what_cannot_be_built_is_named") {
        return;
    }
    let program = Program::new();
    let broken = program.diff("broken.patch", &[("clamp.c", "return LIMIT;", "return NO_SUCH_NAME;")]);
    let error = program.build(&program.request(vec![broken])).unwrap_err();
    assert!(matches!(&error, Error::Compile { unit, side: "after", .. } if unit == "clamp.c"), "{error}");
    fs::write(program.source().join("clamp.c"), CLAMP.replace("value > LIMIT", "value >= LIMIT * 2")).unwrap();
    let fix = program.diff("fix.patch", &[("clamp.c", "return LIMIT;", "return 1;")]);
    let error = program.build(&program.request(vec![fix])).unwrap_err();
    assert!(error.is_refusal(), "a source that the program was not built from: {error}");
}
