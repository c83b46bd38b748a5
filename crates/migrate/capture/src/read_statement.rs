//! Statements that only read, so that a mirror may run them again on another server and compare the answers.
//!
//! The text alone does not show that a statement changes nothing: functions, operators and views may hide anything. It is
//! taken apart into their names, about which the caller asks the server. The caller also runs it alone, in a transaction
//! that may not write: the server may read a text in another way than this parser.

use crate::error::Refusal;
use crate::parse::{fold_case, name_parts, parsed, tokens};
use crate::rewrite::quoted;
use sqlparser::ast::{
    BinaryOperator, Distinct, Expr, Function, ObjectName, Query, Select, SetExpr, Statement, TableFactor,
    UnaryOperator, Visit, Visitor,
};
use sqlparser::tokenizer::Token;
use std::collections::BTreeSet;
use std::ops::ControlFlow;

/// Functions whose result depends on the order in which they get their rows.
const ORDERED_FUNCTIONS: [&str; 14] = [
    "array_agg",
    "first_value",
    "json_agg",
    "json_object_agg",
    "jsonb_agg",
    "jsonb_object_agg",
    "lag",
    "last_value",
    "lead",
    "nth_value",
    "ntile",
    "row_number",
    "string_agg",
    "xmlagg",
];

/// A statement that only reads, as far as its text shows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadStatement {
    /// Names of functions, without their schemas.
    pub functions: BTreeSet<String>,
    /// Operators.
    pub operators: BTreeSet<String>,
    /// Names of relations, quoted as `to_regclass` reads them; also names from WITH and of functions in FROM.
    pub relations: BTreeSet<String>,
    /// The statement states the order of its rows.
    pub is_ordered: bool,
    /// The same rows in another order may give another answer: rows are cut off, or a function depends on their order.
    pub depends_on_order: bool,
}

/// Takes a statement apart.
///
/// # Errors
///
/// Reason why the text is not a single statement that only reads.
pub fn read_statement(text: &str) -> Result<ReadStatement, String> {
    let read = parsed(text, |statements| match &statements[..] {
        [Statement::Query(query)] => {
            let mut collector = Collector::default();
            collector.found.is_ordered = query.order_by.is_some();
            match query.visit(&mut collector) {
                ControlFlow::Continue(()) => Ok(collector.found),
                ControlFlow::Break(why) => Err(Refusal::NotRepeatable(why.into())),
            }
        }
        [_] => Err(Refusal::NotRepeatable("not a SELECT".into())),
        several => Err(Refusal::Several(several.len())),
    });
    read.map_err(|refusal| match refusal {
        Refusal::NotRepeatable(why) => why,
        Refusal::Several(_) => "several statements in one text".into(),
        // The parser's message may quote values.
        Refusal::Unparsable(_) => "a text that the parser does not know".into(),
        _ => "a text that is too long".into(),
    })
}

/// The text with `?` in place of every number and string, and single blanks; `None` if it cannot be read.
pub fn without_literals(text: &str) -> Option<String> {
    let mut shown = String::with_capacity(text.len());
    for token in tokens(text).ok()? {
        match &token.token {
            Token::EOF => {}
            Token::Whitespace(_) if shown.ends_with(' ') || shown.is_empty() => {}
            Token::Whitespace(_) => shown.push(' '),
            Token::Word(_)
            | Token::Placeholder(_)
            | Token::Comma
            | Token::Period
            | Token::LParen
            | Token::RParen
            | Token::LBracket
            | Token::RBracket => shown.push_str(&token.token.to_string()),
            literal if is_literal(literal) => shown.push('?'),
            operator => shown.push_str(&operator.to_string()),
        }
    }
    shown.truncate(shown.trim_end().len());
    Some(shown)
}

/// Returns true for a token that holds a client's value.
fn is_literal(token: &Token) -> bool {
    matches!(
        token,
        Token::Number(..)
            | Token::Char(_)
            | Token::SingleQuotedString(_)
            | Token::DoubleQuotedString(_)
            | Token::DollarQuotedString(_)
            | Token::NationalStringLiteral(_)
            | Token::EscapedStringLiteral(_)
            | Token::UnicodeStringLiteral(_)
            | Token::SingleQuotedByteStringLiteral(_)
            | Token::HexStringLiteral(_)
            | Token::CustomBinaryOperator(_)
    )
}

/// Collects names; stops at the first part that does more than read.
#[derive(Default)]
struct Collector {
    found: ReadStatement,
}

impl Collector {
    fn function(&mut self, name: &ObjectName) {
        let Some(name) = name.0.last().and_then(|part| part.as_ident()).map(fold_case) else { return };
        self.found.depends_on_order |= ORDERED_FUNCTIONS.contains(&name.as_str());
        self.found.functions.insert(name);
    }

    fn operator(&mut self, operator: impl ToString) {
        let text = operator.to_string();
        // `OPERATOR(schema.+)`
        let symbol = text.trim_end_matches(')').rsplit('.').next().unwrap_or(&text).to_owned();
        self.found.operators.insert(symbol);
    }
}

