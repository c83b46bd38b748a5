//! Guards of connections outlive a reload of the machine's firewall, and an owner that is killed.
//!
//! Each test has a network namespace of its own: its flushes affect no other test.

use crate::engine::support::{Redis, connect, criu, kernel, kill, logs, own_network, restore, run, scratch, until};
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use stillpoint_kernel_switch::{Config, Journal, State, Unit};
use stillpoint_testing::LineClient;
use stillpoint_testing::child::ChildGuard;

/// Time within which a reset arrives from this machine.
const NO_RESET_PERIOD: Duration = Duration::from_secs(1);
/// Time within which a client sends again.
const RESET_TIMEOUT: Duration = Duration::from_secs(60);

fn tables() -> String {
    run("nft list tables").expect("nft lists its tables")
}

/// Loads a file as Debian's nftables.service does, at the start and at each reload.
#[track_caller]
fn reload_firewall() {
    run("printf 'flush ruleset\\ntable inet filter { chain input { type filter hook input priority 0; }; }\\n' | nft -f -")
        .expect("nft loads a file");
}

/// Another machine, as seen by this thread's network: a namespace at the end of a cable.
struct OutsideHost(File);

impl OutsideHost {
    /// Makes it; this end has the address 10.9.0.1.
    #[track_caller]
    fn new() -> OutsideHost {
        let make = || {
            own_network();
            File::open("/proc/thread-self/ns/net").expect("its namespace")
        };
        let outside = OutsideHost(std::thread::scope(|scope| scope.spawn(make).join().expect("a namespace")));
        let there = format!("/proc/{}/fd/{}", std::process::id(), outside.0.as_raw_fd());
        run(&format!("ip link add near type veth peer name far && ip link set far netns {there}")).expect("a cable");
        run("ip addr add 10.9.0.1/24 dev near && ip link set near up").expect("an address here");
        outside.within(|| run("ip addr add 10.9.0.2/24 dev far && ip link set far up").expect("an address there"));
        outside
    }

    /// Runs a closure there; its sockets stay there.
    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let enter = || {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network)).expect("enter a namespace");
            work()
        };
        std::thread::scope(|scope| scope.spawn(enter).join().expect("something done there"))
    }

    /// Sends a packet to a port of this end; returns the kind of answer.
    fn answer(&self, port: u16) -> &'static str {
        let to = SocketAddr::from((Ipv4Addr::new(10, 9, 0, 1), port));
        match self.within(|| TcpStream::connect_timeout(&to, NO_RESET_PERIOD)) {
            Ok(_) => "a connection",
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => "a reset",
            Err(error) if error.kind() == ErrorKind::TimedOut => "nothing",
            Err(error) => panic!("port {port}: {error}"),
        }
    }
}

/// The boot side of a switch: its state, and the socket of its owner.
struct SwitchBoot {
    dir: tempfile::TempDir,
}

impl SwitchBoot {
    /// Makes a sealed switch of one unit that a kernel restores when it starts; the unit has this port.
    fn sealed(port: u16) -> SwitchBoot {
        let dir = tempfile::tempdir().expect("a directory");
        let state = dir.path().join("state");
        fs::create_dir(dir.path().join("units")).expect("a directory for units");
        let unit =
            Unit { name: "db.service".into(), pid: 1, ports: vec![port], health: Vec::new(), directories: Vec::new() };
        let from = run("uname -r").expect("the kernel");
        let config = Config { state: state.clone(), ..Config::default() };
        let journal = serde_json::json!({
            "v": 1, "from": from, "to": "99.0", "boot": "another", "state": State::Sealed, "why": null, "begun_on": [],
            "pid_max": 0, "units": [unit], "config": config, "timings": [],
        });
        let journal: Journal = serde_json::from_value(journal).expect("a journal");
        journal.write().expect("write the journal");
        fs::write(dir.path().join("kernel.toml"), format!("state = {state:?}\n")).expect("write the configuration");
        SwitchBoot { dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Runs the generator as systemd does.
    #[track_caller]
    fn generator(&self) {
        let ran = kernel(Path::new("criu"), &["boot", "--config", &self.path("kernel.toml"), &self.path("units")]);
        assert_eq!(ran.code, Some(0), "{ran}");
    }

    /// Starts the owner as systemd does, by the unit that the generator made.
    #[track_caller]
    fn owner(&self) -> ChildGuard {
        let unit = fs::read_to_string(self.path("units/stillpoint-guard.service")).expect("a unit for the owner");
        let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("its command");
        let command = command.replace("/run/stillpoint/switch-guard.sock", &self.path("guard.sock"));
        let mut words = command.split(' ');
        let mut owner = Command::new(words.next().expect("a program"));
        owner.args(words);
        let owner = ChildGuard::from_child(owner.spawn().expect("start the owner"));
        let both = ["table inet stillpoint_switch", "table inet stillpoint_switch_owned"];
        until("both tables", || both.iter().all(|table| tables().lines().any(|line| line == *table)).then_some(()));
        owner
    }
}

#[test]
fn ports_stay_guarded_when_the_firewall_is_loaded_while_a_kernel_comes_up() {
    own_network();
    let outside = OutsideHost::new();
    let _other = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7002)).unwrap();
    let boot = SwitchBoot::sealed(7001);
    boot.generator();
    assert_eq!(tables(), "table inet stillpoint_switch");
    assert_eq!(outside.answer(7001), "nothing");
    assert_eq!(outside.answer(7002), "a connection");
    // without its owner a table does not survive a flush
    reload_firewall();
    assert_eq!(outside.answer(7001), "a reset");
    boot.generator();
    let mut owner = boot.owner();
    reload_firewall();
    assert_eq!(outside.answer(7001), "nothing");
    assert_eq!(outside.answer(7002), "a connection");
    // the other table is made again, and stays when its owner is killed
    until("the table that was flushed", || run("nft list table inet stillpoint_switch").ok());
    assert!(run("nft list ruleset").is_ok(), "nft prints it");
    owner.signal(Signal::KILL);
    until("its table to go", || (!tables().contains("owned")).then_some(()));
    assert_eq!(outside.answer(7001), "nothing");
    // both at once: the next owner guards, and reports that there was a gap
    reload_firewall();
    assert_eq!(outside.answer(7001), "a reset");
    let _owner = boot.owner();
    assert_eq!(outside.answer(7001), "nothing");
    let told = until("the gap", || fs::read_to_string(boot.path("guard.gaps")).ok());
    assert_eq!(told.lines().count(), 1, "{told}");
}

