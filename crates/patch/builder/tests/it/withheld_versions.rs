//! Versions that the archive lists and does not serve: the real archive, behind a proxy that answers 404 for chosen files.

use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};
use stillpoint_patch_builder::{Builder, Cache, Error, Parts};

/// Small source packages; one with two versions that are served is wanted.
const CANDIDATES: [&str; 3] = ["memcached", "redis", "sudo"];
/// A package that needs little to be built, and is built within seconds.
const SMALL: (&str, &str) = ("tree", "tree");

type Withheld = Box<dyn Fn(&str) -> bool + Send>;

/// An HTTP proxy that passes requests on, and has no file that is withheld.
struct Proxy {
    address: String,
    withheld: Arc<Mutex<Withheld>>,
    refused: Arc<AtomicUsize>,
}

impl Proxy {
    fn start() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let withheld: Arc<Mutex<Withheld>> = Arc::new(Mutex::new(Box::new(|_| false)));
        let refused = Arc::new(AtomicUsize::new(0));
        let proxy = Proxy { address, withheld: withheld.clone(), refused: refused.clone() };
        // ends with the test's process
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (withheld, refused) = (withheld.clone(), refused.clone());
                // a client that goes away ends its own connection only
                std::thread::spawn(move || serve(client, &withheld, &refused).ok());
            }
        });
        proxy
    }

    fn withhold(&self, withheld: impl Fn(&str) -> bool + Send + 'static) {
        *self.withheld.lock().unwrap() = Box::new(withheld);
    }
}

/// Answers requests of one connection in their order, also when they came at once.
fn serve(client: TcpStream, withheld: &Mutex<Withheld>, refused: &AtomicUsize) -> std::io::Result<()> {
    let mut requests = BufReader::new(client.try_clone()?);
    let mut client = client;
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if requests.read_until(b'\n', &mut head)? == 0 {
                return Ok(());
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let uri = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let file = uri.rsplit('/').next().unwrap_or_default().replace("%2b", "+").replace("%7e", "~");
        if (withheld.lock().unwrap())(&file) {
            refused.fetch_add(1, Ordering::Relaxed);
            client.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        }
        let (status, fields, body) = pass_on(&uri, &head)?;
        let mut answer = format!("{status}\r\nContent-Length: {}\r\n", body.len());
        let passed = ["last-modified:", "content-type:", "content-range:"];
        for field in fields.lines().filter(|l| passed.iter().any(|p| l.to_ascii_lowercase().starts_with(p))) {
            answer += &format!("{field}\r\n");
        }
        client.write_all(format!("{answer}\r\n").as_bytes())?;
        client.write_all(&body)?;
    }
}

/// Asks the server; the answer ends with the connection.
fn pass_on(uri: &str, head: &str) -> std::io::Result<(String, String, Vec<u8>)> {
    let invalid = || std::io::Error::other(format!("a request for {uri}"));
    let (host, path) = uri.strip_prefix("http://").and_then(|rest| rest.split_once('/')).ok_or_else(invalid)?;
    let address = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let mut server = TcpStream::connect(address)?;
    let mut request = format!("GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n");
    let passed = ["range:", "if-range:", "if-modified-since:", "user-agent:"];
    for field in head.lines().filter(|l| passed.iter().any(|p| l.to_ascii_lowercase().starts_with(p))) {
        request += &format!("{field}\r\n");
    }
    server.write_all(format!("{request}\r\n").as_bytes())?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer)?;
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").ok_or_else(invalid)?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let (status, fields) = head.split_once("\r\n").unwrap_or((&head, ""));
    let body = &answer[end + 4..];
    let is_chunked = fields.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if is_chunked { joined(body).ok_or_else(invalid)? } else { body.to_vec() };
    Ok((status.to_owned(), fields.to_owned(), body))
}

/// Puts a body together that comes in chunks.
fn joined(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|w| w == b"\r\n")?;
        let size = std::str::from_utf8(&rest[..end]).ok()?.split(';').next()?.trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        let chunk = rest.get(end + 2..)?.get(..size)?;
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(chunk);
        rest = rest.get(end + 2 + size + 2..)?;
    }
}

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

/// Says why no proxy can stand before the archive here.
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

/// A package and two versions of it, the newest first, both listed, and the older one served as source and binaries.
fn package_with_two_versions() -> Option<(&'static str, String, String)> {
    static FOUND: OnceLock<Option<(&str, String, String)>> = OnceLock::new();
    FOUND.get_or_init(look_for_two_versions).clone()
}

