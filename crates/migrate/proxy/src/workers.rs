//! Threads that serve sessions, in pairs: one runs the sessions' tasks, the other passes bytes on ([`crate::forwarder`])
//! and waits for all of its sessions with one system call. A session stays with its pair, and with one of the two at a
//! time, so the threads share nothing of it.

use crate::error::StartError;
use crate::forwarder::Forwarder;
use crate::pending_connections::Arrival;
use crate::polled_stream::PolledStream;
use crate::proxy::Proxy;
use crate::session::startup;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use stillpoint_migrate_control::Origin;
use stillpoint_migrate_postgres::Raw;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Default number of thread pairs that serve sessions.
///
/// The obvious number is one for each processor. But nine tenths of the work is the kernel's, for the other ends of the
/// connections. A thread that serves twice the sessions finds twice as many ready each time that it wakes up. So half
/// of the processors are left to the other ends.
pub(crate) fn default_count(processors: usize) -> usize {
    (processors / 2).max(1)
}

struct Worker {
    connections: UnboundedSender<(PolledStream, Origin, Arrival)>,
    load: Arc<AtomicUsize>,
    forwarder: Arc<Forwarder>,
    threads: [JoinHandle<()>; 2],
}

/// All threads that serve sessions.
pub(crate) struct Workers {
    all: Vec<Worker>,
}

impl Workers {
    /// Starts `count` pairs of threads.
    pub(crate) fn start(count: usize, proxy: &Arc<Proxy>) -> Result<Workers, StartError> {
        let failed = |source| StartError::System { what: "a thread for sessions", source };
        let mut all = Vec::new();
        for number in 0..count {
            let (connections, receiver) = unbounded_channel();
            let load = Arc::new(AtomicUsize::new(0));
            let (forwarder, passing) = Forwarder::start(number).map_err(failed)?;
            let forwarder = Arc::new(forwarder);
            let (proxy, loaded, lends) = (proxy.clone(), load.clone(), forwarder.clone());
            // The new thread builds a runtime of one thread; here its failure is received.
            let (built, told) = sync_channel(1);
            let serve = move || match Builder::new_current_thread().enable_all().build_local(LocalOptions::default()) {
                Ok(runtime) => {
                    drop(built);
                    runtime.block_on(work(receiver, proxy, loaded, lends));
                }
                Err(error) => drop(built.send(error)),
            };
            let thread = std::thread::Builder::new().name(format!("sessions-{number}")).spawn(serve).map_err(failed)?;
            if let Ok(error) = told.recv() {
                return Err(failed(error));
            }
            all.push(Worker { connections, load, forwarder, threads: [thread, passing] });
        }
        Ok(Workers { all })
    }

    /// Gives a connection to the thread that serves the fewest.
    pub(crate) fn serve(&self, raw: Raw, origin: Origin, arrival: Arrival) {
        let Ok(stream) = PolledStream::from(raw) else { return };
        if let Some(worker) = self.all.iter().min_by_key(|worker| worker.load.load(Ordering::Relaxed)) {
            worker.load.fetch_add(1, Ordering::Relaxed);
            let _ = worker.connections.send((stream, origin, arrival));
        }
    }

    /// Number of connections that are being served.
    pub(crate) fn load(&self) -> usize {
        self.all.iter().map(|worker| worker.load.load(Ordering::Relaxed)).sum()
    }

    /// Ends the threads with all their sessions.
    pub(crate) fn stop(self) {
        for worker in &self.all {
            worker.forwarder.end();
        }
        let (forwarder, threads): (Vec<_>, Vec<_>) =
            self.all.into_iter().map(|worker| (worker.forwarder, worker.threads)).unzip();
        for thread in threads.into_iter().flatten() {
            let _ = thread.join();
        }
        // The bell is closed only now: a closed bell wakes no thread, even if it was rung before.
        drop(forwarder);
    }
}

async fn work(
    mut connections: UnboundedReceiver<(PolledStream, Origin, Arrival)>,
    proxy: Arc<Proxy>,
    load: Arc<AtomicUsize>,
    forwarder: Arc<Forwarder>,
) {
    while let Some((stream, origin, arrival)) = connections.recv().await {
        let (proxy, load, forwarder) = (proxy.clone(), load.clone(), forwarder.clone());
        tokio::task::spawn_local(async move {
            match stream.register() {
                Ok(raw) => startup::serve(raw, origin, arrival, proxy, forwarder).await,
                Err(error) => tracing::warn!(%error, "a connection cannot be served"),
            }
            load.fetch_sub(1, Ordering::Relaxed);
        });
    }
}
