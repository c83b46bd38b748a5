//! Servers under test: started on a port and in a directory of their own, gone when dropped.

use crate::packages::Binary;
use crate::resp::Client;
use crate::wait;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Ports for servers: below those that the kernel gives to connections (32768 and up, unless configured otherwise).
const FIRST_PORT: u16 = 15_000;
const PORTS: u16 = 17_000;

/// A port of 127.0.0.1 on which nothing listens now, and another one at each call; a server that still finds it taken
/// fails to start, and says so in its log.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Not one that the kernel would choose: it might give it to somebody's connection before the server has it.
    let candidates = std::iter::repeat_with(|| {
        let number = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        FIRST_PORT + (number % u32::from(PORTS)) as u16
    });
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    candidates.take(usize::from(PORTS)).find(free).expect("127.0.0.1 has free ports")
}

/// A command that runs `program` as the child itself (same pid) and has the kernel end it should the *calling thread*
/// end first. Add arguments and pipes as usual, spawn, and hand the child to [`Guarded`].
pub fn tied(program: &Path) -> Command {
    // `setpriv` sets the parent-death signal and then executes the program in its own place: the std library offers no
    // safe way to do so between fork and exec.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// A child process that is ended when dropped.
#[derive(Debug)]
pub struct Guarded {
    child: Child,
}

impl Guarded {
    /// Takes charge of a child that runs already.
    pub fn from_child(child: Child) -> Guarded {
        Guarded { child }
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The child itself, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Sends a signal; one that has ended already is left alone.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            // The child is not reaped yet, so the pid is its own; ESRCH cannot happen.
            kill_process(self.raw_pid(), signal).expect("signal a child");
        }
    }

    /// Asks it to end (SIGTERM), insists after a while (SIGKILL), and tells how it ended.
    pub fn end(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        // Stopped (by SIGSTOP or by a tracer's remains), it would not see SIGTERM.
        self.signal(Signal::CONT);
        wait::within(Duration::from_secs(10), || self.ended()).unwrap_or_else(|| {
            self.signal(Signal::KILL);
            self.child.wait().expect("a child can be waited for")
        })
    }

    fn raw_pid(&self) -> Pid {
        Pid::from_raw(self.pid()).expect("a child's pid is positive")
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.end();
        }
    }
}

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
