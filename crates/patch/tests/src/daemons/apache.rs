//! Debian's Apache httpd with several processes, and changes of ours to it.

use super::{Change, Daemon, Package, with_children};
use crate::Unavailable;
use crate::packages::Binary;
use crate::server::{Server, soon};
use rustix::process::Signal;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use stillpoint_measure::load::{Plan, Protocol, Target};
use tempfile::TempDir;

/// Path of the executable below the root.
pub const PROGRAM: &str = "usr/sbin/apache2";

macro_rules! module {
    ($name:literal) => {
        concat!("usr/lib/apache2/modules/mod_", $name, ".so")
    };
}

const MODULES: &str = "usr/lib/apache2/modules";
/// Bytes of the file that is downloaded slowly.
const LARGE: usize = 32 << 20;

/// Quiescence points: their directory in `crates/patch/integrations`, and the files that are built with them.
pub const INTEGRATION: (&str, [&str; 3]) = ("apache2", [PROGRAM, module!("mpm_event"), module!("mpm_prefork")]);

/// Returns the package; once for each process.
///
/// # Errors
/// The package or its source cannot be fetched.
pub fn package() -> &'static Result<Package, Unavailable> {
    static PACKAGE: OnceLock<Result<Package, Unavailable>> = OnceLock::new();
    PACKAGE.get_or_init(|| Package::fetch("apache2", &["apache2-bin"]))
}

/// Module that makes processes and threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mpm {
    /// Threads in several processes, with a listener in each.
    Event,
    /// A process for each connection.
    Prefork,
}

impl Mpm {
    /// Returns its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Mpm::Event => "event",
            Mpm::Prefork => "prefork",
        }
    }

    fn settings(self) -> &'static str {
        match self {
            Mpm::Event => {
                "StartServers 3\nMinSpareThreads 25\nMaxSpareThreads 150\nThreadsPerChild 25\nMaxRequestWorkers 150\n"
            }
            Mpm::Prefork => {
                "StartServers 8\nMinSpareServers 5\nMaxSpareServers 10\nServerLimit 120\nMaxRequestWorkers 120\n"
            }
        }
    }
}

/// An httpd with all its processes.
#[derive(Debug)]
pub struct Apache {
    server: Server,
    copy: TempDir,
}

impl Apache {
    /// Starts Debian's program, or another build of it, as a copy: `--exe` means all processes of an executable, those
    /// of other tests as well.
    pub fn start(package: &Package, program: &Binary, mpm: Mpm) -> Apache {
        let copy = TempDir::with_prefix("stillpoint-apache-").expect("make a directory for the program");
        let path = copy.path().join("apache2");
        std::fs::copy(&program.path, &path).expect("copy the program");
        // at its end its first process sends a signal to all of its process group
        let session = Binary { path: "/usr/bin/setsid".into(), libraries: program.libraries.clone() };
        let server = Server::start(&session, |port, dir| {
            content(dir);
            let configuration = dir.join("httpd.conf");
            std::fs::write(&configuration, settings(package, dir, port, mpm)).expect("write httpd.conf");
            let words = ["-D", "FOREGROUND", "-f"].map(OsString::from).into_iter();
            std::iter::once(path.into()).chain(words).chain([configuration.into()]).collect()
        });
        Apache { server, copy }
    }

    /// Returns the path of its executable, which no other process uses.
    pub fn executable(&self) -> PathBuf {
        self.copy.path().join("apache2")
    }

    /// Returns the plan of a load on connections that stay open.
    pub fn load(&self) -> Plan {
        let protocol = Protocol::Http { path: "/file.txt".into() };
        let plan = Plan::new(Target::Tcp(format!("127.0.0.1:{}", self.server.port())), protocol);
        Plan { connections: 24, idle: 0, rate: 500.0, pipeline: 1, ..plan }
    }
}

impl Daemon for Apache {
    fn selection(&self) -> [OsString; 2] {
        ["--exe".into(), self.executable().into()]
    }

    fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    fn processes(&self) -> Vec<i32> {
        with_children(self.server.pid())
    }

    fn show(&self, change: &Change) -> String {
        request(self.server.port(), change.ask).unwrap_or_else(|e| format!("no answer: {e}"))
    }

    fn assert_unharmed(&mut self) {
        self.server.assert_running();
        let log = self.server.log_text();
        for sign in ["exit signal", ":crit]", ":emerg]", ":alert]"] {
            assert!(!log.contains(sign), "the log tells of {sign:?}:\n{log}");
        }
    }
}

