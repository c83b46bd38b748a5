//! Live sessions move to another server between two transactions, with the state that they carry.

use crate::proxy::support;
use crate::proxy::support::{Proxy, prepare, preparing, server, switch};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stillpoint_migrate_control::{Phase, Reply, Request, TargetSpec};
use stillpoint_testing::postgresql::{Cluster, available};
use tokio_postgres::{AsyncMessage, NoTls};

/// Two servers that return their names, and a proxy in front of the first.
fn pair() -> (Cluster, Cluster, Proxy) {
    let (a, b) = (Cluster::start(&[]), Cluster::start(&[]));
    for (cluster, name) in [(&a, "a"), (&b, "b")] {
        cluster.sql("postgres", &format!("CREATE TABLE whoami AS SELECT '{name}'::text AS name; CREATE ROLE reader"));
        cluster.sql("postgres", "GRANT SELECT ON whoami TO reader");
    }
    let tables = format!("{}{}[tenants.postgres]\nserver = \"a\"\n", server("a", &a), server("b", &b));
    let proxy = Proxy::start("", &tables);
    (a, b, proxy)
}

async fn connect(proxy: &Proxy) -> tokio_postgres::Client {
    log_in(&proxy.conninfo("postgres")).await
}

async fn log_in(conninfo: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(conninfo, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// Name of the server that a new client reaches.
async fn newcomer(conninfo: String) -> String {
    text(&log_in(&conninfo).await, WHO).await
}

async fn text(client: &tokio_postgres::Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

const WHO: &str = "SELECT name FROM whoami";

#[test]
fn a_session_keeps_what_it_carries_there_and_back() {
    if !available() {
        return;
    }
    let (_a, b, proxy) = pair();
    let runtime = support::runtime();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let (client, mut connection) = tokio_postgres::connect(&proxy.conninfo("postgres"), NoTls).await.unwrap();
        let (notify, mut notified) = tokio::sync::mpsc::unbounded_channel();
        tokio::task::spawn_local(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(notification) = message {
                    let _ = notify.send(notification.payload().to_owned());
                }
            }
        });
        client.batch_execute("SET work_mem = '7MB'; SET TimeZone = 'Asia/Tokyo'; SET search_path = public, pg_catalog").await.unwrap();
        client.batch_execute("SELECT set_config('app.tenant', 'it''s 7', false); LISTEN \"Some Channel\"").await.unwrap();
        client.batch_execute("SELECT pg_advisory_lock(77); SELECT pg_advisory_lock_shared(-1, 2)").await.unwrap();
        client.batch_execute("PREPARE by_sql(int) AS SELECT $1 + 1").await.unwrap();
        client.batch_execute("SET ROLE reader").await.unwrap();
        let by_protocol = client.prepare("SELECT $1::int * 2").await.unwrap();
        for (to, at) in [("b", "b"), ("a", "a"), ("b", "b")] {
            let mut control = proxy.control().await;
            prepare(&mut control, "postgres", to).await;
            assert_eq!(switch(&mut control, "postgres").await, 1);
            assert_eq!(text(&client, WHO).await, at);
            assert_eq!(text(&client, "SHOW work_mem").await, "7MB");
            assert_eq!(text(&client, "SHOW TimeZone").await, "Asia/Tokyo");
            assert_eq!(text(&client, "SELECT current_setting('app.tenant')").await, "it's 7");
            assert_eq!(text(&client, "SELECT current_user::text").await, "reader");
            assert_eq!(client.query_one(&by_protocol, &[&21_i32]).await.unwrap().get::<_, i32>(0), 42);
            client.batch_execute("EXECUTE by_sql(1)").await.expect("the statement made by PREPARE");
            client.batch_execute("NOTIFY \"Some Channel\", 'hello'").await.unwrap();
            assert_eq!(notified.recv().await.as_deref(), Some("hello"));
        }
        let locks = "SELECT string_agg(mode || classid || ':' || objid, ' ' ORDER BY mode) FROM pg_locks WHERE locktype = 'advisory'";
        assert_eq!(b.sql("postgres", locks), "ExclusiveLock0:77 ShareLock4294967295:2");
    });
}

