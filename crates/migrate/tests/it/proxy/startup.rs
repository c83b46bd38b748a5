//! The startup packet is read once: a client is served as the user that the rules and the password were checked for, or
//! not at all.

use crate::proxy::support::{
    Proxy, certificate, error_field, next_message, prepare, psql, raw, runtime, server, startup,
};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use stillpoint_migrate_control::{Reply, Request, Status};
use stillpoint_migrate_wire::{frontend, scram};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};
use tempfile::TempDir;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use zeroize::Zeroizing;

pub(crate) const V3_0: u32 = 196_608;
const V3_2: u32 = V3_0 + 2;
const SSL: &[u8] = b"\0\0\0\x08\x04\xd2\x16\x2f";
const GSSENC: &[u8] = b"\0\0\0\x08\x04\xd2\x16\x30";

/// Result of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A session began.
    Served,
    /// SQLSTATE and text of the error that ended it.
    Refused(String, String),
}

impl Outcome {
    #[track_caller]
    pub(crate) fn is_refused(&self, code: &str, text: &str) {
        let Outcome::Refused(found, message) = self else { panic!("served, and not {code} {text}") };
        assert!(found == code && message.contains(text), "{self:?}, not {code} {text}");
    }
}

/// Sends bytes and waits for the result; gives `password` if it is asked for one.
pub(crate) fn say(stream: &mut (impl Read + Write), bytes: &[u8], password: &str) -> Outcome {
    stream.write_all(bytes).expect("write");
    stream.flush().expect("write");
    answer(stream, password)
}

/// Answers the server's questions with `password`, and waits for the result.
pub(crate) fn answer(stream: &mut (impl Read + Write), password: &str) -> Outcome {
    let secret = scram::Secret::Password(Zeroizing::new(password.as_bytes().to_vec()));
    let mut client = scram::Client::new(&[7; 18]);
    loop {
        let (tag, body) = next_message(stream).expect("an answer");
        let mut reply = Vec::new();
        match (tag, &body[..]) {
            (b'Z', _) => return Outcome::Served,
            (b'E', _) => {
                assert_eq!(error_field(&body, b'V'), "FATAL");
                return Outcome::Refused(error_field(&body, b'C'), error_field(&body, b'M'));
            }
            (b'R', [0, 0, 0, 10, ..]) => {
                frontend::put_sasl_initial(&mut reply, scram::MECHANISM, client.first().as_bytes());
            }
            (b'R', [0, 0, 0, 11, data @ ..]) => {
                let last = client.last(data, &secret).expect("a question of SCRAM");
                frontend::put_sasl(&mut reply, last.as_bytes());
            }
            _ => continue,
        }
        stream.write_all(&reply).expect("write");
    }
}

/// A proxy that knows alice's and bob's passwords, rejects postgres, and is trusted by the server.
fn setup() -> (Cluster, Proxy) {
    let cluster = Cluster::start(&["wal_level=logical"]);
    cluster.sql("postgres", "CREATE DATABASE shop");
    cluster.sql(
        "postgres",
        "CREATE ROLE alice LOGIN PASSWORD 'secret'; CREATE ROLE bob LOGIN REPLICATION PASSWORD 'secret'",
    );
    let verifiers = "SELECT rolname || ' ' || rolpassword FROM pg_authid WHERE rolname IN ('alice', 'bob')";
    let dir = TempDir::with_prefix("stillpoint-proxy-").expect("make a directory");
    certificate(dir.path());
    let file = |name: &str| dir.path().join(name);
    fs::write(file("verifiers"), cluster.sql("postgres", verifiers)).expect("write verifiers");
    let top = format!("tls = {{ certificate = {:?}, key = {:?} }}", file("server.crt"), file("server.key"));
    let rest = format!(
        "{}[tenants.shop]\nserver = \"a\"\nverifiers = {:?}\n[[allow]]\naction = \"reject\"\nusers = [\"postgres\"]\n\
         [[allow]]\nfrom = [\"::ffff:127.0.0.1\"]\n",
        server("a", &cluster),
        file("verifiers")
    );
    let proxy = Proxy::start_in(dir, &top, &rest);
    (cluster, proxy)
}

