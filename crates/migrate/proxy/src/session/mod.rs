//! One client's session, from its first byte to its last, at any server.
//!
//! ```text
//!            Prepare                 Pause              boundary             Switch
//! serving ─────────────▶ prepared ───────────▶ closing ───────────▶ parked ─────────▶ serving (target)
//!    ▲        Abandon        ▲                    │ Resume             │ Resume
//!    └───────────────────────┴────────────────────┴────────────────────┘
//! ```

mod capture;
pub(crate) mod counterpart;
mod login;
mod place;
mod pooling;
pub(crate) mod pump;
mod seat_steps;
pub(crate) mod session_state;
pub(crate) mod startup;
pub(crate) mod state_tracker;

use crate::capture::Capture;
use crate::command::{Command, Reporter};
use crate::entry::Entry;
use crate::error::{Refusal, SessionError};
use crate::forwarder::Forwarder;
use crate::mirror::tap::Tap;
use crate::mirror::{Mirror, MirroredSession};
use crate::pool::Pools;
use crate::pool::seat::Hold;
use crate::process_ids::ProcessIds;
use crate::proxy::Proxy;
use crate::server_process::ServerProcess;
use crate::target::Target;
use crate::tenant::Tenant;
use capture::CapturedSession;
use counterpart::{Counterpart, TargetLogin};
use pump::{Admission, Event, Pump};
use session_state::SessionState;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stillpoint_migrate_control::Activity;
use stillpoint_migrate_postgres::{Credential, Ready, Server, Stream, exchange};
use stillpoint_migrate_wire::backend::put_fatal;
use stillpoint_migrate_wire::backend::put_parameter_status;
use stillpoint_migrate_wire::frontend::{SYNC, TERMINATE};
use stillpoint_migrate_wire::startup::Startup;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc::UnboundedReceiver;

/// Shortest time until a prepared session that changes its state is asked for it again.
const FOLLOW_INTERVAL_MIN: Duration = Duration::from_millis(200);

/// A server process that ends gives back all the shared memory that it has touched, some milliseconds' work (measured
/// by hand: 4 to 22). Clients would wait for this work if all sessions ended directly after a switch. So they end in
/// turn.
const CLOSE_DELAY: Duration = Duration::from_millis(300);
const CLOSE_INTERVAL: Duration = Duration::from_millis(20);
/// Number of turns.
const CLOSE_TURNS: u32 = 64;

/// Longest wait for a peer that the proxy is leaving.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A session whose client is logged in.
pub(crate) struct Session {
    pump: Pump,
    entry: Arc<Entry>,
    tenant: Arc<Tenant>,
    proxy: Arc<Proxy>,
    forwarder: Arc<Forwarder>,
    server: Arc<Server>,
    startup: Startup,
    credential: Credential,
    /// Its counterpart at the target.
    counterpart: Option<(Counterpart, Arc<Target>)>,
    /// Gets a report when the counterpart is like the session.
    prepare_reporter: Option<Reporter>,
    /// Gets a report at the boundary.
    pause_reporter: Option<Reporter>,
    /// Capture that begins at the next boundary, and the reporter for that.
    pending_capture: Option<(Arc<Capture>, Option<Reporter>)>,
    captured: Option<Box<CapturedSession>>,
    is_ending: bool,
    /// A replication connection: it answers none of the proxy's questions, and stays at its server.
    is_replication: bool,
    /// Server process of its login, until the session begins.
    process: Option<ServerProcess>,
    /// Ids of the tenant's sessions at its server, and connections there that they share.
    ids: Arc<ProcessIds>,
    pools: Arc<Pools>,
    /// Target of a session that keeps nothing, and so needs no counterpart.
    light_target: Option<Arc<Target>>,
}

