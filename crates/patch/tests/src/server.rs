//! Servers under test: started on a port and in a directory of their own, ended when dropped.

use crate::packages::Binary;
use crate::resp::{Client, Reply};
use crate::wait;
use rustix::process::Signal;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use stillpoint_measure::clock::now_ns;
pub use stillpoint_testing::child::{ChildGuard, bound_command};
pub use stillpoint_testing::port::free_port;
use tempfile::TempDir;

/// A server on its own port and in its own directory.
#[derive(Debug)]
pub struct Server {
    process: ChildGuard,
    port: u16,
    log: PathBuf,
    dir: TempDir,
    program: Binary,
    arguments: Vec<OsString>,
}

/// A restart, in nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy)]
pub struct Restart {
    /// Time of the request to end.
    pub began_ns: u64,
    /// Time at which its process was gone.
    pub ended_ns: u64,
    /// Time at which a client got an answer again.
    pub answered_ns: u64,
}

impl Restart {
    /// Returns the time from the request to end to the first answer, in milliseconds.
    pub fn ms(&self) -> f64 {
        (self.answered_ns - self.began_ns) as f64 / 1e6
    }
}

/// Waits for a condition that takes milliseconds, with shorter intervals than [`wait::until`]; a redis of 8 GB takes
/// minutes.
#[track_caller]
pub(crate) fn soon<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + wait::WAIT_TIMEOUT * 5;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < end, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_micros(500));
    }
}

impl Server {
    /// Starts `binary` with `arguments(port, directory)` and waits until it accepts connections.
    pub fn start(binary: &Binary, arguments: impl FnOnce(u16, &Path) -> Vec<OsString>) -> Server {
        let dir = TempDir::with_prefix("stillpoint-test-").expect("make a directory for the server");
        let (port, log) = (free_port(), dir.path().join("log"));
        let (program, arguments) = (binary.clone(), arguments(port, dir.path()));
        let process = spawn(&program, &arguments, dir.path(), &log);
        let mut server = Server { process, port, log, dir, program, arguments };
        server.await_ready(&binary.path);
        server
    }

    /// Ends it in order with `stop`, and starts it with the same port, directory and arguments, as another program if
    /// one is given. Returns when `answers` returns a value.
    #[track_caller]
    pub fn restart(
        &mut self,
        program: Option<&Binary>,
        stop: impl FnOnce(&mut Server),
        mut answers: impl FnMut(&Server) -> bool,
    ) -> Restart {
        let began_ns = now_ns();
        stop(self);
        soon("a server to end", || self.process.ended());
        let ended_ns = now_ns();
        self.program = program.unwrap_or(&self.program).clone();
        self.process = spawn(&self.program, &self.arguments, self.dir.path(), &self.log);
        soon("a server to answer again", || {
            self.assert_running();
            answers(self).then_some(())
        });
        Restart { began_ns, ended_ns, answered_ns: now_ns() }
    }

    fn await_ready(&mut self, binary: &Path) {
        let port = self.port;
        wait::until(&format!("{} to listen on port {port}", binary.display()), || {
            if let Some(status) = self.process.ended() {
                panic!("{} ended with {status} before it listened; its log:\n{}", binary.display(), self.log_text());
            }
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()
        });
    }

