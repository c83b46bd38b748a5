//! Findings of the check about a selection: what is left out, and why it cannot be moved so.

use super::Selection;
use super::graph::{LeftRelation, NAMESPACE};
use super::left_out::{LeftOut, Resolution, describe, texts};
use crate::Capture;
use crate::report::{Finding, Verdict, refuse};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Link, text};

/// Kind of findings about patterns, and about objects that they tear apart.
const KIND: &str = "selection";

/// Adds findings about a selection.
///
/// # Errors
///
/// Errors of the connection to the server.
pub(crate) async fn report(
    link: &mut Link,
    selection: &Selection,
    by: Capture,
    resolution: &Resolution,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    if selection.is_all() {
        return Ok(());
    }
    if by.is_by_proxy() {
        let why = "only the log can be limited to some tables: the proxy captures all writes; try: --capture log, with \
                   wal_level=logical on the source";
        refuse(findings, KIND, "capture", why);
    }
    let decision = &resolution.decision;
    for pattern in &decision.unmatched {
        let why = "this pattern matches nothing: SCHEMA is a schema with all in it, SCHEMA.TABLE a table, view or sequence; names \
                   with upper case need double quotes";
        refuse(findings, KIND, pattern, why);
    }
    for (name, why) in texts(link, &decision.problems).await? {
        refuse(findings, KIND, name, why);
    }
    for left in &decision.relations {
        findings.push(of_relation(left, selection));
    }
    let described = describe(link, &decision.others).await?;
    for object in &decision.others {
        let Some(name) = described.get(object).filter(|name| !name.is_empty()) else { continue };
        let (kind, name) = name.split_once(' ').unwrap_or(("object", name));
        let why = match object.0 {
            NAMESPACE => "nothing of it is selected",
            _ => "its schema is not selected and nothing that is needs it, or it needs something that is left out",
        };
        findings.push(Finding::new(kind, name, Verdict::NotMoved, format!("left out: {why}")));
    }
    Ok(())
}

/// Takes back refusals of roles that the target lacks and that only what is left out needs.
///
/// # Errors
///
/// Errors of the connection to the server.
pub(crate) async fn spare_roles(link: &mut Link, left_out: &LeftOut, findings: &mut [Finding]) -> Result<(), Error> {
    let Some(objects) = left_out.objects_sql() else { return Ok(()) };
    let here = "(SELECT oid FROM pg_database WHERE datname = current_database())";
    let needed = link
        .query(&format!(
            "WITH l (class, object) AS MATERIALIZED ({objects}) SELECT r.rolname FROM pg_roles r WHERE r.oid IN (SELECT s.refobjid \
             FROM pg_shdepend s WHERE s.refclassid = 'pg_authid'::regclass AND (s.dbid = {here} AND NOT EXISTS (SELECT FROM l \
             WHERE l.class = s.classid AND l.object = s.objid) OR s.classid = 'pg_database'::regclass AND s.objid = {here}) \
             UNION SELECT datdba FROM pg_database WHERE datname = current_database() \
             UNION SELECT setrole FROM pg_db_role_setting WHERE setdatabase = {here})"
        ))
        .await?;
    let is_refused = |finding: &&mut Finding| finding.kind == "role" && finding.verdict == Verdict::Refused;
    for finding in findings.iter_mut().filter(is_refused) {
        if needed.iter().all(|row| text(row, 0) != finding.name) {
            finding.verdict = Verdict::NotMoved;
            finding.note = "the target lacks it, and only what is left out needs it".into();
        }
    }
    Ok(())
}

/// Finding about a relation that is left out. A sequence of a column, a partition and the like need no confirmation of their own.
fn of_relation(left: &LeftRelation, selection: &Selection) -> Finding {
    let kind = match left.relation.kind {
        'p' => "partitioned table",
        'v' => "view",
        'm' => "materialized view",
        'f' => "foreign table",
        'S' => "sequence",
        _ => "table",
    };
    const AFTER: &str = "it stays on the source, and clients do not find it after the switch";
    let is_alone = left.relation.owner.is_none() && left.relation.parents.is_empty();
    let (verdict, note) = match (left.is_excluded, selection.leaves_rest()) {
        (true, _) => (Verdict::NotMoved, format!("left out by --exclude: {AFTER}")),
        (false, true) => (Verdict::NotMoved, format!("left out, as --leave-rest accepts: {AFTER}")),
        (false, false) if !is_alone => (Verdict::NotMoved, format!("left out with its table: {AFTER}")),
        (false, false) => (
            Verdict::Refused,
            format!(
                "--include does not name it: {AFTER}, whose connections are disabled then; name it with --exclude, or accept \
                     that for all such with --leave-rest"
            ),
        ),
    };
    Finding::new(kind, left.relation.display(), verdict, note)
}
