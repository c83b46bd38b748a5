//! Proxy for HTTP that answers 404 for chosen versions of Debian packages, and forwards everything else: an archive
//! whose lists name versions that it does not serve.
//!
//! The caller guarantees that clients use plain HTTP to the archive through it (`http_proxy`): it forwards encrypted
//! requests (`CONNECT`) without a check.
//!
//! The proxy guarantees that a withheld version is withheld as a whole: the packages, and all files of its source
//! except upstream's archive, which other versions share.
//!
//! ```
//! use stillpoint_testing::withholding::Withheld;
//! let withheld = Withheld::of(["hello_2.10-3"]);
//! assert!(withheld.covers("/debian/pool/main/h/hello/hello_2.10-3_amd64.deb"));
//! assert!(!withheld.covers("/debian/pool/main/h/hello/hello_2.10-2_amd64.deb"));
//! ```

use percent_encoding::percent_decode_str;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering as Memory};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Time without data after which a peer counts as gone.
const SILENCE_LIMIT: Duration = Duration::from_secs(120);

/// Limit in bytes for a head: no client or server of an archive sends a longer one.
const HEAD_LIMIT: u64 = 64 * 1024;

/// Names and versions that are withheld, as `NAME_VERSION` in names of files (without epoch), and files by their whole names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Withheld(BTreeSet<String>);

impl Withheld {
    /// Takes a `NAME_VERSION` of each package or source package.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Withheld {
        Withheld(names.into_iter().map(str::to_owned).collect())
    }

    /// Adds names of single files.
    #[must_use]
    pub fn with_files(mut self, files: impl IntoIterator<Item = String>) -> Withheld {
        self.0.extend(files);
        self
    }

    /// Returns the newest version of every package that the lists name in more than one, with its source. The lists are
    /// those of this machine, or of a configuration of apt.
    ///
    /// # Errors
    /// apt does not run, or its lists cannot be read.
    pub fn newest_listed(configuration: Option<&Path>) -> Result<Withheld, String> {
        let mut targets = Command::new("apt-get");
        targets.args(["indextargets", "--format", "$(FILENAME)", "Created-By: Packages"]);
        if let Some(path) = configuration {
            targets.env("APT_CONFIG", path);
        }
        let mut text = String::new();
        for list in run(&mut targets)?.lines() {
            text += &run(Command::new("/usr/lib/apt/apt-helper").args(["cat-file", list]))?;
            text.push('\n');
        }
        Ok(Withheld::newest_of(&text))
    }

    /// Returns the newest version of every package that the text of package lists names in more than one, with its
    /// source.
    fn newest_of(text: &str) -> Withheld {
        let mut versions: HashMap<&str, BTreeSet<&str>> = HashMap::new();
        let mut sources = HashMap::new();
        for paragraph in text.split("\n\n") {
            let field = |name: &str| {
                let value = paragraph.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
                value.map(str::trim)
            };
            let (Some(package), Some(version)) = (field("Package"), field("Version")) else { continue };
            versions.entry(package).or_default().insert(version);
            // `NAME`, or `NAME (VERSION)` where the version is another one.
            let source = field("Source").unwrap_or(package);
            let (name, of) = source.split_once(" (").unwrap_or((source, version));
            sources.insert((package, version), file_stem(name, of.trim_end_matches(')')));
        }
        let mut withheld = BTreeSet::new();
        for (package, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
            let newest = versions.iter().max_by(|a, b| compare_versions(a, b)).expect("there is more than one");
            withheld.insert(file_stem(package, newest));
            withheld.extend(sources.get(&(*package, *newest)).cloned());
        }
        Withheld(withheld)
    }

    /// Returns true for the path of a file that is withheld.
    pub fn covers(&self, path: &str) -> bool {
        let file = file_name(path);
        let stem = match file.strip_suffix(".deb") {
            Some(stem) => stem.rsplit_once('_').map(|(stem, _)| stem),
            None => [".dsc", ".debian.tar.xz", ".debian.tar.gz", ".diff.gz", ".tar.xz", ".tar.gz"]
                .iter()
                .find_map(|suffix| file.strip_suffix(suffix)),
        };
        self.0.contains(&file) || stem.is_some_and(|stem| self.0.contains(stem))
    }

    /// Returns the number of names.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// Returns name and version as they begin the name of a file.
