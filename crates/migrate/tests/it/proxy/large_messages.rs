//! Messages for which there is no memory end a capture, but not the session, and the proxy does not run out of memory.

use crate::proxy::support;
use crate::proxy::support::repeated_capture::RepeatedCapture;
use crate::proxy::support::{Proxy, ask, ran_elsewhere, server, session};
use std::io::{Read, Write};
use std::net::TcpStream;
use stillpoint_migrate_control::{Reply, Request};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};
use tokio_postgres::NoTls;

/// Size of each value, in bytes.
const LARGE: usize = 48 << 20;
const PIECE: usize = 64 << 10;

/// Sends `INSERT` with a large value, piece by piece; the test's own memory is measured too.
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

fn frame(tag: u8, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len() + 4).expect("a length").to_be_bytes();
    [&[tag], &len[..], body].concat()
}

/// Sends a large value of a statement, and a large statement, each in a transaction that is captured.
async fn extended(conninfo: &str, value: &str) {
    let (mut client, connection) = tokio_postgres::connect(conninfo, NoTls).await.expect("connect");
    tokio::spawn(connection);
    let open = client.transaction().await.expect("a transaction");
    let insert = "INSERT INTO big VALUES ($1, $2)";
    assert_eq!(open.execute(insert, &[&19, &"captured"]).await.expect("insert"), 1);
    assert_eq!(open.execute(insert, &[&20, &value]).await.expect("insert"), 1);
    let text = format!("INSERT INTO big VALUES ($1, '{value}')");
    assert_eq!(open.execute(&text, &[&21]).await.expect("insert"), 1);
    open.commit().await.expect("commit");
    assert_eq!(client.execute("DELETE FROM big WHERE id = $1", &[&19]).await.expect("delete"), 1);
}

/// Reads until the session is ready with this transaction status; returns the number of bytes.
fn ready(stream: &mut TcpStream, status: u8) -> usize {
    let (total, last) = read(stream, status);
    assert!(!last.contains("ERROR"), "{last}");
    total
}

/// Reads until then; returns the number of bytes, and the last of them.
fn read(stream: &mut TcpStream, status: u8) -> (usize, String) {
    let (mut total, mut last, mut bytes) = (0, Vec::new(), vec![0; PIECE]);
    while !last.ends_with(&[b'Z', 0, 0, 0, 5, status]) {
        let n = stream.read(&mut bytes).expect("an answer");
        assert!(n > 0, "the connection was closed: {}", String::from_utf8_lossy(&last));
        total += n;
        last.extend(&bytes[..n]);
        last.drain(..last.len().saturating_sub(300));
    }
    (total, String::from_utf8_lossy(&last).into_owned())
}

fn say(stream: &mut TcpStream, sql: &str, status: u8) -> usize {
    stream.write_all(&frame(b'Q', &[sql.as_bytes(), b"\0"].concat())).expect("write");
    ready(stream, status)
}

/// Inserts a large row and asks for it, with columns before and after it; the answer must match.
fn insert_and_see(stream: &mut TcpStream, id: usize) {
    let sql = format!("INSERT INTO big SELECT {id}, repeat('v', {LARGE}) RETURNING 'before', v, id, NULL");
    stream.write_all(&frame(b'Q', &[sql.as_bytes(), b"\0"].concat())).expect("write");
    let next = |stream: &mut TcpStream| {
        let mut header = [0; 5];
        stream.read_exact(&mut header).expect("a message");
        (header[0], u32::from_be_bytes(header[1..].try_into().expect("a length")) as usize - 4)
    };
    let bytes = |stream: &mut TcpStream, len: usize| {
        let mut body = vec![0; len];
        stream.read_exact(&mut body).expect("a body");
        body
    };
    let (tag, len) = next(stream);
    let described = bytes(stream, len);
    assert_eq!((tag, &described[..2]), (b'T', &[0, 4][..]), "{described:?}");
    let (tag, len) = next(stream);
    let number = id.to_string();
    assert_eq!((tag, len), (b'D', 2 + 4 + 6 + 4 + LARGE + 4 + number.len() + 4));
    assert_eq!(bytes(stream, 12), b"\0\x04\0\0\0\x06before");
    assert_eq!(bytes(stream, 4), u32::try_from(LARGE).expect("a length").to_be_bytes());
    for _ in 0..LARGE / PIECE {
        assert!(bytes(stream, PIECE).iter().all(|byte| *byte == b'v'));
    }
    let length = u32::try_from(number.len()).expect("a length").to_be_bytes();
    let rest = [&length[..], number.as_bytes(), &[255; 4]].concat();
    assert_eq!(bytes(stream, rest.len()), rest);
    ready(stream, b'T');
}

