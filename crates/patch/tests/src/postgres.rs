//! PostgreSQL clusters under test: Debian's own server, unpacked and never installed, as an unprivileged user.
//!
//! The obvious way is to start the server like every other one. But postgres refuses to run as root, and a cluster is a
//! family of processes that ends only on a request to its postmaster.

mod bench;
mod changes;
mod session;

pub use bench::Bench;
pub use changes::{Change, Effect, changes, unpatchable};
pub use session::{Answer, Session};

use crate::Unavailable;
use crate::cli::{Run, Stillpoint};
use crate::packages::{self, Binary};
use crate::server::{ChildGuard, free_port};
use crate::{shipped, wait};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Returns the directory of sources, clean roots and builds.
pub fn builder_cache() -> PathBuf {
    shipped::builder_cache()
}

/// Name of the package, of the major version in Debian 12.
pub const PACKAGE: &str = "postgresql-15";
const PACKAGES: [&str; 2] = [PACKAGE, "postgresql-client-15"];
const PROGRAMS: &str = "usr/lib/postgresql/15/bin";
/// User id of the unprivileged user of every Debian.
const USER: u32 = 65534;

/// A server and its tools, and the source that they were built from.
#[derive(Debug, Clone)]
pub struct Postgres {
    /// The program `postgres`.
    pub binary: Binary,
    /// Version of the package.
    pub version: String,
}

impl Postgres {
    /// Returns the newest version of which the archive serves programs and source.
    pub fn debian() -> Result<Postgres, Unavailable> {
        let versions = packages::versions_with_source(&PACKAGES)?;
        shipped::target(PACKAGE, &versions[0])?;
        Postgres::unpacked(&versions[0])
    }

    /// Returns the newest version, without its source, for tests without patches.
    pub fn unpatched() -> Result<Postgres, Unavailable> {
        Postgres::unpacked(&packages::versions(PACKAGE)?[0])
    }

    fn unpacked(version: &str) -> Result<Postgres, Unavailable> {
        let path = format!("{PROGRAMS}/postgres");
        let binary = packages::binary(&PACKAGES, Some(version), &path)?;
        Ok(Postgres { binary, version: version.to_owned() })
    }

    /// Returns a server of our own build, with the tools and libraries of Debian's.
    pub fn with_server(&self, server: &Path) -> Postgres {
        Postgres { binary: packages::with_libraries_of(server, &self.binary), version: self.version.clone() }
    }

    /// Returns the path of a tool in the server's directory.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.binary.path.with_file_name(name)
    }

    /// Returns the path of a library that the server loads, for instance `plpgsql.so`.
    pub fn library(&self, name: &str) -> PathBuf {
        self.binary.path.with_file_name(format!("../lib/{name}"))
    }

    /// Returns the directory of the unpacked source.
    pub fn source(&self) -> PathBuf {
        let version = self.version.replace([':', '/'], "%");
        builder_cache().join(format!("source/{PACKAGE}_{version}/tree"))
    }

    /// Builds one patch from some changes of one target, as `NAME.patch` below `into`.
    pub fn build(&self, changes: &[Change], name: &str, into: &Path) -> Run {
        let target = match changes[0].target {
            "postgres" => self.binary.path.clone(),
            library => self.library(library),
        };
        let mut build = Stillpoint::new().args(["patch", "build", "--json"]);
        build = build.debian(&format!("{PACKAGE}={}", self.version)).arg("--cache").arg(builder_cache());
        build = build.arg("--target").arg(&target).args(["--name", name, "--output"]);
        build = build.arg(into.join(format!("{name}.patch"))).arg("--diff");
        for change in changes {
            let path = into.join(format!("{}.diff", change.name));
            let diff = change.diff(&self.source()).unwrap_or_else(|why| panic!("{}: {why}", change.name));
            std::fs::write(&path, diff).expect("write a diff");
            build = build.arg(&path);
        }
        build.run()
    }

    /// Makes a command that runs `program` as the unprivileged user; the kernel kills it if the calling thread ends
    /// first.
    fn as_nobody(&self, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        let user = USER.to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--pdeathsig", "KILL", "--"]);
        command.arg(program).envs(self.binary.environment()).env("LC_ALL", "C").stdin(Stdio::null());
        command
    }
}

/// A running cluster with a data directory, a port and a socket of its own.
#[derive(Debug)]
pub struct Cluster {
    postgres: Postgres,
    postmaster: ChildGuard,
    port: u16,
    dir: TempDir,
}

/// Settings of every cluster: the tests are about code, not about disks.
const SETTINGS: [&str; 10] = [
    "max_connections=300",
    "shared_buffers=64MB",
    "fsync=off",
    "max_wal_size=256MB",
    "listen_addresses=127.0.0.1",
    "log_line_prefix=%p ",
    "wal_level=logical",
    "max_parallel_workers=4",
    "autovacuum_naptime=1s",
    "shared_preload_libraries=plpgsql",
];