fn file_stem(name: &str, version: &str) -> String {
    format!("{name}_{}", version.split_once(':').map_or(version, |(_, rest)| rest))
}

/// Compares versions as Debian defines it (deb-version(7)).
pub fn compare_versions(a: &str, b: &str) -> Ordering {
    let parts = |version: &str| {
        let (epoch, rest) = version.split_once(':').unwrap_or(("0", version));
        let (upstream, revision) = rest.rsplit_once('-').unwrap_or((rest, "0"));
        (epoch.parse().unwrap_or(0_u64), upstream.to_owned(), revision.to_owned())
    };
    let (a, b) = (parts(a), parts(b));
    a.0.cmp(&b.0).then_with(|| compare_parts(&a.1, &b.1)).then_with(|| compare_parts(&a.2, &b.2))
}

/// Compares text and numbers in turn: `~` is before the end, the end before letters, and letters before everything
/// else.
fn compare_parts(mut a: &str, mut b: &str) -> Ordering {
    let weight = |byte: Option<u8>| match byte {
        Some(b'~') => -1,
        None | Some(b'0'..=b'9') => 0,
        Some(letter) if letter.is_ascii_alphabetic() => i32::from(letter),
        Some(other) => i32::from(other) + 256,
    };
    loop {
        let texts = (until(a, |c| c.is_ascii_digit()), until(b, |c| c.is_ascii_digit()));
        for i in 0..texts.0.len().max(texts.1.len()) {
            let (left, right) = (texts.0.as_bytes().get(i).copied(), texts.1.as_bytes().get(i).copied());
            match weight(left).cmp(&weight(right)) {
                Ordering::Equal => {}
                other => return other,
            }
        }
        (a, b) = (&a[texts.0.len()..], &b[texts.1.len()..]);
        let numbers = (until(a, |c| !c.is_ascii_digit()), until(b, |c| !c.is_ascii_digit()));
        (a, b) = (&a[numbers.0.len()..], &b[numbers.1.len()..]);
        let (left, right) = (numbers.0.trim_start_matches('0'), numbers.1.trim_start_matches('0'));
        match left.len().cmp(&right.len()).then_with(|| left.cmp(right)) {
            Ordering::Equal if a.is_empty() && b.is_empty() => return Ordering::Equal,
            Ordering::Equal => {}
            other => return other,
        }
    }
}

fn until(text: &str, ends: impl Fn(char) -> bool) -> &str {
    &text[..text.find(ends).unwrap_or(text.len())]
}

/// Returns the file that a path of a URL names.
fn file_name(path: &str) -> String {
    percent_decode_str(path.rsplit('/').next().unwrap_or_default()).decode_utf8_lossy().into_owned()
}

fn run(command: &mut Command) -> Result<String, String> {
    let out = command.output().map_err(|e| format!("run {:?}: {e}", command.get_program()))?;
    let errors = String::from_utf8_lossy(&out.stderr);
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned()).ok_or_else(|| errors.into_owned())
}

/// A proxy on a port of 127.0.0.1. It serves for the rest of the process.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// Function that returns true for the name of a file that is withheld.
type Filter = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// State that all connections of a proxy share.
struct Shared {
    filter: RwLock<Filter>,
    refused: AtomicUsize,
    /// `HOST:PORT` of the proxy that this one uses.
    parent: Option<String>,
}

