//! Two servers, the networks to them, the proxy, and the tool.

use crate::stillpoint;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stillpoint_events::Event;
use stillpoint_testing::{
    port::free_port,
    postgresql::{Cluster, Relay},
    wait::within,
};

/// The database that is moved.
const DATABASE: &str = "shop";
/// Time after which a tool that still runs counts as hung.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// All parts of a migration, and a directory for its files.
#[derive(Debug)]
pub struct Testbed {
    /// The server that holds the database at first.
    pub source: Cluster,
    /// The other server.
    pub target: Cluster,
    /// Network through which proxy and tool reach the source.
    pub to_source: Relay,
    /// Network through which proxy and tool reach the target.
    pub to_target: Relay,
    /// Ports at which source and target are reached.
    ports: [u16; 2],
    proxy: Option<Proxy>,
    standby: Option<Proxy>,
    port: u16,
    dir: tempfile::TempDir,
}

/// A proxy's process.
#[derive(Debug)]
pub struct Proxy {
    child: Child,
    told: Receiver<String>,
}

/// A `stillpoint migrate` command that runs.
#[derive(Debug)]
pub struct Tool {
    child: Child,
    events: Receiver<Event>,
    /// Events so far.
    pub seen: Vec<Event>,
    complaints: Option<JoinHandle<String>>,
}

/// Result of a command.
#[derive(Debug)]
pub struct CommandResult {
    /// Exit code; none if a signal ended the command.
    pub code: Option<i32>,
    /// Events that it printed.
    pub events: Vec<Event>,
    /// Text of its error output.
    pub complaints: String,
}

impl Testbed {
    /// Starts everything, with an empty database `shop`.
    #[track_caller]
    pub fn start() -> Testbed {
        let settings = ["wal_level=logical", "deadlock_timeout=100ms"];
        Testbed::of(Cluster::start(&settings), Cluster::start(&settings))
    }

    /// Starts a stage whose source's log has no row changes: the proxy captures them.
    #[track_caller]
    pub fn without_logical_log() -> Testbed {
        let deadlocks = "deadlock_timeout=100ms";
        let source = Cluster::start(&["wal_level=replica", "max_replication_slots=0", deadlocks]);
        Testbed::of(source, Cluster::start(&["wal_level=logical", deadlocks]))
    }

    /// Starts a stage with servers that run.
    #[track_caller]
    pub fn of(source: Cluster, target: Cluster) -> Testbed {
        Testbed::reached(source, target, false, &[DATABASE])
    }

    /// Starts a stage for measurements: proxy and tool reach the servers directly, and the networks have no effect.
    #[track_caller]
    pub fn direct(source: Cluster, target: Cluster) -> Testbed {
        Testbed::reached(source, target, true, &[DATABASE])
    }

    /// Starts a stage with several databases, each of which can be moved.
    #[track_caller]
    pub fn of_tenants(source: Cluster, target: Cluster, databases: &[&str]) -> Testbed {
        Testbed::reached(source, target, true, databases)
    }

    #[track_caller]
    fn reached(source: Cluster, target: Cluster, directly: bool, databases: &[&str]) -> Testbed {
        databases.iter().for_each(|name| drop(source.sql("postgres", &format!("CREATE DATABASE {name}"))));
        let (to_source, to_target) = (Relay::to(source.port()), Relay::to(target.port()));
        let ports = if directly { [source.port(), target.port()] } else { [to_source.port(), to_target.port()] };
        let dir = tempfile::TempDir::with_prefix("stillpoint-trial-").expect("make a directory");
        let mut testbed =
            Testbed { source, target, to_source, to_target, ports, proxy: None, standby: None, port: free_port(), dir };
        let tenants: String = databases.iter().map(|name| format!("[tenants.{name}]\nserver = \"old\"\n")).collect();
        let text = format!(
            "listen = [\"127.0.0.1:{}\"]\ncontrol = {:?}\nroutes = {:?}\nworkers = 2\n[servers.old]\n\
             host = \"127.0.0.1\"\nport = {}\n{tenants}",
            testbed.port,
            testbed.path("proxy.sock"),
            testbed.path("routes.json"),
            testbed.ports[0]
        );
        std::fs::write(testbed.path("proxy.toml"), text).expect("write the proxy's configuration");
        testbed.start_proxy();
        testbed
    }

