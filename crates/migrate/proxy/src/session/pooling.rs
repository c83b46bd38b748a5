//! A session's task and the pool: what the session keeps is asked for, connections are given back, opened, and made like
//! the session.

use super::counterpart::{self, TargetLogin, note_parameters};
use super::pump::{Admission, Event};
use super::session_state::{self, Batch, SessionState};
use super::{Session, query_state, send_terminate};
use crate::command::Reporter;
use crate::error::{Refusal, SessionError};
use crate::forwarder::seats::{queue_is_full, waited_too_long};
use crate::link;
use crate::polled_stream::PolledStream;
use crate::pool::Acquired;
use crate::pool::catalog::Reading;
use crate::pool::connection::{Connection, Facts, Slot};
use crate::pool::effect::Effect;
use crate::pool::seat::{Hold, OwnState, Seat};
use crate::pool::waiter::{Grant, Recipient, Waiter};
use crate::server_process::ServerProcess;
use crate::session::state_tracker::CUSTOM_MAX;
use crate::target::Target;
use crate::tenant::Tenant;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use stillpoint_migrate_postgres::{Answers, Ready, Stream, exchange};
use stillpoint_migrate_wire::frame::put;
use stillpoint_migrate_wire::frontend::put_close_statement;
use tokio::sync::oneshot;

/// Longest time for a question of the proxy's own.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Reasons why a session has its connection for itself from the start.
const ENCRYPTED: &str = "its connection to the server is encrypted";
const NO_SECRET: &str = "its login cannot be repeated: the proxy does not have its password's verifier";

impl Session {
    /// Finds out what a new session has from its server, and gives its connection back if that is possible.
    pub(super) async fn begin_sharing(&mut self, process: ServerProcess) -> Result<(), SessionError> {
        let Some(config) = self.tenant.pool_config() else { return Ok(()) };
        if self.is_replication {
            return Ok(());
        }
        let encrypted = self.pump.server.is_tls().then_some(ENCRYPTED);
        if let Some(why) = encrypted.or((!self.credential.is_repeatable()).then_some(NO_SECRET)) {
            self.entry.set_kept(Some(why.to_owned()));
            return Ok(());
        }
        let pools = self.pools.clone();
        let pool = pools.of_user(&self.entry.user, &config);
        let startup: Arc<[u8]> = link::startup_packet(&self.startup, &self.server).into();
        let facts = Facts::new(startup, process, self.pump.parameters.clone(), None, &pools.backends);
        self.pump.seat = Some(Box::new(Seat::new(pools, pool, self.entry.id, facts)));
        self.settle().await
    }

    /// Handles an event of the seat; `None` if it is another event.
    pub(super) async fn handle_seat(&mut self, event: Event) -> Result<Option<Event>, SessionError> {
        match event {
            Event::Settle => self.settle().await?,
            Event::NeedsServer(slot) => self.connect(slot).await?,
            Event::MakeAlike => self.make_alike().await?,
            other => return Ok(Some(other)),
        }
        Ok(None)
    }

    /// Decides if the session may give its connection back, and gives it back. No transaction is open.
    pub(super) async fn settle(&mut self) -> Result<(), SessionError> {
        self.read_functions().await?;
        let Some(seat) = &mut self.pump.seat else { return Ok(()) };
        let is_first = seat.facts.as_ref().is_some_and(|facts| facts.state.is_none()) && !seat.is_ready;
        let verdict = seat.verdict();
        if verdict.effect == Effect::Hidden {
            seat.hold = Some(Hold::Always("a statement may have left something that no view shows"));
        } else if verdict.effect == Effect::Unknown {
            let state = self.query_own_state().await?;
            let Some(seat) = &mut self.pump.seat else { return Ok(()) };
            seat.settle(state, is_first);
        }
        let Some(seat) = &mut self.pump.seat else { return Ok(()) };
        if seat.keeps_sequences() {
            seat.hold =
                Some(Hold::Always("it may have used a sequence, and clients of this database ask for its values"));
        }
        if self.pump.tracker.unnamed_lost {
            seat.hold_unnamed();
        }
        self.after_settling()
    }

