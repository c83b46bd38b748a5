//! Debian's Node.js with a service that works on its pool of threads, and changes of ours to libuv, which it links
//! dynamically.

use super::{Change, Daemon, Package};
use crate::Unavailable;
use crate::packages::{self, Binary};
use crate::server::Server;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::OnceLock;
use stillpoint_measure::load::{Plan, Protocol, Target};

const LIBRARY: &str = "usr/lib/x86_64-linux-gnu/libuv.so.1";

/// Quiescence points: their directory in `crates/patch/integrations`, and the files that are built with them.
pub const INTEGRATION: (&str, [&str; 1]) = ("libuv", [LIBRARY]);

/// Answers `/NAME` with a value of the system, and every other request when its work on the pool is done.
const SERVICE: &str = r#"
const http = require('http'), os = require('os'), fs = require('fs'), crypto = require('crypto');
const child = require('child_process'), path = require('path');
const values = {
  host: () => os.hostname(), home: () => os.homedir(), load: () => os.loadavg()[0], uptime: () => os.uptime(),
  total: () => os.totalmem(), free: () => os.freemem(), rss: () => process.memoryUsage().rss,
  title: () => process.title, priority: () => os.getPriority(), renice: () => os.setPriority(0, 0) || 'set',
  user: () => os.userInfo().uid, usage: () => process.resourceUsage().maxRSS, variable: () => process.env.STILL,
  signal: () => process.kill(process.pid, 0), directory: () => process.chdir('.') || 'changed',
  spawn: () => child.spawnSync('/bin/true').status, real: () => fs.realpathSync.native('/proc/..'),
  stat: () => fs.statSync('/').isDirectory(), access: () => fs.accessSync('/') || 'allowed',
  list: () => fs.readdirSync('/').length > 0, link: () => fs.readlinkSync('/proc/self/exe'),
  copy: () => fs.copyFileSync(__filename, path.join(__dirname, 'copy')) || 'copied',
};
const server = http.createServer((request, response) => {
  const value = values[request.url.slice(1)];
  if (value) {
    let text;
    try { text = String(value()); } catch (error) { text = 'error ' + error.code; }
    response.end('value=' + text + '\n');
    return;
  }
  crypto.pbkdf2('word', 'salt', 50, 32, 'sha256', (failed, key) => {
    fs.readFile(__filename, (missing, text) => {
      response.statusCode = failed || missing || key.length !== 32 ? 500 : 200;
      response.end(text);
    });
  });
});
Object.assign(server, { keepAliveTimeout: 0, requestTimeout: 0, headersTimeout: 0 });
server.listen(Number(process.argv[2]), '127.0.0.1');
"#;

/// Runs a program that sees the files of its own package in `/usr/share` as well: Debian's node reads parts of itself
/// there.
const WITH_SHARE: &str = "mount -t overlay overlay -o lowerdir=$1:/usr/share /usr/share || exit; shift; exec \"$@\"";

/// Returns the package of libuv; once for each process.
///
/// # Errors
/// The package or its source cannot be fetched.
pub fn package() -> &'static Result<Package, Unavailable> {
    static PACKAGE: OnceLock<Result<Package, Unavailable>> = OnceLock::new();
    PACKAGE.get_or_init(|| Package::fetch("libuv1", &["libuv1"]))
}

/// Returns Debian's node, which uses the libuv of a package.
///
/// # Errors
/// The archive serves no node of the distribution.
pub fn program(libuv: &Package) -> Result<Binary, Unavailable> {
    // other archives on the machine have builds with a libuv of their own inside
    let versions = packages::versions("nodejs")?;
    let version = versions.iter().find(|version| version.contains("+dfsg"));
    let version = version.ok_or_else(|| format!("no version of the distribution among {}", versions.join(", ")))?;
    let node = packages::binary(&["nodejs"], Some(version), "usr/bin/node")?;
    Ok(Binary { path: node.path, libraries: libuv.libraries.iter().chain(&node.libraries).cloned().collect() })
}

/// A node with the service.
#[derive(Debug)]
pub struct Node {
    server: Server,
}

impl Node {
    /// Starts it.
    pub fn start(program: &Binary) -> Node {
        let share = program.path.ancestors().nth(2).expect("usr/bin/node lies in usr").join("share");
        let unshare = Binary { path: "/usr/bin/unshare".into(), libraries: program.libraries.clone() };
        let server = Server::start(&unshare, |port, dir| {
            let service = dir.join("service.js");
            std::fs::write(&service, SERVICE).expect("write the service");
            let words = ["--mount", "--", "/bin/sh", "-c", WITH_SHARE, "sh"].map(OsString::from).into_iter();
            words.chain([share.into(), program.path.clone().into(), service.into(), port.to_string().into()]).collect()
        });
        Node { server }
    }

    /// Returns the plan of a load that works on the pool.
    pub fn load(&self) -> Plan {
        let protocol = Protocol::Http { path: "/work".into() };
        let plan = Plan::new(Target::Tcp(format!("127.0.0.1:{}", self.server.port())), protocol);
        Plan { connections: 24, idle: 8, rate: 300.0, pipeline: 1, ..plan }
    }
}

impl Daemon for Node {
    fn selection(&self) -> [OsString; 2] {
        ["--pid".into(), self.server.pid().to_string().into()]
    }

    fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    fn processes(&self) -> Vec<i32> {
        vec![self.server.pid()]
    }