impl Session {
    /// Serves until one side leaves.
    async fn run(mut self, commands: &mut UnboundedReceiver<Command>) -> Result<(), SessionError> {
        if let Some(process) = self.process.take()
            && let Err(error) = self.begin_sharing(process).await
        {
            if let Some(refusal) = Refusal::of(&error) {
                self.send_refusal(&refusal).await;
            }
            return Err(error);
        }
        loop {
            let event = match &mut self.captured {
                Some(captured) => captured.run(&mut self.pump, commands).await,
                // After an error here the session is lost.
                None if self.pump.needs_only_forwarding() => {
                    let (pump, event) = self.forwarder.forward(self.pump, commands).await?;
                    self.pump = pump;
                    event
                }
                None => self.pump.run(commands).await,
            };
            let handled = match event {
                Ok(event) => self.handle(event).await,
                Err(error) => Err(error),
            };
            let (refusal, result) = match handled {
                Ok(ControlFlow::Continue(())) => continue,
                Ok(ControlFlow::Break(refusal)) => {
                    self.end_connection().await;
                    (refusal, Ok(()))
                }
                Err(error) => (Refusal::of(&error), Err(error)),
            };
            if let Some(refusal) = refusal {
                self.send_refusal(&refusal).await;
            }
            return result;
        }
    }

