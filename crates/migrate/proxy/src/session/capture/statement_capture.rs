//! Statements as the client sent them, with their transactions' snapshots, for a follower that repeats them.
//!
//! A statement of the proxy's own asks for the snapshot, in the client's transaction and before its first operation,
//! which then sees that snapshot. So no other session has to wait meanwhile, as it does in Algorithm 1 of the paper.
//! The follower gets the report of the transaction before any message is sent that could take the snapshot.

use super::statements::{StatementEffect, StatementFacts};
use super::{CapturedSession, ExpectedReply, QueryProtocol};
use crate::error::SessionError;
use crate::session::pump::Pump;
use stillpoint_migrate_capture::{Control, check_repeatable, only_reads};
use stillpoint_migrate_wire::frontend::SYNC;

/// Asks for a transaction's snapshot, and if the transaction sees it to its end.
const SNAPSHOT_QUERY: &str = "SELECT pg_catalog.pg_current_snapshot()::pg_catalog.text, \
    pg_catalog.current_setting('transaction_isolation') IN ('repeatable read', 'serializable')";

/// First words of statements that take no snapshot and read no row.
const NO_SNAPSHOT_WORDS: [&str; 9] =
    ["SET", "RESET", "SHOW", "LISTEN", "UNLISTEN", "DISCARD", "DEALLOCATE", "CHECKPOINT", ""];

/// First words of statements that count as an operation that reads.
const READ_WORDS: [&str; 4] = ["SELECT", "WITH", "VALUES", "TABLE"];

fn first_word(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(200)]).into_owned();
    let word = text.trim_start_matches(|c: char| c == '(' || c.is_whitespace());
    word.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default().to_ascii_uppercase()
}

/// Returns true if sending the statement takes the transaction's snapshot.
fn takes_snapshot(text: &[u8], judged: &StatementFacts) -> bool {
    !matches!(judged.what, StatementEffect::Control(_)) && !NO_SNAPSHOT_WORDS.contains(&first_word(text).as_str())
}

impl CapturedSession {
    fn captures_statements(&self) -> bool {
        self.capture.of_statements() && self.capture.is_live() && !self.failed && !self.skipping
    }

    /// Reports the transaction's snapshot to the follower; the caller must send nothing of the statement before. False
    /// if the question failed; the client has then got the error.
    pub(super) async fn report_snapshot(
        &mut self,
        pump: &mut Pump,
        text: &[u8],
        judged: &StatementFacts,
    ) -> Result<bool, SessionError> {
        if !self.captures_statements() || self.transaction.running.is_some() || !takes_snapshot(text, judged) {
            return Ok(true);
        }
        self.transaction.running = Some(self.capture.begins());
        if !self.query_server(pump, SNAPSHOT_QUERY).await? {
            return Ok(false);
        }
        let row = self.own_rows.first();
        let value = |at: usize| row.and_then(|row| row.get(at)?.as_ref()).map(|value| String::from_utf8_lossy(value));
        match (value(0), value(1)) {
            (Some(snapshot), Some(one)) => {
                self.transaction.one_snapshot = one == "t";
                if let Some(running) = &self.transaction.running {
                    running.report_snapshot(snapshot.into_owned());
                }
            }
            _ => self.break_off(pump, "cannot read the snapshot of a transaction"),
        }
        Ok(true)
    }

    /// Reports the snapshot before a Query that is sent unchanged. On failure the query is over, and the client has the
    /// error. A single statement that does not write has no place in any order.
    pub(super) async fn report_snapshot_before_query(
        &mut self,
        pump: &mut Pump,
        text: &[u8],
        judged: &StatementFacts,
    ) -> Result<bool, SessionError> {
        if !self.block
            || !self.captures_statements()
            || self.transaction.running.is_some()
            || !takes_snapshot(text, judged)
        {
            return Ok(true);
        }
        self.protocol = QueryProtocol::Simple;
        let good = self.report_snapshot(pump, text, judged).await?;
        self.to_server.extend(SYNC);
        self.expected.push_back(ExpectedReply::Sync { mute: good });
        self.drain(pump).await?;
        self.protocol = QueryProtocol::Extended;
        Ok(good)
    }

    /// Records a statement, which is sent next.
    pub(super) fn record_statement(&mut self, pump: &Pump, text: &[u8], judged: &StatementFacts, parameters: bool) {
        if !self.captures_statements() {
            return;
        }
        let word = first_word(text);
        let writes = match &judged.what {
            StatementEffect::Control(Control::Savepoint(_)) => return self.break_off(pump, "statements: a savepoint"),
            StatementEffect::Control(_) | StatementEffect::Beyond(_) => return,
            StatementEffect::Writes(_) => true,
            StatementEffect::Nothing
                if judged.touches && !text.to_ascii_uppercase().starts_with(b"SET TRANSACTION") =>
            {
                return self.break_off(pump, &format!("statements: {word} changes the effect of later statements"));
            }
            StatementEffect::Nothing if READ_WORDS.contains(&word.as_str()) => false,
            StatementEffect::Nothing => return,
        };
        let Ok(text) = std::str::from_utf8(text) else { return };
        if parameters && writes {
            return self.break_off(pump, "statements: a statement has parameters");
        }
        if writes {
            if !self.transaction.one_snapshot {
                return self.break_off(pump, "statements: a transaction that writes is not at REPEATABLE READ");
            }
            if let Err(refusal) = check_repeatable(text, &self.catalogue) {
                return self.break_off(pump, &format!("statements: {refusal}"));
            }
        } else if !only_reads(text, &self.catalogue) {
            // The statement wrote nothing; repeating it would repeat its effect on the server or on its session.
            return;
        }
        self.transaction.record_statement(writes, text);
    }
}

/// Returns true if a Bind has parameter values; `behind_names` are its bytes after the names.
pub(super) fn has_parameters(behind_names: &[u8]) -> bool {
    let word = |at: usize| Some(u16::from_be_bytes([*behind_names.get(at)?, *behind_names.get(at + 1)?]));
    let count = word(0).and_then(|formats| word(2 + 2 * usize::from(formats)));
    count != Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bind_tells_whether_it_brings_values() {
        assert!(!has_parameters(&[0, 0, 0, 0, 0, 0]));
        assert!(!has_parameters(&[0, 1, 0, 1, 0, 0, 0, 0]));
        assert!(has_parameters(&[0, 0, 0, 1, 0, 0, 0, 1, b'x', 0, 0]));
        assert!(has_parameters(&[0]), "what is cut off is not believed");
    }

    #[test]
    fn what_reads_takes_a_snapshot() {
        let judged = |what| StatementFacts { what, touches: false };
        for (text, takes) in
            [("select 1", true), (" (SELECT 1)", true), ("set x = 1", false), ("LOCK TABLE t", true), ("", false)]
        {
            assert_eq!(takes_snapshot(text.as_bytes(), &judged(StatementEffect::Nothing)), takes, "{text}");
        }
        assert!(!takes_snapshot(b"COMMIT", &judged(StatementEffect::Control(Control::Commit { chain: false }))));
    }
}
