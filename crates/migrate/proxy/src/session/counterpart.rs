//! A session's counterpart at the target: opened and kept alike before the switch-over, so that the pause need not wait
//! for it.

use crate::error::SessionError;
use crate::link::{self, Answers, Ready};
use crate::secret::Credential;
use crate::session::session_state::{self, Carried};
use crate::target::Target;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stillpoint_migrate_wire::backend;
use stillpoint_migrate_wire::frame::{HEADER_LEN, Scanner, Step, put};
use stillpoint_migrate_wire::frontend::put_sync;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Time for which a lock is retried that another session is just handing over.
const LOCK_LIMIT: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Time after which a target that does not answer counts as gone.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Order to a counterpart.
enum Order {
    /// Carry this state; the answer is success or an error.
    Carry(Box<Carried>, oneshot::Sender<Result<(), String>>),
    /// Report if the counterpart carries the state of the last order.
    Verdict(oneshot::Sender<Result<(), String>>),
    /// Become the session: with the body of the Parse of an unnamed statement.
    HandOver(Vec<u8>, oneshot::Sender<Result<Box<Ready>, String>>),
}

/// Access to the target for a login.
pub(crate) struct Access {
    pub(crate) target: Arc<Target>,
    pub(crate) packet: Vec<u8>,
    pub(crate) user: String,
    pub(crate) credential: Credential,
    pub(crate) limit: Duration,
}

/// A counterpart; it has a task of its own and ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Shadow {
    orders: mpsc::UnboundedSender<Order>,
    task: JoinHandle<()>,
    failed: Arc<AtomicBool>,
    /// State that it carries or is about to carry.
    pub(crate) carried: Option<Carried>,
}

impl Drop for Shadow {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Answer that comes later.
pub(crate) type Later<T> = oneshot::Receiver<Result<T, String>>;

/// Waits for an answer; an error if the counterpart is gone.
pub(crate) async fn answer<T>(later: Later<T>) -> Result<T, String> {
    later.await.unwrap_or_else(|_| Err("the session at the target is gone".into()))
}

impl Shadow {
    /// Begins to log in.
    pub(crate) fn open(access: Access) -> Shadow {
        let (orders, receiver) = mpsc::unbounded_channel();
        let failed = Arc::new(AtomicBool::new(false));
        let task = tokio::task::spawn_local(live(access, receiver, failed.clone()));
        Shadow { orders, task, failed, carried: None }
    }

    /// Returns true if it has failed; a new one may succeed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Orders it to carry the session's state.
    pub(crate) fn carry(&mut self, carried: Carried) -> Later<()> {
        let (sender, later) = oneshot::channel();
        self.carried = Some(carried.clone());
        let _ = self.orders.send(Order::Carry(Box::new(carried), sender));
        later
    }

    /// Asks if it carries the state of the last order.
    pub(crate) fn verdict(&self) -> Later<()> {
        let (sender, later) = oneshot::channel();
        let _ = self.orders.send(Order::Verdict(sender));
        later
    }

