//! A session whose writes are captured: the proxy handles every message whole, one after another, as the server does.
//!
//! The pump of [`super::pump`] passes bytes on; here the proxy speaks with the server in the client's name. It passes
//! the client's messages on one by one, and awaits the replies at each Execute, Flush, Sync and Query. That costs a
//! round trip in addition to the client's own. It gives what the order of commits needs: when COMMIT is sent, every
//! reply before it has arrived.
//!
//! ```text
//! client's statement          at the server
//! Parse s, text               Parse s, text             unchanged: errors, Describe and DEALLOCATE stay the same
//! Bind p, s                   Bind p, twin of s         the twin is the text with the hidden column, parsed when needed
//! Execute p                   [counters] Execute p      rows come back: captured, and sent without the hidden column
//! Sync (ends a transaction)   [audit] ... stamp, Sync
//! Query "UPDATE ..."          Parse, Bind, Describe, Execute of the twin, [audit] ... stamp, Sync
//! ```

mod inbox;
mod large_messages;
mod messages;
mod replies;
mod statement_capture;
mod statements;
mod transaction;

use crate::capture::{Capture, MemoryShare, PendingCommit};
use crate::command::Command;
use crate::error::SessionError;
use crate::session::pump::{Admission, Event, Pump};
use inbox::{Inbox, SMALL_MESSAGE_BYTES};
use statements::{Statement, StatementFacts};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_capture::facts::{self, Facts, SessionContext};
use stillpoint_migrate_capture::{Catalogue, RewrittenStatement};
use stillpoint_migrate_postgres::{Stream, exchange};
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::frontend::{
    self, SYNC, put_bind, put_close_portal, put_close_statement, put_execute, put_parse, put_query,
};
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc::UnboundedReceiver;
use transaction::{Counts, Transaction};

/// Name of the proxy's own statement and portal. The unnamed ones belong to the client.
const OWN_STATEMENT: &[u8] = b"stillpoint_own";
/// Bytes waiting in either direction at which they are sent.
const SEND_THRESHOLD_BYTES: usize = 16 << 10;
/// Time after which the client gets what there is, if the server takes longer.
const REPLY_DELAY_MAX: Duration = Duration::from_millis(5);
/// Most twins that are remembered.
const TWINS_MAX: usize = 200;

/// Reply that the server owes.
#[derive(Debug)]
enum ExpectedReply {
    /// ParseComplete for the client.
    Parse(Vec<u8>, Arc<Statement>),
    /// ParseComplete for the proxy.
    Twin(statements::TwinKey),
    /// BindComplete, CloseComplete.
    Complete,
    /// A description; its rows may have a hidden column.
    Describe(Option<Arc<RewrittenStatement>>),
    Execute(Option<Arc<RewrittenStatement>>),
    /// Rows for the proxy itself.
    Own,
    /// Completions that only the proxy needs.
    Silent,
    Query {
        mute: bool,
    },
    Sync {
        mute: bool,
    },
}

/// Protocol that the client sees for the present work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum QueryProtocol {
    #[default]
    Extended,
    /// The client sent a Query; the proxy executes it by the extended protocol.
    Simple,
}

/// State of a captured session.
#[derive(Debug, Default)]
pub(super) struct CapturedSession {
    capture: Arc<Capture>,
    catalogue: Catalogue,
    audited: String,
    defers: bool,
    context: Arc<SessionContext>,
    /// The facts may be outdated.
    stale: bool,
    judged: HashMap<Vec<u8>, Arc<StatementFacts>>,
    statements: HashMap<Vec<u8>, Arc<Statement>>,
    portals: HashMap<Vec<u8>, Arc<StatementFacts>>,
    /// Statement of each portal, and true if it has parameters; where statements are captured.
    bound: HashMap<Vec<u8>, (Arc<Statement>, bool)>,
    twins: HashMap<statements::TwinKey, Vec<u8>>,
    twins_made: u64,
    /// Names of twins that may still exist.
    forgotten: Vec<Vec<u8>>,
    transaction: Transaction,
    /// A transaction block is open.
    block: bool,
    /// The transaction can only be rolled back.
    failed: bool,
    /// The server skips everything up to the next Sync.
    skipping: bool,
    /// The proxy's work before COMMIT has failed: the block must be gone after the next Sync.
    must_roll_back: bool,
    /// Characters of the client's text before the statement that is executed.
    offset: usize,
    /// An error arrived since the last Sync was sent.
    errors_until_ready: bool,
    copying: bool,
    protocol: QueryProtocol,
    /// The completion that the client gets only after the commit.
    held: Option<Vec<u8>>,
    hold: bool,
    /// The last completion.
    tag: Vec<u8>,
    own_rows: Vec<Vec<Option<Vec<u8>>>>,
    expected: VecDeque<ExpectedReply>,
    from_client: Inbox,
    from_server: Inbox,
    /// Memory reserved for large prepared statements.
    kept: Vec<MemoryShare>,
    to_client: Vec<u8>,
    to_server: Vec<u8>,
}

