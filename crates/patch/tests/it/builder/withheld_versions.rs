//! Versions that the archive lists and does not serve: the real archive behind a proxy that answers 404 for chosen
//! files.

use serde_json::Value;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};
use stillpoint_patch_builder::{Builder, Cache, Error, Parts};
use stillpoint_testing::Unavailable;
use stillpoint_testing::withholding::{Proxy, Withheld};

/// Small source packages; the test needs one with two served versions.
const CANDIDATES: [&str; 3] = ["memcached", "redis", "sudo"];
/// A package with few build dependencies, built within seconds.
const SMALL: (&str, &str) = ("tree", "tree");

/// One call of `stillpoint patch target` with a cache of its own.
struct Call {
    status: Option<i32>,
    events: Vec<Value>,
    stderr: String,
}

fn target(proxy: &str, cache: &Path, arguments: &[&str]) -> Call {
    let mut command = Command::new(stillpoint_testing::binary::stillpoint());
    command.args(["--json", "patch", "target", "--cache"]).arg(cache).arg("--debian").args(arguments);
    command.env("http_proxy", proxy).env_remove("no_proxy");
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stdout = String::from_utf8(stdout).unwrap();
    let events = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    Call { status: status.code(), events, stderr: String::from_utf8(stderr).unwrap() }
}

impl Call {
    #[track_caller]
    fn taken(&self) -> &str {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        self.events.last().unwrap()["version"].as_str().unwrap()
    }

    fn choice(&self) -> Option<&Value> {
        self.events.iter().find(|e| e["event"] == "version-chosen")
    }
}

/// Returns the reason why no proxy can be placed before the archive here.
fn cannot_run() -> Option<String> {
    let dump = Command::new("apt-config").arg("dump").output().ok()?;
    let dump = String::from_utf8_lossy(&dump.stdout).into_owned();
    let proxies = dump.lines().find(|l| l.starts_with("Acquire::http::Proxy") && !l.ends_with("\"\";"));
    if let Some(line) = proxies {
        return Some(format!("apt has a proxy of its own: {line}"));
    }
    let sources = ["/etc/apt/sources.list".into(), PathBuf::from("/etc/apt/sources.list.d/debian.sources")];
    let plain = sources.iter().any(|path| fs::read_to_string(path).is_ok_and(|text| text.contains("http://")));
    (!plain).then(|| "the archive is not reached by plain http".into())
}

/// A package and two versions of it, the newest first, both listed, and both served as source and binaries.
type TwoVersions = (&'static str, String, String);

fn package_with_two_versions() -> Result<TwoVersions, Unavailable> {
    static FOUND: OnceLock<Result<TwoVersions, Unavailable>> = OnceLock::new();
    FOUND.get_or_init(look_for_two_versions).clone()
}

fn look_for_two_versions() -> Result<TwoVersions, Unavailable> {
    let dir = tempfile::tempdir().unwrap();
    let builder = Builder::new(Cache::at(dir.path()).unwrap(), 1, &|_| {});
    let mut withheld = false;
    for package in CANDIDATES {
        let listed = match builder.fetch_source(package, Some("0"), Parts::Source) {
            Err(Error::NoSuchVersion { available, .. }) => available,
            other => panic!("version 0 of {package}: {other:?}"),
        };
        let versions: Vec<String> = listed.split(", ").map(str::to_owned).collect();
        let [newest, older, ..] = &versions[..] else { continue };
        let served = |version| match builder.fetch_source(package, Some(version), Parts::SourceAndBinaries) {
            Ok(_) => true,
            Err(Error::Withheld { .. }) => false,
            Err(error) => panic!("{package} {version}: {error}"),
        };
        if served(newest) && served(older) {
            return Ok((package, newest.clone(), older.clone()));
        }
        withheld = true;
    }
    let why = format!("the archive serves two versions of none of {CANDIDATES:?}");
    Err(if withheld { Unavailable::Withheld(why) } else { Unavailable::Missing(why) })
}

fn without_epoch(version: &str) -> &str {
    version.split_once(':').map_or(version, |(_, rest)| rest)
}

/// Returns a test for the source files of a version: its description and its `.debian.tar`.
fn is_source_of(package: &str, version: &str) -> impl Fn(&str) -> bool + Send + 'static {
    let start = format!("{package}_{}.d", without_epoch(version));
    move |file| file.starts_with(&start)
}

