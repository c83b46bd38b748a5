//! Messages for which there is no room end a capture: not the session, and not the proxy for want of memory.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use stillpoint_migrate_proxy::control::{Reply, Request};
use stillpoint_migrate_testbed::{Cluster, available, until};
use support::armed::Armed;
use support::{Proxy, ask, server, session};

/// Of each value, in bytes.
const LARGE: usize = 48 << 20;
const PIECE: usize = 64 << 10;

/// Sends `INSERT` with a large value, piece by piece; our own memory is measured too.
fn insert(stream: &mut TcpStream, id: usize) {
    let (before, after) = (format!("INSERT INTO big VALUES ({id}, '"), "')\0");
    let len = 4 + before.len() + LARGE + after.len();
    stream.write_all(b"Q").expect("write");
    stream.write_all(&u32::try_from(len).expect("a length").to_be_bytes()).expect("write");
    stream.write_all(before.as_bytes()).expect("write");
    for _ in 0..LARGE / PIECE {
        stream.write_all(&[b'v'; PIECE]).expect("write");
    }
    stream.write_all(after.as_bytes()).expect("write");
    ready(stream, b'T');
}

/// Reads until a transaction that is open, or none, waits for the next statement; how much that was.
fn ready(stream: &mut TcpStream, status: u8) -> usize {
    let (mut total, mut last, mut bytes) = (0, Vec::new(), vec![0; PIECE]);
    while !last.ends_with(&[b'Z', 0, 0, 0, 5, status]) {
        let n = stream.read(&mut bytes).expect("an answer");
        assert!(n > 0, "the connection was closed: {}", String::from_utf8_lossy(&last));
        total += n;
        last.extend(&bytes[..n]);
        last.drain(..last.len().saturating_sub(300));
    }
    assert!(!String::from_utf8_lossy(&last).contains("ERROR"), "{}", String::from_utf8_lossy(&last));
    total
}

fn say(stream: &mut TcpStream, sql: &str, status: u8) -> usize {
    let mut message = b"Q".to_vec();
    message.extend((sql.len() as u32 + 5).to_be_bytes());
    message.extend(sql.bytes().chain([0]));
    stream.write_all(&message).expect("write");
    ready(stream, status)
}

/// The most that this process held since it was last asked, in MiB.
fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("read the status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("a line");
    std::fs::write("/proc/self/clear_refs", "5").expect("begin anew");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("a number") >> 10
}

/// Waits until sessions are captured.
fn armed(proxy: &Proxy) {
    until("sessions to be captured", || {
        let captured = proxy.ask(Request::Captured { tenant: "postgres".into() });
        matches!(captured, Reply::Captured { over: None, .. }).then_some(())
    });
}

#[test]
fn messages_without_room_end_the_capture_alone() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE TABLE big (id int PRIMARY KEY, v text)");
    let tables = format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster));
    let proxy = Proxy::start("limits = { memory_mib = 16, connections = 16 }", &tables);
    let mut streams: Vec<TcpStream> = (0..3).map(|_| session(&proxy)).collect();
    let armed_for = Armed::start(&proxy, "postgres");
    peak_mib();
    let before = peak_mib();
    std::thread::scope(|scope| {
        for (id, stream) in streams.iter_mut().enumerate() {
            scope.spawn(move || {
                // Not between two transactions, where the capture would end before it is looked at.
                say(stream, "BEGIN", b'T');
                insert(stream, id);
                assert!(say(stream, &format!("SELECT v FROM big WHERE id = {id}"), b'T') > LARGE);
                say(stream, "COMMIT", b'I');
            });
        }
    });
    // What the server tells of a row is as large.
    armed(&proxy);
    assert!(ask(&mut streams[0], "INSERT INTO big SELECT 9, repeat('v', 50331648)").contains("INSERT 0 1"));
    let grown = peak_mib().saturating_sub(before);
    assert!(grown < 40, "{grown} MiB");
    let whole = format!("SELECT count(*) FROM big WHERE length(v) = {LARGE} AND md5(v) = md5(repeat('v', {LARGE}))");
    assert_eq!(cluster.sql("postgres", &whole), "4", "everything went through");
    assert!(ask(&mut streams[0], "SELECT 'still here'").contains("still here"));
    let seen = armed_for.finish();
    let named = seen.over.iter().filter(|why| why.contains("a message of 48 MiB is more than there is memory for"));
    assert!(named.count() >= 2, "{:?}", seen.over);
}