fn status(proxy: &Proxy) -> Status {
    match proxy.ask(Request::Status) {
        Reply::Status(status) => status,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_client_is_served_as_the_one_who_proved_it_or_not_at_all() {
    if !available() {
        return;
    }
    let (cluster, proxy) = setup();
    let log_in = |parameters: &[(&str, &str)]| say(&mut raw(&proxy), &startup(parameters, V3_0), "secret");
    let (alice, shop) = (("user", "alice"), ("database", "shop"));
    assert_eq!(log_in(&[alice, shop]), Outcome::Served);
    assert_eq!(
        log_in(&[alice, shop, ("TimeZone", "UTC"), ("app.tenant", "7"), ("options", "-c work_mem=1MB")]),
        Outcome::Served
    );
    log_in(&[("user", "postgres"), shop]).is_refused("28000", "no rule of the proxy allows user \"postgres\"");

    // The server takes the last of several.
    log_in(&[alice, ("user", "postgres"), shop]).is_refused("08P01", "\"user\" appears more than once");
    log_in(&[("user", "postgres"), alice, shop]).is_refused("08P01", "\"user\" appears more than once");
    log_in(&[alice, shop, ("database", "postgres")]).is_refused("08P01", "\"database\" appears more than once");
    log_in(&[alice, ("User", "postgres"), shop]).is_refused("08P01", "invalid name of a parameter");
    for name in ["options", "application_name", "role", "session_authorization", "_pq_.x"] {
        let upper = name.to_uppercase();
        for second in [name, upper.as_str()] {
            let outcome = log_in(&[alice, shop, (name, "x"), (second, "y")]);
            let Outcome::Refused(code, _) = &outcome else { panic!("{name} {second}: served") };
            assert_eq!(code, "08P01", "{name} {second}: {outcome:?}");
        }
    }
    // A server cuts names off: it would read another name than this one.
    let long = "x".repeat(64);
    log_in(&[("user", long.as_str()), shop]).is_refused("42622", "longer than 63 bytes");
    log_in(&[alice, ("database", long.as_str())]).is_refused("42622", "longer than 63 bytes");
    log_in(&[shop]).is_refused("28000", "no PostgreSQL user name");

    // All that the server lets a role set by SET, it lets it set here.
    for (name, value) in [
        ("options", "-c role=postgres"),
        ("options", "-c session_authorization=postgres"),
        ("role", "postgres"),
        ("Role", "postgres"),
        ("session_authorization", "postgres"),
    ] {
        log_in(&[alice, shop, (name, value)]).is_refused("42501", "permission denied");
    }
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'postgres' AND datname = 'shop'";
    assert_eq!(cluster.sql("postgres", sessions), "0");
}

/// In the long form 1,312 packets: each parameter twice, the second at every place of lists of every length.
#[test]
fn a_parameter_that_is_there_twice_is_refused_wherever_it_is() {
    const ALL: [(&str, &str); 9] = [
        ("user", "alice"),
        ("database", "shop"),
        ("options", "-c work_mem=1MB"),
        ("application_name", "x"),
        ("client_encoding", "UTF8"),
        ("TimeZone", "UTC"),
        ("replication", "false"),
        ("DateStyle", "ISO"),
        ("app.tenant", "7"),
    ];
    if !available() {
        return;
    }
    let (cluster, proxy) = setup();
    let mut packets = Vec::new();
    for len in 2..=ALL.len() {
        let list = &ALL[..len];
        for (name, value) in list {
            for (value, upper) in [(*value, false), ("postgres", false), (*value, true), ("postgres", true)] {
                let name = if upper { name.to_uppercase() } else { (*name).to_owned() };
                packets.extend((0..=len).map(|at| {
                    let mut list = list.to_vec();
                    list.insert(at, (&name, value));
                    (startup(&list, V3_0), format!("{list:?}"))
                }));
            }
        }
    }
    assert_eq!(packets.len(), 1_312);
    let step = if stillpoint_testing::soak::is_soak() { 1 } else { 41 };
    for (packet, list) in packets.into_iter().step_by(step) {
        match say(&mut raw(&proxy), &packet, "secret") {
            // Of two values, the first may be empty.
            Outcome::Refused(code, _) => assert!(["08P01", "22023"].contains(&code.as_str()), "{code}: {list}"),
            Outcome::Served => panic!("served: {list}"),
        }
    }
    assert_eq!(cluster.sql("postgres", "SELECT count(*) FROM pg_stat_activity WHERE usename = 'alice'"), "0");
}

#[test]
fn a_walsender_is_known_for_one() {
    if !available() {
        return;
    }
    let (cluster, proxy) = setup();
    let (bob, shop) = (("user", "bob"), ("database", "shop"));
    let log_in = |stream: &mut std::net::TcpStream, replication: &[&str]| {
        let mut all = vec![bob, shop];
        all.extend(replication.iter().map(|value| ("replication", *value)));
        say(stream, &startup(&all, V3_0), "secret")
    };
    for twice in [["false", "database"], ["database", "false"], ["false", "true"], ["database", "database"]] {
        log_in(&mut raw(&proxy), &twice).is_refused("08P01", "\"replication\" appears more than once");
    }
    log_in(&mut raw(&proxy), &["maybe"]).is_refused("22023", "invalid value for parameter \"replication\"");
    // It is for the whole server, and not for the database that it names.
    log_in(&mut raw(&proxy), &["T"]).is_refused("3D000", "\"replication\" is not served here");

    let (mut ordinary, mut walsender) = (raw(&proxy), raw(&proxy));
    assert_eq!(log_in(&mut ordinary, &["OF"]), Outcome::Served);
    assert_eq!(log_in(&mut walsender, &["database"]), Outcome::Served);
    until("one of the sessions to be pinned", || {
        let pinned: Vec<bool> = status(&proxy).sessions.iter().map(|session| session.pinned.is_some()).collect();
        (pinned == [false, true]).then_some(())
    });
    let kinds =
        "SELECT string_agg(backend_type, ',' ORDER BY backend_type) FROM pg_stat_activity WHERE usename = 'bob'";
    assert_eq!(cluster.sql("postgres", kinds), "client backend,walsender");
    let mut query = Vec::new();
    frontend::put_query(&mut query, "IDENTIFY_SYSTEM");
    walsender.write_all(&query).expect("write");
    assert_eq!(next_message(&mut walsender).expect("an answer").0, b'T');
}

#[test]
fn what_comes_before_the_startup_packet_comes_once() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup();
    let packet = startup(&[("user", "alice"), ("database", "shop")], V3_0);
    let socket = || std::os::unix::net::UnixStream::connect(&proxy.socket).expect("connect");
    // A socket of this machine has no encryption: each request is declined once.
    for questions in [&[SSL][..], &[GSSENC], &[GSSENC, SSL], &[SSL, GSSENC]] {
        for again in [None, Some(SSL), Some(GSSENC)] {
            let mut stream = socket();
            for question in questions {
                assert_eq!(asked(&mut stream, question), b'N');
            }
            match again {
                Some(again) if questions.contains(&again) => {
                    say(&mut stream, again, "").is_refused("08P01", "sequence of startup packets");
                }
                Some(_) => {}
                // Only `from` addresses are allowed.
                None => say(&mut stream, &packet, "").is_refused("28000", "local socket"),
            }
        }
    }
    // Inside TLS no encryption may be requested.
    for question in [SSL, GSSENC] {
        let mut stream = raw(&proxy);
        assert_eq!(asked(&mut stream, SSL), b'S');
        let mut encrypted = encrypt(&proxy, stream, &[]);
        say(&mut encrypted, question, "").is_refused("08P01", "sequence of startup packets");
    }
    let mut stream = raw(&proxy);
    assert_eq!((asked(&mut stream, GSSENC), asked(&mut stream, SSL)), (b'N', b'S'));
    assert_eq!(say(&mut encrypt(&proxy, stream, &[]), &packet, "secret"), Outcome::Served);
    // Without a request for TLS the client must name the protocol.
    assert_eq!(say(&mut encrypt(&proxy, raw(&proxy), &[b"postgresql"]), &packet, "secret"), Outcome::Served);
    for question in [SSL, GSSENC] {
        let mut direct = encrypt(&proxy, raw(&proxy), &[b"postgresql"]);
        say(&mut direct, question, "").is_refused("08P01", "sequence of startup packets");
    }
    say(&mut encrypt(&proxy, raw(&proxy), &[]), &packet, "secret").is_refused("08P01", "without the ALPN protocol");
    let mut wrong = encrypt(&proxy, raw(&proxy), &[b"http/1.1"]);
    assert!(wrong.write_all(&packet).and_then(|()| wrong.flush()).is_err(), "another protocol is named");
}

/// Returns the answer to a request for encryption.
fn asked(stream: &mut (impl Read + Write), question: &[u8]) -> u8 {
    stream.write_all(question).and_then(|()| stream.flush()).expect("write");
    let mut answer = [0];
    stream.read_exact(&mut answer).expect("an answer");
    answer[0]
}

fn encrypt(
    proxy: &Proxy,
    stream: std::net::TcpStream,
    protocols: &[&[u8]],
) -> StreamOwned<ClientConnection, std::net::TcpStream> {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(proxy.dir.path().join("server.crt")).expect("a certificate");
    roots.add(certificate).expect("a root");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("versions of TLS");
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    let name = "127.0.0.1".try_into().expect("a name");
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).expect("a client"), stream)
}

