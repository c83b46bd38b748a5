//! Load generator: an open loop on one thread.
//!
//! Requests are due by a schedule that does not wait for answers, and a latency counts from the due time: a pause of the server for 200 ms
//! shows in every request that was due meanwhile, not in one per connection ("coordinated omission"). A due request without a free
//! connection waits in the schedule itself.
//!
//! Resolution: due times and answers are taken with `CLOCK_MONOTONIC` in nanoseconds. Between requests the thread sleeps on a timerfd until
//! [`Plan::spin`] before the due time and polls from then on, so a request is sent within some microseconds of its time as long as the
//! kernel runs the thread. Its lateness is recorded for each request (`late_us`) and reported as `lateness`, so that a pause of the client
//! is not attributed to the server.

mod connection;
mod counters;
mod driver;
mod fill;
mod ldap;
mod memcached;
mod plan;
mod probes;
mod redis;
mod resp;
mod responses;
mod schedule;
mod sink;
mod timer;
mod values;
mod workload;

pub use counters::{Counters, Snapshot};
pub use fill::{Fill, fill};
pub use plan::{Mix, Plan, Protocol, Target};
pub use schedule::Arrivals;
pub(crate) use sink::Sink;
pub(crate) use workload::Weights;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};
use stillpoint_host::clock::since_1970;

use crate::clock::now_ns;
use crate::error::{Error, Result};
use crate::record::{End, Header};
use crate::summary::Summary;
use driver::Driver;
use values::Values;
use workload::Workload;

/// Time from the opening of the last connection to the start of the schedule.
const START_DELAY_NS: u64 = 2_000_000;

/// Result of a load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// Parameters of the load.
    pub header: Header,
    /// Counts, latencies and blackout.
    pub summary: Summary,
    /// Figures of the connections.
    pub end: End,
    /// Descriptions of the first errors, wrong answers and dropped connections.
    pub complaints: Vec<String>,
}

impl Finished {
    /// Returns true if every request was answered rightly and no connection was lost.
    pub fn is_clean(&self) -> bool {
        let end = &self.end;
        let all_alive = end.idle_alive == self.header.idle && end.blocking_alive == self.header.blocking;
        self.summary.counts.failed() == 0 && end.dropped == 0 && all_alive
    }
}

/// Load that runs in a thread of its own.
///
/// Dropping it stops the load without waiting for it.
#[derive(Debug)]
pub struct Running<T> {
    counters: Arc<Counters>,
    thread: Option<JoinHandle<Result<T>>>,
}

/// Load by a plan.
pub type Load = Running<Finished>;

impl Load {
    /// Checks the plan, opens all connections and starts the schedule. When this returns, requests are being sent.
    ///
    /// # Errors
    /// The plan contradicts itself, the record cannot be created, or the server cannot be reached.
    pub fn start(plan: Plan) -> Result<Load> {
        plan.check()?;
        Running::spawn(move |counters, ready| dispatch(&plan, counters, &ready))
    }
}

impl<T: Send + 'static> Running<T> {
    /// Runs a load in a thread of its own, and waits until it has begun.
    pub(crate) fn spawn(
        run: impl FnOnce(Arc<Counters>, SyncSender<Header>) -> Result<T> + Send + 'static,
    ) -> Result<Running<T>> {
        let counters = Arc::new(Counters::default());
        let (ready, started) = sync_channel(1);
        let for_thread = Arc::clone(&counters);
        let thread = std::thread::Builder::new()
            .name("load".into())
            .spawn(move || run(for_thread, ready))
            .map_err(|source| Error::System { call: "clone", source })?;
        let load = Running { counters, thread: Some(thread) };
        match started.recv() {
            Ok(_) => Ok(load),
            // The thread ended before it began.
            Err(_) => Err(load.wait().err().unwrap_or_else(|| Error::Panicked("it ended before it began".into()))),
        }
    }
}

impl<T> Running<T> {
    /// Returns the live counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns true if it has ended by itself.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the schedule now; requests in progress are still awaited.
    pub fn stop(&self) {
        self.counters.stop();
    }

    /// Waits for the end of the schedule and of all requests, and for the check of a history.
    ///
    /// # Errors
    /// The load failed, its record could not be written, or its thread panicked.
    pub fn wait(mut self) -> Result<T> {
        let thread = self.thread.take().ok_or_else(|| Error::Panicked("it has been waited for before".into()))?;
        thread.join().unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(Error::Panicked(text.unwrap_or_else(|| "no message".into())))
        })
    }
}

impl<T> Drop for Running<T> {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop();
        }
    }
}

impl Counters {
    /// Ends the schedule of the load now.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn dispatch(plan: &Plan, counters: Arc<Counters>, ready: &SyncSender<Header>) -> Result<Finished> {
    // A unique number, so that values of another run of the same program are recognized.
    let run = (now_ns() ^ plan.seed ^ u64::from(std::process::id()) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let run = (run >> 32) as u32;
    let values = |keys, value_bytes| -> Result<Values> {
        let mut values = Values::new(run, keys, value_bytes);
        values.loaded = fill::is_loaded(plan, keys)?;
        Ok(values)
    };
    match &plan.protocol {
        Protocol::Redis { mix, keys, value_bytes } => {
            let redis = redis::Redis::new(&mix.0, run, values(*keys, *value_bytes)?, plan.connections);
            drive(plan, redis, counters, ready)
        }
        Protocol::Memcached { mix, keys, value_bytes } => {
            drive(plan, memcached::Memcached::new(&mix.0, values(*keys, *value_bytes)?), counters, ready)
        }
        Protocol::Tcp { value_bytes } => drive(plan, probes::Echo::new(*value_bytes), counters, ready),
        Protocol::Http { path } => drive(plan, probes::Http::new(&plan.target.host(), path), counters, ready),
        Protocol::Ldap { base, records } => drive(plan, ldap::Ldap::new(base, *records), counters, ready),
    }
}

fn drive<W: Workload>(
    plan: &Plan,
    workload: W,
    counters: Arc<Counters>,
    ready: &SyncSender<Header>,
) -> Result<Finished> {
    plan.allow_files()?;
    let kinds = workload.kinds();
    let mut driver = Driver::new(plan, workload, plan.target.resolve()?, counters)?;
    driver.connect()?;
    let start_ns = now_ns() + START_DELAY_NS;
    let header = plan.header(kinds, start_ns, since_1970().as_secs());
    let sink = plan.record.as_deref().map(|path| Sink::create(path, &header)).transpose()?;
    // The thread that started the load may have dropped the receiver; the load continues.
    let _ = ready.send(header.clone());
    let ended = driver.run(start_ns, sink)?;
    Ok(Finished { header, summary: ended.summary, end: ended.end, complaints: ended.complaints })
}
