//! Whoever does not keep to the protocol, or to any pace, loses its own connection and harms nobody else's.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use stillpoint_migrate_testbed::{Cluster, available, until};
use support::{Proxy, ask, raw, server, session, startup};

/// All that comes until the connection ends.
fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the connection stays open: {error}"),
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn setup(top: &str) -> (Cluster, Proxy) {
    let cluster = Cluster::start(&[]);
    let tables = format!("{}[tenants.postgres]\nserver = \"a\"\nconnections = 8\n", server("a", &cluster));
    let proxy = Proxy::start(top, &tables);
    (cluster, proxy)
}

#[test]
fn what_is_not_the_protocol_is_answered_and_closed() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup("");
    let mut bystander = session(&proxy);
    let v2 = startup(&[("user", "a")], 2 << 16);
    let user = [("user", "postgres"), ("database", "nowhere")];
    for (packet, expected) in [
        (b"\0\0\0\x03".to_vec(), "invalid length 3"),
        (b"\xff\xff\xff\xff".to_vec(), "invalid length"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "invalid length"),
        (b"\0\0\0\x0c\0\x03\0\0user".to_vec(), "malformed startup packet"),
        (v2, "unsupported frontend protocol 2.0"),
        (startup(&[("database", "postgres")], 196_608), "no PostgreSQL user name"),
        (startup(&user, 196_608), "database \"nowhere\" is not served here"),
    ] {
        let mut stream = raw(&proxy);
        stream.write_all(&packet).expect("write");
        let answer = rest(&mut stream);
        assert!(answer.starts_with('E') && answer.contains(expected), "{packet:?}: {answer:?}");
    }
    for (message, expected) in [
        (&b"!\0\0\0\x04"[..], "invalid message type '!'"),
        (b"Q\0\0\0\x03", "invalid length 3 of message 'Q'"),
        (b"Q\xff\xff\xff\xff", "invalid length 4294967295 of message 'Q'"),
        (b"p\0\0\0\x04", "invalid message type 'p'"),
    ] {
        let mut stream = session(&proxy);
        stream.write_all(message).expect("write");
        let answer = rest(&mut stream);
        assert!(answer.contains(expected) && answer.contains("08P01"), "{message:?}: {answer:?}");
    }
    // cut off in the middle of a message: nothing to answer, and nothing left behind
    let mut stream = session(&proxy);
    stream.write_all(b"Q\0\0\0\x20select").expect("write");
    drop(stream);
    assert!(ask(&mut bystander, "select 'still here'").contains("still here"));
}

#[test]
fn who_says_nothing_or_says_it_slowly_is_not_waited_for() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup("limits = { startup_ms = 3000 }");
    let begun = Instant::now();
    let mut silent = raw(&proxy);
    let mut slow = raw(&proxy);
    let packet = startup(&[("user", "postgres"), ("database", "postgres")], 196_608);
    for byte in &packet {
        if slow.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(!rest(&mut slow).contains("server_version"));
    assert_eq!(rest(&mut silent), "");
    assert!(begun.elapsed() < Duration::from_secs(60));
    assert!(ask(&mut session(&proxy), "select 'fine'").contains("fine"));
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody_and_fills_no_memory() {
    if !available() {
        return;
    }
    // one thread for all sessions
    let (_cluster, proxy) = setup("");
    let mut greedy: Vec<TcpStream> = (0..4).map(|_| session(&proxy)).collect();
    for stream in &mut greedy {
        let sql = b"select repeat('x', 1000000) from generate_series(1, 200)\0";
        let mut message = b"Q".to_vec();
        message.extend((sql.len() as u32 + 4).to_be_bytes());
        message.extend(sql);
        stream.write_all(&message).expect("write");
    }
    std::thread::sleep(Duration::from_millis(300));
    let before = resident_kib();
    let mut other = session(&proxy);
    for i in 0..50 {
        assert!(ask(&mut other, &format!("select 'n' || {i}")).contains(&format!("n{i}")));
    }
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 50 << 10, "{grown} KiB for 200 MB that nobody reads");
    // and it gets everything once it reads
    let stream = &mut greedy[0];
    let (mut total, mut last) = (0_usize, Vec::new());
    while !last.ends_with(b"Z\0\0\0\x05I") {
        let mut bytes = vec![0; 1 << 16];
        let n = stream.read(&mut bytes).expect("rows");
        total += n;
        last = [last, bytes[..n].to_vec()].concat();
        last.drain(..last.len().saturating_sub(6));
    }
    assert!(total > 200_000_000, "{total}");
}

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("read the status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

#[test]
fn limits_on_connections_hold_and_free_places_are_given_again() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup("limits = { connections = 10 }");
    let sessions: Vec<TcpStream> = (0..8).map(|_| session(&proxy)).collect();
    let packet = startup(&[("user", "postgres"), ("database", "postgres")], 196_608);
    let mut stream = raw(&proxy);
    stream.write_all(&packet).expect("write");
    let answer = rest(&mut stream);
    assert!(
        answer.contains("53300") && answer.contains("too many connections for database \"postgres\""),
        "{answer:?}"
    );
    drop(sessions);
    until("a free place", || {
        let mut stream = raw(&proxy);
        stream.write_all(&packet).ok()?;
        let mut first = [0];
        stream.read_exact(&mut first).ok()?;
        (first[0] == b'R').then_some(())
    });
}

#[test]
fn a_server_that_hangs_or_dies_harms_its_own_sessions_only() {
    if !available() {
        return;
    }
    let (good, mut bad) = (Cluster::start(&[]), Cluster::start(&[]));
    for cluster in [&good, &bad] {
        cluster.sql("postgres", "CREATE DATABASE other");
    }
    let tables = format!(
        "{}{}[tenants.postgres]\nserver = \"good\"\n[tenants.other]\nserver = \"bad\"\n",
        server("good", &good),
        server("bad", &bad)
    );
    let proxy = Proxy::start("limits = { startup_ms = 5000, connect_ms = 2000 }", &tables);
    let mut fine = session(&proxy);
    let open = |proxy: &Proxy| {
        let mut stream = raw(proxy);
        stream.write_all(&startup(&[("user", "postgres"), ("database", "other")], 196_608)).expect("write");
        stream
    };
    let mut doomed = open(&proxy);
    let mut first = [0];
    doomed.read_exact(&mut first).expect("a greeting");
    bad.freeze();
    let mut hanging = open(&proxy);
    for i in 0..20 {
        assert!(ask(&mut fine, &format!("select 'n' || {i}")).contains(&format!("n{i}")));
    }
    assert!(rest(&mut hanging).contains("took too long"));
    bad.thaw();
    bad.crash();
    rest(&mut doomed);
    let answer = rest(&mut open(&proxy));
    assert!(answer.contains("08001") && !answer.contains("127.0.0.1"), "{answer:?}");
    assert!(ask(&mut fine, "select 'still here'").contains("still here"));
}
