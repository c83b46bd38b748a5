//! Support for tests of whole migrations: two servers, a stand-in for the proxy's control socket, a comparison.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use stillpoint_events::Event;
use stillpoint_migrate_control::{
    Activity, CounterStatus, Phase, Reply, Request, SessionStatus, Status, TargetSpec, TenantStatus,
};
use stillpoint_migrate_engine::{Observer, Options, Server};
use stillpoint_migrate_postgres::{Server as ProxyServer, ServerTls};
use stillpoint_testing::{
    port::free_port,
    postgresql::{Cluster, Load, Programs},
    wait::until,
};

/// Two servers with a state directory and a control socket that behaves like the proxy's. A pause ends the load instead
/// of holding it.
pub(crate) struct Bench {
    pub(crate) source: Cluster,
    pub(crate) target: Cluster,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) fake_proxy: Arc<Mutex<FakeProxy>>,
}

/// The state of the stand-in.
pub(crate) struct FakeProxy {
    /// Host and port that serve.
    pub(crate) serving: (String, u16),
    prepared: Option<(String, u16)>,
    paused: bool,
    /// Loads that a pause ends.
    pub(crate) loads: Vec<Load>,
    /// Requests so far, in order.
    pub(crate) asked: Vec<String>,
    /// Requests that are answered with an error.
    pub(crate) refuse: Vec<&'static str>,
    /// Clients whose statements the proxy counts.
    pub(crate) clients: Option<FakeClients>,
    /// Statements of a session that bypasses the proxy, one for each pause, executed in `shop` once clients are
    /// stopped.
    pub(crate) at_pause: Vec<&'static str>,
}

/// Clients as the proxy counts them.
pub(crate) struct FakeClients {
    rate: f64,
    /// Duration of each statement, in microseconds.
    wait: u64,
    since: std::time::Instant,
    sent: f64,
    waits: std::collections::BTreeMap<u64, f64>,
}

impl FakeClients {
    pub(crate) fn at(rate: f64, wait: u64) -> FakeClients {
        FakeClients { rate, wait, since: std::time::Instant::now(), sent: 0.0, waits: Default::default() }
    }

    /// Changes the load: `rate` statements a second from now on, of `wait` microseconds each.
    pub(crate) fn go_at(&mut self, rate: f64, wait: u64) {
        let more = self.rate * self.since.elapsed().as_secs_f64();
        self.sent += more;
        *self.waits.entry(self.wait).or_default() += more;
        (self.rate, self.wait, self.since) = (rate, wait, std::time::Instant::now());
    }

    fn waits(&mut self) -> Vec<(u64, u64)> {
        self.go_at(self.rate, self.wait);
        self.waits.iter().map(|(end, count)| (*end, *count as u64)).collect()
    }

    fn session(&mut self) -> SessionStatus {
        self.go_at(self.rate, self.wait);
        SessionStatus {
            id: 1,
            tenant: "shop".into(),
            user: "postgres".into(),
            database: "shop".into(),
            client: "-".into(),
            state: Activity::Idle,
            pinned: None,
            kept: None,
            process: None,
            backend: None,
            prepared: true,
            transaction_ms: None,
            statements: self.sent as u64,
        }
    }
}

/// Settings that both servers of a bench have, and more.
fn with_common<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["wal_level=logical", "autovacuum_naptime=1s"], more].concat()
}

impl Bench {
    pub(crate) fn start() -> Bench {
        Bench::start_with(&[])
    }

    /// Starts a bench with pgbench's tables in the source's database `shop`.
    pub(crate) fn with_shop() -> Bench {
        let bench = Bench::start();
        bench.source.sql("postgres", "CREATE DATABASE shop");
        bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
        bench
    }

    /// Starts a bench with more settings for both servers.
    pub(crate) fn start_with(more: &[&str]) -> Bench {
        Bench::start_apart(more, more)
    }

    /// Starts a bench with more settings for the source, and others for the target.
    pub(crate) fn start_apart(source: &[&str], target: &[&str]) -> Bench {
        Bench::of(Cluster::start(&with_common(source)), Cluster::start(&with_common(target)))
    }