#[test]
fn newer_clients_get_longer_keys_and_options_that_are_unknown_are_named() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup();
    let begin = |version: u32, option: Option<&str>| {
        let mut stream = raw(&proxy);
        let mut all = vec![("user", "alice"), ("database", "shop")];
        all.extend(option.map(|name| (name, "1")));
        stream.write_all(&startup(&all, version)).expect("write");
        let (tag, body) = next_message(&mut stream).expect("an answer");
        (stream, (tag == b'v').then_some(body))
    };
    for (version, option, minor) in [
        (V3_0, None, None),
        (V3_2, None, None),
        (V3_0 + 1, None, Some(0)),
        (V3_0 + 9_999, None, Some(2)),
        (V3_0, Some("_pq_.new"), Some(0)),
        (V3_2, Some("_pq_.new"), Some(2)),
    ] {
        let (_, negotiated) = begin(version, option);
        let seen = negotiated.as_ref().map(|body| body[3]);
        assert_eq!(seen, minor, "{version:x} {option:?}");
        let named = negotiated.is_some_and(|body| body.ends_with(b"_pq_.new\0"));
        assert_eq!(named, option.is_some(), "{version:x} {option:?}");
    }
    for version in [2 << 16, 4 << 16, 0, (1234 << 16) | 5681] {
        say(&mut raw(&proxy), &startup(&[("user", "alice")], version), "")
            .is_refused("0A000", "unsupported frontend protocol");
    }
    // A key that is incomplete, or another session's, cancels nothing, and gets no answer.
    for key in [&[0, 0, 0, 1, 0, 0, 0, 0][..], &[0, 0, 0, 1], &[0, 0, 0, 1, 7, 7, 7], &[7; 261]] {
        let mut packet = ((key.len() + 8) as u32).to_be_bytes().to_vec();
        packet.extend(b"\x04\xd2\x16\x2e");
        packet.extend(key);
        let mut stream = raw(&proxy);
        stream.write_all(&packet).expect("write");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the end");
        assert!(answer.is_empty() || error_field(&answer[5..], b'C') == "08P01", "{answer:?}");
    }
}

