//! A mirror: a share of a tenant's reads is run again, by sessions of its own, on the tenant's server and on a target, and
//! the answers are compared. No client waits for it or gets anything of it.
//!
//! ```text
//! sessions ──tap──▶ queue ──▶ workers: ask the source what the statement is, run it on both, compare ──▶ tally
//! ```
//!
//! A worker logs in as the client whose statement it runs, gives its sessions the client's settings and prepared
//! statements, and lets them write nothing: it can do no more than the client. Only statements that change nothing
//! anywhere are run (see [`judge`]).

mod answer;
mod judge;
mod tally;
pub(crate) mod tap;
mod worker;

use crate::mutex::lock;
use crate::session::session_state::SessionState;
use crate::target::Target;
use crate::tenant::Tenant;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_migrate_control::MirrorReport;
use stillpoint_migrate_postgres::Credential;
use stillpoint_migrate_wire::startup::Startup;
use tally::Tally;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::watch;

/// Statements that wait for a worker; later ones are left out.
const QUEUE_MAX: usize = 64;
/// Most workers.
pub(crate) const WORKERS_MAX: u32 = 32;
/// Millionths in a whole.
pub(crate) const WHOLE_PPM: u64 = 1_000_000;

/// A session whose statements are mirrored, in one state.
pub(crate) struct MirroredSession {
    pub(crate) startup: Startup,
    pub(crate) user: String,
    pub(crate) credential: Credential,
    pub(crate) state: SessionState,
}

/// A client's statement.
pub(crate) struct Sample {
    session: Arc<MirroredSession>,
    /// Text of the statement.
    text: Vec<u8>,
    /// Messages from Parse or Bind to Sync.
    messages: Vec<u8>,
}

/// Parameters of a mirror.
pub(crate) struct MirrorOrder {
    /// The tenant's server, and the target.
    pub(crate) servers: [Arc<Target>; 2],
    pub(crate) share_ppm: u32,
    pub(crate) workers: u32,
    /// Time limit of a connection.
    pub(crate) connect_limit: Duration,
}

/// A mirror as sessions see it.
pub(crate) struct Mirror {
    share_ppm: u64,
    drawn: AtomicU64,
    queue: Sender<Sample>,
    tally: Tally,
    end: watch::Sender<Option<String>>,
}

/// A mirror that runs; dropping this ends it.
pub(crate) struct RunningMirror(pub(crate) Arc<Mirror>);

impl Mirror {
    /// Starts the workers.
    pub(crate) fn start(order: MirrorOrder, tenant: Arc<Tenant>) -> io::Result<RunningMirror> {
        let (queue, samples) = channel(QUEUE_MAX);
        let share_ppm = u64::from(order.share_ppm).min(WHOLE_PPM);
        let (tally, end) = (Tally::default(), watch::Sender::new(None));
        let mirror = Arc::new(Mirror { share_ppm, drawn: AtomicU64::new(0), queue, tally, end });
        let of_workers = mirror.clone();
        let work = move || match Builder::new_current_thread().enable_all().build_local(LocalOptions::default()) {
            Ok(runtime) => runtime.block_on(of_workers.work(order, samples, &tenant)),
            Err(error) => of_workers.end(format!("the mirror cannot start: {error}")),
        };
        // The thread is not waited for: it closes its connections at the end of the mirror.
        std::thread::Builder::new().name("mirror".into()).spawn(work)?;
        Ok(RunningMirror(mirror))
    }

    /// Runs the workers until the mirror ends; then their connections are closed.
    async fn work(self: Arc<Self>, order: MirrorOrder, samples: Receiver<Sample>, tenant: &Arc<Tenant>) {
        let samples = Arc::new(tokio::sync::Mutex::new(samples));
        let order = Arc::new(order);
        let mut workers = tokio::task::JoinSet::new();
        for _ in 0..order.workers.clamp(1, WORKERS_MAX) {
            let work = worker::run(self.clone(), order.clone(), samples.clone(), tenant.clone());
            workers.spawn_local(work);
        }
        self.over().await;
    }

    /// Ends the mirror; the first reason counts.
    pub(crate) fn end(&self, why: String) {
        self.end.send_if_modified(|end| end.is_none() && end.replace(why).is_none());
    }

    /// Waits for the end; returns its reason.
    pub(crate) async fn over(&self) -> String {
        let mut end = self.end.subscribe();
        let ended = end.wait_for(Option::is_some).await;
        ended.ok().and_then(|end| end.clone()).unwrap_or_default()
    }

    /// Returns true once the mirror has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.end.borrow().is_some()
    }

    /// Sums so far.
    pub(crate) fn report(&self) -> MirrorReport {
        self.tally.report()
    }

    /// Counts a statement; returns true if it belongs to the share.
    fn draws(&self) -> bool {
        let before = self.drawn.fetch_add(self.share_ppm, Ordering::Relaxed);
        // The sum of the shares passes a whole number: evenly spread, and exact in the long run.
        self.tally.see();
        before / WHOLE_PPM != (before + self.share_ppm) / WHOLE_PPM
    }
}

impl Drop for RunningMirror {
    fn drop(&mut self) {
        self.0.end("the mirror was ended".into());
    }
}

/// Shared list of the numbers of server processes.
#[derive(Debug, Default)]
struct Processes(Mutex<Vec<u32>>);

impl Processes {
    fn enter(&self, id: u32) {
        lock(&self.0).push(id);
    }

    fn leave(&self, id: u32) {
        lock(&self.0).retain(|other| *other != id);
    }

    fn all(&self) -> Vec<u32> {
        lock(&self.0).clone()
    }
}

impl std::fmt::Debug for Mirror {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mirror({} ppm)", self.share_ppm)
    }
}

#[cfg(test)]
mod tests_support {
    use super::*;

    /// A mirror without workers, and the end of its queue.
    pub(super) fn mirror(share_ppm: u64) -> (Arc<Mirror>, Receiver<Sample>) {
        let (queue, samples) = channel(QUEUE_MAX);
        let (tally, end) = (Tally::default(), watch::Sender::new(None));
        (Arc::new(Mirror { share_ppm, drawn: AtomicU64::new(0), queue, tally, end }), samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_drawn_evenly() {
        for (share_ppm, of_ten_thousand) in [(0, 0), (100, 1), (10_000, 100), (333_333, 3333), (1_000_000, 10_000)] {
            let (mirror, _samples) = tests_support::mirror(share_ppm);
            assert_eq!((0..10_000).filter(|_| mirror.draws()).count(), of_ten_thousand, "{share_ppm}");
            assert_eq!(mirror.report().seen, 10_000);
        }
    }
}
