//! Inline code of C++ when the linker kept the copy of another object, which is not among the inputs.

use std::process::Command;
use stillpoint_patch_differ::{Options, Outcome, Refusal, TargetElf, UnitInput, diff};

/// Links `first.cc` (never an input) with `unit.cc`; diffs the latter against itself with `AFTER` defined.
fn diff_of(first: &str, unit: &str) -> Result<Outcome, Vec<Refusal>> {
    let directory = tempfile::tempdir().expect("temporary directory");
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("first.cc"), first).expect("write the source");
    std::fs::write(at("unit.cc"), unit).expect("write the source");
    let cxx = |args: &[&str]| {
        let status = Command::new("g++").current_dir(directory.path()).args(args).status().expect("run g++");
        assert!(status.success(), "g++ {args:?}");
    };
    cxx(&["-O2", "-g", "-c", "first.cc"]);
    cxx(&["-O2", "-g", "-c", "unit.cc", "-o", "shipped.o"]);
    let sections = ["-O2", "-g", "-ffunction-sections", "-fdata-sections", "-c", "unit.cc", "-o"];
    cxx(&[&sections[..], &["before.o"]].concat());
    cxx(&[&sections[..], &["after.o", "-DAFTER"]].concat());
    cxx(&["first.o", "shipped.o", "-s", "-o", "target"]);
    let read = |name: &str| std::fs::read(at(name)).expect("read what g++ wrote");
    let target = TargetElf::parse(&read("target"), "target").expect("a target");
    let (shipped, before, after) = (read("shipped.o"), read("before.o"), read("after.o"));
    let unit = UnitInput { path: "unit.cc", shipped: &shipped, before: &before, after: &after, sources: None };
    diff(&target, &[unit], &Options { name: "rule".to_owned(), ..Options::default() })
}

const FIRST: &str = "__attribute__((noipa)) inline int scale(int a) { asm volatile(\"nop\"); return a * 3; }\n\
                     int there();\nint main(int argc, char **) { return scale(argc) + there(); }\n";

fn unit(body: &str) -> String {
    format!(
        "#ifdef AFTER\n#define FACTOR 5\n#else\n#define FACTOR 3\n#endif\n\
         __attribute__((noipa)) inline int scale(int a) {{ {body} return a * FACTOR; }}\n\
         __attribute__((noipa)) int there() {{ return scale(2) + 1; }}\n"
    )
}

#[test]
fn another_objects_copy_of_other_bytes_is_refused_by_name() {
    let refusals =
        diff_of(FIRST, &unit("asm volatile(\"nop; nop\");")).expect_err("what was compared is not what runs");
    let texts: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
    assert_eq!(refusals[0].code(), "unplaced-function", "{texts:?}");
    assert!(texts[0].contains("`scale(int)` of unit.cc") && texts[0].contains("another object's copy"), "{texts:?}");
}

#[test]
fn another_objects_copy_of_the_same_bytes_is_the_one() {
    let made = diff_of(FIRST, &unit("asm volatile(\"nop\");"));
    let Ok(Outcome::Patch(patch)) = &made else { panic!("expected a patch: {made:?}") };
    assert_eq!(patch.functions.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(), ["_Z5scalei"]);
}

#[test]
fn inline_code_that_nothing_leads_to_is_left_alone() {
    let first = "__attribute__((noipa)) inline int other(int a) { asm volatile(\"nop\"); return a * 3; }\n\
                 int there();\nint main(int argc, char **) { return other(argc) + there(); }\n";
    // No code calls `keep`, the only caller of `scale`, whose bytes are those of `other`.
    let unit = "#ifdef AFTER\n#define FACTOR 5\n#else\n#define FACTOR 3\n#endif\n\
                __attribute__((noipa)) inline int scale(int a) { asm volatile(\"nop\"); return a * FACTOR; }\n\
                __attribute__((noipa)) inline int other(int a) { asm volatile(\"nop\"); return a * 3; }\n\
                __attribute__((noipa)) int there() { return other(2) + 1; }\n\
                __attribute__((used)) inline int keep(int a) { return scale(a); }\n";
    assert_eq!(diff_of(first, unit), Ok(Outcome::NothingToPatch), "equal bytes are no evidence");
}