impl Drop for Apache {
    fn drop(&mut self) {
        // The first process ends its children.
        self.server.process().signal(Signal::TERM);
        soon("httpd to end", || self.server.process().ended());
    }
}

impl std::ops::Deref for Apache {
    type Target = Server;
    fn deref(&self) -> &Server {
        &self.server
    }
}

/// Sends a request on a connection of its own and returns the whole answer; further lines of `lines` are headers.
fn request(port: u16, lines: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(crate::wait::WAIT_TIMEOUT))?;
    stream.write_all(format!("{}\r\n\r\n", lines.replace('\n', "\r\n")).as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Clients beside the load: connections with one request each, and slow downloads of a large file.
#[derive(Debug)]
pub struct Visitors {
    stop: Arc<AtomicBool>,
    served: Arc<[AtomicU64; 2]>,
    threads: Vec<JoinHandle<Result<(), String>>>,
}

impl Visitors {
    /// Starts them; each download takes some seconds.
    pub fn start(port: u16, downloads: usize) -> Visitors {
        let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new([AtomicU64::new(0), AtomicU64::new(0)]));
        let kinds = (0..downloads).map(|_| 1).chain([0, 0]);
        let start = |kind: usize| {
            let (stop, served) = (Arc::clone(&stop), Arc::clone(&served));
            let visit = if kind == 1 { download } else { visit };
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    visit(port, &stop)?;
                    served[kind].fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        Visitors { threads: kinds.map(start).collect(), stop, served }
    }

    /// Ends them, and panics unless every one of them was served to the end; returns the numbers of visits and of whole
    /// downloads.
    #[track_caller]
    pub fn assert_clean(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a visitor panicked").unwrap_or_else(|e| panic!("{e}"));
        }
        let [visits, downloads] = [0, 1].map(|kind| self.served[kind].load(Ordering::Relaxed));
        assert!(visits > 0 && downloads > 0, "{visits} visits, {downloads} downloads");
        (visits, downloads)
    }
}

fn visit(port: u16, _stop: &AtomicBool) -> Result<(), String> {
    let answer = request(port, "GET /file.txt HTTP/1.0").map_err(|e| format!("a visit: {e}"))?;
    std::thread::sleep(Duration::from_millis(5));
    let whole = answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("the end\n");
    if whole { Ok(()) } else { Err(format!("a visit got {answer:?}")) }
}

/// Reads the large file slowly, and faster when the end is requested; every byte must be right.
fn download(port: u16, stop: &AtomicBool) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("a download: {e}");
    let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(failed)?;
    stream.set_read_timeout(Some(crate::wait::WAIT_TIMEOUT)).map_err(failed)?;
    stream.write_all(b"GET /large HTTP/1.0\r\n\r\n").map_err(failed)?;
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).map_err(failed)?;
        head.push(byte[0]);
    }
    let mut piece = vec![0; 256 << 10];
    for start in (0..LARGE).step_by(piece.len()) {
        stream.read_exact(&mut piece).map_err(failed)?;
        if piece.iter().enumerate().any(|(at, byte)| *byte != large_byte(start + at)) {
            return Err(format!("a download is wrong behind byte {start}"));
        }
        if !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    match stream.read(&mut byte).map_err(failed)? {
        0 => Ok(()),
        _ => Err("a download is too long".into()),
    }
}

fn large_byte(at: usize) -> u8 {
    (at ^ (at >> 8) ^ (at >> 16)) as u8
}

fn content(dir: &Path) {
    let www = dir.join("www");
    std::fs::create_dir_all(www.join("list")).expect("make the directory of the pages");
    let write = |name: &str, bytes: &[u8]| std::fs::write(www.join(name), bytes).expect("write a page");
    write("file.txt", ["text\n".repeat(200).as_bytes(), b"the end\n"].concat().as_slice());
    write("list/entry.txt", b"an entry\n");
    write("included.shtml", b"<!--#echo var=\"DOCUMENT_NAME\" -->\n");
    write("large", &(0..LARGE).map(large_byte).collect::<Vec<u8>>());
    std::fs::write(dir.join("users"), "user:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=\n").expect("write the users");
    std::fs::write(dir.join("types"), "text/plain txt\ntext/html html shtml\n").expect("write the types");
    // The children run as an unprivileged user.
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("open the directory");
    let opened = Command::new("chmod").arg("-R").arg("a+rX").arg(dir).status().expect("run chmod");
    assert!(opened.success(), "chmod ended with {opened}");
}

