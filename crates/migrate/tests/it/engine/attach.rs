//! The proxy is put in front of a server that clients reach directly, and removed again: rules, sessions and refusals,
//! in networks of the test's own.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use stillpoint_migrate_attach::{AttachOptions, DetachOptions, DetachReport, Error, attach, detach};
use stillpoint_migrate_control::{Client, Reply, Request, Status};
use stillpoint_migrate_engine::{Server, running_migrations};
use stillpoint_testing::{
    child::{ChildGuard, bound_command},
    port::free_port,
    postgresql::{Cluster, available},
    wait::until,
};

/// Address of the server's machine, as clients on the other machine see it.
const SERVER: &str = "10.88.0.1";

/// Creates another network, held by a process that does nothing else.
fn network() -> ChildGuard {
    let ours = std::fs::read_link("/proc/self/ns/net").expect("a process has a network");
    let child = bound_command("unshare".as_ref()).args(["--net", "sleep", "infinity"]).spawn().expect("run unshare");
    let network = ChildGuard::from_child(child);
    let path = place(&network);
    until("a network of its own", || std::fs::read_link(&path).is_ok_and(|theirs| theirs != ours).then_some(()));
    network
}

fn place(network: &ChildGuard) -> PathBuf {
    format!("/proc/{}/ns/net", network.pid()).into()
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Puts this thread, and every process that it starts, on a machine of its own; returns both networks.
fn two_machines() -> [ChildGuard; 2] {
    let (here, there) = (network(), network());
    let entered = File::open(place(&here)).expect("the network is there");
    move_into_link_name_space(entered.as_fd(), Some(LinkNameSpaceType::Network)).expect("go into the network");
    run("ip", &["link", "set", "lo", "up"]);
    run("ip", &["link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", &there.pid().to_string()]);
    run("ip", &["addr", "add", &format!("{SERVER}/24"), "dev", "v0"]);
    run("ip", &["link", "set", "v0", "up"]);
    let inside = format!("--net={}", place(&there).display());
    run("nsenter", &[&inside, "ip", "addr", "add", "10.88.0.2/24", "dev", "v1"]);
    run("nsenter", &[&inside, "ip", "link", "set", "v1", "up"]);
    [here, there]
}

/// A client that stays connected.
struct Session {
    psql: ChildGuard,
    lines: Receiver<String>,
    /// Process number of its server process.
    backend: u32,
}

impl Session {
    fn open(mut psql: Command) -> Session {
        psql.args(["-X", "-q", "-A", "-t", "-d", "shop"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut psql = ChildGuard::from_child(psql.spawn().expect("run psql"));
        let out = BufReader::new(psql.child().stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut session = Session { psql, lines, backend: 0 };
        session.backend = session.ask("SELECT pg_backend_pid()").expect("it is let in").parse().expect("a number");
        session
    }

    /// Asks for one value; `None` if the session has ended.
    fn ask(&mut self, sql: &str) -> Option<String> {
        let stdin = self.psql.child().stdin.as_mut().expect("piped");
        writeln!(stdin, "{sql};").ok()?;
        self.lines.recv_timeout(Duration::from_secs(60)).ok()
    }
}

/// The server's machine with a proxy; the configuration does not list all of the server's databases.
struct Scene {
    cluster: Cluster,
    dir: tempfile::TempDir,
    config: PathBuf,
    runtime: tokio::runtime::Runtime,
    machines: [ChildGuard; 2],
}

impl Scene {
    fn set() -> Scene {
        let machines = two_machines();
        let cluster = Cluster::start(&["listen_addresses=*"]);
        cluster.sql("postgres", "CREATE DATABASE shop");
        let dir = tempfile::tempdir().expect("make a directory");
        let config = dir.path().join("proxy.toml");
        let path = |name: &str| dir.path().join(name).display().to_string();
        let text = format!(
            "# ours\nlisten = [\"0.0.0.0:{}\"]\ncontrol = {:?}\nroutes = {:?}\nworkers = 1\n[servers.old]\nhost = \
             \"127.0.0.1\"\nport = {}\n[tenants.shop]\nserver = \"old\"\n[[allow]]\nfrom = [\"10.88.0.0/24\"]\n",
            free_port(),
            path("control"),
            path("routes.json"),
            cluster.port()
        );
        std::fs::write(&config, text).expect("write the configuration");
        let (ready, started) = channel();
        let at = config.clone();
        std::thread::spawn(move || {
            let failed = ready.clone();
            if let Err(error) = stillpoint_migrate_proxy::run(&at, |_| ready.send(None).expect("the test waits")) {
                let _ = failed.send(Some(error.to_string()));
            }
        });
        assert_eq!(started.recv().expect("the proxy starts or says why not"), None);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("make a runtime");
        Scene { cluster, dir, config, runtime, machines }
    }

    fn source(&self) -> Server {
        Server::parse("source", &self.cluster.conninfo("shop"), None).expect("a connection string")
    }

    fn attaching(&self) -> AttachOptions {
        let (source, config) = (self.source(), self.config.clone());
        AttachOptions { source, config, wait: Duration::ZERO, end_idle: false, dry_run: false }
    }

    fn detaching(&self) -> DetachOptions {
        let (source, config) = (self.source(), self.config.clone());
        DetachOptions { source, config, moved: false, dry_run: false }
    }

    /// Directory of the journals.
    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn detach(&self, options: &DetachOptions) -> Result<DetachReport, Error> {
        self.runtime.block_on(detach(options, || running_migrations(&self.state(), &options.source)))
    }

    /// Connects a client on the server's machine, as another user than the proxy's.
    fn local(&self) -> Session {
        Session::open(self.cluster.client("psql"))
    }

    fn outside(&self) -> Session {
        let mut psql = bound_command("nsenter".as_ref());
        psql.arg(format!("--net={}", place(&self.machines[1]).display()))
            .args(["psql", "-h", SERVER, "-U", "postgres"]);
        psql.args(["-p", &self.cluster.port().to_string()]);
        Session::open(psql)
    }

    fn status(&self) -> Status {
        let asking = async {
            let mut client = Client::connect(&self.dir.path().join("control")).await.expect("the proxy is there");
            client.ask(&Request::Status).await.expect("the proxy answers")
        };
        match self.runtime.block_on(asking) {
            Reply::Status(status) => status,
            reply => panic!("{reply:?}"),
        }
    }

    fn is_led(&self, session: &Session) -> bool {
        self.status().sessions.iter().any(|known| known.backend == Some(session.backend))
    }

    fn refusal(&self, result: Result<(), Error>) -> String {
        result.expect_err("it is refused").to_string()
    }
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).expect("read the configuration");
    assert!(text.contains(from));
    std::fs::write(path, text.replace(from, to)).expect("write the configuration");
}

#[test]
fn clients_are_led_to_the_proxy_and_back() {
    if !available() {
        return;
    }
    let scene = Scene::set();
    let options = scene.attaching();
    let mut direct = scene.local();

    let refused = scene.refusal(scene.runtime.block_on(attach(&options)).map(drop));
    assert!(refused.contains("127.0.0.1") && refused.contains("[[allow]]"), "{refused}");
    assert_eq!(run("nft", &["list", "tables"]), "", "nothing was touched");
    replace(&scene.config, "[\"10.88.0.0/24\"]", "[\"10.88.0.0/24\", \"127.0.0.1\"]");

    let told = scene.runtime.block_on(attach(&AttachOptions { dry_run: true, ..options.clone() })).unwrap();
    assert!(told.added.contains("[tenants.\"*\"]") && told.rules.contains("redirect"), "{told:?}");
    assert_eq!(run("nft", &["list", "tables"]), "", "nothing was touched");

    let attached = scene.runtime.block_on(attach(&options)).unwrap();
    assert!(!attached.already && attached.direct.len() == 1, "{attached:?}");
    assert!(std::fs::read_to_string(&scene.config).unwrap().starts_with("# ours\n"));
    let (mut led, mut outside) = (scene.local(), scene.outside());
    assert!(scene.is_led(&led) && scene.is_led(&outside), "new connections come to the proxy");
    assert!(!scene.is_led(&direct) && direct.ask("SELECT 1").as_deref() == Some("1"), "direct ones go on");
    assert_eq!(scene.cluster.sql("postgres", "SELECT 2"), "2", "databases that were not in the file are served too");

    let wait = AttachOptions { wait: Duration::from_secs(60), end_idle: true, ..options.clone() };
    let again = scene.runtime.block_on(attach(&wait)).unwrap();
    assert!(again.already && again.added.is_empty() && again.direct.is_empty(), "{again:?}");
    assert_eq!(direct.ask("SELECT 1"), None, "it was idle, and has ended");
    assert!(led.ask("SELECT 1").is_some() && outside.ask("SELECT 1").is_some(), "led ones are not looked at");

    // From here on connections are counted again.
    assert!(scene.is_led(&scene.local()));
    detach_refuses_while_it_would_harm(&scene);
    let detached = scene.detach(&scene.detaching()).unwrap();
    assert!(!detached.already && detached.led >= 1 && detached.sessions >= 2, "{detached:?}");
    assert!(!scene.is_led(&scene.local()), "new connections go to the server");
    assert_eq!((led.ask("SELECT 3").as_deref(), outside.ask("SELECT 4").as_deref()), (Some("3"), Some("4")));
    drop((led, outside));
    until("the proxy to be left", || scene.status().sessions.is_empty().then_some(()));
    assert!(scene.detach(&scene.detaching()).unwrap().already);
    assert_eq!(run("nft", &["list", "tables"]), "", "nothing is left");
}

fn detach_refuses_while_it_would_harm(scene: &Scene) {
    let options = scene.detaching();
    let (port, journal) = (scene.cluster.port(), scene.state().join("shop.json"));
    std::fs::create_dir(scene.state()).unwrap();
    let record = format!(
        r#"{{"v":1,"migration":"ab","database":"shop","tenant":"shop","source":"source 127.0.0.1:{port}/shop","target":"t",
        "phase":"following","made_database":false,"way_back":true,"back_from":0,"fingerprint":"","identities":[]}}"#
    );
    std::fs::write(&journal, record).unwrap();
    let refused = scene.refusal(scene.detach(&options).map(drop));
    assert!(refused.contains("a migration of shop is under way"), "{refused}");
    std::fs::remove_file(journal).unwrap();

    let routes = scene.dir.path().join("routes.json");
    let was = std::fs::read(&routes).unwrap();
    std::fs::write(&routes, r#"{"shop":{"host":"10.0.0.9","port":5432}}"#).unwrap();
    let refused = scene.refusal(scene.detach(&options).map(drop));
    assert!(refused.contains("shop has moved to 10.0.0.9:5432"), "{refused}");
    let moved = DetachOptions { moved: true, dry_run: true, ..options };
    assert!(!scene.detach(&moved).unwrap().already);
    std::fs::write(&routes, was).unwrap();
}
