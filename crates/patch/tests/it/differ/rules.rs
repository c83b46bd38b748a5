//! Rules that apply only to three builds of a unit: the shipped one, the one with earlier patches, the one with this
//! patch.

use std::process::Command;
use stillpoint_patch_differ::{Options, Outcome, Refusal, TargetElf, UnitInput, diff, place};
use stillpoint_patch_format::{Patch, SymbolValue};

struct Built {
    target: TargetElf,
    objects: [Vec<u8>; 3],
}

/// Compiles `source` with `VERSION` 0, 1 and 2 as the shipped, before and after side, and links the first.
fn build(source: &str, flags: &[&str]) -> Built {
    build_elsewhere(source, flags, &[])
}

/// Builds like [`build`], the target with other flags in addition, as another machine would.
fn build_elsewhere(source: &str, flags: &[&str], elsewhere: &[&str]) -> Built {
    let directory = tempfile::tempdir().expect("temporary directory");
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("unit.c"), source).expect("write the source");
    let cc = |args: &[&str]| {
        let status = Command::new("cc").current_dir(directory.path()).args(flags).args(args).status().expect("run cc");
        assert!(status.success(), "cc {args:?}");
    };
    let sections = ["-O2", "-g", "-ffunction-sections", "-fdata-sections", "-c", "unit.c"];
    cc(&[&["-O2", "-g", "-DVERSION=0", "-c", "unit.c", "-o", "target.o"], elsewhere].concat());
    cc(&["-O2", "-g", "-DVERSION=0", "-c", "unit.c", "-o", "0.o"]);
    cc(&[&sections[..], &["-DVERSION=1", "-o", "1.o"]].concat());
    cc(&[&sections[..], &["-DVERSION=2", "-o", "2.o"]].concat());
    cc(&["-x", "none", "target.o", "-s", "-o", "target"]);
    let read = |name: &str| std::fs::read(at(name)).expect("read what cc wrote");
    let target = TargetElf::parse(&read("target"), "target").expect("a target");
    Built { target, objects: ["0.o", "1.o", "2.o"].map(read) }
}

fn diff_of(built: &Built, known: &[&str]) -> Result<Outcome, Vec<Refusal>> {
    let [shipped, before, after] = &built.objects;
    let known = known.iter().map(|name| (*name).to_owned()).collect();
    let options = Options { name: "rule".to_owned(), known, ..Options::default() };
    diff(&built.target, &[UnitInput { path: "unit.c", shipped, before, after, sources: None }], &options)
}

fn patch_of(built: &Built, known: &[&str]) -> Patch {
    match diff_of(built, known) {
        Ok(Outcome::Patch(patch)) => *patch,
        other => panic!("expected a patch: {other:?}"),
    }
}

