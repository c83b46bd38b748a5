//! Types compared member by member, on objects that the machine's compiler makes from two versions of one source.

use std::path::Path;
use std::process::Command;
use stillpoint_patch_differ::{Refusal, types};

/// Compiles `source`, once without and once with `AFTER` defined.
fn objects(source: &str, flags: &[&str]) -> (Vec<u8>, Vec<u8>) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let file = dir.path().join("unit.c");
    std::fs::write(&file, source).expect("write the source");
    let compile = |object: &Path, define: &str| {
        let status = Command::new("cc").args(flags).args(["-c", "-o"]).arg(object).arg(define).arg(&file).status();
        assert!(status.expect("run cc").success(), "cc {flags:?} failed on:\n{source}");
        std::fs::read(object).expect("read the object")
    };
    (compile(&dir.path().join("old.o"), "-DBEFORE"), compile(&dir.path().join("new.o"), "-DAFTER"))
}

/// Returns the pair of names of a function with one name on both sides.
fn both(name: &str) -> (String, String) {
    (name.to_owned(), name.to_owned())
}

const FLAGS: [&[&str]; 4] = [
    &["-O2", "-g", "-gdwarf-5"],
    &["-O2", "-g", "-gdwarf-4"],
    &["-O0", "-g", "-ffunction-sections", "-fdata-sections"],
    &["-O3", "-g3", "-gz=none", "-fPIC"],
];

fn compare(source: &str, flags: &[&str]) -> Result<types::Compared, Vec<Refusal>> {
    let (old, new) = objects(source, flags);
    types::compare(&old, &new, &[both("f")])
}

/// Asserts that a difference is refused, under all flags, with a message that contains `fragment`.
#[track_caller]
fn refused(source: &str, fragment: &str) {
    for flags in FLAGS {
        let refusals = compare(source, flags).expect_err("a refusal");
        let texts: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
        assert!(texts.iter().any(|t| t.contains(fragment)), "{flags:?}: no {fragment:?} in {texts:#?}");
    }
}

#[track_caller]
fn accepted(source: &str) -> types::Compared {
    let all = FLAGS.map(|flags| compare(source, flags).unwrap_or_else(|e| panic!("{flags:?}: {e:#?}")));
    all.into_iter().next().expect("four results")
}

/// Returns a structure with one version of its members on each side, used by `f` through a pointer.
fn structure(before: &str, after: &str) -> String {
    format!(
        "struct s {{\n#ifdef AFTER\n{after}\n#else\n{before}\n#endif\n}};\n\
         int f(struct s *s) {{ return *(char *)s; }}\n"
    )
}

#[test]
fn unchanged_types_are_facts() {
    let all = accepted(
        "struct in { int a; }; struct s { int n; struct in in[3]; struct s *next; union { int u; char c; }; };\nint f(struct s *s) { return s->n; }",
    );
    let facts: Vec<(&str, u64, u32)> = all.facts.iter().map(|f| (f.name.as_str(), f.size, f.members)).collect();
    assert_eq!(facts, [("struct in", 4, 1), ("struct s", 32, 5)]);
    assert!(all.notes.is_empty());
}

#[test]
fn a_member_that_moves_into_padding_is_named_with_both_offsets() {
    let source = structure("char a; char b; char c; long l;", "char a; char n; char b; char c; long l;");
    refused(
        &source,
        "type `struct s` changed: member `b` moved from offset 0x1 to 0x2; member `c` moved from offset 0x2 to 0x3; member `n` added at offset 0x1",
    );
}

#[test]
fn growth_reordering_and_removal_are_refused() {
    refused(&structure("int a;", "int a; int b;"), "member `b` added at offset 0x4; size changed from 4 to 8 bytes");
    refused(&structure("int a; int b;", "int b; int a;"), "member `a` moved from offset 0x0 to 0x4");
    refused(&structure("int a; int b;", "int a;"), "member `b` at offset 0x4 was removed");
    refused(&structure("char a; long l;", "char a; char pad; long l;"), "member `pad` added at offset 0x1");
}

