//! Commands to sessions, and their reports.

use crate::capture::Capture;
use crate::mirror::Mirror;
use crate::target::Target;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;

/// Reports one session's result of a request that all sessions of a tenant got. Dropping it reports that the session is
/// gone.
#[derive(Debug)]
pub(crate) struct Reporter {
    pub(crate) id: u32,
    pub(crate) to: UnboundedSender<(u32, Result<(), String>)>,
}

impl Reporter {
    pub(crate) fn report(self, result: Result<(), String>) {
        // A failed send is ignored: the request has reached its limit, and its receiver is gone.
        let _ = self.to.send((self.id, result));
    }
}

/// Command to a session.
#[derive(Debug)]
pub(crate) enum Command {
    /// Open a counterpart at the target and keep it like the session here.
    Prepare(Arc<Target>, Option<Reporter>),
    /// Open a counterpart, unless there is already one without errors.
    PrepareAgain(Arc<Target>, Reporter),
    /// Forget the counterpart at the target.
    Abandon,
    /// Capture writes from the next boundary on.
    Capture(Arc<Capture>, Option<Reporter>),
    /// Copy reads for a mirror; `None` ends that.
    Mirror(Option<Arc<Mirror>>),
    /// Begin no new transaction; report once none is open.
    Pause(Reporter),
    /// Go on at the present server.
    Resume,
    /// Go on at the target.
    Switch(Reporter),
    /// End when no transaction is open.
    End,
}
