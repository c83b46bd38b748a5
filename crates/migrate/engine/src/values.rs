//! Checks rows for a limited time: finds text that cannot be written in UTF8, and values whose text is longer than a gigabyte,
//! which no server can send to another.

use crate::Selection;
use crate::report::{Finding, Verdict, leave_out, refuse, short_message};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::TableDef;
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, identifier, number, text};

/// Maximum time for the check of all tables.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of a row's values, in bytes, above which the row may not fit into a message.
const ROW_BYTES_MAX: u64 = (1 << 30) - (64 << 10);
/// Stored size in bytes below which a value is never that long: compression makes it at most 255 times smaller.
const STORED_BYTES_MIN: u64 = 1 << 20;
/// Stored size in bytes above which the text of a value of another type than text or bytea may be that long.
const SUSPECT_STORED_BYTES: u64 = 32 << 20;

/// Checks all tables of a database, and adds findings for problems and for tables not checked.
///
/// # Errors
///
/// Errors of the server, except for those about single rows.
pub(crate) async fn check_rows(
    source: &Server,
    selection: &Selection,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let (mut link, tables) = smallest_first(source, selection).await?;
    let begun = Instant::now();
    check_long_values(&mut link, &tables, begun, findings).await?;
    check_encoding(&mut link, &tables, begun, findings).await
}

/// Returns tables with rows whose text is longer than a server can send, as far as a limited time suffices to find them. A
/// change that the log does not report may be of one of them.
pub(crate) async fn tables_with_long_values(source: &Server, selection: &Selection) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    let (mut link, tables) = smallest_first(source, selection).await?;
    check_long_values(&mut link, &tables, Instant::now(), &mut findings).await?;
    let long = findings.into_iter().filter(|finding| finding.verdict != Verdict::NotLookedAt);
    Ok(long.map(|finding| finding.name).collect())
}

/// Connects, and lists the tables smallest first, so that most of them are checked before the time is over.
pub(crate) async fn smallest_first(source: &Server, selection: &Selection) -> Result<(Link, Vec<TableDef>), Error> {
    let mut link = Link::connect(source, Purpose::Statements, &[]).await?;
    let mut tables = selection.inventory(&mut link).await?.tables;
    tables.sort_by_key(|table| table.bytes);
    Ok((link, tables))
}

/// Runs a query about a table in the time that is left; the inner error is the reason why it has no answer.
pub(crate) async fn run_check_query(
    link: &mut Link,
    sql: &str,
    begun: Instant,
) -> Result<Result<stillpoint_migrate_postgres::link::Row, Error>, Error> {
    let left = CHECK_TIMEOUT.saturating_sub(begun.elapsed()).as_millis().max(1);
    link.query(&format!("SET statement_timeout = {left}")).await?;
    match link.query(sql).await {
        Ok(rows) => Ok(Ok(rows.into_iter().next().unwrap_or_default())),
        Err(error @ ServerError::Sql { .. }) => Ok(Err(error.into())),
        Err(error) => Err(error.into()),
    }
}

/// Adds a finding about tables that were not checked.
pub(crate) fn report_unchecked(kind: &str, left: &[String], findings: &mut Vec<Finding>) {
    const NAMED_MAX: usize = 5;
    if left.is_empty() {
        return;
    }
    let named = left.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
    let more = if left.len() > NAMED_MAX { format!(" and {} more", left.len() - NAMED_MAX) } else { String::new() };
    let note = format!("not checked within the limit of {} s: {named}{more}", CHECK_TIMEOUT.as_secs());
    leave_out(findings, kind, format!("{} tables", left.len()), note);
}

/// Finds rows that a server cannot convert to UTF8, the encoding in which everything is copied.
async fn check_encoding(
    link: &mut Link,
    tables: &[TableDef],
    begun: Instant,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    const KIND: &str = "text";
    let encoding = "SELECT pg_encoding_to_char(encoding) FROM pg_database WHERE datname = current_database()";
    let encoding = link.text(encoding).await?;
    // A SQL_ASCII database is read and written as bytes.
    if ["UTF8", "SQL_ASCII"].contains(&encoding.as_str()) {
        return Ok(());
    }
    let mut left = Vec::new();
    for table in tables {
        let sql = format!(
            "SELECT count(convert_to(_stillpoint_row::text, 'UTF8')) FROM ONLY {} AS _stillpoint_row",
            table.qualified()
        );
        match run_check_query(link, &sql, begun).await? {
            Ok(_) => {}
            // Class 22: data exceptions.
            Err(error) if error.sqlstate().is_some_and(|code| code.starts_with("22")) => {
                let why = short_message(&error);
                let note = format!("{why}; the database's encoding is {encoding}, and rows are copied as UTF8");
                refuse(findings, KIND, table.display(), note);
            }
            Err(_) => left.push(table.display()),
        }
    }
    report_unchecked(KIND, &left, findings);
    Ok(())
}

