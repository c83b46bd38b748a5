//! Who runs first: the tracer while a thread stands because of it, the target at every other time.
//!
//! The obvious way is one high priority throughout. Then the tool, while it links and reads, takes the processor from
//! the very server that it came to help, for milliseconds on a small machine. With an ordinary one throughout, a stopped
//! thread stands until the scheduler gets round to us. So it changes with what stands.

use crate::sys;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// On a machine that has nothing to spare, preparing would never end: after this long it goes on like everybody else.
const GIVE_WAY_LIMIT: Duration = Duration::from_millis(50);

/// The priority of the tracing OS thread, which is the only one to hold this.
#[derive(Debug, Default)]
pub(crate) struct Priority {
    raised: bool,
    /// Stops follow one another closely: in between it is not lowered.
    pub(crate) busy: bool,
}

impl Priority {
    /// From here on a thread may stand, or come to stand at any moment.
    pub(crate) fn raise(&mut self) {
        if !self.raised {
            self.raised = true;
            sys::run_before_others();
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
            sys::run_like_others();
        }
    }
}

/// The calling OS thread runs only when nobody else wants the processor, until this is dropped or 50 ms have passed.
///
/// For everything that is to be prepared before a process is traced. Where a priority once given up could not be taken
/// back (without `CAP_SYS_NICE`), nothing is changed.
#[derive(Debug)]
pub struct GivingWay {
    guard: Option<(Sender<()>, JoinHandle<()>)>,
}

impl GivingWay {
    /// Begins it.
    pub fn begin() -> GivingWay {
        let tid = sys::own_tid();
        let (over, wait) = mpsc::channel::<()>();
        let watch = move || {
            if wait.recv_timeout(GIVE_WAY_LIMIT) == Err(RecvTimeoutError::Timeout) {
                sys::set_ordinary(tid);
            }
        };
        if !sys::may_raise() {
            return GivingWay { guard: None };
        }
        // The watching thread is made first: it inherits the ordinary priority.
        let Ok(watcher) = thread::Builder::new().name("patience".to_owned()).spawn(watch) else {
            return GivingWay { guard: None };
        };
        sys::run_after_others();
        GivingWay { guard: Some((over, watcher)) }
    }
}

impl Drop for GivingWay {
    fn drop(&mut self) {
        if let Some((over, watcher)) = self.guard.take() {
            sys::run_like_others();
            drop(over);
            // it sleeps in the channel, or has ended
            let _ = watcher.join();
        }
    }
}
