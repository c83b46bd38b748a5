//! Debian's programs, run as `postgres`; ports; waiting.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The major version that Debian 12 has.
pub(crate) const MAJOR: u32 = 15;
/// Long enough for two noisy cores.
const PATIENCE: Duration = Duration::from_secs(120);
/// Below those that the kernel gives to connections (32768 and up, unless configured otherwise).
const FIRST_PORT: u16 = 15_000;
const PORTS: u16 = 17_000;

/// Where the programs of a major version lie.
pub(crate) fn programs(major: u32) -> PathBuf {
    PathBuf::from(format!("/usr/lib/postgresql/{major}/bin"))
}

/// Whether clusters can be started here. Says why not; with `REQUIRE_ALL=1` it panics instead.
pub fn available() -> bool {
    let why = if !rustix::process::geteuid().is_root() {
        "clusters are started as `postgres`, which takes root"
    } else if !programs(MAJOR).join("postgres").exists() {
        "postgresql-15 is not installed"
    } else {
        return true;
    };
    assert!(std::env::var_os("REQUIRE_ALL").is_none_or(|value| value != "1"), "{why}");
    println!("skipped: {why}");
    false
}

/// A command that runs `program` as `postgres`; the kernel ends it should the calling thread end first.
pub(crate) fn as_postgres(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "postgres", "--regid", "postgres", "--init-groups", "--pdeathsig", "KILL", "--"]);
    command.arg(program).env("LC_ALL", "C").env_remove("PGPASSWORD").stdin(Stdio::null());
    command
}

/// A port of 127.0.0.1 on which nothing listens now, and another one at each call.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let candidates = std::iter::repeat_with(|| {
        let number = std::process::id().wrapping_mul(131).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        FIRST_PORT + (number % u32::from(PORTS)) as u16
    });
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    candidates.take(usize::from(PORTS)).find(free).expect("127.0.0.1 has free ports")
}

/// Asks until there is an answer; `None` when `limit` is over.
pub fn within<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if begun.elapsed() > limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Asks until there is an answer; panics with `what` after two minutes.
#[track_caller]
pub fn until<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, ask).unwrap_or_else(|| panic!("waited {} s for {what}", PATIENCE.as_secs()))
}
