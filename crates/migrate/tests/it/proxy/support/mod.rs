//! A proxy in a thread of the test, in front of real servers.

pub(crate) mod follower;
pub(crate) mod repeated_capture;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use stillpoint_migrate_control::{Client, Reply, Request, TargetSpec};
use stillpoint_testing::{child::bound_command, port::free_port, postgresql::Cluster};
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

/// A proxy; it ends with the test's process.
pub(crate) struct Proxy {
    pub(crate) dir: TempDir,
    pub(crate) port: u16,
    pub(crate) socket: PathBuf,
    pub(crate) control: PathBuf,
}

/// `[servers.NAME]` for a cluster.
pub(crate) fn server(name: &str, cluster: &Cluster) -> String {
    format!("[servers.{name}]\nhost = \"127.0.0.1\"\nport = {}\n", cluster.port())
}

impl Proxy {
    /// Starts a proxy; `rest` are tables of its configuration, `top` the lines before them.
    pub(crate) fn start(top: &str, rest: &str) -> Proxy {
        Proxy::start_in(TempDir::with_prefix("stillpoint-proxy-").expect("make a directory"), top, rest)
    }

    /// Starts a proxy in a directory that already has files.
    pub(crate) fn start_in(dir: TempDir, top: &str, rest: &str) -> Proxy {
        Proxy::start_in_at(dir, free_port(), top, rest)
    }

    /// Starts a proxy as [`Proxy::start`] does, at a port that was chosen before.
    pub(crate) fn start_at(port: u16, top: &str, rest: &str) -> Proxy {
        Proxy::start_in_at(TempDir::with_prefix("stillpoint-proxy-").expect("make a directory"), port, top, rest)
    }

    fn start_in_at(dir: TempDir, port: u16, top: &str, rest: &str) -> Proxy {
        let socket = dir.path().join(format!(".s.PGSQL.{port}"));
        let control = dir.path().join("control.sock");
        let routes = dir.path().join("routes.json");
        let text = format!(
            "listen = [\"127.0.0.1:{port}\", {socket:?}]\ncontrol = {control:?}\nroutes = {routes:?}\nworkers = 2\n{top}\n{rest}"
        );
        let path = dir.path().join("proxy.toml");
        fs::write(&path, &text).expect("write the configuration");
        let (ready, started) = mpsc::channel();
        std::thread::spawn(move || {
            let failed = ready.clone();
            if let Err(error) = stillpoint_migrate_proxy::run(&path, |_| ready.send(None).expect("the test waits")) {
                let _ = failed.send(Some(format!("{error}: {:?}", std::error::Error::source(&error))));
            }
        });
        if let Some(error) = started.recv().expect("the proxy starts or says why not") {
            panic!("{error}\n{text}");
        }
        Proxy { dir, port, socket, control }
    }

    /// A connection string for one database.
    pub(crate) fn conninfo(&self, database: &str) -> String {
        format!("host=127.0.0.1 port={} user=postgres dbname={database}", self.port)
    }

    /// Sends a request on a control connection of its own.
    pub(crate) fn ask(&self, request: Request) -> Reply {
        runtime().block_on(async { self.control().await.ask(&request).await.expect("an answer") })
    }

    /// Connects to the control socket.
    pub(crate) async fn control(&self) -> Client {
        Client::connect(&self.control).await.expect("reach the proxy")
    }

    /// Prepares, pauses and switches a tenant, all of which must succeed; returns the microseconds of the pause.
    pub(crate) fn move_tenant(&self, tenant: &str, to: &str) -> u64 {
        runtime().block_on(async {
            let mut client = self.control().await;
            prepare(&mut client, tenant, to).await;
            let begun = std::time::Instant::now();
            switch(&mut client, tenant).await;
            begun.elapsed().as_micros() as u64
        })
    }
}

/// The request to prepare a tenant.
pub(crate) fn preparing(tenant: &str, to: &str, verifiers: &[(&str, &str)]) -> Request {
    Request::Prepare {
        tenant: tenant.into(),
        target: TargetSpec::Name(to.into()),
        verifiers: verifiers.iter().map(|(user, stored)| ((*user).to_owned(), (*stored).to_owned())).collect(),
        limit_ms: 10_000,
        again: false,
    }
}

/// Pauses a tenant and switches all of its sessions to the target; returns their number.
pub(crate) async fn switch(client: &mut Client, tenant: &str) -> usize {
    let reply = client.ask(&Request::Pause { tenant: tenant.into(), limit_ms: 60_000 }).await;
    assert!(matches!(reply, Ok(Reply::Drained { .. })), "{reply:?}");
    match client.ask(&Request::Switch { tenant: tenant.into() }).await {
        Ok(Reply::Switched { sessions, failed }) if failed.is_empty() => sessions,
        other => panic!("{other:?}"),
    }
}