    /// Takes it over as the session.
    pub(crate) fn hand_over(&self, unnamed: Vec<u8>) -> Later<Box<Ready>> {
        let (sender, later) = oneshot::channel();
        let _ = self.orders.send(Order::HandOver(unnamed, sender));
        later
    }
}

async fn live(access: Access, mut orders: mpsc::UnboundedReceiver<Order>, failed: Arc<AtomicBool>) {
    let mut ready = log_in(&access).await;
    failed.store(ready.is_err(), Ordering::Relaxed);
    let (mut used, mut verdict) = (false, Ok(()));
    while let Some(order) = orders.recv().await {
        match order {
            Order::Carry(carried, sender) => {
                let result = match &mut ready {
                    Ok(ready) => carry(ready, &access, &carried, used).await,
                    Err(why) => Err(why.clone()),
                };
                used = true;
                failed.store(result.is_err(), Ordering::Relaxed);
                verdict.clone_from(&result);
                let _ = sender.send(result);
            }
            Order::Verdict(sender) => {
                let _ = sender.send(match &ready {
                    Ok(_) => verdict.clone(),
                    Err(why) => Err(why.clone()),
                });
            }
            Order::HandOver(unnamed, sender) => {
                let result = match ready {
                    Ok(mut ready) => settle(&mut ready, &unnamed).await.map(|()| ready),
                    Err(why) => Err(why),
                };
                let _ = sender.send(result);
                return;
            }
        }
    }
}

/// Logs in, and lets the server process load the catalogue entries of the tables.
async fn log_in(access: &Access) -> Result<Box<Ready>, String> {
    let _place = access.target.place().await;
    let login =
        link::login(&access.target.server, &access.packet, &access.user, &access.credential, access.limit).await;
    let mut ready = login.map(Box::new).map_err(|error| error_chain(&error))?;
    warm_up(&mut ready).await?;
    Ok(ready)
}

fn error_chain(error: &SessionError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

async fn ask(ready: &mut Ready, bytes: &[u8], syncs: usize) -> Result<Answers, String> {
    let exchange = tokio::time::timeout(ANSWER_LIMIT, link::exchange(&mut ready.stream, bytes, syncs));
    let answers = exchange.await.unwrap_or(Err(SessionError::TimedOut("an answer of the target")));
    let answers = answers.map_err(|error| error_chain(&error))?;
    note_parameters(&mut ready.parameters, &answers.aside);
    Ok(answers)
}

/// Statements that plan a look-up by the key, an update and an insert on each of the largest tables, as far as the user
/// may, and execute nothing. The key is compared to the result of another look-up: the planner would fold a constant,
/// and look at no index.
const WARM_UP: &str = "\
WITH t AS (SELECT c.oid, c.relpages, c.oid::pg_catalog.regclass::pg_catalog.text AS name, \
  (SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ') \
    FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey) \
    WHERE i.indrelid = c.oid AND i.indisprimary) AS key, \
  (SELECT pg_catalog.min(pg_catalog.quote_ident(a.attname)) FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid \
    AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity <> 'a') AS settable, \
  EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid \
    AND a.attnum > 0 AND (a.attgenerated <> '' OR a.attidentity = 'a')) AS generated \
  FROM pg_catalog.pg_class c WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid >= 16384 \
  AND pg_catalog.has_table_privilege(c.oid, 'SELECT') ORDER BY c.relpages DESC LIMIT 30), \
look (oid, place) AS (SELECT oid, CASE WHEN key IS NULL THEN '' ELSE \
  pg_catalog.format(' WHERE ROW(%1$s) = (SELECT %1$s FROM %2$s LIMIT 1)', key, name) END FROM t) \
SELECT CASE WHEN pg_catalog.has_table_privilege(oid, 'UPDATE') AND settable IS NOT NULL \
  THEN pg_catalog.format('EXPLAIN UPDATE %1$s SET %2$s = %2$s%3$s', name, settable, place) \
  ELSE pg_catalog.format('EXPLAIN SELECT * FROM %s%s', name, place) END FROM t JOIN look USING (oid) \
UNION ALL SELECT pg_catalog.format('EXPLAIN INSERT INTO %1$s SELECT * FROM %1$s', name) FROM t \
  WHERE NOT generated AND pg_catalog.has_table_privilege(oid, 'INSERT')";

/// Plans the statements. A server process reads the catalogues about a table at its first use, some milliseconds' work;
/// clients would wait for it if all sessions did this directly after a switch. Errors that the server returns here do
/// no harm.
async fn warm_up(ready: &mut Ready) -> Result<(), String> {
    let mut question = Vec::new();
    stillpoint_migrate_wire::frontend::put_query(&mut question, WARM_UP);
    let statements = ask(ready, &question, 1).await?.rows;
    let first = |row: Vec<Option<Vec<u8>>>| String::from_utf8(row.into_iter().next()??).ok();
    let statements: Vec<String> = statements.into_iter().filter_map(first).collect();
    question.clear();
    for statement in &statements {
        // Each is a query of its own: if one fails, the others are still planned.
        stillpoint_migrate_wire::frontend::put_query(&mut question, statement);
    }
    if statements.is_empty() { Ok(()) } else { ask(ready, &question, statements.len()).await.map(drop) }
}

async fn carry(ready: &mut Ready, access: &Access, carried: &Carried, used: bool) -> Result<(), String> {
    let _place = access.target.place().await;
    if used {
        let batch = session_state::discard();
        taken_over(&ask(ready, &batch.bytes, batch.syncs).await?)?;
    }
    inherit(ready, carried).await?;
    let batch = carried.replay(&access.user);
    taken_over(&ask(ready, &batch.bytes, batch.syncs).await?)?;
    take_locks(ready, carried).await
}

fn taken_over(answers: &Answers) -> Result<(), String> {
    match &answers.error {
        Some((code, message)) => {
            let message = backend::without_values(code, message, "");
            Err(format!("the target does not take over its state: {code}: {message}"))
        }
        None => Ok(()),
    }
}

/// Gives the session the settings that the source gave it and the target does not. A value that the target does not
/// know (a locale, a tablespace) does not stop the move: the check has reported it.
async fn inherit(ready: &mut Ready, carried: &Carried) -> Result<(), String> {
    let Some(question) = carried.ask_inherited() else { return Ok(()) };
    let different = ask(ready, &question.bytes, question.syncs).await?;
    taken_over(&different)?;
    for row in different.rows {
        let [Some(name), Some(value)] = &row[..] else { continue };
        let batch = session_state::set(name, value);
        if let Some((code, _)) = ask(ready, &batch.bytes, batch.syncs).await?.error {
            let name = String::from_utf8_lossy(name);
            tracing::warn!(%name, code, "the target does not take a setting that a session has at the source");
        }
    }
    Ok(())
}

/// Takes all of its advisory locks, or none.
async fn take_locks(ready: &mut Ready, carried: &Carried) -> Result<(), String> {
    if carried.lock_count() == 0 {
        return Ok(());
    }
    let limit = tokio::time::Instant::now() + LOCK_LIMIT;
    loop {
        let batch = carried.take_locks();
        let answers = ask(ready, &batch.bytes, batch.syncs).await?;
        let taken = answers.rows.iter().filter(|row| row.first() == Some(&Some(b"t".to_vec()))).count();
        if taken == batch.syncs {
            return Ok(());
        }
        let mut release = Vec::new();
        stillpoint_migrate_wire::frontend::put_query(&mut release, "SELECT pg_catalog.pg_advisory_unlock_all()");
        ask(ready, &release, 1).await?;
        if tokio::time::Instant::now() >= limit {
            return Err("somebody else holds its advisory lock at the target".into());
        }
        tokio::time::sleep(LOCK_PAUSE).await;
    }
}

/// Creates the unnamed statement, and proves that the server answers.
async fn settle(ready: &mut Ready, unnamed: &[u8]) -> Result<(), String> {
    let mut bytes = Vec::new();
    if !unnamed.is_empty() {
        put(&mut bytes, b'P', |body| body.extend_from_slice(unnamed));
    }
    put_sync(&mut bytes);
    // A statement that was wrong at the source is wrong here too; then neither side has one.
    let answers = ask(ready, &bytes, 1).await?;
    ready.leftover.extend_from_slice(&answers.aside);
    Ok(())
}

/// Records the parameters that the server reports.
fn note_parameters(parameters: &mut BTreeMap<String, Vec<u8>>, aside: &[u8]) {
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
