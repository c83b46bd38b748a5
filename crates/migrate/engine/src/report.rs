//! Report of the check: findings, and the sources of changes.

use crate::Capture;
use serde::Serialize;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::ServerError;

/// Handling of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is moved, and kept up to date.
    Moved,
    /// It is changed on the source for the time of the migration.
    Changed,
    /// It is not moved; the note says why that is harmless, or what the operator can do.
    NotMoved,
    /// It makes the check refuse the migration.
    Refused,
    /// It was not checked; the note says why.
    NotLookedAt,
}

/// One object that was found, and its handling.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Kind of object: table, trigger, sequence, type, ...
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// Handling of the object.
    pub verdict: Verdict,
    /// Reason and details.
    pub note: String,
}

/// Share of the writes to a table that a source of changes reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coverage {
    /// All writes.
    All,
    /// All writes, except statements that leave a column to a default computed at each write: such a statement ends the
    /// migration.
    Given,
    /// Only new rows: any other write ends the migration.
    NewRows,
    /// No writes: a migration from this source is refused.
    Nothing,
}

/// Ability of a source of changes, for one table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SourceCoverage {
    /// Share of the writes that it reports.
    pub carries: Coverage,
    /// Reason why it does not report all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl SourceCoverage {
    pub(crate) fn all() -> SourceCoverage {
        SourceCoverage { carries: Coverage::All, why: None }
    }

    pub(crate) fn nothing(why: impl Into<String>) -> SourceCoverage {
        SourceCoverage { carries: Coverage::Nothing, why: Some(why.into()) }
    }
}

/// The source that captures the changes of one table, and the sources that could. All tables of a database have the same
/// source, because two sources have no common order for a transaction that writes to tables of both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TableSources {
    /// Schema and name.
    pub table: String,
    /// Source that captures its changes.
    pub by: Capture,
    /// The source's log.
    pub log: SourceCoverage,
    /// Images of rows, by the proxy.
    pub rows: SourceCoverage,
    /// Statements, by the proxy, as far as the table is concerned: each statement is checked for repetition when it arrives.
    pub statements: SourceCoverage,
}

/// Result of the check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Source that captures changes, and the reason, as text.
    pub capture: String,
    /// The same source, for programs.
    pub source: Capture,
    /// Sources for the changes of each table, by name.
    pub tables: Vec<TableSources>,
    /// Size of all tables that are moved, in bytes.
    pub bytes: u64,
    /// All findings, by kind and name.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Texts of all refusals, for one error message.
    pub fn refusals(&self) -> Vec<String> {
        let refused = self.findings.iter().filter(|finding| finding.verdict == Verdict::Refused);
        refused.map(|finding| format!("{} {}: {}", finding.kind, finding.name, finding.note)).collect()
    }

    /// Returns an error if anything is refused.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the texts of all refusals.
    pub fn accepted(&self) -> Result<(), Error> {
        let refusals = self.refusals();
        if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
    }
}

impl Finding {
    /// Makes a finding.
    pub(crate) fn new(kind: &str, name: impl Into<String>, verdict: Verdict, note: impl Into<String>) -> Finding {
        Finding { kind: kind.into(), name: name.into(), verdict, note: note.into() }
    }
}

/// Adds a refusal.
pub(crate) fn refuse(findings: &mut Vec<Finding>, kind: &str, name: impl Into<String>, note: impl Into<String>) {
    findings.push(Finding::new(kind, name, Verdict::Refused, note));
}

/// Adds a finding about something that was not checked.
pub(crate) fn leave_out(findings: &mut Vec<Finding>, kind: &str, name: impl Into<String>, note: impl Into<String>) {
    findings.push(Finding::new(kind, name, Verdict::NotLookedAt, note));
}

/// Formats a server's or program's error for the operator; other errors are unchanged.
pub(crate) fn short_message(error: &Error) -> String {
    match error {
        Error::Server(ServerError::Sql { code, message, .. }) => format!("{message} ({code})"),
        Error::Program { why, .. } => why.clone(),
        other => other.to_string(),
    }
}
