//! Checks that a write has the same effect when its text is sent again to a copy of the database it saw.

use std::ops::ControlFlow;

use sqlparser::ast::BinaryOperator;
use sqlparser::ast::{
    Expr, ObjectName, Query, Statement, TableFactor, TableObject, Value, ValueWithSpan, Visit, Visitor,
};

use crate::catalogue::Catalogue;
use crate::error::Refusal;
use crate::parse::{fold_case, name_parts, parsed};

/// Server functions whose value depends only on their arguments, in any order of rows. A function that is not in this list
/// counts as not pure.
const IMMUTABLE_FUNCTIONS: &str = "abs btrim ceil ceiling char_length character_length chr coalesce concat concat_ws \
    count date_part date_trunc div floor generate_series greatest initcap least left length lower lpad ltrim max md5 \
    min mod nullif octet_length power repeat replace reverse right round rpad rtrim substr upper";

/// Texts that mean a different moment each time the server reads them as a time.
const CURRENT_TIME_TEXTS: [&str; 4] = ["now", "today", "tomorrow", "yesterday"];

/// Refuses a write (INSERT, UPDATE, DELETE) that may have another effect when it is repeated on the same rows.
///
/// # Errors
/// [`Refusal::NotRepeatable`] with the part that may differ; [`Refusal::Unparsable`], [`Refusal::TooLong`] and
/// [`Refusal::TooDeep`].
pub fn check_repeatable(text: &str, catalogue: &Catalogue) -> Result<(), Refusal> {
    parsed(text, |statements| match &statements[..] {
        [statement] => may_be_repeated(statement, text, catalogue),
        several => Err(Refusal::Several(several.len())),
    })
}

fn may_be_repeated(statement: &Statement, text: &str, catalogue: &Catalogue) -> Result<(), Refusal> {
    let refuse = |why: String| Err(Refusal::NotRepeatable(why));
    match statement {
        Statement::Insert(insert) => {
            if insert.on.is_some() {
                // A conflict may be with transactions that the statement's snapshot does not show.
                return refuse("ON CONFLICT".into());
            }
            let TableObject::TableName(name) = &insert.table else { return refuse("the table".into()) };
            let given: Vec<String> = insert.columns.iter().filter_map(last_part).collect();
            if let Some(column) = computed_default(name, &given, catalogue)? {
                return refuse(format!("the default of column {column}"));
            }
        }
        Statement::Update(update) => {
            if update.from.is_some() {
                return refuse("UPDATE ... FROM, which takes one of several rows".into());
            }
            let TableFactor::Table { name, .. } = &update.table.relation else { return refuse("the table".into()) };
            let sets_default = text.to_ascii_uppercase().contains("DEFAULT");
            if sets_default && let Some(column) = computed_default(name, &[], catalogue)? {
                return refuse(format!("the default of column {column}"));
            }
        }
        Statement::Delete(_) => {}
        _ => return refuse("this kind of statement".into()),
    }
    match statement.visit(&mut RepetitionVisitor { catalogue, writes: true, names: Vec::new() }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(why) => refuse(why),
    }
}

/// Returns true if a statement that writes nothing may be sent again to a copy of the database: it reads only rows that the
/// copy has, and changes nothing in the server or its session.
pub fn only_reads(text: &str, catalogue: &Catalogue) -> bool {
    let reads = parsed(text, |statements| match &statements[..] {
        [statement @ Statement::Query(_)] => {
            Ok(statement.visit(&mut RepetitionVisitor { catalogue, writes: false, names: Vec::new() }).is_continue())
        }
        _ => Ok(false),
    });
    reads.unwrap_or(false)
}

fn last_part(name: &ObjectName) -> Option<String> {
    name.0.last().and_then(|part| part.as_ident()).map(fold_case)
}

/// Finds a column that is not given and whose default is computed again at each write.
fn computed_default(name: &ObjectName, given: &[String], catalogue: &Catalogue) -> Result<Option<String>, Refusal> {
    let table = catalogue.table(&name_parts(name)).ok_or_else(|| Refusal::UnknownTable(name.to_string()))?;
    let open = table.columns.iter().find(|column| column.computed_default && !given.contains(&column.name));
    Ok(open.map(|column| column.name.clone()))
}

