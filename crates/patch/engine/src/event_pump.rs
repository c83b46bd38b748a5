//! Service of a traced process while no transition migrates its threads: new threads and processes continue at once.

use crate::Error;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use stillpoint_patch_tracee::{self as tracee, Event, Process, Session, Stop, StopRequest, Stopped};

/// Time limit for a carrier: threads leave the calls in which they cannot carry by themselves, mostly soon.
const CARRIER_TIMEOUT: Duration = Duration::from_secs(5);
const VISIT_TIMEOUT: Duration = Duration::from_secs(20);
const CARRIER_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Largest number of events served after the given time: a program that makes threads without pause always has another event.
pub(crate) const EVENTS_MAX: usize = 256;
/// Weight of an event while a thread is stopped on request: that thread has to wait for it.
const EVENT_WEIGHT_STOPPED: usize = 32;

/// Returns the weight of an event, out of [`EVENTS_MAX`], with this number of stopped threads.
pub(crate) fn weight(stopped_threads: usize) -> usize {
    if stopped_threads == 0 { 1 } else { EVENT_WEIGHT_STOPPED }
}

/// Serves events until `until` has passed; with a time in the past, only events that are already there.
pub(crate) fn serve(process: &Process, session: &mut Session<'_>, until: Instant) -> Result<(), Error> {
    let mut late = 0;
    while late < EVENTS_MAX
        && let Some(event) = session.pump(until)?
    {
        late += usize::from(Instant::now() > until);
        match event {
            Event::NewThread(tid) | Event::Stopped(tid) => session.resume_thread(tid)?,
            Event::NewProcess { pid, .. } => session.release(pid)?,
            Event::Exec | Event::Exited(_) => return Err(Error::Ended(process.pid())),
            _ => {}
        }
    }
    Ok(())
}

/// Number of threads that may be on their way to a stop at the same time. On an idle machine it is one: a stop takes some microseconds, and
/// a second thread would only be stopped while it waits for its turn. On a busy machine it is many: each thread first needs its turn on a
/// processor, and all can wait for theirs together.
#[derive(Debug)]
pub(crate) struct Window {
    size: usize,
}

const WINDOW_MAX: usize = 64;
/// Duration after which a stop counts as slow: it waited for a processor.
pub(crate) const SLOW_STOP: Duration = Duration::from_micros(150);

impl Window {
    pub(crate) fn new() -> Self {
        Window { size: 1 }
    }

    /// Returns the number of further threads that may be asked while `requested` are on their way.
    pub(crate) fn room(&self, requested: usize) -> usize {
        self.size.saturating_sub(requested)
    }

    /// Widens the window: no thread stopped within [`SLOW_STOP`].
    pub(crate) fn widen(&mut self) {
        self.size = (self.size * 2).min(WINDOW_MAX);
    }

    /// Narrows the window if more than two threads are stopped at once: the others are stopped for nothing.
    pub(crate) fn narrow(&mut self, stopped_threads: usize) {
        if stopped_threads > 2 {
            self.size = (self.size / 2).max(1);
        }
    }
}

/// Pauses between stops. When threads are stopped one after another, the tracer uses one processor almost alone, and on a small machine
/// other threads wait for it. So the tracer pauses from time to time, and the target has all processors meanwhile.
#[derive(Debug)]
pub(crate) struct Pace {
    since: Instant,
}

/// Duration of stops without a pause: shorter than a client would notice.
const BURST_DURATION: Duration = Duration::from_micros(500);
/// Duration of a pause: as long as a burst, for a number of threads that takes some bursts only. With many more threads the pauses get
/// shorter, so that all of them together stay below about a tenth of a second.
const PAUSE_DURATION: Duration = Duration::from_micros(500);
const FULL_PAUSE_THREADS: usize = 128;

impl Pace {
    pub(crate) fn new() -> Pace {
        Pace { since: Instant::now() }
    }

    /// Returns true if it is time for a pause.
    pub(crate) fn is_over(&self) -> bool {
        self.since.elapsed() >= BURST_DURATION
    }

    /// Returns the duration of a pause with this number of threads to migrate.
    pub(crate) fn pause_duration(threads: usize) -> Duration {
        PAUSE_DURATION.mul_f64((FULL_PAUSE_THREADS as f64 / threads.max(1) as f64).min(1.0))
    }
}