impl Proxy {
    /// Starts a proxy, on `port` or on any free one (0), which forwards everything. If `http_proxy` is set, it uses
    /// that proxy in turn.
    ///
    /// # Errors
    /// The port cannot be used.
    pub fn start(port: u16) -> io::Result<Proxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = listener.local_addr()?;
        let parent = std::env::var("http_proxy").ok().filter(|url| !url.is_empty());
        let parent = parent.map(|url| url.trim_start_matches("http://").trim_end_matches('/').to_owned());
        let shared = Shared { filter: RwLock::new(Box::new(|_| false)), refused: AtomicUsize::new(0), parent };
        let shared = Arc::new(shared);
        let for_clients = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&for_clients);
                // A client or server that breaks off ends only its own connection.
                std::thread::spawn(move || drop(serve(client, &shared)));
            }
        });
        Ok(Proxy { address, shared })
    }

    /// Answers 404 from now on for files whose name matches `filter`, and only for those.
    pub fn withhold(&self, filter: impl Fn(&str) -> bool + Send + Sync + 'static) {
        *self.shared.filter.write().unwrap_or_else(PoisonError::into_inner) = Box::new(filter);
    }

    /// Returns the number of requests for files that are withheld.
    pub fn refused(&self) -> usize {
        self.shared.refused.load(Memory::Relaxed)
    }

    /// Returns the value for `http_proxy`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Shared {
    fn withholds(&self, path: &str) -> bool {
        let withheld = (self.filter.read().unwrap_or_else(PoisonError::into_inner))(&file_name(path));
        self.refused.fetch_add(withheld.into(), Memory::Relaxed);
        withheld
    }
}

/// Reads the lines of a request or an answer up to the empty one; `None` if the peer has ended.
fn head(from: &mut impl BufRead) -> io::Result<Option<Vec<String>>> {
    let mut lines = Vec::new();
    let mut from = from.take(HEAD_LIMIT);
    loop {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return match lines.is_empty() {
                true => Ok(None),
                false => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a head without end")),
            };
        }
        match line.trim_end() {
            "" if lines.is_empty() => {}
            "" => return Ok(Some(lines)),
            text => lines.push(text.to_owned()),
        }
    }
}

fn length(head: &[String]) -> Option<u64> {
    let fields = head.iter().skip(1).filter_map(|line| line.split_once(':'));
    fields.filter(|(name, _)| name.eq_ignore_ascii_case("content-length")).find_map(|(_, v)| v.trim().parse().ok())
}