    /// Path of a file in the directory of this stage.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the proxy, unless it runs.
    #[track_caller]
    pub fn start_proxy(&mut self) {
        if self.proxy.is_none() {
            let proxy = self.spawn_proxy(&[]);
            assert!(proxy.wait_for_event("proxy-started"), "the proxy ended");
            self.proxy = Some(proxy);
        }
    }

    /// Starts a proxy that stands by.
    #[track_caller]
    pub fn start_standby(&mut self) {
        let standby = self.spawn_proxy(&["--standby"]);
        assert!(standby.wait_for_event("proxy-stands-by"), "the standby ended");
        self.standby = Some(standby);
    }

    #[track_caller]
    fn spawn_proxy(&self, words: &[&str]) -> Proxy {
        let log = std::fs::File::options().create(true).append(true).open(self.path("proxy.log")).expect("make a log");
        let mut command = self.proxy_command(words);
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().expect("start the proxy");
        let (out, (sender, told)) = (child.stdout.take().expect("piped"), channel());
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // The output is no longer read once the proxy serves.
                let _ = sender.send(line);
            }
        });
        Proxy { child, told }
    }

    /// Command `stillpoint migrate proxy WORDS` with the configuration of this stage.
    pub fn proxy_command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(stillpoint());
        command.args(["--json", "migrate", "proxy", "--config"]).arg(self.config()).args(words);
        command
    }

    /// The proxy's configuration file.
    pub fn config(&self) -> PathBuf {
        self.path("proxy.toml")
    }

    /// Ends the proxy as a crash would.
    pub fn kill_proxy(&mut self) {
        // It ends when dropped.
        self.proxy = None;
    }

    /// Ends the standby as a crash would.
    pub fn kill_standby(&mut self) {
        self.standby = None;
    }

    /// Ends the proxy as a crash would; returns the time until the standby serves.
    #[track_caller]
    pub fn kill_proxy_before_standby(&mut self) -> Duration {
        let begun = Instant::now();
        self.kill_proxy();
        self.standby_serves();
        begun.elapsed()
    }

    /// Lets the proxy end after its transactions; returns it once the standby serves.
    #[track_caller]
    pub fn retire_proxy_before_standby(&mut self) -> Proxy {
        let retired = self.proxy.take().expect("a proxy serves");
        retired.signal(Signal::TERM);
        self.standby_serves();
        retired
    }

    /// Waits until the standby serves in the place of a proxy that was ordered to end; returns that one.
    #[track_caller]
    pub fn replaced_by_standby(&mut self) -> Proxy {
        let retired = self.proxy.take().expect("a proxy serves");
        self.standby_serves();
        retired
    }

    #[track_caller]
    fn standby_serves(&mut self) {
        let standby = self.standby.take().expect("a proxy stands by");
        assert!(standby.wait_for_event("proxy-started"), "the standby ended");
        self.proxy = Some(standby);
    }

    /// Connection string for clients.
    pub fn conninfo(&self) -> String {
        self.conninfo_of(DATABASE)
    }

    /// Connection string for one of several databases.
    pub fn conninfo_of(&self, database: &str) -> String {
        format!("host=127.0.0.1 port={} user=postgres dbname={database}", self.port)
    }

    /// The proxy's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    fn command(&self, words: &[&str]) -> Command {
        self.command_of(DATABASE, words)
    }

    fn command_of(&self, database: &str, words: &[&str]) -> Command {
        let server = |port: u16| format!("host=127.0.0.1 port={port} user=postgres dbname={database}");
        let [source, target] = self.ports.map(server);
        let mut command = Command::new(stillpoint());
        command.args(["--json", "migrate"]).args(words);
        command.arg("--source").arg(source).arg("--target").arg(target);
        command.arg("--proxy").arg(self.path("proxy.sock")).arg("--state").arg(self.path("state"));
        command
    }

    /// Starts `stillpoint migrate WORDS` on this stage's servers.
    #[track_caller]
    pub fn tool(&self, words: &[&str]) -> Tool {
        Tool::spawn(self.command(words))
    }

    /// Starts `stillpoint migrate WORDS` for one of several databases.
    #[track_caller]
    pub fn tool_of(&self, database: &str, words: &[&str]) -> Tool {
        Tool::spawn(self.command_of(database, words))
    }

    /// Runs such a command to its end.
    #[track_caller]
    pub fn run(&self, words: &[&str]) -> CommandResult {
        self.tool(words).end()
    }

    /// Runs such a command, which must succeed.
    #[track_caller]
    pub fn succeed(&self, words: &[&str]) -> CommandResult {
        let ended = self.run(words);
        assert_eq!(ended.code, Some(0), "{words:?}: {ended:?}");
        ended
    }

    /// The first JSON object that such a command prints; null if it prints none.
    pub fn ask(&self, words: &[&str]) -> serde_json::Value {
        let output = self.command(words).output().expect("run stillpoint");
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().next().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default()
    }

    /// State of the migration: its phase in the journal, and the side that serves.
    pub fn standing(&self) -> (Option<String>, Option<String>) {
        let status = self.ask(&["status"]);
        let word = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        (word(&status["record"]["phase"]), word(&status["serving"]))
    }

    /// Panics unless the source has no trace of a migration, and the target holds nothing.
    #[track_caller]
    pub fn assert_clean(&self) {
        let count = |cluster: &Cluster, database: &str, what: &str| {
            cluster.sql(database, &format!("SELECT count(*) FROM {what}"))
        };
        assert_eq!(count(&self.source, DATABASE, "pg_replication_slots"), "0", "slots");
        assert_eq!(count(&self.source, DATABASE, "pg_publication"), "0", "publications");
        assert_eq!(count(&self.source, DATABASE, "pg_namespace WHERE nspname = 'stillpoint'"), "0", "schema");
        assert_eq!(self.source.sql(DATABASE, "SHOW default_transaction_read_only"), "off", "fence");
        assert_eq!(count(&self.target, "postgres", "pg_replication_slots"), "0", "the target's slots");
        assert_eq!(count(&self.target, "postgres", &format!("pg_database WHERE datname = '{DATABASE}'")), "0");
    }
}