/// Prepares until every session is prepared.
pub(crate) async fn prepare(client: &mut Client, tenant: &str, to: &str) {
    for _ in 0..1000 {
        match client.ask(&preparing(tenant, to, &[])).await.expect("an answer") {
            Reply::Prepared { waiting, pinned, failed, .. } if waiting.is_empty() => {
                assert!(pinned.is_empty() && failed.is_empty(), "{pinned:?} {failed:?}");
                return;
            }
            Reply::Prepared { .. } => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            other => panic!("{other:?}"),
        }
    }
    panic!("sessions stay busy");
}

/// Runs this test in a process of its own, and returns false there: signals, limits and memory belong to a process, and
/// other tests may run in this one. Returns true once the other process has run it.
pub(crate) fn ran_elsewhere(test: &str) -> bool {
    const VARIABLE: &str = "STILLPOINT_TEST_PROCESS";
    if std::env::var(VARIABLE).is_ok_and(|there| there == test) {
        return false;
    }
    let mut command = bound_command(&std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture"]).env(VARIABLE, test);
    // Standard error is shared: a test that skips itself is counted by a line there.
    let ended = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().expect("run this program");
    let out = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && out.contains("1 passed"), "{test}: {}\n{out}", ended.status);
    true
}

/// A runtime for clients.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Makes a self-signed certificate for 127.0.0.1.
pub(crate) fn certificate(dir: &Path) {
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout", "server.key", "-out", "server.crt"])
        .current_dir(dir)
        .output()
        .expect("run openssl");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// Output of psql for one text of statements, or its error.
pub(crate) fn psql(conninfo: &str, password: &str, sql: &str) -> Result<String, String> {
    let mut psql = Command::new("psql");
    psql.args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql, conninfo]).env("PGPASSWORD", password);
    let output = psql.output().expect("run psql");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// A connection on which the client has sent nothing.
pub(crate) fn raw(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", proxy.port)).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set a limit");
    stream
}

/// A connection from another address of this machine, on which the client has sent nothing.
pub(crate) fn raw_from(proxy: &Proxy, address: Ipv4Addr) -> TcpStream {
    let connect = async {
        let socket = TcpSocket::new_v4()?;
        socket.bind((address, 0).into())?;
        socket.connect((Ipv4Addr::LOCALHOST, proxy.port).into()).await?.into_std()
    };
    let stream = runtime().block_on(connect).expect("connect");
    stream.set_nonblocking(false).expect("set to blocking");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set a limit");
    stream
}

/// Reads the next message: its type and its body.
pub(crate) fn next_message(stream: &mut impl Read) -> std::io::Result<(u8, Vec<u8>)> {
    let mut header = [0; 5];
    stream.read_exact(&mut header)?;
    let len = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
    let mut body = vec![0; len as usize - 4];
    stream.read_exact(&mut body)?;
    Ok((header[0], body))
}

/// A field of an error: `C` is its SQLSTATE, `M` its text.
pub(crate) fn error_field(body: &[u8], field: u8) -> String {
    let of_field = |part: &&[u8]| part.first() == Some(&field);
    let part = body.split(|byte| *byte == 0).find(of_field).unwrap_or_else(|| panic!("{body:?}"));
    String::from_utf8_lossy(&part[1..]).into_owned()
}

/// The startup packet with these parameters.
pub(crate) fn startup(parameters: &[(&str, &str)], version: u32) -> Vec<u8> {
    let mut body = version.to_be_bytes().to_vec();
    for (name, value) in parameters {
        body.extend(name.bytes().chain([0]).chain(value.bytes()).chain([0]));
    }
    body.push(0);
    let mut packet = (body.len() as u32 + 4).to_be_bytes().to_vec();
    packet.extend(body);
    packet
}

/// A session that waits for its first statement.
pub(crate) fn session(proxy: &Proxy) -> TcpStream {
    let mut stream = raw(proxy);
    log_in(&mut stream);
    stream
}

/// Begins a session on a connection.
pub(crate) fn log_in(stream: &mut (impl Read + Write)) {
    stream.write_all(&startup(&[("user", "postgres"), ("database", "postgres")], 196_608)).expect("write");
    let mut seen = Vec::new();
    while !seen.ends_with(b"Z\0\0\0\x05I") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("a greeting");
        seen.push(byte[0]);
    }
}

/// All replies of the server to one Query.
pub(crate) fn ask(stream: &mut (impl Read + Write), sql: &str) -> String {
    let mut message = b"Q".to_vec();
    message.extend((sql.len() as u32 + 5).to_be_bytes());
    message.extend(sql.bytes().chain([0]));
    stream.write_all(&message).expect("write");
    let mut seen = Vec::new();
    while !seen.ends_with(b"Z\0\0\0\x05I") {
        let mut bytes = [0; 4096];
        let n = stream.read(&mut bytes).expect("an answer");
        assert!(n > 0, "the connection was closed: {}", String::from_utf8_lossy(&seen));
        seen.extend(&bytes[..n]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}