/// Appends the question for the facts; nothing else may be under way.
fn put_question(into: &mut Vec<u8>) {
    put_parse(into, OWN_STATEMENT, facts::QUESTION.as_bytes(), &[]);
    put_bind(into, OWN_STATEMENT, OWN_STATEMENT, &[]);
    put_execute(into, OWN_STATEMENT);
    put_close_statement(into, OWN_STATEMENT);
}

impl CapturedSession {
    /// Begins between two transactions.
    pub(super) async fn begin(
        pump: &mut Pump,
        capture: Arc<Capture>,
    ) -> Result<Result<CapturedSession, String>, SessionError> {
        let mut question = Vec::new();
        put_question(&mut question);
        question.extend(SYNC);
        let answers = exchange(&mut pump.server, &question, 1).await?;
        pump.inject(&answers.aside);
        if let Some((code, message)) = answers.error {
            return Ok(Err(format!("cannot query the catalogue: {code}: {message}")));
        }
        let mut captured = CapturedSession { capture, ..CapturedSession::default() };
        if let Some((name, text)) = frontend::parse_text(&pump.tracker.unnamed) {
            let types = pump.tracker.unnamed[name.len() + text.len() + 2..].to_vec();
            captured.statements.insert(Vec::new(), Arc::new(Statement { text: text.to_vec(), types }));
        }
        let facts = facts::read(&answers.rows);
        let refused = facts.refused.clone().or_else(|| foreign_settings(pump));
        captured.record_prepared(&facts);
        captured.apply_facts(facts);
        match refused {
            // Bytes under way stay with the pump.
            Some(why) => Ok(Err(why)),
            None => captured.take_over(pump).map(|()| Ok(captured)),
        }
    }

    /// Records the statements that the session has prepared.
    fn record_prepared(&mut self, facts: &Facts) {
        for (name, text, types) in &facts.statements {
            let statement = Statement { text: text.clone(), types: statements::types(types) };
            self.statements.insert(name.clone(), Arc::new(statement));
        }
    }

    fn apply_facts(&mut self, facts: Facts) {
        self.capture.note_uncovered(facts.uncovered);
        (self.catalogue, self.audited, self.defers) = (facts.catalogue, facts.audited, facts.defers);
        self.context = Arc::new(facts.context);
        self.judged.clear();
        self.stale = false;
    }

    /// Takes over the bytes that the pump has under way.
    fn take_over(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        let (up, sendable, unseen) = pump.take_lanes();
        self.from_client.bytes.extend(up);
        self.to_client.extend(sendable);
        self.from_server.bytes.extend(unseen);
        while let Some(message) = self.from_server.take().map_err(SessionError::ServerProtocol)? {
            self.reply(pump, message)?;
        }
        Ok(())
    }

    /// Gives the bytes under way back to the pump, and closes the proxy's own statements.
    pub(super) async fn end(mut self, pump: &mut Pump) -> Result<(), SessionError> {
        let mut bytes = Vec::new();
        self.twins.values().chain(&self.forgotten).for_each(|twin| put_close_statement(&mut bytes, twin));
        bytes.extend(SYNC);
        let answers = exchange(&mut pump.server, &bytes, 1).await?;
        pump.return_lanes(&self.from_client.take_rest(), &self.to_client);
        pump.inject(&answers.aside);
        Ok(())
    }

    fn at_boundary(&self, pump: &Pump) -> bool {
        pump.conversation.at_boundary() && self.expected.is_empty() && self.from_server.is_empty()
    }

