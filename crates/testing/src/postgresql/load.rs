//! pgbench in the background, and its result.

use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

/// A running pgbench; it is ended when dropped.
#[derive(Debug)]
pub struct Load {
    child: Child,
    text: Option<JoinHandle<String>>,
}

/// Result of a pgbench.
#[derive(Debug, Clone)]
pub struct LoadOutcome {
    /// True if it ended with exit code 0: pgbench aborts a client at its first error.
    pub success: bool,
    /// Transactions that were committed.
    pub transactions: u64,
    /// Transactions that failed, and clients that were aborted.
    pub failed: u64,
    /// Transactions a second, without the time for connecting.
    pub tps: f64,
    /// All that it printed.
    pub text: String,
}

impl Load {
    pub(crate) fn spawn(mut command: Command) -> Load {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start pgbench");
        let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let errors = std::thread::spawn(move || read_all(&mut err));
        let text = std::thread::spawn(move || read_all(&mut out) + &errors.join().expect("read pgbench's errors"));
        Load { child, text: Some(text) }
    }

    /// Returns true if it still runs.
    pub fn running(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_none()
    }

    /// Kills it in the middle of its work, and waits until its sessions' transactions have ended too.
    pub fn end(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends a load with `-T` as if its time were over: its clients finish their transactions and begin no others.
    pub fn stop(self) -> LoadOutcome {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            // ESRCH: it has ended by itself.
            let _ = kill_process(pid, Signal::ALARM);
        }
        self.finish()
    }

    /// Waits for its end.
    pub fn finish(mut self) -> LoadOutcome {
        let status = self.child.wait().expect("a child can be waited for");
        let text = self.text.take().map(|text| text.join().expect("read what pgbench printed")).unwrap_or_default();
        let number = |prefix: &str| -> Option<f64> {
            let rest = text.lines().find_map(|line| line.strip_prefix(prefix))?;
            rest.split([' ', '/']).next()?.parse().ok()
        };
        let aborted = text.lines().filter(|line| line.contains("aborted") && line.contains("client ")).count() as u64;
        LoadOutcome {
            success: status.success(),
            transactions: number("number of transactions actually processed: ").unwrap_or(0.0) as u64,
            failed: number("number of failed transactions: ").unwrap_or(0.0) as u64 + aborted,
            tps: number("tps = ").unwrap_or(0.0),
            text,
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(from: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    // After an error the bytes that were read before are returned.
    let _ = from.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
