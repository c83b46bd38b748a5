//! TLS on both sides, and SCRAM through it.

use crate::proxy::support;
use crate::proxy::support::{Proxy, certificate, preparing, switch};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;
use stillpoint_migrate_control::Reply;
use stillpoint_testing::postgresql::{Cluster, available};
use tempfile::TempDir;

fn encrypted(roles: &str) -> Cluster {
    let cluster = Cluster::start(&[]);
    certificate(&cluster.data_dir());
    let owner = fs::metadata(cluster.data_dir()).expect("the data directory");
    for file in ["server.key", "server.crt"] {
        let path = cluster.data_dir().join(file);
        use std::os::unix::fs::MetadataExt;
        chown(&path, Some(owner.uid()), Some(owner.gid())).expect("give the file to the server");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("set permissions");
    }
    cluster.sql("postgres", roles);
    let hba = "local all all trust\nhostssl all alice all scram-sha-256\nhost all postgres all trust\n";
    fs::write(cluster.data_dir().join("pg_hba.conf"), hba).expect("write pg_hba.conf");
    cluster.sql("postgres", "ALTER SYSTEM SET ssl = on");
    cluster.sql("postgres", "SELECT pg_reload_conf()");
    stillpoint_testing::wait::until("the server to speak TLS", || {
        (cluster.sql("postgres", "SHOW ssl") == "on").then_some(())
    });
    cluster
}

/// Answer of psql, or its error.
fn psql(proxy: &Proxy, mode: &str, password: &str, sql: &str) -> Result<String, String> {
    support::psql(
        &format!("host=127.0.0.1 port={} user=alice dbname=postgres sslmode={mode}", proxy.port),
        password,
        sql,
    )
}

fn tables(name: &str, cluster: &Cluster) -> String {
    let ca = cluster.data_dir().join("server.crt");
    format!("[servers.{name}]\nhost = \"127.0.0.1\"\nport = {}\ntls = \"verify-full\"\nca = {ca:?}\n", cluster.port())
}

#[test]
fn a_session_with_scram_moves_to_a_server_with_the_same_verifier_and_to_no_other() {
    if !available() {
        return;
    }
    let a = encrypted("CREATE ROLE alice LOGIN PASSWORD 'secret'");
    let stored = a.sql("postgres", "SELECT rolpassword FROM pg_authid WHERE rolname = 'alice'");
    let b = encrypted(&format!("CREATE ROLE alice LOGIN PASSWORD '{stored}'"));
    let c = encrypted("CREATE ROLE alice LOGIN PASSWORD 'secret'");
    let dir = TempDir::with_prefix("stillpoint-proxy-").unwrap();
    certificate(dir.path());
    let verifiers = dir.path().join("verifiers");
    fs::write(&verifiers, format!("alice {stored}\n")).unwrap();
    let file = |name: &str| dir.path().join(name);
    let top = format!("tls = {{ certificate = {:?}, key = {:?} }}", file("server.crt"), file("server.key"));
    let rest = format!(
        "{}{}{}[tenants.postgres]\nserver = \"a\"\nverifiers = {verifiers:?}\n[[allow]]\ntls = \"required\"\n",
        tables("a", &a),
        tables("b", &b),
        tables("c", &c)
    );
    let proxy = Proxy::start_in(dir, &top, &rest);
    let who = "SELECT inet_server_port() || ' ' || ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    assert_eq!(psql(&proxy, "require", "secret", who).as_deref(), Ok(format!("{} true", a.port()).as_str()));
    let error = psql(&proxy, "require", "wrong", who).unwrap_err();
    assert!(error.contains("password authentication failed"), "{error}");
    let error = psql(&proxy, "disable", "secret", who).unwrap_err();
    assert!(error.contains("without encryption"), "{error}");

    // One session that stays: it sleeps between its statements until the tenant has moved.
    let session = std::thread::scope(|scope| {
        let staying = scope.spawn(|| stay(&proxy, who));
        support::runtime().block_on(move_to(&proxy, "c", Err("the server stores another verifier")));
        support::runtime().block_on(move_to(&proxy, "b", Ok(())));
        fs::write(proxy.dir.path().join("moved"), "").unwrap();
        staying.join().expect("the session goes on")
    });
    assert_eq!(session, format!("{} true\n{} true", a.port(), b.port()));
    assert_eq!(psql(&proxy, "require", "secret", who).as_deref(), Ok(format!("{} true", b.port()).as_str()));
}

/// A psql session that asks once, waits for the file `moved`, and asks again.
fn stay(proxy: &Proxy, who: &str) -> String {
    let moved = proxy.dir.path().join("moved");
    let script = format!("{who};\n\\! while [ ! -e {} ]; do sleep 0.05; done\n{who};\n", moved.display());
    let path = proxy.dir.path().join("script.sql");
    fs::write(&path, script).expect("write a script");
    let output = Command::new("psql")
        .args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-f"])
        .arg(&path)
        .arg(format!("host=127.0.0.1 port={} user=alice dbname=postgres sslmode=require", proxy.port))
        .env("PGPASSWORD", "secret")
        .output()
        .expect("run psql");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

async fn move_to(proxy: &Proxy, to: &str, expected: Result<(), &str>) {
    let mut control = proxy.control().await;
    loop {
        match control.ask(&preparing("postgres", to, &[])).await.expect("an answer") {
            Reply::Prepared { sessions: 1, .. } if expected.is_ok() => break,
            Reply::Prepared { failed, .. } if !failed.is_empty() => {
                let why = expected.expect_err("it can be prepared");
                assert!(failed[0].why.contains(why), "{failed:?}");
                return;
            }
            Reply::Prepared { .. } => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(switch(&mut control, "postgres").await, 1);
}
