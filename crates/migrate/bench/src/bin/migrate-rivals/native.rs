//! The rival: publication and subscription, with pgbouncer in front.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use stillpoint_testing::{port::free_port, postgresql::Cluster, wait::until};

/// Server connections of its pool, unless a measurement says otherwise.
const POOL_SERVERS: usize = 64;
/// Path of Debian's pgbouncer.
const PGBOUNCER: &str = "/usr/sbin/pgbouncer";

/// Copies definitions, makes a publication and a subscription, and waits until all tables are in step.
pub(crate) fn subscribe(source: &Cluster, target: &Cluster) {
    let dump = source.client("pg_dump").args(["--schema-only", "shop"]).output().expect("run pg_dump");
    target.sql("postgres", "CREATE DATABASE shop");
    let path = target.socket_dir().join("schema.sql");
    fs::write(&path, dump.stdout).expect("keep the schema");
    let made = target.client("psql").args(["-q", "-d", "shop", "-f"]).arg(&path).output().expect("run psql");
    assert!(made.status.success(), "{made:?}");
    source.sql("shop", "CREATE PUBLICATION everything FOR ALL TABLES");
    let from = source.conninfo("shop");
    target.sql("shop", &format!("CREATE SUBSCRIPTION follower CONNECTION '{from}' PUBLICATION everything"));
    until("all tables to be copied", || {
        let sql = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'";
        (target.sql("shop", sql) == "0").then_some(())
    });
}

/// Waits until the target has all that the source has now.
pub(crate) fn await_target(source: &Cluster) {
    let now = source.sql("shop", "SELECT pg_current_wal_insert_lsn()");
    let sql = format!("SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= '{now}'");
    until("the subscription to catch up", || (source.sql("shop", &sql) == "1").then_some(()));
}

/// A pgbouncer that pools transactions: its PAUSE waits for their ends.
pub(crate) struct Pgbouncer {
    child: Child,
    port: u16,
    dir: tempfile::TempDir,
}

/// Returns true if pgbouncer is installed; prints a line if not.
pub(crate) fn available() -> bool {
    let there = Path::new(PGBOUNCER).exists();
    if !there {
        println!("pgbouncer is not installed: no rival.");
    }
    there
}

impl Pgbouncer {
    pub(crate) fn start(server: &Cluster) -> Pgbouncer {
        Pgbouncer::start_with(server, POOL_SERVERS)
    }

    /// Starts one with so many server connections.
    pub(crate) fn start_with(server: &Cluster, servers: usize) -> Pgbouncer {
        let dir = tempfile::tempdir().expect("make a directory");
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("open it");
        let port = free_port();
        configure(dir.path(), port, server, servers);
        let mut command = Command::new(PGBOUNCER);
        command.args(["-q", "-u", "postgres"]).arg(dir.path().join("ini")).stdout(Stdio::null()).stderr(Stdio::null());
        let pgbouncer = Pgbouncer { child: command.spawn().expect("start pgbouncer"), port, dir };
        until("pgbouncer to listen", || std::net::TcpStream::connect(("127.0.0.1", port)).ok());
        pgbouncer
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Pauses clients during `work`, and lets them go on at `target`.
    pub(crate) fn pause_to(&self, source: &Cluster, target: &Cluster, work: impl FnOnce()) {
        let console = |command: &str| {
            let mut psql = source.client("psql");
            psql.env("PGPORT", self.port.to_string()).args(["-q", "-d", "pgbouncer", "-c", command]);
            let output = psql.output().expect("run psql");
            assert!(output.status.success(), "{command}: {output:?}");
        };
        console("PAUSE");
        work();
        configure(self.dir.path(), self.port, target, POOL_SERVERS);
        console("RELOAD");
        console("RESUME");
    }
}

impl Drop for Pgbouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn configure(dir: &Path, port: u16, server: &Cluster, servers: usize) {
    let users = dir.join("users");
    fs::write(&users, "\"postgres\" \"\"\n").expect("write the users");
    let text = format!(
        "[databases]\nshop = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
         listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {}\nadmin_users = postgres\n\
         pool_mode = transaction\ndefault_pool_size = {servers}\nmax_client_conn = 400\nlogfile = {}\n",
        server.port(),
        users.display(),
        dir.join("log").display()
    );
    fs::write(dir.join("ini"), text).expect("write pgbouncer's configuration");
    for name in ["users", "ini"] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        fs::set_permissions(dir.join(name), mode).expect("let pgbouncer read it");
    }
    let log = fs::File::options().create(true).append(true).open(dir.join("log")).expect("make a log");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    log.set_permissions(mode).expect("let pgbouncer write it");
}
