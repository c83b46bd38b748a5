//! Who runs first: the tracer while a thread stands because of it, the target at every other time.
//!
//! The obvious way is one high priority throughout. Then the tool, while it links and reads, takes the processor from
//! the very server that it came to help, for milliseconds on a small machine: an ordinary thread that runs is not
//! preempted by one that wakes up before it had its slice. With an ordinary or low one throughout, a stopped thread
//! stands until the scheduler gets round to us. So it changes with what stands.

use crate::sys;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// On a machine that has nothing to spare, whoever runs after everybody else never gets his turn: after this long it goes
/// on like everybody else.
const PREPARING: Duration = Duration::from_millis(50);
/// The same for a thread that traces: newborn threads and signals wait for it.
const TRACING: Duration = Duration::from_millis(5);

#[derive(Debug)]
struct Turn {
    /// Something stands: before everybody else.
    raised: bool,
    /// Otherwise after everybody else, or like them.
    patient: bool,
}

/// An OS thread that runs after all others, for a limited time.
#[derive(Debug)]
struct Patient {
    turn: Arc<Mutex<Turn>>,
    watcher: Option<(Sender<()>, JoinHandle<()>)>,
}

fn locked(turn: &Mutex<Turn>) -> MutexGuard<'_, Turn> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Patient {
    /// Makes the calling OS thread one. Where a priority once given up could not be taken back (without
    /// `CAP_SYS_NICE`), it stays as it is.
    fn begin(patience: Duration) -> Patient {
        let turn = Arc::new(Mutex::new(Turn { raised: false, patient: false }));
        let mut patient = Patient { turn: turn.clone(), watcher: None };
        if !sys::run_like_others() || !sys::may_raise() {
            return patient;
        }
        let (tid, (over, wait)) = (sys::own_tid(), mpsc::channel::<()>());
        let watch = move || {
            if wait.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                let mut turn = locked(&turn);
                turn.patient = false;
                if !turn.raised {
                    sys::set_ordinary(tid);
                }
            }
        };
        // The watching thread is made first: it inherits the ordinary priority.
        if let Ok(watcher) = thread::Builder::new().name("patience".to_owned()).spawn(watch) {
            patient.watcher = Some((over, watcher));
            locked(&patient.turn).patient = true;
            sys::run_after_others();
        }
        patient
    }

    fn set(&self, raised: bool) {
        let mut turn = locked(&self.turn);
        turn.raised = raised;
        match (raised, turn.patient) {
            (true, _) => sys::run_before_others(),
            (false, true) => sys::run_after_others(),
            (false, false) => drop(sys::run_like_others()),
        }
    }
}

impl Drop for Patient {
    fn drop(&mut self) {
        if let Some((over, watcher)) = self.watcher.take() {
            sys::run_like_others();
            drop(over);
            // it waits in the channel, or has ended
            let _ = watcher.join();
        }
    }
}

/// The priority of the tracing OS thread, which is the only one to hold this.
#[derive(Debug)]
pub(crate) struct Priority {
    patient: Patient,
    raised: bool,
    /// Stops follow one another closely: in between it is not lowered.
    pub(crate) busy: bool,
}

impl Priority {
    /// Of the calling OS thread.
    pub(crate) fn begin() -> Priority {
        Priority { patient: Patient::begin(TRACING), raised: false, busy: false }
    }

    /// From here on a thread may stand, or come to stand at any moment.
    pub(crate) fn raise(&mut self) {
        if !self.raised {
            self.raised = true;
            self.patient.set(true);
        }
    }

    /// Whether there is anything to lower.
    pub(crate) fn is_raised(&self) -> bool {
        self.raised && !self.busy
    }

    /// Nobody stands, and nobody is expected to.
    pub(crate) fn lower(&mut self) {
        if self.raised {
            self.raised = false;
            self.patient.set(false);
        }
    }
}

/// The calling OS thread runs only when nobody else wants the processor, until this is dropped or 50 ms have passed.
///
/// For everything that is to be prepared before a process is traced. Where a priority once given up could not be taken
/// back (without `CAP_SYS_NICE`), nothing is changed.
#[derive(Debug)]
pub struct GivingWay {
    _patient: Patient,
}

impl GivingWay {
    /// Begins it.
    pub fn begin() -> GivingWay {
        GivingWay { _patient: Patient::begin(PREPARING) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tool_takes_short_turns_and_gives_way_where_it_may() {
        // Policies belong to a thread; this one is the test's own.
        thread::spawn(|| {
            let patient = Patient::begin(TRACING * 1000);
            if patient.watcher.is_none() {
                return; // nothing is changed where it could not be taken back
            }
            assert_eq!(sys::scheduling().0, libc::SCHED_IDLE);
            patient.set(true);
            assert_eq!(sys::scheduling().0, libc::SCHED_FIFO);
            drop(patient);
            let (policy, slice) = sys::scheduling();
            // A kernel that does not know slices tells none.
            assert_eq!((policy, if slice == 0 { sys::SLICE_NS } else { slice }), (libc::SCHED_OTHER, sys::SLICE_NS));
        })
        .join()
        .unwrap();
    }
}
