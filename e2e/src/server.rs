//! Servers under test: started on a port and in a directory of their own, gone when dropped.

use crate::packages::Binary;
use crate::resp::Client;
use crate::wait;
use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
pub use stillpoint_testing::child::{Guarded, tied};
pub use stillpoint_testing::port::free_port;
use tempfile::TempDir;

/// A server on its own port and in its own directory.
#[derive(Debug)]
pub struct Server {
    process: Guarded,
    port: u16,
    log: PathBuf,
    dir: TempDir,
}

impl Server {
    /// Starts `binary` with `arguments(port, directory)` and waits until it accepts connections.
    pub fn start(binary: &Binary, arguments: impl FnOnce(u16, &Path) -> Vec<OsString>) -> Server {
        let dir = TempDir::with_prefix("stillpoint-e2e-").expect("make a directory for the server");
        Server::start_in(dir, free_port(), binary, arguments)
    }

    /// Ends it in order and starts `binary` in its place: the same port, the same directory.
    pub fn restart(self, binary: &Binary, arguments: impl FnOnce(u16, &Path) -> Vec<OsString>) -> Server {
        let Server { mut process, port, dir, .. } = self;
        process.end();
        Server::start_in(dir, port, binary, arguments)
    }

    fn start_in(
        dir: TempDir,
        port: u16,
        binary: &Binary,
        arguments: impl FnOnce(u16, &Path) -> Vec<OsString>,
    ) -> Server {
        let log = dir.path().join("log");
        let output = std::fs::File::create(&log).expect("make the server's log");
        let mut command = tied(&binary.path);
        command.args(arguments(port, dir.path())).envs(binary.environment());
        command.current_dir(dir.path()).stdin(Stdio::null());
        command.stdout(output.try_clone().expect("share the log")).stderr(output);
        let child = command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", binary.path.display()));
        let mut server = Server { process: Guarded::from_child(child), port, log, dir };
        server.await_ready(&binary.path);
        server
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

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Everything it has printed so far.
    pub fn log_text(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The process, to signal it or see it end.
    pub fn process(&mut self) -> &mut Guarded {
        &mut self.process
    }

    /// Panics with the log's end unless it runs.
    #[track_caller]
    pub fn assert_running(&mut self) {
        if let Some(status) = self.process.ended() {
            panic!("the server ended with {status}; its log:\n{}", self.log_text());
        }
    }
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

    /// Saves the data, ends the server, and starts `binary` in its place: the same port, the same directory.
    #[track_caller]
    pub fn restart(self, binary: &Binary) -> Redis {
        // The connection ends instead of an answer.
        let _ = self.client().command(&["SHUTDOWN", "SAVE"]);
        let Server { mut process, port, dir, .. } = self.server;
        wait::until("redis to save its data and end", || process.ended());
        Redis::ready(Server::start_in(dir, port, binary, |port, dir| Redis::arguments(port, dir, &[])))
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

    /// A new connection.
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
            // Refuses to run as root unless told a user.
            ["-l", "127.0.0.1", "-p", &port, "-U", "0", "-u", "root"].iter().chain(extra).map(OsString::from).collect()
        });
        Memcached { server }
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
