//! Debian's mariadbd, unpacked and never installed, with its own data, and changes of ours to its source.

pub mod annotation;
pub mod change;
pub mod client;
pub mod client_loop;
pub mod effect;
pub mod load;
pub mod tpc;
pub mod traffic;

use crate::Unavailable;
use crate::packages::{self, Binary};
use crate::server::{Restart, Server};
use crate::shipped_program;
use crate::wait;
use client::Client;
use rustix::process::Signal;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use stillpoint_testing::recipes;

/// Debian's server, and its source.
#[derive(Debug, Clone)]
pub struct PackagedServer {
    /// Version of the server and of the source.
    pub version: String,
    /// The program, unmodified.
    pub binary: Binary,
    /// Source as upstream ships it, without Debian's own diffs; read-only.
    pub source: PathBuf,
    /// Directory that would be `usr` of an installed package.
    usr: PathBuf,
}

/// Assignment of threads to connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// A thread for each connection.
    ThreadPerConnection,
    /// A pool that serves all connections.
    Pool,
}

impl Policy {
    /// Both policies.
    pub const ALL: [Policy; 2] = [Policy::ThreadPerConnection, Policy::Pool];

    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        match self {
            Policy::ThreadPerConnection => "a thread per connection",
            Policy::Pool => "pool of threads",
        }
    }

    fn argument(self) -> &'static str {
        match self {
            Policy::ThreadPerConnection => "--thread-handling=one-thread-per-connection",
            Policy::Pool => "--thread-handling=pool-of-threads",
        }
    }
}

/// Returns the newest version of which the archive serves the program *and* the source; once for each process.
///
/// # Errors
/// The package or its source cannot be fetched.
pub fn packaged() -> &'static Result<PackagedServer, Unavailable> {
    static PACKAGED: OnceLock<Result<PackagedServer, Unavailable>> = OnceLock::new();
    PACKAGED.get_or_init(find)
}

fn find() -> Result<PackagedServer, Unavailable> {
    const PACKAGES: [&str; 1] = ["mariadb-server-core"];
    let version = packages::versions_with_source(&PACKAGES)?.swap_remove(0);
    shipped_program::target("mariadb", &version)?;
    let binary = packages::binary(&PACKAGES, Some(&version), "usr/sbin/mariadbd")?;
    let name = format!("source/mariadb_{}/tree", version.replace([':', '/'], "%"));
    let usr = binary.path.ancestors().nth(2).expect("usr/sbin/mariadbd lies in usr").to_owned();
    Ok(PackagedServer { version, binary, source: shipped_program::builder_cache().join(name), usr })
}

impl PackagedServer {
    fn arguments(&self, data: &Path) -> Vec<OsString> {
        let set = |name: &str, path: &Path| {
            let mut argument = OsString::from(format!("--{name}="));
            argument.push(path);
            argument
        };
        let share = self.usr.join("share/mysql");
        let mut words: Vec<OsString> = vec!["--no-defaults".into(), "--user=root".into()];
        words.extend([set("basedir", &self.usr), set("datadir", data), set("lc-messages-dir", &share)]);
        words.extend(["--innodb-log-file-size=16M".into(), "--innodb-flush-log-at-trx-commit=0".into()]);
        words
    }

    /// Makes the data of a server without users except `root`; once.
    fn fresh_data(&self) -> Result<PathBuf, Unavailable> {
        let statements = self.first_statements()?;
        let name = format!("data_{}", self.version.replace(':', "%3a"));
        let inputs = [statements.clone().into_bytes(), self.version.clone().into_bytes()];
        recipes::entry("mariadb", &name, &inputs, |half| Ok(self.make_data(half, &statements)?))
    }

    fn make_data(&self, half: &Path, statements: &str) -> Result<(), String> {
        let work = tempfile::tempdir().map_err(|e| format!("make a directory: {e}"))?;
        let script = work.path().join("script.sql");
        std::fs::write(&script, statements).map_err(|e| format!("write {}: {e}", script.display()))?;
        let input = std::fs::File::open(&script).map_err(|e| format!("read {}: {e}", script.display()))?;
        let mut command = Command::new(&self.binary.path);
        command.args(self.arguments(half)).arg("--bootstrap").envs(self.binary.environment()).stdin(input);
        let output = command.output().map_err(|e| format!("run mariadbd: {e}"))?;
        if !output.status.success() {
            return Err(format!("mariadbd --bootstrap: {}", String::from_utf8_lossy(&output.stderr)));
        }
        Ok(())
    }

