//! Messages of the client.

use super::inbox::Message;
use super::statement_capture::has_parameters;
use super::statements::{Statement, StatementEffect, StatementFacts, depends_on_facts};
use super::{CapturedSession, ExpectedReply, QueryProtocol, SEND_THRESHOLD_BYTES, TWINS_MAX};
use crate::error::SessionError;
use crate::session::pump::Pump;
use std::sync::Arc;
use stillpoint_migrate_capture::{Control, RewrittenStatement, split};
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::frame::{self, put, put_cstr};
use stillpoint_migrate_wire::frontend::{self, SYNC, put_bind, put_close_statement, put_execute, put_parse};
use stillpoint_migrate_wire::hidden_column::put_bind_elsewhere;

impl CapturedSession {
    /// Handles one message of the client.
    pub(super) async fn request(&mut self, pump: &mut Pump, mut message: Message) -> Result<(), SessionError> {
        if pump.conversation.at_boundary() && message.tag != b'H' {
            pump.entry.begin(crate::clock::now_us());
        }
        let body = message.body();
        pump.note_captured(&frame::Message { tag: message.tag, body, len: body.len() });
        pump.conversation.frontend(message.tag);
        self.protocol = QueryProtocol::Extended;
        if self.skipping && message.tag != b'S' {
            return Ok(());
        }
        match message.tag {
            b'Q' => {
                // A text that the server refuses must not count as a statement that is not captured.
                let text = body.strip_suffix(&[0]).filter(|text| !text.contains(&0));
                let malformed = SessionError::ClientProtocol(WireError::Malformed("query"));
                let text = text.ok_or(malformed)?.to_vec();
                self.query(pump, &text, message).await
            }
            b'P' => {
                // The statement's text stays in memory.
                self.kept.extend(message.held.take());
                self.parse(pump, &message).await
            }
            b'B' => self.bind(pump, &message).await,
            b'D' => self.describe(&message),
            b'E' => self.execute(pump, &message).await,
            b'C' => {
                if let Some((b'S', name)) = body.split_first() {
                    self.statements.remove(name.strip_suffix(&[0]).unwrap_or(name));
                }
                self.forward(&message, ExpectedReply::Complete);
                Ok(())
            }
            b'H' => self.flush(pump).await,
            b'S' => self.sync(pump).await,
            b'F' => {
                self.break_off(pump, "a function was called by its object identifier");
                self.forward(&message, ExpectedReply::Query { mute: false });
                self.drain(pump).await
            }
            // Data of a copy after its end, which the server ignores.
            _ => {
                self.to_server.extend(&message.bytes);
                Ok(())
            }
        }
    }

    fn forward(&mut self, message: &Message, owed: ExpectedReply) {
        self.to_server.extend(&message.bytes);
        self.expected.push_back(owed);
    }

    /// Waits if needed, so that the server never gets more than it takes before its replies are read.
    async fn make_room(&mut self, pump: &mut Pump, more: usize) -> Result<(), SessionError> {
        if self.to_server.len() + more >= SEND_THRESHOLD_BYTES && !self.expected.is_empty() {
            self.flush(pump).await?;
        }
        Ok(())
    }

    async fn parse(&mut self, pump: &mut Pump, message: &Message) -> Result<(), SessionError> {
        self.make_room(pump, message.bytes.len()).await?;
        if self.skipping {
            return Ok(());
        }
        let malformed = || SessionError::ClientProtocol(WireError::Malformed("parse"));
        let (name, text) = frontend::parse_text(message.body()).ok_or_else(malformed)?;
        let types = message.body().get(name.len() + text.len() + 2..).ok_or_else(malformed)?.to_vec();
        if self.capture.of_statements() {
            // Parse already takes the snapshot.
            let judged = self.judge(text);
            if !self.report_snapshot(pump, text, &judged).await? {
                return Ok(());
            }
        }
        let owed = ExpectedReply::Parse(name.to_vec(), Arc::new(Statement { text: text.to_vec(), types }));
        self.forward(message, owed);
        Ok(())
    }

    /// Statement that was parsed under a name, or is about to be.
    fn statement(&self, name: &[u8]) -> Option<Arc<Statement>> {
        let owed = self.expected.iter().rev().find_map(|owed| match owed {
            ExpectedReply::Parse(other, statement) if other == name => Some(statement),
            _ => None,
        });
        owed.or_else(|| self.statements.get(name)).cloned()
    }