    /// Gives the connection back, or keeps it.
    fn after_settling(&mut self) -> Result<(), SessionError> {
        let Some(seat) = &mut self.pump.seat else { return Ok(()) };
        let has_state = seat.hold.is_some() || !seat.state.is_plain();
        let target = self.light_target.take_if(|_| has_state);
        if self.counterpart.is_some() || target.is_some() {
            seat.hold.get_or_insert(Hold::Move);
        }
        let Some(hold) = &seat.hold else {
            self.give_back();
            return Ok(());
        };
        let why = match hold {
            Hold::State(why) => why.clone(),
            Hold::Always(why) => (*why).to_owned(),
            Hold::Move => "the database moves".to_owned(),
        };
        seat.is_ready = true;
        if let Some(facts) = &mut seat.facts {
            facts.keep();
        }
        self.entry.set_kept(Some(why));
        if let Some(target) = target {
            self.prepare(target, None);
        }
        self.pump.scan_up()
    }

    /// Gives the connection back to the pool.
    pub(super) fn give_back(&mut self) {
        let Some(pool) = self.pump.seat.as_ref().map(|seat| seat.pool.clone()) else { return };
        self.entry.set_kept(None);
        let Some(connection) = self.pump.take_connection() else { return };
        if let Some((waiter, grant)) = pool.release(connection) {
            waiter.deliver(grant);
        }
    }

    /// State of the session's own, and settings that its server gave it.
    async fn query_own_state(&mut self) -> Result<Result<OwnState, String>, SessionError> {
        if crate::mutex::lock(&self.tenant.custom).len() >= CUSTOM_MAX {
            return Ok(Err("this database uses too many custom settings".into()));
        }
        let asked = tokio::time::timeout(ANSWER_TIMEOUT, query_state(&mut self.pump, &self.tenant)).await;
        let state = asked.map_err(|_| SessionError::TimedOut("a question about the session's state"))??;
        Ok(state.map(|mut state| {
            let inherited = state.take_inherited();
            (state, inherited)
        }))
    }

    /// Reads the functions of the database, if it is time.
    async fn read_functions(&mut self) -> Result<(), SessionError> {
        let Some(seat) = &self.pump.seat else { return Ok(()) };
        if !seat.pools.catalog.is_due(crate::clock::now_us()) || seat.is_vacant() {
            return Ok(());
        }
        let (pools, keep) = (seat.pools.clone(), seat.pool.keep());
        let Some(reading) = pools.catalog.begin() else { return Ok(()) };
        let question = session_state::functions_query(Reading::QUESTION);
        let answers = ask(&mut self.pump.server, &question.bytes, question.syncs).await?;
        self.pump.inject(&answers.aside);
        match answers.error {
            Some((code, message)) => {
                let message = stillpoint_migrate_wire::backend::without_values(&code, &message, "");
                tracing::warn!(
                    code,
                    message,
                    "cannot read the database's functions: each transaction is followed by a question"
                );
                reading.fail();
            }
            None => {
                let names = reading.end(answers.rows, &keep);
                let mut known = crate::mutex::lock(&self.tenant.custom);
                let room = CUSTOM_MAX.saturating_sub(known.len());
                known.extend(names.into_iter().take(room));
            }
        }
        Ok(())
    }

    /// Gets a connection for the client's next message.
    async fn connect(&mut self, slot: Option<Slot>) -> Result<(), SessionError> {
        if let Some((capture, _)) = &self.pending_capture {
            if capture.is_live() {
                return self.connect_captured().await;
            }
            self.pending_capture = None;
            self.share_again();
        }
        if let Some(slot) = slot {
            return self.open(Some(slot)).await;
        }
        let Some(seat) = &self.pump.seat else { return Ok(()) };
        let (sender, granted) = oneshot::channel();
        let wish = seat.wish();
        let (pool, id) = (seat.pool.clone(), self.entry.id);
        let acquired = pool.acquire(&wish, || Waiter::new(&wish, Recipient::Task(sender)));
        let grant = match acquired {
            Acquired::Connection(connection) => Grant::Connection(connection),
            Acquired::Open(slot) => Grant::Open(slot),
            Acquired::Full(limit) => return Err(queue_is_full(limit)),
            Acquired::Queued => {
                self.pump.mark_waiting();
                let _withdrawal = Withdrawal { pool: &pool, id };
                granted.await.unwrap_or(Grant::TimedOut)
            }
        };
        match grant {
            Grant::Connection(connection) => match self.pump.put_connection(connection)? {
                true => self.pump.scan_up(),
                false => self.make_alike().await,
            },
            Grant::Open(slot) => self.open(Some(slot)).await,
            Grant::TimedOut => Err(waited_too_long(pool.wait_ms())),
        }
    }