/// Sends a signal to a child, which may have ended by itself.
fn signal_child(child: &Child, signal: Signal) {
    if let Some(pid) = Pid::from_raw(child.id() as i32) {
        let _ = kill_process(pid, signal);
    }
}

impl Proxy {
    /// Waits until it reports an event; false if it ended before.
    fn wait_for_event(&self, event: &str) -> bool {
        let wanted = format!("\"event\":\"{event}\"");
        std::iter::from_fn(|| self.told.recv_timeout(WAIT_TIMEOUT).ok()).any(|line| line.contains(&wanted))
    }

    fn signal(&self, signal: Signal) {
        signal_child(&self.child, signal);
    }

    /// Exit status, if it has ended.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        self.kill_standby();
        self.kill_proxy();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.path("proxy.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            println!("the proxy's last words:\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
    }
}

impl Tool {
    #[track_caller]
    fn spawn(mut command: Command) -> Tool {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("start stillpoint");
        let (out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let (sender, events) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Ok(event) = serde_json::from_str(&line) {
                    // Events are no longer read once the tool is waited for.
                    let _ = sender.send(event);
                }
            }
        });
        let complaints = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = err.read_to_string(&mut text);
            text
        });
        Tool { child, events, seen: Vec::new(), complaints: Some(complaints) }
    }

    /// Waits for an event; false if the tool ended before it.
    pub fn await_event(&mut self, wanted: impl Fn(&Event) -> bool) -> bool {
        while let Ok(event) = self.events.recv_timeout(WAIT_TIMEOUT) {
            let found = wanted(&event);
            self.seen.push(event);
            if found {
                return true;
            }
        }
        false
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        signal_child(&self.child, signal);
    }

    /// Exit status, if it has ended.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Waits for its end; panics if it hangs.
    #[track_caller]
    pub fn end(self) -> CommandResult {
        self.end_within(WAIT_TIMEOUT)
    }

    /// Waits for its end as [`Tool::end`] does, with a limit of its own.
    #[track_caller]
    pub fn end_within(mut self, limit: Duration) -> CommandResult {
        let begun = Instant::now();
        let status = within(limit, || self.exit_status());
        let status = status.unwrap_or_else(|| {
            self.seen.extend(self.events.try_iter());
            panic!("the tool hangs for {:?}; events: {:#?}", begun.elapsed(), self.seen)
        });
        // Its outputs are closed: both readers end.
        while let Ok(event) = self.events.recv() {
            self.seen.push(event);
        }
        let complaints = self.complaints.take().map(|reader| reader.join().unwrap_or_default()).unwrap_or_default();
        CommandResult { code: status.code(), events: std::mem::take(&mut self.seen), complaints }
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
