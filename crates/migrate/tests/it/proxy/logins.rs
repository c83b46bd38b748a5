//! Clients that name their user and never prove it do not block clients of another address, and those of their own
//! address only for a short time.

use crate::proxy::startup::{Outcome, V3_0, answer, say};
use crate::proxy::support::{
    Proxy, error_field, next_message, preparing, psql, raw, raw_from, runtime, server, startup,
};
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};
use stillpoint_migrate_control::{Reply, Request};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};

/// More connections than a server has.
const CROWD: usize = 140;

/// A server with two databases that asks alice for her password by SCRAM.
fn asking() -> Cluster {
    let cluster = Cluster::start(&["max_connections=100"]);
    cluster.sql("postgres", "CREATE DATABASE shop");
    cluster.sql("postgres", "CREATE DATABASE blog");
    cluster.sql("postgres", "CREATE ROLE alice LOGIN PASSWORD 'secret'");
    let hba = "local all all trust\nhost all alice all scram-sha-256\nhost all all all trust\n";
    std::fs::write(cluster.data_dir().join("pg_hba.conf"), hba).expect("write pg_hba.conf");
    cluster.sql("postgres", "SELECT pg_reload_conf()");
    cluster
}

/// Alice's password, as the server stores it.
fn stored(cluster: &Cluster) -> String {
    cluster.sql("postgres", "SELECT rolpassword FROM pg_authid WHERE rolname = 'alice'")
}

/// Such a server behind a proxy.
fn setup(top: &str, verifiers: bool) -> (Cluster, Proxy) {
    let cluster = asking();
    let stored = format!("alice {}", stored(&cluster));
    let file = cluster.socket_dir().join("verifiers");
    std::fs::write(&file, stored).expect("write verifiers");
    let verifiers = if verifiers { format!("verifiers = {file:?}\n") } else { String::new() };
    let tables = format!(
        "{}[tenants.shop]\nserver = \"a\"\n{verifiers}[tenants.blog]\nserver = \"a\"\n{verifiers}",
        server("a", &cluster)
    );
    let proxy = Proxy::start(top, &tables);
    (cluster, proxy)
}

/// Connections from one address, whose clients answer nothing.
fn crowd(proxy: &Proxy, address: Ipv4Addr, size: usize) -> Vec<TcpStream> {
    let packet = startup(&[("user", "alice"), ("database", "shop")], V3_0);
    let begin = |_| {
        let mut stream = raw_from(proxy, address);
        stream.write_all(&packet).expect("write");
        stream
    };
    (0..size).map(begin).collect()
}

#[test]
fn silent_logins_of_one_address_keep_none_at_another() {
    if !available() {
        return;
    }
    for verifiers in [true, false] {
        let (cluster, proxy) = setup("", verifiers);
        let silent = crowd(&proxy, Ipv4Addr::new(127, 0, 0, 2), CROWD);
        until("some of them to be asked", || {
            let mut first = [0];
            (silent[0].peek(&mut first).ok()? == 1).then_some(())
        });
        // From another address, to that database and another one.
        for database in ["shop", "blog"] {
            let begun = Instant::now();
            let conninfo = format!("host=127.0.0.1 port={} user=alice dbname={database}", proxy.port);
            assert_eq!(psql(&conninfo, "secret", "SELECT 'in'").as_deref(), Ok("in"), "{database}");
            assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        }
        let there = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
        let count: usize = cluster.sql("postgres", there).parse().expect("a number");
        assert!(count < 30, "{count} connections of the server");
        drop(silent);
    }
}

#[test]
fn who_does_not_answer_makes_way_for_others_of_its_address() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup("limits = { logins_per_address = 2, startup_ms = 60000 }", true);
    let mut silent = crowd(&proxy, Ipv4Addr::LOCALHOST, 2);
    for stream in &mut silent {
        assert_eq!(next_message(stream).expect("a question").0, b'R');
    }
    // Silent logins keep their places while there is room.
    let begun = Instant::now();
    let conninfo = format!("host=127.0.0.1 port={} user=alice dbname=shop", proxy.port);
    assert_eq!(psql(&conninfo, "secret", "SELECT 'in'").as_deref(), Ok("in"));
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    // Either of the two may have been asked first.
    silent.iter().for_each(|one| one.set_read_timeout(Some(Duration::from_millis(50))).expect("set a limit"));
    let told = |one: &TcpStream| one.peek(&mut [0]).is_ok();
    let place = until("one of them to be told", || silent.iter().position(told));
    let (tag, body) = next_message(&mut silent[place]).expect("an error");
    assert_eq!((tag, error_field(&body, b'C').as_str()), (b'E', "53300"));
    // The other one goes on, and may still answer.
    assert!(next_message(&mut silent[1 - place]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
}

#[test]
fn many_clients_of_one_address_get_in_at_the_same_time() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup("limits = { logins_per_address = 2 }", true);
    let conninfo = format!("host=127.0.0.1 port={} user=alice dbname=shop", proxy.port);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..24).map(|_| scope.spawn(|| psql(&conninfo, "secret", "SELECT 'in'"))).collect();
        for client in clients {
            assert_eq!(client.join().expect("psql ends").as_deref(), Ok("in"));
        }
    });
}

