//! Signals: a reload of the configuration does not touch sessions, and the end lets transactions finish.

use crate::proxy::support::{Proxy, ran_elsewhere, server};
use std::time::Duration;
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};
use tokio_postgres::NoTls;

fn signal(signal: rustix::process::Signal) {
    // The proxy is a thread of this process, and handles these signals.
    rustix::process::kill_process(rustix::process::getpid(), signal).expect("send a signal");
}

async fn connect(conninfo: &str) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(conninfo, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hangup_adds_a_tenant_and_the_end_waits_for_transactions() {
    if ran_elsewhere("proxy::signals::a_hangup_adds_a_tenant_and_the_end_waits_for_transactions") || !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE DATABASE later");
    cluster.sql("postgres", "CREATE TABLE t (a int)");
    let proxy = Proxy::start("", &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    let (idle, busy) =
        (connect(&proxy.conninfo("postgres")).await.unwrap(), connect(&proxy.conninfo("postgres")).await.unwrap());
    assert_eq!(connect(&proxy.conninfo("later")).await.unwrap_err().code().map(|code| code.code()), Some("3D000"));

    let path = proxy.dir.path().join("proxy.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, "listen = 7").unwrap();
    signal(rustix::process::Signal::HUP);
    tokio::time::sleep(Duration::from_millis(100)).await;
    idle.batch_execute("SELECT 1").await.expect("a file that cannot be used changes nothing");
    std::fs::write(&path, format!("{text}[tenants.later]\nserver = \"a\"\n")).unwrap();
    signal(rustix::process::Signal::HUP);
    loop {
        match connect(&proxy.conninfo("later")).await {
            Ok(client) => break client.batch_execute("SELECT 1").await.unwrap(),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    idle.batch_execute("SELECT 1").await.expect("sessions go on");

    busy.batch_execute("BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    signal(rustix::process::Signal::TERM);
    let error = loop {
        match idle.batch_execute("SELECT 1").await {
            Ok(()) => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(error) => break error,
        }
    };
    // The client has read the last message, or found the connection closed.
    assert!(error.is_closed() || error.code().is_some_and(|code| code.code() == "57P01"), "{error:?}");
    busy.batch_execute("INSERT INTO t VALUES (2); COMMIT").await.expect("the transaction may finish");
    assert_eq!(cluster.sql("postgres", "SELECT count(*) FROM t"), "2");
    until("the control socket to go", || (!proxy.control.exists()).then_some(()));
}
