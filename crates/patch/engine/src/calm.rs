//! Serving a traced process while no transition moves its threads: whatever is born runs on at once.

use crate::Error;
use std::time::{Duration, Instant};
use stillpoint_patch_tracee::{self as tracee, Event, Process, Session, Stopped};

/// A carrier is waited for: threads leave the calls that cannot carry by themselves, mostly soon.
const CARRIER_LIMIT: Duration = Duration::from_secs(5);
const CARRIER_RETRY: Duration = Duration::from_millis(1);

/// Serves events until `until` has passed; with a time in the past, what is there already.
pub(crate) fn serve(process: &Process, session: &mut Session<'_>, until: Instant) -> Result<(), Error> {
    while let Some(event) = session.pump(until)? {
        match event {
            Event::NewThread(tid) => session.let_go(tid)?,
            Event::NewProcess { pid, .. } => session.release(pid)?,
            Event::Exec | Event::Exited(_) => return Err(Error::Ended(process.pid())),
            _ => {}
        }
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
    let deadline = Instant::now() + CARRIER_LIMIT;
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
        serve(process, session, Instant::now() + CARRIER_RETRY)?;
    }
}