fn look_for_two_versions() -> Option<(&'static str, String, String)> {
    let dir = tempfile::tempdir().unwrap();
    let builder = Builder::new(Cache::at(dir.path()).unwrap(), 1, &|_| {});
    for package in CANDIDATES {
        let listed = match builder.fetch_source(package, Some("0"), Parts::Source) {
            Err(Error::NoSuchVersion { available, .. }) => available,
            other => panic!("version 0 of {package}: {other:?}"),
        };
        let versions: Vec<String> = listed.split(", ").map(str::to_owned).collect();
        if let [newest, older, ..] = &versions[..]
            && builder.fetch_source(package, Some(newest), Parts::SourceAndBinaries).is_ok()
            && builder.fetch_source(package, Some(older), Parts::SourceAndBinaries).is_ok()
        {
            return Some((package, newest.clone(), older.clone()));
        }
    }
    None
}

fn without_epoch(version: &str) -> &str {
    version.split_once(':').map_or(version, |(_, rest)| rest)
}

/// Files of a version: its description and its `.debian.tar`, or its binaries.
fn is_source_of(package: &str, version: &str) -> impl Fn(&str) -> bool + Send + 'static {
    let start = format!("{package}_{}.d", without_epoch(version));
    move |file| file.starts_with(&start)
}

fn is_binary_of(version: &str) -> impl Fn(&str) -> bool + Send + 'static {
    let part = format!("_{}_", without_epoch(version));
    move |file| file.contains(&part) && file.ends_with(".deb")
}

/// Makes package lists as old as given.
fn age_lists(cache: &Path, by: Duration) {
    let apt = fs::read_dir(cache.join("apt")).unwrap().next().unwrap().unwrap().path();
    let stamp = File::options().write(true).open(apt.join("updated")).unwrap();
    stamp.set_modified(SystemTime::now() - by).unwrap();
}

/// An address at which no server listens.
fn dead_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn the_newest_version_that_is_served_is_taken() {
    if let Some(why) = cannot_run() {
        stillpoint_testing::skip!("{why}");
    }
    let Some((package, newest, older)) = package_with_two_versions() else {
        stillpoint_testing::skip!("the archive serves two versions of none of {CANDIDATES:?}");
    };
    let proxy = Proxy::start();
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path();
    let at = |version: &str| format!("{package}={version}");

    // without a network there is no answer, and none about versions
    let unreachable = target(&dead_address(), cache, &[package]);
    assert_eq!(unreachable.status, Some(1));
    assert!(!unreachable.stderr.contains("served") && !unreachable.stderr.contains("try:"), "{}", unreachable.stderr);

    proxy.withhold(is_source_of(package, &newest));
    let call = target(&proxy.address, cache, &[package]);
    assert_eq!(call.taken(), older);
    let choice = call.choice().unwrap_or_else(|| panic!("no event says it: {:?}", call.events));
    assert_eq!((&choice["package"], &choice["taken"]), (&package.into(), &older.as_str().into()));
    assert_eq!(choice["withheld"][0]["version"], newest);
    let missing = choice["withheld"][0]["missing"].as_str().unwrap();
    assert!(missing.starts_with(&format!("{package}_")) && missing.ends_with(": 404"), "{missing}");

    // what is known of the lists needs no network
    let again = target(&dead_address(), cache, &[package]);
    assert_eq!(again.taken(), older);

    // asked for by its version, it is an error that names what is served
    let call = target(&proxy.address, cache, &[&at(&newest)]);
    assert_eq!(call.status, Some(1));
    assert!(
        call.stderr.contains(&format!("{package} {newest} is listed and not served ({package}_")),
        "{}",
        call.stderr
    );
    assert!(call.stderr.ends_with(&format!("try: --debian {}\n", at(&older))), "{}", call.stderr);
    assert_eq!(call.events.last().unwrap()["try"], format!("--debian {}", at(&older)));

    // a version that was never listed is another error
    let call = target(&proxy.address, cache, &[&at("0~never")]);
    assert_eq!(call.status, Some(1));
    assert!(call.stderr.contains(&format!("{package} 0~never is not in the archive")), "{}", call.stderr);
    assert!(!call.stderr.contains("served"), "{}", call.stderr);

    // a network that fails says nothing of a version
    let call = target(&dead_address(), cache, &[&at(&newest)]);
    assert_eq!(call.status, Some(1));
    assert!(!call.stderr.contains("served") && !call.stderr.contains("try:"), "{}", call.stderr);

    // with newer lists the question is open again
    proxy.withhold(|_| false);
    assert_eq!(target(&proxy.address, cache, &[package]).taken(), older, "the record is as old as the lists");
    age_lists(cache, Duration::from_secs(7 * 3600));
    let call = target(&proxy.address, cache, &[package]);
    assert_eq!((call.taken(), call.choice()), (newest.as_str(), None));

    // and what the cache has is used when the archive has it no longer
    proxy.withhold(is_source_of(package, &newest));
    assert_eq!(target(&proxy.address, cache, &[&at(&newest)]).taken(), newest);
    assert_eq!(target(&proxy.address, cache, &[package]).taken(), newest);
}

