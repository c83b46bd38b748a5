//! Process ids of clients: the cancel key, SQL functions and notifications agree, and go on to agree as far as they can
//! after a switch.

use crate::proxy::support::repeated_capture::RepeatedCapture;
use crate::proxy::support::{Proxy, error_field, next_message, raw, server, startup};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use stillpoint_migrate_wire::frontend::{CancelKey, put_query};
use stillpoint_migrate_wire::{backend, startup::put_cancel};
use stillpoint_testing::child::ChildGuard;
use stillpoint_testing::postgresql::{Cluster, available};
use stillpoint_testing::{skipped, wait::until};

const V3_0: u32 = 3 << 16;
const V3_2: u32 = V3_0 + 2;
/// Ids from here on are no process's.
const SUBSTITUTES: u32 = 1 << 30;

/// A client that speaks the protocol itself.
struct Client {
    stream: TcpStream,
    key: CancelKey,
    /// Sender and payload of each notification.
    notified: Vec<(u32, String)>,
}

/// Answer to a statement.
#[derive(Debug, PartialEq)]
enum Answer {
    /// First value of the last row.
    Value(String),
    /// Code of the error.
    Error(String),
}

impl Client {
    fn log_in(proxy: &Proxy, database: &str, version: u32) -> Client {
        let mut stream = raw(proxy);
        stream.write_all(&startup(&[("user", "postgres"), ("database", database)], version)).expect("write");
        let mut key = None;
        loop {
            match next_message(&mut stream).expect("a greeting") {
                (b'K', body) => key = Some(backend::key_data(&body).expect("a key")),
                (b'Z', _) => break,
                (b'E', body) => panic!("{}", error_field(&body, b'M')),
                _ => {}
            }
        }
        Client { stream, key: key.expect("a key in the greeting"), notified: Vec::new() }
    }

    fn send(&mut self, sql: &str) {
        let mut message = Vec::new();
        put_query(&mut message, sql);
        self.stream.write_all(&message).expect("write");
    }

    fn answer(&mut self) -> Answer {
        let mut answer = Answer::Value(String::new());
        loop {
            match next_message(&mut self.stream).expect("an answer") {
                (b'A', body) => self.note(&body),
                (b'D', body) => {
                    let row = backend::row(&body).expect("a row");
                    answer = Answer::Value(String::from_utf8_lossy(row[0].unwrap_or_default()).into_owned());
                }
                (b'E', body) => answer = Answer::Error(error_field(&body, b'C')),
                (b'Z', _) => return answer,
                _ => {}
            }
        }
    }

    fn ask(&mut self, sql: &str) -> String {
        self.send(sql);
        match self.answer() {
            Answer::Value(value) => value,
            Answer::Error(code) => panic!("{sql}: {code}"),
        }
    }

    fn note(&mut self, body: &[u8]) {
        let (sender, text) = body.split_first_chunk().expect("an id");
        let payload = text.split(|byte| *byte == 0).nth(1).expect("a payload");
        self.notified.push((u32::from_be_bytes(*sender), String::from_utf8_lossy(payload).into_owned()));
    }

    fn notification(&mut self) -> (u32, String) {
        while self.notified.is_empty() {
            match next_message(&mut self.stream).expect("a notification") {
                (b'A', body) => self.note(&body),
                (b'S' | b'N', _) => {}
                other => panic!("{other:?}"),
            }
        }
        self.notified.remove(0)
    }

    fn backend_pid(&mut self) -> u32 {
        self.ask("SELECT pg_backend_pid()").parse().expect("a number")
    }
}

/// Sends a request to cancel, and waits until the proxy has served it.
fn cancel(proxy: &Proxy, key: &CancelKey) {
    let (mut stream, mut packet) = (raw(proxy), Vec::new());
    put_cancel(&mut packet, key);
    stream.write_all(&packet).expect("write");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("the end");
    assert_eq!(answer, b"", "no client learns if a key is right");
}

/// Lets `sleeper` wait for a lock. None of the `wrong` keys ends that; the last key does.
fn only_its_key_cancels(proxy: &Proxy, holder: &mut Client, sleeper: &mut Client, wrong: &[CancelKey]) {
    let waiting = format!(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = {}",
        sleeper.backend_pid()
    );
    for ends_by_cancel in [false, true] {
        holder.ask("SELECT pg_advisory_lock(33)");
        sleeper.send("SELECT 'got' FROM pg_advisory_xact_lock(33)");
        until("the statement to wait", || (holder.ask(&waiting) == "1").then_some(()));
        for key in wrong {
            cancel(proxy, key);
        }
        if ends_by_cancel {
            cancel(proxy, &sleeper.key);
            assert_eq!(sleeper.answer(), Answer::Error("57014".into()));
        }
        holder.ask("SELECT pg_advisory_unlock(33)");
        if !ends_by_cancel {
            assert_eq!(sleeper.answer(), Answer::Value("got".into()), "a wrong key has ended the statement");
        }
    }
}