    /// Opens a connection that the session keeps while it is captured. No message passes before the capture has begun.
    async fn connect_captured(&mut self) -> Result<(), SessionError> {
        self.pump.admission = Admission::Closing;
        if let Some(seat) = &mut self.pump.seat {
            seat.hold.get_or_insert(Hold::Move);
        }
        self.open(None).await?;
        self.entry.set_kept(Some("its writes are captured".into()));
        self.begin_capture().await
    }

    /// Opens a connection: with a place in the pool, or one that does not count.
    pub(super) async fn open(&mut self, slot: Option<Slot>) -> Result<(), SessionError> {
        let Some(seat) = &self.pump.seat else { return Ok(()) };
        let startup = seat.startup.clone();
        let limit = self.proxy.settings().config.limits.connect();
        let ready = link::login(&self.server, &startup, &self.entry.user, &self.credential, limit).await?;
        let Ready { stream, leftover, parameters, key } = ready;
        let process =
            ServerProcess { server: self.server.clone(), key, ids: self.ids.clone(), cancels: Arc::default() };
        let Stream::Plain(raw) = stream else { return Err(SessionError::TimedOut("a connection without encryption")) };
        let stream = PolledStream::from(raw).map_err(SessionError::Handover)?;
        let facts = Facts::new(startup, process, Arc::new(parameters), slot, &self.pools.backends);
        self.pump.put_connection(Connection { stream, facts })?;
        self.pump.inject(&leftover);
        let (state, inherited) = self.query_own_state().await?.map_err(cannot_be_made)?;
        let Some(seat) = &mut self.pump.seat else { return Ok(()) };
        if let Some(facts) = &mut seat.facts {
            facts.first = Arc::new(state);
            facts.inherited = Arc::new(inherited);
            let first = facts.first.clone();
            facts.learn(&first);
        }
        self.make_alike().await
    }

    /// Makes the process of the connection like the session.
    async fn make_alike(&mut self) -> Result<(), SessionError> {
        let unnamed = std::mem::take(&mut self.pump.tracker.unnamed);
        let made = self.replay_state(&unnamed).await;
        self.pump.tracker.unnamed = unnamed;
        made?;
        if let Some(seat) = &mut self.pump.seat {
            seat.alike();
        }
        self.pump.scan_up()
    }

