//! `stillpoint patch upgrade` on two processes of a server of ours: an older version runs, a newer one is installed. The whole way is taken, with
//! a package that is built in a clean root.

use super::scan::{Machine, run};
use nix::sys::ptrace;
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::server::ChildGuard;
use stillpoint_patch_tests::{skip, wait};
use stillpoint_testing::port::free_port;

const PACKAGE: &str = "sp-server";
const CVE: &str = "CVE-2026-11111";
/// Everything that may be wrong with other processes of this machine.
const ACCEPT: &str = "no-right,other-root,other-mounts,unreadable,no-package,altered,not-in-archive";

const SERVER: &str = r#"
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
int bounded(int length);
int main(int count, char **words) {
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(words[1])) };
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (count < 2 || bind(listener, (void *)&address, sizeof address) || listen(listener, 8)) return 1;
    for (;;) {
        char text[32] = { 0 };
        int client = accept(listener, 0, 0);
        if (read(client, text, sizeof text - 1) > 0) dprintf(client, "%d\n", bounded(atoi(text)));
        close(client);
    }
}
"#;
const BOUND: &str = "int bounded(int length) {\n    if (length < 0)\n        return 0;\n    return length;\n}\n";
const FIX: &str = "\
Description: CVE-2026-11111, bound the length
--- a/bound.c
+++ b/bound.c
@@ -1,5 +1,7 @@
 int bounded(int length) {
     if (length < 0)
         return 0;
+    if (length > 16)
+        return 16;
     return length;
 }
";
const RULES: &str = "\
#!/usr/bin/make -f
build build-arch:
\tgcc -g -O2 -c -o server.o server.c
\tgcc -g -O2 -c -o bound.o bound.c
\tgcc -o sp-server server.o bound.o
binary binary-arch binary-indep build-indep clean:
";

fn changelog(version: &str) -> String {
    let entry = |version: &str, text: &str, date: &str| {
        format!("sp-server ({version}) stable; urgency=low\n\n  * {text}\n\n -- A <a@b.invalid>  {date}\n\n")
    };
    let first = entry("1-1", "First.", "Mon, 02 Jan 2023 13:06:21 +0100");
    let fixed = format!("{CVE}: bound the length");
    match version {
        "1-1" => first,
        _ => entry(version, &fixed, "Fri, 03 Apr 2026 14:29:32 +0200") + &first,
    }
}

/// Makes the source package of a version; the same bytes each time, so that its builds stay in the cache.
fn source(directory: &Path, version: &str) {
    let tree = directory.join("sp-server-1");
    let write = |name: &str, text: &str| {
        let path = tree.join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("make a directory");
        fs::write(path, text).expect("write a source");
    };
    write("server.c", SERVER);
    write("bound.c", BOUND);
    let same = ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX"];
    let archive = directory.join("sp-server_1.orig.tar.xz");
    run(Command::new("tar").args(same).arg("-cJf").arg(archive).arg("-C").arg(directory).arg("sp-server-1"));
    write("debian/source/format", "3.0 (quilt)\n");
    let control =
        "Source: sp-server\nMaintainer: A <a@b.invalid>\n\nPackage: sp-server\nArchitecture: any\nDescription: x\n";
    write("debian/control", control);
    write("debian/changelog", &changelog(version));
    write("debian/rules", RULES);
    run(Command::new("chmod").arg("755").arg(tree.join("debian/rules")));
    if version != "1-1" {
        write("debian/patches/series", "bound.patch\n");
        write("debian/patches/bound.patch", FIX);
    }
    run(Command::new("dpkg-source").arg("-b").arg(&tree).current_dir(directory));
    fs::remove_dir_all(tree).expect("remove the tree");
}

/// Makes a binary package with a program.
fn package(directory: &Path, version: &str, program: &Path) -> PathBuf {
    let tree = directory.join(format!("tree-{version}"));
    let (bin, doc) = (tree.join("usr/bin"), tree.join("usr/share/doc").join(PACKAGE));
    for made in [&bin, &doc, &tree.join("DEBIAN")] {
        fs::create_dir_all(made).expect("make a directory");
    }
    let fields = "Architecture: amd64\nMaintainer: A <a@b.invalid>\nDescription: x\n";
    fs::write(tree.join("DEBIAN/control"), format!("Package: {PACKAGE}\nVersion: {version}\n{fields}")).expect("write");
    fs::write(doc.join("changelog.Debian"), changelog(version)).expect("write the changelog");
    run(Command::new("cp").arg(program).arg(bin.join(PACKAGE)));
    let deb = directory.join(format!("{PACKAGE}_{version}_amd64.deb"));
    run(Command::new("dpkg-deb").args(["--root-owner-group", "-Znone", "--build"]).args([&tree, &deb]));
    deb
}

/// Running server.
struct Server {
    child: ChildGuard,
    port: u16,
}

impl Server {
    fn start(machine: &Machine) -> Server {
        let port = free_port();
        let mut command = machine.command(Path::new("/usr/bin/sp-server"));
        let child = command.arg(port.to_string()).spawn().expect("start the server");
        let server = Server { child: ChildGuard::from_child(child), port };
        wait::until("the server to serve", || TcpStream::connect(("127.0.0.1", port)).ok());
        server
    }

