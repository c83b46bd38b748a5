//! A request that is sent while no process holds the connection is retried, each time after twice as long. After a
//! restore it must not wait for the next retry.

use crate::engine::support::{Redis, connect, connect_to, criu, restore, scratch, until};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

/// Time that is long enough for a restore on a slow machine.
const LONG_RETRY: Duration = Duration::from_secs(10);

/// Packets of this client never leave the machine: criu's rules drop them before they are sent.
#[test]
fn a_client_of_the_same_machine_is_served_before_it_tries_again() {
    for server in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        served_before_trying_again(server, None);
    }
}

/// Packets of this client are sent, and dropped where they arrive.
#[test]
fn a_client_outside_is_served_before_it_tries_again() {
    let outside = OutsideHost::new();
    for server in outside.servers() {
        served_before_trying_again(server, Some(&outside));
    }
}

fn served_before_trying_again(server: IpAddr, outside: Option<&OutsideHost>) {
    if server.is_ipv6() && !speaks_v6() {
        return println!("SKIPPED: this machine does not speak IPv6");
    }
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some(mut redis) = Redis::start(dir.path()) else { return };
    let mut client = match outside {
        Some(outside) => outside.within(|| connect_to(server, redis.port)),
        None => connect_to(server, redis.port),
    };
    assert_eq!(client.ask("PING"), "+PONG");
    let port = client.stream.get_ref().local_addr().unwrap().port();
    // on a machine that is too slow the test shows nothing
    let served = (0..3).any(|round| {
        let image = dir.path().join(format!("image{round}"));
        // one more request is in the connection's queue, which no process reads meanwhile
        let mut busy = connect(redis.port);
        busy.send("DEBUG SLEEP 2");
        client.send("PING");
        redis.victim.checkpoint(&criu, &image, &[]);
        client.send("PING");
        let (seen, next) = until("a try of which the next is far away", || {
            let next = next_try(port, outside)?;
            Some((Instant::now(), next))
        });
        restore(&criu, &image, &[]);
        assert_eq!((client.line(), client.line()), ("+PONG".to_owned(), "+PONG".to_owned()));
        seen.elapsed() < next
    });
    assert!(served, "{server}: each time only when it tried again");
}

fn speaks_v6() -> bool {
    TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
}

/// Returns the time until the client's end of a connection retries by itself, if it is long: `ss` then prints whole
/// seconds.
fn next_try(port: u16, outside: Option<&OutsideHost>) -> Option<Duration> {
    let mut command = outside.map_or_else(|| Command::new("ss"), |outside| outside.command("ss"));
    let sender = format!("sport = :{port}");
    let shown = command.args(["-tnoH", "state", "established", &sender]).output().expect("run ss");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let timer = shown.split_once("timer:(")?.1;
    let left = timer.split(',').nth(1)?.strip_suffix("sec")?.parse().map(Duration::from_secs).ok();
    left.filter(|left| *left >= LONG_RETRY)
}

/// Another machine, as seen by the network: a namespace at the end of a cable.
struct OutsideHost {
    name: String,
    number: u32,
}

impl OutsideHost {
    fn new() -> OutsideHost {
        let number = std::process::id() % 250 + 1;
        let outside = OutsideHost { name: format!("stillpoint-{}-wake", std::process::id()), number };
        let (here, there) = (format!("spw{number}a"), format!("spw{number}b"));
        let name = &outside.name;
        ip(&format!("netns add {name}"));
        ip(&format!("link add {here} type veth peer name {there} netns {name}"));
        for (of, device, end) in [("", &here, 1), (&format!("-n {name}"), &there, 2)] {
            ip(&format!("{of} addr add 10.78.{number}.{end}/24 dev {device}"));
            if speaks_v6() {
                ip(&format!("{of} addr add fd78:{number:x}::{end}/64 dev {device} nodad"));
            }
            ip(&format!("{of} link set {device} up"));
        }
        outside
    }

    /// Returns the addresses of this machine, as seen from there.
    fn servers(&self) -> [IpAddr; 2] {
        let number = self.number;
        [format!("10.78.{number}.1"), format!("fd78:{number:x}::1")].map(|address| address.parse().unwrap())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    /// Runs a closure there; its sockets stay there.
    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let there = File::open(format!("/run/netns/{}", self.name)).unwrap();
        let enter = || {
            move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            work()
        };
        std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }
}

impl Drop for OutsideHost {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

#[track_caller]
fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split_whitespace()).output().expect("run ip");
    assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
}
