//! pgbench: PostgreSQL's own load, which aborts a client at the first statement that fails.

use super::{Cluster, tool};
use crate::server::ChildGuard;
use rustix::process::Signal;
use std::io::Read;
use std::process::Stdio;

/// A running pgbench.
#[derive(Debug)]
pub struct Bench {
    process: ChildGuard,
}

impl Bench {
    /// Makes pgbench's tables, `scale` times 100,000 accounts.
    #[track_caller]
    pub fn prepare(cluster: &Cluster, scale: u32) {
        let arguments = ["-i", "-q", "-s", &scale.to_string(), "postgres"];
        let made = tool(cluster, "pgbench", arguments).output().expect("run pgbench");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }

    /// Starts `clients` of them; `extra` are further arguments.
    #[track_caller]
    pub fn start(cluster: &Cluster, clients: u32, extra: &[&str]) -> Bench {
        let clients = clients.to_string();
        // Only the limit of a test that hangs: pgbench ends its time by SIGALRM to itself.
        let arguments = ["-n", "-c", &clients, "-j", "2", "-T", "7200"];
        let mut command = tool(cluster, "pgbench", arguments);
        command.args(extra).arg("postgres").stdout(Stdio::piped()).stderr(Stdio::piped());
        Bench { process: ChildGuard::from_child(command.spawn().expect("start pgbench")) }
    }

    /// Ends it; panics unless every statement succeeded and no connection was lost. Returns the number of transactions.
    #[track_caller]
    pub fn assert_clean(mut self) -> u64 {
        self.process.signal(Signal::ALARM);
        let mut text = String::new();
        let child = self.process.child();
        let (out, errors) = (child.stdout.take(), child.stderr.take());
        out.map(|mut o| o.read_to_string(&mut text));
        errors.map(|mut e| e.read_to_string(&mut text));
        let status = crate::wait::until("pgbench to end", || self.process.ended());
        assert!(status.success(), "pgbench ended with {status}:\n{text}");
        let number = |label: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(label))?;
            line.split_whitespace().next()?.split('/').next()?.parse::<u64>().ok()
        };
        assert_eq!(number("number of failed transactions:").unwrap_or(0), 0, "{text}");
        let done = number("number of transactions actually processed:").unwrap_or(0);
        assert!(done > 0, "{text}");
        done
    }
}