#[test]
fn roles_that_are_not_there_are_asked_like_others() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup();
    let question = |user: &str| {
        let mut stream = raw(&proxy);
        stream.write_all(&startup(&[("user", user), ("database", "shop")], V3_0)).expect("write");
        let (_, mechanisms) = next_message(&mut stream).expect("a question");
        let mut reply = Vec::new();
        frontend::put_sasl_initial(&mut reply, scram::MECHANISM, b"n,,n=,r=abc");
        stream.write_all(&reply).expect("write");
        let (tag, body) = next_message(&mut stream).expect("a question");
        let text = String::from_utf8(body[4..].to_vec()).expect("text");
        let (nonce, salt) = text.split_once(",s=").expect("a salt");
        (mechanisms, tag, nonce.len(), salt.len(), salt.to_owned())
    };
    let shape = |(mechanisms, tag, nonce, len, _): (Vec<u8>, u8, usize, usize, String)| (mechanisms, tag, nonce, len);
    for user in ["absent", "postgres2", "alice2"] {
        assert_eq!(question(user), question(user), "{user}");
        assert_eq!(shape(question(user)), shape(question("alice")), "{user}");
    }
    assert_ne!(question("absent").4, question("absent2").4);
    let log_in = |user: &str| say(&mut raw(&proxy), &startup(&[("user", user), ("database", "shop")], V3_0), "wrong");
    let Outcome::Refused(code, text) = log_in("alice") else { panic!("served") };
    let expected = Outcome::Refused(code, text.replace("alice", "absent"));
    expected.is_refused("28P01", "password authentication failed for user \"absent\"");
    assert_eq!(log_in("absent"), expected);
}