fn names(patch: &Patch) -> Vec<&str> {
    let mut names: Vec<&str> = patch.functions.iter().map(|f| f.name.as_str()).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_constant_that_an_earlier_patch_changed_is_brought_again() {
    let built = build(
        "static const int table[] = {VERSION ? 77 : 11, 22, 33, 44};\n\
         __attribute__((noipa)) int look(int i) { return table[i & 3] + VERSION / 2; }\n\
         int main(int argc, char **argv) { (void)argv; return look(argc); }\n",
        &[],
    );
    let patch = patch_of(&built, &[]);
    assert_eq!(names(&patch), ["look"]);
    let from_target =
        patch.symbols.iter().any(|s| s.name.contains("table") && matches!(s.value, SymbolValue::Target(_)));
    assert!(!from_target, "the target holds the old table");
    assert!(patch.sections.iter().any(|s| s.bytes.starts_with(&77i32.to_le_bytes())), "the new table comes along");
}

#[test]
fn a_constant_that_stays_is_the_targets() {
    let built = build(
        "static const int table[] = {11, 22, 33, 44};\n\
         __attribute__((noipa)) int look(int i) { return table[i & 3] + VERSION / 2; }\n\
         int main(int argc, char **argv) { (void)argv; return look(argc); }\n",
        &[],
    );
    let patch = patch_of(&built, &[]);
    let at = |s: &&stillpoint_patch_format::Symbol| s.name == "table" && matches!(s.value, SymbolValue::Target(_));
    assert!(patch.symbols.iter().any(|s| at(&s)), "{:?}", patch.symbols);
}

#[test]
fn functions_that_the_compiler_folds_since_are_both_redirected() {
    let source = "#include <stdlib.h>\n\
         static __attribute__((noinline)) int one(int i) { return abs(i) * 3 + 7; }\n\
         static __attribute__((noinline)) int two(int i) { return abs(i) * (VERSION == 2 ? 3 : 5) + 7; }\n\
         int main(int argc, char **argv) { (void)argv; return one(argc) - two(argc); }\n";
    let built = build(source, &[]);
    let patch = patch_of(&built, &[]);
    // Code that calls `two` calls `one` now, or reaches the new code through the entry of `two`.
    let two = patch.functions.iter().any(|f| f.name == "two" || f.name == "main");
    assert!(two, "{:?}", names(&patch));
}

#[test]
fn a_writable_table_of_labels_is_refused_with_its_function() {
    let built = build(
        "__attribute__((noipa)) int go(const char *p)\n{\n\
         static void *labels[] = {&&stop, &&more};\n int v = 1;\n\
         if (*p == 'x') labels[0] = &&more;\n goto *labels[*p++ & 1];\n\
         more: v += VERSION == 2 ? 2 : 1;\n goto *labels[*p++ & 1];\n stop: return v;\n}\n\
         int main(int argc, char **argv) { return go(argv[argc - 1]); }\n",
        &[],
    );
    let refusals = diff_of(&built, &[]).expect_err("the table holds addresses of the old body");
    assert!(refusals.iter().any(|r| r.code() == "data-changed" && r.to_string().contains("`labels`")), "{refusals:?}");
}

#[test]
fn a_static_that_an_earlier_patch_brought_is_taken_from_it() {
    let built = build(
        "#if VERSION > 0\nstatic int seen;\n#endif\n\
         __attribute__((noipa)) int step(int i)\n{\n\
         #if VERSION == 0\n return i * 77777 + 5;\n#else\n seen += i * VERSION; return seen;\n#endif\n}\n\
         int main(int argc, char **argv) { (void)argv; return step(argc); }\n",
        &[],
    );
    let patch = patch_of(&built, &["unit.c:seen"]);
    let seen = patch.symbols.iter().find(|s| s.name == "unit.c:seen").expect("a symbol for the static");
    assert_eq!(seen.value, SymbolValue::OtherPatch);
    let refusals = diff_of(&built, &[]).expect_err("without that patch its state is nowhere");
    assert!(refusals.iter().any(|r| r.code() == "unresolved-symbol"), "{refusals:?}");
}

#[test]
fn a_function_that_an_earlier_patch_brought_is_replaced_in_its_callers() {
    let built = build(
        "#include <stdlib.h>\n\
         #if VERSION > 0\nstatic __attribute__((noinline)) int check(int i) { return abs(i) + VERSION; }\n#endif\n\
         __attribute__((noipa)) int step(int i)\n{\n\
         #if VERSION == 0\n return i * 77777 + 5;\n#else\n return check(i) * check(i + 1);\n#endif\n}\n\
         int main(int argc, char **argv) { (void)argv; return step(argc); }\n",
        &[],
    );
    let patch = patch_of(&built, &["unit.c:check"]);
    assert_eq!(names(&patch), ["step"], "no entry of the target leads to `check`");
    let check = patch.symbols.iter().find(|s| s.name == "unit.c:check").expect("a symbol for the function");
    assert!(matches!(check.value, SymbolValue::Patch { .. }), "{check:?}");
    assert!(patch.exports.iter().any(|e| patch.symbols[*e as usize].name == "unit.c:check"), "later patches need it");
}

#[test]
fn code_of_another_compilation_is_not_placed() {
    let source = "__attribute__((noipa)) int work(int i) { return i * (VERSION + 3) + 1; }\n\
         int main(int argc, char **argv) { (void)argv; return work(argc); }\n";
    let built = build(source, &[]);
    let other = build(&source.replace("+ 3", "+ 30"), &[]);
    let own = place(&built.target, "unit.c", &built.objects[0]).expect("the shipped unit");
    assert_eq!((own.functions_placed, own.functions_total), (2, 2));
    let foreign = place(&built.target, "unit.c", &other.objects[0]).expect("an object");
    assert_eq!(foreign.unplaced, ["work"]);
    let [_, before, after] = &built.objects;
    let shipped = &other.objects[0];
    let options = Options { name: "rule".to_owned(), ..Options::default() };
    let refusals =
        diff(&built.target, &[UnitInput { path: "unit.c", shipped, before, after, sources: None }], &options)
            .expect_err("what was compared is not what runs");
    assert!(refusals.iter().any(|r| r.code() == "unplaced-function"), "{refusals:?}");
}

#[test]
fn constants_of_one_name_are_told_apart_by_their_contents() {
    let built = build(
        "#include <stdio.h>\n\
         static inline void one(int i) { static const char module[] = \"One of many modules\"; puts(&module[i & 1]); }\n\
         static inline void two(int i) { static const char module[] = \"Two of many modules\"; puts(&module[i & 3]); }\n\
         __attribute__((noipa)) void both(int i) { if (VERSION < 2) one(i); two(i); two(i + 1); }\n\
         __attribute__((noipa)) void turned(int i) { two(i); one(i); }\n\
         int main(int argc, char **argv) { (void)argv; both(argc); turned(argc); return 0; }\n",
        &[],
    );
    assert_eq!(names(&patch_of(&built, &[])), ["both"]);
}

const GREETING: &str = "#include <stdio.h>\n#ifndef PLACE\n#define PLACE \"here\"\n#endif\n\
     __attribute__((noipa)) int greet(int i) {\n\
     printf(\"built %s, for the first time of all\\n\", PLACE); printf(\"number %d of some numbers\\n\", i);\n\
     if (i > 4) printf(\"more than four of them\\n\"); if (i > 8) printf(\"even more than eight of them\\n\");\n\
     if (i > 16) printf(\"more than sixteen: %d\\n\", i * 3); if (i > 32) printf(\"as many as %d\\n\", i * 7);\n\
     puts(PLACE); return i + VERSION / 2; }\n\
     int main(int argc, char **argv) { (void)argv; return greet(argc); }\n";

#[test]
fn a_string_that_differs_in_the_target_is_the_targets() {
    let built = build_elsewhere(GREETING, &[], &["-DPLACE=\"elsewhere\""]);
    let patch = patch_of(&built, &[]);
    assert_eq!(names(&patch), ["greet"]);
    let warned = patch.warnings.iter().any(|w| w.contains("\"here\" where the target has \"else"));
    assert!(warned, "{:?}", patch.warnings);
    assert!(patch.symbols.iter().any(|s| s.name == "string of the target"), "{:?}", patch.symbols);
}

#[test]
fn code_whose_strings_mostly_differ_is_another_function() {
    let other = "#include <stdio.h>\n\
         __attribute__((noipa)) int tell(int i) { return printf(WHAT, i) + VERSION / 2; }\n\
         int main(int argc, char **argv) { (void)argv; return tell(argc); }\n";
    let built = build_elsewhere(other, &["-DWHAT=\"%d one\\n\""], &["-UWHAT", "-DWHAT=\"two %d\\n\""]);
    let refusals = diff_of(&built, &[]).expect_err("a refusal");
    assert!(matches!(refusals[..], [Refusal::SymbolConflict { .. }]), "{refusals:?}");
}

#[test]
fn a_table_of_another_size_must_hold_what_was_shipped() {
    let source = "__attribute__((used)) static const char *names[] = {\"a\", \"b\",\n#if VERSION == 2\n\"c\",\n#endif\n0};\n\
         __attribute__((noipa)) int count(void) { int n = 0; while (names[n]) n++; return n; }\n\
         int main(void) { return count(); }\n";
    let built = build(source, &[]);
    let refusals = diff_of(&built, &[]).expect_err("a refusal");
    assert!(refusals.iter().any(|r| matches!(r, Refusal::VariableChanged { copyable: true, .. })), "{refusals:?}");
    let [shipped, before, after] = &built.objects;
    let options = Options { name: "rule".to_owned(), write_data: true, ..Options::default() };
    let units = [UnitInput { path: "unit.c", shipped, before, after, sources: None }];
    let Ok(Outcome::Patch(patch)) = diff(&built.target, &units, &options) else { panic!("expected a patch") };
    assert_eq!(names(&patch), ["count"]);
    assert_eq!(patch.scope, stillpoint_patch_format::Scope::Process);
    let [change] = &patch.data[..] else { panic!("{:?}", patch.data) };
    assert_eq!((change.name.as_str(), change.old.len, change.shipped), ("names", 24, change.new));
}

#[test]
fn a_function_that_stays_with_a_renumbered_value_is_off_the_stack() {
    let source = "enum e {\nA,\n#if VERSION == 2\nC,\n#endif\nB };\n\
         __attribute__((noipa)) enum e same(enum e e) { return e; }\n\
         __attribute__((noipa)) int is_b(enum e e) { return e == B; }\n\
         int main(void) { return is_b(same(A)); }\n";
    let patch = patch_of(&build(source, &[]), &[]);
    assert_eq!(names(&patch), ["is_b"]);
    let off_stack: Vec<&str> = patch.off_stack.iter().map(|o| o.name.as_str()).collect();
    assert!(off_stack.contains(&"same") && off_stack.contains(&"main"), "{off_stack:?}");
}
