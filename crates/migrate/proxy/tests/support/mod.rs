//! A proxy in a thread of the test, in front of real servers.
#![allow(dead_code, reason = "each test uses its part")]

use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use stillpoint_migrate_proxy::control::{Client, Reply, Request, TargetSpec};
use stillpoint_migrate_testbed::{Cluster, free_port};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// A proxy; it ends with the test's process.
pub(crate) struct Proxy {
    pub(crate) dir: TempDir,
    pub(crate) port: u16,
    pub(crate) socket: PathBuf,
    pub(crate) control: PathBuf,
}

/// `[servers.NAME]` for a cluster.
pub(crate) fn server(name: &str, cluster: &Cluster) -> String {
    format!("[servers.{name}]\nhost = \"127.0.0.1\"\nport = {}\n", cluster.port())
}

impl Proxy {
    /// Starts one; `rest` are tables of its configuration, `top` what stands before them.
    pub(crate) fn start(top: &str, rest: &str) -> Proxy {
        Proxy::start_in(TempDir::with_prefix("stillpoint-proxy-").expect("make a directory"), top, rest)
    }

    /// The same in a directory in which files have been made.
    pub(crate) fn start_in(dir: TempDir, top: &str, rest: &str) -> Proxy {
        let port = free_port();
        let socket = dir.path().join(format!(".s.PGSQL.{port}"));
        let control = dir.path().join("control.sock");
        let routes = dir.path().join("routes.json");
        let text = format!(
            "listen = [\"127.0.0.1:{port}\", {socket:?}]\ncontrol = {control:?}\nroutes = {routes:?}\nworkers = 2\n{top}\n{rest}"
        );
        let path = dir.path().join("proxy.toml");
        fs::write(&path, &text).expect("write the configuration");
        let (ready, started) = mpsc::channel();
        std::thread::spawn(move || {
            let failed = ready.clone();
            if let Err(error) = stillpoint_migrate_proxy::run(&path, |_| ready.send(None).expect("the test waits")) {
                let _ = failed.send(Some(format!("{error}: {:?}", std::error::Error::source(&error))));
            }
        });
        if let Some(error) = started.recv().expect("the proxy starts or says why not") {
            panic!("{error}\n{text}");
        }
        Proxy { dir, port, socket, control }
    }

    /// A connection string for one database.
    pub(crate) fn conninfo(&self, database: &str) -> String {
        format!("host=127.0.0.1 port={} user=postgres dbname={database}", self.port)
    }

    /// Asks on a control connection of its own.
    pub(crate) fn ask(&self, request: Request) -> Reply {
        runtime().block_on(async {
            let mut client = Client::connect(&self.control).await.expect("reach the proxy");
            client.ask(&request).await.expect("an answer")
        })
    }

    /// Prepares, pauses and switches a tenant, all of which must work; microseconds of the pause.
    pub(crate) fn move_tenant(&self, tenant: &str, to: &str) -> u64 {
        let tenant = tenant.to_owned();
        runtime().block_on(async {
            let mut client = Client::connect(&self.control).await.expect("reach the proxy");
            prepare(&mut client, &tenant, to).await;
            let begun = std::time::Instant::now();
            let reply = client.ask(&Request::Pause { tenant: tenant.clone(), limit_ms: 5000 }).await;
            assert!(matches!(reply, Ok(Reply::Drained { .. })), "{reply:?}");
            let reply = client.ask(&Request::Switch { tenant: tenant.clone() }).await;
            assert!(matches!(&reply, Ok(Reply::Switched { failed, .. }) if failed.is_empty()), "{reply:?}");
            begun.elapsed().as_micros() as u64
        })
    }
}

/// Prepares until every session is.
pub(crate) async fn prepare(client: &mut Client, tenant: &str, to: &str) {
    for _ in 0..100 {
        let request = Request::Prepare {
            tenant: tenant.into(),
            target: TargetSpec::Name(to.into()),
            verifiers: Default::default(),
            limit_ms: 10_000,
        };
        match client.ask(&request).await.expect("an answer") {
            Reply::Prepared { waiting, pinned, failed, .. } if waiting.is_empty() => {
                assert!(pinned.is_empty() && failed.is_empty(), "{pinned:?} {failed:?}");
                return;
            }
            Reply::Prepared { .. } => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            other => panic!("{other:?}"),
        }
    }
    panic!("sessions stay busy");
}

/// A runtime for clients.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}
