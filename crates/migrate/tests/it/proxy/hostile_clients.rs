//! Clients that break the protocol, or are too slow, lose their own connection and harm no other.

use crate::proxy::support::repeated_capture::RepeatedCapture;
use crate::proxy::support::{Proxy, ask, certificate, log_in, ran_elsewhere, raw, server, session, startup};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Reads until the connection ends.
fn read_to_end(stream: &mut impl Read) -> String {
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
        (b"\0\0\x27\x10\0\x03\0\0".to_vec(), "invalid length 10000"),
        (b"\0\0\0\x0c\0\x03\0\0user".to_vec(), "malformed startup packet"),
        (v2, "unsupported frontend protocol 2.0"),
        (startup(&[("database", "postgres")], 196_608), "no PostgreSQL user name"),
        (startup(&user, 196_608), "database \"nowhere\" is not served here"),
    ] {
        let mut stream = raw(&proxy);
        stream.write_all(&packet).expect("write");
        let answer = read_to_end(&mut stream);
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
        let answer = read_to_end(&mut stream);
        assert!(answer.contains(expected) && answer.contains("08P01"), "{message:?}: {answer:?}");
    }
    // Cut off in the middle of a message: there is nothing to answer, and nothing is left behind.
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
    assert!(!read_to_end(&mut slow).contains("server_version"));
    assert_eq!(read_to_end(&mut silent), "");
    assert!(begun.elapsed() < Duration::from_secs(60));
    assert!(ask(&mut session(&proxy), "select 'fine'").contains("fine"));
}

#[test]
fn a_client_that_does_not_read_holds_up_no_other_and_fills_no_memory() {
    if ran_elsewhere("proxy::hostile_clients::a_client_that_does_not_read_holds_up_no_other_and_fills_no_memory")
        || !available()
    {
        return;
    }
    // One thread for all sessions.
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
    assert!(grown < 50 << 10, "{grown} KiB for 200 MB that the client does not read");
    // The session gets everything once it reads.
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
    let answer = read_to_end(&mut stream);
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
    assert!(read_to_end(&mut hanging).contains("took too long"));
    bad.thaw();
    bad.crash();
    read_to_end(&mut doomed);
    let answer = read_to_end(&mut open(&proxy));
    assert!(answer.contains("08001") && !answer.contains("127.0.0.1"), "{answer:?}");
    assert!(ask(&mut fine, "select 'still here'").contains("still here"));
}

/// A connection of any kind.
trait Line: Read + Write {}
impl<T: Read + Write> Line for T {}

/// Connection types: with TLS or without, each with a capture or without.
const WAYS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

/// A server with a table, and a proxy that speaks TLS.
fn setup_with_tls(top: &str) -> (Cluster, Proxy) {
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE TABLE kept (n int PRIMARY KEY)");
    let dir = tempfile::TempDir::with_prefix("stillpoint-proxy-").expect("make a directory");
    certificate(dir.path());
    let file = |name: &str| dir.path().join(name);
    let top = format!("tls = {{ certificate = {:?}, key = {:?} }}\n{top}", file("server.crt"), file("server.key"));
    let tables = format!("{}[tenants.postgres]\nserver = \"a\"\nconnections = 16\n", server("a", &cluster));
    let proxy = Proxy::start_in(dir, &top, &tables);
    (cluster, proxy)
}

const TLS_WANTED: &[u8] = b"\0\0\0\x08\x04\xd2\x16\x2f";

/// A connection on which the proxy waits for the first record of TLS.
fn raw_for_tls(proxy: &Proxy) -> TcpStream {
    let mut stream = raw(proxy);
    stream.write_all(TLS_WANTED).expect("write");
    let mut answer = [0];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, *b"S");
    stream
}

/// A session inside TLS that waits for its first statement.
fn encrypted(proxy: &Proxy) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(proxy.dir.path().join("server.crt")).expect("a certificate");
    roots.add(certificate).expect("a root");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("versions of TLS");
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = "127.0.0.1".try_into().expect("a name");
    let tls = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut stream = StreamOwned::new(tls, raw_for_tls(proxy));
    log_in(&mut stream);
    stream
}

