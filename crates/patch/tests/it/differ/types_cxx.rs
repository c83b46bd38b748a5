//! Types of C++ compared member by member, as g++ and clang describe them.

use std::path::Path;
use std::process::Command;
use stillpoint_patch_differ::{Refusal, types};

const FLAGS: [&[&str]; 6] = [
    &["g++", "-O2", "-gdwarf-5"],
    &["g++", "-O0", "-gdwarf-4"],
    &["g++", "-O2", "-gdwarf-4", "-fdebug-types-section"],
    &["g++", "-O2", "-gdwarf-5", "-fdebug-types-section"],
    &["clang++", "-O2", "-g"],
    &["clang++", "-O0", "-gdwarf-4", "-ffunction-sections", "-fdata-sections"],
];

/// Compares `source` without and with `AFTER` defined; the function is `use`, its parameters `mangled`.
fn compare(source: &str, mangled: &str, flags: &[&str]) -> Result<types::Compared, Vec<Refusal>> {
    let dir = tempfile::tempdir().expect("temporary directory");
    let file = dir.path().join("unit.cc");
    std::fs::write(&file, source).expect("write the source");
    let compile = |object: &Path, define: &str| {
        let mut command = Command::new(flags[0]);
        let all_types = if flags[0] == "g++" { "-femit-class-debug-always" } else { "-fstandalone-debug" };
        let status =
            command.args(&flags[1..]).arg(all_types).args(["-c", "-o"]).arg(object).arg(define).arg(&file).status();
        assert!(status.expect("run the compiler").success(), "{flags:?} failed on:\n{source}");
        std::fs::read(object).expect("read the object")
    };
    let (old, new) = (compile(&dir.path().join("old.o"), "-DBEFORE"), compile(&dir.path().join("new.o"), "-DAFTER"));
    let name = format!("_Z3use{mangled}");
    types::compare(&old, &new, &[(name.clone(), name)])
}

#[track_caller]
fn refused(source: &str, mangled: &str, fragment: &str) {
    for flags in FLAGS {
        let refusals = compare(source, mangled, flags).expect_err(&format!("{flags:?}: a refusal"));
        let texts: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
        assert!(texts.iter().any(|t| t.contains(fragment)), "{flags:?}: no {fragment:?} in {texts:#?}");
    }
}

#[track_caller]
fn accepted(source: &str, mangled: &str) -> Vec<types::Compared> {
    FLAGS.iter().map(|flags| compare(source, mangled, flags).unwrap_or_else(|e| panic!("{flags:?}: {e:#?}"))).collect()
}

/// Returns a class with one version of its body on each side.
fn class(before: &str, after: &str) -> String {
    format!(
        "struct B1 {{ int b; }}; struct B2 {{ long c; }}; struct V {{ virtual ~V(); int v; }};\n\
         namespace store {{\n#ifdef AFTER\nclass Cache {after};\n#else\nclass Cache {before};\n#endif\n}}\n\
         int use(store::Cache &c) {{ return *(int *)&c + sizeof c; }}\n"
    )
}
const CACHE: &str = "RN5store5CacheE";

#[test]
fn classes_are_named_with_their_namespaces() {
    for found in accepted(&class("{ int a; }", "{ int a; void f(); }"), CACHE) {
        assert!(
            found.facts.iter().any(|fact| fact.name == "class store::Cache" && fact.size == 4),
            "{:?}",
            found.facts
        );
    }
    refused(&class("{ int a; }", "{ int a; int b; }"), CACHE, "type `class store::Cache` changed: member `b` added");
}

#[test]
fn bases_count_as_members() {
    refused(&class(": B1 { int a; }", ": B1, B2 { int a; }"), CACHE, "class store::Cache` changed: ");
    refused(&class(": B1, B2 { }", ": B2, B1 { }"), CACHE, "member `(base struct B1)` moved");
    refused(&class(": V { int a; }", ": virtual V { int a; }"), CACHE, "class store::Cache` changed: ");
}

#[test]
fn tables_of_virtual_functions_count() {
    let swap = class("{ public: virtual int f(); virtual int g(); }", "{ public: virtual int g(); virtual int f(); }");
    refused(&swap, CACHE, "its table of virtual functions changed");
    refused(&class("{ int a; }", "{ int a; virtual int f(); }"), CACHE, "class store::Cache` changed: ");
}

#[test]
fn types_of_one_name_in_two_namespaces_are_two() {
    let source = "namespace a { struct N { int i; }; }\nnamespace b { struct N {\n#ifdef AFTER\nlong\n#else\nint\n#endif\n j; }; }\n\
                  int use(a::N &n, b::N &m) { return n.i + m.j; }\n";
    refused(source, "RN1a1NERN1b1NE", "type `struct b::N` changed: member `j`");
    let kept = "namespace a { struct N { int i; }; }\nnamespace b { struct N { long i; }; }\n\
                int use(a::N &n, b::N &m) { return n.i + m.i; }\n";
    accepted(kept, "RN1a1NERN1b1NE");
}

#[test]
fn static_members_of_one_name_in_two_classes_are_two() {
    let source = "struct A { static int count; };\nstruct B { static long count; };\n\
                  #ifdef AFTER\nlong B::count; int A::count;\n#else\nint A::count; long B::count;\n#endif\n\
                  int use() { return A::count + B::count; }\n";
    accepted(source, "v");
}

#[test]
fn instances_of_an_alias_template_share_a_name() {
    let source = "template <class T> struct I { typedef T type; };\ntemplate <class T> using id = typename I<T>::type;\n\
                  int use() {\n#ifdef AFTER\nid<long> a = 1;\n#endif\nid<int> b = 2; return b\n#ifdef AFTER\n + a\n#endif\n; }\n";
    accepted(source, "v");
}

#[test]
fn pointers_to_members_and_references_are_compared_by_what_they_lead_to() {
    let member = |ty: &str, after: &str| class(&format!("{{ int n; {ty}; }}"), &format!("{{ int n; {after}; }}"));
    refused(&member("int B1::*p", "long B2::*p"), CACHE, "member `p`");
    refused(&member("int &r", "long &r"), CACHE, "member `r` at offset 0x8 changed from int");
    refused(&member("int (B1::*f)(int)", "int (B1::*f)(long)"), CACHE, "member `f`");
    accepted(&member("int B1::*p", "int B1::*p"), CACHE);
}

#[test]
fn an_enum_class_keeps_its_values_and_its_size() {
    let with = |before: &str, after: &str| {
        format!(
            "#ifdef AFTER\nenum class E {after};\n#else\nenum class E {before};\n#endif\nint use(E e) {{ return int(e); }}\n"
        )
    };
    refused(&with("{ a, b }", "{ b, a }"), "1E", "enumerator `a` changed from 0 to 1");
    refused(&with(": char { a }", ": int { a }"), "1E", "size changed from 1 to 4 bytes");
    accepted(&with("{ a }", "{ a, b }"), "1E");
}

#[test]
fn a_result_may_change_only_with_all_who_have_the_address() {
    let source = "#ifdef AFTER\nlong\n#else\nint\n#endif\nuse() { return 1; }\nvoid *other() { return (void *)use; }\n";
    for flags in FLAGS.iter().filter(|flags| flags[1] == "-O0") {
        let refusals = compare(source, "v", flags).expect_err("the other function stays");
        assert!(refusals.iter().any(|r| r.code() == "signature-changed"), "{flags:?}: {refusals:?}");
    }
}