    /// Starts a bench with servers of a given version, and more settings for both.
    pub(crate) fn of_programs(programs: &Programs, more: &[&str]) -> Bench {
        let start = || Cluster::of_programs(programs, &with_common(more));
        Bench::of(start(), start())
    }

    /// Starts a bench with a target of another major version, and more settings for it.
    pub(crate) fn to_newer(major: u32, more: &[&str]) -> Bench {
        Bench::of(Cluster::start(&with_common(&[])), Cluster::of_major(major, &with_common(more)))
    }

    fn of(source: Cluster, target: Cluster) -> Bench {
        let dir = tempfile::tempdir().expect("make a directory");
        let fake_proxy = FakeProxy {
            serving: ("127.0.0.1".into(), source.port()),
            prepared: None,
            paused: false,
            loads: Vec::new(),
            asked: Vec::new(),
            refuse: Vec::new(),
            clients: None,
            at_pause: Vec::new(),
        };
        let fake_proxy = Arc::new(Mutex::new(fake_proxy));
        let listener = UnixListener::bind(dir.path().join("control")).expect("bind the control socket");
        let shared = Arc::clone(&fake_proxy);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let fake_proxy = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &fake_proxy));
            }
        });
        Bench { source, target, dir, fake_proxy }
    }

    pub(crate) fn options(&self, database: &str) -> Options {
        let source = Server::parse("source", &self.source.conninfo(database), None).expect("a connection string");
        let target = Server::parse("target", &self.target.conninfo(database), None).expect("a connection string");
        let mut options = Options::new(source, target, self.dir.path().join("control"), self.state());
        // A long limit for noisy machines: the tests are about results, not about speed.
        options.pause_limit = std::time::Duration::from_secs(10);
        options
    }

    /// Options with other connection strings, and at full speed: `rest` follows host and port.
    pub(crate) fn options_as(&self, rest: &str, database: Option<&str>) -> Options {
        let server = |side: &str, cluster: &Cluster| {
            let place = format!("host=127.0.0.1 port={} {rest}", cluster.port());
            Server::parse(side, &place, database).expect("a connection string")
        };
        let (source, target) = (server("source", &self.source), server("target", &self.target));
        Options { source, target, share: 0.0, ..self.options("shop") }
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// Opens the fenced source for reading.
    pub(crate) fn look_into_source(&self, database: &str) {
        self.source.sql("postgres", &format!("ALTER DATABASE {database} ALLOW_CONNECTIONS true"));
    }

    /// Makes a database `shop` with one table, `big`, whose copy takes a while.
    pub(crate) fn fill_big(&self, rows: u32) {
        self.source.sql("postgres", "CREATE DATABASE shop");
        let rows = format!(
            "CREATE TABLE big AS SELECT g AS id, repeat(md5(g::text), 30) AS note FROM generate_series(1, {rows}) g"
        );
        self.source.sql("shop", &format!("{rows}; ALTER TABLE big ADD PRIMARY KEY (id)"));
    }

    /// Checksums of both sides, one line for each table; they are equal if both sides hold the same.
    pub(crate) fn sums(&self, database: &str) -> (String, String) {
        self.look_into_source(database);
        (sums(&self.source, database), sums(&self.target, database))
    }

    /// Panics if anything of a migration is left on the source, or a database on the target.
    #[track_caller]
    pub(crate) fn assert_clean(&self, database: &str) {
        let source = &self.source;
        assert_eq!(source.sql(database, "SELECT count(*) FROM pg_replication_slots"), "0", "slots");
        assert_eq!(source.sql(database, "SELECT count(*) FROM pg_publication"), "0", "publications");
        assert_eq!(
            source.sql(database, "SELECT count(*) FROM pg_namespace WHERE nspname = 'stillpoint'"),
            "0",
            "schema"
        );
        assert_eq!(
            source.sql(
                database,
                "SELECT count(*) FROM pg_class WHERE relreplident <> 'd' AND relnamespace = 2200 AND relkind = 'r'"
            ),
            "0"
        );
        assert_eq!(source.sql(database, "SHOW default_transaction_read_only"), "off", "fence");
        let there = format!("SELECT count(*) FROM pg_database WHERE datname = '{database}'");
        assert_eq!(self.target.sql("postgres", &there), "0", "the target's database");
        assert_eq!(self.target.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "0", "the target's slots");
        assert!(!self.state().join(format!("{database}.json")).exists(), "journal");
    }
}