impl Visitor for Collector {
    type Break = &'static str;

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<&'static str> {
        self.found.depends_on_order |= query.limit_clause.is_some() || query.fetch.is_some();
        if !query.locks.is_empty() {
            return ControlFlow::Break("a row lock");
        }
        match &*query.body {
            SetExpr::Insert(_) | SetExpr::Update(_) | SetExpr::Delete(_) | SetExpr::Merge(_) => {
                ControlFlow::Break("a write inside WITH")
            }
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<&'static str> {
        self.found.depends_on_order |= matches!(select.distinct, Some(Distinct::On(_)));
        if select.into.is_some() { ControlFlow::Break("SELECT INTO") } else { ControlFlow::Continue(()) }
    }

    fn pre_visit_statement(&mut self, statement: &Statement) -> ControlFlow<&'static str> {
        match statement {
            Statement::Query(_) => ControlFlow::Continue(()),
            _ => ControlFlow::Break("a write inside WITH"),
        }
    }

    fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<&'static str> {
        let parts: Vec<String> = name_parts(name).iter().map(|part| quoted(part)).collect();
        self.found.relations.insert(parts.join("."));
        ControlFlow::Continue(())
    }

    fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<&'static str> {
        match table {
            TableFactor::Table { sample: Some(_), .. } | TableFactor::Derived { sample: Some(_), .. } => {
                return ControlFlow::Break("TABLESAMPLE");
            }
            TableFactor::Table { name, args: Some(_), .. } | TableFactor::Function { name, .. } => self.function(name),
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<&'static str> {
        match expr {
            Expr::Function(Function { name, .. }) => self.function(name),
            Expr::BinaryOp { op: BinaryOperator::PGCustomBinaryOperator(parts), .. } => {
                parts.last().into_iter().for_each(|symbol| self.operator(symbol));
            }
            Expr::BinaryOp { op, .. } => self.operator(op),
            Expr::UnaryOp { op, .. } if *op != UnaryOperator::Not => self.operator(op),
            Expr::AnyOp { compare_op, .. } | Expr::AllOp { compare_op, .. } => self.operator(compare_op),
            _ => {}
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<'n>(names: impl IntoIterator<Item = &'n str>) -> BTreeSet<String> {
        names.into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn a_read_is_taken_apart_into_what_the_server_is_asked_about() {
        let text = "WITH x AS (SELECT id FROM s.\"T\" WHERE v % 2 = 0) SELECT lower(a.name), pg_catalog.now() FROM x \
                    JOIN account a ON a.id = x.id, generate_series(1, 3) AS g WHERE a.geo <-> $1 < 5 ORDER BY 1";
        let read = read_statement(text).unwrap();
        assert_eq!(read.functions, names(["lower", "now", "generate_series"]));
        assert_eq!(read.relations, names([r#""s"."T""#, r#""account""#, r#""x""#, r#""generate_series""#]));
        assert_eq!(read.operators, names(["%", "=", "<->", "<"]));
        assert!(read.is_ordered && !read.depends_on_order);
    }

    #[test]
    fn an_answer_that_depends_on_the_order_of_rows_is_known() {
        for text in [
            "SELECT id FROM t LIMIT 1",
            "SELECT id FROM t FETCH FIRST 2 ROWS ONLY",
            "SELECT string_agg(v, ',') FROM t",
            "SELECT DISTINCT ON (a) a, b FROM t",
            "SELECT (SELECT id FROM u LIMIT 1) FROM t",
        ] {
            let read = read_statement(text).unwrap();
            assert!(read.depends_on_order && !read.is_ordered, "{text}");
        }
        assert!(!read_statement("SELECT count(*), max(id) FROM t").unwrap().depends_on_order);
    }

    #[test]
    fn what_does_more_than_read_is_refused() {
        for (text, why) in [
            ("UPDATE t SET v = 1", "not a SELECT"),
            ("BEGIN", "not a SELECT"),
            ("SELECT 1; SELECT 2", "several statements"),
            ("SELECT id FROM t FOR UPDATE", "a row lock"),
            ("SELECT * FROM (SELECT id FROM t FOR SHARE) AS x", "a row lock"),
            ("WITH x AS (DELETE FROM t RETURNING id) SELECT * FROM x", "a write"),
            ("WITH x AS (INSERT INTO t VALUES (1) RETURNING id) SELECT * FROM x", "a write"),
            ("SELECT id INTO u FROM t", "SELECT INTO"),
            ("SELECT id FROM t TABLESAMPLE bernoulli (1)", "TABLESAMPLE"),
            ("SELECT secret('value' FROM", "does not know"),
        ] {
            let told = read_statement(text).unwrap_err();
            assert!(told.contains(why) && !told.contains("value"), "{text}: {told}");
        }
    }

    #[test]
    fn a_statement_is_shown_without_its_values() {
        for (text, shown) in [
            ("SELECT  id\n FROM t WHERE name = 'secret' AND n > 42", "SELECT id FROM t WHERE name = ? AND n > ?"),
            ("SELECT $1, E'a\\'b', $x$secret$x$, N'secret', x'00', \"Col\"", "SELECT $1, ?, ?, ?, ?, \"Col\""),
            ("SELECT 1 -- secret", "SELECT ?"),
            ("SELECT /* secret */ 1", "SELECT ?"),
        ] {
            assert_eq!(without_literals(text).as_deref(), Some(shown), "{text}");
        }
        assert_eq!(without_literals("SELECT 'open"), None);
    }
}
