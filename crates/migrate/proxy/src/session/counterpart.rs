//! A session's counterpart at the target: opened and kept alike before the switch-over, so that the pause need not wait
//! for it.

use crate::error::SessionError;
use crate::link;
use crate::session::session_state::{self, SessionState};
use crate::target::Target;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stillpoint_migrate_postgres::{Answers, Credential, Ready};
use stillpoint_migrate_wire::backend;
use stillpoint_migrate_wire::frame::{HEADER_LEN, Scanner, Step, put};
use stillpoint_migrate_wire::frontend::SYNC;
use stillpoint_migrate_wire::startup::Startup;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Time for which a lock is retried that another session is just handing over.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Time after which a target that does not answer counts as gone.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Order to a counterpart.
enum CounterpartCommand {
    /// Carry this state; the answer is success or an error.
    Carry(Box<SessionState>, oneshot::Sender<Result<(), String>>),
    /// Report if the counterpart carries the state of the last order.
    Verdict(oneshot::Sender<Result<(), String>>),
    /// Become the session: with the body of the Parse of an unnamed statement.
    HandOver(Vec<u8>, oneshot::Sender<Result<Box<Ready>, String>>),
}

/// Access to the target for a login.
pub(crate) struct TargetLogin {
    pub(crate) target: Arc<Target>,
    pub(crate) packet: Vec<u8>,
    pub(crate) user: String,
    pub(crate) credential: Credential,
    pub(crate) limit: Duration,
}

impl TargetLogin {
    /// Access to a server for a client that has logged in, with the role's stored password there.
    pub(crate) fn new(
        target: Arc<Target>,
        startup: &Startup,
        user: &str,
        mut credential: Credential,
        limit: Duration,
    ) -> TargetLogin {
        credential.stored = target.verifiers.get(user).cloned();
        let packet = link::startup_packet(startup, &target.server);
        TargetLogin { target, packet, user: user.to_owned(), credential, limit }
    }
}

/// A counterpart; it has a task of its own and ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Counterpart {
    commands: mpsc::UnboundedSender<CounterpartCommand>,
    task: JoinHandle<()>,
    failed: Arc<AtomicBool>,
    /// State that it carries or is about to carry.
    pub(crate) state: Option<SessionState>,
}

impl Drop for Counterpart {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Answer that comes later.
pub(crate) type PendingAnswer<T> = oneshot::Receiver<Result<T, String>>;

/// Waits for an answer; an error if the counterpart is gone.
pub(crate) async fn answer<T>(later: PendingAnswer<T>) -> Result<T, String> {
    later.await.unwrap_or_else(|_| Err("the session on the target has ended".into()))
}

impl Counterpart {
    /// Begins to log in.
    pub(crate) fn open(login: TargetLogin) -> Counterpart {
        let (commands, receiver) = mpsc::unbounded_channel();
        let failed = Arc::new(AtomicBool::new(false));
        let task = tokio::task::spawn_local(run_counterpart(login, receiver, failed.clone()));
        Counterpart { commands, task, failed, state: None }
    }

    /// Returns true if it has failed; a new one may succeed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Orders it to carry the session's state.
    pub(crate) fn carry(&mut self, state: SessionState) -> PendingAnswer<()> {
        let (sender, later) = oneshot::channel();
        self.state = Some(state.clone());
        let _ = self.commands.send(CounterpartCommand::Carry(Box::new(state), sender));
        later
    }

    /// Asks if it carries the state of the last order.
    pub(crate) fn verdict(&self) -> PendingAnswer<()> {
        let (sender, later) = oneshot::channel();
        let _ = self.commands.send(CounterpartCommand::Verdict(sender));
        later
    }

