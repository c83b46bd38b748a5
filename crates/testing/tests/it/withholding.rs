//! Packages behind an archive that withholds the newest version of each: the proxy of [`stillpoint_testing::withholding`].

use std::path::Path;
use std::process::{Command, Output};
use stillpoint_testing::withholding::{Proxy, Withheld};
use stillpoint_testing::{Unavailable, packages};
use tempfile::TempDir;

/// Task of the child process of a test, which prints the result.
const TASK: &str = "STILLPOINT_WITHHOLDING_TASK";

/// Runs the task in a process of its own: the proxy is set in the environment, and a process keeps the archive's
/// answers.
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
    child.args(["--exact", "withholding::task", "--ignored", "--nocapture"]).env(TASK, task);
    let out = child.env("http_proxy", proxy).env("STILLPOINT_CACHE", cache).output().expect("run this program");
    let text = String::from_utf8_lossy(&out.stdout);
    let answer = text.lines().find_map(|line| line.strip_prefix("ANSWER "));
    answer.unwrap_or_else(|| panic!("{}", printed(&out))).to_owned()
}

fn printed(out: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// Returns the two newest versions of memcached that the archive serves.
fn two_versions() -> Result<[String; 2], Unavailable> {
    let versions = packages::versions_with_source(&["memcached"])?;
    match &versions[..] {
        [newest, older, ..] => Ok([newest.clone(), older.clone()]),
        _ => Err(packages::too_few("memcached", &versions)),
    }
}

fn proxy(withheld: Withheld) -> Proxy {
    let proxy = Proxy::start(0).expect("a port is free");
    proxy.withhold(move |file| withheld.covers(file));
    proxy
}

#[test]
fn the_version_before_the_withheld_one_is_taken() {
    let cache = TempDir::new().expect("make a directory");
    let [newest, older] = match two_versions() {
        Ok(versions) => versions,
        Err(why) => return stillpoint_testing::skipped(why),
    };
    let all = proxy(Withheld::newest_listed(None).expect("apt has lists"));
    let binary = ask("binary", &all.url(), cache.path());
    assert!(binary.contains(&format!("/memcached_{older}-")), "{binary}");
    assert_eq!(ask("versions", &all.url(), cache.path()), format!("Ok({older:?})"));
    assert_eq!(ask("source", &all.url(), cache.path()), format!("Ok({older:?})"));
    // An answer is valid only for the proxy that it came through.
    let none = proxy(Withheld::default());
    assert_eq!(ask("versions", &none.url(), cache.path()), format!("Ok(\"{newest} {older}\")"));
}

#[test]
fn a_version_without_its_source_is_not_taken_where_the_source_is_needed() {
    let cache = TempDir::new().expect("make a directory");
    let [newest, older] = match two_versions() {
        Ok(versions) => versions,
        Err(why) => return stillpoint_testing::skipped(why),
    };
    // The name of its binary begins in the same way, so the source is named by its own file.
    let source = proxy(Withheld::of([]).with_files([format!("memcached_{newest}.dsc")]));
    assert_eq!(ask("versions", &source.url(), cache.path()), format!("Ok(\"{newest} {older}\")"));
    assert_eq!(ask("source", &source.url(), cache.path()), format!("Ok({older:?})"));
}

#[test]
fn an_archive_that_serves_no_version_withholds_the_package() {
    let cache = TempDir::new().expect("make a directory");
    let [newest, older] = match two_versions() {
        Ok(versions) => versions,
        Err(why) => return stillpoint_testing::skipped(why),
    };
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
    // No process listens on this port.
    let answer = ask("versions", "http://127.0.0.1:1", cache.path());
    assert!(answer.starts_with("Err(Missing("), "{answer}");
}

/// Runs `setup/served.sh` with a proxy, in a directory of its own.
fn served(proxy: &Proxy, dir: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(stillpoint_testing::workspace_root().join("setup/served.sh"));
    command.args(words).current_dir(dir).env("http_proxy", proxy.url()).output().expect("run setup/served.sh")
}

#[test]
fn setup_takes_the_version_before_the_withheld_one_and_says_so() {
    let [newest, older] = match two_versions() {
        Ok(versions) => versions,
        Err(why) => return stillpoint_testing::skipped(why),
    };
    let dir = TempDir::new().expect("make a directory");
    let all = proxy(Withheld::newest_listed(None).expect("apt has lists"));
    let out = served(&all, dir.path(), &["apt", "download", "memcached"]);
    assert!(out.status.success(), "{}", printed(&out));
    assert!(dir.path().join(format!("memcached_{older}_amd64.deb")).exists(), "{}", printed(&out));
    assert!(printed(&out).contains(&format!("memcached {newest} is listed, and")), "{}", printed(&out));
    let explicit = served(&all, dir.path(), &["apt", "download", &format!("memcached={newest}")]);
    assert_eq!(explicit.status.code(), Some(75), "{}", printed(&explicit));
}
