//! Drivers of other languages through the proxy. pip and npm fetch the ones of Python and Node once, into the cache.
//! Java's is Debian's, and so is Node's where npm is missing.

use crate::proxy::support::repeated_capture::RepeatedCapture;
use crate::proxy::support::{Proxy, certificate, server};
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_testing::child::run;
use stillpoint_testing::postgresql::{Cluster, available};
use stillpoint_testing::{recipes, skipped};
use tempfile::TempDir;

/// Paths of Debian's drivers.
const JDBC: &str = "/usr/share/java/postgresql.jar";
const NODE_MODULES: &str = "/usr/share/nodejs";
const NODE_POSTGRES: &str = "pg@8.16.3";
const PYTHON_DRIVERS: [&str; 2] = ["psycopg[binary]", "asyncpg"];

/// A Python that has the drivers, or the reason why there is none.
fn python() -> Result<PathBuf, String> {
    let version = recipes::version("python3")?;
    let entry = recipes::entry("drivers", "python", &[PYTHON_DRIVERS.join(" ").into(), version], |into| {
        run(Command::new("python3").args(["-m", "venv"]).arg(into))?;
        let python = into.join("bin/python");
        run(Command::new(&python).args(["-m", "pip", "-q", "install"]).args(PYTHON_DRIVERS))?;
        Ok(run(Command::new(&python).args(["-c", "import psycopg, asyncpg"]))?)
    })?;
    Ok(entry.join("bin/python"))
}

/// A directory of modules that has node-postgres, or the reason why there is none.
fn node_modules() -> Result<PathBuf, String> {
    let debians = PathBuf::from(NODE_MODULES);
    if debians.join("pg").exists() {
        return Ok(debians);
    }
    let entry = recipes::entry("drivers", "node", &[NODE_POSTGRES.into()], |into| {
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]);
        Ok(run(npm.arg(into).arg(NODE_POSTGRES))?)
    })?;
    Ok(entry.join("node_modules"))
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("drivers").join(name)
}

/// Runs a client to its end; false if it reports (exit code 77) that it cannot do its task.
#[track_caller]
fn passes(command: &mut Command) -> bool {
    let output = command.output().expect("run a client");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(77) {
        skipped(said.trim());
        return false;
    }
    assert!(output.status.success(), "{command:?}: {said}{errors}");
    print!("{said}");
    true
}

/// Runs a driver without and with a capture: it notices no difference.
fn twice(proxy: &Proxy, run: impl Fn()) {
    run();
    let armed = RepeatedCapture::start(proxy, "postgres");
    run();
    println!("captured: {:?}", armed.finish());
}

fn plain() -> (Cluster, Proxy) {
    let cluster = Cluster::start(&[]);
    let proxy = Proxy::start("", &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    (cluster, proxy)
}

#[test]
fn psycopg_and_asyncpg_work() {
    if !available() {
        return;
    }
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&why),
    };
    let (_cluster, proxy) = plain();
    twice(&proxy, || {
        passes(Command::new(&python).arg(script("psycopg_smoke.py")).arg(proxy.conninfo("postgres")));
        passes(Command::new(&python).arg(script("asyncpg_smoke.py")).args([&proxy.port.to_string(), "postgres"]));
    });
}

#[test]
fn libpq_18_speaks_protocol_3_2_and_tls_at_once() {
    if !available() {
        return;
    }
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&why),
    };
    let cluster = Cluster::start(&[]);
    let dir = TempDir::with_prefix("stillpoint-proxy-").expect("make a directory");
    certificate(dir.path());
    let file = |name: &str| dir.path().join(name);
    let top = format!("tls = {{ certificate = {:?}, key = {:?} }}", file("server.crt"), file("server.key"));
    let proxy = Proxy::start_in(dir, &top, &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    let sockets = proxy.socket.parent().expect("a socket lies in a directory");
    passes(Command::new(&python).arg(script("libpq_smoke.py")).arg(proxy.port.to_string()).arg(sockets));
}

#[test]
fn pgjdbc_works() {
    if !available() {
        return;
    }
    if !Path::new(JDBC).exists() || Command::new("javac").arg("-version").output().is_err() {
        return skipped("default-jdk-headless and libpostgresql-jdbc-java are not installed");
    }
    let (_cluster, proxy) = plain();
    let url = format!("jdbc:postgresql://127.0.0.1:{}/postgres?user=postgres", proxy.port);
    // One command compiles and runs a source file.
    twice(&proxy, || {
        passes(Command::new("java").args(["-cp", JDBC]).arg(script("Smoke.java")).arg(&url));
    });
}

#[test]
fn node_postgres_works() {
    if !available() {
        return;
    }
    let modules = match node_modules() {
        Ok(modules) => modules,
        Err(why) => return skipped(&why),
    };
    let (_cluster, proxy) = plain();
    let url = format!("postgresql://postgres@127.0.0.1:{}/postgres", proxy.port);
    twice(&proxy, || {
        passes(Command::new("node").env("NODE_PATH", &modules).arg(script("node_smoke.js")).arg(&url));
    });
}

/// Runs as many clients as fit, each with a connection for each transaction, or with one for all.
#[test]
fn pgbench_works_with_many_clients_and_many_connections() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&["max_connections=300"]);
    let proxy = Proxy::start("", &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    cluster.pgbench("postgres", &["-i", "-s", "4", "-q"]);
    twice(&proxy, || {
        for (mode, clients, each, more) in [
            ("simple", 4, 10, &["-C"][..]),
            ("extended", 4, 10, &["-C"]),
            ("prepared", 4, 10, &["-C"]),
            ("simple", 256, 1, &[]),
            ("extended", 256, 1, &[]),
            ("prepared", 256, 1, &["-C"]),
        ] {
            let (count, transactions) = (clients.to_string(), each.to_string());
            let arguments = [&["-n", "-M", mode, "-c", &count, "-t", &transactions], more].concat();
            let outcome = cluster.pgbench_load("postgres", proxy.port, &arguments).finish();
            let done = (outcome.success, outcome.failed, outcome.transactions);
            assert_eq!(done, (true, 0, clients * each), "{arguments:?}: {}", outcome.text);
        }
    });
    let done = cluster.sql(
        "postgres",
        "SELECT count(*), sum(delta) = (SELECT sum(abalance) FROM pgbench_accounts) FROM pgbench_history",
    );
    assert_eq!(done, format!("{}|t", 2 * 3 * (4 * 10 + 256)));
}