/// Does `work` on every thread, including new ones, one after another; only that thread is stopped meanwhile.
pub(crate) fn each_thread(
    process: &Process,
    session: &mut Session<'_>,
    work: impl FnMut(&mut Stopped<'_>) -> Result<(), Error>,
    stopped: &mut dyn FnMut(tracee::Tid, u64),
) -> Result<u32, Error> {
    session.expect_all_to_stop(true);
    let result = visit_each(process, session, work, stopped);
    session.expect_all_to_stop(false);
    result
}

fn visit_each(
    process: &Process,
    session: &mut Session<'_>,
    mut work: impl FnMut(&mut Stopped<'_>) -> Result<(), Error>,
    stopped: &mut dyn FnMut(tracee::Tid, u64),
) -> Result<u32, Error> {
    let mut visited = BTreeSet::new();
    let mut requested = BTreeSet::new();
    let mut at_stop = Vec::new();
    let mut window = Window::new();
    let deadline = Instant::now() + VISIT_TIMEOUT;
    loop {
        let threads = session.threads();
        requested.retain(|tid| session.knows(*tid));
        for tid in threads
            .into_iter()
            .filter(|tid| !visited.contains(tid))
            .take(window.room(requested.len()))
            .collect::<Vec<_>>()
        {
            visited.insert(tid);
            match session.request_stop(tid)? {
                StopRequest::Pending => drop(requested.insert(tid)),
                StopRequest::AlreadyStopped => at_stop.push(tid),
                // a new thread is visited when its event comes
                StopRequest::New => drop(visited.remove(&tid)),
                StopRequest::Gone | StopRequest::InVfork => {}
            }
        }
        window.narrow(at_stop.len());
        for tid in at_stop.drain(..) {
            requested.remove(&tid);
            visit(session, tid, &mut work, stopped)?;
        }
        let unvisited = session.threads().iter().any(|tid| !visited.contains(tid));
        if requested.is_empty() && !unvisited && !session.seize_unreported()? {
            return Ok(visited.len() as u32);
        }
        if Instant::now() > deadline {
            session.withdraw_requests()?;
            let tid = requested.first().copied().unwrap_or(process.pid().leader());
            return Err(
                tracee::Error::Unstoppable { tid, why: "the scheduler gives it no processor time".into() }.into()
            );
        }
        let mut until = if requested.is_empty() { Instant::now() } else { Instant::now() + SLOW_STOP };
        let mut served = 0;
        while served < EVENTS_MAX
            && let Some(event) = session.pump(until)?
        {
            match event {
                Event::Stopped(tid) => at_stop.push(tid),
                // Visited at once because it is stopped anyway: in a storm of new threads one would always be left.
                Event::NewThread(tid) => {
                    visited.insert(tid);
                    visit(session, tid, &mut work, stopped)?;
                }
                Event::NewProcess { pid, .. } => session.release(pid)?,
                Event::Exec | Event::Exited(_) => return Err(Error::Ended(process.pid())),
                _ => {}
            }
            until = Instant::now();
            served += weight(at_stop.len());
        }
        if at_stop.is_empty() && !requested.is_empty() {
            window.widen();
        }
    }
}

fn visit(
    session: &mut Session<'_>,
    tid: tracee::Tid,
    work: &mut impl FnMut(&mut Stopped<'_>) -> Result<(), Error>,
    stopped: &mut dyn FnMut(tracee::Tid, u64),
) -> Result<(), Error> {
    if let Stop::Stopped(mut thread) = session.stop(tid)? {
        work(&mut thread)?;
        let stopped_ns = thread.resume()?;
        stopped(tid, stopped_ns);
    }
    Ok(())
}

/// Does `work` on a thread that can carry remote calls.
pub(crate) fn with_carrier<T>(
    process: &Process,
    session: &mut Session<'_>,
    mut work: impl FnMut(&mut Stopped<'_>) -> Result<T, Error>,
    stopped: &mut dyn FnMut(tracee::Tid, u64),
) -> Result<T, Error> {
    let deadline = Instant::now() + CARRIER_TIMEOUT;
    loop {
        serve(process, session, Instant::now())?;
        match session.stop_carrier() {
            Ok(mut carrier) => {
                let result = work(&mut carrier);
                let tid = carrier.tid();
                let stopped_ns = carrier.resume()?;
                stopped(tid, stopped_ns);
                return result;
            }
            Err(tracee::Error::NoCarrier { .. } | tracee::Error::BadCarrier { .. }) if Instant::now() < deadline => {}
            Err(error) => return Err(error.into()),
        }
        serve(process, session, Instant::now() + CARRIER_RETRY_INTERVAL)?;
    }
}

/// Does `work` with all threads traced. A failure because the process has ended or runs another program now is returned as
/// [`Error::Ended`].
pub(crate) fn traced<T: Send>(
    process: &Process,
    work: impl FnOnce(&mut Session<'_>) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    let result = tracee::attach(process, work);
    result.map_err(Error::from).and_then(|inner| inner).map_err(|error| ended_or(process, error))
}

/// Returns [`Error::Ended`] if the process has ended, otherwise the given error.
pub(crate) fn ended_or(process: &Process, error: Error) -> Error {
    match error {
        Error::Ended(pid) => Error::Ended(pid),
        _ if has_ended(process, &error) => Error::Ended(process.pid()),
        other => other,
    }
}

/// Returns true if the process has ended or runs another program, as the error says or as the process itself shows.
pub(crate) fn has_ended(process: &Process, error: &Error) -> bool {
    matches!(error, Error::Ended(_) | Error::Tracee(tracee::Error::Exec(_))) || !process.is_alive()
}
