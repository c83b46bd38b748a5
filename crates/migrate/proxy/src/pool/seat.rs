//! A session's seat: what it keeps, and the shared connection that it has at present.

use super::catalog::{Judge, Verdict};
use super::connection::Facts;
use super::effect::Effect;
use super::waiter::Wish;
use super::{Pool, Pools};
use crate::buffer;
use crate::clock::now_us;
use crate::error::{Refusal, SessionError};
use crate::session::session_state::SessionState;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use stillpoint_migrate_wire::frame::Message;
use stillpoint_migrate_wire::frontend;

/// Bytes at the end of a part of a text that are judged with the next part: no word is longer.
const OVERLAP: usize = 128;

/// Reason why a session keeps its connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Hold {
    /// State that a question may show to be gone.
    State(String),
    /// To its end.
    Always(&'static str),
    /// While a tenant moves, or is captured.
    Move,
}

/// A session's part of a pool.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) pools: Arc<Pools>,
    pub(crate) pool: Arc<Pool>,
    session: u32,
    /// Packet that begins a connection of the session.
    pub(crate) startup: Arc<[u8]>,
    /// State that it keeps, as far as that can be made again.
    pub(crate) state: Arc<SessionState>,
    /// Settings that its server gave it.
    pub(crate) inherited: Arc<BTreeMap<Vec<u8>, Vec<u8>>>,
    pub(crate) customs: Arc<BTreeSet<Vec<u8>>>,
    /// Facts about the connection that it has; `None` if it has none.
    pub(crate) facts: Option<Box<Facts>>,
    /// It has a connection that is like the session: the client's messages may pass.
    pub(crate) is_ready: bool,
    /// It waits for a connection.
    pub(crate) is_queued: bool,
    /// Only its task may give it a connection.
    pub(crate) needs_task: bool,
    pub(crate) hold: Option<Hold>,
    judge: Arc<Judge>,
    /// Effects that its statements may have had since its state was known.
    verdict: Verdict,
    /// The same of its prepared statements, each time that they are executed.
    of_prepared: Verdict,
    of_unnamed: Verdict,
    /// The unnamed statement of the server process is the session's own, or there is none.
    has_unnamed: bool,
    /// The next unnamed statement may end its hold.
    holds_unnamed: bool,
    /// End of a long text, of which more comes.
    tail: Option<Vec<u8>>,
}

/// State of a session's own, and settings that its server gave it.
pub(crate) type OwnState = (SessionState, BTreeMap<Vec<u8>, Vec<u8>>);

/// Seat's next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SeatStep {
    /// Nothing is to be done.
    Stay,
    /// The connection may be given back.
    Release,
    /// The session's task must find out what the session keeps.
    Settle,
    /// The client has sent a message that needs a connection.
    Acquire,
    /// The connection must be made like the session.
    MakeAlike,
}

impl Seat {
    /// The seat of a session that has just logged in, with the connection of its login.
    pub(crate) fn new(pools: Arc<Pools>, pool: Arc<Pool>, session: u32, facts: Box<Facts>) -> Seat {
        let judge = pools.catalog.judge();
        Seat {
            pools,
            pool,
            session,
            startup: facts.startup.clone(),
            state: Arc::default(),
            inherited: Arc::default(),
            customs: Arc::default(),
            facts: Some(facts),
            is_ready: false,
            is_queued: false,
            needs_task: false,
            hold: None,
            judge,
            verdict: Verdict { effect: Effect::Unknown, ..Verdict::default() },
            of_prepared: Verdict::default(),
            of_unnamed: Verdict::default(),
            has_unnamed: true,
            holds_unnamed: false,
            tail: None,
        }
    }