    fn first_statements(&self) -> Result<String, String> {
        let mut text = "create database mysql;\ncreate database test;\nuse mysql;\nset @auth_root_socket=NULL;\n\
                        set @skip_auth_anonymous=1;\n"
            .to_owned();
        for name in ["mysql_system_tables.sql", "mysql_performance_tables.sql", "mysql_system_tables_data.sql"] {
            let path = self.usr.join("share/mysql").join(name);
            text += &std::fs::read_to_string(&path).map_err(|e| format!("read {}: {e}", path.display()))?;
        }
        Ok(text)
    }

    /// Starts a server; `extra` are further options.
    pub fn start(&self, policy: Policy, extra: &[&str]) -> MariaDb {
        let fresh = self.fresh_data().unwrap_or_else(|e| panic!("{e}"));
        self.start_on(&fresh, policy, extra)
    }

    /// Starts a server on a copy of `data`.
    pub fn start_on(&self, data: &Path, policy: Policy, extra: &[&str]) -> MariaDb {
        let server = Server::start(&self.binary, |port, dir| {
            let copy = dir.join("data");
            let status = Command::new("cp").arg("-a").arg(data).arg(&copy).status().expect("run cp");
            assert!(status.success(), "cp ended with {status}");
            self.all_arguments(port, dir, policy, extra)
        });
        MariaDb::ready(server)
    }

    /// Returns program and arguments of a server on a port, with data of its own in `dir`, for tests that start it in
    /// another way.
    ///
    /// # Errors
    /// The data directory cannot be made.
    pub fn command(&self, port: u16, dir: &Path, extra: &[&str]) -> Result<(Binary, Vec<OsString>), String> {
        let fresh = self.fresh_data()?;
        let copied = Command::new("cp").arg("-a").arg(&fresh).arg(dir.join("data")).status();
        match copied {
            Ok(status) if status.success() => {
                Ok((self.binary.clone(), self.all_arguments(port, dir, Policy::ThreadPerConnection, extra)))
            }
            other => Err(format!("copy {}: {other:?}", fresh.display())),
        }
    }

    fn all_arguments(&self, port: u16, dir: &Path, policy: Policy, extra: &[&str]) -> Vec<OsString> {
        let mut socket = OsString::from("--socket=");
        socket.push(dir.join("socket"));
        let mut words = self.arguments(&dir.join("data"));
        words.extend([socket, format!("--port={port}").into(), policy.argument().into()]);
        words.extend(["--bind-address=127.0.0.1", "--max-connections=1500", "--back-log=500"].map(OsString::from));
        words.extend(["--loose-performance-schema=off", "--max-connect-errors=1000000"].map(OsString::from));
        words.extend(extra.iter().map(OsString::from));
        words
    }
}

/// A server under test.
#[derive(Debug)]
pub struct MariaDb {
    server: Server,
}

impl MariaDb {
    /// Waits for the socket: the server listens on its port a moment before the socket exists.
    fn ready(server: Server) -> MariaDb {
        let mariadb = MariaDb { server };
        wait::until("mariadbd to let a client in", || Client::connect(&mariadb.socket(), "").ok());
        mariadb
    }

    /// Ends it in order and starts it again on its data, as another program if one is given. A client with a query in
    /// progress gets no answer to it.
    #[track_caller]
    pub fn restart(&mut self, program: Option<&Binary>) -> Restart {
        let socket = self.socket();
        let stop = |server: &mut Server| server.process().signal(Signal::TERM);
        self.server.restart(program, stop, |_| Client::connect(&socket, "").is_ok())
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.server.dir().join("socket")
    }

    /// Opens a new connection.
    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(&self.socket(), "test").unwrap_or_else(|e| panic!("connect: {e}\n{}", self.server.log_text()))
    }

    /// Returns the answer to one statement, on a connection of its own.
    #[track_caller]
    pub fn asked(&self, statement: &str) -> String {
        match self.client().done(statement) {
            Ok(answer) => answer.to_string(),
            Err(error) => panic!("{statement}: {error}\n{}", self.server.log_text()),
        }
    }

    /// Returns a status variable.
    #[track_caller]
    pub fn status(&self, name: &str) -> u64 {
        let text = self.asked(&format!("SHOW GLOBAL STATUS LIKE '{name}'"));
        text.split('\t').nth(1).and_then(|v| v.parse().ok()).unwrap_or_else(|| panic!("{name} is {text:?}"))
    }
}

impl std::ops::Deref for MariaDb {
    type Target = Server;
    fn deref(&self) -> &Server {
        &self.server
    }
}

impl std::ops::DerefMut for MariaDb {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}