fn settings(package: &Package, dir: &Path, port: u16, mpm: Mpm) -> String {
    let (root, at) = (package.root.display(), dir.display());
    let own = format!("mpm_{}", mpm.name());
    let modules = [
        &own,
        "authz_core",
        "authn_core",
        "authn_file",
        "authz_user",
        "auth_basic",
        "dir",
        "mime",
        "alias",
        "rewrite",
        "headers",
        "include",
        "filter",
        "autoindex",
        "status",
        "env",
        "setenvif",
    ];
    let mut text = String::new();
    for module in modules {
        let _ = writeln!(text, "LoadModule {module}_module {root}/{MODULES}/mod_{module}.so");
    }
    text + mpm.settings()
        + &format!(
            "ServerRoot {at}\nServerName localhost\nListen 127.0.0.1:{port}\nPidFile {at}/pid\nDefaultRuntimeDir {at}\n\
         ErrorLog /dev/stderr\nLogLevel notice\nUser #65534\nGroup #65534\nTypesConfig {at}/types\n\
         KeepAlive On\nKeepAliveTimeout 300\nMaxKeepAliveRequests 0\nTimeout 300\nDocumentRoot {at}/www\n\
         <Directory {at}/www>\nOptions +Indexes +Includes\nRequire all granted\nDirectoryIndex none\n</Directory>\n\
         <Location /status>\nSetHandler server-status\n</Location>\n\
         <Location /private>\nAuthType Basic\nAuthName private\nAuthUserFile {at}/users\nRequire valid-user\n</Location>\n\
         AddOutputFilter INCLUDES .shtml\nRedirect 410 /gone\nHeader set X-Time \"%t\"\n\
         RewriteEngine On\nRewriteMap upper int:toupper\nRewriteRule ^/upper/(.*)$ /${{upper:$1}} [R]\n"
        )
}