/// Stops at the first part that may differ when a write is repeated, or at the first part of another statement that does more
/// than read.
struct RepetitionVisitor<'c> {
    catalogue: &'c Catalogue,
    /// True for a write, false for a statement that may only read.
    writes: bool,
    /// Names that are not relations: names from WITH, and functions.
    names: Vec<String>,
}

impl RepetitionVisitor<'_> {
    fn function(&self, name: &ObjectName) -> ControlFlow<String> {
        let parts = name_parts(name);
        let is_among = |name: &String, list: &str| list.split(' ').any(|known| known == name);
        let is_harmless = match &parts[..] {
            [name] => is_among(name, IMMUTABLE_FUNCTIONS) || !self.writes && is_among(name, SIDE_EFFECT_FREE_FUNCTIONS),
            [schema, name] => schema == "pg_catalog" && is_among(name, IMMUTABLE_FUNCTIONS),
            _ => false,
        };
        if is_harmless {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(format!("function {}", parts.join(".")))
        }
    }
}

impl Visitor for RepetitionVisitor<'_> {
    type Break = String;

    fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<String> {
        let parts = name_parts(name);
        if let [name] = &parts[..]
            && self.names.contains(name)
        {
            return ControlFlow::Continue(());
        }
        ControlFlow::Break(match self.catalogue.table(&parts) {
            Some(table) if table.temporary => format!("{name}, which is temporary"),
            Some(table) => match table.kind {
                None | Some("partition") => return ControlFlow::Continue(()),
                Some(kind) => format!("{name}, which is a {kind}"),
            },
            None => format!("{name}, which is not a user table"),
        })
    }

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<String> {
        let with = query.with.iter().flat_map(|with| &with.cte_tables);
        self.names.extend(with.map(|table| fold_case(&table.alias.name)));
        // A statement that locks rows may wait for a transaction that waits for it, or may skip rows.
        if !query.locks.is_empty() {
            return ControlFlow::Break("a row lock".into());
        }
        if self.writes && (query.limit_clause.is_some() || query.fetch.is_some()) {
            return ControlFlow::Break("LIMIT, whose order of rows is not certain".into());
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<String> {
        if let TableFactor::Table { name, args: Some(_), .. } = table {
            self.names.extend(last_part(name));
        }
        match table {
            TableFactor::Table { sample: Some(_), .. } if self.writes => ControlFlow::Break("TABLESAMPLE".into()),
            TableFactor::Table { name, args: Some(_), .. } | TableFactor::Function { name, .. } => self.function(name),
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<String> {
        match expr {
            Expr::Function(called) => self.function(&called.name),
            _ if !self.writes => ControlFlow::Continue(()),
            // The parser reads DEFAULT among values as a name.
            Expr::Identifier(name) if name.quote_style.is_none() && name.value.eq_ignore_ascii_case("default") => {
                ControlFlow::Break("DEFAULT".into())
            }
            Expr::BinaryOp { op: BinaryOperator::PGCustomBinaryOperator(_), .. } => {
                ControlFlow::Break("a custom operator".into())
            }
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_value(&mut self, value: &ValueWithSpan) -> ControlFlow<String> {
        let is_moment = |text: &str| CURRENT_TIME_TEXTS.contains(&text.trim().to_ascii_lowercase().as_str());
        match &value.value {
            Value::Placeholder(name) => ControlFlow::Break(format!("parameter {name}")),
            Value::SingleQuotedString(text) if self.writes && is_moment(text) => {
                ControlFlow::Break(format!("'{text}'"))
            }
            _ => ControlFlow::Continue(()),
        }
    }
}

/// Server functions that have no side effect but are not in [`IMMUTABLE_FUNCTIONS`].
const SIDE_EFFECT_FREE_FUNCTIONS: &str = "array_agg array_length avg dense_rank extract now rank row_number \
    string_agg sum to_char unnest";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::{Column, Table};

    fn catalogue() -> Catalogue {
        let mut catalogue = Catalogue::new(["s".to_owned()]);
        let column = |name: &str, computed_default| Column { name: name.into(), computed_default, ..Column::default() };
        let columns = vec![column("id", false), column("v", false), column("made", true)];
        catalogue.add(Table { oid: 7, schema: "s".into(), name: "t".into(), columns, ..Table::default() });
        let named = |name: &str| Table { schema: "s".into(), name: name.into(), ..Table::default() };
        catalogue.add(Table { temporary: true, ..named("mine") });
        catalogue.add(Table { kind: Some("view"), ..named("look") });
        catalogue
    }

    #[test]
    fn a_read_is_sent_again_only_if_it_does_nothing_but_read() {
        for text in [
            "SELECT count(*), sum(id) FROM t WHERE v LIKE 'a%' LIMIT 1",
            "WITH x AS (SELECT id FROM s.t) SELECT * FROM x, generate_series(1, 2)",
            "VALUES (1)",
            "SELECT 1",
        ] {
            assert!(only_reads(text, &catalogue()), "{text}");
        }
        for text in [
            "SELECT pg_advisory_lock(1)",
            "SELECT nextval('t_id_seq')",
            "SELECT pg_sleep(1) FROM t",
            "SELECT * FROM pg_ls_dir('/')",
            "SELECT * FROM mine",
            "SELECT * FROM pg_class",
            "SELECT * FROM look",
            "SELECT id FROM t FOR UPDATE",
            "SELECT id FROM t WHERE id = $1",
            "SELECT 1; SELECT 2",
            "SHOW work_mem",
        ] {
            assert!(!only_reads(text, &catalogue()), "{text}");
        }
    }

    #[test]
    fn what_depends_on_rows_alone_is_repeated() {
        for text in [
            "UPDATE t SET v = v + 1, id = abs(id) WHERE id IN (SELECT max(id) FROM t WHERE v LIKE 'a%')",
            "INSERT INTO t (id, v, made) VALUES (1, upper('x'), '2020-01-01')",
            "INSERT INTO s.t (id, v, made) SELECT id + 1, coalesce(v, 'now and then'), made FROM t",
            "DELETE FROM t WHERE made < '2020-01-01' RETURNING id",
            "DELETE FROM t WHERE id IN (WITH x AS (SELECT id FROM t) SELECT id FROM x)",
            "INSERT INTO t (id, v, made) SELECT i, 'x', '2020-01-01' FROM generate_series(1, 3) i",
            "UPDATE t SET v = CASE WHEN v IS NULL THEN 'x' ELSE v END",
        ] {
            assert_eq!(check_repeatable(text, &catalogue()), Ok(()), "{text}");
        }
    }

    #[test]
    fn what_may_differ_is_refused_by_name() {
        for (text, why) in [
            ("INSERT INTO t VALUES (1, 'x')", "the default of column made"),
            ("INSERT INTO t (id) VALUES (1)", "the default of column made"),
            ("INSERT INTO t (id, made) VALUES (1, DEFAULT)", "DEFAULT"),
            ("UPDATE t SET made = DEFAULT", "the default of column made"),
            ("UPDATE t SET made = now()", "function now"),
            ("UPDATE t SET made = CURRENT_TIMESTAMP", "function current_timestamp"),
            ("UPDATE t SET made = 'Now '::timestamptz", "'Now '"),
            ("UPDATE t SET v = random()", "function random"),
            ("UPDATE t SET v = my.abs(1)", "function my.abs"),
            ("UPDATE t SET v = 1 WHERE id = $1", "parameter $1"),
            ("UPDATE t SET v = u.v FROM u", "UPDATE ... FROM"),
            ("INSERT INTO t (id, v, made) VALUES (1, 'x', 'y') ON CONFLICT DO NOTHING", "ON CONFLICT"),
            ("DELETE FROM t WHERE id IN (SELECT id FROM t LIMIT 1)", "LIMIT"),
            ("INSERT INTO t (id, v, made) SELECT id, v, made FROM t TABLESAMPLE bernoulli (1)", "TABLESAMPLE"),
            ("DELETE FROM t WHERE id IN (SELECT id FROM t FOR UPDATE SKIP LOCKED)", "a row lock"),
            ("INSERT INTO t (id, v, made) SELECT id, v, made FROM mine", "mine, which is temporary"),
            ("DELETE FROM t WHERE id IN (SELECT id FROM look)", "look, which is a view"),
            ("DELETE FROM t WHERE id IN (SELECT oid FROM pg_class)", "pg_class, which is not a user table"),
        ] {
            match check_repeatable(text, &catalogue()) {
                Err(Refusal::NotRepeatable(told)) => assert!(told.starts_with(why), "{text}: {told}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