pub(crate) fn sums(cluster: &Cluster, database: &str) -> String {
    let tables = cluster.sql(
        database,
        "SELECT string_agg(format('SELECT %L, count(*), coalesce(sum(hashtextextended(x::text, 0)), 0) FROM ONLY %s x', \
         c.oid::regclass, c.oid::regclass), ' UNION ALL ' ORDER BY c.oid::regclass::text) FROM pg_class c \
         JOIN pg_namespace n ON n.oid = c.relnamespace WHERE relkind = 'r' AND nspname NOT IN ('pg_catalog', \
         'information_schema', 'stillpoint')",
    );
    cluster.sql(database, &tables)
}

/// Definitions as a program from outside prints them, without what the migration still keeps for the way back.
pub(crate) fn dumped(bench: &Bench, cluster: &Cluster) -> String {
    let mut command = bench.target.client("pg_dump");
    command.args(["-s", "-h", "127.0.0.1", "-p", &cluster.port().to_string(), "-N", "stillpoint", "--no-publications"]);
    let output =
        command.args(["-d", "shop", "-U", "postgres"]).stderr(std::process::Stdio::inherit()).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let of_migration =
        |line: &&str| line.starts_with('\\') || line.starts_with("-- Dumped ") || line.contains(" REPLICA IDENTITY ");
    text.lines().filter(|line| !of_migration(line)).map(|line| format!("{line}\n")).collect()
}

/// Panics unless definitions are the same on both sides, and shows the lines that only one has.
#[track_caller]
pub(crate) fn assert_same_definitions(bench: &Bench) {
    let (source, target) = (dumped(bench, &bench.source), dumped(bench, &bench.target));
    let lines = |one: &str, other: &str| -> Vec<String> {
        one.lines().filter(|line| !other.contains(line)).map(str::to_owned).collect()
    };
    assert_eq!((lines(&source, &target), lines(&target, &source)), Default::default());
    // Rights of an object are printed in the order in which they were given.
    let counts = |text: &str| {
        let mut counts = std::collections::BTreeMap::<String, usize>::new();
        text.lines().filter(|line| !line.is_empty()).for_each(|line| *counts.entry(line.to_owned()).or_default() += 1);
        counts
    };
    let (here, there) = (counts(&source), counts(&target));
    let other = here.iter().filter(|(line, count)| there.get(*line) != Some(*count));
    let other: Vec<_> = other.map(|(line, count)| (line, *count, there.get(line))).collect();
    assert!(other.is_empty(), "{other:?}");
}

fn serve(stream: UnixStream, fake_proxy: &Mutex<FakeProxy>) {
    let mut lines = BufReader::new(stream.try_clone().expect("share a socket")).lines();
    let mut out = stream;
    while let Some(Ok(line)) = lines.next() {
        let request: Request = serde_json::from_str(&line).expect("requests are understood");
        let reply = fake_proxy.lock().expect("no test thread panicked").answer(&request);
        if writeln!(out, "{}", serde_json::to_string(&reply).expect("replies are JSON")).is_err() {
            return;
        }
    }
}

fn place((host, port): (String, u16)) -> ProxyServer {
    ProxyServer { name: String::new(), host, port, database: None, tls: ServerTls::Disable, ca: None }
}

impl FakeProxy {
    /// Waits for backends of killed clients, which first end their current statement.
    fn until_quiet(&self) {
        let port = self.serving.1.to_string();
        until("backends of the load to end", || {
            let mut psql = std::process::Command::new("psql");
            psql.args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres", "-Atc"]);
            psql.arg("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgbench'");
            let output = psql.output().expect("run psql");
            (output.stdout.trim_ascii() == b"0").then_some(())
        });
    }

