//! Writes of one transaction so far.

use crate::capture::{Capture, Change, MemoryShare, Running, StatementList, TransactionChanges};
use std::sync::Arc;
use stillpoint_migrate_capture::facts::SessionContext;
use stillpoint_migrate_capture::{Action, Control, Refusal, RewrittenStatement};
use stillpoint_migrate_control::rows::Operation;

/// Rows of a transaction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Rows inserted or updated.
    pub(super) written: u64,
    /// Rows deleted.
    pub(super) deleted: u64,
}

impl Counts {
    fn since(self, before: Counts) -> Counts {
        Counts {
            written: self.written.wrapping_sub(before.written),
            deleted: self.deleted.wrapping_sub(before.deleted),
        }
    }

    fn sum(self) -> u64 {
        self.written.wrapping_add(self.deleted)
    }
}

/// Writes of one transaction so far, and how far the server has confirmed them.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    written: TransactionChanges,
    /// Rows that came back since the last reading of the server's counters.
    counted: Counts,
    /// Counters at that reading; none if they are not known.
    baseline: Option<Counts>,
    /// A statement with ON CONFLICT was sent.
    pub(super) may_conflict: bool,
    /// Savepoints: name, and the number of changes, tokens and bytes before it.
    savepoints: Vec<(String, usize, usize, usize)>,
    /// The transaction sent a write, even one that failed.
    pub(super) wrote: bool,
    /// No write since the last audit.
    pub(super) audited: bool,
    /// The facts that statements are rewritten by may differ after it ends.
    pub(super) touched: bool,
    /// Set once the follower has the report of its begin.
    pub(super) running: Option<Running>,
    /// The transaction sees one snapshot from its first operation to its end.
    pub(super) one_snapshot: bool,
    /// Statements of its client, where statements are captured.
    operations: Vec<Operation>,
    held: MemoryShare,
}

impl Transaction {
    /// Returns true if the server's counters must be read before the next write.
    pub(super) fn needs_baseline(&self) -> bool {
        self.baseline.is_none()
    }

    /// Sets the server's counters before the first write.
    pub(super) fn set_baseline(&mut self, count: Counts) {
        self.baseline = Some(count);
    }

    /// Records a row that came back.
    pub(super) fn row(&mut self, rewritten: &RewrittenStatement, hidden: &str) -> Result<(), Refusal> {
        let image = rewritten.read(hidden)?;
        match rewritten.action {
            Action::Insert | Action::Upsert | Action::Update => self.counted.written += 1,
            Action::Delete => self.counted.deleted += 1,
        }
        self.written.bytes += hidden.len() + 64 * (1 + image.tokens.len());
        self.written.tokens.extend(image.tokens);
        self.written.tokens.extend(&rewritten.tokens);
        self.written.changes.push(Change {
            table: Arc::clone(&rewritten.table),
            columns: Arc::new(rewritten.image.clone()),
            action: rewritten.action,
            values: image.values,
        });
        Ok(())
    }

    /// Counts the bytes that wait for the commit; an error if they are too many.
    pub(super) fn reserve_memory(&mut self, capture: &Capture) -> Result<(), String> {
        self.held.set(capture, self.written.bytes)
    }

    /// Drops the writes: no follower needs them any more.
    pub(super) fn forget(&mut self) {
        (self.written, self.operations, self.held) = Default::default();
    }

    /// Compares with the server's counters; returns a text about the missing rows if they differ.
    ///
    /// With ON CONFLICT the server inserts a row before it knows that no other transaction inserts the same one. If
    /// another does, the server deletes the row again and counts both. So equal surpluses of written and deleted rows
    /// are not missing rows.
    pub(super) fn audit(&mut self, count: Counts, xid: &str) -> Result<(), String> {
        let (baseline, counted) = (self.baseline, self.counted.sum());
        let is_tried = |there: Counts| {
            let Counts { written, deleted } = there.since(self.counted);
            self.may_conflict && written == deleted && there.written >= self.counted.written
        };
        let result = match baseline.map(|before| count.since(before)) {
            Some(there) if there.sum() == counted || is_tried(there) => Ok(()),
            Some(there) => Err(format!(
                "audit: the server wrote {} rows in a transaction of which {counted} were captured",
                there.sum()
            )),
            None if counted == 0 => Ok(()),
            None => Err(format!("audit: {counted} rows were captured before the server's counters were read")),
        };
        (self.baseline, self.counted) = (Some(count), Counts::default());
        xid.clone_into(&mut self.written.xid);
        result
    }

