//! Idle sessions share server connections, and no client sees it.

use crate::proxy::support::follower::Follower;
use crate::proxy::support::{self, Proxy, prepare, server, switch};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use stillpoint_migrate_control::{PoolStatus, Reply, Request, SessionStatus};
use stillpoint_testing::postgresql::{Cluster, available};
use stillpoint_testing::wait::until;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

fn proxy(cluster: &Cluster, pool: &str) -> Proxy {
    let tables = format!("{}[tenants.postgres]\nserver = \"a\"\npool = {{ {pool} }}\n", server("a", cluster));
    Proxy::start("", &tables)
}

async fn connect(proxy: &Proxy) -> Client {
    let (client, connection) = tokio_postgres::connect(&proxy.conninfo("postgres"), NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// First value of a statement's answer, by the simple protocol.
async fn ask(client: &Client, sql: &str) -> String {
    let answers = client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    let row = answers.into_iter().find_map(|answer| match answer {
        SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or("NULL").to_owned()),
        _ => None,
    });
    row.unwrap_or_default()
}

fn status(proxy: &Proxy) -> (PoolStatus, Vec<SessionStatus>) {
    let Reply::Status(status) = proxy.ask(Request::Status) else { panic!("no status") };
    (status.tenants[0].pool.expect("a pool"), status.sessions)
}

/// The same from a task.
async fn pool_of(proxy: &Proxy) -> (PoolStatus, Vec<SessionStatus>) {
    let Reply::Status(status) = proxy.control().await.ask(&Request::Status).await.expect("an answer") else {
        panic!("no status")
    };
    (status.tenants[0].pool.expect("a pool"), status.sessions)
}

/// Waits until no session has a connection that it could share.
async fn all_shared(proxy: &Proxy) {
    for _ in 0..3000 {
        let (_, sessions) = pool_of(proxy).await;
        if sessions.iter().all(|session| session.backend.is_none() || session.kept.is_some()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("sessions do not give their connections back: {:?}", pool_of(proxy).await);
}

/// Waits until so many sessions keep their connections.
async fn await_kept(proxy: &Proxy, kept: usize, after: &str) {
    for _ in 0..3000 {
        if pool_of(proxy).await.0.kept == kept {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{after}: {:?}", pool_of(proxy).await);
}

/// Number of the clients' server processes.
fn processes(cluster: &Cluster) -> usize {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    cluster.sql("postgres", sql).parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_sessions_share_few_connections_and_each_gets_its_own_answers() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE TABLE t (a int, b int)");
    let proxy = proxy(&cluster, "servers = 3");
    let mut clients = Vec::new();
    for number in 0..16 {
        clients.push((number, connect(&proxy).await));
    }
    all_shared(&proxy).await;
    until("surplus connections to be closed", || (processes(&cluster) <= 3).then_some(()));
    let mut tasks = tokio::task::JoinSet::new();
    for (number, client) in clients {
        tasks.spawn(async move {
            for turn in 0..20 {
                client.batch_execute("BEGIN").await.expect("begin");
                let sql = format!("INSERT INTO t VALUES ({number}, {turn}) RETURNING a * 1000 + b");
                assert_eq!(ask(&client, &sql).await, (number * 1000 + turn).to_string());
                client.batch_execute("COMMIT").await.expect("commit");
                let row = client.query_one("SELECT $1::int + $2", &[&number, &turn]).await.expect("a row");
                assert_eq!(row.get::<_, i32>(0), number + turn);
            }
            client
        });
    }
    let mut kept = Vec::new();
    while let Some(client) = tasks.join_next().await {
        kept.push(client.expect("a client"));
    }
    assert_eq!(cluster.sql("postgres", "SELECT count(*) FROM t"), "320");
    all_shared(&proxy).await;
    let (pool, sessions) = pool_of(&proxy).await;
    assert!(pool.open <= 3 && pool.kept == 0 && sessions.len() == 16, "{pool:?}");
    assert!(processes(&cluster) <= 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_and_prepared_statements_stay_with_their_sessions() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE ROLE reader; ALTER ROLE reader SET work_mem = '9MB'");
    let proxy = proxy(&cluster, "servers = 1");
    let (a, b, plain) = (connect(&proxy).await, connect(&proxy).await, connect(&proxy).await);
    a.batch_execute("SET work_mem = '7MB'; SET TimeZone = 'Asia/Tokyo'; SET app.tenant = '1'").await.unwrap();
    b.batch_execute("SET work_mem = '8MB'; SELECT set_config('app.tenant', '2', false); SET ROLE reader")
        .await
        .unwrap();
    a.batch_execute("PREPARE s AS SELECT 'a'::text").await.unwrap();
    b.batch_execute("PREPARE s AS SELECT 'b'::text").await.unwrap();
    let (of_a, of_b) = (a.prepare("SELECT $1::int + 1").await.unwrap(), b.prepare("SELECT $1::int + 2").await.unwrap());
    for turn in 0..5_i32 {
        assert_eq!(ask(&a, "SHOW work_mem").await, "7MB");
        assert_eq!(ask(&plain, "SHOW work_mem").await, "4MB");
        assert_eq!(ask(&b, "SHOW work_mem").await, "8MB");
        assert_eq!(ask(&a, "SELECT current_setting('app.tenant') || current_user").await, "1postgres");
        assert_eq!(ask(&plain, "SELECT current_setting('app.tenant', true)").await, "NULL");
        assert_eq!(ask(&b, "SELECT current_setting('app.tenant') || current_user").await, "2reader");
        assert_eq!(a.query_one(&of_a, &[&turn]).await.unwrap().get::<_, i32>(0), turn + 1);
        assert_eq!(b.query_one(&of_b, &[&turn]).await.unwrap().get::<_, i32>(0), turn + 2);
        assert_eq!(ask(&a, "EXECUTE s").await, "a");
        assert_eq!(ask(&b, "EXECUTE s").await, "b");
        assert!(plain.simple_query("EXECUTE s").await.is_err());
    }
    // What is gone is gone.
    b.batch_execute("DISCARD ALL").await.unwrap();
    assert_eq!(ask(&b, "SELECT current_setting('work_mem') || current_user").await, "4MBpostgres");
    let (pool, _) = pool_of(&proxy).await;
    assert!(pool.open <= 1 && pool.kept == 0, "{pool:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_made_again_keeps_its_connection_until_it_is_gone() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql(
        "postgres",
        "CREATE FUNCTION makes_temp() RETURNS void LANGUAGE plpgsql AS $$ BEGIN CREATE TEMP TABLE hidden (a int); END $$; \
         CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE SEQUENCE s",
    );
    let proxy = proxy(&cluster, "servers = 1, wait_ms = 60000");
    let other = connect(&proxy).await;
    for (make, why, end) in [
        ("CREATE TEMP TABLE t (a int)", "temporary relation t", "DROP TABLE t"),
        ("SELECT makes_temp()", "temporary relation hidden", "DISCARD TEMP"),
        ("BEGIN; DECLARE c CURSOR WITH HOLD FOR SELECT 1; COMMIT", "cursor WITH HOLD c", "CLOSE c"),
        ("LISTEN x", "LISTEN x", "UNLISTEN *"),
        ("SELECT pg_advisory_lock(1)", "1 advisory locks", "SELECT pg_advisory_unlock(1)"),
        ("PREPARE p (mood) AS SELECT $1", "prepared statement p with a type", "DEALLOCATE p"),
        (
            "CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "temporary function f",
            "DROP FUNCTION pg_temp.f()",
        ),
    ] {
        let client = connect(&proxy).await;
        client.batch_execute(make).await.unwrap_or_else(|error| panic!("{make}: {error:?}"));
        all_shared(&proxy).await;
        let kept: Vec<String> = pool_of(&proxy).await.1.into_iter().filter_map(|session| session.kept).collect();
        assert!(kept.len() == 1 && kept[0].starts_with(why), "{make}: {kept:?}");
        let own = ask(&client, "SELECT pg_backend_pid()").await;
        assert_ne!(ask(&other, "SELECT pg_backend_pid()").await, own);
        assert_eq!(ask(&client, "SELECT pg_backend_pid()").await, own, "{make}");
        client.batch_execute(end).await.unwrap_or_else(|error| panic!("{end}: {error:?}"));
        await_kept(&proxy, 0, end).await;
    }
    for make in ["SELECT setseed(0.5)", "SELECT set_config($$app.x$$, '1', false)", "LOAD 'plpgsql'"] {
        let client = connect(&proxy).await;
        client.batch_execute(make).await.unwrap_or_else(|error| panic!("{make}: {error:?}"));
        await_kept(&proxy, 1, make).await;
        drop(client);
        await_kept(&proxy, 0, "the client's end").await;
    }
    // A sequence's values are the session's own, or an error.
    let client = connect(&proxy).await;
    assert_eq!(ask(&client, "SELECT nextval('s')").await, "1");
    assert_eq!(ask(&other, "SELECT nextval('s')").await, "2");
    let lost = client.simple_query("SELECT currval('s')").await.unwrap_err();
    assert_eq!(lost.code().map(|code| code.code()), Some("55000"), "{lost:?}");
    assert_eq!(ask(&client, "SELECT nextval('s')").await, "3");
    assert_eq!(ask(&other, "SELECT nextval('s')").await, "4");
    assert_eq!(ask(&client, "SELECT currval('s')").await, "3", "sessions that write keep theirs now");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trigger_that_changes_its_session_changes_no_other_one() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE TABLE t (a int)");
    let proxy = proxy(&cluster, "servers = 1");
    let (a, b) = (connect(&proxy).await, connect(&proxy).await);
    a.batch_execute("INSERT INTO t VALUES (0)").await.unwrap();
    all_shared(&proxy).await;
    // Made through the proxy while sessions run.
    b.batch_execute(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS \
         $$ BEGIN PERFORM set_config('app.last', NEW.a::text, false); RETURN NEW; END $$; \
         CREATE TRIGGER note BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION note()",
    )
    .await
    .unwrap();
    for turn in 1..4 {
        a.batch_execute(&format!("INSERT INTO t VALUES ({turn})")).await.unwrap();
        b.batch_execute(&format!("INSERT INTO t VALUES (10{turn})")).await.unwrap();
        assert_eq!(ask(&a, "SELECT current_setting('app.last', true)").await, turn.to_string());
        assert_eq!(ask(&b, "SELECT current_setting('app.last', true)").await, format!("10{turn}"));
    }
    let c = connect(&proxy).await;
    assert_eq!(ask(&c, "SELECT current_setting('app.last', true)").await, "NULL");
}

/// Bytes of a message.
fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag];
    bytes.extend((body.len() as u32 + 4).to_be_bytes());
    bytes.extend(body);
    bytes
}

#[test]
fn an_unnamed_statement_stays_its_session_s() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let proxy = proxy(&cluster, "servers = 1");
    let (mut a, mut b) = (support::session(&proxy), support::session(&proxy));
    let parse = |sql: &str| [&b"\0"[..], sql.as_bytes(), b"\0\0\0"].concat();
    let sync = message(b'S', b"");
    let execute = [message(b'B', b"\0\0\0\0\0\0\0\0"), message(b'E', b"\0\0\0\0\0"), sync.clone()].concat();
    let turn = |client: &mut std::net::TcpStream, bytes: &[u8]| {
        client.write_all(bytes).expect("write");
        let mut tags = Vec::new();
        loop {
            let (tag, body) = support::next_message(client).expect("an answer");
            tags.push((tag, String::from_utf8_lossy(&body).into_owned()));
            if tag == b'Z' || tag == b'E' {
                return tags;
            }
        }
    };
    for (client, sql) in [(&mut a, "SELECT 'of a'"), (&mut b, "SELECT 'of b'")] {
        let answer = turn(client, &[message(b'P', &parse(sql)), sync.clone()].concat());
        assert_eq!(answer[0].0, b'1', "{answer:?}");
    }
    for _ in 0..2 {
        for (client, text) in [(&mut a, "of a"), (&mut b, "of b")] {
            let answer = turn(client, &execute);
            assert!(answer.iter().any(|(tag, body)| *tag == b'D' && body.contains(text)), "{answer:?}");
        }
    }
    // A session that has none gets none of another one.
    let mut none = support::session(&proxy);
    let answer = turn(&mut none, &execute);
    assert!(answer.iter().all(|(tag, _)| *tag != b'D'), "{answer:?}");
    assert!(answer.iter().any(|(tag, body)| *tag == b'E' && body.contains("26000")), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_request_reaches_its_own_session_and_a_dead_server_process_no_client() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let proxy = proxy(&cluster, "servers = 2");
    let (a, b) = (connect(&proxy).await, connect(&proxy).await);
    let token = a.cancel_token();
    let sleep = tokio::spawn(async move { (a.batch_execute("SELECT pg_sleep(300)").await, a) });
    let sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'";
    until("the statement to run", || (cluster.sql("postgres", sleeping) == "1").then_some(()));
    token.cancel_query(NoTls).await.expect("cancel");
    let (cancelled, a) = sleep.await.unwrap();
    assert_eq!(cancelled.unwrap_err().code().unwrap().code(), "57014");
    // An idle session has nothing to cancel, and no other session is hit.
    let token = a.cancel_token();
    let running = tokio::spawn(async move { (b.batch_execute("SELECT pg_sleep(1)").await, b) });
    for _ in 0..10 {
        token.cancel_query(NoTls).await.expect("cancel");
    }
    let (ran, b) = running.await.unwrap();
    ran.expect("the statement of another session ends well");
    all_shared(&proxy).await;
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend' \
                AND pid <> pg_backend_pid()";
    assert_ne!(cluster.sql("postgres", kill), "0");
    until("the processes to end", || (processes(&cluster) == 0).then_some(()));
    for client in [&a, &b] {
        assert_eq!(ask(client, "SELECT 1").await, "1");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_are_bounded_in_time_and_number_and_end_with_an_error_that_says_so() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let proxy = proxy(&cluster, "servers = 1, waiting = 1, wait_ms = 700");
    let (holder, waiter, third) = (connect(&proxy).await, connect(&proxy).await, connect(&proxy).await);
    all_shared(&proxy).await;
    // Half a message takes no connection.
    let mut half = support::session(&proxy);
    half.write_all(b"Q\0\0\0\x0dSEL").unwrap();
    holder.batch_execute("BEGIN; SELECT 1").await.unwrap();
    let waiting = tokio::spawn(async move { waiter.simple_query("SELECT 1").await });
    for _ in 0..500 {
        if pool_of(&proxy).await.0.waiting == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let full = third.simple_query("SELECT 1").await.unwrap_err();
    assert!(
        full.to_string().contains("1 sessions wait") || format!("{full:?}").contains("1 sessions wait"),
        "{full:?}"
    );
    let late = waiting.await.unwrap().unwrap_err();
    assert!(format!("{late:?}").contains("no server connection became free within 700 ms"), "{late:?}");
    holder.batch_execute("COMMIT").await.unwrap();
    half.write_all(b"ECT 2\0").unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"Z\0\0\0\x05I") {
        let mut byte = [0; 1];
        half.read_exact(&mut byte).unwrap();
        seen.push(byte[0]);
    }
    assert!(String::from_utf8_lossy(&seen).contains('2'));
}

/// A client that does not read its rows holds one connection, and no other client up; with its end the connection is
/// closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_holds_one_connection() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let proxy = proxy(&cluster, "servers = 2");
    let other = connect(&proxy).await;
    let mut deaf = support::session(&proxy);
    deaf.write_all(&message(b'Q', b"SELECT repeat('x', 1000) FROM generate_series(1, 100000)\0")).unwrap();
    for _ in 0..50 {
        assert_eq!(ask(&other, "SELECT 1").await, "1");
    }
    drop(deaf);
    all_shared(&proxy).await;
    for _ in 0..1000 {
        if pool_of(&proxy).await.1.len() == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(ask(&other, "SELECT 2").await, "2");
    // A client that leaves in a transaction leaves nothing of it.
    let mut leaver = support::session(&proxy);
    leaver.write_all(&message(b'Q', b"BEGIN; CREATE TABLE left_behind (a int)\0")).unwrap();
    until("the table to be made", || {
        (cluster.sql("postgres", "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock'") != "0")
            .then_some(())
    });
    drop(leaver);
    until("the transaction to end", || {
        (cluster.sql("postgres", "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock'") == "0")
            .then_some(())
    });
    for _ in 0..4 {
        assert_eq!(ask(&other, "SELECT count(*) FROM pg_class WHERE relname = 'left_behind'").await, "0");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_share_connections_move_under_load_and_back() {
    if !available() {
        return;
    }
    let (a, b) = (Cluster::start(&[]), Cluster::start(&[]));
    for (cluster, name) in [(&a, "a"), (&b, "b")] {
        cluster.sql("postgres", &format!("CREATE TABLE whoami AS SELECT '{name}'::text AS name"));
    }
    let tables =
        format!("{}{}[tenants.postgres]\nserver = \"a\"\npool = {{ servers = 3 }}\n", server("a", &a), server("b", &b));
    let proxy = Proxy::start("", &tables);
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..16_i32 {
        let client = connect(&proxy).await;
        if number % 4 == 0 {
            client
                .batch_execute(&format!("SET app.number = '{number}'; SET work_mem = '{}MB'", number + 1))
                .await
                .unwrap();
        }
        let statement = if number % 8 == 1 { Some(client.prepare("SELECT $1::int * 2").await.unwrap()) } else { None };
        let (stop, answered) = (stop.clone(), answered.clone());
        tasks.spawn(async move {
            let mut servers = String::new();
            while !stop.load(Ordering::Relaxed) {
                client.batch_execute("BEGIN").await.expect("begin");
                let name = ask(&client, "SELECT name FROM whoami").await;
                assert_eq!(ask(&client, "SELECT name FROM whoami").await, name);
                client.batch_execute("COMMIT").await.expect("commit");
                if !servers.ends_with(&name) {
                    servers += &name;
                }
                if number % 4 == 0 {
                    assert_eq!(ask(&client, "SHOW work_mem").await, format!("{}MB", number + 1));
                    assert_eq!(ask(&client, "SELECT current_setting('app.number')").await, number.to_string());
                } else {
                    assert_eq!(ask(&client, "SHOW work_mem").await, "4MB");
                }
                if let Some(statement) = &statement {
                    assert_eq!(client.query_one(statement, &[&number]).await.unwrap().get::<_, i32>(0), number * 2);
                }
                answered.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            servers
        });
    }
    let idle = connect(&proxy).await;
    for to in ["b", "a", "b"] {
        let before = answered.load(Ordering::Relaxed);
        while answered.load(Ordering::Relaxed) < before + 100 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut control = proxy.control().await;
        prepare(&mut control, "postgres", to).await;
        assert_eq!(switch(&mut control, "postgres").await, 17);
    }
    let before = answered.load(Ordering::Relaxed);
    while answered.load(Ordering::Relaxed) < before + 100 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(servers) = tasks.join_next().await {
        assert_eq!(servers.expect("a client that ends well"), "abab");
    }
    assert_eq!(ask(&idle, "SELECT name FROM whoami").await, "b");
    until("the source to be without clients", || (processes(&a) == 0).then_some(()));
    let (pool, _) = pool_of(&proxy).await;
    assert!(pool.open <= 3, "{pool:?}");
}

#[test]
fn a_role_that_logs_in_gets_only_connections_of_its_own() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE ROLE one LOGIN; CREATE ROLE two LOGIN");
    let proxy = proxy(&cluster, "servers = 1");
    let info = |user: &str| format!("host=127.0.0.1 port={} user={user} dbname=postgres", proxy.port);
    for _ in 0..3 {
        for user in ["one", "two"] {
            assert_eq!(
                support::psql(&info(user), "", "SELECT session_user || current_user"),
                Ok(format!("{user}{user}"))
            );
        }
    }
    // A role that may log in no more gets no connection, although one is open.
    cluster.sql("postgres", "ALTER ROLE one NOLOGIN");
    assert!(support::psql(&info("one"), "", "SELECT 1").unwrap_err().contains("not permitted to log in"));
    assert!(status(&proxy).0.open <= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_of_sessions_that_share_connections_are_captured() {
    if !available() {
        return;
    }
    let (source, target) = (Cluster::start(&[]), Cluster::start(&[]));
    source.sql("postgres", "CREATE TABLE t (a int PRIMARY KEY, b int)");
    let proxy = Arc::new(proxy(&source, "servers = 2"));
    let mut clients = Vec::new();
    for _ in 0..5 {
        clients.push(connect(&proxy).await);
    }
    clients[0].batch_execute("INSERT INTO t VALUES (-1, 0)").await.unwrap();
    let follower = std::thread::scope(|scope| {
        scope.spawn(|| Follower::start(&proxy, "postgres", &source, &target)).join().expect("the follower starts")
    });
    for (number, client) in clients.iter().enumerate().take(4) {
        client.batch_execute(&format!("INSERT INTO t VALUES ({number}, 1)")).await.unwrap();
        client.batch_execute(&format!("BEGIN; UPDATE t SET b = {number} WHERE a = {number}; COMMIT")).await.unwrap();
    }
    let request = Request::Captured { tenant: "postgres".into() };
    let Ok(Reply::Captured { stamp, over: None }) = proxy.control().await.ask(&request).await else {
        panic!("the capture is over")
    };
    let followed = tokio::task::spawn_blocking(move || follower.finish(stamp)).await.unwrap();
    assert_eq!((followed.applied, followed.over), (8, None));
    let rows = "SELECT string_agg(a || ':' || b, ' ' ORDER BY a) FROM t";
    assert_eq!(target.sql("postgres", rows), "-1:0 0:0 1:1 2:2 3:3");
    // The capture is over: connections are shared again.
    for client in &clients {
        assert_eq!(ask(client, "SELECT count(*) FROM t").await, "5");
    }
    await_kept(&proxy, 0, "the capture's end").await;
    assert!(pool_of(&proxy).await.0.open <= 2);
}

#[test]
fn clients_that_encrypt_share_connections_too() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let dir = tempfile::TempDir::with_prefix("stillpoint-proxy-").expect("make a directory");
    support::certificate(dir.path());
    let (certificate, key) = (dir.path().join("server.crt"), dir.path().join("server.key"));
    let tables = format!(
        "{}[tenants.postgres]\nserver = \"a\"\npool = {{ servers = 1 }}\n[tls]\ncertificate = {certificate:?}\nkey = {key:?}\n",
        server("a", &cluster)
    );
    let proxy = Proxy::start_in(dir, "", &tables);
    let sessions: Vec<_> = (1..=3)
        .map(|number| {
            let mut psql = std::process::Command::new("psql");
            psql.args(["-XAtq", &format!("{} sslmode=require", proxy.conninfo("postgres"))]);
            psql.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
            let mut psql = psql.spawn().expect("start psql");
            let mut input = psql.stdin.take().expect("a pipe");
            writeln!(input, "SET work_mem = '{number}MB';").expect("write");
            for _ in 0..20 {
                writeln!(input, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid();\nSHOW work_mem;")
                    .expect("write");
            }
            (number, psql)
        })
        .collect();
    for (number, psql) in sessions {
        let output = psql.wait_with_output().expect("run psql");
        let expected = format!("f\n{number}MB\n").repeat(20);
        assert!(output.status.success());
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    }
    assert!(status(&proxy).0.open <= 1);
}