/// Keys that are not the client's: guessed secrets of its id, and its secret with other ids.
fn wrong_keys(own: &CancelKey, others: &[&CancelKey]) -> Vec<CancelKey> {
    let mut last_differs = own.secret.clone();
    *last_differs.last_mut().expect("a secret") ^= 1;
    let secrets =
        [vec![0; own.secret.len()], last_differs, own.secret[..own.secret.len().min(31)].to_vec(), vec![9; 256]];
    let mut keys: Vec<_> = secrets
        .into_iter()
        .filter(|secret| *secret != own.secret)
        .map(|secret| CancelKey { pid: own.pid, secret })
        .collect();
    for other in others {
        keys.push(CancelKey { pid: own.pid, secret: other.secret.clone() });
        keys.push(CancelKey { pid: other.pid, secret: own.secret.clone() });
    }
    keys.extend([0, 1, 2, 3, u32::MAX].map(|pid| CancelKey { pid, secret: own.secret.clone() }));
    keys
}

#[test]
fn a_client_has_its_server_s_process_id_in_every_place() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let proxy = Proxy::start("", &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    let mut holder = Client::log_in(&proxy, "postgres", V3_0);
    for (version, secret_len) in [(V3_0, 4), (V3_2, 32)] {
        let mut client = Client::log_in(&proxy, "postgres", version);
        assert_eq!((client.key.pid, client.key.secret.len()), (client.backend_pid(), secret_len));
        client.ask("LISTEN c");
        client.ask("NOTIFY c, 'own'");
        holder.ask("NOTIFY c, 'other'");
        assert_eq!(client.notification(), (client.key.pid, "own".into()));
        assert_eq!(client.notification(), (holder.key.pid, "other".into()));
        let wrong = wrong_keys(&client.key, &[&holder.key]);
        only_its_key_cancels(&proxy, &mut holder, &mut client, &wrong);
        // A client may end its own server process by the id that it has, as directly.
        let sql = format!("SELECT pg_terminate_backend({}, 60000)", client.key.pid);
        assert_eq!(holder.ask(&sql), "t");
        assert!(matches!(next_message(&mut client.stream), Ok((b'E', _))), "57P01 is passed on");
        // The key ends with the session.
        until("the session to leave", || {
            (holder.ask("SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres'") == "1").then_some(())
        });
        cancel(&proxy, &client.key);
    }
}

#[test]
fn ids_and_keys_of_clients_stay_the_same_after_a_switch_and_back() {
    if !available() {
        return;
    }
    let (a, b) = (Cluster::start(&[]), Cluster::start(&[]));
    let tables = format!("{}{}[tenants.postgres]\nserver = \"a\"\n", server("a", &a), server("b", &b));
    let proxy = Proxy::start("", &tables);
    let [mut one, mut two] = [V3_0, V3_2].map(|version| Client::log_in(&proxy, "postgres", version));
    let sources = [one.backend_pid(), two.backend_pid()];
    for client in [&mut one, &mut two] {
        client.ask("LISTEN c");
    }
    // The last notifications of the source are the source's.
    one.ask("NOTIFY c, 'before'");
    for to in ["b", "a", "b"] {
        proxy.move_tenant("postgres", to);
        assert_eq!([one.key.pid, two.key.pid], sources);
        // SQL functions show the new server's ids.
        let there = [one.backend_pid(), two.backend_pid()];
        assert!(there.iter().all(|pid| !sources.contains(pid)), "{there:?} {sources:?}");
        let mut newcomer = Client::log_in(&proxy, "postgres", V3_0);
        let there_too = newcomer.backend_pid();
        assert_eq!(newcomer.key.pid, there_too);
        one.ask("NOTIFY c, 'one'");
        two.ask("NOTIFY c, 'two'");
        newcomer.ask("NOTIFY c, 'newcomer'");
        let senders = [(one.key.pid, "one"), (two.key.pid, "two"), (newcomer.key.pid, "newcomer")];
        for client in [&mut one, &mut two] {
            if to == "b" && client.notified.first().is_some_and(|(_, payload)| payload == "before") {
                assert_eq!(client.notification(), (sources[0], "before".into()));
            }
            let seen = senders.map(|_| client.notification());
            assert_eq!(seen, senders.map(|(pid, payload)| (pid, payload.to_owned())), "at {to}");
        }
        let mut wrong = wrong_keys(&two.key, &[&one.key, &newcomer.key]);
        wrong.push(CancelKey { pid: there[1], secret: two.key.secret.clone() });
        only_its_key_cancels(&proxy, &mut newcomer, &mut two, &wrong);
    }
    // A captured session gets its messages one by one.
    let armed = RepeatedCapture::start(&proxy, "postgres");
    for turn in 0..20 {
        one.ask(&format!("NOTIFY c, '{turn}'"));
        for client in [&mut one, &mut two] {
            assert_eq!(client.notification(), (sources[0], turn.to_string()));
        }
    }
    armed.finish();
}