    /// Returns the server's answer to a length.
    fn bounded(&self, length: u32) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connect");
        stream.write_all(length.to_string().as_bytes()).expect("ask");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read the answer");
        answer.trim_end().to_owned()
    }

    fn pid(&self) -> i32 {
        self.child.pid()
    }
}

/// Calls the command in the copy of the machine; returns the exit code, its result, and all that it printed.
fn upgrade(machine: &Machine, sources: &Path, more: &[&str]) -> (Option<i32>, Value, String) {
    let directory = sources.display().to_string();
    let arguments = ["--json", "patch", "upgrade", "--package", PACKAGE, "--accept", ACCEPT, "--sources", &directory];
    let (code, text) = machine.stillpoint(&[&arguments[..], more].concat());
    let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let result = lines.find(|line| line["event"] == "upgrade").unwrap_or_else(|| panic!("no result: {text}"));
    (code, result, text)
}

/// Returns the pids of a state.
fn in_state(result: &Value, state: &str) -> Vec<i64> {
    let files = result["files"].as_array().expect("a list");
    let rows = files.iter().filter(|row| row["state"] == state);
    let pids = rows.flat_map(|row| row["processes"].as_array().expect("a list")).filter_map(|one| one["pid"].as_i64());
    let mut pids: Vec<i64> = pids.collect();
    pids.sort_unstable();
    pids
}

#[test]
fn outdated_processes_are_fixed_live_and_a_second_call_finishes_what_is_left() {
    let Some(machine) = Machine::start() else { skip!("this machine lets us mount no overlay") };
    let dir = tempfile::tempdir_in("/tmp").expect("make a directory");
    let path = |name: &str| dir.path().join(name);
    ["1-1", "1-2"].iter().for_each(|version| source(dir.path(), version));
    Stillpoint::new()
        .args(["patch", "target", "--debian", "sp-server=1-1", "--program", PACKAGE, "--sources"])
        .arg(dir.path())
        .arg("--output")
        .arg(path("built"))
        .succeed();
    machine.install(&package(dir.path(), "1-1", &path("built").join(PACKAGE)));
    let servers = [Server::start(&machine), Server::start(&machine)];
    // what is installed matters by its version alone
    machine.install(&package(dir.path(), "1-2", Path::new("/bin/true")));
    run(machine.command(Path::new("/usr/bin/touch")).arg("/var/lib/apt/lists/archive.invalid_InRelease"));
    let mut both = servers.each_ref().map(|server| i64::from(server.pid()));
    both.sort_unstable();

    let (code, predicted, text) = upgrade(&machine, dir.path(), &["--dry-run"]);
    assert_eq!((code, in_state(&predicted, "possible")), (Some(0), both.to_vec()), "{text}");
    assert_eq!(predicted["cves"][CVE][0]["state"], "possible", "{text}");
    assert_eq!(servers.each_ref().map(|server| server.bounded(100)), ["100", "100"]);

    // a debugger is attached to the second one
    let traced = Pid::from_raw(servers[1].pid());
    ptrace::seize(traced, ptrace::Options::empty()).expect("trace the server");
    let (code, partly, text) = upgrade(&machine, dir.path(), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert_eq!(in_state(&partly, "fixed-live"), [i64::from(servers[0].pid())], "{text}");
    assert_eq!(in_state(&partly, "needs-restart"), [i64::from(servers[1].pid())], "{text}");
    let states: Vec<&Value> = partly["cves"][CVE].as_array().expect("a list").iter().map(|row| &row["state"]).collect();
    assert_eq!(states, [&json!("fixed-live"), &json!("needs-restart")], "{text}");
    assert!(text.contains(&format!("process {traced} (sp-server) is not patched: ")), "{text}");
    assert_eq!(servers.each_ref().map(|server| server.bounded(100)), ["16", "100"]);

    ptrace::interrupt(traced).expect("stop the server");
    nix::sys::wait::waitpid(traced, None).expect("wait for the stop");
    ptrace::detach(traced, None).expect("detach");
    let (code, rest, text) = upgrade(&machine, dir.path(), &[]);
    assert_eq!(
        (code, in_state(&rest, "fixed-live"), rest["changed"].as_i64()),
        (Some(0), both.to_vec(), Some(1)),
        "{text}"
    );
    assert_eq!(servers.each_ref().map(|server| server.bounded(100)), ["16", "16"]);

    let sources = dir.path().display().to_string();
    let (_, scanned) = machine.stillpoint(&["--json", "patch", "scan", "--sources", &sources]);
    let scanned: Value = serde_json::from_str(scanned.lines().next().expect("a line")).expect("JSON");
    let found = scanned["findings"].as_array().expect("a list").iter().find(|one| one["package"] == PACKAGE);
    let found = found.unwrap_or_else(|| panic!("no finding: {scanned:#}"));
    assert_eq!(
        (&found["class"], &found["live_patches"][0]["cves"]),
        (&json!("fixed-live"), &json!([CVE])),
        "{found:#}"
    );
    assert_eq!(found["processes"].as_array().map(Vec::len), Some(2), "{found:#}");
}
