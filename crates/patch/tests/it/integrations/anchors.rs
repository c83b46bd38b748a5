//! Search of each kind of anchor; an anchor without a match is an error that names it.

use std::fs;
use stillpoint_integrations::{Edits, Integration};

const PROGRAM: &str = "\
#include <a.h>
#include <b.h>
#ifdef ODD
#include <c.h>
#endif

struct pool;
struct pool
{
  int size; // { not a brace
};

static void helper(void) { serve(); }

int Pool::work(int n) const
{
  int got= 0;
  /* serve( in a comment */
  while (alive(n) && got == 0)
  {
#ifdef ODD
    if (n) {
#else
    if (!n) {
#endif
      got= serve(\"serve(\", n); // trailing
    }
  }
  if (n)
    drop(n);
  switch (n) {
  case 1:
    one();
    break;
  default: other();
  }
  do { turn(); } while (n--);
  return got;
}
";

fn edited(edits: &str) -> Result<String, String> {
    let parsed = Edits::parse("t.edits", &format!("file p.cc\n{edits}")).map_err(|e| e.to_string())?;
    let (file, edit) = parsed.files().next().expect("one file");
    edit.apply(file, PROGRAM).map_err(|e| e.to_string())
}

/// Returns the program with `lines` inserted after its line `at`.
fn with(at: &str, lines: &str) -> String {
    assert_eq!(PROGRAM.matches(at).count(), 1, "{at}");
    PROGRAM.replace(at, &format!("{at}{lines}"))
}

#[track_caller]
fn gives(edits: &str, expected: &str) {
    assert_eq!(edited(edits).unwrap_or_else(|e| panic!("{e}")), expected);
}

#[test]
fn text_goes_after_the_includes_that_no_condition_governs() {
    gives("begin\n| #include \"x.h\"", &with("#include <b.h>\n", "#include \"x.h\"\n"));
}

#[test]
fn text_goes_to_the_ends_of_file_and_scope() {
    gives("end\n| x();", &format!("{PROGRAM}x();\n"));
    gives("in Pool::work\nbegin\n| x();", &with("const\n{\n", "  x();\n"));
    gives("in Pool::work\nend\n| x();", &with("return got;\n", "  x();\n"));
    gives("in struct pool\nend\n| int x;", &with("// { not a brace\n", "  int x;\n"));
}

#[test]
fn statements_are_whole() {
    let call = "in Pool::work\nbefore serve (\n| x();";
    gives(call, &PROGRAM.replace("      got= serve(", "      x();\n      got= serve("));
    gives(&call.replace("before", "after"), &with("// trailing\n", "      x();\n"));
    gives("in Pool::work\nafter while ( alive\n| x();", &with("// trailing\n    }\n  }\n", "  x();\n"));
    gives("in Pool::work\nafter n --\n| x();", &with("while (n--);\n", "  x();\n"));
    gives("in Pool::work\nafter if ( n ) drop\n| x();", &with("    drop(n);\n", "  x();\n"));
    gives("in Pool::work\nbefore one (\n| x();", &PROGRAM.replace("    one();", "    x();\n    one();"));
}

#[test]
fn blocks_have_two_ends() {
    gives("in Pool::work\ninto alive (\n| x();", &with("got == 0)\n  {\n", "    x();\n"));
    gives("in Pool::work\nat end of alive (\n| x();", &with("// trailing\n    }\n", "    x();\n"));
}

#[test]
fn words_are_replaced_in_their_line() {
    gives("in Pool::work\nreplace serve #1/1\n| ours", &PROGRAM.replace("got= serve", "got= ours"));
    gives("in Pool::work\nreplace got #2/4\n| x", &PROGRAM.replace("&& got", "&& x"));
}

#[test]
fn definitions_are_found_among_calls() {
    gives("above Pool::work\n| int x;", &PROGRAM.replace("int Pool", "int x;\nint Pool"));
    gives("above helper\n| int x;", &PROGRAM.replace("static void helper", "int x;\nstatic void helper"));
}

#[test]
fn text_that_is_no_program_has_lines() {
    gives("in line\nafter struct pool;\n| x", &with("struct pool;\n", "x\n"));
    gives("in line\nreplace #ifdef ODD #1/2\n| #if 0", &PROGRAM.replacen("#ifdef ODD", "#if 0", 1));
}

#[test]
fn edits_at_one_place_keep_their_order() {
    gives("in Pool::work\nbegin\n| a();\nbegin\n| b();", &with("const\n{\n", "  a();\n  b();\n"));
}

#[test]
fn an_anchor_that_does_not_hold_names_itself() {
    let refused = |edits: &str, why: &str| {
        let error = edited(edits).expect_err(edits);
        assert!(error.contains(why) && error.contains("t.edits:"), "{error}");
    };
    refused("in Pool::work\nbefore gone (\n| x();", "p.cc: anchor `in Pool::work: before gone (`");
    refused("in Pool::work\nbefore gone (\n| x();", "not found");
    refused("in Pool::gone\nbegin\n| x();", "its scope: not found");
    refused("in Pool::work\nbefore got\n| x();", "found 4 times, expected 1");
    refused("in Pool::work\nbefore got #1/3\n| x();", "found 4 times, expected 3");
    refused("in Pool::work\nbefore drop (\n| x();", "another statement without braces controls");
    refused("in Pool::work\ninto drop (\n| x();", "controls no block");
    refused("in Pool::work\nreplace got == 0\n| x\nreplace got == #1/1\n| y", "overlaps");
    refused("in Pool::work\nbegin", "has no text");
    refused("begun\n| x();", "`begun` is not an anchor");
    refused("| x();", "text without an anchor");
    refused("before a #0/1\n| x();", "not of the form");
}

#[test]
fn a_tree_follows_its_integration() {
    let dir = tempfile::tempdir().expect("make a directory");
    let [integration, pristine, tree] = ["integration", "pristine", "tree"].map(|name| dir.path().join(name));
    for made in [&integration.join("files/new"), &pristine, &tree] {
        fs::create_dir_all(made).expect("make a directory");
    }
    for copy in [&pristine, &tree] {
        fs::write(copy.join("p.cc"), PROGRAM).expect("write a file");
        fs::write(copy.join("q.cc"), PROGRAM).expect("write a file");
    }
    fs::write(integration.join("files/new/y.h"), "y").expect("write a file");
    let apply = |edits: &str| {
        fs::write(integration.join("a.edits"), edits).expect("write the edits");
        let read = Integration::read(&integration).expect("the edits are well-formed");
        (read.digest().to_owned(), read.apply(&pristine, &tree))
    };
    let text = |name: &str| fs::read_to_string(tree.join(name)).expect("read a file");

    let both = "file p.cc\nend\n| x\nfile q.cc\nend\n| x\n";
    let (first, applied) = apply(both);
    assert_eq!(applied.expect("applies").written, ["new/y.h", "p.cc", "q.cc"]);
    assert_eq!(text("new/y.h"), "y");
    let (again, applied) = apply(both);
    assert_eq!((again, applied.expect("applies").written), (first.clone(), Vec::new()));

    fs::remove_dir_all(integration.join("files")).expect("remove the files");
    let (other, applied) = apply("file p.cc\nend\n| y\n");
    assert_ne!(first, other);
    assert_eq!(applied.expect("applies").written, ["new/y.h", "p.cc", "q.cc"]);
    assert_eq!((text("p.cc"), text("q.cc")), (format!("{PROGRAM}y\n"), PROGRAM.to_owned()));
    assert!(!tree.join("new/y.h").exists());

    let (_, applied) = apply("file p.cc\nend\n| z\nfile q.cc\nin gone\nend\n| z\n");
    applied.expect_err("an anchor is gone");
    assert_eq!(text("p.cc"), format!("{PROGRAM}y\n"), "nothing is written when an anchor does not hold");
}