/// Peak memory of this process since the last call, in MiB.
fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("read the status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("a line");
    std::fs::write("/proc/self/clear_refs", "5").expect("reset the peak");
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
    if ran_elsewhere("proxy::large_messages::messages_without_room_end_the_capture_alone") || !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE TABLE big (id int PRIMARY KEY, v text)");
    let tables = format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster));
    let proxy = Proxy::start("limits = { memory_mib = 16, connections = 16 }", &tables);
    let mut streams: Vec<TcpStream> = (0..3).map(|_| session(&proxy)).collect();
    let armed_for = RepeatedCapture::start(&proxy, "postgres");
    peak_mib();
    let before = peak_mib();
    std::thread::scope(|scope| {
        for (id, stream) in streams.iter_mut().enumerate() {
            scope.spawn(move || {
                // Not between two transactions, where the capture would end before the statement is judged.
                say(stream, "BEGIN", b'T');
                insert(stream, id);
                assert!(say(stream, &format!("SELECT v FROM big WHERE id = {id}"), b'T') > LARGE);
                say(stream, "COMMIT", b'I');
            });
        }
    });
    // The server's message about a row is as large.
    armed(&proxy);
    assert!(ask(&mut streams[0], "INSERT INTO big SELECT 9, repeat('v', 50331648)").contains("INSERT 0 1"));
    // The same holds for a row that the client asks for, beside the column that only the proxy gets.
    armed(&proxy);
    say(&mut streams[2], "BEGIN", b'T');
    insert_and_see(&mut streams[2], 40);
    say(&mut streams[2], "COMMIT", b'I');
    let grown = peak_mib().saturating_sub(before);
    assert!(grown < 40, "{grown} MiB");
    let value = "v".repeat(LARGE);
    armed(&proxy);
    support::runtime().block_on(extended(&proxy.conninfo("postgres"), &value));
    armed(&proxy);
    let stream = &mut streams[1];
    say(stream, "BEGIN", b'T');
    say(stream, "INSERT INTO big VALUES (30, 'captured')", b'T');
    // Messages that the server skips after an error, and rows that are copied.
    let mut bytes = frame(b'P', b"\0nonsense\0\0\0");
    bytes.extend(frame(b'B', &[b"\0\0\0\0\0\x01\x03\0\0\0", value.as_bytes(), b"\0\0"].concat()));
    stream.write_all(&[bytes, frame(b'S', b"")].concat()).expect("write");
    assert!(read(stream, b'E').1.contains("nonsense"));
    say(stream, "ROLLBACK", b'I');
    armed(&proxy);
    let row = format!("22\t{value}\n");
    let copy = [frame(b'Q', b"COPY big FROM STDIN\0"), frame(b'd', row.as_bytes()), frame(b'c', b"")].concat();
    stream.write_all(&copy).expect("write");
    ready(stream, b'I');
    assert!(ask(stream, "DELETE FROM big WHERE id = 9").contains("DELETE 1"));
    let whole = format!("SELECT count(*) FROM big WHERE length(v) = {LARGE} AND md5(v) = md5(repeat('v', {LARGE}))");
    assert_eq!(cluster.sql("postgres", &whole), "7", "everything went through");
    assert!(ask(&mut streams[0], "SELECT 'still here'").contains("still here"));
    let seen = armed_for.finish();
    let named = seen.over.iter().filter(|why| why.contains("a message of 48 MiB exceeds the available memory"));
    assert!(named.count() >= 4, "{:?}", seen.over);
}