/// Values that the source gives a session that sets nothing itself: from its file, the role, the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_session_keeps_the_settings_that_its_server_gave_it() {
    if !available() {
        return;
    }
    let a = Cluster::start(&[
        "allow_in_place_tablespaces=on",
        "timezone=Asia/Tokyo",
        "work_mem=5MB",
        "idle_session_timeout=1h",
    ]);
    let b = Cluster::start(&[
        "timezone=UTC",
        "work_mem=6MB",
        "default_transaction_isolation=serializable",
        "lock_timeout=7s",
    ]);
    a.sql("postgres", "CREATE TABLESPACE elsewhere LOCATION ''");
    for sql in [
        "ALTER ROLE ALL SET DateStyle = 'SQL, DMY'",
        "ALTER DATABASE postgres SET statement_timeout = '77s'",
        "ALTER ROLE postgres SET search_path = \"$user\", 'a, \"\"b'",
        "ALTER ROLE postgres SET app.tenant = 'it''s \\7'",
        "ALTER ROLE postgres IN DATABASE postgres SET maintenance_work_mem = '7MB'",
        "ALTER ROLE postgres SET default_tablespace = 'elsewhere'",
    ] {
        a.sql("postgres", sql);
    }
    b.sql("postgres", "ALTER ROLE postgres SET intervalstyle = 'sql_standard'; ALTER ROLE ALL SET app.tenant = '8'");
    let tables = format!("{}{}[tenants.postgres]\nserver = \"a\"\n", server("a", &a), server("b", &b));
    let proxy = Proxy::start("", &tables);
    let (client, latin) = (connect(&proxy).await, connect(&proxy).await);
    client.batch_execute("SET extra_float_digits = 0").await.unwrap();
    latin.batch_execute("SET client_encoding = 'LATIN1'").await.unwrap();
    let kept = [
        "TimeZone",
        "DateStyle",
        "IntervalStyle",
        "statement_timeout",
        "search_path",
        "app.tenant",
        "maintenance_work_mem",
        "default_transaction_isolation",
        "lock_timeout",
        "idle_session_timeout",
        "extra_float_digits",
    ];
    let values = async |client: &tokio_postgres::Client| {
        let mut values = Vec::new();
        for name in kept {
            values.push((name, text(client, &format!("SELECT current_setting('{name}')")).await));
        }
        values
    };
    let (before, of_latin) = (values(&client).await, values(&latin).await);
    assert_eq!(before[5].1, "it's \\7");
    for (to, work_mem, tablespace) in [("b", "6MB", ""), ("a", "5MB", "elsewhere"), ("b", "6MB", "")] {
        let mut control = proxy.control().await;
        prepare(&mut control, "postgres", to).await;
        assert_eq!(switch(&mut control, "postgres").await, 2);
        assert_eq!(values(&client).await, before, "at {to}");
        assert_eq!(values(&latin).await, of_latin, "at {to}");
        assert_eq!(text(&client, "SHOW work_mem").await, work_mem, "how a server works is its own affair");
        assert_eq!(text(&client, "SHOW default_tablespace").await, tablespace, "one that it does not have is left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_open_transaction_blocks_the_pause_and_is_named_and_nothing_happens_to_it() {
    if !available() {
        return;
    }
    let (_a, _b, proxy) = pair();
    let (idle, holder) = (connect(&proxy).await, connect(&proxy).await);
    let mut control = proxy.control().await;
    prepare(&mut control, "postgres", "b").await;
    holder.batch_execute("BEGIN").await.unwrap();
    let begun = Instant::now();
    let reply = control.ask(&Request::Pause { tenant: "postgres".into(), limit_ms: 300 }).await.unwrap();
    let Reply::Blocked { sessions } = reply else { panic!("{reply:?}") };
    assert_eq!((sessions.len(), sessions[0].why.as_str()), (1, "its client holds a transaction open"));
    assert!(begun.elapsed() >= Duration::from_millis(300) && sessions[0].transaction_ms.is_some());
    for client in [&idle, &holder] {
        assert_eq!(text(client, WHO).await, "a");
    }
    let refused = control.ask(&Request::Switch { tenant: "postgres".into() }).await;
    assert!(refused.unwrap_err().to_string().contains("does not hold a pause"));
    holder.batch_execute("COMMIT").await.unwrap();
    assert_eq!(switch(&mut control, "postgres").await, 2);
    for client in [&idle, &holder] {
        assert_eq!(text(client, WHO).await, "b");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pause_ends_at_its_limit_and_with_its_connection_and_new_clients_wait() {
    if !available() {
        return;
    }
    let (_a, _b, proxy) = pair();
    let client = connect(&proxy).await;
    let pause = |limit_ms| Request::Pause { tenant: "postgres".into(), limit_ms };
    let mut control = proxy.control().await;
    prepare(&mut control, "postgres", "b").await;

    let begun = Instant::now();
    control.ask(&pause(400)).await.unwrap();
    assert_eq!(text(&client, WHO).await, "a");
    assert!(begun.elapsed() >= Duration::from_millis(400), "the statement waited for the limit");
    assert!(control.ask(&Request::Switch { tenant: "postgres".into() }).await.is_err());

    control.ask(&pause(60_000)).await.unwrap();
    let waiting = tokio::spawn(newcomer(proxy.conninfo("postgres")));
    let mut other = proxy.control().await;
    let Reply::Status(status) = other.ask(&Request::Status).await.unwrap() else { panic!("status") };
    assert_eq!(status.tenants[0].phase, Phase::Paused);
    assert!(other.ask(&Request::Switch { tenant: "postgres".into() }).await.is_err(), "it does not hold the pause");
    assert!(other.ask(&pause(10)).await.is_err(), "it is paused already");
    drop(control);
    assert_eq!(text(&client, WHO).await, "a");
    assert_eq!(waiting.await.unwrap(), "a");

    prepare(&mut other, "postgres", "b").await;
    other.ask(&pause(60_000)).await.unwrap();
    let waiting = tokio::spawn(newcomer(proxy.conninfo("postgres")));
    tokio::time::sleep(Duration::from_millis(50)).await;
    other.ask(&Request::Switch { tenant: "postgres".into() }).await.unwrap();
    assert_eq!((text(&client, WHO).await, waiting.await.unwrap()), ("b".into(), "b".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn clients_that_leave_while_a_pause_waits_for_them_do_not_stop_it() {
    if !available() {
        return;
    }
    let (_a, _b, proxy) = pair();
    let mut control = proxy.control().await;
    for _ in 0..5 {
        let mut clients = Vec::new();
        for _ in 0..8 {
            let client = connect(&proxy).await;
            client.batch_execute("BEGIN; SELECT 1").await.unwrap();
            clients.push(client);
        }
        let preparing = Request::Prepare {
            tenant: "postgres".into(),
            target: TargetSpec::Name("b".into()),
            verifiers: Default::default(),
            limit_ms: 100,
            again: false,
        };
        control.ask(&preparing).await.unwrap();
        let pause = Request::Pause { tenant: "postgres".into(), limit_ms: 20_000 };
        let leaving = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            for client in clients {
                let _ = client.batch_execute("COMMIT").await;
            }
        };
        let (paused, ()) = tokio::join!(control.ask(&pause), leaving);
        assert!(matches!(paused, Ok(Reply::Drained { .. })), "{paused:?}");
        control.ask(&Request::Resume { tenant: "postgres".into() }).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sessions_that_hold_what_cannot_move_are_pinned_and_said() {
    if !available() {
        return;
    }
    let (_a, _b, proxy) = pair();
    let (temporary, cursor) = (connect(&proxy).await, connect(&proxy).await);
    temporary.batch_execute("CREATE TEMP TABLE mine (a int)").await.unwrap();
    cursor.batch_execute("BEGIN; DECLARE c CURSOR WITH HOLD FOR SELECT 1; COMMIT").await.unwrap();
    let mut control = proxy.control().await;
    let request = preparing("postgres", "b", &[]);
    let Reply::Prepared { sessions: 0, pinned, .. } = control.ask(&request).await.unwrap() else { panic!("prepared") };
    let mut why: Vec<&str> = pinned.iter().map(|remark| remark.why.as_str()).collect();
    why.sort_unstable();
    assert_eq!(why, ["cursor WITH HOLD c", "temporary relation mine"]);
    let reply = control.ask(&Request::Pause { tenant: "postgres".into(), limit_ms: 500 }).await.unwrap();
    assert!(matches!(&reply, Reply::Blocked { sessions } if sessions.len() == 2), "{reply:?}");
    temporary.batch_execute("DROP TABLE mine").await.unwrap();
    cursor.batch_execute("CLOSE c").await.unwrap();
    prepare(&mut control, "postgres", "b").await;
    let reply = control.ask(&Request::Pause { tenant: "postgres".into(), limit_ms: 60_000 }).await.unwrap();
    assert!(matches!(reply, Reply::Drained { .. }), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_login_that_was_only_heard_opens_the_target_once_the_verifier_is_known() {
    if !available() {
        return;
    }
    let (a, b, proxy) = pair();
    a.sql("postgres", "CREATE ROLE alice LOGIN PASSWORD 'secret'");
    let stored = a.sql("postgres", "SELECT rolpassword FROM pg_authid WHERE rolname = 'alice'");
    b.sql("postgres", &format!("CREATE ROLE alice LOGIN PASSWORD '{stored}'"));
    for cluster in [&a, &b] {
        cluster.sql(
            "postgres",
            "GRANT SELECT ON whoami TO alice; CREATE TYPE mood AS ENUM ('good'); CREATE TABLE moods (m mood)",
        );
        let hba = "local all all trust\nhost all alice all scram-sha-256\nhost all all all trust\n";
        std::fs::write(cluster.data_dir().join("pg_hba.conf"), hba).expect("write pg_hba.conf");
        cluster.sql("postgres", "GRANT INSERT, SELECT ON moods TO alice; SELECT pg_reload_conf()");
    }
    let conninfo = format!("host=127.0.0.1 port={} user=alice password=secret dbname=postgres", proxy.port);
    let client = log_in(&conninfo).await;
    assert_eq!(text(&client, WHO).await, "a");
    // Its parameter is of a type that has another number at the target.
    let insert = client.prepare("INSERT INTO moods SELECT $1::text::mood").await.unwrap();
    client.batch_execute("PREPARE by_type(mood) AS INSERT INTO moods VALUES ($1)").await.unwrap();
    let mut control = proxy.control().await;
    let Reply::Prepared { failed, .. } = control.ask(&preparing("postgres", "b", &[])).await.unwrap() else {
        panic!("prepared")
    };
    assert!(failed[0].why.contains("no verifier for this role was given"), "{failed:?}");
    let reply = control.ask(&preparing("postgres", "b", &[("alice", &stored)])).await.unwrap();
    assert!(matches!(reply, Reply::Prepared { sessions: 1, .. }), "{reply:?}");
    switch(&mut control, "postgres").await;
    assert_eq!(text(&client, WHO).await, "b");
    client.execute(&insert, &[&"good"]).await.unwrap();
    client.batch_execute("EXECUTE by_type('good')").await.unwrap();
    assert_eq!(b.sql("postgres", "SELECT count(*) FROM moods"), "2");
}

/// Sessions under load, there and back: every statement is answered, by the server in service.
#[test]
fn sessions_under_load_move_without_an_error() {
    if !available() {
        return;
    }
    let (a, b, proxy) = pair();
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let load = std::thread::spawn({
        let (stop, answered, conninfo) = (stop.clone(), answered.clone(), proxy.conninfo("postgres"));
        move || {
            support::runtime().block_on(async move {
                let mut tasks = tokio::task::JoinSet::new();
                for _ in 0..16 {
                    let (stop, answered, conninfo) = (stop.clone(), answered.clone(), conninfo.clone());
                    tasks.spawn(async move {
                        let mut client = log_in(&conninfo).await;
                        let statement = client.prepare(WHO).await.unwrap();
                        let mut longest = Duration::ZERO;
                        while !stop.load(Ordering::Relaxed) {
                            let begun = Instant::now();
                            let transaction = client.transaction().await.unwrap();
                            let first: String = transaction.query_one(&statement, &[]).await.unwrap().get(0);
                            let second: String = transaction.query_one(&statement, &[]).await.unwrap().get(0);
                            assert_eq!(first, second, "a transaction moved");
                            transaction.commit().await.unwrap();
                            longest = longest.max(begun.elapsed());
                            answered.fetch_add(1, Ordering::Relaxed);
                            tokio::time::sleep(Duration::from_millis(1)).await;
                        }
                        longest
                    });
                }
                tasks.join_all().await.into_iter().max().unwrap()
            })
        }
    });
    for to in ["b", "a", "b", "a", "b"] {
        let before = answered.load(Ordering::Relaxed);
        while answered.load(Ordering::Relaxed) < before + 200 && !load.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let pause_us = proxy.move_tenant("postgres", to);
        println!("moved to {to} in a pause of {pause_us} us");
    }
    stop.store(true, Ordering::Relaxed);
    println!("longest transaction of any client: {:?}", load.join().expect("no client saw an error"));
    let sessions =
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    for cluster in [&a, &b] {
        stillpoint_testing::wait::until("all sessions to be gone", || {
            (cluster.sql("postgres", sessions) == "0").then_some(())
        });
    }
}