    /// Serves until an event needs a decision.
    pub(super) async fn run(
        &mut self,
        pump: &mut Pump,
        commands: &mut UnboundedReceiver<Command>,
    ) -> Result<Event, SessionError> {
        match self.serve(pump, commands).await {
            Err(SessionError::ServerClosed) => {
                self.flush_client(pump).await?;
                Ok(Event::ServerLeft)
            }
            other => other,
        }
    }

    async fn serve(
        &mut self,
        pump: &mut Pump,
        commands: &mut UnboundedReceiver<Command>,
    ) -> Result<Event, SessionError> {
        self.take_over(pump)?;
        loop {
            let boundary = self.at_boundary(pump);
            if boundary && !self.capture.is_live() {
                return Ok(Event::CaptureOver);
            }
            if boundary && (pump.wants_boundary || pump.has_new_state()) {
                self.flush_server(pump).await?;
                self.flush_client(pump).await?;
                return Ok(Event::Boundary);
            }
            let held = boundary && pump.admission != Admission::Open && self.from_client.next_tag() != Some(b'X');
            if !held && let Some(message) = self.from_client.request().map_err(SessionError::ClientProtocol)? {
                if message.tag == b'X' {
                    self.flush_client(pump).await?;
                    return Ok(Event::ClientLeft);
                }
                self.request(pump, message).await?;
                continue;
            }
            if !held && let Some((tag, total)) = self.passes_large(pump) {
                // Between two transactions the message belongs to the pump.
                if !boundary {
                    self.large_request(pump, tag, total).await?;
                }
                continue;
            }
            self.flush_server(pump).await?;
            self.flush_client(pump).await?;
            let room = self.from_client.bytes.len() < SEND_THRESHOLD_BYTES || !held;
            tokio::select! {
                biased;
                Some(command) = commands.recv() => return Ok(Event::Command(command)),
                read = pump.server.read_buf(&mut self.from_server.bytes) => {
                    self.count_down(pump, read.map_err(SessionError::Server)?)?;
                    self.replies(pump).await?;
                }
                read = pump.client.read_buf(&mut self.from_client.bytes), if room => {
                    let n = read.map_err(SessionError::Client)?;
                    crate::counters::Counters::add(&pump.entry.counters.bytes_up, n as u64);
                    if n == 0 {
                        return Ok(Event::ClientLeft);
                    }
                }
            }
        }
    }

    /// Handles the server's messages that have arrived.
    async fn replies(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        loop {
            while let Some(message) = self.from_server.take().map_err(SessionError::ServerProtocol)? {
                self.reply(pump, message)?;
            }
            if !self.large_reply(pump).await? {
                return Ok(());
            }
        }
    }

    fn count_down(&self, pump: &Pump, n: usize) -> Result<(), SessionError> {
        crate::counters::Counters::add(&pump.entry.counters.bytes_down, n as u64);
        if n == 0 { Err(SessionError::ServerClosed) } else { Ok(()) }
    }

    async fn flush_client(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        send_all(&mut pump.client, &mut self.to_client).await.map_err(SessionError::Client)
    }

    async fn flush_server(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        send_all(&mut pump.server, &mut self.to_server).await.map_err(SessionError::Server)
    }