/// The server asks, and not the proxy: a client that owes an answer is no session yet.
#[test]
fn a_silent_login_holds_up_no_switch_over() {
    if !available() {
        return;
    }
    let (a, b) = (asking(), asking());
    let verifier = stored(&a);
    b.sql("postgres", &format!("ALTER ROLE alice PASSWORD '{verifier}'"));
    for (cluster, name) in [(&a, "a"), (&b, "b")] {
        cluster.sql(
            "shop",
            &format!("CREATE TABLE whoami AS SELECT '{name}'::text AS name; GRANT SELECT ON whoami TO alice"),
        );
    }
    let tables = format!("{}{}[tenants.shop]\nserver = \"a\"\n", server("a", &a), server("b", &b));
    let proxy = Proxy::start("limits = { startup_ms = 60000 }", &tables);
    let packet = startup(&[("user", "alice"), ("database", "shop")], V3_0);
    let asked = || {
        let mut stream = raw(&proxy);
        stream.write_all(&packet).expect("write");
        until("the question", || {
            let mut first = [0];
            (stream.peek(&mut first).ok()? == 1).then_some(())
        });
        stream
    };
    let (mut silent, mut slow) = (asked(), asked());
    let mut served = raw(&proxy);
    assert_eq!(say(&mut served, &packet, "secret"), Outcome::Served);
    let runtime = runtime();
    let mut control = runtime.block_on(proxy.control());
    let mut ask = |request: &Request| runtime.block_on(control.ask(request)).expect("an answer");
    until("the session to be ready", || match ask(&preparing("shop", "b", &[("alice", &verifier)])) {
        Reply::Prepared { sessions: 1, waiting, pinned, failed } => {
            assert!(waiting.is_empty() && pinned.is_empty() && failed.is_empty(), "{waiting:?} {pinned:?} {failed:?}");
            Some(())
        }
        _ => None,
    });
    let paused = ask(&Request::Pause { tenant: "shop".into(), limit_ms: 30_000 });
    assert!(matches!(paused, Reply::Drained { .. }), "{paused:?}");
    // One client answers in the pause, and is served at the target.
    let answering = std::thread::spawn(move || (answer(&mut slow, "secret"), slow));
    let finished = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'alice'";
    until("its login to be over", || (a.sql("postgres", finished) == "2").then_some(()));
    let switched = ask(&Request::Switch { tenant: "shop".into() });
    assert!(matches!(&switched, Reply::Switched { sessions: 1, failed } if failed.is_empty()), "{switched:?}");
    let (outcome, mut slow) = answering.join().expect("its client");
    assert_eq!(outcome, Outcome::Served);
    for stream in [&mut served, &mut slow] {
        let said = crate::proxy::support::ask(stream, "SELECT 'at ' || name FROM whoami");
        assert!(said.contains("at b"), "{said:?}");
    }
    // The other client proves its identity too late for the new server to know it.
    answer(&mut silent, "secret").is_refused("57P03", "moved to another server");
    let conninfo = format!("host=127.0.0.1 port={} user=alice dbname=shop", proxy.port);
    assert_eq!(psql(&conninfo, "secret", "SELECT name FROM whoami").as_deref(), Ok("b"));
}

/// The server asks: a database that the proxy does not serve is asked for as others are.
#[test]
fn a_server_that_asks_tells_no_stranger_which_databases_are_served() {
    if !available() {
        return;
    }
    let (_cluster, proxy) = setup("", false);
    let log_in = |database: &str, password: &str| {
        say(&mut raw(&proxy), &startup(&[("user", "alice"), ("database", database)], V3_0), password)
    };
    assert_eq!(log_in("absent", "wrong"), log_in("shop", "wrong"));
    log_in("absent", "wrong").is_refused("28P01", "password authentication failed");
    log_in("absent", "secret").is_refused("3D000", "\"absent\" is not served here");
}
