//! A thousand silent connections, and a proxy with fewer open files than that: other clients can still log in.

use crate::proxy::support::{Proxy, psql, ran_elsewhere, server};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_testing::{
    port::free_port,
    postgresql::{Cluster, available},
};

const CROWD: usize = 1000;
/// Open files of the proxy, which runs in this process.
const FILES: u64 = 400;

/// Runs in another process, since its own ends of the connections are open files too. For each line of input, it opens
/// all connections again.
#[test]
#[ignore = "the other test starts it"]
fn the_crowd() {
    let Ok(port) = std::env::var("CROWD_PORT") else { return };
    let address = format!("127.0.0.1:{port}").parse().expect("an address");
    let mut crowd = Vec::new();
    for _ in std::io::stdin().lines() {
        crowd.clear();
        while crowd.len() < CROWD {
            // A connection that does not fit into the backlog is retried.
            crowd.extend(TcpStream::connect_timeout(&address, Duration::from_secs(5)));
        }
        println!("there");
    }
}

#[test]
fn clients_get_in_beside_a_thousand_silent_ones() {
    if ran_elsewhere("proxy::silent_connections::clients_get_in_beside_a_thousand_silent_ones") || !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("as many files as there may be");
    let (port, metrics) = (free_port(), free_port());
    let mut crowd = Command::new(std::env::current_exe().expect("this program"));
    crowd
        .args(["--exact", "proxy::silent_connections::the_crowd", "--ignored", "--nocapture"])
        .env("CROWD_PORT", port.to_string());
    let mut crowd = crowd.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start the crowd");
    let (mut tell, told) = (crowd.stdin.take().expect("piped"), crowd.stdout.take().expect("piped"));
    let mut told = BufReader::new(told).lines().map_while(Result::ok);
    setrlimit(Resource::Nofile, Rlimit { current: Some(FILES), maximum: Some(FILES) }).expect("few files");
    let top = format!(
        "metrics = \"127.0.0.1:{metrics}\"\nlimits = {{ connections = 40, unnamed = 100, startup_ms = 120000 }}"
    );
    let tables = format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster));
    let proxy = Proxy::start_at(port, &top, &tables);
    for round in 0..2 {
        writeln!(tell).expect("tell the crowd");
        assert!(told.any(|line| line.contains("there")), "the crowd ended");
        for client in 0..5 {
            let begun = Instant::now();
            let answer = psql(&format!("{} connect_timeout=20", proxy.conninfo("postgres")), "", "SELECT 'in'");
            assert_eq!(answer.as_deref(), Ok("in"), "round {round}, client {client}");
            assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        }
    }
    let mut stream = TcpStream::connect(("127.0.0.1", metrics)).expect("connect");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("ask");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    // A client that was admitted has pushed one out.
    assert!(value("stillpoint_proxy_unnamed ").is_some_and(|there| (90..=100).contains(&there)), "{text}");
    let away = value("stillpoint_proxy_unnamed_turned_away_total ").expect("a line");
    assert!(away >= CROWD as u64 - 100, "{away}");
    drop(tell);
    assert!(crowd.wait().expect("the crowd ends").success());
}