    /// Takes it over as the session.
    pub(crate) fn hand_over(&self, unnamed: Vec<u8>) -> PendingAnswer<Box<Ready>> {
        let (sender, later) = oneshot::channel();
        let _ = self.commands.send(CounterpartCommand::HandOver(unnamed, sender));
        later
    }
}

async fn run_counterpart(
    login: TargetLogin,
    mut commands: mpsc::UnboundedReceiver<CounterpartCommand>,
    failed: Arc<AtomicBool>,
) {
    let mut ready = log_in(&login).await;
    failed.store(ready.is_err(), Ordering::Relaxed);
    let (mut has_state, mut verdict) = (false, Ok(()));
    while let Some(command) = commands.recv().await {
        match command {
            CounterpartCommand::Carry(state, sender) => {
                let result = match &mut ready {
                    Ok(ready) => carry(ready, &login, &state, has_state).await,
                    Err(why) => Err(why.clone()),
                };
                has_state = true;
                failed.store(result.is_err(), Ordering::Relaxed);
                verdict.clone_from(&result);
                let _ = sender.send(result);
            }
            CounterpartCommand::Verdict(sender) => {
                let _ = sender.send(ready.as_ref().map_err(Clone::clone).and_then(|_| verdict.clone()));
            }
            CounterpartCommand::HandOver(unnamed, sender) => {
                let result = match ready {
                    Ok(mut ready) => finish_hand_over(&mut ready, &unnamed).await.map(|()| ready),
                    Err(why) => Err(why),
                };
                let _ = sender.send(result);
                return;
            }
        }
    }
}

/// Logs in, and lets the server process load the catalogue entries of the tables.
pub(crate) async fn log_in(login: &TargetLogin) -> Result<Box<Ready>, String> {
    let _place = login.target.place().await;
    log_in_warm(login).await
}

/// Logs in as [`log_in`] does, in a turn that the caller holds.
pub(super) async fn log_in_warm(login: &TargetLogin) -> Result<Box<Ready>, String> {
    let login = link::login(&login.target.server, &login.packet, &login.user, &login.credential, login.limit).await;
    let mut ready = login.map(Box::new).map_err(|error| error_chain(&error))?;
    warm_up(&mut ready).await?;
    Ok(ready)
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

async fn exchange(ready: &mut Ready, bytes: &[u8], syncs: usize) -> Result<Answers, String> {
    let exchange = stillpoint_migrate_postgres::exchange(&mut ready.stream, bytes, syncs);
    let answers = match tokio::time::timeout(REPLY_TIMEOUT, exchange).await {
        Ok(answers) => answers.map_err(|error| error_chain(&error))?,
        Err(_) => return Err(error_chain(&SessionError::TimedOut("an answer of the target"))),
    };
    note_parameters(&mut ready.parameters, &answers.aside);
    Ok(answers)
}

/// Statements that plan a look-up by the key, an update and an insert on each of the largest tables, as far as the user
/// may, and execute nothing. The key is compared to the result of another look-up: the planner would fold a constant,
/// and look at no index.
const WARM_UP: &str = include_str!("warm_up.sql");

/// Plans the statements. A server process reads the catalogues about a table at its first use, some milliseconds' work;
/// clients would wait for it if all sessions did this directly after a switch. Errors that the server returns here do
/// no harm.
async fn warm_up(ready: &mut Ready) -> Result<(), String> {
    let mut question = Vec::new();
    stillpoint_migrate_wire::frontend::put_query(&mut question, WARM_UP);
    let statements = exchange(ready, &question, 1).await?.rows;
    let first = |row: Vec<Option<Vec<u8>>>| String::from_utf8(row.into_iter().next()??).ok();
    let statements: Vec<String> = statements.into_iter().filter_map(first).collect();
    question.clear();
    for statement in &statements {
        // Each is a query of its own: if one fails, the others are still planned.
        stillpoint_migrate_wire::frontend::put_query(&mut question, statement);
    }
    if statements.is_empty() { Ok(()) } else { exchange(ready, &question, statements.len()).await.map(drop) }
}

async fn carry(ready: &mut Ready, login: &TargetLogin, state: &SessionState, has_state: bool) -> Result<(), String> {
    carry_settings(ready, login, state, has_state).await?;
    take_locks(ready, state).await
}

/// Gives the session the state except for advisory locks; `has_state` if it carries another state.
pub(crate) async fn carry_settings(
    ready: &mut Ready,
    login: &TargetLogin,
    state: &SessionState,
    has_state: bool,
) -> Result<(), String> {
    let _place = login.target.place().await;
    if has_state {
        let batch = session_state::discard();
        check_replay(&exchange(ready, &batch.bytes, batch.syncs).await?)?;
    }
    set_inherited_settings(ready, state).await?;
    let batch = state.replay(&login.user);
    check_replay(&exchange(ready, &batch.bytes, batch.syncs).await?)
}

fn check_replay(answers: &Answers) -> Result<(), String> {
    match &answers.error {
        Some((code, message)) => {
            let message = backend::without_values(code, message, "");
            Err(format!("the target rejects the session's state: {code}: {message}"))
        }
        None => Ok(()),
    }
}

/// Gives the session the settings that the source gave it and the target does not. A value that the target does not
/// know (a locale, a tablespace) does not stop the move: the check has reported it.
async fn set_inherited_settings(ready: &mut Ready, state: &SessionState) -> Result<(), String> {
    let Some(question) = state.inherited_query() else { return Ok(()) };
    let different = exchange(ready, &question.bytes, question.syncs).await?;
    check_replay(&different)?;
    for row in different.rows {
        let [Some(name), Some(value)] = &row[..] else { continue };
        let batch = session_state::set(name, value);
        if let Some((code, _)) = exchange(ready, &batch.bytes, batch.syncs).await?.error {
            let name = String::from_utf8_lossy(name);
            tracing::warn!(%name, code, "the target rejects a setting that a session has on the source");
        }
    }
    Ok(())
}

/// Takes all of its advisory locks, or none.
async fn take_locks(ready: &mut Ready, state: &SessionState) -> Result<(), String> {
    if state.lock_count() == 0 {
        return Ok(());
    }
    let limit = tokio::time::Instant::now() + LOCK_TIMEOUT;
    loop {
        let batch = state.take_locks();
        let answers = exchange(ready, &batch.bytes, batch.syncs).await?;
        let taken = answers.rows.iter().filter(|row| row.first() == Some(&Some(b"t".to_vec()))).count();
        if taken == batch.syncs {
            return Ok(());
        }
        let mut release = Vec::new();
        stillpoint_migrate_wire::frontend::put_query(&mut release, "SELECT pg_catalog.pg_advisory_unlock_all()");
        exchange(ready, &release, 1).await?;
        if tokio::time::Instant::now() >= limit {
            return Err("another session holds its advisory lock on the target".into());
        }
        tokio::time::sleep(LOCK_RETRY_INTERVAL).await;
    }
}

/// Creates the unnamed statement, and proves that the server answers.
async fn finish_hand_over(ready: &mut Ready, unnamed: &[u8]) -> Result<(), String> {
    let mut bytes = Vec::new();
    if !unnamed.is_empty() {
        put(&mut bytes, b'P', |body| body.extend_from_slice(unnamed));
    }
    bytes.extend(SYNC);
    // A statement that was wrong at the source is wrong here too; then neither side has one.
    let answers = exchange(ready, &bytes, 1).await?;
    ready.leftover.extend_from_slice(&answers.aside);
    Ok(())
}

/// Records the parameters that the server reports.
pub(super) fn note_parameters(parameters: &mut BTreeMap<String, Vec<u8>>, aside: &[u8]) {
    let (mut scanner, mut at) = (Scanner::new(1 << 20), 0);
    while let Ok(Step::Message(message)) = scanner.peek(&aside[at..]) {
        if !message.is_whole() {
            return;
        }
        if message.tag == b'S'
            && let Ok((name, value)) = backend::parameter_status(message.body)
        {
            parameters.insert(name.to_owned(), value.to_vec());
        }
        at += HEADER_LEN + message.len;
        scanner.take(&message);
    }
}