/// Serves one request after another: apt sends several before it reads the first answer.
fn serve(client: TcpStream, shared: &Shared) -> io::Result<()> {
    client.set_read_timeout(Some(SILENCE_LIMIT))?;
    let mut to_client = client.try_clone()?;
    let mut from_client = BufReader::new(client);
    while let Some(request) = head(&mut from_client)? {
        let words: Vec<&str> = request[0].split(' ').collect();
        if let ["CONNECT", host, _] = words[..] {
            return tunnel(from_client, to_client, host, shared);
        }
        let (Some(&method @ ("GET" | "HEAD")), Some(&url)) = (words.first(), words.get(1)) else {
            return to_client
                .write_all(b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        };
        let Some((host, path)) = url.strip_prefix("http://").and_then(|rest| rest.split_once('/')) else {
            return to_client.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        };
        if shared.withholds(path) {
            to_client.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        }
        let address = match &shared.parent {
            Some(parent) => parent.clone(),
            None if host.contains(':') => host.to_owned(),
            None => format!("{host}:80"),
        };
        let mut server = match TcpStream::connect(address) {
            Ok(server) => server,
            Err(_) => {
                let answer = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                return to_client.write_all(answer);
            }
        };
        server.set_read_timeout(Some(SILENCE_LIMIT))?;
        let target = if shared.parent.is_some() { url.to_owned() } else { format!("/{path}") };
        let mut text = format!("{method} {target} HTTP/1.1\r\nConnection: close\r\n");
        for line in &request[1..] {
            let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
            if !["connection", "proxy-connection", "keep-alive"].contains(&name.as_str()) {
                text.push_str(line);
                text.push_str("\r\n");
            }
        }
        server.write_all((text + "\r\n").as_bytes())?;
        let mut from_server = BufReader::new(server);
        let Some(answer) = head(&mut from_server)? else { return Ok(()) };
        let mut text = String::new();
        for line in &answer {
            if !line.to_ascii_lowercase().starts_with("connection:") {
                text.push_str(line);
                text.push_str("\r\n");
            }
        }
        let bodiless = method == "HEAD" || answer[0].contains(" 304 ") || answer[0].contains(" 204 ");
        match (bodiless, length(&answer)) {
            (true, _) => to_client.write_all((text + "\r\n").as_bytes())?,
            (false, Some(length)) => {
                to_client.write_all((text + "\r\n").as_bytes())?;
                if io::copy(&mut from_server.take(length), &mut to_client)? < length {
                    return Ok(());
                }
            }
            // The end of the body is the end of the connection.
            (false, None) => {
                to_client.write_all((text + "Connection: close\r\n\r\n").as_bytes())?;
                io::copy(&mut from_server, &mut to_client)?;
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Forwards bytes to `host` (`HOST:PORT`) and back until either side ends.
fn tunnel(
    mut from_client: impl Read + Send + 'static,
    mut to_client: TcpStream,
    host: &str,
    shared: &Shared,
) -> io::Result<()> {
    let mut server = TcpStream::connect(shared.parent.as_deref().unwrap_or(host))?;
    if shared.parent.is_some() {
        server.write_all(format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())?;
    } else {
        to_client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
    }
    // a long answer to a short request has no limit
    to_client.set_read_timeout(None)?;
    let mut to_server = server.try_clone()?;
    std::thread::spawn(move || {
        let _ = io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    io::copy(&mut server, &mut to_client)?;
    to_client.shutdown(Shutdown::Both)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTS: &str = "\
Package: memcached
Version: 1.6.18-1+deb12u1

Package: memcached
Version: 1.6.18-1

Package: mariadb-server
Source: mariadb
Version: 1:10.11.19-0+deb12u1

Package: mariadb-server
Source: mariadb
Version: 1:10.11.18-0+deb12u1

Package: single
Version: 1
";

    #[test]
    fn the_newest_of_several_versions_is_withheld_with_its_source() {
        let names = ["memcached_1.6.18-1+deb12u1", "mariadb-server_10.11.19-0+deb12u1", "mariadb_10.11.19-0+deb12u1"];
        let withheld = Withheld::newest_of(LISTS);
        assert_eq!(withheld, Withheld::of(names));
        for file in ["m/mariadb_10.11.19-0+deb12u1.dsc", "x/mariadb_10.11.19-0%2bdeb12u1.debian.tar.xz"] {
            assert!(withheld.covers(file), "{file}");
        }
        for file in ["memcached_1.6.18-1_amd64.deb", "mariadb_10.11.19.orig.tar.gz", "single_1_all.deb", ""] {
            assert!(!withheld.covers(file), "{file}");
        }
    }

    #[test]
    fn what_is_encrypted_passes_unseen() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listen");
        let address = server.local_addr().expect("an address");
        let echo = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().expect("a client");
            let mut text = String::new();
            stream.read_to_string(&mut text).expect("all of it");
            stream.write_all(text.to_uppercase().as_bytes()).expect("an answer");
        });
        let proxy = Proxy::start(0).expect("a proxy");
        proxy.withhold(|_| true);
        let mut client = TcpStream::connect(proxy.address).expect("connect");
        write!(client, "CONNECT {address} HTTP/1.1\r\n\r\n").expect("ask");
        let mut from_proxy = BufReader::new(client.try_clone().expect("a second handle"));
        let answer = head(&mut from_proxy).expect("an answer").expect("lines");
        assert!(answer[0].contains(" 200 "), "{answer:?}");
        client.write_all(b"hello").expect("send");
        client.shutdown(Shutdown::Write).expect("end");
        let mut text = String::new();
        from_proxy.read_to_string(&mut text).expect("what comes back");
        assert_eq!(text, "HELLO");
        echo.join().expect("one client was served");
    }

    #[test]
    fn versions_have_debians_order() {
        for (older, newer) in [
            ("1.0~rc1-1", "1.0-1"),
            ("15.18-0+deb12u1", "15.20-0+deb12u1"),
            ("1.22.1-9+deb12u9", "1.22.1-9+deb12u11"),
            ("9.0", "1:1.0"),
            ("1.6.18-1", "1.6.18-1+deb12u1"),
            ("3.0.17-1~deb12u2", "3.0.17-1"),
            ("1.0a", "1.0+b"),
            ("2.9", "2.010"),
        ] {
            assert_eq!(compare_versions(older, newer), Ordering::Less, "{older} {newer}");
            assert_eq!(compare_versions(newer, older), Ordering::Greater, "{older} {newer}");
            assert_eq!(compare_versions(older, older), Ordering::Equal);
        }
    }
}
