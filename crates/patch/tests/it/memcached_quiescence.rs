//! Debian's memcached with quiescence points (`crates/patch/integrations/memcached`): every mode, with all its threads.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::OnceLock;
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::server::Memcached;
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_patch_tests::victim::{apply, residue, revert, soak, status};
use stillpoint_patch_tests::{annotation, skip, wait};

fn memcached() -> &'static Result<(Binary, PathBuf), stillpoint_patch_tests::Unavailable> {
    static BUILT: OnceLock<Result<(Binary, PathBuf), stillpoint_patch_tests::Unavailable>> = OnceLock::new();
    BUILT.get_or_init(annotation::memcached)
}

fn rounds(short: u32) -> u32 {
    if soak() { short * 20 } else { short }
}

/// One connection.
struct Client(BufReader<TcpStream>);

impl Client {
    #[track_caller]
    fn connect(port: u16) -> Client {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("connect to memcached");
        stream.set_read_timeout(Some(wait::WAIT_TIMEOUT)).expect("set a time-out");
        Client(BufReader::new(stream))
    }

    /// Sends a line and returns the first line of the answer.
    #[track_caller]
    fn ask(&mut self, line: &str) -> String {
        self.0.get_mut().write_all(format!("{line}\r\n").as_bytes()).expect("ask memcached");
        self.line()
    }

    #[track_caller]
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("memcached answers");
        line.trim_end().to_owned()
    }

    /// Returns a value of `stats`.
    #[track_caller]
    fn stat(&mut self, name: &str) -> u64 {
        let mut line = self.ask("stats");
        let mut value = None;
        while line != "END" {
            value = line.strip_prefix(&format!("STAT {name} ")).and_then(|v| v.parse().ok()).or(value);
            line = self.line();
        }
        value.unwrap_or_else(|| panic!("memcached has no figure {name}"))
    }
}

/// Returns the names of a process's threads, from the kernel.
fn threads(pid: i32) -> BTreeSet<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("memcached runs");
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(|task| name(task.ok()?)).map(|name| name.trim().to_owned()).collect()
}

#[track_caller]
fn there_and_back(memcached: &mut Memcached, patch: &std::path::Path, load: &MonitoredLoad, mode: &str) {
    let (pid, port) = (memcached.pid(), memcached.port());
    apply(patch, pid).args(["--quiescence", mode]).succeed();
    memcached.assert_running();
    assert_eq!(Client::connect(port).ask("version"), "VERSION stillpoint", "{mode}");
    load.answered(50);
    status(pid).succeed();
    revert(pid).args(["--quiescence", mode]).succeed();
    memcached.assert_running();
    assert!(Client::connect(port).ask("version").starts_with("VERSION 1."), "{mode}");
    load.answered(50);
    assert_eq!(residue(pid), Vec::<String>::new());
}

/// Uses local, group and global quiescence and probing, with workers, listener, LRU maintainer and crawler, logger and
/// its watcher, hash table and slab maintenance, idle time-outs, and the four kinds of threads of external storage;
/// meanwhile the hash table grows.
#[test]
fn memcached_changes_over_in_every_mode() {
    let (binary, patch) = match memcached() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let storage = tempfile::tempdir().expect("make a directory");
    let options =
        format!("ext_path={}:64m,idle_timeout=3600,hashpower=13,slab_automove=1", storage.path().join("x").display());
    let mut memcached = Memcached::start(binary, &["-t", "4", "-o", &options]);
    let (pid, port) = (memcached.pid(), memcached.port());
    let there = threads(pid);
    let all = [
        "mc-worker",
        "mc-assocmaint",
        "mc-itemcrawler",
        "mc-lrumaint",
        "mc-slabmaint",
        "mc-log",
        "mc-idletimeout",
        "mc-ext-io",
        "mc-ext-maint",
        "mc-ext-write",
        "mc-ext-compact",
    ];
    for name in all {
        assert!(there.contains(name), "{name} is none of {there:?}");
    }
    let mut part: Vec<String> = all.map(str::to_owned).into();
    part.extend(["listener", "mc-worker", "mc-worker", "mc-worker"].map(str::to_owned));
    part.sort_unstable();
    wait::until("all threads to take part", || (annotation::taking_part(pid) == part).then_some(()));
    let load = MonitoredLoad::memcached(port);
    let mut watcher = Client::connect(port);
    assert_eq!(watcher.ask("watch evictions"), "OK");
    let mut client = Client::connect(port);
    let power = client.stat("hash_power_level");
    let mut keys = 0;
    for _ in 0..rounds(3) {
        for mode in ["probe", "local", "group:workers", "global"] {
            for _ in 0..1_000 {
                let set = format!("set grow{keys} 0 0 4\r\nabcd");
                assert_eq!(client.ask(&set), "STORED");
                keys += 1;
            }
            assert_eq!(client.ask("lru_crawler crawl all"), "OK");
            there_and_back(&mut memcached, patch, &load, mode);
        }
    }
    load.assert_clean();
    wait::until("the hash table to have grown", || (client.stat("hash_power_level") > power).then_some(()));
    assert_eq!(threads(pid), there, "the same threads");
}

/// Starts and ends threads: the crawler is stopped and started, and connections of all ages stay.
#[test]
fn memcached_changes_over_while_threads_come_and_go() {
    let (binary, patch) = match memcached() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut memcached = Memcached::start(binary, &["-t", "2"]);
    let port = memcached.port();
    let load = MonitoredLoad::memcached(port);
    let mut idle: Vec<Client> = Vec::new();
    let mut client = Client::connect(port);
    for _ in 0..rounds(3) {
        for mode in ["local", "group:workers", "global"] {
            idle.push(Client::connect(port));
            assert_eq!(client.ask("lru_crawler disable"), "OK");
            there_and_back(&mut memcached, patch, &load, mode);
            assert_eq!(client.ask("lru_crawler enable"), "OK");
            there_and_back(&mut memcached, patch, &load, mode);
        }
    }
    load.assert_clean();
    for mut connection in idle {
        assert!(connection.ask("version").starts_with("VERSION 1."));
    }
}

/// Runs without load, with every worker asleep in its event loop: only a wake-up makes it reach its point.
#[test]
fn an_idle_memcached_is_woken() {
    let (binary, patch) = match memcached() {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut memcached = Memcached::start(binary, &["-t", "8"]);
    let pid = memcached.pid();
    for mode in ["local", "group:workers", "global"] {
        for _ in 0..rounds(3) {
            apply(patch, pid).args(["--quiescence", mode, "--timeout", "30s"]).succeed();
            revert(pid).args(["--quiescence", mode, "--timeout", "30s"]).succeed();
        }
    }
    memcached.assert_running();
    assert_eq!(residue(pid), Vec::<String>::new());
}
