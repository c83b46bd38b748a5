//! Messages of the server, and the part of them that the client gets.

use super::inbox::Message;
use super::{CapturedSession, ExpectedReply, QueryProtocol};
use crate::counters::Counters;
use crate::error::SessionError;
use crate::session::pump::Pump;
use std::sync::Arc;
use stillpoint_migrate_capture::RewrittenStatement;
use stillpoint_migrate_control::Activity;
use stillpoint_migrate_wire::frame::HEADER_LEN;
use stillpoint_migrate_wire::hidden_column::{
    first_value, put_description_without_first, put_error_moved, put_row_without_first,
};
use stillpoint_migrate_wire::{Status, WireError, backend};

impl CapturedSession {
    /// Handles one message of the server.
    pub(super) fn reply(&mut self, pump: &mut Pump, mut message: Message) -> Result<(), SessionError> {
        let extended = self.protocol == QueryProtocol::Extended;
        match message.tag {
            b'S' => {
                let (name, value) = backend::parameter_status(message.body()).map_err(SessionError::ServerProtocol)?;
                Arc::make_mut(&mut pump.parameters).insert(name.to_owned(), value.to_vec());
                self.pass(&message);
            }
            b'A' => {
                let malformed = SessionError::ServerProtocol(WireError::Malformed("notification"));
                let sender = message.bytes[HEADER_LEN..].first_chunk_mut().ok_or(malformed)?;
                *sender = pump.ids.of_clients(u32::from_be_bytes(*sender)).to_be_bytes();
                self.pass(&message);
            }
            // The client does not get warnings about the proxy's own statements.
            b'N' if matches!(self.expected.front(), Some(ExpectedReply::Own)) => {}
            b'E' => self.failed_reply(pump, &message),
            b'Z' => self.ready(pump, &message)?,
            b'1' | b'2' | b'3' => match self.expected.pop_front() {
                Some(ExpectedReply::Parse(name, statement)) => {
                    self.statements.insert(name, statement);
                    self.pass(&message);
                }
                Some(ExpectedReply::Complete) if extended => self.pass(&message),
                _ => {}
            },
            b'T' | b'n' => self.description(&message)?,
            b'D' => self.row(pump, &message)?,
            b'C' | b'I' | b's' => self.completion(pump, message),
            b'G' => {
                self.copying = true;
                pump.conversation.backend(b'G');
                self.pass(&message);
            }
            b'W' => {
                pump.conversation.backend(b'W');
                self.pass(&message);
            }
            _ => self.pass(&message),
        }
        Ok(())
    }

    fn pass(&mut self, message: &Message) {
        self.to_client.extend(&message.bytes);
    }

    /// Handles an error: the server skips everything up to the next Sync, or is done with the query.
    fn failed_reply(&mut self, pump: &mut Pump, message: &Message) {
        pump.conversation.backend(b'E');
        self.copying = false;
        self.errors_until_ready = true;
        let (to, moved) = (&mut self.to_client, self.offset);
        if moved == 0 || put_error_moved(to, message.body(), moved).is_err() {
            self.pass(message);
        }
        self.held = None;
        self.failed |= self.block;
        if matches!(self.expected.front(), None | Some(ExpectedReply::Query { .. } | ExpectedReply::Sync { .. })) {
            return;
        }
        if let Some(ExpectedReply::Twin(key)) = self.expected.front() {
            // The client's own text was parsed before: the server refuses the proxy's text.
            let beginning = beginning(&String::from_utf8_lossy(&key.text));
            self.break_off(pump, &format!("the server rejects the rewritten form of `{beginning} ...`"));
        }
        while let Some(owed) = self.expected.front() {
            match owed {
                ExpectedReply::Sync { .. } | ExpectedReply::Query { .. } => return,
                ExpectedReply::Twin(key) => drop(self.twins.remove(key)),
                _ => {}
            }
            self.expected.pop_front();
        }
        self.skipping = true;
    }