impl Cluster {
    /// Makes and starts one; `settings` are `name=value`.
    pub fn start(postgres: &Postgres, settings: &[&str]) -> Cluster {
        let dir = TempDir::with_prefix("stillpoint-postgres-").expect("make a directory for the cluster");
        chown(dir.path(), Some(USER), Some(USER)).expect("give the directory to nobody");
        let postgres = copied(postgres, dir.path());
        let data = dir.path().join("data");
        let mut initdb = postgres.as_nobody(&postgres.tool("initdb"));
        initdb.args(["-N", "-A", "trust", "-U", "postgres", "--locale=C", "-E", "UTF8", "-D"]).arg(&data);
        let made = initdb.current_dir(dir.path()).output().expect("run initdb");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let port = free_port();
        let log = std::fs::File::create(dir.path().join("log")).expect("make the log");
        let mut command = postgres.as_nobody(&postgres.binary.path);
        command.arg("-D").arg(&data).args(["-p", &port.to_string(), "-k"]).arg(dir.path());
        for setting in SETTINGS.iter().chain(settings) {
            command.args(["-c", setting]);
        }
        command.current_dir(dir.path()).stdout(log.try_clone().expect("share the log")).stderr(log);
        let postmaster = ChildGuard::from_child(command.spawn().expect("start postgres"));
        let mut cluster = Cluster { postgres, postmaster, port, dir };
        wait::until("postgres to accept connections", || {
            cluster.assert_running();
            Session::connect(cluster.port).ok()
        });
        cluster
    }

    /// Returns the postmaster's process id.
    pub fn pid(&self) -> i32 {
        self.postmaster.pid()
    }

    /// Returns its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join(format!(".s.PGSQL.{}", self.port))
    }

    /// Returns the executable of all its processes.
    pub fn executable(&self) -> &Path {
        &self.postgres.binary.path
    }

    /// Returns the server and tools of the cluster.
    pub fn postgres(&self) -> &Postgres {
        &self.postgres
    }

    /// Opens a new connection.
    #[track_caller]
    pub fn session(&self) -> Session {
        Session::connect(self.port).unwrap_or_else(|e| panic!("connect to postgres: {e}\n{}", self.log_text()))
    }

    /// Returns the answer to one statement on a connection of its own.
    #[track_caller]
    pub fn ask(&self, sql: &str) -> Answer {
        self.session().ask(sql).unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    /// Returns the postmaster and all its present children, zombies left out.
    pub fn processes(&self) -> BTreeSet<i32> {
        let postmaster = self.pid();
        let parent = |pid: i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let mut words = stat.rsplit_once(')')?.1.split_whitespace();
            let running = words.next()? != "Z";
            running.then(|| words.next()?.parse::<i32>().ok()).flatten()
        };
        let proc = std::fs::read_dir("/proc").expect("list the processes").flatten();
        let pids = proc.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        pids.filter(|pid| *pid == postmaster || parent(*pid) == Some(postmaster)).collect()
    }

    /// Makes a command that runs one of the server's tools as the unprivileged user, with the address of the server in
    /// its environment.
    pub fn client(&self, name: &str) -> Command {
        let mut command = self.postgres.as_nobody(&self.postgres.tool(name));
        command.env("PGHOST", "127.0.0.1").env("PGPORT", self.port.to_string()).env("PGUSER", "postgres");
        command.current_dir(self.dir.path());
        command
    }

    /// Returns its complete log so far.
    pub fn log_text(&self) -> String {
        std::fs::read(self.dir.path().join("log"))
            .map_or_else(|_| String::new(), |b| String::from_utf8_lossy(&b).into())
    }

    /// Panics with the log unless the postmaster runs.
    #[track_caller]
    pub fn assert_running(&mut self) {
        if let Some(status) = self.postmaster.ended() {
            panic!("postgres ended with {status}; its log:\n{}", self.log_text());
        }
    }

    /// Panics if a process of the cluster crashed: the postmaster then logs it and starts all others again.
    #[track_caller]
    pub fn assert_unharmed(&mut self) {
        self.assert_running();
        let log = self.log_text();
        for sign in ["was terminated by signal", "PANIC", "terminating any other active", "EINTR", "Interrupted system"]
        {
            assert!(!log.contains(sign), "the log tells of {sign:?}:\n{log}");
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SIGTERM would wait for the clients to disconnect.
        self.postmaster.signal(Signal::INT);
        let _ = wait::within(std::time::Duration::from_secs(30), || self.postmaster.ended());
    }
}

/// Copies the programs for one cluster alone: `--exe` means all processes of an executable, those of other tests as
/// well. Also, only the owner can read a cache below a home directory, while the server runs as the unprivileged user.
fn copied(postgres: &Postgres, dir: &Path) -> Postgres {
    let root = postgres.binary.path.ancestors().nth(6).expect("the program lies in an unpacked package");
    let copy = dir.join("root");
    let copied = Command::new("cp").arg("-a").arg(root).arg(&copy).status().expect("run cp");
    assert!(copied.success(), "copy {}", root.display());
    let inside = |path: &Path| copy.join(path.strip_prefix(root).expect("a path below the root"));
    let libraries = postgres.binary.libraries.iter().map(|library| inside(library)).collect();
    Postgres { binary: Binary { path: inside(&postgres.binary.path), libraries }, version: postgres.version.clone() }
}

/// Runs a tool in the server's directory with arguments, as the unprivileged user.
fn tool<S: AsRef<OsStr>>(cluster: &Cluster, name: &str, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = cluster.client(name);
    command.args(arguments);
    command
}
