//! Columns that hold numbers of objects. Relations, types and functions have other numbers on the target, so values of the
//! types that print an object's name (PostgreSQL's OID alias types) are moved by name. A name must find the same object when
//! rows are copied, which is before the target has indexes.

use crate::Options;
use crate::report::{Finding, Verdict, refuse};
use crate::selection::LeftOut;
use crate::values::{report_unchecked, run_check_query, smallest_first};
use std::time::Instant;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{NOT_OF_EXTENSION, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{Link, Purpose, Row, identifier, number, text};

/// Kind of findings.
const KIND: &str = "object name";

/// An OID alias type: number, catalog of the objects, and an SQL condition for objects `o` that a name does not find on the
/// target while rows are copied, with its meaning.
struct AliasType {
    number: u32,
    catalog: &'static str,
    lost: Option<(&'static str, &'static str)>,
}

const fn alias(number: u32, catalog: &'static str, lost: Option<(&'static str, &'static str)>) -> AliasType {
    AliasType { number, catalog, lost }
}

/// All OID alias types, by their numbers: regproc, regprocedure, regoper, regoperator, regclass, regtype, regconfig,
/// regdictionary, regnamespace, regrole, regcollation.
const ALIAS_TYPES: [AliasType; 11] = [
    alias(
        24,
        "pg_proc",
        Some((
            "(SELECT count(*) FROM pg_proc p WHERE p.proname = o.proname AND p.pronamespace = o.pronamespace) > 1",
            "functions of one name, which regproc does not tell apart: use regprocedure",
        )),
    ),
    alias(2202, "pg_proc", None),
    alias(
        2203,
        "pg_operator",
        Some((
            "(SELECT count(*) FROM pg_operator p WHERE p.oprname = o.oprname AND p.oprnamespace = o.oprnamespace) > 1",
            "operators of one name, which regoper does not tell apart: use regoperator",
        )),
    ),
    alias(2204, "pg_operator", None),
    alias(
        2205,
        "pg_class",
        Some((
            "(o.relkind IN ('i', 'I', 't') OR o.relpersistence = 't')",
            "indexes, or tables of the server's own: the target makes them after the rows, or with another name",
        )),
    ),
    alias(2206, "pg_type", None),
    alias(3734, "pg_ts_config", None),
    alias(3769, "pg_ts_dict", None),
    alias(4089, "pg_namespace", None),
    alias(4096, "pg_authid", None),
    alias(4191, "pg_collation", None),
];

/// Checks the columns of all tables, for a limited time. `made_roles` are those that a migration creates on the targets. `by_name` is false if the changes of rows carry names that only the
/// writer's own session can read.
///
/// # Errors
///
/// Errors of the connections to the servers.
pub(crate) async fn check_object_columns(
    Options { source, selection, .. }: &Options,
    left_out: &LeftOut,
    there: &mut [Link],
    made_roles: &[String],
    by_name: bool,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let mut link = Link::connect(source, Purpose::Statements, &[]).await?;
    let columns = link.query(&columns_sql()).await?;
    if columns.is_empty() {
        return Ok(());
    }
    let (_, tables) = smallest_first(source, selection).await?;
    let (begun, mut left) = (Instant::now(), Vec::new());
    for table in &tables {
        for column in columns.iter().filter(|column| number::<u32>(column, 0) == table.oid) {
            let (name, of) = (format!("{}.{}", table.display(), text(column, 1)), number::<u32>(column, 2));
            let from = format!(
                "(SELECT DISTINCT {} AS number FROM ONLY {}) v",
                if text(column, 3) == "t" { "unnest({})::oid" } else { "{}::oid" }
                    .replace("{}", &identifier(&text(column, 1))),
                table.qualified()
            );
            let Some(alias) = ALIAS_TYPES.iter().find(|alias| alias.number == of) else {
                match run_check_query(&mut link, &plain_numbers_sql(&from), begun).await? {
                    Ok(row) => findings.extend(of_plain_numbers(&name, &row)),
                    Err(_) => left.push(name),
                }
                continue;
            };
            if !by_name {
                refuse(findings, KIND, name, "only the log (--capture log) has names that the target understands");
                continue;
            }
            match run_check_query(&mut link, &alias.sql(&from, left_out), begun).await? {
                Ok(row) => {
                    alias.judge(&name, &row, findings);
                    if alias.catalog == "pg_authid" {
                        check_roles(there, made_roles, &name, &text(&row, 3), findings).await?;
                    }
                }
                Err(_) => left.push(name),
            }
        }
    }
    report_unchecked(KIND, &left, findings);
    Ok(())
}

/// Query for columns that may hold numbers of objects: table, name, type, and true for arrays of the type.
fn columns_sql() -> String {
    let aliases: Vec<String> = ALIAS_TYPES.iter().map(|alias| alias.number.to_string()).collect();
    format!(
        "SELECT a.attrelid, a.attname, k.oid, k.oid = b.typelem FROM pg_attribute a \
         JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
         JOIN pg_type t ON t.oid = a.atttypid JOIN pg_type b ON b.oid = coalesce(nullif(t.typbasetype, 0), t.oid) \
         JOIN pg_type k ON k.oid IN (b.oid, CASE WHEN b.typcategory = 'A' THEN b.typelem END) \
         WHERE k.oid IN (26, {}) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND c.relkind = 'r' \
         AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} ORDER BY 1, a.attnum",
        aliases.join(", ")
    )
}