    async fn replay_state(&mut self, unnamed: &[u8]) -> Result<(), SessionError> {
        let Some(seat) = &mut self.pump.seat else { return Ok(()) };
        let (state, inherited) = (seat.state.clone(), seat.inherited.clone());
        let Some(facts) = &mut seat.facts else { return Ok(()) };
        let mut parameters = (*self.pump.parameters).clone();
        let mut is_complete = true;
        let same_inherited = facts.inherited == inherited;
        if facts.state.as_ref() != Some(&state) || !same_inherited {
            let mut batch = Batch::default();
            if facts.state.as_ref() != Some(&facts.first) {
                batch.query("DISCARD ALL");
            }
            state.replay_settings(&self.entry.user, &mut batch);
            let answers = ask(&mut self.pump.server, &batch.bytes, batch.syncs).await?;
            note_parameters(&mut parameters, &answers.aside);
            if let Some((code, message)) = answers.error {
                return Err(cannot_be_made(format!("{code}: {message}")));
            }
            if !same_inherited {
                is_complete = !self.set_inherited(&state, &inherited, &mut parameters).await?;
            }
            let mut batch = Batch::default();
            state.replay_statements(&mut batch);
            if batch.syncs > 0 {
                let answers = ask(&mut self.pump.server, &batch.bytes, batch.syncs).await?;
                // A statement whose table is gone: its client learns so when it uses it, and it is prepared again later.
                is_complete &= answers.error.is_none();
                note_parameters(&mut parameters, &answers.aside);
            }
        }
        let mut batch = Batch::default();
        if self.pump.seat.as_ref().is_some_and(|seat| seat.has_others_sequences()) {
            batch.query("DISCARD SEQUENCES");
        }
        match unnamed {
            [] => put_close_statement(&mut batch.bytes, b""),
            body => put(&mut batch.bytes, b'P', |to| to.extend_from_slice(body)),
        }
        batch.sync();
        // An unnamed statement that fails here has failed, or fails, for the client too.
        let answers = ask(&mut self.pump.server, &batch.bytes, batch.syncs).await?;
        note_parameters(&mut parameters, &answers.aside);
        let parameters = Arc::new(parameters);
        self.pump.take_parameters(parameters);
        let Some(seat) = &mut self.pump.seat else { return Ok(()) };
        if let Some(facts) = &mut seat.facts {
            facts.learn(&state);
            if !is_complete {
                facts.state = None;
            }
            facts.sequences = None;
            seat.inherited = facts.inherited.clone();
        }
        Ok(())
    }

    /// Gives the process the settings that the session has from another server or from before a change of its role.
    /// Returns true if any was set: from then on they are settings of the session's own.
    async fn set_inherited(
        &mut self,
        state: &SessionState,
        inherited: &std::collections::BTreeMap<Vec<u8>, Vec<u8>>,
        parameters: &mut std::collections::BTreeMap<String, Vec<u8>>,
    ) -> Result<bool, SessionError> {
        let Some(question) = state.with_inherited(inherited).inherited_query() else { return Ok(false) };
        let different = ask(&mut self.pump.server, &question.bytes, question.syncs).await?;
        let mut any = false;
        note_parameters(parameters, &different.aside);
        for row in different.rows {
            let [Some(name), Some(value)] = &row[..] else { continue };
            // The session's own value comes after this one and stays.
            if state.has_setting(name) {
                continue;
            }
            let batch = session_state::set(name, value);
            let answers = ask(&mut self.pump.server, &batch.bytes, batch.syncs).await?;
            note_parameters(parameters, &answers.aside);
            any |= answers.error.is_none();
        }
        if any && let Some(seat) = &mut self.pump.seat {
            seat.unsettle();
        }
        Ok(any)
    }

    /// Lets the session keep its connection while the tenant moves or is captured; opens one if it has none.
    pub(super) async fn keep_connection(&mut self) -> Result<(), SessionError> {
        let Some(seat) = &mut self.pump.seat else { return Ok(()) };
        let is_vacant = seat.is_vacant();
        seat.hold.get_or_insert(Hold::Move);
        if is_vacant {
            self.open(None).await?;
        }
        self.after_settling()
    }

    /// Lets the session share its connection again.
    pub(super) fn share_again(&mut self) {
        let Some(seat) = &mut self.pump.seat else { return };
        seat.needs_task = false;
        if seat.hold == Some(Hold::Move) {
            seat.hold = None;
            seat.unsettle();
            self.entry.set_kept(None);
        }
    }

    /// Ends the connection of a session that ends, unless another session may have it.
    pub(super) async fn end_connection(&mut self) {
        let shares = self.pump.seat.as_ref().is_some_and(|seat| seat.is_vacant());
        if !shares {
            send_terminate(&mut self.pump.server).await;
        }
    }