#[test]
fn the_type_of_a_member_counts_and_its_name_does_not() {
    refused(&structure("int a;", "unsigned a;"), "member `a` at offset 0x0 changed from int to unsigned int");
    refused(&structure("int a; int b;", "int a; float b;"), "member `b` at offset 0x4 changed from int to float");
    refused(&structure("char a[8];", "char a[9];"), "member `a` at offset 0x0 changed from char [8] to char [9]");
    refused(
        &structure("int (*cb)(int);", "int (*cb)(int, char *);"),
        "changed from int (*)(int) to int (*)(int, char *)",
    );
    refused(&structure("struct x *p;", "struct y *p;"), "changed from struct x * to struct y *");
    accepted(&structure("int a; char *s; void *p;", "typedef_int a; const char *s; int *p;").replacen(
        "struct s",
        "typedef int typedef_int; struct s",
        1,
    ));
}

#[test]
fn bit_fields() {
    refused(
        &structure("unsigned a:3; unsigned b:4;", "unsigned a:4; unsigned b:4;"),
        "member `a` changed from 3 to 4 bits",
    );
    refused(
        &structure("unsigned a:3; unsigned b:4;", "unsigned a:3; unsigned c:2; unsigned b:4;"),
        "member `b` moved from offset 0x0 bit 3 to 0x0 bit 5",
    );
    accepted(&structure("unsigned a:3; unsigned b:4;", "unsigned a:3; unsigned b:4;"));
}

#[test]
fn anonymous_members_are_seen_through() {
    refused(
        &structure(
            "int t; union { int a; struct { char b, c; }; };",
            "int t; union { int a; struct { char c, b; }; };",
        ),
        "member `b` moved from offset 0x4 to 0x5",
    );
    refused(
        &structure("struct { int a; } in[2];", "struct { float a; } in[2];"),
        "member `a` at offset 0x0 changed from int to float",
    );
    refused(
        &structure("struct { int a, b; } in;", "struct { int b, a; } in;"),
        "member `in.a` moved from offset 0x0 to 0x4",
    );
    accepted(&structure("int t; int a;", "struct { int t; }; union { int a; };"));
}

#[test]
fn flexible_arrays() {
    refused(
        &structure("int n; char tail[];", "int n; char tail[1];"),
        "member `tail` at offset 0x4 changed from char [] to char [1]",
    );
    accepted(&structure("int n; char tail[];", "int n; char tail[];"));
}

#[test]
fn an_alternative_added_to_a_union_is_noted_and_growth_refused() {
    let u = |after: &str| {
        format!("union u {{ int a;\n#ifdef AFTER\n{after}\n#endif\n}};\nint f(union u *u) {{ return u->a; }}\n")
    };
    assert_eq!(accepted(&u("float x;")).notes, ["union u: alternative `x` added"]);
    refused(&u("long x;"), "type `union u` changed: member `x` added at offset 0x0; size changed from 4 to 8 bytes");
}

#[test]
fn enumerations() {
    let e = |before: &str, after: &str| {
        format!(
            "#ifdef AFTER\nenum e {{ {after} }};\n#else\nenum e {{ {before} }};\n#endif\nstruct s {{ enum e last; }};\n\
             int f(struct s *s) {{ return s->last == A; }}\n"
        )
    };
    assert_eq!(accepted(&e("A, B", "A, B, C")).notes, ["enum e: enumerator `C` = 2 added"]);
    refused(&e("A, B", "A, C, B"), "type `enum e` changed: enumerator `B` changed from 1 to 2");
    refused(&e("A, B", "A"), "enumerator `B` = 1 was removed");
    refused(&e("A, B = -1", "A, B = 1"), "enumerator `B` changed from -1 to 1");
    refused(&e("A, B", "A, C, B"), "member `last` of struct s may hold it");
}

/// Returns code that hands values of an enumeration around in `rest`, which renumbers `B`.
fn renumbered(rest: &str) -> String {
    format!("enum e {{ A,\n#ifdef AFTER\nC,\n#endif\nB }};\n{rest}\nint f(enum e e) {{ return e == B; }}\n")
}