    pub(crate) fn wish(&self) -> Wish<'_> {
        Wish { session: self.session, startup: &self.startup, state: &self.state, customs: &self.customs }
    }

    /// Returns true if the session has no connection.
    #[inline]
    pub(crate) fn is_vacant(&self) -> bool {
        self.facts.is_none()
    }

    /// Next step of a session outside of a transaction.
    pub(crate) fn step_at_boundary(&self) -> SeatStep {
        match &self.hold {
            _ if !self.is_ready => SeatStep::Stay,
            Some(Hold::Always(_) | Hold::Move) => SeatStep::Stay,
            _ if self.must_settle() => SeatStep::Settle,
            Some(Hold::State(_)) => SeatStep::Stay,
            None if self.needs_task || self.pools.catalog.is_due(now_us()) => SeatStep::Settle,
            None => SeatStep::Release,
        }
    }

    /// Returns true if the server must be asked before the connection may be given back.
    pub(crate) fn must_settle(&self) -> bool {
        self.verdict.effect >= Effect::Unknown || self.keeps_sequences()
    }

    /// Returns true if the session may have values of sequences, which its client may ask for.
    pub(crate) fn keeps_sequences(&self) -> bool {
        let asked_for = self.pools.catalog.clients_read_sequences.load(Ordering::Relaxed);
        self.verdict.effect == Effect::Sequences && asked_for
    }

    /// Effects that its statements may have had since its state was known.
    pub(crate) fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Takes the answer about its state; `is_first` if no statement of the client has passed.
    pub(crate) fn settle(&mut self, answer: Result<OwnState, String>, is_first: bool) {
        match answer {
            Ok((state, inherited)) => {
                let binding = state.binding();
                let state = Arc::new(state);
                if let Some(facts) = &mut self.facts {
                    if is_first {
                        facts.first = state.clone();
                    }
                    if facts.state.is_none() {
                        facts.inherited = inherited.into();
                    }
                    facts.learn(&state);
                    self.inherited = facts.inherited.clone();
                    self.customs = facts.customs.clone();
                }
                self.state = state;
                self.hold = binding.map(Hold::State);
            }
            Err(why) => self.hold = Some(Hold::State(why)),
        }
        if self.verdict.defines {
            self.pools.catalog.changed();
        }
        self.verdict = Verdict::default();
        if !is_first {
            self.verdict.effect = Effect::Sequences;
        }
    }

    /// Keeps the connection until the client sends its next unnamed statement: the present one is too long.
    pub(crate) fn hold_unnamed(&mut self) {
        self.hold.get_or_insert(Hold::State("its unnamed statement is longer than 1 MiB".into()));
        self.holds_unnamed = true;
    }

    /// Returns true if the server process may have values of sequences of another session.
    pub(crate) fn has_others_sequences(&self) -> bool {
        self.facts.as_ref().and_then(|facts| facts.sequences).is_some_and(|session| session != self.session)
    }

    /// Records that its state is not known.
    pub(crate) fn unsettle(&mut self) {
        self.verdict.effect = self.verdict.effect.max(Effect::Unknown);
    }

    /// Keeps the connection to the session's end: it is not certain that all answers have come.
    pub(crate) fn hold_answers(&mut self) {
        self.verdict.effect = Effect::Hidden;
    }

    /// Takes the facts of its connection, which goes back.
    pub(crate) fn vacate(&mut self) -> Option<Box<Facts>> {
        let mut facts = self.facts.take()?;
        facts.session = self.session;
        if self.verdict.effect >= Effect::Sequences {
            facts.sequences = Some(self.session);
        }
        self.verdict = Verdict::default();
        self.is_ready = false;
        self.has_unnamed = false;
        Some(facts)
    }

    /// Takes a connection: `first` is the client's next message, `parsed` its own unnamed statement. Returns true if
    /// nothing needs to be made alike.
    pub(crate) fn occupy(&mut self, facts: Box<Facts>, first: &Message<'_>, parsed: &[u8]) -> bool {
        self.update_judge();
        let is_own = facts.session == self.session;
        let is_alike =
            facts.state.as_ref().is_some_and(|state| Arc::ptr_eq(state, &self.state) || **state == *self.state);
        if is_alike && let Some(state) = &facts.state {
            self.state = state.clone();
        }
        let same_inherited = Arc::ptr_eq(&facts.inherited, &self.inherited) || facts.inherited == self.inherited;
        if same_inherited {
            self.inherited = facts.inherited.clone();
        }
        self.has_unnamed = is_own || makes_unnamed(first);
        let needs_unnamed = !self.has_unnamed && (!parsed.is_empty() || uses_unnamed(first));
        let others_sequences = facts.sequences.is_some_and(|session| session != self.session);
        let needs_discard = others_sequences && self.may_read_sequences(first);
        self.is_ready = is_alike && same_inherited && !needs_unnamed && !needs_discard;
        self.is_queued = false;
        self.facts = Some(facts);
        self.is_ready
    }

    /// Returns true if the session may ask for values that another session left in the process.
    fn may_read_sequences(&self, first: &Message<'_>) -> bool {
        self.pools.catalog.clients_read_sequences.load(Ordering::Relaxed)
            || self.judge.has_sequence_readers()
            || self.judge.judge(first.body, false).reads_sequences
    }

    fn update_judge(&mut self) {
        if !self.pools.catalog.is_present(&self.judge) {
            self.judge = self.pools.catalog.judge();
        }
    }

    /// Records that the connection is like the session.
    pub(crate) fn alike(&mut self) {
        (self.is_ready, self.has_unnamed) = (true, true);
    }

    /// Judges a message that passes.
    ///
    /// # Errors
    ///
    /// The message uses what another session may have left in the server process.
    pub(crate) fn note(&mut self, message: &Message<'_>) -> Result<(), SessionError> {
        let unknown = Verdict { effect: Effect::Unknown, ..Verdict::default() };
        if self.holds_unnamed && makes_unnamed(message) {
            self.holds_unnamed = false;
            self.unsettle();
        }
        match message.tag {
            b'Q' => {
                let verdict = self.judge(message, message.body);
                self.has_unnamed = true;
                self.add(verdict)?;
            }
            b'P' => match frontend::parse_text(message.body) {
                Some((name, text)) => {
                    let verdict = self.judge(message, text);
                    if name.is_empty() {
                        self.has_unnamed = true;
                        self.of_unnamed = verdict;
                    } else {
                        self.of_prepared = self.of_prepared.and(verdict);
                        // The session has one more prepared statement.
                        self.add(unknown)?;
                    }
                    self.add(verdict)?;
                }
                // The name alone is longer than a buffer.
                None => self.add(Verdict { effect: Effect::Hidden, ..Verdict::default() })?,
            },
            b'B' | b'D' if uses_unnamed(message) => {
                if !self.has_unnamed {
                    let message = "unnamed prepared statement does not exist";
                    return Err(SessionError::Refused(Refusal::new("26000", message)));
                }
                self.add(self.of_unnamed)?;
            }
            b'B' => self.add(self.of_prepared)?,
            b'C' if message.body.first() == Some(&b'S') => self.add(unknown)?,
            b'F' => self.add(unknown)?,
            _ => {}
        }
        Ok(())
    }

    /// Judges a text of which more may come.
    fn judge(&mut self, message: &Message<'_>, text: &[u8]) -> Verdict {
        self.tail = (!message.is_whole()).then(|| text[text.len().saturating_sub(OVERLAP)..].to_vec());
        self.update_judge();
        if self.pools.catalog.is_stale() {
            // Functions may be new that this judge does not know.
            return Verdict { effect: Effect::Unknown, ..Verdict::default() }.and(self.judge.judge(text, true));
        }
        self.judge.judge(text, true)
    }

    /// Judges more of a long text.
    ///
    /// # Errors
    ///
    /// The same as for [`Seat::note`].
    pub(crate) fn note_rest(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
        let Some(mut text) = self.tail.take() else { return Ok(()) };
        for part in bytes.chunks(buffer::LEN) {
            text.extend_from_slice(part);
            let verdict = self.judge.judge(&text, false).and(Verdict { effect: Effect::Unknown, ..Verdict::default() });
            (self.of_unnamed, self.of_prepared) = (self.of_unnamed.and(verdict), self.of_prepared.and(verdict));
            self.add(verdict)?;
            text.drain(..text.len().saturating_sub(OVERLAP));
        }
        self.tail = Some(text);
        Ok(())
    }

    fn add(&mut self, verdict: Verdict) -> Result<(), SessionError> {
        if verdict.defines {
            self.pools.catalog.changed();
        }
        if verdict.reads_sequences {
            self.reads_sequences()?;
        }
        self.verdict = self.verdict.and(verdict);
        Ok(())
    }

    /// The client asks what its sequences gave it: from now on sessions of this database that may want to know keep
    /// their connections.
    fn reads_sequences(&mut self) -> Result<(), SessionError> {
        if !self.pools.catalog.clients_read_sequences.swap(true, Ordering::Relaxed) {
            tracing::warn!("clients use currval or lastval: sessions that write keep their connections from now on");
        }
        // Its own transaction may already have used a sequence here: nothing can be discarded.
        if self.has_others_sequences() && self.is_ready {
            let message = "this session's values of sequences are with a connection that it gave back";
            return Err(SessionError::Refused(Refusal::new("55000", message).hint("Connect again.")));
        }
        Ok(())
    }
}

/// Returns true if the message begins with an unnamed statement of its own, or ends the one that is there.
fn makes_unnamed(message: &Message<'_>) -> bool {
    match message.tag {
        b'Q' => true,
        b'P' => message.body.first() == Some(&0),
        _ => false,
    }
}

/// Returns true if the message uses the unnamed statement.
fn uses_unnamed(message: &Message<'_>) -> bool {
    match message.tag {
        b'B' => frontend::bind_statement(message.body).is_none_or(<[u8]>::is_empty),
        b'D' => message.body.starts_with(b"S\0"),
        _ => false,
    }
}