    async fn bind(&mut self, pump: &mut Pump, message: &Message) -> Result<(), SessionError> {
        self.make_room(pump, message.bytes.len()).await?;
        if self.skipping {
            return Ok(());
        }
        let malformed = || SessionError::ClientProtocol(WireError::Malformed("bind"));
        let (portal, name) = frontend::parse_text(message.body()).ok_or_else(malformed)?;
        let Some(statement) = self.statement(name) else {
            self.portals.remove(portal);
            self.forward(message, ExpectedReply::Complete);
            return Ok(());
        };
        if self.stale && depends_on_facts(&statement.text) && !self.refresh(pump).await? {
            return Ok(());
        }
        let judged = self.judge(&statement.text);
        self.portals.insert(portal.to_vec(), judged.clone());
        if self.capture.of_statements() {
            if !self.report_snapshot(pump, &statement.text, &judged).await? {
                return Ok(());
            }
            let behind = message.body().get(portal.len() + name.len() + 2..).ok_or_else(malformed)?;
            self.bound.insert(portal.to_vec(), (statement.clone(), has_parameters(behind)));
        }
        match judged.writes() {
            Some(rewritten) if self.capture.is_live() && !self.failed => {
                let twin = self.twin(&statement, &rewritten.text);
                put_bind_elsewhere(&mut self.to_server, message.body(), &twin).map_err(SessionError::ClientProtocol)?;
                self.expected.push_back(ExpectedReply::Complete);
            }
            _ => {
                if judged.writes().is_some() {
                    let plain = StatementFacts { what: StatementEffect::Nothing, touches: false };
                    self.portals.insert(portal.to_vec(), Arc::new(plain));
                }
                self.forward(message, ExpectedReply::Complete);
            }
        }
        Ok(())
    }

    /// Name of the statement's twin, which is parsed if there is none.
    fn twin(&mut self, statement: &Arc<Statement>, text: &str) -> Vec<u8> {
        if let Some(name) = self.twins.get(statement) {
            return name.clone();
        }
        if self.twins.len() >= TWINS_MAX {
            for (_, name) in self.twins.drain() {
                put_close_statement(&mut self.to_server, &name);
                self.expected.push_back(ExpectedReply::Silent);
            }
        }
        self.twins_made += 1;
        let name = format!("stillpoint_twin_{}", self.twins_made).into_bytes();
        put(&mut self.to_server, b'P', |body| {
            put_cstr(body, &name);
            put_cstr(body, text.as_bytes());
            body.extend(&statement.types);
        });
        self.expected.push_back(ExpectedReply::Twin(statement.clone()));
        self.twins.insert(statement.clone(), name.clone());
        name
    }

    fn describe(&mut self, message: &Message) -> Result<(), SessionError> {
        let hides = match message.body().split_first() {
            Some((b'P', name)) => {
                let judged = self.portals.get(name.strip_suffix(&[0]).unwrap_or(name));
                judged.and_then(|judged| judged.writes().cloned())
            }
            _ => None,
        };
        self.forward(message, ExpectedReply::Describe(hides));
        Ok(())
    }

    async fn execute(&mut self, pump: &mut Pump, message: &Message) -> Result<(), SessionError> {
        let name = message.body().split(|b| *b == 0).next().unwrap_or_default();
        let Some(judged) = self.portals.get(name).cloned() else {
            self.forward(message, ExpectedReply::Execute(None));
            return self.flush(pump).await;
        };
        let portal = name.to_vec();
        if let Some((statement, parameters)) = self.bound.get(name).cloned() {
            self.record_statement(pump, &statement.text, &judged, parameters);
        }
        self.run_portal(pump, &judged, judged.writes().cloned(), |to| {
            if judged.writes().is_some_and(|rewritten| !rewritten.client_sees_rows) {
                // A row limit applies only to rows that the client gets.
                put_execute(to, &portal);
            } else {
                to.extend(&message.bytes);
            }
        })
        .await
    }