#[test]
fn values_of_an_enumeration_may_change_where_only_frames_have_them() {
    let found = accepted(
        &renumbered(
            "__attribute__((noipa)) enum e next(enum e e) { return e; }\n\
         __attribute__((noipa)) int other(int e) { return e; }\n\
         int calls(void) { return other(f(next(A))); }\nint f(enum e e);",
        )
        .replacen("int calls", "int f(enum e e);\nint calls", 1),
    );
    assert!(
        found.notes.iter().any(|note| note.contains("`B` changed from 1 to 2: no data has this type")),
        "{found:?}"
    );
    let frames: Vec<&str> = found.renumbered["e"].iter().map(String::as_str).collect();
    assert_eq!(frames, ["calls", "f", "next"]);
}

#[test]
fn values_of_an_enumeration_stay_where_data_has_them() {
    for (data, named) in [
        ("enum e last;", "variable `last` may hold it"),
        ("enum e *all;", "variable `all` may hold it"),
        ("static int g(void) { static enum e kept; return kept++; } int h(void) { return g(); }", "variable `kept`"),
        (
            "typedef enum e t; struct s { int a; t b[4]; }; int h(struct s *s) { return s->a; }",
            "member `b` of struct s",
        ),
        ("void (*call)(enum e);", "variable `call` may hold it"),
    ] {
        refused(&renumbered(data), named);
    }
}

#[test]
fn types_behind_pointers_and_cycles() {
    let source = |m: &str| {
        format!(
            "struct b; struct a {{ struct b *b; }}; struct b {{ struct a *a; struct c *c; }};\n#ifdef AFTER\nstruct c {{ int n; {m} }};\n#else\nstruct c {{ int n; }};\n#endif\nint f(struct a *a) {{ return a->b->c->n; }}\n"
        )
    };
    refused(&source("int more;"), "type `struct c` changed: member `more` added");
    assert_eq!(accepted(&source("")).facts.len(), 3);
}

#[test]
fn a_type_that_only_a_cast_names_is_compared() {
    let source = "struct s { int a;\n#ifdef AFTER\nint b;\n#endif\n};\nint f(void *p) { return ((struct s *)p)->a; }\n";
    refused(source, "type `struct s` changed");
}

#[test]
fn globals_and_static_locals() {
    let v = |declaration: &str, after: &str, body: &str| {
        format!(
            "#ifdef AFTER\n{after}\n#define B {body}\n#else\n{declaration}\n#define B {body}\n#endif\nint f(int i) {{ B }}\n"
        )
    };
    refused(&v("int table[4];", "int table[5];", "return table[i];"), "variable `table` of");
    refused(
        &v("static long t[4];", "static long t[5];", "return t[i]++;"),
        "changed from long int [4] to long int [5]",
    );
    accepted(&v("static const int t[4] = {1};", "static const int t[5] = {1};", "return t[i];"));
    let local = "int f(int i) {\n#ifdef AFTER\nstatic long n;\n#else\nstatic int n;\n#endif\nreturn n += i; }\n";
    refused(local, "variable `f::n` of");
    let server = "struct server { int port;\n#ifdef AFTER\nint tls;\n#endif\n};\nextern struct server server;\nint f(void) { return server.port; }\n";
    refused(server, "type `struct server` changed: member `tls` added at offset 0x4");
}

#[test]
fn anonymous_structures_go_by_their_typedef() {
    let source = |after: &str| {
        format!(
            "#ifdef AFTER\ntypedef struct {{ {after} }} t;\n#else\ntypedef struct {{ int a; int b; }} t;\n#endif\nint f(t *t) {{ return *(int *)t; }}\n"
        )
    };
    refused(&source("int b; int a;"), "type `t` changed: member `a` moved from offset 0x0 to 0x4");
    assert_eq!(accepted(&source("int a; int b;")).facts[0].name, "t");
}

#[test]
fn a_new_type_and_a_type_that_is_gone_are_fine() {
    accepted(
        "#ifdef AFTER\nstruct fresh { int a; };\nint f(void *p) { struct fresh x = { 3 }; return x.a + *(int *)p; }\n#else\nstruct stale { long a; };\nint f(void *p) { struct stale x = { 3 }; return x.a; }\n#endif\n",
    );
}

