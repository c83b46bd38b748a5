//! Everything that works directly works through the proxy.

use crate::proxy::support;
use crate::proxy::support::{Proxy, server};
use stillpoint_testing::postgresql::{Cluster, available};
use tokio_postgres::{NoTls, SimpleQueryMessage};

fn psql(proxy: &Proxy, user: &str, password: &str, sql: &str) -> Result<String, String> {
    support::psql(&format!("host=127.0.0.1 port={} user={user} dbname=postgres", proxy.port), password, sql)
}

#[test]
fn every_way_to_log_in_works_and_wrong_passwords_do_not() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE ROLE alice LOGIN PASSWORD 'secret'");
    cluster.sql("postgres", "SET password_encryption = 'md5'; CREATE ROLE bob LOGIN PASSWORD 'secret'");
    let hba = "host all alice 127.0.0.1/32 scram-sha-256\nhost all bob 127.0.0.1/32 md5\nhost all all 127.0.0.1/32 trust\n\
               local all all trust\n";
    std::fs::write(cluster.data_dir().join("pg_hba.conf"), hba).expect("write pg_hba.conf");
    cluster.sql("postgres", "SELECT pg_reload_conf()");
    let rules = "[[allow]]\naction = \"reject\"\nusers = [\"mallory\"]\n[[allow]]\nfrom = [\"127.0.0.1\"]\n";
    let proxy = Proxy::start("", &format!("{}[tenants.\"*\"]\nserver = \"a\"\n{rules}", server("a", &cluster)));
    for user in ["alice", "bob", "postgres"] {
        assert_eq!(psql(&proxy, user, "secret", "SELECT current_user").as_deref(), Ok(user));
    }
    for user in ["alice", "bob"] {
        let error = psql(&proxy, user, "wrong", "SELECT 1").unwrap_err();
        assert!(error.contains("password authentication failed for user"), "{error}");
    }
    let error = psql(&proxy, "mallory", "", "SELECT 1").unwrap_err();
    assert!(error.contains("no rule of the proxy allows user \"mallory\""), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn both_protocols_copies_notifications_and_cancelling_work() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let proxy = Proxy::start("", &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    let (client, connection) = tokio_postgres::connect(&proxy.conninfo("postgres"), NoTls).await.expect("connect");
    tokio::spawn(connection);
    client.batch_execute("CREATE TABLE t (a int, b text)").await.unwrap();
    let insert = client.prepare("INSERT INTO t VALUES ($1, $2)").await.unwrap();
    for i in 0..10_i32 {
        let text = "x".repeat(i as usize * 20_000);
        assert_eq!(client.execute(&insert, &[&i, &text]).await.unwrap(), 1);
    }
    let rows = client.query("SELECT a, length(b) FROM t ORDER BY a", &[]).await.unwrap();
    let lengths: Vec<i32> = rows.iter().map(|row| row.get(1)).collect();
    assert_eq!(lengths, (0..10).map(|i| i * 20_000).collect::<Vec<_>>());

    // Pipelined.
    let (one, two, three) =
        (client.query_one("SELECT 1", &[]), client.query_one("SELECT 1/0", &[]), client.query_one("SELECT 3", &[]));
    let (one, two, three) = tokio::join!(one, two, three);
    assert_eq!((one.unwrap().get::<_, i32>(0), three.unwrap().get::<_, i32>(0)), (1, 3));
    assert!(two.unwrap_err().to_string().contains("db error"));

    // A statement that is cancelled, by the key that the proxy gave.
    let token = client.cancel_token();
    let sleep = client.batch_execute("SELECT pg_sleep(60)");
    let cancel = async {
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            if cluster.sql("postgres", "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(60)%'") != "1"
            {
                return token.cancel_query(NoTls).await;
            }
        }
    };
    let (slept, cancelled) = tokio::join!(sleep, cancel);
    cancelled.expect("pass the request on");
    assert_eq!(slept.unwrap_err().code().map(|code| code.code().to_owned()).as_deref(), Some("57014"));

    let SimpleQueryMessage::CommandComplete(n) = client.simple_query("COPY t TO '/dev/null'").await.unwrap().remove(0)
    else {
        panic!("a copy")
    };
    assert_eq!(n, 10);
}

#[test]
fn pgbench_runs_by_every_protocol() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE DATABASE bench");
    let proxy = Proxy::start("", &format!("{}[tenants.bench]\nserver = \"a\"\n", server("a", &cluster)));
    let run = |arguments: &[&str]| cluster.pgbench_load("bench", proxy.port, arguments).finish();
    let made = run(&["-i", "-s", "1", "-q"]);
    assert_eq!(made.failed, 0, "{}", made.text);
    for arguments in [
        &["-c", "4", "-t", "50", "-M", "simple"][..],
        &["-c", "4", "-t", "50", "-M", "extended"],
        &["-c", "4", "-t", "50", "-M", "prepared"],
        &["-c", "4", "-t", "20", "-C", "-S"],
    ] {
        let outcome = run(arguments);
        assert_eq!(outcome.failed, 0, "{arguments:?}: {}", outcome.text);
        assert!(outcome.transactions >= 80, "{arguments:?}: {}", outcome.text);
    }
}