    fn ready(&mut self, pump: &mut Pump, message: &Message) -> Result<(), SessionError> {
        let status = backend::ready(message.body()).map_err(SessionError::ServerProtocol)?;
        (self.block, self.failed) = (status != Status::Idle, status == Status::Failed);
        (self.skipping, self.copying) = (false, false);
        if let Some(ExpectedReply::Sync { mute: true }) = self.expected.pop_front() {
            return Ok(());
        }
        if let Some(held) = self.held.take() {
            self.to_client.extend(held);
        }
        self.pass(message);
        pump.conversation.ready(status);
        Counters::add(&pump.entry.counters.statements, 1);
        pump.entry.set(match status {
            _ if !pump.conversation.at_boundary() && status == Status::Idle => Activity::Active,
            Status::Idle => Activity::Idle,
            Status::InTransaction | Status::Failed => Activity::InTransaction,
        });
        Ok(())
    }

    fn description(&mut self, message: &Message) -> Result<(), SessionError> {
        let Some(ExpectedReply::Describe(_)) = self.expected.front() else {
            // The description of a Query's rows.
            self.pass(message);
            return Ok(());
        };
        let Some(ExpectedReply::Describe(hides)) = self.expected.pop_front() else { return Ok(()) };
        match hides {
            Some(rewritten) if message.tag == b'T' => {
                if rewritten.client_sees_rows {
                    put_description_without_first(&mut self.to_client, message.body())
                        .map_err(SessionError::ServerProtocol)?;
                } else if self.protocol == QueryProtocol::Extended {
                    self.to_client.extend(*b"n\0\0\0\x04");
                }
            }
            _ if message.tag == b'T' || self.protocol == QueryProtocol::Extended => self.pass(message),
            _ => {}
        }
        Ok(())
    }

    fn row(&mut self, pump: &Pump, message: &Message) -> Result<(), SessionError> {
        match self.expected.front() {
            Some(ExpectedReply::Own) => {
                let row = backend::row(message.body()).map_err(SessionError::ServerProtocol)?;
                self.own_rows.push(row.into_iter().map(|value| value.map(<[u8]>::to_vec)).collect());
            }
            Some(ExpectedReply::Execute(Some(rewritten))) => {
                let rewritten = Arc::clone(rewritten);
                self.captured_row(pump, &rewritten, message).map_err(SessionError::ServerProtocol)?;
            }
            _ => self.pass(message),
        }
        Ok(())
    }

    fn captured_row(
        &mut self,
        pump: &Pump,
        rewritten: &RewrittenStatement,
        message: &Message,
    ) -> Result<(), stillpoint_migrate_wire::WireError> {
        let (first, others) = first_value(message.body())?;
        let hidden = first.and_then(|hidden| std::str::from_utf8(hidden).ok()).unwrap_or_default();
        if self.capture.is_live() {
            let taken = self.transaction.row(rewritten, hidden).map_err(|refusal| refusal.to_string());
            if let Err(why) = taken.and_then(|()| self.transaction.reserve_memory(&self.capture)) {
                self.break_off(pump, &why);
            }
        }
        if !self.capture.is_live() {
            self.transaction.forget();
        }
        if rewritten.client_sees_rows {
            put_row_without_first(&mut self.to_client, message.body(), others)?;
        }
        Ok(())
    }

    fn completion(&mut self, pump: &mut Pump, message: Message) {
        match self.expected.front() {
            Some(ExpectedReply::Own) => drop(self.expected.pop_front()),
            Some(ExpectedReply::Query { mute: true }) => {}
            Some(ExpectedReply::Query { mute: false }) => {
                pump.conversation.backend(b'C');
                self.tag = message.body().to_vec();
                self.pass(&message);
            }
            _ => {
                self.expected.pop_front();
                pump.conversation.backend(b'C');
                self.tag = message.body().to_vec();
                if self.hold {
                    self.held = Some(message.bytes);
                } else {
                    self.pass(&message);
                }
            }
        }
    }
}

/// The words that a statement begins with, without any of its values: others may read this text.
pub(super) fn beginning(text: &str) -> String {
    let word = |word: &&str| word.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.'));
    let words = text.split_whitespace().take(6).take_while(word).filter(|w| !w.starts_with(char::is_numeric));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_is_told_of_without_its_values() {
        assert_eq!(beginning("INSERT INTO s.users (a) VALUES ('secret')"), "INSERT INTO s.users");
        assert_eq!(beginning("UPDATE t SET a = 5 WHERE b = 'secret'"), "UPDATE t SET a");
        assert_eq!(beginning("DELETE FROM t WHERE pin=1234"), "DELETE FROM t WHERE");
        assert_eq!(beginning("/* secret */ SELECT 1"), "");
    }
}
