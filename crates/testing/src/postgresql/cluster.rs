//! A PostgreSQL cluster with data directory, port and socket of its own.

use super::program::{MAJOR, Programs, as_postgres, postgres_ids};
use super::template;
use super::{Load, LoadOutcome, SmallDisk};
use crate::port::free_port;
use crate::wait::{until, within};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Settings of every test cluster: the tests are about protocol and state, not about disks.
const SETTINGS: [&str; 8] = [
    "max_connections=200",
    "shared_buffers=64MB",
    "fsync=off",
    "max_wal_size=512MB",
    "listen_addresses=127.0.0.1",
    "max_wal_senders=10",
    "max_replication_slots=10",
    "log_line_prefix=%m [%p] %q%u@%d ",
];

/// A running server with its own data, gone when dropped.
#[derive(Debug)]
pub struct Cluster {
    postmaster: Child,
    programs: Programs,
    port: u16,
    settings: Vec<String>,
    /// File system that is mounted on the directory.
    disk: Option<SmallDisk>,
    dir: TempDir,
}

impl Cluster {
    /// Makes a cluster of Debian's version and starts it; `settings` are `name=value` and follow `SETTINGS`.
    #[track_caller]
    pub fn start(settings: &[&str]) -> Cluster {
        Cluster::of_major(MAJOR, settings)
    }

    /// Makes a cluster of another major version, whose programs must be installed beside Debian's, and starts it.
    #[track_caller]
    pub fn of_major(major: u32, settings: &[&str]) -> Cluster {
        Cluster::of_disk(Programs::of_major(major), None, settings).expect("nothing is mounted")
    }

    /// Makes a cluster with programs of one certain version ([`Programs::of_version`]), and starts it.
    #[track_caller]
    pub fn of_programs(programs: &Programs, settings: &[&str]) -> Cluster {
        Cluster::of_disk(programs.clone(), None, settings).expect("nothing is mounted")
    }

    /// Makes a cluster on a disk of `mib` MiB and starts it; the error is the reason why there is none.
    ///
    /// # Errors
    /// The disk cannot be mounted, for instance without the rights of root.
    #[track_caller]
    pub fn on_small_disk(mib: u32, settings: &[&str]) -> Result<Cluster, String> {
        Cluster::of_disk(Programs::of_major(MAJOR), Some(mib), settings)
    }

    #[track_caller]
    fn of_disk(programs: Programs, disk_mib: Option<u32>, settings: &[&str]) -> Result<Cluster, String> {
        let dir = TempDir::with_prefix("stillpoint-cluster-").expect("make a directory for the cluster");
        let disk = disk_mib.map(|mib| SmallDisk::mount(dir.path(), mib)).transpose()?;
        let (user, group) = postgres_ids();
        chown(dir.path(), Some(user), Some(group)).expect("give the directory to postgres");
        // Clients of other users reach the socket.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("open the directory");
        let programs = programs.copy_below(dir.path());
        template::place(&programs, dir.path()).unwrap_or_else(|why| panic!("make a cluster: {why}"));
        let settings: Vec<String> = SETTINGS.iter().chain(settings).map(ToString::to_string).collect();
        let port = free_port();
        let postmaster = spawn(&programs, dir.path(), port, &settings);
        let mut cluster = Cluster { postmaster, programs, port, settings, disk, dir };
        cluster.await_ready();
        Ok(cluster)
    }

    /// Returns its small disk, if it has one.
    pub fn disk(&self) -> Option<&SmallDisk> {
        self.disk.as_ref()
    }

    /// Returns the port on 127.0.0.1; it stays the same over restarts.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the directory of the unix socket, which is also the cluster's own.
    pub fn socket_dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the directory of the libraries that its server loads itself.
    pub fn library_dir(&self) -> PathBuf {
        self.programs.library_dir()
    }

    /// Returns the data directory.
    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Returns the postmaster's process id.
    pub fn pid(&self) -> u32 {
        self.postmaster.id()
    }

    /// Returns a connection string for one database, over TCP, as the superuser.
    pub fn conninfo(&self, database: &str) -> String {
        format!("host=127.0.0.1 port={} user=postgres dbname={database}", self.port)
    }

