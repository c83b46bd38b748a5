//! Programs that are taken into images, the `stillpoint` that takes them, and clients that must not notice.

use nix::sched::{CloneFlags, unshare};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use stillpoint_testing::child::reap;
use stillpoint_testing::packages::{self, Binary};
use stillpoint_testing::{LineClient, Unavailable};

/// Limit of a wait, long enough for two busy processors.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Reports why a test cannot run; with `REQUIRE_ALL=1` it fails.
pub(crate) fn skip(why: impl Into<Unavailable>) {
    stillpoint_testing::skipped(why);
}

/// Returns a criu that works on this kernel: `$STILLPOINT_CRIU`, or the project's own installation, which is made now
/// if it is missing.
pub(crate) fn criu() -> Option<PathBuf> {
    static CRIU: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found = CRIU.get_or_init(|| {
        if let Some(named) = std::env::var_os("STILLPOINT_CRIU") {
            return Ok(named.into());
        }
        let criu = stillpoint_testing::recipes::criu()?.join("criu");
        let checked = Command::new(&criu).arg("check").output().map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        if checked.status.success() { Ok(criu) } else { Err(format!("criu does not work here: {said}")) }
    });
    match found {
        Ok(criu) => Some(criu.clone()),
        Err(why) => {
            skip(why);
            None
        }
    }
}

/// Returns a program of Debian, if it is available.
pub(crate) fn program(found: Result<Binary, Unavailable>) -> Option<Binary> {
    found.inspect_err(|why| skip(why)).ok()
}

/// Returns a port of 127.0.0.1 on which no process listens now.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let candidates = std::iter::repeat_with(|| {
        let number = std::process::id().wrapping_mul(157).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        15_000 + (number % 17_000) as u16
    });
    candidates.take(17_000).find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()).expect("a free port")
}

/// Calls `ask` until it returns a value.
#[track_caller]
pub(crate) fn until<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    wait_or_report(ask, || format!("waited {} s for {what}", WAIT_TIMEOUT.as_secs()))
}

/// Calls `ask` until it returns a value; `said` returns the message if the wait fails.
#[track_caller]
fn wait_or_report<T>(mut ask: impl FnMut() -> Option<T>, said: impl FnOnce() -> String) -> T {
    let begun = Instant::now();
    while begun.elapsed() < WAIT_TIMEOUT {
        if let Some(answer) = ask() {
            return answer;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{}", said())
}

/// Waits until a process is gone, and is not a zombie any more.
#[track_caller]
pub(crate) fn wait_until_gone(pid: i32) {
    let path = format!("/proc/{pid}");
    let read = |name| std::fs::read(format!("{path}/{name}")).unwrap_or_default();
    let tell = |name| format!("{name}: {}\n", String::from_utf8_lossy(&read(name)).replace('\0', " "));
    wait_or_report(
        || (!Path::new(&path).exists()).then_some(()),
        || {
            let told = ["stat", "cmdline", "wchan", "stack"].map(tell).concat();
            format!("process {pid} was there after {} s\n{told}", WAIT_TIMEOUT.as_secs())
        },
    );
}

/// Result of one call of `stillpoint kernel`.
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit {:?}\n{}\n{}", self.code, self.out, self.err)
    }
}

