//! `patch build --pid N`: a package of ours in a directory, and packages of it without its diffs, of which the program runs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::server::bound_command;

const PROGRAM: &str = "\
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
struct state { long calls; };
static struct state *state;
__attribute__((noipa)) int count(void) { return ++state->calls; }
__attribute__((noipa)) int answer(void) { return 1; }
struct other { int first; };
static struct other *other;
int main(void) {
    state = calloc(1, sizeof *state);
    other = calloc(1, sizeof *other);
    while (count() + other->first) {
        printf(\"%d\\n\", answer());
        fflush(stdout);
        usleep(20000);
    }
}
";
const RULES: &str = "\
#!/usr/bin/make -f
build build-arch:
\tgcc -g -O2 -c -o main.o main.c
\tgcc -o sp-live main.o
clean:
\trm -f main.o sp-live
binary binary-arch:
\tinstall -s -D sp-live debian/tmp/usr/bin/sp-live
\tinstall -d debian/tmp/DEBIAN
\tdpkg-gencontrol
\tdpkg-deb --root-owner-group -Znone --build debian/tmp ..
";
const FIX: &str = "\
Description: the right answer (CVE-2026-11111)
--- a/main.c
+++ b/main.c
@@ -7 +7 @@
-__attribute__((noipa)) int answer(void) { return 1; }
+__attribute__((noipa)) int answer(void) { return 2; }
";
const LAYOUT: &str = "\
Description: counts from another member (CVE-2026-22222)
--- a/main.c
+++ b/main.c
@@ -4 +4 @@
-struct state { long calls; };
+struct state { long begin; long calls; };
";
const SIZE: &str = "\
Description: a smaller number (CVE-2026-33333)
--- a/main.c
+++ b/main.c
@@ -8 +8 @@
-struct other { int first; };
+struct other { short first; };
";
/// Limit of the time until an effect is seen.
const EFFECT_MAX: Duration = Duration::from_secs(30);

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Makes a source package with a series.
fn source(dir: &Path, series: &[(&str, &str)]) {
    let tree = dir.join("sp-live-1.0");
    let write = |name: &str, text: &str| {
        let path = tree.join(name);
        fs::create_dir_all(path.parent().expect("it has a directory")).expect("make a directory");
        fs::write(path, text).expect("write a file");
    };
    write("main.c", PROGRAM);
    run(Command::new("tar").args(["-czf", "sp-live_1.0.orig.tar.gz", "sp-live-1.0"]).current_dir(dir));
    write("debian/source/format", "3.0 (quilt)\n");
    let stanza = "Package: sp-live\nArchitecture: any\nDescription: x\n";
    write("debian/control", &format!("Source: sp-live\nMaintainer: A <a@b.invalid>\n\n{stanza}"));
    let trailer = "  * x\n\n -- A <a@b.invalid>  Fri, 03 Apr 2026 14:29:32 +0200\n";
    let entry = |version: &str| format!("sp-live ({version}) stable; urgency=low\n\n{trailer}\n");
    write("debian/changelog", &(entry("1.0-2") + &entry("1.0-1")));
    write("debian/rules", RULES);
    run(Command::new("chmod").arg("+x").arg(tree.join("debian/rules")));
    for (name, text) in series {
        write(&format!("debian/patches/{name}"), text);
    }
    let names: String = series.iter().map(|(name, _)| format!("{name}\n")).collect();
    write("debian/patches/series", &names);
    run(Command::new("dpkg-source").arg("-b").arg(&tree).current_dir(dir));
    fs::remove_dir_all(tree).expect("remove the tree");
}

/// The older program, which prints its answer again and again.
struct Older {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Older {
    fn start(program: &Path) -> Older {
        let mut child = bound_command(program).stdout(Stdio::piped()).spawn().expect("start the program");
        let lines = BufReader::new(child.stdout.take().expect("its output is a pipe")).lines();
        Older { child, lines }
    }

    #[track_caller]
    fn assert_answers(&mut self, wanted: &str) {
        let begin = Instant::now();
        while begin.elapsed() < EFFECT_MAX {
            let line = self.lines.next().expect("the program runs").expect("read its output");
            if line == wanted {
                return;
            }
        }
        panic!("the program never answers {wanted}");
    }
}

impl Drop for Older {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_process_gets_every_diff_of_the_newest_version_that_can_be_live() {
    let dir = tempfile::tempdir().expect("make a directory");
    let sources = dir.path().join("packages");
    fs::create_dir(&sources).expect("make a directory");
    source(&sources, &[("fix.patch", FIX), ("layout.patch", LAYOUT), ("size.patch", SIZE)]);
    let stillpoint = |arguments: &[&str]| Stillpoint::new().arg("patch").args(arguments.iter().copied());
    let place = sources.display().to_string();
    let made = ["target", "--debian", "sp-live", "--sources", &place, "--shipped", "without:fix,layout,size"];
    let made = stillpoint(&made).args(["--packages", &place]).json().succeed().json().pop().expect("a result");
    let version = made["built-version"].as_str().expect("a version");
    assert!(version.starts_with("1.0-2~"), "lower than 1.0-2: {version}");
    let package = sources.join(format!("sp-live_{version}_amd64.deb"));
    run(Command::new("dpkg-deb").arg("--extract").arg(package).arg(dir.path()));
    let program = dir.path().join("usr/bin/sp-live");
    let mut older = Older::start(&program);
    older.assert_answers("1");
    // the usual case: the file was removed
    fs::remove_file(&program).expect("remove the program");
    let pid = older.child.id().to_string();
    let patch = dir.path().join("fix.patch").display().to_string();
    let refused = stillpoint(&["build", "--pid", &pid, "--sources", &place, "--complete", "--output", &patch]).run();
    assert_eq!(refused.code, Some(3), "{refused}");
    let built = stillpoint(&["build", "--pid", &pid, "--sources", &place, "--output", &patch]).json().succeed();
    let built = built.json().pop().expect("a result");
    assert_eq!(built["diffs"], serde_json::json!(["fix.patch"]));
    assert_eq!(built["cves"], serde_json::json!(["CVE-2026-11111"]), "the others are not fixed");
    let left = &built["left_out"][0];
    assert_eq!((&left["diff"], &left["code"]), (&"layout.patch".into(), &"type-layout-changed".into()), "{built}");
    let proposed = left["try"].as_str().expect("an option may bring it in");
    assert!(proposed.starts_with("--shadow-member state.begin, "), "{proposed}");
    let with_member = ["build", "--pid", &pid, "--sources", &place, "--shadow-member", "state.begin", "--dry-run"];
    let more = stillpoint(&with_member).json().succeed().json().pop().expect("a result");
    assert_eq!(more["diffs"], serde_json::json!(["fix.patch", "layout.patch"]), "{more}");
    assert_eq!(more["left_out"][0]["diff"], "size.patch", "{more}");
    older.assert_answers("1");
    stillpoint(&["apply", &patch, "--pid", &pid]).succeed();
    older.assert_answers("2");
    stillpoint(&["revert", "--pid", &pid]).succeed();
    older.assert_answers("1");
}