fn line(proxy: &Proxy, tls: bool) -> Box<dyn Line> {
    if tls { Box::new(encrypted(proxy)) } else { Box::new(session(proxy)) }
}

fn frame(tag: u8, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len() + 4).expect("a length").to_be_bytes();
    [&[tag], &len[..], body].concat()
}

/// Reads until a transaction may begin, or the connection ends.
fn until_ready_or_closed(stream: &mut impl Read) -> String {
    let (mut seen, mut bytes) = (Vec::new(), [0; 4096]);
    while !(seen.len() > 6 && seen[seen.len() - 6..].starts_with(b"Z\0\0\0\x05")) {
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(n) => seen.extend(&bytes[..n]),
            Err(error) => panic!("neither an answer nor an end: {error}"),
        }
    }
    String::from_utf8_lossy(&seen).into_owned()
}

/// Waits until no closed session is left at the server, where `left` sessions stay.
#[track_caller]
fn gone(cluster: &Cluster, left: usize) {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    until("their sessions to end", || (cluster.sql("postgres", sql) == left.to_string()).then_some(()));
}

/// A client that works beside the others.
struct Bystander {
    stream: TcpStream,
    written: usize,
}

impl Bystander {
    #[track_caller]
    fn works(&mut self) {
        self.written += 1;
        let answer = ask(&mut self.stream, &format!("INSERT INTO kept VALUES ({})", self.written));
        assert!(answer.contains("INSERT 0 1"), "{answer:?}");
    }
}

/// Runs `hostile` for each connection type, beside a client that works; it must end no capture.
fn each_way(top: &str, hostile: impl Fn(&Cluster, &Proxy, bool, &mut Bystander)) {
    let (cluster, proxy) = setup_with_tls(top);
    for (tls, captured) in WAYS {
        cluster.sql("postgres", "TRUNCATE kept");
        let mut bystander = Bystander { stream: session(&proxy), written: 0 };
        let armed = captured.then(|| RepeatedCapture::start(&proxy, "postgres"));
        hostile(&cluster, &proxy, tls, &mut bystander);
        bystander.works();
        let Some(armed) = armed else { continue };
        until("what was written to be captured", || (armed.rows() >= bystander.written).then_some(()));
        let seen = armed.finish();
        assert_eq!(seen.over, Vec::<String>::new(), "TLS: {tls}");
    }
}

