//! A capture that starts again after each end: for tests that check what clients see meanwhile.

use super::{Proxy, runtime};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use stillpoint_migrate_control::{Client, ControlError, Reply, Request};
use tokio::sync::watch;

/// Result of all captures.
#[derive(Debug, Default)]
pub(crate) struct CapturedRows {
    /// Number of transactions.
    pub(crate) transactions: usize,
    /// Number of rows that they wrote.
    pub(crate) rows: usize,
    /// Reasons for the ends of captures.
    pub(crate) over: Vec<String>,
}

/// A tenant that is captured as long as this exists.
pub(crate) struct RepeatedCapture {
    stop: watch::Sender<bool>,
    rows: Arc<AtomicUsize>,
    thread: std::thread::JoinHandle<CapturedRows>,
}

impl RepeatedCapture {
    /// Begins; from here on every transaction is captured, or the capture's end is recorded.
    pub(crate) fn start(proxy: &Proxy, tenant: &str) -> RepeatedCapture {
        let (stop, mut stopped) = watch::channel(false);
        let (begun, first) = std::sync::mpsc::channel();
        let (control, tenant) = (proxy.control.clone(), tenant.to_owned());
        let rows = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&rows);
        let thread = std::thread::spawn(move || {
            runtime().block_on(async move {
                let mut seen = CapturedRows::default();
                while !*stopped.borrow() {
                    let mut client = Client::connect(&control).await.expect("reach the proxy");
                    let request = Request::Capture { tenant: tenant.clone(), limit_ms: 2_000, statements: false };
                    match client.ask(&request).await {
                        Ok(Reply::Capturing { .. }) => {}
                        Err(ControlError::Refused(why)) => {
                            seen.over.push(why);
                            continue;
                        }
                        other => panic!("{other:?}"),
                    }
                    let _ = begun.send(());
                    loop {
                        let line = tokio::select! {
                            line = client.next() => line.expect("a line"),
                            _ = stopped.changed() => return seen,
                        };
                        match line {
                            Reply::Syncset(set) => {
                                seen.transactions += usize::from(!set.rows.is_empty());
                                seen.rows += set.rows.len();
                                counted.store(seen.rows, Ordering::Relaxed);
                            }
                            Reply::CaptureOver { why } => {
                                seen.over.push(why);
                                break;
                            }
                            _ => {}
                        }
                    }
                }
                seen
            })
        });
        first.recv().expect("a capture begins");
        RepeatedCapture { stop, rows, thread }
    }

    /// Number of rows so far.
    pub(crate) fn rows(&self) -> usize {
        self.rows.load(Ordering::Relaxed)
    }

    /// Ends the captures and returns their result.
    pub(crate) fn finish(self) -> CapturedRows {
        self.stop.send_replace(true);
        self.thread.join().expect("the follower works")
    }
}