    /// Makes the server accept only encrypted connections from now on, except on its socket. Returns its certificate,
    /// which is its own root and is valid for 127.0.0.1.
    #[track_caller]
    pub fn encrypt(&self) -> PathBuf {
        let data = self.data_dir();
        let mut openssl = as_postgres(Path::new("openssl"));
        openssl.args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ]);
        openssl.args(["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]);
        openssl.args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout", "server.key", "-out", "server.crt"]);
        let made = openssl.current_dir(&data).output().expect("run openssl");
        assert!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
        let hba = "local all all trust\nhostssl all all all trust\nhostssl replication all all trust\n";
        std::fs::write(data.join("pg_hba.conf"), hba).expect("write pg_hba.conf");
        // Before the server reads that file: without TLS no client could connect.
        self.sql("postgres", "ALTER SYSTEM SET ssl = on");
        self.sql("postgres", "SELECT pg_reload_conf()");
        until("the server to speak TLS", || {
            let encrypted = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
            (self.try_sql("postgres", encrypted).as_deref() == Ok("t")).then_some(())
        });
        data.join("server.crt")
    }

    /// Runs SQL with psql and returns its output: tuples only, unaligned, columns split by `|`. Stops at the first
    /// error and panics with it.
    #[track_caller]
    pub fn sql(&self, database: &str, sql: &str) -> String {
        self.try_sql(database, sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// Runs SQL like [`Cluster::sql`], and returns psql's error text instead of a panic.
    ///
    /// # Errors
    /// The error text of psql.
    pub fn try_sql(&self, database: &str, sql: &str) -> Result<String, String> {
        let mut psql = self.client("psql");
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", sql]);
        let output = psql.output().expect("run psql");
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim_end().to_owned())
        }
    }

    /// Returns a command for one of the client programs (`pg_dump`, `createdb`, ...) of the cluster's version, as
    /// `postgres`, with host, port and user set in its environment.
    pub fn client(&self, program: &str) -> Command {
        let mut command = self.programs.command(program);
        command.env("PGHOST", "127.0.0.1").env("PGPORT", self.port.to_string()).env("PGUSER", "postgres");
        command.current_dir(self.dir.path());
        command
    }

    /// Runs pgbench to its end, directly on this server; panics unless it succeeds.
    #[track_caller]
    pub fn pgbench(&self, database: &str, arguments: &[&str]) -> LoadOutcome {
        let outcome = self.pgbench_load(database, self.port, arguments).finish();
        assert!(outcome.success, "pgbench {arguments:?}: {}", outcome.text);
        outcome
    }

    /// Starts pgbench against `port` of 127.0.0.1 (that of a proxy, or the server's own) in the background.
    #[track_caller]
    pub fn pgbench_load(&self, database: &str, port: u16, arguments: &[&str]) -> Load {
        let mut command = self.client("pgbench");
        command.env("PGPORT", port.to_string()).args(arguments).arg(database);
        Load::spawn(command)
    }

    /// Returns everything that the server has logged so far.
    pub fn log_text(&self) -> String {
        std::fs::read(self.dir.path().join("log"))
            .map_or_else(|_| String::new(), |b| String::from_utf8_lossy(&b).into())
    }

    /// Ends every process of the server at once, as a power cut would.
    #[track_caller]
    pub fn crash(&mut self) {
        // A stopped postmaster makes no child that would be missed.
        self.signal(Signal::STOP);
        let children = self.children();
        self.signal(Signal::KILL);
        signal_all(&children, Signal::KILL);
        let _ = self.postmaster.wait();
        // A child that still lives holds the shared memory, and a new postmaster refuses to start beside it.
        until("the children of a crashed server to end", || children.iter().all(|pid| has_ended(*pid)).then_some(()));
        let _ = std::fs::remove_file(self.data_dir().join("postmaster.pid"));
    }

    /// Stops every process of the server without ending it: clients that connect hang until [`Cluster::thaw`].
    pub fn freeze(&self) {
        self.signal_family(Signal::STOP);
    }

    /// Continues the processes after [`Cluster::freeze`].
    pub fn thaw(&self) {
        self.signal_family(Signal::CONT);
    }

    /// Ends the server in an orderly way; clients are disconnected.
    #[track_caller]
    pub fn stop(&mut self) {
        self.signal(Signal::INT);
        until("a server to end", || self.postmaster.try_wait().expect("a child can be waited for"));
    }

    /// Starts a stopped or crashed server again: same data, same port; `settings` replace those of the start when given.
    #[track_caller]
    pub fn restart(&mut self, settings: Option<&[&str]>) {
        if let Some(settings) = settings {
            self.settings = SETTINGS.iter().chain(settings).map(ToString::to_string).collect();
        }
        self.postmaster = spawn(&self.programs, self.dir.path(), self.port, &self.settings);
        self.await_ready();
    }

    #[track_caller]
    fn await_ready(&mut self) {
        until("postgres to accept connections", || {
            if let Some(status) = self.postmaster.try_wait().expect("a child can be waited for") {
                panic!("postgres ended with {status}; its log:\n{}", self.log_text());
            }
            let mut ready = self.client("pg_isready");
            ready.stdout(Stdio::null()).status().expect("run pg_isready").success().then_some(())
        });
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.postmaster.id() as i32) {
            // ESRCH: it has ended already, as wanted.
            let _ = kill_process(pid, signal);
        }
    }

    fn signal_family(&self, signal: Signal) {
        self.signal(signal);
        signal_all(&self.children(), signal);
    }

    fn children(&self) -> Vec<Pid> {
        let postmaster = self.postmaster.id();
        let children = std::fs::read_to_string(format!("/proc/{postmaster}/task/{postmaster}/children"));
        let pid = |child: &str| child.parse().ok().and_then(Pid::from_raw);
        children.unwrap_or_default().split_whitespace().filter_map(pid).collect()
    }
}

fn signal_all(pids: &[Pid], signal: Signal) {
    for pid in pids {
        // ESRCH: it has ended meanwhile.
        let _ = kill_process(*pid, signal);
    }
}

/// Returns true if a process that is not a child any more is gone, or is a zombie.
fn has_ended(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |text| text.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])))
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.thaw();
        // SIGTERM would wait until the clients disconnect.
        self.signal(Signal::INT);
        if within(Duration::from_secs(30), || self.postmaster.try_wait().ok().flatten()).is_none() {
            self.signal(Signal::KILL);
            let _ = self.postmaster.wait();
        }
    }
}

fn spawn(programs: &Programs, dir: &Path, port: u16, settings: &[String]) -> Child {
    let log: File = OpenOptions::new().create(true).append(true).open(dir.join("log")).expect("make the server's log");
    let mut command = programs.command("postgres");
    command.arg("-D").arg(dir.join("data")).args(["-p", &port.to_string(), "-k"]).arg(dir);
    for setting in settings {
        command.args(["-c", setting]);
    }
    command.current_dir(dir).stdout(log.try_clone().expect("share the log")).stderr(log);
    command.spawn().expect("start postgres")
}