    /// Waits until the server owes nothing.
    async fn drain(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        self.flush_server(pump).await?;
        while !self.expected.is_empty() {
            if self.copying {
                self.copy_in(pump).await?;
                continue;
            }
            if let Some(message) = self.from_server.take().map_err(SessionError::ServerProtocol)? {
                self.reply(pump, message)?;
                if self.to_client.len() >= SEND_THRESHOLD_BYTES {
                    self.flush_client(pump).await?;
                }
                continue;
            }
            if self.large_reply(pump).await? {
                continue;
            }
            let reading = pump.server.read_buf(&mut self.from_server.bytes);
            match tokio::time::timeout(REPLY_DELAY_MAX, reading).await {
                Ok(read) => self.count_down(pump, read.map_err(SessionError::Server)?)?,
                Err(_) => {
                    self.flush_client(pump).await?;
                    let read = pump.server.read_buf(&mut self.from_server.bytes).await;
                    self.count_down(pump, read.map_err(SessionError::Server)?)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for the replies to all that was sent by the extended protocol so far.
    async fn flush(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        self.to_server.extend(*b"H\0\0\0\x04");
        self.drain(pump).await
    }

    /// Passes on the client's copied data until the client or the server ends the copy.
    async fn copy_in(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        while self.copying {
            while let Some(message) = self.from_client.request().map_err(SessionError::ClientProtocol)? {
                pump.conversation.frontend(message.tag);
                // The server would ignore a Sync during the copy, so it gets none.
                if !matches!(message.tag, b'S' | b'H') {
                    self.to_server.extend(&message.bytes);
                }
                if matches!(message.tag, b'c' | b'f') {
                    self.copying = false;
                    break;
                }
                if self.to_server.len() >= SEND_THRESHOLD_BYTES {
                    self.flush_server(pump).await?;
                }
            }
            // Copied data is not captured, so it need not be held whole.
            if self.copying
                && let Some((tag, total)) = self.from_client.large()
            {
                if tag != b'd' {
                    let error = WireError::Length { tag, len: total as u32 - 1 };
                    return Err(SessionError::ClientProtocol(error));
                }
                pump.conversation.frontend(tag);
                self.pass_up(pump, total, true).await?;
                continue;
            }
            self.flush_server(pump).await?;
            self.flush_client(pump).await?;
            if !self.copying {
                return Ok(());
            }
            tokio::select! {
                read = pump.server.read_buf(&mut self.from_server.bytes) => {
                    self.count_down(pump, read.map_err(SessionError::Server)?)?;
                    self.replies(pump).await?;
                }
                read = pump.client.read_buf(&mut self.from_client.bytes) => {
                    if read.map_err(SessionError::Client)? == 0 {
                        return Err(SessionError::Client(std::io::ErrorKind::UnexpectedEof.into()));
                    }
                }
            }
        }
        Ok(())
    }

    /// Breaks the capture off: a write is not captured.
    fn break_off(&self, pump: &Pump, why: &str) {
        self.capture.break_off(format!("session {} ({}): {why}", pump.entry.id, pump.entry.user));
    }

    /// Asks a question of the proxy's own; its rows are in `own_rows`. False if it failed; the client has then got the
    /// error.
    async fn query_server(&mut self, pump: &mut Pump, sql: &str) -> Result<bool, SessionError> {
        self.own_rows.clear();
        self.send_own_query(sql);
        self.flush(pump).await?;
        Ok(!self.skipping)
    }

    fn send_own_query(&mut self, sql: &str) {
        put_parse(&mut self.to_server, OWN_STATEMENT, sql.as_bytes(), &[]);
        put_bind(&mut self.to_server, OWN_STATEMENT, OWN_STATEMENT, &[]);
        put_execute(&mut self.to_server, OWN_STATEMENT);
        put_close_portal(&mut self.to_server, OWN_STATEMENT);
        put_close_statement(&mut self.to_server, OWN_STATEMENT);
        let silent = || ExpectedReply::Silent;
        self.expected.extend([silent(), silent(), ExpectedReply::Own, silent(), silent()]);
    }

    /// Reads the facts again if they may differ; false if that failed.
    async fn refresh(&mut self, pump: &mut Pump) -> Result<bool, SessionError> {
        if !self.stale || self.failed || self.skipping || !self.capture.is_live() {
            return Ok(!self.skipping);
        }
        if !self.query_server(pump, &facts::QUESTION).await? {
            return Ok(false);
        }
        let facts = facts::read(&std::mem::take(&mut self.own_rows));
        self.statements.retain(|name, _| name.is_empty());
        self.record_prepared(&facts);
        if let Some(why) = facts.refused.clone().or_else(|| foreign_settings(pump)) {
            self.break_off(pump, &why);
        }
        self.apply_facts(facts);
        Ok(true)
    }

    fn counters(&self) -> String {
        format!(
            "SELECT coalesce(pg_catalog.sum(pg_catalog.pg_stat_get_xact_tuples_inserted(o) \
             + pg_catalog.pg_stat_get_xact_tuples_updated(o)), 0)::text, \
             coalesce(pg_catalog.sum(pg_catalog.pg_stat_get_xact_tuples_deleted(o)), 0)::text, \
             pg_catalog.pg_current_xact_id_if_assigned()::text FROM pg_catalog.unnest('{}'::pg_catalog.oid[]) o",
            self.audited
        )
    }

    /// Counters in the answer to the `nth` question for them.
    fn count(&self, nth: usize) -> Option<(Counts, String)> {
        let row = self.own_rows.get(nth)?;
        let text = |at: usize| Some(String::from_utf8_lossy(row.get(at)?.as_ref()?).into_owned());
        let counts = Counts { written: text(0)?.parse().ok()?, deleted: text(1)?.parse().ok()? };
        Some((counts, text(2).unwrap_or_default()))
    }

    /// Compares the captured rows with the server's counters in the answer to the `nth` question.
    fn compare(&mut self, pump: &Pump, nth: usize) {
        match self.count(nth) {
            Some((count, xid)) => {
                if let Err(missing) = self.transaction.audit(count, &xid) {
                    self.break_off(pump, &missing);
                }
                self.transaction.audited = true;
            }
            None => self.break_off(pump, "cannot read the server's counters"),
        }
    }

    /// Audits before a commit or a savepoint, if an audit is due.
    async fn audit(&mut self, pump: &mut Pump) -> Result<bool, SessionError> {
        if self.transaction.audited {
            return Ok(true);
        }
        if !self.query_server(pump, &self.counters()).await? {
            return Ok(false);
        }
        self.compare(pump, 0);
        Ok(true)
    }

    /// Prepares for COMMIT, which is sent next. Outer `None`: COMMIT is not possible any more, and the client has the
    /// error. Inner `None`: nothing is captured.
    async fn before_commit(&mut self, pump: &mut Pump) -> Result<Option<Option<PendingCommit>>, SessionError> {
        if !self.transaction.wrote || self.failed || self.skipping || !self.capture.is_live() {
            return Ok(Some(None));
        }
        if self.defers && !self.query_server(pump, "SET CONSTRAINTS ALL IMMEDIATE").await? {
            return Ok(None);
        }
        if !self.audit(pump).await? {
            return Ok(None);
        }
        Ok(Some(self.capture.is_live().then(|| self.capture.stamp())))
    }

    /// Records the reply to COMMIT.
    fn after_commit(&mut self, stamp: Option<PendingCommit>, committed: bool) {
        let stamp = match stamp {
            // There are no captured rows then; a follower that repeats statements needs transactions that only read,
            // too.
            None if committed && self.capture.is_live() && self.transaction.has_statements() => self.capture.stamp(),
            None => return self.transaction_over(),
            Some(stamp) => stamp,
        };
        self.stale |= self.transaction.touched;
        let written = if committed { self.transaction.committed(&self.context) } else { Default::default() };
        stamp.resolve(written);
        self.transaction_over();
    }

    fn transaction_over(&mut self) {
        self.stale |= self.transaction.touched;
        self.portals.clear();
        self.bound.clear();
        self.transaction = Transaction::default();
    }

    /// Ends a block by a query of the proxy's own. The proxy drops its completion; the client gets its ReadyForQuery.
    async fn roll_back(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        put_query(&mut self.to_server, "ROLLBACK");
        self.expected.push_back(ExpectedReply::Query { mute: true });
        self.drain(pump).await?;
        self.transaction_over();
        Ok(())
    }
}

/// Sends the bytes that wait, and keeps little memory for the next ones.
async fn send_all(stream: &mut Stream, waiting: &mut Vec<u8>) -> std::io::Result<()> {
    if !waiting.is_empty() {
        stream.send(waiting).await?;
        waiting.clear();
        waiting.shrink_to(SMALL_MESSAGE_BYTES);
    }
    Ok(())
}

/// Name and value of a setting that changes the text of values for a reader, if there is one.
fn foreign_settings(pump: &Pump) -> Option<String> {
    let setting = |name: &str| pump.parameters.get(name).map(|value| String::from_utf8_lossy(value).into_owned());
    let date = setting("DateStyle").filter(|style| !style.starts_with("ISO"));
    let interval = setting("IntervalStyle").filter(|style| style == "sql_standard");
    let encoding = setting("client_encoding").filter(|name| name != "UTF8" && name != "SQL_ASCII");
    let named = [("DateStyle", date), ("IntervalStyle", interval), ("client_encoding", encoding)];
    named.into_iter().find_map(|(name, value)| value.map(|value| format!("its {name} is {value}")))
}