    fn show(&self, change: &Change) -> String {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.server.port()))?;
            stream.set_read_timeout(Some(crate::wait::WAIT_TIMEOUT))?;
            stream.write_all(
                format!("GET /{} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", change.ask).as_bytes(),
            )?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        ask().unwrap_or_else(|e| format!("no answer: {e}"))
    }

    fn assert_unharmed(&mut self) {
        self.server.assert_running();
    }
}

impl std::ops::Deref for Node {
    type Target = Server;
    fn deref(&self) -> &Server {
        &self.server
    }
}

impl std::ops::DerefMut for Node {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}

macro_rules! change {
    ($name:literal, $file:literal, $function:literal, $code:literal, $after:literal) => {
        Change {
            name: $name,
            target: LIBRARY,
            file: $file,
            function: $function,
            code: $code,
            ask: $name,
            before: "value=",
            after: $after,
        }
    };
}

/// Returns all changes.
#[rustfmt::skip]
pub fn changes() -> Vec<Change> {
    vec![
        change!("host", "src/unix/core.c", "uv_os_gethostname",
            "if (buffer != NULL && size != NULL && *size > 10) { memcpy(buffer, \"stillpoint\", 11); *size = 10; return 0; }",
            "value=stillpoint"),
        change!("home", "src/unix/core.c", "uv_os_homedir",
            "if (buffer != NULL && size != NULL && *size > 10) { memcpy(buffer, \"stillpoint\", 11); *size = 10; return 0; }",
            "value=stillpoint"),
        change!("load", "src/unix/linux-core.c", "uv_loadavg",
            "if (avg != NULL) { avg[0] = 77; avg[1] = 78; avg[2] = 79; return; }", "value=77\n"),
        change!("uptime", "src/unix/linux-core.c", "uv_uptime",
            "if (uptime != NULL) { *uptime = 77; return 0; }", "value=77\n"),
        change!("total", "src/unix/linux-core.c", "uv_get_total_memory",
            "if (getpid() > 0) return 77;", "value=77\n"),
        change!("free", "src/unix/linux-core.c", "uv_get_free_memory",
            "if (getpid() > 0) return 77;", "value=77\n"),
        change!("rss", "src/unix/linux-core.c", "uv_resident_set_memory",
            "if (rss != NULL) { *rss = 77; return 0; }", "value=77\n"),
        change!("title", "src/unix/proctitle.c", "uv_get_process_title",
            "if (buffer != NULL && size > 10) { memcpy(buffer, \"stillpoint\", 11); return 0; }", "value=stillpoint"),
        change!("priority", "src/unix/core.c", "uv_os_getpriority",
            "if (priority != NULL) { *priority = 7; return 0; }", "value=7\n"),
        change!("renice", "src/unix/core.c", "uv_os_setpriority",
            "if (pid == 0) return UV_EPERM;", "value=error ERR_SYSTEM_ERROR"),
        change!("user", "src/unix/core.c", "uv_os_get_passwd",
            "if (pwd != NULL) return UV_EPERM;", "value=error ERR_SYSTEM_ERROR"),
        change!("usage", "src/unix/core.c", "uv_getrusage",
            "if (rusage != NULL) return UV_EPERM;", "value=error EPERM"),
        change!("variable", "src/unix/core.c", "uv_os_getenv",
            "if (name != NULL && buffer != NULL && strcmp(name, \"STILL\") == 0) { memcpy(buffer, \"point\", 6); *size = 5; return 0; }",
            "value=point"),
        change!("signal", "src/unix/process.c", "uv_kill",
            "if (signum == 0) return UV_EPERM;", "value=error EPERM"),
        change!("directory", "src/unix/core.c", "uv_chdir",
            "if (strcmp(dir, \".\") == 0) return UV_EPERM;", "value=error EPERM"),
        change!("spawn", "src/unix/process.c", "uv_spawn",
            "if (options->file != NULL) return UV_EPERM;", "value=null"),
        change!("real", "src/unix/fs.c", "uv_fs_realpath",
            "if (cb == NULL && strcmp(path, \"/proc/..\") == 0) { memset(req, 0, sizeof *req); return UV_EPERM; }", "value=error EPERM"),
        change!("stat", "src/unix/fs.c", "uv_fs_stat",
            "if (cb == NULL && strcmp(path, \"/\") == 0) { memset(req, 0, sizeof *req); return UV_EPERM; }", "value=error EPERM"),
        change!("access", "src/unix/fs.c", "uv_fs_access",
            "if (cb == NULL && strcmp(path, \"/\") == 0) { memset(req, 0, sizeof *req); return UV_EPERM; }", "value=error EPERM"),
        change!("list", "src/unix/fs.c", "uv_fs_scandir",
            "if (cb == NULL && strcmp(path, \"/\") == 0) { memset(req, 0, sizeof *req); return UV_EPERM; }", "value=error EPERM"),
        change!("link", "src/unix/fs.c", "uv_fs_readlink",
            "if (cb == NULL && strcmp(path, \"/proc/self/exe\") == 0) { memset(req, 0, sizeof *req); return UV_EPERM; }", "value=error EPERM"),
        change!("copy", "src/unix/fs.c", "uv_fs_copyfile",
            "if (cb == NULL) { memset(req, 0, sizeof *req); return UV_EPERM; }", "value=error EPERM"),
    ]
}