    /// Executes the bound portal, with all that belongs to it.
    async fn run_portal(
        &mut self,
        pump: &mut Pump,
        judged: &StatementFacts,
        writes: Option<Arc<RewrittenStatement>>,
        put_execute: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), SessionError> {
        let savepoint = matches!(judged.what, StatementEffect::Control(Control::Savepoint(_)));
        if savepoint && self.transaction.wrote && !self.failed && !self.audit(pump).await? {
            return Ok(());
        }
        let mut stamp = None;
        match &judged.what {
            StatementEffect::Writes(_) if writes.is_some() => {
                return self.run_write(pump, judged, writes, put_execute).await;
            }
            StatementEffect::Control(Control::Commit { .. }) => match self.before_commit(pump).await? {
                Some(taken) => stamp = taken,
                None => {
                    self.must_roll_back = self.block;
                    return Ok(());
                }
            },
            StatementEffect::Beyond(why) if !self.failed => self.break_off(pump, why),
            _ => {}
        }
        self.tag.clear();
        put_execute(&mut self.to_server);
        self.expected.push_back(ExpectedReply::Execute(writes));
        self.flush(pump).await?;
        self.executed(judged, stamp);
        Ok(())
    }

    /// Executes a write. Reads the server's counters before it, and after it if the transaction ends there.
    async fn run_write(
        &mut self,
        pump: &mut Pump,
        judged: &StatementFacts,
        writes: Option<Arc<RewrittenStatement>>,
        put_execute: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), SessionError> {
        let asks = self.transaction.needs_baseline();
        let ends = !self.block && !self.defers && (self.hold || self.from_client.next_tag() == Some(b'S'));
        (self.transaction.wrote, self.transaction.audited) = (true, false);
        self.transaction.may_conflict |= writes.as_ref().is_some_and(|writes| writes.may_conflict);
        self.own_rows.clear();
        if asks {
            self.send_own_query(&self.counters());
        }
        put_execute(&mut self.to_server);
        self.expected.push_back(ExpectedReply::Execute(writes));
        if ends {
            self.send_own_query(&self.counters());
        }
        self.flush(pump).await?;
        if asks && let Some((count, _)) = self.count(0) {
            self.transaction.set_baseline(count);
        }
        if ends && !self.skipping {
            self.compare(pump, usize::from(asks));
        }
        self.executed(judged, None);
        Ok(())
    }

    /// Records that the replies to a statement have arrived.
    fn executed(&mut self, judged: &StatementFacts, stamp: Option<crate::capture::PendingCommit>) {
        let good = !self.skipping;
        match &judged.what {
            StatementEffect::Control(Control::Commit { chain }) => {
                // A COMMIT of a failed transaction rolls it back, without an error.
                self.after_commit(stamp, good && self.tag.starts_with(b"COMMIT"));
                if good {
                    (self.block, self.failed) = (*chain, false);
                }
            }
            StatementEffect::Control(Control::Rollback { chain }) if good => {
                self.transaction_over();
                (self.block, self.failed) = (*chain, false);
            }
            StatementEffect::Control(Control::Begin) if good => self.block = true,
            StatementEffect::Control(control) if good => {
                self.failed &= !matches!(control, Control::RollbackTo(_));
                self.transaction.control(control);
            }
            _ => {}
        }
        if judged.touches {
            self.touched();
        }
    }

    /// Handles a Sync, which ends a transaction without a block.
    async fn sync(&mut self, pump: &mut Pump) -> Result<(), SessionError> {
        let mut stamp = None;
        if !self.block {
            // If the commit is not possible, the client has the error, and the Sync ends the transaction.
            stamp = self.before_commit(pump).await?.flatten();
        }
        let roll_back = std::mem::take(&mut self.must_roll_back);
        let errors = self.skipping;
        self.to_server.extend(SYNC);
        self.expected.push_back(ExpectedReply::Sync { mute: roll_back });
        self.errors_until_ready = false;
        self.drain(pump).await?;
        if roll_back {
            return self.roll_back(pump).await;
        }
        if stamp.is_some() {
            self.after_commit(stamp, !errors && !self.errors_until_ready);
        } else if !self.block {
            self.after_commit(None, !errors && !self.errors_until_ready);
        }
        Ok(())
    }

