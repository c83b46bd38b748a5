//! The example of `crates/patch/runtime/examples`: a hash server with quiescence points, its mistake, the patch for it,
//! and clients that record the times and the answers of their requests.

use crate::cli::Stillpoint;
use crate::points::flags;
use crate::server::{ChildGuard, Restart, bound_command, soon};
use crate::wait;
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_testing::random::Random;
use tempfile::TempDir;

const NAME: &str = "hash_server";

/// The compiled server, and the patch that repairs it.
#[derive(Debug)]
pub struct HashServer {
    dir: TempDir,
    patch: PathBuf,
}

impl HashServer {
    /// Compiles the example, and builds the patch from the diff beside it.
    #[track_caller]
    pub fn build() -> HashServer {
        let dir = TempDir::with_prefix("stillpoint-example-").expect("make a directory for the example");
        let examples = crate::workspace_root().join("crates/patch/runtime/examples");
        let source = dir.path().join("source");
        fs::create_dir(&source).expect("make a directory for the source");
        let unit = format!("{NAME}.c");
        fs::copy(examples.join(&unit), source.join(&unit)).expect("copy the example");
        let (include, link) = flags();
        let object = format!("{NAME}.o");
        let words = ["gcc", "-g", "-O2", "-pthread", "-fPIE", &include, "-c", &unit, "-o", &object];
        let elf = dir.path().join(NAME);
        run(Command::new(words[0]).args(&words[1..]).current_dir(&source));
        let mut linking = Command::new("gcc");
        run(linking.args(["-pie", "-pthread", &object, "-o"]).arg(&elf).args(link).current_dir(&source));
        let commands = serde_json::json!([{"directory": &source, "arguments": words, "file": unit}]);
        let database = dir.path().join("compile_commands.json");
        fs::write(&database, commands.to_string()).expect("write compile_commands.json");
        let patch = dir.path().join("mend.patch");
        let build = Stillpoint::new().args(["patch", "build", "--source"]).arg(&source);
        let build = build.arg("--compile-commands").arg(&database).arg("--target").arg(&elf);
        build.arg("--diff").arg(examples.join(format!("{NAME}.diff"))).arg("--output").arg(&patch).succeed();
        HashServer { dir, patch }
    }

    /// Returns the path of the patch.
    pub fn patch(&self) -> &Path {
        &self.patch
    }

    /// Starts it; a hash has to begin with so many zero bits (with the mistake: one more).
    #[track_caller]
    pub fn start(&self, bits: u32) -> Running {
        let process = self.spawn(0, bits);
        let port = wait::until("the server to listen", || {
            let text = fs::read_to_string(self.log()).ok()?;
            text.trim().strip_prefix("listening on port ")?.parse().ok()
        });
        Running { process, port, bits }
    }

    /// Ends it, starts it again on the same port, and waits for an answer. Requests in progress get none.
    #[track_caller]
    pub fn restart(&self, running: &mut Running, seed: [u8; 16]) -> Restart {
        let began_ns = now_ns();
        running.process.signal(Signal::TERM);
        soon("the hash server to end", || running.process.ended());
        let ended_ns = now_ns();
        running.process = self.spawn(running.port, running.bits);
        answered(running.port, seed).1.expect("be answered");
        Restart { began_ns, ended_ns, answered_ns: now_ns() }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn spawn(&self, port: u16, bits: u32) -> ChildGuard {
        let output = File::create(self.log()).expect("make the server's log");
        let mut command = bound_command(&self.dir.path().join(NAME));
        command.args([port.to_string(), bits.to_string()]).stdout(output);
        ChildGuard::from_child(command.spawn().unwrap_or_else(|e| panic!("start {command:?}: {e}")))
    }
}

#[track_caller]
fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|e| panic!("run {command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A running server.
#[derive(Debug)]
pub struct Running {
    process: ChildGuard,
    port: u16,
    bits: u32,
}

/// One request: its send time, the time of its answer, and the hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Send time in nanoseconds of `CLOCK_MONOTONIC`.
    pub sent_ns: u64,
    /// Receive time in nanoseconds of `CLOCK_MONOTONIC`.
    pub received_ns: u64,
    /// Answer of the server.
    pub hash: [u8; 16],
    /// Connections on which it got no answer.
    pub lost: u32,
}

impl Running {
    /// Returns its process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Panics if it has ended.
    #[track_caller]
    pub fn assert_running(&mut self) {
        assert_eq!(self.process.ended(), None, "the server has ended");
    }

    /// Opens a new connection.
    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(self.port).expect("connect")
    }

    /// Starts clients that send the same seed repeatedly, with a random pause of up to `rest` between. A client whose
    /// connection ends sends its request again on a new one, and its time continues.
    #[track_caller]
    pub fn load(&self, clients: u32, seed: [u8; 16], rest: Duration) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let one = |number| {
            let (stop, mut client, port) = (stop.clone(), self.client(), self.port);
            std::thread::spawn(move || {
                let mut samples = Vec::new();
                let mut random = Random::new(u64::from(number));
                while !stop.load(Ordering::Relaxed) {
                    let sent_ns = now_ns();
                    let (mut sample, mut lost) = (client.try_ask(seed), 0);
                    while sample.is_err() {
                        lost += 1;
                        (client, sample) = answered(port, seed);
                    }
                    samples.push(Sample { sent_ns, lost, ..sample.expect("it was answered") });
                    std::thread::sleep(rest.mul_f64(random.unit()));
                }
                samples
            })
        };
        let threads = (0..clients).map(one).collect();
        Load { stop, threads }
    }
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
}

impl Client {
    fn connect(port: u16) -> io::Result<Client> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(wait::WAIT_TIMEOUT))?;
        Ok(Client { stream })
    }

    /// Sends one request.
    #[track_caller]
    pub fn ask(&mut self, seed: [u8; 16]) -> Sample {
        self.try_ask(seed).expect("be answered")
    }

    fn try_ask(&mut self, seed: [u8; 16]) -> io::Result<Sample> {
        let sent_ns = now_ns();
        self.stream.write_all(&seed)?;
        let mut answer = [0; 32];
        self.stream.read_exact(&mut answer)?;
        let hash = answer[16..].try_into().expect("16 bytes");
        Ok(Sample { sent_ns, received_ns: now_ns(), hash, lost: 0 })
    }
}

/// Connects, with retries until a server listens, and sends the request.
#[track_caller]
fn answered(port: u16, seed: [u8; 16]) -> (Client, io::Result<Sample>) {
    let mut client = soon("the hash server to listen", || Client::connect(port).ok());
    let sample = client.try_ask(seed);
    (client, sample)
}

/// Running clients.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Sample>>>,
}

impl Load {
    /// Ends the clients; returns the samples of each.
    #[track_caller]
    pub fn end(self) -> Vec<Vec<Sample>> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().expect("a client lives")).collect()
    }
}

/// Returns the number of zero bits at the start of a hash.
pub fn zero_bits(hash: &[u8; 16]) -> u32 {
    u128::from_be_bytes(*hash).leading_zeros()
}

/// Returns seeds to choose from.
pub fn seeds() -> impl Iterator<Item = [u8; 16]> {
    (0..64u8).map(|n| [n; 16])
}