#[test]
fn source_and_binaries_are_served_together_or_not_at_all() {
    if let Some(why) = cannot_run() {
        stillpoint_testing::skip!("{why}");
    }
    let Some((package, newest, older)) = package_with_two_versions() else {
        stillpoint_testing::skip!("the archive serves two versions of none of {CANDIDATES:?}");
    };
    let proxy = Proxy::start();
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let program = if package == "redis" { "redis-check-rdb" } else { package };
    let output = dir.path().join("out");
    let prebuilt = ["--prebuilt", "--program", program, "--output", output.to_str().unwrap()];
    proxy.withhold(is_binary_of(&newest));

    // only its source is needed
    assert_eq!(target(&proxy.address, &cache, &[package]).taken(), newest);
    let call = target(&proxy.address, &cache, &[&[package], &prebuilt[..]].concat());
    assert_eq!(call.taken(), older);
    let missing = call.choice().unwrap()["withheld"][0]["missing"].as_str().unwrap();
    assert!(missing.ends_with(".deb: 404"), "{missing}");
    assert!(output.join(program).is_file());
    let call = target(&proxy.address, &cache, &[&[format!("{package}={newest}").as_str()], &prebuilt[..]].concat());
    assert_eq!(call.status, Some(1));
    assert!(call.stderr.ends_with(&format!("try: --debian {package}={older}\n")), "{}", call.stderr);

    // lists that are some minutes old are fetched again before a version counts as not served
    let (cache, refused) = (dir.path().join("other"), &proxy.refused);
    proxy.withhold(|_| true);
    assert_ne!(target(&proxy.address, &cache, &[package]).status, Some(0), "no lists are served");
    proxy.withhold(|_| false);
    assert_eq!(target(&proxy.address, &cache, &[&format!("{package}={older}")]).taken(), older);
    age_lists(&cache, Duration::from_secs(30 * 60));
    proxy.withhold(is_source_of(package, &newest));
    let before = refused.load(Ordering::Relaxed);
    assert_eq!(target(&proxy.address, &cache, &[package]).taken(), older);
    let twice = refused.load(Ordering::Relaxed) - before;
    let once = {
        age_lists(&cache, Duration::from_secs(7 * 3600));
        let before = refused.load(Ordering::Relaxed);
        assert_eq!(target(&proxy.address, &cache, &[package]).taken(), older);
        refused.load(Ordering::Relaxed) - before
    };
    assert_eq!(twice, 2 * once, "with old lists the files are asked for, and with new ones again");
}

/// The newest version of every binary package that is listed in two, as the names of files.
fn newest_of_two(apt: &Path) -> HashSet<String> {
    let mut lists = Command::new("/usr/lib/apt/apt-helper");
    lists.arg("cat-file").env("APT_CONFIG", apt.join("apt.conf"));
    for entry in fs::read_dir(apt.join("lists")).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains("_Packages") {
            lists.arg(path);
        }
    }
    let text = String::from_utf8(lists.output().unwrap().stdout).unwrap();
    let mut versions: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    for stanza in text.split("\n\n") {
        let field = |name: &str| stanza.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(": "));
        if let (Some(package), Some(version), Some(file)) = (field("Package"), field("Version"), field("Filename")) {
            versions.entry(package).or_default().push((version, file.rsplit('/').next().unwrap()));
        }
    }
    let newer =
        |a: &str, b: &str| Command::new("dpkg").args(["--compare-versions", a, "gt", b]).status().unwrap().success();
    let mut files = HashSet::new();
    for listed in versions.values().filter(|listed| listed.iter().any(|l| l.0 != listed[0].0)) {
        let newest = listed.iter().fold(listed[0], |best, one| if newer(one.0, best.0) { *one } else { best });
        files.insert(newest.1.to_owned());
    }
    files
}

/// The release itself and build dependencies: a root is made of versions that are served, each with its siblings.
#[test]
fn a_clean_root_is_made_without_the_newest_version_of_any_package() {
    if let Some(why) = cannot_run() {
        stillpoint_testing::skip!("{why}");
    }
    if !rustix::process::geteuid().is_root() {
        stillpoint_testing::skip!("a clean root needs root");
    }
    let proxy = Proxy::start();
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let (package, program) = SMALL;
    target(&proxy.address, &cache, &[package]).taken();
    let apt = fs::read_dir(cache.join("apt")).unwrap().next().unwrap().unwrap().path();
    let withheld = newest_of_two(&apt);
    assert!(withheld.len() > 10, "the archive lists next to nothing in two versions: {withheld:?}");
    proxy.withhold(move |file| withheld.contains(file));
    let output = dir.path().join("out");
    let call = target(&proxy.address, &cache, &[package, "--program", program, "--output", output.to_str().unwrap()]);
    call.taken();
    assert!(output.join(program).is_file());
    assert!(proxy.refused.load(Ordering::Relaxed) > 0, "nothing that was withheld was wanted");
    let left_out = call.events.iter().find(|e| e["event"] == "dependencies-left-out");
    let left_out = left_out.unwrap_or_else(|| panic!("no event says it: {:?}", call.events));
    assert!(!left_out["packages"].as_array().unwrap().is_empty());
}
