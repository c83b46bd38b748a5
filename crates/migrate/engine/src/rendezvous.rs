//! Several databases that change sides together: each is a migration of its own, and all of them pause their clients at the same time
//! and move when all are through.
//!
//! ```text
//!  shop   copy ... follows    | hold |  prepare  | meet |  pause, fence, drain  | meet |  switch
//!  stock  copy ........ follows      |  prepare         |  pause, fence, drain         |  switch
//!                        all follow -+   all prepared --+             all drained -----+
//! ```
//!
//! If one of them gives up a pause, all of them do, and try again together. If one ends before the switch, the others end too, with
//! their clients where they were. Only a failure in the moment of the switch itself may leave databases on different sides: the proxy
//! moves each on its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use stillpoint_migrate_apply::Error;
use tokio::sync::Notify;

/// Place at which all wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before the pause.
    Prepared,
    /// In the pause.
    Drained,
}

/// State of all members.
#[derive(Debug, Default)]
struct State {
    members: usize,
    /// Members that the check accepts, or that were accepted before, by their place in the list.
    checked: Vec<bool>,
    /// Members whose target follows, by their place in the list.
    following: Vec<bool>,
    /// Members that wait before the pause, and in it.
    waiting: [usize; 2],
    /// Number of times that all have met at each place.
    met: [u64; 2],
    /// Pause that one of the members has given up, as the number of meetings before it.
    given_up: Option<u64>,
    /// Reason why one of them has ended.
    ended: Option<String>,
    /// True once all have met in a pause: from then on each moves by itself.
    has_moved: bool,
}

/// Databases that change sides together.
#[derive(Debug)]
struct Together {
    state: Mutex<State>,
    changed: Notify,
}

/// One of them.
#[derive(Debug, Clone)]
pub struct Member {
    all: Arc<Together>,
    number: usize,
}

impl Together {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leaves the place of a meeting if its future is dropped.
struct Waiting<'t> {
    all: &'t Together,
    place: Place,
    met: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.all.lock();
        if state.met[self.place as usize] == self.met {
            let waiting = &mut state.waiting[self.place as usize];
            *waiting = waiting.saturating_sub(1);
        }
    }
}

impl Member {
    /// Members of one move.
    pub(crate) fn all(members: usize) -> Vec<Member> {
        let state =
            State { members, checked: vec![false; members], following: vec![false; members], ..State::default() };
        let all = Arc::new(Together { state: Mutex::new(state), changed: Notify::new() });
        (0..members).map(|number| Member { all: Arc::clone(&all), number }).collect()
    }

    /// Tells that the check accepts this member, or has accepted it before.
    pub(crate) fn mark_checked(&self) {
        self.all.lock().checked[self.number] = true;
        self.all.changed.notify_waiters();
    }

    /// Waits until the check has accepted all, so that nothing is begun if one is refused.
    ///
    /// # Errors
    ///
    /// Another member has ended.
    pub(crate) async fn meet_checked(&self) -> Result<(), Error> {
        self.mark_checked();
        loop {
            let changed = self.all.changed.notified();
            {
                let state = self.all.lock();
                if state.checked.iter().all(|checked| *checked) {
                    return Ok(());
                }
                if let Some(why) = &state.ended {
                    return Err(Error::WrongPhase(why.clone()));
                }
            }
            changed.await;
        }
    }

    /// Tells if this member's target follows; returns true if those of all do.
    ///
    /// # Errors
    ///
    /// Another member has ended.
    pub(crate) fn all_follow(&self, is_following: bool) -> Result<bool, Error> {
        let mut state = self.all.lock();
        if let Some(why) = &state.ended {
            return Err(Error::WrongPhase(why.clone()));
        }
        state.following[self.number] = is_following;
        Ok(state.following.iter().all(|follows| *follows))
    }

    /// Waits until all are ready for the pause.
    ///
    /// # Errors
    ///
    /// Another member has ended.
    pub(crate) async fn meet_before_pause(&self) -> Result<(), Error> {
        self.meet(Place::Prepared).await
    }

    /// Waits until all can switch; `limit` is the length of the pause, for messages.
    ///
    /// # Errors
    ///
    /// Another member has given up this pause, or has ended.
    pub(crate) async fn meet_in_pause(&self, limit: Duration) -> Result<(), Error> {
        match self.meet(Place::Drained).await {
            Err(Error::TimedOut { what, who, .. }) => Err(Error::TimedOut { what, limit, who }),
            met => met,
        }
    }

    /// Tells the others that this member gives up its pause.
    pub(crate) fn give_up_pause(&self) {
        let mut state = self.all.lock();
        state.given_up = Some(state.met[Place::Prepared as usize]);
        drop(state);
        self.all.changed.notify_waiters();
    }

    async fn meet(&self, place: Place) -> Result<(), Error> {
        let at = place as usize;
        let waiting = {
            let mut state = self.all.lock();
            state.waiting[at] += 1;
            Waiting { all: &self.all, place, met: state.met[at] }
        };
        loop {
            let changed = self.all.changed.notified();
            {
                let mut state = self.all.lock();
                if state.met[at] > waiting.met || state.has_moved {
                    return Ok(());
                }
                if let Some(why) = &state.ended {
                    return Err(Error::WrongPhase(why.clone()));
                }
                if place == Place::Drained && state.given_up == Some(state.met[Place::Prepared as usize]) {
                    let what = "the pause of another database".into();
                    return Err(Error::TimedOut { what, limit: Duration::ZERO, who: Vec::new() });
                }
                if state.waiting[at] == state.members {
                    state.waiting[at] = 0;
                    state.met[at] += 1;
                    state.has_moved |= place == Place::Drained;
                    drop(state);
                    self.all.changed.notify_waiters();
                    return Ok(());
                }
            }
            changed.await;
        }
    }

    /// Reason why another member has ended.
    pub(crate) fn why_ended(&self) -> Option<String> {
        self.all.lock().ended.clone()
    }

    /// Tells the others that this member has changed sides before.
    pub(crate) fn leave(&self) {
        let mut state = self.all.lock();
        state.members -= 1;
        (state.checked[self.number], state.following[self.number]) = (true, true);
        drop(state);
        self.all.changed.notify_waiters();
    }

    /// Tells the others that this member has ended without a change of sides; returns false if they have changed sides already.
    pub(crate) fn end(&self, why: String) -> bool {
        let mut state = self.all.lock();
        if !state.has_moved && state.ended.is_none() {
            state.ended = Some(why);
        }
        let has_moved = state.has_moved;
        drop(state);
        self.all.changed.notify_waiters();
        !has_moved
    }
}
