//! Packages behind an archive that withholds the newest version of each: the proxy of [`stillpoint_testing::withholding`].

use std::path::Path;
use std::process::{Command, Output};
use stillpoint_testing::packages;
use stillpoint_testing::withholding::{Proxy, Withheld, compare_versions};
use tempfile::TempDir;

/// What the other side of a test does, and prints.
const TASK: &str = "STILLPOINT_WITHHOLDING_TASK";

/// What is asked for, in a process of its own: a proxy is a matter of the environment, and what the archive serves is kept for it.
#[test]
#[ignore = "runs as a child of the other tests"]
fn task() {
    let answer = match std::env::var(TASK).as_deref() {
        Ok("binary") => packages::binary(&["memcached"], None, "usr/bin/memcached")
            .map(|binary| binary.path.ancestors().nth(3).expect("a root").display().to_string()),
        Ok("versions") => packages::versions("memcached").map(|versions| versions.join(" ")),
        Ok("source") => packages::versions_with_source(&["memcached"]).map(|versions| versions.join(" ")),
        other => panic!("no such task: {other:?}"),
    };
    println!("ANSWER {answer:?}");
}

fn ask(task: &str, proxy: &str, cache: &Path) -> String {
    let mut child = Command::new(std::env::current_exe().expect("a test is a program"));
    child.args(["--exact", "task", "--ignored", "--nocapture"]).env(TASK, task);
    let out = child.env("http_proxy", proxy).env("STILLPOINT_CACHE", cache).output().expect("run this program");
    let text = String::from_utf8_lossy(&out.stdout);
    let answer = text.lines().find_map(|line| line.strip_prefix("ANSWER "));
    answer.unwrap_or_else(|| panic!("{}", printed(&out))).to_owned()
}

fn printed(out: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// The two newest versions of memcached that the lists name; nothing where they name one.
fn two_versions() -> Option<[String; 2]> {
    let madison = Command::new("apt-cache").args(["madison", "memcached"]).output().ok()?;
    let text = String::from_utf8_lossy(&madison.stdout).into_owned();
    let mut versions: Vec<String> = text.lines().filter_map(|l| Some(l.split('|').nth(1)?.trim().to_owned())).collect();
    versions.sort_by(|a, b| compare_versions(b, a));
    versions.dedup();
    versions.truncate(2);
    versions.try_into().ok()
}

fn proxy(withheld: Withheld) -> Proxy {
    let parent = std::env::var("http_proxy").ok().filter(|url| !url.is_empty());
    let parent = parent.map(|url| stillpoint_testing::withholding::proxy_address(&url).to_owned());
    Proxy::start(0, withheld, parent).expect("a port is free")
}

#[test]
fn the_version_before_the_withheld_one_is_taken() {
    let Some([newest, older]) = two_versions() else {
        return stillpoint_testing::skipped("the package lists name one version of memcached");
    };
    let cache = TempDir::new().expect("make a directory");
    let all = proxy(Withheld::newest_listed().expect("apt has lists"));
    let binary = ask("binary", &all.url(), cache.path());
    assert!(binary.ends_with(&format!("memcached_{older}\")")), "{binary}");
    assert_eq!(ask("versions", &all.url(), cache.path()), format!("Ok({older:?})"));
    assert_eq!(ask("source", &all.url(), cache.path()), format!("Ok({older:?})"));
    // An answer belongs to the proxy that it came through.
    let none = proxy(Withheld::default());
    assert_eq!(ask("versions", &none.url(), cache.path()), format!("Ok(\"{newest} {older}\")"));
}

#[test]
fn a_version_without_its_source_is_not_taken_where_the_source_is_needed() {
    let Some([newest, older]) = two_versions() else {
        return stillpoint_testing::skipped("the package lists name one version of memcached");
    };
    let cache = TempDir::new().expect("make a directory");
    // Its binary has the same beginning, so the source is named by its own file.
    let source = proxy(Withheld::of([]).with_files([format!("memcached_{newest}.dsc")]));
    assert_eq!(ask("versions", &source.url(), cache.path()), format!("Ok(\"{newest} {older}\")"));
    assert_eq!(ask("source", &source.url(), cache.path()), format!("Ok({older:?})"));
}

#[test]
fn an_archive_that_serves_no_version_withholds_the_package() {
    let Some([newest, older]) = two_versions() else {
        return stillpoint_testing::skipped("the package lists name one version of memcached");
    };
    let cache = TempDir::new().expect("make a directory");
    let names = [newest, older].map(|version| format!("memcached_{version}"));
    let both = proxy(Withheld::of(names.iter().map(String::as_str)));
    for task in ["binary", "versions", "source"] {
        let answer = ask(task, &both.url(), cache.path());
        assert!(answer.starts_with("Err(Withheld("), "{answer}");
    }
}

#[test]
fn a_network_that_fails_withholds_nothing() {
    let cache = TempDir::new().expect("make a directory");
    // Nothing listens on this port.
    let answer = ask("versions", "http://127.0.0.1:1", cache.path());
    assert!(answer.starts_with("Err(Missing("), "{answer}");
}

/// Runs `setup/served.sh` behind a proxy, in a directory of its own.
fn served(proxy: &Proxy, dir: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(stillpoint_testing::workspace_root().join("setup/served.sh"));
    command.args(words).current_dir(dir).env("http_proxy", proxy.url()).output().expect("run setup/served.sh")
}

#[test]
fn setup_takes_the_version_before_the_withheld_one_and_says_so() {
    let Some([newest, older]) = two_versions() else {
        return stillpoint_testing::skipped("the package lists name one version of memcached");
    };
    let dir = TempDir::new().expect("make a directory");
    let all = proxy(Withheld::newest_listed().expect("apt has lists"));
    let out = served(&all, dir.path(), &["apt", "download", "memcached"]);
    assert!(out.status.success(), "{}", printed(&out));
    assert!(dir.path().join(format!("memcached_{older}_amd64.deb")).exists(), "{}", printed(&out));
    assert!(printed(&out).contains(&format!("memcached {newest} is listed, and")), "{}", printed(&out));
    let explicit = served(&all, dir.path(), &["apt", "download", &format!("memcached={newest}")]);
    assert_eq!(explicit.status.code(), Some(75), "{}", printed(&explicit));
}