#[test]
fn a_signature_may_change_only_with_all_who_refer_to_it() {
    let source = |caller_before: &str, caller_after: &str| {
        format!(
            "#ifdef AFTER\nint f(int a, int b) {{ return a * b; }}\n{caller_after}\n#else\nint f(int a) {{ return a; }}\n{caller_before}\n#endif\n"
        )
    };
    let used = |names: &[&str], source: &str| {
        let (old, new) = objects(source, &["-O2", "-g", "-ffunction-sections", "-fno-inline"]);
        types::compare(&old, &new, &names.iter().map(|n| both(n)).collect::<Vec<_>>())
    };
    let both = source("int g(void) { return f(1) + 1; }", "int g(void) { return f(1, 2) + 1; }");
    used(&["f", "g"], &both).expect("both change");
    // code that calls it is the same only if it already passes what the new function wants
    used(&["f"], &both).expect("a call");
    used(&["f"], &both.replace("int f(", "static int f(")).expect("a call of a static");
    let taken = source("void *g(void) { return f; }", "void *g(void) { return f; }");
    let refusals = used(&["f"], &taken).expect_err("g stays");
    assert_eq!(refusals[0].code(), "signature-changed");
    assert_eq!(
        refusals[0].to_string(),
        "function `f` changed from `int (int)` to `int (int, int)`, but `g`, which did not change, takes its address"
    );
    let table = source("int (*table[])(int) = { f };", "int (*table[])(int) = { (int (*)(int))f };");
    let refusals = used(&["f"], &table).expect_err("a table holds f");
    assert!(refusals[0].to_string().ends_with("but data `table` holds its address"), "{refusals:?}");
}

#[test]
fn a_jump_table_is_no_address_of_its_function() {
    let cases: String = (0..8).map(|n| format!("case {n}: return call{n}(a);\n")).collect();
    let calls: String = (0..8).map(|n| format!("int call{n}(int);\n")).collect();
    let body = format!("{{ switch (a) {{ {cases} default: return 0; }} }}");
    let source = |after: &str| {
        format!(
            "{calls}#ifdef AFTER\n__attribute__((noinline)) static int f(int a, int b) {{ a += b; {body} }}\n\
             int g(int a) {{ return f(a, a) + 1; }}\n{after}\n#else\n__attribute__((noinline)) static int f(int a) {body}\n\
             int g(int a) {{ return f(a) + 1; }}\nint (*const table[])(int) = {{ TAKEN }};\n#endif\n"
        )
    };
    for flags in [&["-O2", "-g"][..], &["-O2", "-g", "-fPIC"], &["-O2", "-g", "-fno-pie"]] {
        let used = |source: &str| {
            let (old, new) = objects(source, flags);
            types::compare(&old, &new, &["f", "g"].map(both))
        };
        let plain = source("");
        used(&plain.replace("TAKEN", "0")).expect("its own jump table");
        let refusals = used(&plain.replace("TAKEN", "f")).expect_err("a table holds f");
        assert!(refusals[0].to_string().ends_with("but data `table` holds its address"), "{flags:?}: {refusals:?}");
    }
}

#[test]
fn nothing_used_means_nothing_compared() {
    let (old, new) = objects(&structure("int a;", "long a;"), FLAGS[0]);
    assert_eq!(types::compare(&old, &new, &[]), Ok(types::Compared::default()));
}

#[test]
fn an_object_without_debug_information_is_refused_by_side() {
    let (bare, _) = objects("int f(void) { return 1; }", &["-O2"]);
    let (full, _) = objects("int f(void) { return 1; }", &["-O2", "-g"]);
    let text = |old: &[u8], new: &[u8]| types::compare(old, new, &[both("f")]).expect_err("a refusal")[0].to_string();
    assert_eq!(text(&bare, &full), "debug information of shipped object: no debug information, compile with -g");
    assert_eq!(text(&full, &bare), "debug information of after object: no debug information, compile with -g");
}

#[test]
fn a_truncated_object_never_panics() {
    let (old, new) = objects(&structure("int a;", "long a;"), FLAGS[0]);
    for cut in (1..old.len()).step_by(97) {
        let _ = types::compare(&old[..cut], &new, &[both("f")]).expect_err("a truncated object");
    }
}