fn is_binary_of(version: &str) -> impl Fn(&str) -> bool + Send + 'static {
    let part = format!("_{}_", without_epoch(version));
    move |file| file.contains(&part) && file.ends_with(".deb")
}

/// Sets the age of package lists.
fn age_lists(cache: &Path, by: Duration) {
    let apt = fs::read_dir(cache.join("apt")).unwrap().next().unwrap().unwrap().path();
    let stamp = File::options().write(true).open(apt.join("updated")).unwrap();
    stamp.set_modified(SystemTime::now() - by).unwrap();
}

/// Returns an address at which no server listens.
fn dead_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn the_newest_version_that_is_served_is_taken() {
    if let Some(why) = cannot_run() {
        stillpoint_testing::skip!("{why}");
    }
    let (package, newest, older) = match package_with_two_versions() {
        Ok(found) => found,
        Err(why) => return stillpoint_testing::skipped(why),
    };
    let proxy = Proxy::start(0).expect("a port");
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path();
    let at = |version: &str| format!("{package}={version}");

    // without a network there is no answer, so no version counts as withheld
    let unreachable = target(&dead_address(), cache, &[package]);
    assert_eq!(unreachable.status, Some(1));
    assert!(!unreachable.stderr.contains("served") && !unreachable.stderr.contains("try:"), "{}", unreachable.stderr);

    proxy.withhold(is_source_of(package, &newest));
    let call = target(&proxy.url(), cache, &[package]);
    assert_eq!(call.taken(), older);
    let choice = call.choice().unwrap_or_else(|| panic!("no event says it: {:?}", call.events));
    assert_eq!((&choice["package"], &choice["taken"]), (&package.into(), &older.as_str().into()));
    assert_eq!(choice["withheld"][0]["version"], newest);
    let missing = choice["withheld"][0]["missing"].as_str().unwrap();
    assert!(missing.starts_with(&format!("{package}_")) && missing.ends_with(": 404"), "{missing}");

    // known facts about the lists need no network
    let again = target(&dead_address(), cache, &[package]);
    assert_eq!(again.taken(), older);

    // a request for this version is an error that names the served one
    let call = target(&proxy.url(), cache, &[&at(&newest)]);
    assert_eq!(call.status, Some(1));
    assert!(
        call.stderr.contains(&format!("{package} {newest} is listed and not served ({package}_")),
        "{}",
        call.stderr
    );
    assert!(call.stderr.ends_with(&format!("try: --debian {}\n", at(&older))), "{}", call.stderr);
    assert_eq!(call.events.last().unwrap()["try"], format!("--debian {}", at(&older)));

    // a version that was never listed is another error
    let call = target(&proxy.url(), cache, &[&at("0~never")]);
    assert_eq!(call.status, Some(1));
    assert!(call.stderr.contains(&format!("{package} 0~never is not in the archive")), "{}", call.stderr);
    assert!(!call.stderr.contains("served"), "{}", call.stderr);

    // a network failure is no evidence about a version
    let call = target(&dead_address(), cache, &[&at(&newest)]);
    assert_eq!(call.status, Some(1));
    assert!(!call.stderr.contains("served") && !call.stderr.contains("try:"), "{}", call.stderr);

    // with newer lists the version is checked again
    proxy.withhold(|_| false);
    assert_eq!(target(&proxy.url(), cache, &[package]).taken(), older, "the record is as old as the lists");
    age_lists(cache, Duration::from_secs(7 * 3600));
    let call = target(&proxy.url(), cache, &[package]);
    assert_eq!((call.taken(), call.choice()), (newest.as_str(), None));

    // and cached files are used when the archive no longer has them
    proxy.withhold(is_source_of(package, &newest));
    assert_eq!(target(&proxy.url(), cache, &[&at(&newest)]).taken(), newest);
    assert_eq!(target(&proxy.url(), cache, &[package]).taken(), newest);

    // lists that were truncated are fetched again
    let lists = fs::read_dir(cache.join("apt")).unwrap().next().unwrap().unwrap().path().join("lists");
    for list in fs::read_dir(lists).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
        File::options().write(true).open(&list).unwrap().set_len(0).unwrap();
    }
    target(&proxy.url(), cache, &[SMALL.0]).taken();
}