#[test]
fn behind_the_login_what_is_not_the_protocol_is_answered_and_closed() {
    if !available() {
        return;
    }
    each_way("", |cluster, proxy, tls, bystander| {
        for (message, expected) in [
            (&b"!\0\0\0\x04"[..], "invalid message type '!'"),
            (b"p\0\0\0\x04", "invalid message type 'p'"),
            (b"Q\0\0\0\x03", "invalid length 3 of message 'Q'"),
            (b"Q\xff\xff\xff\xff", "invalid length 4294967295 of message 'Q'"),
            // Longer than any message of their kind.
            (b"!\x3f\xff\xff\xff", "invalid message type '!'"),
            (b"S\x3f\xff\xff\xff", "invalid length 1073741823 of message 'S'"),
            (b"E\0\0\x27\x11", "invalid length 10001 of message 'E'"),
        ] {
            for begin in [&b""[..], b"BEGIN\0", b"BEGIN; SELECT 1 FROM kept\0"] {
                let mut stream = line(proxy, tls);
                if !begin.is_empty() {
                    stream.write_all(&frame(b'Q', begin)).expect("write");
                    assert!(until_ready_or_closed(&mut stream).ends_with('T'));
                }
                stream.write_all(message).expect("write");
                stream.flush().expect("write");
                let answer = read_to_end(&mut stream);
                assert!(answer.contains(expected) && answer.contains("08P01"), "{message:?}: {answer:?}");
                bystander.works();
            }
        }
        gone(cluster, 1);
        // Messages with bodies that are cut off or too long: the result is an error, or the end of the session.
        for message in [
            frame(b'Q', b"SELECT 1"),
            frame(b'Q', b"SELECT 1\0more\0"),
            frame(b'Q', b"INSERT INTO kept VALUES (-1)\0more\0"),
            frame(b'Q', b""),
            frame(b'P', b"name"),
            frame(b'P', b"name\0SELECT 1\0\0\x09"),
            frame(b'P', b"\0INSERT INTO kept VALUES (-1)\0\0\0more"),
            frame(b'B', b"\0\0"),
            frame(b'B', b"\0\0\0\0\0\x01\x7f\xff\xff\xffv"),
            frame(b'D', b""),
            frame(b'D', b"?\0"),
            frame(b'E', b"\0"),
            frame(b'C', b""),
        ] {
            let mut stream = line(proxy, tls);
            let parse = frame(b'P', b"\0INSERT INTO kept VALUES ($1)\0\0\0");
            let before = if message[0] == b'B' { parse } else { Vec::new() };
            let sync = if message[0] == b'Q' { Vec::new() } else { frame(b'S', b"") };
            stream.write_all(&[&before, &message, &sync].map(Vec::as_slice).concat()).expect("write");
            stream.flush().expect("write");
            let answer = until_ready_or_closed(&mut stream);
            assert!(answer.contains("SERROR") || answer.contains("SFATAL"), "{message:?}: {answer:?}");
            assert!(answer.contains("08P01"), "{message:?}: {answer:?}");
            bystander.works();
        }
        gone(cluster, 1);
        assert_eq!(cluster.sql("postgres", "SELECT count(*) FROM kept WHERE n < 0"), "0");
    });
}

#[test]
fn behind_the_login_who_leaves_in_the_middle_leaves_nothing_behind() {
    if !available() {
        return;
    }
    each_way("", |cluster, proxy, tls, bystander| {
        let long = frame(b'Q', &[b"INSERT INTO kept VALUES (-1) -- ".to_vec(), vec![b'v'; 200_000], vec![0]].concat());
        let bind = frame(b'B', b"\0\0\0\0\0\x01\0\0\0\x04tail\0\0");
        let parse = frame(b'P', b"\0INSERT INTO kept VALUES ($1)\0\0\0");
        let begin = frame(b'Q', b"BEGIN; INSERT INTO kept VALUES (-1)\0");
        for (before, message) in [
            (&[][..], &long[..3]),
            (&[], &long[..5]),
            (&[], &long[..20]),
            (&[], &long[..100_000]),
            (&begin[..], &long[..100_000]),
            (&begin, b"C"),
            (&parse, &bind[..9]),
            (&[], &parse),
        ] {
            let mut stream = line(proxy, tls);
            stream.write_all(&[before, message].concat()).expect("write");
            stream.flush().expect("write");
            drop(stream);
            bystander.works();
        }
        gone(cluster, 1);
        assert_eq!(cluster.sql("postgres", "SELECT count(*) FROM kept WHERE n < 0"), "0");
    });
}

#[test]
fn behind_the_login_a_slow_client_is_served_and_holds_up_no_other() {
    if !available() {
        return;
    }
    each_way("", |cluster, proxy, tls, bystander| {
        let mut bytes = frame(b'Q', b"BEGIN\0");
        bytes.extend(frame(b'P', b"\0INSERT INTO kept VALUES (-1)\0\0\0"));
        bytes.extend(frame(b'B', b"\0\0\0\0\0\0\0\0"));
        bytes.extend(frame(b'E', b"\0\0\0\0\0"));
        bytes.extend(frame(b'S', b""));
        bytes.extend(frame(b'Q', b"ROLLBACK\0"));
        let mut stream = line(proxy, tls);
        let mut slowest = Duration::ZERO;
        for byte in bytes {
            stream.write_all(&[byte]).expect("write");
            stream.flush().expect("write");
            let begun = Instant::now();
            bystander.works();
            slowest = slowest.max(begun.elapsed());
        }
        let mut seen = String::new();
        while !seen.contains("ROLLBACK") {
            let more = until_ready_or_closed(&mut stream);
            assert!(!more.is_empty() && !more.contains("ERROR"), "{seen} {more}");
            seen += &more;
        }
        assert!(seen.contains("INSERT 0 1"), "{seen:?}");
        assert!(slowest < Duration::from_secs(10), "{slowest:?}");
        drop(stream);
        gone(cluster, 1);
    });
}

