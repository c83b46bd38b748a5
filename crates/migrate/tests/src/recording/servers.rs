//! Two servers and a proxy in front of the first, in a thread of this process: their starts are not measured.

use std::path::PathBuf;
use std::sync::mpsc;
use stillpoint_testing::{port::free_port, postgresql::Cluster};

/// Two servers and a proxy; the proxy ends with the process.
pub struct ProxiedServers {
    /// The server with the database `shop`.
    pub source: Cluster,
    /// The server on which recordings are replayed.
    pub target: Cluster,
    port: u16,
    dir: tempfile::TempDir,
}

impl ProxiedServers {
    /// A directory for the files of a measurement.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Starts both servers with these settings, and the proxy; the shop has its tables and no clients.
    #[track_caller]
    pub fn start(settings: &[&str]) -> ProxiedServers {
        let (source, target) = (Cluster::start(settings), Cluster::start(settings));
        source.sql("postgres", "CREATE DATABASE shop");
        super::Shop::open(&source);
        let dir = tempfile::tempdir().expect("make a directory");
        let servers = ProxiedServers { source, target, port: free_port(), dir };
        let (control, routes) = (servers.control(), servers.dir.path().join("routes.json"));
        let text = format!(
            "listen = [\"127.0.0.1:{}\"]\ncontrol = {control:?}\nroutes = {routes:?}\n[servers.old]\n\
             host = \"127.0.0.1\"\nport = {}\n[tenants.shop]\nserver = \"old\"\n",
            servers.port,
            servers.source.port()
        );
        let path = servers.dir.path().join("proxy.toml");
        std::fs::write(&path, &text).expect("write the proxy's configuration");
        let (ready, started) = mpsc::channel();
        std::thread::spawn(move || {
            let failed = ready.clone();
            if let Err(error) = stillpoint_migrate_proxy::run(&path, |_| ready.send(None).expect("the starter waits")) {
                let _ = failed.send(Some(error.to_string()));
            }
        });
        assert_eq!(started.recv().expect("the proxy starts or says why not"), None, "{text}");
        servers
    }

    /// The proxy's control socket.
    pub fn control(&self) -> PathBuf {
        self.dir.path().join("proxy.sock")
    }

    pub(super) fn conninfo(&self) -> String {
        format!("host=127.0.0.1 port={} user=postgres dbname=shop", self.port)
    }
}