    /// Returns its process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Returns the port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns its directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns its complete output so far.
    pub fn log_text(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Returns the process, to send signals or to wait for its end.
    pub fn process(&mut self) -> &mut ChildGuard {
        &mut self.process
    }

    /// Panics with the end of the log unless it runs.
    #[track_caller]
    pub fn assert_running(&mut self) {
        if let Some(status) = self.process.ended() {
            panic!("the server ended with {status}; its log:\n{}", self.log_text());
        }
    }
}

fn spawn(program: &Binary, arguments: &[OsString], dir: &Path, log: &Path) -> ChildGuard {
    let output = std::fs::File::create(log).expect("make the server's log");
    let mut command = bound_command(&program.path);
    command.args(arguments).envs(program.environment()).current_dir(dir).stdin(Stdio::null());
    command.stdout(output.try_clone().expect("share the log")).stderr(output);
    ChildGuard::from_child(command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", program.path.display())))
}

/// A redis-server.
#[derive(Debug)]
pub struct Redis {
    server: Server,
}

impl Redis {
    /// Starts one without persistence, with `DEBUG` allowed; `extra` are further command-line arguments.
    pub fn start(binary: &Binary, extra: &[&str]) -> Redis {
        Redis::ready(Server::start(binary, |port, dir| Redis::arguments(port, dir, extra)))
    }

    /// Saves the data, ends the server, starts it again, and waits until it has loaded the data.
    #[track_caller]
    pub fn restart(&mut self) -> Restart {
        let stop = |server: &mut Server| {
            let mut client = Client::connect(server.port).expect("connect to redis");
            client.send(&["SHUTDOWN", "SAVE"]).expect("tell redis to end");
        };
        let size = |server: &Server| Client::connect(server.port)?.command(&["DBSIZE"]);
        self.server.restart(None, stop, |server| matches!(size(server), Ok(Reply::Integer(_))))
    }

    fn ready(server: Server) -> Redis {
        let redis = Redis { server };
        wait::until("redis to answer PING", || {
            Client::connect(redis.server.port).and_then(|mut client| client.command(&["PING"])).ok()
        });
        redis
    }

    fn arguments(port: u16, dir: &Path, extra: &[&str]) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["--port".into(), port.to_string().into(), "--dir".into(), dir.into()];
        words.extend(
            ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--enable-debug-command", "yes"]
                .iter()
                .chain(extra)
                .map(|word| OsStr::new(word).to_owned()),
        );
        words
    }

    /// Opens a new connection.
    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(self.server.port)
            .unwrap_or_else(|e| panic!("connect to redis: {e}\n{}", self.server.log_text()))
    }

    /// Fills it with `keys` small string keys, `key:0` and up.
    #[track_caller]
    pub fn populate(&self, keys: u64) {
        let mut client = self.client();
        client.set_timeout(Duration::from_secs(600)).expect("set a time-out");
        let reply = client.command(&["DEBUG", "POPULATE", &keys.to_string()]).expect("DEBUG POPULATE is answered");
        assert_eq!(reply.text(), "OK");
        let size = client.command(&["DBSIZE"]).expect("DBSIZE is answered").integer();
        assert!(size as u64 >= keys, "{size} keys of {keys}");
    }
}

/// A memcached.
#[derive(Debug)]
pub struct Memcached {
    server: Server,
}

impl Memcached {
    /// Starts one; `extra` are further command-line arguments.
    pub fn start(binary: &Binary, extra: &[&str]) -> Memcached {
        let server = Server::start(binary, |port, _| {
            let port = port.to_string();
            // Refuses to run as root without an explicit user.
            ["-l", "127.0.0.1", "-p", &port, "-U", "0", "-u", "root"].iter().chain(extra).map(OsString::from).collect()
        });
        Memcached { server }
    }

    /// Ends it and starts it again; its data are lost.
    #[track_caller]
    pub fn restart(&mut self) -> Restart {
        self.server.restart(None, |server| server.process.signal(Signal::TERM), |server| version(server.port).is_ok())
    }
}

/// Returns memcached's answer to `version`.
fn version(port: u16) -> io::Result<String> {
    let mut stream = BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?);
    stream.get_mut().write_all(b"version\r\n")?;
    let mut line = String::new();
    match stream.read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line),
    }
}

macro_rules! is_server {
    ($($name:ident)*) => {$(
        impl std::ops::Deref for $name {
            type Target = Server;
            fn deref(&self) -> &Server {
                &self.server
            }
        }
        impl std::ops::DerefMut for $name {
            fn deref_mut(&mut self) -> &mut Server {
                &mut self.server
            }
        }
    )*};
}
is_server!(Redis Memcached);
