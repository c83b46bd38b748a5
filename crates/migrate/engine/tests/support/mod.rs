//! What the tests of whole migrations share: two servers, a stand-in for the proxy's control socket, a comparison.
#![allow(dead_code, reason = "each test uses a part")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use stillpoint_events::Event;
use stillpoint_migrate_engine::{Observer, Options, Server};
use stillpoint_migrate_testbed::{Cluster, Load, until};

/// Two servers with a state directory and a control socket that behaves as the proxy's, with load that is ended by a
/// pause instead of being held.
pub(crate) struct Bench {
    pub(crate) source: Cluster,
    pub(crate) target: Cluster,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) front: Arc<Mutex<FakeFront>>,
}

/// The state of the stand-in.
pub(crate) struct FakeFront {
    /// Host and port that serve.
    pub(crate) serving: (String, u16),
    prepared: Option<(String, u16)>,
    paused: bool,
    /// Load that a pause ends.
    pub(crate) load: Option<Load>,
    /// What was asked, in order.
    pub(crate) asked: Vec<String>,
    /// Requests that are answered with an error.
    pub(crate) refuse: Vec<&'static str>,
}

impl Bench {
    pub(crate) fn start() -> Bench {
        let settings = ["wal_level=logical", "autovacuum_naptime=1s"];
        let (source, target) = (Cluster::start(&settings), Cluster::start(&settings));
        let dir = tempfile::tempdir().expect("make a directory");
        let front = FakeFront {
            serving: ("127.0.0.1".into(), source.port()),
            prepared: None,
            paused: false,
            load: None,
            asked: Vec::new(),
            refuse: Vec::new(),
        };
        let front = Arc::new(Mutex::new(front));
        let listener = UnixListener::bind(dir.path().join("control")).expect("bind the control socket");
        let shared = Arc::clone(&front);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let front = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &front));
            }
        });
        Bench { source, target, dir, front }
    }

    pub(crate) fn options(&self, database: &str) -> Options {
        let source = Server::parse("source", &self.source.conninfo(database), None).expect("a connection string");
        let target = Server::parse("target", &self.target.conninfo(database), None).expect("a connection string");
        let mut options = Options::new(source, target, self.dir.path().join("control"), self.state());
        // Noisy machines: what is tested is what happens, not how fast.
        options.pause_limit = std::time::Duration::from_secs(10);
        options
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// One line for each table of both sides; equal when they hold the same.
    pub(crate) fn sums(&self, database: &str) -> (String, String) {
        (sums(&self.source, database), sums(&self.target, database))
    }

    /// Panics unless nothing of a migration is left on the source, and no database on the target.
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

fn serve(stream: UnixStream, front: &Mutex<FakeFront>) {
    let mut lines = BufReader::new(stream.try_clone().expect("share a socket")).lines();
    let mut out = stream;
    while let Some(Ok(line)) = lines.next() {
        let request: Value = serde_json::from_str(&line).expect("requests are JSON");
        let reply = front.lock().expect("no test thread panicked").answer(&request);
        if writeln!(out, "{reply}").is_err() {
            return;
        }
    }
}

impl FakeFront {
    /// A client that was killed leaves a backend that first ends what it is at.
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

    fn answer(&mut self, request: &Value) -> Value {
        let kind = request["request"].as_str().expect("requests have a kind").to_owned();
        if kind != "status" {
            self.asked.push(kind.clone());
        }
        if self.refuse.contains(&kind.as_str()) {
            return json!({ "reply": "error", "message": format!("{kind} is refused by the test") });
        }
        match kind.as_str() {
            "status" => json!({ "reply": "status", "tenants": [
                { "name": request["tenant"].as_str().unwrap_or("shop"),
                  "server": { "host": self.serving.0, "port": self.serving.1 } } ] }),
            "prepare" => {
                let target = &request["target"];
                let port = target["port"].as_u64().expect("a port") as u16;
                self.prepared = Some((target["host"].as_str().expect("a host").to_owned(), port));
                json!({ "reply": "prepared", "sessions": 0, "waiting": [], "pinned": [], "failed": [] })
            }
            "pause" => {
                if let Some(load) = self.load.take() {
                    load.end();
                    self.until_quiet();
                }
                self.paused = true;
                json!({ "reply": "drained", "waited_us": 1 })
            }
            "switch" if self.paused => {
                self.serving = self.prepared.clone().expect("prepared before");
                self.paused = false;
                json!({ "reply": "switched", "sessions": 0, "failed": [] })
            }
            "resume" => {
                self.paused = false;
                json!({ "reply": "resumed" })
            }
            "abandon" => json!({ "reply": "abandoned" }),
            other => json!({ "reply": "error", "message": format!("{other} out of turn") }),
        }
    }
}

/// Keeps events, and prints them for a failing test.
pub(crate) fn observer() -> (Observer, Arc<Mutex<Vec<Event>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&events);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        kept.lock().expect("no test thread panicked").push(event);
    });
    (observer, events)
}
