//! Facts of a database that capture needs. The captured session itself asks the server for them: with its rights, its
//! search path and its temporary tables.

use crate::{Catalogue, Column, Reference, Table, Unique, WritesMore};
use std::collections::HashMap;
use std::sync::Arc;

/// Functions of the server itself that write rows, or that run texts that may write.
const WRITING_FUNCTIONS: &str = "'{lo_create,lo_creat,lo_from_bytea,lo_import,lo_put,lo_unlink,lo_open,lowrite,lo_truncate,\
    lo_truncate64,query_to_xml,query_to_xmlschema,query_to_xml_and_xmlschema,cursor_to_xml,cursor_to_xmlschema,ts_stat,\
    ts_rewrite,database_to_xml,schema_to_xml,table_to_xml}'";

/// Settings, beside `search_path`, that change the meaning of a text.
const MEANING_SETTINGS: &str = "'{TimeZone,timezone_abbreviations,DateStyle,IntervalStyle,bytea_output,extra_float_digits,\
    standard_conforming_strings,array_nulls,transform_null_equals,xmlbinary,xmloption}'";

/// Builds the question. Every row of the answer: its subject, and seven texts. Lists of columns are numbers with
/// spaces.
fn question() -> String {
    let user = "n.nspname <> 'information_schema' AND n.nspname !~ '^pg_(catalog|toast)' AND n.nspname <> \
                'stillpoint'";
    // True if the server can hash a type: the type itself, one that it is binary compatible with, or its elements.
    let hash = |oid: &str| {
        format!(
            "EXISTS (SELECT FROM pg_catalog.pg_opclass o JOIN pg_catalog.pg_amproc p ON p.amprocfamily = o.opcfamily \
             AND p.amproclefttype = o.opcintype AND p.amprocnum = 2 WHERE o.opcmethod = 405 AND o.opcdefault AND \
             (o.opcintype = {oid} OR EXISTS (SELECT FROM pg_catalog.pg_cast k WHERE k.castsource = {oid} \
             AND k.casttarget = o.opcintype AND k.castmethod = 'b')))"
        )
    };
    let base = "coalesce(nullif(y.typbasetype, 0), y.oid)";
    format!(
        include_str!("facts.sql"),
        MEANING_SETTINGS = MEANING_SETTINGS,
        WRITING_FUNCTIONS = WRITING_FUNCTIONS,
        user = user,
        own = hash(base),
        element = hash("nullif(y.typelem, 0)"),
    )
}

/// The question's text, built once.
pub static QUESTION: std::sync::LazyLock<String> = std::sync::LazyLock::new(question);

/// Facts in the answer.
#[derive(Debug, Default)]
pub struct Facts {
    /// Tables and functions.
    pub catalogue: Catalogue,
    /// Tables whose rows count in the audit, as the text of an array.
    pub audited: String,
    /// True if constraints may be checked as late as at COMMIT.
    pub defers: bool,
    /// Prepared statements of the session: name, text, types of the parameters.
    pub statements: Vec<(Vec<u8>, Vec<u8>, Vec<u32>)>,
    /// Tables of which not all writes can be captured, and the reasons.
    pub uncovered: Vec<(String, String)>,
    /// Reason why nothing of this session can be captured.
    pub refused: Option<String>,
    /// Settings and role that give this session's texts their meaning.
    pub context: SessionContext,
}

/// Settings and role that decide what the texts of a session mean and may do.
#[derive(Debug, Default)]
pub struct SessionContext {
    /// List for a SELECT that gives another session the same settings.
    pub settings: String,
    /// Role of the session.
    pub role: String,
}

struct TableFacts {
    table: Table,
    /// Attribute number to position.
    positions: HashMap<i16, usize>,
    counted: bool,
}

impl TableFacts {
    fn place(&self, numbers: &str) -> Option<Vec<usize>> {
        numbers.split_whitespace().map(|n| self.positions.get(&n.parse().ok()?).copied()).collect()
    }
}