/// A server in a namespace of process ids of its own, as in a container: its ids are small, and another server's are
/// the same.
fn in_own_namespace(cluster: &mut Cluster) -> ChildGuard {
    cluster.stop();
    let mut postgres = cluster.client("postgres");
    postgres
        .arg("-D")
        .arg(cluster.data_dir())
        .args(["-p", &cluster.port().to_string(), "-k"])
        .arg(cluster.socket_dir());
    postgres.args(["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "autovacuum=off"]);
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--"]).arg(postgres.get_program()).args(postgres.get_args());
    command.stdout(Stdio::null()).stderr(Stdio::null()).current_dir(cluster.socket_dir());
    let child = ChildGuard::from_child(command.spawn().expect("run unshare"));
    until("the server in its namespace to answer", || cluster.try_sql("postgres", "SELECT 1").ok());
    child
}

#[test]
fn sessions_whose_servers_use_the_same_ids_are_told_apart() {
    if !available() {
        return;
    }
    let may = Command::new("unshare").args(["--pid", "--fork", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        return skipped("there is no right to make a namespace of process ids");
    }
    let (mut a, mut b) = (Cluster::start(&[]), Cluster::start(&[]));
    for cluster in [&a, &b] {
        cluster.sql("postgres", "CREATE DATABASE other");
    }
    let _servers = [in_own_namespace(&mut a), in_own_namespace(&mut b)];
    let tables = format!(
        "{}{}[tenants.postgres]\nserver = \"a\"\n[tenants.other]\nserver = \"b\"\n",
        server("a", &a),
        server("b", &b)
    );
    let proxy = Proxy::start("", &tables);
    // Two tenants at two servers: both clients have their server's own id, and their secrets lead to the right server.
    let mut of_a: BTreeMap<u32, Client> = BTreeMap::new();
    let mut last_of_b = 0;
    let (mut same, mut holder) = until("two servers to use the same id", || {
        // The one that is behind catches up, and what the other has passed is let go: a server takes a hundred clients.
        if of_a.last_key_value().is_none_or(|(last_of_a, _)| *last_of_a <= last_of_b) {
            let client = Client::log_in(&proxy, "postgres", V3_0);
            of_a.insert(client.key.pid, client);
            return None;
        }
        let client = Client::log_in(&proxy, "other", V3_0);
        last_of_b = client.key.pid;
        of_a.retain(|id, _| *id >= last_of_b);
        let found = of_a.contains_key(&client.key.pid).then_some(client);
        found.map(|client| (client, Client::log_in(&proxy, "other", V3_0)))
    });
    let mut twin = of_a.remove(&same.key.pid).expect("the same id");
    assert_eq!((same.backend_pid(), twin.backend_pid()), (same.key.pid, twin.key.pid));
    twin.ask("SELECT pg_advisory_lock(44)");
    let mut blocked = Client::log_in(&proxy, "postgres", V3_0);
    blocked.send("SELECT 'got' FROM pg_advisory_xact_lock(44)");
    only_its_key_cancels(&proxy, &mut holder, &mut same, &[twin.key.clone()]);
    twin.ask("SELECT pg_advisory_unlock(44)");
    assert_eq!(blocked.answer(), Answer::Value("got".into()));
    // One tenant moves: new clients get no id that a moved client has.
    twin.ask("LISTEN c");
    let mut moved = vec![blocked];
    // Ids that the target will use soon.
    while moved.last().is_some_and(|client| client.key.pid < holder.key.pid + 40) {
        moved.push(Client::log_in(&proxy, "postgres", V3_0));
        let few = moved.len().saturating_sub(12);
        moved.drain(..few);
    }
    drop(of_a);
    proxy.move_tenant("postgres", "b");
    let mut newcomers: Vec<Client> = Vec::new();
    until("the target to use the id of a moved client", || {
        newcomers.push(Client::log_in(&proxy, "postgres", V3_2));
        newcomers.last().filter(|client| client.key.pid >= SUBSTITUTES).map(|_| ())
    });
    let ids: BTreeSet<u32> =
        moved.iter().chain(&newcomers).map(|client| client.key.pid).chain([twin.key.pid]).collect();
    assert_eq!(ids.len(), moved.len() + newcomers.len() + 1, "each client has an id of its own");
    for client in moved.iter_mut().chain(&mut newcomers) {
        client.ask("NOTIFY c");
        assert_eq!(twin.notification().0, client.key.pid);
    }
    let (mut last, mut holder) = (newcomers.pop().expect("a newcomer"), moved.pop().expect("a moved client"));
    let others: Vec<_> = moved.iter().map(|client| &client.key).collect();
    let wrong = wrong_keys(&last.key, &others);
    only_its_key_cancels(&proxy, &mut holder, &mut last, &wrong);
}