#[test]
fn behind_the_login_a_client_that_does_not_read_holds_up_no_other_and_fills_no_memory() {
    if ran_elsewhere(
        "proxy::hostile_clients::behind_the_login_a_client_that_does_not_read_holds_up_no_other_and_fills_no_memory",
    ) || !available()
    {
        return;
    }
    each_way("", |_, proxy, tls, bystander| {
        let mut greedy: Vec<_> = (0..4).map(|_| line(proxy, tls)).collect();
        bystander.works();
        let before = resident_kib();
        for stream in &mut greedy {
            let sql = b"SELECT repeat('x', 1000000) FROM generate_series(1, 200)\0";
            stream.write_all(&frame(b'Q', sql)).expect("write");
            stream.flush().expect("write");
        }
        for _ in 0..50 {
            bystander.works();
        }
        let grown = resident_kib().saturating_sub(before);
        assert!(grown < 50 << 10, "TLS: {tls}: {grown} KiB for 800 MB that the client does not read");
    });
}

#[test]
fn what_is_not_tls_is_closed() {
    if !available() {
        return;
    }
    let (cluster, proxy) = setup_with_tls("limits = { startup_ms = 3000 }");
    let mut bystander = Bystander { stream: session(&proxy), written: 0 };
    let packet = startup(&[("user", "postgres"), ("database", "postgres")], 196_608);
    // Bytes before the proxy agrees to encrypt do not belong to a session.
    let mut stream = raw(&proxy);
    stream.write_all(&[TLS_WANTED, &packet].concat()).expect("write");
    let answer = read_to_end(&mut stream);
    assert!(answer.starts_with('S') && !answer.contains("server_version"), "{answer:?}");
    bystander.works();
    let hello = b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03";
    for wrong in [&packet[..], b"\x16\x03\x01\xff\xff", b"\x17\x03\x03\0\x04abcd", b"\x15\x03\x01\0\x02\x02\x28"] {
        let mut stream = raw_for_tls(&proxy);
        stream.write_all(wrong).expect("write");
        assert!(!read_to_end(&mut stream).contains("server_version"), "{wrong:?}");
        bystander.works();
    }
    // A handshake without an end, after a request for TLS and without one.
    for (mut stream, begun) in [(raw_for_tls(&proxy), Instant::now()), (raw(&proxy), Instant::now())] {
        for byte in hello {
            if stream.write_all(&[*byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(read_to_end(&mut stream), "");
        assert!(begun.elapsed() < Duration::from_secs(60));
        bystander.works();
    }
    // After the login: unencrypted bytes, a record that is too long, the middle of a record.
    let (unsigned, long) = ([&b"\x17\x03\x03\0\x20"[..], &[7; 32]].concat(), b"\x17\x03\x03\xff\xff");
    for wrong in [&unsigned[..], long, b"Q\0\0\0\x0dSELECT 1\0", b"\x17\x03\x03\x20\0half"] {
        let stream = encrypted(&proxy);
        gone(&cluster, 2);
        (&stream.sock).write_all(wrong).expect("write");
        if wrong.ends_with(b"half") {
            stream.sock.shutdown(std::net::Shutdown::Write).expect("leave");
        }
        read_to_end(&mut &stream.sock);
        bystander.works();
        gone(&cluster, 1);
    }
}