    /// Handles a Query: unchanged if it holds nothing to capture, otherwise its statements one by one.
    async fn query(&mut self, pump: &mut Pump, text: &[u8], message: Message) -> Result<(), SessionError> {
        self.statements.remove(&b""[..]);
        let pieces = std::str::from_utf8(text).ok().and_then(split);
        let Some(pieces) = pieces else {
            self.break_off(pump, "a text of several statements cannot be split");
            return self.whole_query(pump, &message).await;
        };
        let offset = |at: usize| String::from_utf8_lossy(&text[..at]).chars().count();
        let offsets: Vec<usize> = pieces.iter().map(|piece| offset(piece.start)).collect();
        let texts: Vec<&[u8]> = pieces.into_iter().map(|piece| &text[piece]).collect();
        let judged: Vec<Arc<StatementFacts>> = texts.iter().map(|text| self.judge(text)).collect();
        let plain = |judged: &Arc<StatementFacts>| matches!(judged.what, StatementEffect::Nothing) && !judged.touches;
        let together = !self.capture.of_statements() && judged.iter().all(plain);
        if texts.len() > 1 && self.capture.is_live() && !together {
            return self.pieces(pump, &texts, &offsets).await;
        }
        let [text] = &texts[..] else { return self.whole_query(pump, &message).await };
        if self.stale && depends_on_facts(text) && !self.refresh_before_query(pump).await? {
            return Ok(());
        }
        let judged = self.judge(text);
        let alone = match &judged.what {
            StatementEffect::Writes(_) => !self.failed && self.capture.is_live(),
            StatementEffect::Control(_) => self.transaction.wrote && self.capture.is_live(),
            StatementEffect::Beyond(why) => {
                if !self.failed {
                    self.break_off(pump, why);
                }
                false
            }
            StatementEffect::Nothing => false,
        };
        if alone {
            return self.pieces(pump, &texts, &offsets).await;
        }
        if !self.report_snapshot_before_query(pump, text, &judged).await? {
            return Ok(());
        }
        self.record_statement(pump, text, &judged, false);
        self.errors_until_ready = false;
        self.whole_query(pump, &message).await?;
        if let StatementEffect::Control(control) = &judged.what {
            self.transaction.control(control);
        }
        if judged.touches {
            self.touched();
        }
        if !self.block {
            let committed = !self.errors_until_ready && !self.tag.starts_with(b"ROLLBACK");
            self.after_commit(None, committed);
        }
        Ok(())
    }

    async fn whole_query(&mut self, pump: &mut Pump, message: &Message) -> Result<(), SessionError> {
        self.forward(message, ExpectedReply::Query { mute: false });
        self.drain(pump).await
    }

    /// Reads the facts before a Query. On failure the query is over, and the client has the error.
    async fn refresh_before_query(&mut self, pump: &mut Pump) -> Result<bool, SessionError> {
        self.protocol = QueryProtocol::Simple;
        let good = self.refresh(pump).await?;
        self.to_server.extend(SYNC);
        self.expected.push_back(ExpectedReply::Sync { mute: good });
        self.drain(pump).await?;
        self.protocol = QueryProtocol::Extended;
        Ok(good)
    }

    /// Executes the statements of one Query by the extended protocol: they are one transaction, as in a Query.
    async fn pieces(&mut self, pump: &mut Pump, texts: &[&[u8]], offsets: &[usize]) -> Result<(), SessionError> {
        self.protocol = QueryProtocol::Simple;
        for (at, (text, offset)) in texts.iter().zip(offsets).enumerate() {
            self.offset = *offset;
            if self.stale && depends_on_facts(text) && !self.refresh(pump).await? {
                break;
            }
            let judged = self.judge(text);
            if !self.report_snapshot(pump, text, &judged).await? {
                break;
            }
            self.record_statement(pump, text, &judged, false);
            let writes = judged.writes().filter(|_| !self.failed && self.capture.is_live());
            let sent = writes.map_or(*text, |rewritten| rewritten.text.as_bytes());
            put_parse(&mut self.to_server, b"", sent, &[]);
            put_bind(&mut self.to_server, b"", b"", &[]);
            put(&mut self.to_server, b'D', |body| body.extend(*b"P\0"));
            self.expected.extend([
                ExpectedReply::Silent,
                ExpectedReply::Silent,
                ExpectedReply::Describe(writes.cloned()),
            ]);
            // The client gets the last completion only after the commit that it stands for.
            self.hold = at + 1 == texts.len() && !matches!(judged.what, StatementEffect::Control(_));
            self.run_portal(pump, &judged, writes.cloned(), |to| put_execute(to, b"")).await?;
            self.hold = false;
            if self.skipping {
                break;
            }
        }
        self.offset = 0;
        if !self.skipping {
            put_close_statement(&mut self.to_server, b"");
            self.expected.push_back(ExpectedReply::Silent);
        }
        self.sync(pump).await
    }
}