    /// Prepares a session that keeps nothing: a connection of the target's pool is opened for it, if there is room.
    pub(super) fn prepare_vacant(&mut self, target: Arc<Target>, reporter: Option<Reporter>) {
        let Some(config) = self.pump.seat.as_ref().map(|seat| seat.pool.config()) else { return };
        self.entry.prepared.store(false, Ordering::Relaxed);
        self.light_target = Some(target.clone());
        let login = self.login_at(&target);
        let (entry, tenant) = (self.entry.clone(), self.tenant.clone());
        tokio::task::spawn_local(async move {
            let pool = target.pools.of_user(&entry.user, &config);
            let _turn = target.place().await;
            let result = match pool.place() {
                Some(slot) => open_at_target(&login, &tenant, login.packet.as_slice().into(), slot).await,
                // Others of the same role have shown that it can log in there.
                None => Ok(()),
            };
            entry.prepared.store(result.is_ok(), Ordering::Relaxed);
            if let Some(reporter) = reporter {
                reporter.report(result);
            }
        });
    }

    /// The seat of a session that has moved with a connection of its own.
    pub(super) fn reseat(&mut self, target: &Arc<Target>, process: ServerProcess) {
        (self.pools, self.ids) = (target.pools.clone(), target.ids.clone());
        let Some(seat) = &mut self.pump.seat else { return };
        seat.pools = target.pools.clone();
        seat.pool = target.pools.of_user(&self.entry.user, &seat.pool.config());
        seat.startup = link::startup_packet(&self.startup, &target.server).into();
        let parameters = self.pump.parameters.clone();
        seat.facts = Some(Facts::new(seat.startup.clone(), process, parameters, None, &target.pools.backends));
        seat.unsettle();
        self.share_again();
    }

    /// Goes on at a target without a connection there.
    pub(super) fn move_vacant(&mut self, target: &Arc<Target>) -> Result<(), String> {
        let Some(seat) = &mut self.pump.seat else { return Err("it has no seat in a pool".into()) };
        if !seat.is_vacant() {
            return Err("the session is not ready".into());
        }
        seat.pools = target.pools.clone();
        seat.pool = target.pools.of_user(&self.entry.user, &seat.pool.config());
        seat.startup = link::startup_packet(&self.startup, &target.server).into();
        (self.pools, self.ids) = (target.pools.clone(), target.ids.clone());
        self.credential.stored =
            target.verifiers.get(&self.entry.user).cloned().or_else(|| self.credential.stored.take());
        self.server = target.server.clone();
        Ok(())
    }
}

/// Opens a connection of the target's pool, whose process has read its catalogues.
async fn open_at_target(login: &TargetLogin, tenant: &Tenant, packet: Arc<[u8]>, slot: Slot) -> Result<(), String> {
    let Ready { mut stream, parameters, key, .. } = *counterpart::log_in_warm(login).await?;
    let state = super::ask_state(&mut stream, tenant).await.map_err(|error| error.to_string())?.0?;
    let (server, ids) = (login.target.server.clone(), login.target.ids.clone());
    let process = ServerProcess { server, key, ids, cancels: Arc::default() };
    let mut facts = Facts::new(packet, process, Arc::new(parameters), Some(slot), &login.target.pools.backends);
    let mut state = state;
    facts.inherited = state.take_inherited().into();
    facts.first = Arc::new(state);
    let first = facts.first.clone();
    facts.learn(&first);
    let Stream::Plain(raw) = stream else { return Err(ENCRYPTED.into()) };
    let stream = PolledStream::from(raw).map_err(|error| error.to_string())?;
    let pool = facts.pool().ok_or("the pool is gone")?;
    if let Some((waiter, grant)) = pool.release(Connection { stream, facts }) {
        waiter.deliver(grant);
    }
    Ok(())
}

/// Ends a wait in the queue when the session's task is dropped or goes on.
struct Withdrawal<'a> {
    pool: &'a crate::pool::Pool,
    id: u32,
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        self.pool.withdraw(self.id);
    }
}

async fn ask(server: &mut Stream, question: &[u8], syncs: usize) -> Result<Answers, SessionError> {
    if syncs == 0 {
        return Ok(Answers::default());
    }
    let answers = tokio::time::timeout(ANSWER_TIMEOUT, exchange(server, question, syncs)).await;
    Ok(answers.map_err(|_| SessionError::TimedOut("making a server connection like the session"))??)
}

fn cannot_be_made(why: String) -> SessionError {
    let message = format!("a server connection cannot be made like the session: {why}");
    SessionError::Refused(Refusal::new("08006", message).hint("Connect again."))
}