/// A client that has not proved its identity cannot find out which databases exist; one that has gets the error.
#[test]
fn a_database_that_is_not_there_is_asked_for_like_others() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup();
    let first = |database: &str| {
        let mut stream = raw(&proxy);
        stream.write_all(&startup(&[("user", "alice"), ("database", database)], V3_0)).expect("write");
        next_message(&mut stream).expect("a question")
    };
    assert_eq!(first("absent"), first("shop"));
    let log_in = |user: &str, database: &str, password: &str| {
        say(&mut raw(&proxy), &startup(&[("user", user), ("database", database)], V3_0), password)
    };
    for user in ["alice", "absent"] {
        assert_eq!(log_in(user, "absent", "wrong"), log_in(user, "shop", "wrong"), "{user}");
    }
    log_in("alice", "absent", "wrong").is_refused("28P01", "password authentication failed");
    log_in("alice", "absent", "secret").is_refused("3D000", "\"absent\" is not served here");
}

#[test]
fn names_come_back_as_they_were_sent() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup();
    // In the log the name is shown in one line.
    let outcome = say(&mut raw(&proxy), &startup(&[("user", "alice"), ("database", "no\nwhere")], V3_0), "secret");
    outcome.is_refused("3D000", "no\nwhere");
}

#[test]
fn a_configuration_that_lets_no_client_in_or_every_user_read_is_not_good() {
    let dir = TempDir::with_prefix("stillpoint-proxy-").expect("make a directory");
    certificate(dir.path());
    let file = |name: &str| dir.path().join(name);
    fs::write(file("verifiers"), "alice md5x\n").expect("write verifiers");
    for name in ["server.key", "verifiers"] {
        fs::set_permissions(file(name), fs::Permissions::from_mode(0o644)).expect("set permissions");
    }
    let text = format!(
        "listen = [\"127.0.0.1:1\"]\ncontrol = {:?}\nroutes = {:?}\ntls = {{ certificate = {:?}, key = {:?} }}\n\
         [servers.a]\nhost = \"127.0.0.1\"\n[tenants.shop]\nserver = \"a\"\nverifiers = {:?}\n\
         [[allow]]\naction = \"reject\"\n",
        file("control"),
        file("routes.json"),
        file("server.crt"),
        file("server.key"),
        file("verifiers")
    );
    fs::write(file("proxy.toml"), text).expect("write the configuration");
    let (_, warnings) = stillpoint_migrate_proxy::check(&file("proxy.toml")).expect("it can be used");
    for expected in
        ["no client may connect", "server.key has mode 0644", "verifiers has mode 0644", "line 1 is not a role"]
    {
        assert!(warnings.iter().any(|warning| warning.contains(expected)), "{expected}: {warnings:?}");
    }
    assert!(!file("routes.secret").exists(), "nothing is written by a check");
}

#[test]
fn a_counterpart_is_of_the_same_role_and_database() {
    if !available() {
        return;
    }
    let (cluster, proxy) = setup();
    let mut stream = raw(&proxy);
    let packet = startup(&[("TimeZone", "Asia/Tokyo"), ("user", "alice"), ("database", "shop")], V3_0);
    assert_eq!(say(&mut stream, &packet, "secret"), Outcome::Served);
    runtime().block_on(async {
        let mut control = proxy.control().await;
        prepare(&mut control, "shop", "a").await;
    });
    let seen = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'alice' AND datname = 'shop'";
    assert_eq!(cluster.sql("postgres", seen), "2");
    let conninfo = format!("host=127.0.0.1 port={} user=alice dbname=shop", proxy.port);
    assert_eq!(psql(&conninfo, "secret", "SELECT session_user").as_deref(), Ok("alice"));
}