#[test]
fn source_and_binaries_are_served_together_or_not_at_all() {
    if let Some(why) = cannot_run() {
        stillpoint_testing::skip!("{why}");
    }
    let (package, newest, older) = match package_with_two_versions() {
        Ok(found) => found,
        Err(why) => return stillpoint_testing::skipped(why),
    };
    let proxy = Proxy::start(0).expect("a port");
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let program = if package == "redis" { "redis-check-rdb" } else { package };
    let output = dir.path().join("out");
    let prebuilt = ["--prebuilt", "--program", program, "--output", output.to_str().unwrap()];
    proxy.withhold(is_binary_of(&newest));

    // only its source is needed
    assert_eq!(target(&proxy.url(), &cache, &[package]).taken(), newest);
    let call = target(&proxy.url(), &cache, &[&[package], &prebuilt[..]].concat());
    assert_eq!(call.taken(), older);
    let missing = call.choice().unwrap()["withheld"][0]["missing"].as_str().unwrap();
    assert!(missing.ends_with(".deb: 404"), "{missing}");
    assert!(output.join(program).is_file());
    let call = target(&proxy.url(), &cache, &[&[format!("{package}={newest}").as_str()], &prebuilt[..]].concat());
    assert_eq!(call.status, Some(1));
    assert!(call.stderr.ends_with(&format!("try: --debian {package}={older}\n")), "{}", call.stderr);

    // lists that are some minutes old are fetched again before a version counts as withheld
    let cache = dir.path().join("other");
    proxy.withhold(|_| true);
    assert_ne!(target(&proxy.url(), &cache, &[package]).status, Some(0), "no lists are served");
    proxy.withhold(|_| false);
    assert_eq!(target(&proxy.url(), &cache, &[&format!("{package}={older}")]).taken(), older);
    age_lists(&cache, Duration::from_secs(30 * 60));
    proxy.withhold(is_source_of(package, &newest));
    let before = proxy.refused();
    assert_eq!(target(&proxy.url(), &cache, &[package]).taken(), older);
    let twice = proxy.refused() - before;
    let once = {
        age_lists(&cache, Duration::from_secs(7 * 3600));
        let before = proxy.refused();
        assert_eq!(target(&proxy.url(), &cache, &[package]).taken(), older);
        proxy.refused() - before
    };
    assert_eq!(twice, 2 * once, "with old lists the files are asked for, and with new ones again");
}

/// Withholds the release's own packages and build dependencies: a root consists of served versions, each with its
/// siblings.
#[test]
#[ignore = "full tier: a release and a package are installed several times, seven minutes of a processor"]
fn a_clean_root_is_made_without_the_newest_version_of_any_package() {
    if let Some(why) = cannot_run() {
        stillpoint_testing::skip!("{why}");
    }
    if !rustix::process::geteuid().is_root() {
        stillpoint_testing::skip!("a clean root needs root");
    }
    let proxy = Proxy::start(0).expect("a port");
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let (package, program) = SMALL;
    target(&proxy.url(), &cache, &[package]).taken();
    let apt = fs::read_dir(cache.join("apt")).unwrap().next().unwrap().unwrap().path();
    let withheld = Withheld::newest_listed(Some(&apt.join("apt.conf"))).expect("the lists");
    assert!(withheld.count() > 10, "the archive lists next to nothing in two versions: {withheld:?}");
    proxy.withhold(move |file| withheld.covers(file));
    let output = dir.path().join("out");
    let call = target(&proxy.url(), &cache, &[package, "--program", program, "--output", output.to_str().unwrap()]);
    call.taken();
    assert!(output.join(program).is_file());
    assert!(proxy.refused() > 0, "nothing that was withheld was wanted");
    let left_out = call.events.iter().find(|e| e["event"] == "dependencies-left-out");
    let left_out = left_out.unwrap_or_else(|| panic!("no event says it: {:?}", call.events));
    assert!(!left_out["packages"].as_array().unwrap().is_empty());
}