impl Run {
    fn of(output: std::process::Output) -> Run {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Run { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }

    /// Returns the event of this name among the JSON lines.
    #[track_caller]
    pub(crate) fn event(&self, name: &str) -> serde_json::Value {
        let lines = self.out.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        lines.into_iter().find(|line| line["event"] == name).unwrap_or_else(|| panic!("no event {name} in {self}"))
    }
}

/// Runs `stillpoint --json kernel ...`.
pub(crate) fn kernel(criu: &Path, arguments: &[&str]) -> Run {
    Run::of(command(criu, arguments).output().expect("run stillpoint"))
}

/// Runs `stillpoint --json kernel ...`, and calls `meanwhile` with the number of its process.
pub(crate) fn kernel_while(criu: &Path, arguments: &[&str], meanwhile: impl FnOnce(i32)) -> Run {
    let mut command = command(criu, arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("run stillpoint");
    meanwhile(child.id() as i32);
    Run::of(child.wait_with_output().expect("wait for stillpoint"))
}

fn command(criu: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(stillpoint_testing::binary::stillpoint());
    command.args(["--json", "kernel"]).args(arguments).env("STILLPOINT_CRIU", criu).stdin(Stdio::null());
    // beside the test program: tests must not use the machine's own key
    let key = std::env::current_exe().expect("this program").with_file_name("image.key");
    command.env("STILLPOINT_IMAGE_KEY", key);
    command
}

/// Moves this thread, and what it starts from here on, into a network of its own. Nothing is downloaded from there: programs that tests
/// run are unpacked before.
#[track_caller]
pub(crate) fn own_network() {
    criu();
    // where it cannot be had, the test says so when it starts it
    let _ = packages::redis(None);
    unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
    assert!(run("ip link set lo up").is_ok());
}

/// Runs a shell command; returns its output, or the reason of its failure.
pub(crate) fn run(command: &str) -> Result<String, String> {
    let output = Command::new("sh").args(["-c", command]).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Makes a directory for images of a test: in memory, as a file system there accepts files as long as an address space.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory for images")
}

/// Script that runs its arguments with only the first three descriptors open.
const CLOSE_DESCRIPTORS: &str =
    r#"for fd in /proc/self/fd/*; do fd=${fd##*/}; [ "$fd" -le 2 ] || eval "exec $fd>&-"; done; exec "$@""#;

/// A program that is taken and restored. It ends with this value, even if its parent has changed.
pub(crate) struct TestProgram {
    child: Option<Child>,
    pub(crate) pid: i32,
}

impl TestProgram {
    /// Starts a program in a session of its own, with no open descriptors of the test or of the test's parent.
    pub(crate) fn start(program: &Binary, arguments: &[&str], dir: &Path) -> TestProgram {
        let out = std::fs::File::create(dir.join("out")).expect("a file for what it prints");
        let mut command = Command::new("setsid");
        command.args(["bash", "-c", CLOSE_DESCRIPTORS, "bash"]);
        command.arg(&program.path).args(arguments).envs(program.environment());
        command.current_dir(dir).stdin(Stdio::null());
        command.stdout(out.try_clone().expect("one file for both")).stderr(out);
        let child = command.spawn().expect("start a program");
        let pid = child.id() as i32;
        TestProgram { child: Some(child), pid }
    }

    /// Takes it into an image; the program ends there.
    #[track_caller]
    pub(crate) fn checkpoint(&mut self, criu: &Path, image: &Path, more: &[&str]) -> Run {
        let (pid, path) = (self.pid.to_string(), image.to_str().expect("a plain path"));
        let run = kernel(criu, &[&["checkpoint", "--pid", &pid, "--image", path], more].concat());
        assert_eq!(run.code, Some(0), "{run}\n{}", logs(image));
        if !more.contains(&"--leave-running") {
            self.wait_until_reaped();
        }
        run
    }

    /// Waits for its end; its number is free only after its parent has reaped it.
    #[track_caller]
    pub(crate) fn wait_until_reaped(&mut self) {
        reap(&mut self.child);
        wait_until_gone(self.pid);
    }

    pub(crate) fn is_alive(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z') && !rest.is_empty())
    }
}

impl Drop for TestProgram {
    fn drop(&mut self) {
        kill(self.pid, "KILL");
        reap(&mut self.child);
    }
}

/// Restores an image.
#[track_caller]
pub(crate) fn restore(criu: &Path, image: &Path, more: &[&str]) -> Run {
    let run = kernel(criu, &[&["restore", "--image", image.to_str().expect("a plain path")], more].concat());
    assert_eq!(run.code, Some(0), "{run}\n{}", logs(image));
    run
}

/// Waits until the memory of a restored program, from the event `restored`, is resident: no checkpoint is possible
/// before.
#[track_caller]
pub(crate) fn wait_until_resident(restored: &serde_json::Value) {
    wait_until_gone(restored["keeper"].as_i64().expect("a keeper") as i32);
}

/// Returns the last lines of criu's and the daemon's logs.
pub(crate) fn logs(image: &Path) -> String {
    let mut text = String::new();
    for name in ["dump.log", "restore.log", "lazy-pages.log"] {
        let log = std::fs::read_to_string(image.join(name)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        text += &format!("--- {name}\n{}\n", lines[lines.len().saturating_sub(25)..].join("\n"));
    }
    text
}

/// Sends a signal.
pub(crate) fn kill(pid: i32, signal: &str) {
    let _ = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).stderr(Stdio::null()).status();
}

/// Returns the children of a process.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Connects to a server of this machine, as soon as it listens.
pub(crate) fn connect(port: u16) -> LineClient {
    connect_to(Ipv4Addr::LOCALHOST.into(), port)
}

/// Connects to a server at an address, as soon as it listens.
pub(crate) fn connect_to(server: IpAddr, port: u16) -> LineClient {
    LineClient::new(until("a server to listen", || TcpStream::connect((server, port)).ok()), WAIT_TIMEOUT)
}

/// Number of keys in these redis servers: some 60 MB.
pub(crate) const KEYS: &str = "200000";

/// A redis that saves nothing on disk.
pub(crate) struct Redis {
    pub(crate) victim: TestProgram,
    pub(crate) port: u16,
}

impl Redis {
    pub(crate) fn start(dir: &Path) -> Option<Redis> {
        Redis::start_with(dir, &[])
    }

    /// Starts one with more arguments.
    pub(crate) fn start_with(dir: &Path, more: &[&str]) -> Option<Redis> {
        let program = program(packages::redis(None))?;
        let port = free_port();
        let text = port.to_string();
        let arguments = ["--port", &text, "--save", "", "--enable-debug-command", "local", "--protected-mode", "no"];
        let victim = TestProgram::start(&program, &[&arguments, more].concat(), dir);
        Some(Redis { victim, port })
    }

    /// Starts a server with data, and connects a client.
    pub(crate) fn with_data(dir: &Path) -> Option<(Redis, LineClient)> {
        let redis = Redis::start(dir)?;
        let mut client = connect(redis.port);
        assert_eq!(client.ask(&format!("DEBUG POPULATE {KEYS} key 200")), "+OK");
        Some((redis, client))
    }
}

/// Compiles a program of `programs`.
#[track_caller]
pub(crate) fn compiled(name: &str, dir: &Path) -> Binary {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(format!("{name}.c"));
    let path = dir.join(name);
    let compiled = Command::new("cc").args(["-O1", "-pthread", "-o"]).arg(&path).arg(&source).status();
    assert!(compiled.is_ok_and(|status| status.success()), "{} compiles", source.display());
    Binary { path, libraries: Vec::new() }
}