/// Row of the answer.
pub type Row = Vec<Option<Vec<u8>>>;

fn text(row: &Row, at: usize) -> String {
    row.get(at).and_then(Option::as_ref).map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
}

fn number(row: &Row, at: usize) -> u32 {
    text(row, at).parse().unwrap_or(0)
}

/// Builds the facts from the answer's rows.
pub fn read(rows: &[Row]) -> Facts {
    let of = |kind: &'static str| rows.iter().filter(move |row| text(row, 0) == kind);
    let mut path: Vec<(u32, String)> = of("path").map(|row| (number(row, 2), text(row, 1))).collect();
    path.sort();
    let mut facts = Facts { catalogue: Catalogue::new(path.into_iter().map(|(_, schema)| schema)), ..Facts::default() };
    facts.refused = of("set").find_map(|row| match (text(row, 1).parse::<i32>(), text(row, 2), text(row, 3)) {
        (Ok(..=0), _, _) => Some("its extra_float_digits round values".to_owned()),
        (_, counts, _) if counts != "on" => {
            Some("its track_counts is off, so captured rows cannot be audited".to_owned())
        }
        (_, _, encoding) if encoding != "UTF8" => Some(format!("its database's encoding is {encoding}, not UTF8")),
        _ => None,
    });
    facts.catalogue.may_write = of("function").map(|row| text(row, 1)).collect();
    facts.defers = of("deferrable").next().is_some();
    let mut tables: HashMap<u32, TableFacts> = of("table").map(|row| (number(row, 1), raw(row))).collect();
    for row in of("column") {
        let Some(raw) = tables.get_mut(&number(row, 1)) else { continue };
        let Ok(at) = text(row, 2).parse::<i16>() else { continue };
        raw.positions.insert(at, raw.table.columns.len());
        let is = |at| text(row, at) == "true";
        let column = Column { name: text(row, 3), generated: is(4), identity_always: is(5), computed_default: is(6) };
        raw.table.columns.push(column);
    }
    let referred: Vec<u32> = of("reference").map(|row| number(row, 3)).collect();
    for row in of("index") {
        let Some(raw) = tables.get_mut(&number(row, 1)) else { continue };
        index(raw, row, &referred);
    }
    for row in of("reference") {
        let (table, index) = (number(row, 2), number(row, 3));
        if let Some(raw) = tables.get_mut(&number(row, 1))
            && let Some(columns) = raw.place(&text(row, 4))
        {
            raw.table.references.push(Reference { columns, table, index });
        }
        let (update, delete) = (text(row, 6) == "true", text(row, 7) == "true");
        if let Some(referred) = tables.get_mut(&table).filter(|_| update || delete) {
            let what = format!("foreign key {} that cascades", text(row, 5));
            referred.table.writes_more.push(WritesMore { what, insert: false, update, delete });
        }
    }
    for row in of("more") {
        let Some(raw) = tables.get_mut(&number(row, 1)) else { continue };
        let is = |at| text(row, at) == "true";
        raw.table.writes_more.push(WritesMore { what: text(row, 2), insert: is(3), update: is(4), delete: is(5) });
    }
    facts.statements = of("statement").map(statement).collect();
    facts.context =
        of("said").map(|row| SessionContext { settings: text(row, 1), role: text(row, 2) }).next().unwrap_or_default();
    let counted: Vec<String> = tables.values().filter(|raw| raw.counted).map(|raw| raw.table.oid.to_string()).collect();
    facts.audited = format!("{{{}}}", counted.join(","));
    facts.uncovered = tables.values().filter_map(|raw| uncovered(&raw.table)).collect();
    tables.into_values().for_each(|raw| facts.catalogue.add(raw.table));
    facts
}

