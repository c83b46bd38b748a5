//! Sessions that want a connection, and what they get.

use super::connection::{Connection, Facts, Slot};
use crate::session::session_state::SessionState;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Properties that a session wants of its server process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish<'a> {
    pub(crate) session: u32,
    pub(crate) startup: &'a Arc<[u8]>,
    pub(crate) state: &'a Arc<SessionState>,
    pub(crate) customs: &'a Arc<BTreeSet<Vec<u8>>>,
}

fn fits(startup: &Arc<[u8]>, customs: &BTreeSet<Vec<u8>>, facts: &Facts) -> bool {
    let same_startup = Arc::ptr_eq(startup, &facts.startup) || startup == &facts.startup;
    same_startup && (facts.customs.is_empty() || facts.customs.is_subset(customs))
}

impl Wish<'_> {
    /// Returns true if the connection can be made like the session.
    pub(crate) fn fits(&self, connection: &Connection) -> bool {
        fits(self.startup, self.customs, &connection.facts)
    }

    /// Returns 2 if the session itself had it last, 1 if nothing needs to be made alike, else 0.
    pub(crate) fn is_alike(&self, connection: &Connection) -> u8 {
        let facts = &connection.facts;
        match facts.state.as_ref().is_some_and(|state| Arc::ptr_eq(state, self.state) || state == self.state) {
            true => 1 + u8::from(facts.session == self.session),
            false => 0,
        }
    }
}

/// A session that waits.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) session: u32,
    pub(crate) since: Instant,
    startup: Arc<[u8]>,
    customs: Arc<BTreeSet<Vec<u8>>>,
    to: Recipient,
}

/// A thread that passes bytes of sessions on.
pub(crate) trait PassingThread: Debug + Send + Sync {
    /// Gives a session what it waited for.
    fn grant(&self, session: u32, grant: Grant);
}

/// Owner of a session that waits.
#[derive(Debug)]
pub(crate) enum Recipient {
    /// A thread that passes bytes on.
    Thread(Arc<dyn PassingThread>),
    /// The session's task.
    Task(oneshot::Sender<Grant>),
}

/// End of a wait.
#[derive(Debug)]
pub(crate) enum Grant {
    Connection(Connection),
    /// The session may open one.
    Open(Slot),
    /// The time is over.
    TimedOut,
}

impl Waiter {
    pub(crate) fn new(wish: &Wish<'_>, to: Recipient) -> Waiter {
        let (startup, customs) = (wish.startup.clone(), wish.customs.clone());
        Waiter { session: wish.session, since: super::now(), startup, customs, to }
    }

    pub(super) fn fits(&self, connection: &Connection) -> bool {
        fits(&self.startup, &self.customs, &connection.facts)
    }

    /// Returns true if this thread passes the session's bytes on.
    pub(crate) fn is_at(&self, thread: &Arc<impl PassingThread>) -> bool {
        matches!(&self.to, Recipient::Thread(known) if std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(thread)))
    }

    /// Gives the session what it waited for. If it is gone, what it would have got is closed.
    pub(crate) fn deliver(self, grant: Grant) {
        match self.to {
            Recipient::Thread(thread) => thread.grant(self.session, grant),
            Recipient::Task(sender) => drop(sender.send(grant)),
        }
    }
}
