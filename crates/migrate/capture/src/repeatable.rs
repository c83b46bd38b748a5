//! Whether a write does the same when its text is sent again to a copy of what it saw.

use std::ops::ControlFlow;

use sqlparser::ast::BinaryOperator;
use sqlparser::ast::{
    Expr, Ident, ObjectName, Query, Statement, TableFactor, TableObject, Value, ValueWithSpan, Visit, Visitor,
};
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::parser::Parser;

use crate::catalogue::Catalogue;
use crate::error::Refusal;

/// Functions of the server whose value depends on their arguments alone, in whatever order rows come. Whoever is not named
/// here is not believed.
const PURE: [&str; 40] = [
    "abs",
    "btrim",
    "ceil",
    "ceiling",
    "char_length",
    "character_length",
    "chr",
    "coalesce",
    "concat",
    "concat_ws",
    "count",
    "date_part",
    "date_trunc",
    "div",
    "floor",
    "generate_series",
    "greatest",
    "initcap",
    "least",
    "left",
    "length",
    "lower",
    "lpad",
    "ltrim",
    "max",
    "md5",
    "min",
    "mod",
    "nullif",
    "octet_length",
    "power",
    "repeat",
    "replace",
    "reverse",
    "right",
    "round",
    "rpad",
    "rtrim",
    "substr",
    "upper",
];

/// Texts that mean another moment each time that they are read as one.
const MOMENTS: [&str; 4] = ["now", "today", "tomorrow", "yesterday"];

/// Refuses a write (INSERT, UPDATE, DELETE) that may do something else when it is repeated on the same rows.
///
/// # Errors
/// [`Refusal::NotRepeatable`], with what it is that may differ; [`Refusal::Unparsable`].
pub fn repeatable(text: &str, catalogue: &Catalogue) -> Result<(), Refusal> {
    let parsed = Parser::parse_sql(&PostgreSqlDialect {}, text);
    let statements = parsed.map_err(|error| Refusal::unparsable(&error))?;
    let [statement] = &statements[..] else { return Err(Refusal::Several(statements.len())) };
    let refuse = |why: String| Err(Refusal::NotRepeatable(why));
    match statement {
        Statement::Insert(insert) => {
            if insert.on.is_some() {
                // Whether there is a conflict depends on transactions that its snapshot does not show.
                return refuse("ON CONFLICT".into());
            }
            let TableObject::TableName(name) = &insert.table else { return refuse("its table".into()) };
            let given: Vec<String> = insert.columns.iter().filter_map(last_part).collect();
            if let Some(column) = default_of_the_moment(name, &given, catalogue)? {
                return refuse(format!("the default of column {column}"));
            }
        }
        Statement::Update(update) => {
            if update.from.is_some() {
                return refuse("UPDATE ... FROM, which takes one of several rows".into());
            }
            let TableFactor::Table { name, .. } = &update.table.relation else { return refuse("its table".into()) };
            let all: Vec<String> = Vec::new();
            let sets_default = text.to_ascii_uppercase().contains("DEFAULT");
            if sets_default && let Some(column) = default_of_the_moment(name, &all, catalogue)? {
                return refuse(format!("the default of column {column}"));
            }
        }
        Statement::Delete(_) => {}
        _ => return refuse("what it is".into()),
    }
    match statement.visit(&mut Differing) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(why) => refuse(why),
    }
}

fn last_part(name: &ObjectName) -> Option<String> {
    name.0.last().and_then(|part| part.as_ident()).map(folded)
}

fn folded(ident: &Ident) -> String {
    if ident.quote_style.is_some() { ident.value.clone() } else { ident.value.to_lowercase() }
}

/// A column that is not given, and whose default is computed anew each time.
fn default_of_the_moment(
    name: &ObjectName,
    given: &[String],
    catalogue: &Catalogue,
) -> Result<Option<String>, Refusal> {
    let parts: Vec<String> = name.0.iter().filter_map(|part| part.as_ident()).map(folded).collect();
    let table = match &parts[..] {
        [name] => catalogue.table(None, name),
        [schema, name] => catalogue.table(Some(schema), name),
        _ => None,
    };
    let table = table.ok_or_else(|| Refusal::UnknownTable(name.to_string()))?;
    let open = table.columns.iter().find(|column| column.computed_default && !given.contains(&column.name));
    Ok(open.map(|column| column.name.clone()))
}

struct Differing;

impl Visitor for Differing {
    type Break = String;

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<String> {
        if query.limit_clause.is_some() || query.fetch.is_some() {
            return ControlFlow::Break("LIMIT, whose rows nobody orders for sure".into());
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<String> {
        match table {
            TableFactor::Table { sample: Some(_), .. } => ControlFlow::Break("TABLESAMPLE".into()),
            TableFactor::Table { name, args: Some(_), .. } | TableFactor::Function { name, .. } => function(name),
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<String> {
        match expr {
            Expr::Function(called) => function(&called.name),
            // DEFAULT among values is read as a name.
            Expr::Identifier(name) if name.quote_style.is_none() && name.value.eq_ignore_ascii_case("default") => {
                ControlFlow::Break("DEFAULT".into())
            }
            Expr::BinaryOp { op: BinaryOperator::PGCustomBinaryOperator(_), .. } => {
                ControlFlow::Break("an operator of its own".into())
            }
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_value(&mut self, value: &ValueWithSpan) -> ControlFlow<String> {
        match &value.value {
            Value::Placeholder(name) => ControlFlow::Break(format!("parameter {name}")),
            Value::SingleQuotedString(text) if MOMENTS.contains(&text.trim().to_ascii_lowercase().as_str()) => {
                ControlFlow::Break(format!("'{text}'"))
            }
            _ => ControlFlow::Continue(()),
        }
    }
}

fn function(name: &ObjectName) -> ControlFlow<String> {
    let parts: Vec<String> = name.0.iter().filter_map(|part| part.as_ident()).map(folded).collect();
    let pure = match &parts[..] {
        [name] => PURE.contains(&name.as_str()),
        [schema, name] => schema == "pg_catalog" && PURE.contains(&name.as_str()),
        _ => false,
    };
    if pure { ControlFlow::Continue(()) } else { ControlFlow::Break(format!("function {}", parts.join("."))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::{Column, Table};

    fn catalogue() -> Catalogue {
        let mut catalogue = Catalogue::new(["s".to_owned()]);
        let column = |name: &str, computed_default| Column { name: name.into(), computed_default, ..Column::default() };
        let columns = vec![column("id", false), column("v", false), column("made", true)];
        catalogue.add(Table { oid: 7, schema: "s".into(), name: "t".into(), columns, ..Table::default() });
        catalogue
    }

    #[test]
    fn what_depends_on_rows_alone_is_repeated() {
        for text in [
            "UPDATE t SET v = v + 1, id = abs(id) WHERE id IN (SELECT max(id) FROM t WHERE v LIKE 'a%')",
            "INSERT INTO t (id, v, made) VALUES (1, upper('x'), '2020-01-01')",
            "INSERT INTO s.t (id, v, made) SELECT id + 1, coalesce(v, 'now and then'), made FROM t",
            "DELETE FROM t WHERE made < '2020-01-01' RETURNING id",
            "UPDATE t SET v = CASE WHEN v IS NULL THEN 'x' ELSE v END",
        ] {
            assert_eq!(repeatable(text, &catalogue()), Ok(()), "{text}");
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
        ] {
            match repeatable(text, &catalogue()) {
                Err(Refusal::NotRepeatable(told)) => assert!(told.starts_with(why), "{text}: {told}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