/// SQL expressions for the lengths of the values of a row.
#[derive(Default)]
struct LengthExpressions {
    /// Terms of a sum over a row: the bytes of its values, and (`text`) the bytes of their text.
    bytes: Vec<String>,
    text: Vec<String>,
    /// Stored bytes of values of other types, as further arguments of `greatest`, which ignores NULL.
    others: Vec<String>,
}

/// Expressions, by table number, for tables that have large values stored outside the table.
async fn length_expressions(link: &mut Link) -> Result<HashMap<u32, LengthExpressions>, Error> {
    let rows = link
        .query(&format!(
            "SELECT c.oid, a.attname, CASE coalesce(nullif(t.typbasetype, 0), t.oid) WHEN 'bytea'::regtype THEN \
             'bytes' \
             WHEN 'text'::regtype THEN 'text' WHEN 'varchar'::regtype THEN 'text' WHEN 'bpchar'::regtype THEN 'text' \
             WHEN 'json'::regtype THEN 'text' WHEN 'xml'::regtype THEN 'text' ELSE 'other' END \
             FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid JOIN pg_type t ON t.oid = a.atttypid \
             WHERE c.relkind = 'r' AND c.reltoastrelid <> 0 AND pg_relation_size(c.reltoastrelid) > \
             {STORED_BYTES_MIN} AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND t.typlen = -1"
        ))
        .await?;
    let mut expressions: HashMap<u32, LengthExpressions> = HashMap::new();
    for row in rows {
        let (expression, name) = (expressions.entry(number(&row, 0)).or_default(), identifier(&text(&row, 1)));
        let large = |length: &str| {
            format!(
                "CASE WHEN pg_column_size({name}) > {STORED_BYTES_MIN} THEN octet_length({length})::bigint ELSE 0 END"
            )
        };
        match text(&row, 2).as_str() {
            // Each byte becomes two hexadecimal digits.
            "bytes" => {
                expression.text.push(format!("2 * {}", large(&name)));
                expression.bytes.push(large(&name));
            }
            "text" => {
                let length = large(&format!("{name}::text"));
                expression.text.push(length.clone());
                expression.bytes.push(length);
            }
            _ => expression.others.push(format!(", pg_column_size({name})")),
        }
    }
    Ok(expressions)
}

/// Finds rows that do not fit into a message. Values are not read for this, except for compressed text.
async fn check_long_values(
    link: &mut Link,
    tables: &[TableDef],
    begun: Instant,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    const KIND: &str = "large values";
    let expressions = length_expressions(link).await?;
    let mut left = Vec::new();
    for table in tables {
        let Some(expression) = expressions.get(&table.oid) else { continue };
        let sum = |of: &[String]| if of.is_empty() { "0".into() } else { of.join(" + ") };
        let others = format!("greatest(0{})", expression.others.concat());
        let sql = format!(
            "SELECT count(*) FILTER (WHERE text > {ROW_BYTES_MAX}), count(*) FILTER (WHERE bytes > {ROW_BYTES_MAX}), \
             coalesce(max(others), 0) FROM (SELECT {} AS text, {} AS bytes, {others} AS others FROM ONLY {}) AS \
             lengths",
            sum(&expression.text),
            sum(&expression.bytes),
            table.qualified()
        );
        let Ok(row) = run_check_query(link, &sql, begun).await? else {
            left.push(table.display());
            continue;
        };
        let (long, longer, others): (u64, u64, u64) = (number(&row, 0), number(&row, 1), number(&row, 2));
        let uncopied = if table.binary() { longer } else { long };
        if uncopied > 0 {
            let note = format!("{uncopied} rows are longer than 1 GiB, the maximum of a message, and cannot be copied");
            refuse(findings, KIND, table.display(), note);
        } else if long > 0 {
            let note = "rows have a text longer than 1 GiB: they are copied, but the log cannot report changes of \
                        them; such a change ends the migration before the switch-over, and makes `fallback` fail \
                        after it";
            findings.push(Finding::new(KIND, table.display(), Verdict::Moved, format!("{long} {note}")));
        }
        if others > SUSPECT_STORED_BYTES {
            let stored = others >> 20;
            let note = format!("values of up to {stored} MiB: the length of their text was not checked");
            leave_out(findings, KIND, table.display(), note);
        }
    }
    report_unchecked(KIND, &left, findings);
    Ok(())
}