/// Returns all changes; those of another MPM are left out.
#[rustfmt::skip]
pub fn changes(mpm: Mpm) -> Vec<Change> {
    let mut all = vec![
        change!("status-line", PROGRAM, "modules/http/http_protocol.c", "ap_get_status_line",
            "if (status == 410) return \"410 Stillpoint\";",
            "GET /gone HTTP/1.0", "410 Gone" => "410 Stillpoint"),
        change!("error-page", PROGRAM, "modules/http/http_protocol.c", "get_canned_error_string",
            "if (status == 404) return \"no such page here\\n\";",
            "GET /missing HTTP/1.0", "was not found" => "no such page here"),
        change!("banner", PROGRAM, "server/core.c", "ap_get_server_banner",
            "if (server_banner) return \"stillpoint/1\";",
            "GET /file.txt HTTP/1.0", "Server: Apache" => "Server: stillpoint/1"),
        change!("options", PROGRAM, "modules/http/http_protocol.c", "ap_send_http_options",
            "apr_table_setn(r->headers_out, \"X-Options\", \"stillpoint\");",
            "OPTIONS /file.txt HTTP/1.0", "Allow: " => "X-Options: stillpoint"),
        change!("trace", PROGRAM, "modules/http/http_filters.c", "ap_send_http_trace",
            "if (r->method_number == M_TRACE) return HTTP_FORBIDDEN;",
            "TRACE / HTTP/1.0", "message/http" => "403 Forbidden"),
        change!("etag", PROGRAM, "modules/http/http_etag.c", "ap_make_etag_ex",
            "if (er != NULL) return apr_pstrdup(r->pool, \"\\\"stillpoint\\\"\");",
            "GET /file.txt HTTP/1.0", "ETag: \"" => "ETag: \"stillpoint\""),
        change!("range", PROGRAM, "modules/http/byterange_filter.c", "ap_set_byterange",
            "if (r->uri && strcmp(r->uri, \"/file.txt\") == 0) return 0;",
            "GET /file.txt HTTP/1.0\nRange: bytes=1-2", "206 Partial" => "200 OK"),
        change!("path", PROGRAM, "server/util.c", "ap_normalize_path",
            "if (strcmp(path, \"/refused\") == 0) return 0;",
            "GET /refused HTTP/1.0", "404 Not Found" => "400 Bad Request"),
        change!("request", PROGRAM, "server/request.c", "ap_process_request_internal",
            "if (r->uri && strcmp(r->uri, \"/forbidden\") == 0) return HTTP_FORBIDDEN;",
            "GET /forbidden HTTP/1.0", "404 Not Found" => "403 Forbidden"),
        change!("conditions", PROGRAM, "modules/http/http_protocol.c", "ap_meets_conditions",
            "if (r->uri && strcmp(r->uri, \"/file.txt\") == 0) return OK;",
            "GET /file.txt HTTP/1.0\nIf-None-Match: *", "304 Not Modified" => "200 OK"),
        change!("accept-ranges", PROGRAM, "modules/http/http_protocol.c", "ap_set_accept_ranges",
            "if (r->uri) { apr_table_setn(r->headers_out, \"Accept-Ranges\", \"never\"); return; }",
            "GET /file.txt HTTP/1.0", "Accept-Ranges: bytes" => "Accept-Ranges: never"),
        change!("default-handler", PROGRAM, "server/core.c", "default_handler",
            "if (r->args && strcmp(r->args, \"gone\") == 0) return HTTP_GONE;",
            "GET /file.txt?gone HTTP/1.0", "200 OK" => "410 Gone"),
        change!("status", module!("status"), "modules/generators/mod_status.c", "status_handler",
            "if (r->args && strcmp(r->args, \"gone\") == 0) return HTTP_GONE;",
            "GET /status?gone HTTP/1.0", "200 OK" => "410 Gone"),
        change!("index", module!("autoindex"), "modules/generators/mod_autoindex.c", "emit_preamble",
            "if (title) title = \"stillpoint\";",
            "GET /list/ HTTP/1.0", "<title>Index of /list" => "<title>Index of stillpoint"),
        change!("alias", module!("alias"), "modules/mappers/mod_alias.c", "translate_alias_redir",
            "if (r->uri && strcmp(r->uri, \"/forbidden\") == 0) return HTTP_FORBIDDEN;",
            "GET /forbidden HTTP/1.0", "404 Not Found" => "403 Forbidden"),
        change!("type", module!("mime"), "modules/http/mod_mime.c", "find_ct",
            "if (r->args && strcmp(r->args, \"still\") == 0) { ap_set_content_type(r, \"text/still\"); return OK; }",
            "GET /file.txt?still HTTP/1.0", "Content-Type: text/plain" => "Content-Type: text/still"),
        change!("directory", module!("dir"), "modules/mappers/mod_dir.c", "fixup_dir",
            "if (r->args && strcmp(r->args, \"gone\") == 0) return HTTP_GONE;",
            "GET /list/?gone HTTP/1.0", "200 OK" => "410 Gone"),
        change!("basic", module!("auth_basic"), "modules/aaa/mod_auth_basic.c", "authenticate_basic_user",
            "if (r->args && strcmp(r->args, \"teapot\") == 0) return HTTP_FORBIDDEN;",
            "GET /private?teapot HTTP/1.0", "401 Unauthorized" => "403 Forbidden"),
        change!("include", module!("include"), "modules/filters/mod_include.c", "handle_echo",
            "if (bb != NULL) { APR_BRIGADE_INSERT_TAIL(bb, apr_bucket_immortal_create(\"stillpoint\", 10, f->c->bucket_alloc)); return APR_SUCCESS; }",
            "GET /included.shtml HTTP/1.0", "included.shtml" => "stillpoint"),
        change!("header", module!("headers"), "modules/metadata/mod_headers.c", "header_request_time",
            "if (a == NULL || *a != 'x') return \"stillpoint\";",
            "GET /file.txt HTTP/1.0", "X-Time: t=" => "X-Time: stillpoint"),
        change!("rewrite", module!("rewrite"), "modules/mappers/mod_rewrite.c", "rewrite_mapfunc_toupper",
            "if (strcmp(key, \"word\") == 0) return apr_pstrdup(r->pool, \"STILL\");",
            "GET /upper/word HTTP/1.0", "/WORD" => "/STILL"),
    ];
    all.push(match mpm {
        Mpm::Event => change!("mpm", module!("mpm_event"), "server/mpm/event/event.c", "event_get_name",
            "if (one_process == 0) return \"stillpoint\";",
            "GET /status HTTP/1.0", "Server MPM: event" => "Server MPM: stillpoint"),
        Mpm::Prefork => change!("mpm", module!("mpm_prefork"), "server/mpm/prefork/prefork.c", "prefork_get_name",
            "if (one_process == 0) return \"stillpoint\";",
            "GET /status HTTP/1.0", "Server MPM: prefork" => "Server MPM: stillpoint"),
    });
    all
}