fn raw(row: &Row) -> TableFacts {
    let kind =
        ["view", "materialized view", "foreign table", "partition"].into_iter().find(|kind| *kind == text(row, 4));
    let reasons =
        ["no SELECT right", "row security", "other tables inherit from it", "the text of money depends on the session"];
    let temporary = text(row, 5) == "true";
    let table = Table {
        oid: number(row, 1),
        schema: text(row, 2),
        name: text(row, 3),
        kind,
        temporary,
        unreadable: reasons.into_iter().find(|reason| *reason == text(row, 6)),
        ..Table::default()
    };
    TableFacts { table, positions: HashMap::new(), counted: !temporary && text(row, 7) == "r" }
}

fn index(raw: &mut TableFacts, row: &Row, referred: &[u32]) {
    let (oid, why_not, is_key) = (number(row, 2), text(row, 5), text(row, 6) == "true");
    let keys = text(row, 4).parse().unwrap_or(0);
    let columns: Vec<String> = text(row, 3).split_whitespace().take(keys).map(str::to_owned).collect();
    let columns = raw.place(&columns.join(" "));
    let by_hash = why_not.is_empty();
    if is_key && by_hash && raw.table.key.is_none() {
        raw.table.key.clone_from(&columns);
        if !referred.contains(&oid) {
            return;
        }
    }
    let columns = columns.filter(|_| why_not != "expression");
    raw.table.uniques.push(Unique { oid, columns, by_hash, nulls_equal: text(row, 7) == "true" });
}

fn statement(row: &Row) -> (Vec<u8>, Vec<u8>, Vec<u32>) {
    let bytes = |at: usize| row.get(at).cloned().flatten().unwrap_or_default();
    let types = text(row, 3).split_whitespace().filter_map(|oid| oid.parse().ok()).collect();
    (bytes(1), bytes(2), types)
}

/// Reads the answer to the [`QUESTION`]: what the role that asked can have captured of a database.
pub fn capturable(rows: &[Vec<Option<String>>]) -> Capturable {
    let bytes = |row: &Vec<Option<String>>| row.iter().map(|value| value.clone().map(String::into_bytes)).collect();
    let rows: Vec<Row> = rows.iter().map(bytes).collect();
    let Facts { refused, uncovered, catalogue, .. } = read(&rows);
    let limit = |(table, why): (String, String)| Limit { added_to: why == INSERT_ONLY_REASON, table, why };
    let of_the_moment = |table: &Arc<Table>| {
        let open = table.columns.iter().find(|column| column.computed_default)?;
        Some((format!("{}.{}", table.schema, table.name), open.name.clone()))
    };
    let defaults = catalogue.tables().filter_map(of_the_moment).collect();
    Capturable { refused, tables: uncovered.into_iter().map(limit).collect(), defaults }
}

/// Parts of a database that can be captured, and their limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capturable {
    /// Reason why nothing of it can be captured.
    pub refused: Option<String>,
    /// Tables that can be captured only in part or not at all.
    pub tables: Vec<Limit>,
    /// Tables with a column whose default is computed each time: a statement that uses it cannot be repeated. Table and
    /// column.
    pub defaults: Vec<(String, String)>,
}

/// A table that can be captured only in part or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// Schema and name of the table.
    pub table: String,
    /// Reason for the limit.
    pub why: String,
    /// True if new rows can be captured all the same.
    pub added_to: bool,
}

const INSERT_ONLY_REASON: &str = "rows can only be added: it has no key whose values can be hashed";

/// Returns the table and the reason if not all writes of it can be captured.
fn uncovered(table: &Table) -> Option<(String, String)> {
    if table.temporary || table.kind.is_some() {
        return None;
    }
    let why = match (table.unreadable, &table.key) {
        (Some(why), _) => why.to_owned(),
        (None, None) => INSERT_ONLY_REASON.to_owned(),
        (None, Some(_)) => table.writes_more.first()?.what.clone(),
    };
    Some((format!("{}.{}", table.schema, table.name), why))
}