/// A program that was taken into an image, and a client whose connection is in it.
struct CheckpointedRedis {
    redis: Redis,
    client: LineClient,
    dir: tempfile::TempDir,
    criu: PathBuf,
}

impl CheckpointedRedis {
    #[track_caller]
    fn new() -> Option<CheckpointedRedis> {
        own_network();
        let (criu, dir) = (criu()?, scratch());
        let mut redis = Redis::start(dir.path())?;
        let mut client = connect(redis.port);
        assert_eq!(client.ask("PING"), "+PONG");
        redis.victim.checkpoint(&criu, &dir.path().join("image"), &[]);
        Some(CheckpointedRedis { redis, client, dir, criu })
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    #[track_caller]
    fn status(&self) -> serde_json::Value {
        let image = self.image();
        let path = image.to_str().expect("a plain path");
        kernel(&self.criu, &["status", "--image", path]).event("kernel-status")
    }

    /// Returns the owner, which it finds by the name of the image.
    #[track_caller]
    fn owner(&self) -> i32 {
        let image = self.image().display().to_string();
        let is_it = |process: &procfs::process::Process| {
            process.cmdline().is_ok_and(|words| words.contains(&"guard-keeper".to_owned()) && words.contains(&image))
        };
        let mut all = procfs::process::all_processes().expect("processes").flatten();
        all.find(is_it).expect("an owner").pid
    }

    /// Sends a request on the connection; returns true if that is reset within a limit.
    fn is_reset(&mut self, limit: Duration) -> bool {
        self.client.send("PING");
        self.client.stream.get_ref().set_read_timeout(Some(limit)).expect("a limit");
        match self.client.stream.get_mut().read(&mut [0; 16]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => true,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn connections_of_an_image_outlive_a_reload_of_the_firewall() {
    let Some(mut taken) = CheckpointedRedis::new() else { return };
    reload_firewall();
    assert!(!taken.is_reset(NO_RESET_PERIOD), "{}", tables());
    // packets of other connections pass
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    TcpStream::connect(other.local_addr().unwrap()).unwrap();
    assert!(taken.status()["guard_warning"].is_null(), "{}", taken.status());
    restore(&taken.criu, &taken.image(), &[]);
    taken.client.stream.get_ref().set_read_timeout(None).unwrap();
    // answer to the request from before
    assert_eq!(taken.client.line(), "+PONG");
    assert_eq!(taken.client.ask("PING"), "+PONG");
    until("no table of ours", || (tables() == "table inet filter").then_some(()));
    assert!(taken.redis.victim.is_alive(), "{}", logs(&taken.image()));
}

#[test]
fn a_keeper_that_is_killed_leaves_a_guard_and_status_tells_of_it() {
    let Some(mut taken) = CheckpointedRedis::new() else { return };
    kill(taken.owner(), "KILL");
    until("its table to go", || (!tables().contains("owned")).then_some(()));
    assert!(!taken.is_reset(NO_RESET_PERIOD));
    let warning = |taken: &CheckpointedRedis| taken.status()["guard_warning"].as_str().unwrap_or_default().to_owned();
    assert!(warning(&taken).contains("the owner process of the guard has ended"), "{}", warning(&taken));
    // now no table is left that survives this
    reload_firewall();
    assert!(warning(&taken).contains("the guard is missing"), "{}", warning(&taken));
    // its peer has tried some times in vain, and waits longer each time
    assert!(taken.is_reset(RESET_TIMEOUT));
    let image = taken.image();
    let gone = kernel(&taken.criu, &["discard", "--image", image.to_str().unwrap()]);
    assert_eq!(gone.code, Some(0), "{gone}");
    assert_eq!(tables(), "table inet filter");
}