    /// Records a statement about savepoints that was executed.
    pub(super) fn control(&mut self, control: &Control) {
        let find = |savepoints: &[(String, usize, usize, usize)], name: &str| {
            savepoints.iter().rposition(|(other, ..)| other == name)
        };
        match control {
            Control::Savepoint(name) => {
                let written = &self.written;
                self.savepoints.push((name.clone(), written.changes.len(), written.tokens.len(), written.bytes));
            }
            Control::Release(name) => {
                let at = find(&self.savepoints, name).unwrap_or(self.savepoints.len());
                self.savepoints.truncate(at);
            }
            Control::RollbackTo(name) => {
                // If there is no savepoint of this name, the server has returned an error, and the transaction has
                // failed.
                let Some(at) = find(&self.savepoints, name) else { return };
                self.savepoints.truncate(at + 1);
                let (_, changes, tokens, bytes) = self.savepoints[at];
                self.written.changes.truncate(changes);
                self.written.tokens.truncate(tokens);
                self.written.bytes = bytes;
                // The server counts the rows of a failed statement too, and does not report their number.
                (self.baseline, self.counted) = (None, Counts::default());
            }
            Control::Begin | Control::Commit { .. } | Control::Rollback { .. } => {}
        }
    }

    /// Records a statement, which is sent next.
    pub(super) fn record_statement(&mut self, writes: bool, text: &str) {
        self.written.bytes += text.len() + 64;
        self.operations.push(Operation { writes, text: text.to_owned() });
    }

    /// Returns true if a follower of statements needs the transaction.
    pub(super) fn has_statements(&self) -> bool {
        !self.operations.is_empty()
    }

    /// Returns the writes and statements of the committed transaction; `context` gives the texts their meaning.
    pub(super) fn committed(&mut self, context: &Arc<SessionContext>) -> TransactionChanges {
        let Transaction { mut written, running, operations, .. } = std::mem::take(self);
        written.tokens.sort_unstable();
        written.tokens.dedup();
        if !operations.is_empty() {
            written.statements_run =
                Some(StatementList { running: running.map(Running::committed), operations, context: context.clone() });
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_migrate_capture::{Catalogue, Column, Effect, Table, rewrite};

    fn delete() -> RewrittenStatement {
        let mut catalogue = Catalogue::new(["s".to_owned()]);
        let columns = vec![Column { name: "id".into(), ..Column::default() }];
        catalogue.add(Table {
            oid: 7,
            schema: "s".into(),
            name: "t".into(),
            columns,
            key: Some(vec![0]),
            ..Table::default()
        });
        match rewrite("DELETE FROM t", &catalogue) {
            Ok(Effect::Writes(rewritten)) => rewritten,
            other => panic!("{other:?}"),
        }
    }

    fn counts(written: u64, deleted: u64) -> Counts {
        Counts { written, deleted }
    }

    #[test]
    fn what_a_savepoint_takes_back_is_not_written() {
        let (delete, mut transaction) = (delete(), Transaction::default());
        transaction.set_baseline(counts(4, 6));
        transaction.row(&delete, "(1,11)").unwrap();
        transaction.audit(counts(4, 7), "5").unwrap();
        transaction.control(&Control::Savepoint("a".into()));
        transaction.row(&delete, "(2,12)").unwrap();
        transaction.control(&Control::Savepoint("b".into()));
        transaction.control(&Control::RollbackTo("a".into()));
        assert!(transaction.needs_baseline());
        transaction.set_baseline(counts(4, 9));
        transaction.row(&delete, "(3,13)").unwrap();
        transaction.audit(counts(4, 10), "5").unwrap();
        let written = transaction.committed(&Arc::default());
        let keys: Vec<_> = written.changes.iter().map(|change| change.values[0].clone().unwrap()).collect();
        assert_eq!((keys, written.tokens.len(), written.xid.as_str()), (vec!["1".to_owned(), "3".to_owned()], 2, "5"));
    }

    #[test]
    fn a_row_that_was_not_captured_is_found() {
        let (delete, mut transaction) = (delete(), Transaction::default());
        transaction.set_baseline(Counts::default());
        transaction.row(&delete, "(1,11)").unwrap();
        let missing = transaction.audit(counts(1, 2), "5").unwrap_err();
        assert!(missing.contains("3 rows") && missing.contains("1 were captured"), "{missing}");
    }

    #[test]
    fn rows_that_were_tried_and_given_up_are_none() {
        let (delete, mut transaction) = (delete(), Transaction::default());
        transaction.may_conflict = true;
        for (count, is_right) in [((0, 1), true), ((2, 3), true), ((1, 1), false), ((1, 3), false), ((2, 1), false)] {
            transaction.set_baseline(counts(7, 9));
            transaction.row(&delete, "(1,11)").unwrap();
            let audited = transaction.audit(counts(7 + count.0, 9 + count.1), "5");
            assert_eq!(audited.is_ok(), is_right, "{count:?}");
        }
    }
}