    /// Handles an event; breaks with the refusal for the client, if there is one, when the session ends.
    async fn handle(&mut self, event: Event) -> Result<ControlFlow<Option<Refusal>>, SessionError> {
        let Some(event) = self.handle_seat(event).await? else { return Ok(ControlFlow::Continue(())) };
        match event {
            Event::ClientLeft | Event::ServerLeft => return Ok(ControlFlow::Break(None)),
            Event::Command(command) => {
                if let Some(refusal) = self.handle_command(command).await? {
                    return Ok(ControlFlow::Break(Some(refusal)));
                }
            }
            Event::Boundary => {
                self.handle_boundary().await?;
                if self.is_ending {
                    let refusal = Refusal::new("57P01", "terminating connection: the proxy is shutting down");
                    return Ok(ControlFlow::Break(Some(refusal)));
                }
            }
            Event::CaptureOver => self.end_capture().await?,
            Event::Settle | Event::NeedsServer(_) | Event::MakeAlike => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    async fn send_refusal(&mut self, refusal: &Refusal) {
        let mut bytes = Vec::new();
        put_fatal(&mut bytes, refusal.code, refusal.message.as_str(), refusal.hint);
        // The wait for a client that does not read is limited.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, self.pump.send_last_message(&bytes)).await;
    }

    async fn handle_command(&mut self, command: Command) -> Result<Option<Refusal>, SessionError> {
        match command {
            Command::Prepare(target, reporter) => self.begin_prepare(target, reporter).await?,
            Command::PrepareAgain(target, reporter) => match &self.counterpart {
                Some((counterpart, known)) if Arc::ptr_eq(known, &target) && !counterpart.has_failed() => {
                    self.prepare_reporter = Some(reporter);
                    self.pump.wants_boundary = true;
                }
                _ => self.begin_prepare(target, Some(reporter)).await?,
            },
            Command::Abandon => {
                self.counterpart = None;
                self.light_target = None;
                if self.captured.is_none() {
                    self.share_again();
                }
                self.pump.follows = self.pump.follows.filter(|_| self.pump.tap.is_some());
                self.entry.prepared.store(false, Ordering::Relaxed);
            }
            Command::Mirror(mirror) => self.mirror(mirror),
            Command::Pause(reporter) => {
                self.pause_reporter = Some(reporter);
                self.pump.admission = Admission::Closing;
                self.pump.wants_boundary = true;
            }
            Command::Resume => self.resume(),
            Command::Capture(capture, reporter) => {
                self.pending_capture = Some((capture, reporter));
                // No transaction may begin before its writes are captured.
                if self.pump.admission == Admission::Open {
                    self.pump.admission = Admission::Closing;
                }
                self.pump.wants_boundary = true;
            }
            Command::Switch(reporter) => return self.switch(reporter).await,
            Command::End => {
                self.is_ending = true;
                self.pump.admission = Admission::Closing;
                self.pump.wants_boundary = true;
            }
        }
        Ok(None)
    }

    /// Prepares the session: one that shares connections and keeps nothing needs no counterpart.
    async fn begin_prepare(&mut self, target: Arc<Target>, reporter: Option<Reporter>) -> Result<(), SessionError> {
        if let Some(seat) = &self.pump.seat
            && matches!(seat.hold, None | Some(Hold::Move))
        {
            let is_steady = seat.is_vacant() || self.pump.at_boundary();
            if seat.state.is_plain() && seat.hold.is_none() {
                self.counterpart = None;
                self.prepare_vacant(target, reporter);
                return Ok(());
            }
            if is_steady {
                self.keep_connection().await?;
            } else if let Some(seat) = &mut self.pump.seat {
                seat.hold.get_or_insert(Hold::Move);
            }
        }
        self.light_target = None;
        self.prepare(target, reporter);
        Ok(())
    }

    fn prepare(&mut self, target: Arc<Target>, reporter: Option<Reporter>) {
        if self.is_replication {
            reporter.into_iter().for_each(|reporter| reporter.report(Err("it is a replication connection".into())));
            return;
        }
        self.entry.prepared.store(false, Ordering::Relaxed);
        self.counterpart = Some((Counterpart::open(self.login_at(&target)), target));
        self.prepare_reporter = reporter;
        self.pump.follows = Some(Instant::now());
        self.pump.wants_boundary = true;
    }

    /// Its access to another server.
    fn login_at(&self, target: &Arc<Target>) -> TargetLogin {
        let limit = self.proxy.settings().config.limits.connect();
        TargetLogin::new(target.clone(), &self.startup, &self.entry.user, self.credential.clone(), limit)
    }

    /// Begins to copy reads for a mirror, or ends that.
    fn mirror(&mut self, mirror: Option<Arc<Mirror>>) {
        let is_shared = self.pump.seat.is_some();
        self.pump.tap = mirror.filter(|_| !self.is_replication).map(|mirror| Box::new(Tap::new(mirror, is_shared)));
        if self.pump.tap.is_some() && !is_shared {
            self.pump.follows.get_or_insert_with(Instant::now);
            self.pump.wants_boundary = true;
        } else if self.counterpart.is_none() && !is_shared {
            self.pump.follows = None;
        }
    }

    fn resume(&mut self) {
        self.pause_reporter = None;
        if !self.is_ending {
            let pending_capture = self.pending_capture.is_some();
            self.pump.admission = if pending_capture { Admission::Closing } else { Admission::Open };
            self.pump.wants_boundary = self.prepare_reporter.is_some() || pending_capture;
        }
        if self.entry.activity() == Activity::Parked {
            self.entry.set(Activity::Idle);
        }
    }

    /// Does the work that waited for a boundary: no transaction is open.
    async fn handle_boundary(&mut self) -> Result<(), SessionError> {
        self.pump.wants_boundary = false;
        self.begin_capture().await?;
        self.follow_state().await?;
        if let Some(reporter) = self.pause_reporter.take() {
            self.pump.admission = Admission::Closed;
            self.entry.set(Activity::Parked);
            match &self.counterpart {
                Some((counterpart, _)) => self.await_verdict(counterpart.verdict(), Some(reporter)),
                None => reporter.report(self.entry.pinned().map_or(Ok(()), Err)),
            }
        }
        Ok(())
    }

    /// Reports the result of the counterpart whenever it comes. The session itself never waits for the target, so its
    /// client goes on when a pause is over.
    fn await_verdict(&self, later: counterpart::PendingAnswer<()>, reporter: Option<Reporter>) {
        let (entry, tenant) = (self.entry.clone(), self.tenant.clone());
        tokio::task::spawn_local(async move {
            let result = counterpart::answer(later).await;
            if !tenant.has(entry.id) {
                // Its client has left meanwhile: nothing waits for a session that is gone.
                return;
            }
            entry.prepared.store(result.is_ok(), Ordering::Relaxed);
            if let Some(reporter) = reporter {
                reporter.report(match entry.pinned() {
                    Some(why) => Err(why),
                    None => result,
                });
            }
        });
    }

    /// Begins to capture the session's writes.
    async fn begin_capture(&mut self) -> Result<(), SessionError> {
        let Some((capture, reporter)) = self.pending_capture.take() else { return Ok(()) };
        if let Some(seat) = self.pump.seat.as_mut().filter(|seat| seat.is_vacant()) {
            // It writes nothing before it has a connection, and begins its capture then.
            seat.needs_task = true;
            self.pending_capture = Some((capture, None));
            reporter.into_iter().for_each(|reporter| reporter.report(Ok(())));
            if self.pause_reporter.is_none() && !self.is_ending && self.pump.admission == Admission::Closing {
                self.pump.admission = Admission::Open;
            }
            return Ok(());
        }
        self.end_capture().await?;
        let begun = match self.is_replication {
            true => Err("it is a replication connection".to_owned()),
            false => CapturedSession::begin(&mut self.pump, capture.clone()).await?,
        };
        let result = begun.map(|captured| self.captured = Some(Box::new(captured)));
        match (reporter, result) {
            (Some(reporter), result) => reporter.report(result),
            (None, Err(why)) => {
                capture.break_off(format!("session {} ({}): {why}", self.entry.id, self.entry.user));
            }
            (None, Ok(())) => {}
        }
        if self.pause_reporter.is_none() && !self.is_ending && self.pump.admission == Admission::Closing {
            self.pump.admission = Admission::Open;
        }
        Ok(())
    }

    async fn end_capture(&mut self) -> Result<(), SessionError> {
        match self.captured.take() {
            Some(captured) => {
                captured.end(&mut self.pump).await?;
                self.share_again();
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Queries the session's state if it may have changed, and passes it to the counterpart and to the mirror.
    async fn follow_state(&mut self) -> Result<(), SessionError> {
        let tap = self.pump.tap.as_ref().filter(|tap| !tap.is_shared);
        if self.counterpart.is_none() && tap.is_none() {
            return Ok(());
        }
        let is_known = self.counterpart.as_ref().is_none_or(|(counterpart, _)| counterpart.state.is_some())
            && tap.is_none_or(|tap| tap.session.is_some());
        // The state that pinned the session may be gone.
        let was_requested = self.prepare_reporter.is_some() && self.entry.pinned().is_some();
        if is_known && !self.pump.tracker.dirty && !was_requested {
            if let (Some((counterpart, _)), Some(reporter)) = (&self.counterpart, self.prepare_reporter.take()) {
                self.await_verdict(counterpart.verdict(), Some(reporter));
            }
            return Ok(());
        }
        let state = query_state(&mut self.pump, &self.tenant).await?;
        self.pump.follows = Some(Instant::now() + FOLLOW_INTERVAL_MIN);
        let state = match state {
            Ok(state) => state,
            Err(why) => {
                self.pump.tap.iter_mut().for_each(|tap| tap.session = None);
                self.entry.set_pinned(Some(why.clone()));
                if let Some(reporter) = self.prepare_reporter.take() {
                    reporter.report(Err(why));
                }
                return Ok(());
            }
        };
        self.pump.tracker.dirty = false;
        if let Some(tap) = self.pump.tap.as_mut().filter(|tap| !tap.is_shared) {
            let (startup, user) = (self.startup.clone(), self.entry.user.clone());
            let (credential, state) = (self.credential.clone(), state.clone());
            tap.session = Some(Arc::new(MirroredSession { startup, user, credential, state }));
        }
        let Some((counterpart, _)) = &mut self.counterpart else { return Ok(()) };
        let lost = self.pump.tracker.unnamed_lost.then(|| "its unnamed statement is longer than 1 MiB".to_owned());
        let pins: Vec<String> = state.pins.iter().cloned().chain(lost).collect();
        self.entry.set_pinned((!pins.is_empty()).then(|| pins.join(", ")));
        let reporter = self.prepare_reporter.take();
        let later = match counterpart.state.as_ref() == Some(&state) {
            false => counterpart.carry(state),
            true if reporter.is_some() => counterpart.verdict(),
            true => return Ok(()),
        };
        self.await_verdict(later, reporter);
        Ok(())
    }

    /// Goes on at the target. A session that cannot do so may not go on at the source either: that is out of service.
    async fn switch(&mut self, reporter: Reporter) -> Result<Option<Refusal>, SessionError> {
        let moved = match self.light_target.take() {
            Some(target) => self.move_light(&target),
            None => self.move_to_target().await,
        };
        let refusal = moved.is_err().then(|| {
            Refusal::new("57P01", "terminating connection: the session could not be moved to the new server")
                .hint("Connect again.")
        });
        reporter.report(moved);
        Ok(refusal)
    }

    /// Goes on at the target without a connection there: the next message gets one.
    fn move_light(&mut self, target: &Arc<Target>) -> Result<(), String> {
        if self.pump.admission != Admission::Closed {
            return Err("the session is not parked".into());
        }
        self.move_vacant(target)?;
        self.pending_capture = None;
        self.share_again();
        self.entry.prepared.store(false, Ordering::Relaxed);
        self.resume();
        Ok(())
    }

    async fn move_to_target(&mut self) -> Result<(), String> {
        if self.pump.admission != Admission::Closed {
            return Err("the session is not parked".into());
        }
        let Some((counterpart, target)) = self.counterpart.take() else {
            return Err("the session was not prepared".into());
        };
        let unnamed = std::mem::take(&mut self.pump.tracker.unnamed);
        let listens = counterpart.state.as_ref().is_some_and(SessionState::listens);
        let locks = counterpart.state.as_ref().map_or(0, SessionState::lock_count);
        let ready = counterpart::answer(counterpart.hand_over(unnamed.clone())).await?;
        self.pump.tracker.unnamed = unnamed;
        if listens {
            self.read_last_messages().await;
        }
        let Ready { stream, leftover, parameters, key } = *ready;
        let source = self.pump.move_to(stream, target.ids.clone()).map_err(|error| error.to_string())?;
        // Before its client can send a notification there.
        let process =
            ServerProcess { server: target.server.clone(), key, ids: target.ids.clone(), cancels: Arc::default() };
        self.entry.move_to(process.clone());
        // Locks are released at once: a way back needs them.
        let turn = self.entry.id % CLOSE_TURNS;
        let wait = if locks == 0 { CLOSE_DELAY + turn * CLOSE_INTERVAL } else { Duration::ZERO };
        tokio::task::spawn_local(close_later(source, wait));
        let mut news = Vec::new();
        for (name, value) in &parameters {
            if self.pump.parameters.get(name) != Some(value) {
                put_parameter_status(&mut news, name, value);
            }
        }
        self.pump.inject(&news);
        self.pump.inject(&leftover);
        self.entry.prepared.store(false, Ordering::Relaxed);
        self.reseat(&target, process);
        self.server = target.server.clone();
        (self.pump.follows, self.pump.tap) = (None, None);
        self.resume();
        Ok(())
    }

    /// Reads the source's last messages: notifications of transactions that have committed.
    async fn read_last_messages(&mut self) {
        let asked = tokio::time::timeout(CLOSE_TIMEOUT, exchange(&mut self.pump.server, &SYNC, 1));
        if let Ok(Ok(answers)) = asked.await {
            self.pump.inject(&answers.aside);
        }
    }
}

/// Ends a session at the server that the client has left.
async fn close_later(mut source: Stream, wait: Duration) {
    tokio::time::sleep(wait).await;
    send_terminate(&mut source).await;
}

/// Sends Terminate, which ends a session at its server.
async fn send_terminate(server: &mut Stream) {
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, server.write_all(&TERMINATE)).await;
}

/// Asks the server for the session's state; the inner error is the reason why the state is not known.
async fn query_state(pump: &mut Pump, tenant: &Tenant) -> Result<Result<SessionState, String>, SessionError> {
    let (state, aside) = ask_state(&mut pump.server, tenant).await?;
    pump.inject(&aside);
    Ok(state)
}

/// Asks a server for a session's state; the second value are messages for its client.
async fn ask_state(
    server: &mut Stream,
    tenant: &Tenant,
) -> Result<(Result<SessionState, String>, Vec<u8>), SessionError> {
    let names: Vec<String> = crate::mutex::lock(&tenant.custom).iter().cloned().collect();
    let question = session_state::state_query(names.iter().map(String::as_str));
    let answers = exchange(server, &question.bytes, question.syncs).await?;
    let state = match answers.error {
        Some((code, message)) => Err(format!("cannot query the session's state: {code}: {message}")),
        None => Ok(session_state::parse_state(answers.rows)),
    };
    Ok((state, answers.aside))
}