    fn beside(&mut self) {
        if self.at_pause.is_empty() {
            return;
        }
        let sql = self.at_pause.remove(0);
        let place = format!("host=127.0.0.1 port={} user=postgres dbname=shop", self.serving.1);
        let mut psql = std::process::Command::new("psql");
        let output = psql.args(["-X", "-q", "-d", &place, "-c", sql]).output().expect("run psql");
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn answer(&mut self, request: &Request) -> Reply {
        let kind = match request {
            Request::Status => return Reply::Status(self.status()),
            Request::Prepare { .. } => "prepare",
            Request::Pause { .. } => "pause",
            Request::Switch { .. } => "switch",
            Request::Resume { .. } => "resume",
            Request::Abandon { .. } => "abandon",
            // The proxy has more requests than the manager uses.
            #[allow(unreachable_patterns, reason = "other requests")]
            _ => return Reply::Error { message: "the stand-in knows nothing of it".into() },
        };
        self.asked.push(kind.to_owned());
        let refused = |why: &str| Reply::Error { message: format!("{kind} {why}") };
        if self.refuse.contains(&kind) {
            return refused("is refused by the test");
        }
        match request {
            Request::Prepare { target: TargetSpec::Server(server), .. } => {
                self.prepared = Some((server.host.clone(), server.port));
                Reply::Prepared { sessions: 0, waiting: Vec::new(), pinned: Vec::new(), failed: Vec::new() }
            }
            Request::Pause { .. } => {
                if !self.loads.is_empty() {
                    self.loads.drain(..).for_each(Load::end);
                    self.until_quiet();
                }
                self.beside();
                self.paused = true;
                Reply::Drained { waited_us: 1 }
            }
            Request::Switch { .. } if self.paused => {
                self.serving = self.prepared.clone().expect("prepared before");
                self.paused = false;
                Reply::Switched { sessions: 0, failed: Vec::new() }
            }
            Request::Resume { .. } => {
                self.paused = false;
                Reply::Resumed
            }
            Request::Abandon { .. } => Reply::Abandoned,
            _ => refused("out of turn"),
        }
    }

    fn status(&mut self) -> Status {
        let (server, phase) = (place(self.serving.clone()), Phase::Serving);
        let waits = self.clients.as_mut().map(FakeClients::waits).unwrap_or_default();
        let tenant = TenantStatus {
            name: "shop".into(),
            server,
            phase,
            target: None,
            waits,
            mirror: None,
            pool: None,
            shared_backends: Vec::new(),
        };
        Status {
            tenants: vec![tenant],
            sessions: self.clients.iter_mut().map(FakeClients::session).collect(),
            counters: CounterStatus::default(),
            standby: None,
        }
    }
}

/// Starts a proxy in a thread; it ends with the test's process. Returns its port and control socket.
pub(crate) fn proxy(dir: &Path, source: &Cluster) -> (u16, PathBuf) {
    proxy_for(dir, source, "shop")
}

/// Starts a proxy for another database, or for all (`*`).
pub(crate) fn proxy_for(dir: &Path, source: &Cluster, tenant: &str) -> (u16, PathBuf) {
    let port = free_port();
    let control = dir.join("proxy.sock");
    let text = format!(
        "listen = [\"127.0.0.1:{port}\"]\ncontrol = {control:?}\nroutes = {:?}\nworkers = 2\n\
         [servers.old]\nhost = \"127.0.0.1\"\nport = {}\n[tenants.{tenant:?}]\nserver = \"old\"\n",
        dir.join("routes.json"),
        source.port()
    );
    let path = dir.join("proxy.toml");
    std::fs::write(&path, &text).expect("write the configuration");
    let (ready, started) = mpsc::channel();
    std::thread::spawn(move || {
        let failed = ready.clone();
        if let Err(error) = stillpoint_migrate_proxy::run(&path, |_| ready.send(None).expect("the test waits")) {
            let _ = failed.send(Some(error.to_string()));
        }
    });
    assert_eq!(started.recv().expect("the proxy starts or says why not"), None, "{text}");
    (port, control)
}

/// An observer that keeps events, and prints them for a failing test.
pub(crate) fn observer() -> (Observer, Arc<Mutex<Vec<Event>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&events);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        kept.lock().expect("no test thread panicked").push(event);
    });
    (observer, events)
}