impl AliasType {
    /// Query about the different values of a column: how many name no object, how many are lost, one of these, and all names
    /// if there are few; and how many name what a selection leaves out.
    fn sql(&self, from: &str, left_out: &LeftOut) -> String {
        let AliasType { number, catalog, lost } = self;
        let lost = lost.map_or("false", |(condition, _)| condition);
        let stays = left_out.objects_sql().map_or_else(
            || "false".to_owned(),
            |all| {
                let of = format!("l.class = '{catalog}'::regclass AND l.object = o.oid");
                format!("EXISTS (SELECT FROM ({all}) l (class, object) WHERE {of})")
            },
        );
        format!(
            "SELECT count(*) FILTER (WHERE v.number <> 0 AND o.oid IS NULL), count(*) FILTER (WHERE {lost}), \
             min(format_type({number}, NULL) || ' ' || v.number) FILTER (WHERE {lost}), \
             string_agg(CASE WHEN {number} = 4096 AND o.oid IS NOT NULL THEN (to_jsonb(o) ->> 'rolname') END, ','), count(*) FILTER (WHERE {stays}) \
             FROM {from} LEFT JOIN {catalog} o ON o.oid = v.number"
        )
    }

    fn judge(&self, column: &str, row: &Row, findings: &mut Vec<Finding>) {
        let (dangling, lost): (u64, u64) = (number(row, 0), number(row, 1));
        let note = if dangling == 0 {
            "its values are moved by name".to_owned()
        } else {
            format!("its values are moved by name; {dangling} name no object any more and keep their numbers")
        };
        findings.push(Finding::new(KIND, column, Verdict::Moved, note));
        let stays: u64 = number(row, 4);
        if stays > 0 {
            refuse(
                findings,
                KIND,
                column,
                format!("{stays} values name objects that --include and --exclude leave out"),
            );
        }
        if let Some((_, what)) = self.lost.filter(|_| lost > 0) {
            refuse(findings, KIND, column, format!("{lost} values ({}) name {what}", text(row, 2)));
        }
    }
}

/// Query for the number of plain numbers that are those of relations, types or functions of the user.
fn plain_numbers_sql(from: &str) -> String {
    let of = |catalog: &str| format!("EXISTS (SELECT FROM {catalog} o WHERE o.oid = v.number)");
    let any = ["pg_class", "pg_type", "pg_proc"].map(of).join(" OR ");
    format!("SELECT count(*) FROM {from} WHERE v.number >= 16384 AND ({any})")
}

fn of_plain_numbers(column: &str, row: &Row) -> Option<Finding> {
    let count: u64 = number(row, 0);
    let note = format!(
        "{count} different values of this oid column are numbers of relations, types or functions of the source, which \
         have other numbers on the target; they are moved as they are"
    );
    (count > 0).then(|| Finding::new(KIND, column, Verdict::NotMoved, note))
}

/// Refuses names of roles that a target does not have.
async fn check_roles(
    there: &mut [Link],
    made_roles: &[String],
    column: &str,
    names: &str,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    for link in there {
        let known = link.query("SELECT rolname FROM pg_roles").await?;
        let is_there =
            |name: &str| known.iter().any(|row| text(row, 0) == name) || made_roles.iter().any(|role| role == name);
        let lacks = |name: &&str| !name.is_empty() && !is_there(name);
        for name in names.split(',').filter(lacks) {
            refuse(findings, KIND, column, format!("it names role {name}, which the target does not have"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_types_that_are_moved_by_name_are_those_that_are_checked() {
        assert_eq!(ALIAS_TYPES.map(|alias| alias.number), stillpoint_migrate_apply::inventory::ALIAS_TYPES);
    }
}
