//! Rewrites a statement to the same statement with one more column after RETURNING.

use std::ops::ControlFlow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sqlparser::ast::{
    Assignment, AssignmentTarget, CopySource, Expr, FromTable, Ident, ObjectName, ObjectType, OnConflictAction,
    OnInsert, Query, SelectItem, SetExpr, Statement, TableFactor, TableObject, TableWithJoins, Visit, Visitor,
};
use sqlparser::keywords::Keyword;
use sqlparser::tokenizer::{Token as SqlToken, TokenWithSpan};
use stillpoint_migrate_replay::Token;

use crate::catalogue::{Catalogue, Table};
use crate::control::by_first_words;
use crate::error::Refusal;
use crate::parse::{self, Places, fold_case, name_parts, parsed};

/// Maximum number of RETURNING words that are tried in one text, from the last one backwards.
const RETURNING_TRIED_MAX: usize = 16;

/// Effect of a statement, as far as capture needs to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// It writes nothing and is sent unchanged.
    Nothing,
    /// It writes rows and returns them.
    Writes(RewrittenStatement),
    /// It begins or ends a transaction or a part of one.
    Control(Control),
    /// It changes whole tables or the schema: it is replayed as text, and conflicts with these tokens.
    Barrier(Vec<Token>),
}

/// Effect of a statement on the transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Control {
    /// A transaction begins.
    Begin,
    /// The transaction is to be committed.
    Commit {
        /// True if another transaction begins immediately.
        chain: bool,
    },
    /// The transaction is rolled back.
    Rollback {
        /// True if another transaction begins immediately.
        chain: bool,
    },
    /// A savepoint with this name is set.
    Savepoint(String),
    /// The savepoint with this name is released.
    Release(String),
    /// The transaction is rolled back to the savepoint with this name.
    RollbackTo(String),
}

/// Change of each row that is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// The row is new.
    Insert,
    /// The row is new, or existed and was updated.
    Upsert,
    /// The row existed; the image is its new state, and its key is unchanged.
    Update,
    /// The row is deleted; the image is its last state.
    Delete,
}

/// Meaning of a hash in the hidden column. NULL means no value, unless NULLs count as equal in that index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hash {
    /// The key of the row.
    Row,
    /// A value of a unique index.
    Unique {
        /// Object identifier of the index.
        index: u32,
    },
    /// A value that a foreign key refers to.
    Parent {
        /// Object identifier of the table referred to.
        table: u32,
        /// Object identifier of its unique index.
        index: u32,
    },
}

/// A statement as the proxy sends it to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewrittenStatement {
    /// SQL text with the hidden column.
    pub text: String,
    /// The table that it writes.
    pub table: Arc<Table>,
    /// Change of each row.
    pub action: Action,
    /// Positions of the table's columns whose values come first in the hidden column.
    pub image: Vec<usize>,
    /// Meaning of each hash after the image.
    pub hashes: Vec<Hash>,
    /// Tokens that the transaction takes in addition, independent of the values, if at least one row is returned.
    pub tokens: Vec<Token>,
    /// True if the client itself asked for rows; otherwise it gets no rows and no row description.
    pub client_sees_rows: bool,
    /// True if it has ON CONFLICT: if another transaction inserts the same row at the same moment, the row is inserted, deleted
    /// and tried once more.
    pub may_conflict: bool,
}

/// Rewrites one statement.
///
/// # Errors
/// [`Refusal`]: the caller must treat the statement as a barrier, or capture its tables in another way.
pub fn rewrite(text: &str, catalogue: &Catalogue) -> Result<Effect, Refusal> {
    if let Some(judged) = by_first_words(text) {
        return judged;
    }
    parsed(text, |statements| match &statements[..] {
        [] => Ok(Effect::Nothing),
        [statement] => judge(statement, text, catalogue),
        several => Err(Refusal::Several(several.len())),
    })
}

fn judge(statement: &Statement, text: &str, catalogue: &Catalogue) -> Result<Effect, Refusal> {
    if changes_schema(text) {
        let barrier = Effect::Barrier(vec![Token::Everything]);
        return Ok(if is_temporary(statement, catalogue) { Effect::Nothing } else { barrier });
    }
    only_harmless_functions(statement, catalogue)?;
    match statement {
        Statement::Insert(insert) => {
            if insert.source.as_ref().is_some_and(|source| writes_inside(source)) {
                return Err(Refusal::WritingWith);
            }
            let TableObject::TableName(name) = &insert.table else { return Err(Refusal::NoReturning("INSERT")) };
            let alias = insert.table_alias.as_ref().map(|alias| &alias.alias);
            let target = Target::find(name, alias, catalogue)?;
            let (action, changed) = match &insert.on {
                None => (Action::Insert, Vec::new()),
                Some(OnInsert::OnConflict(on)) => match &on.action {
                    OnConflictAction::DoNothing => (Action::Insert, Vec::new()),
                    OnConflictAction::DoUpdate(update) => (Action::Upsert, target.assigned(&update.assignments)?),
                },
                Some(_) => return Err(Refusal::NoReturning("INSERT ... ON DUPLICATE KEY")),
            };
            let mut effect = target.returning(text, statement, action, &changed)?;
            if let Effect::Writes(rewritten) = &mut effect {
                rewritten.may_conflict = insert.on.is_some();
            }
            Ok(effect)
        }
        Statement::Update(update) => {
            let (name, alias) = only_table(&update.table, "UPDATE")?;
            let target = Target::find(name, alias, catalogue)?;
            let changed = target.assigned(&update.assignments)?;
            target.returning(text, statement, Action::Update, &changed)
        }
        Statement::Delete(delete) => {
            let (FromTable::WithFromKeyword(from) | FromTable::WithoutKeyword(from)) = &delete.from;
            let [table] = &from[..] else { return Err(Refusal::NoReturning("DELETE from several tables")) };
            let (name, alias) = only_table(table, "DELETE")?;
            let target = Target::find(name, alias, catalogue)?;
            target.returning(text, statement, Action::Delete, &[])
        }
        Statement::Truncate(truncate) => {
            let mut tokens = Vec::new();
            for name in &truncate.table_names {
                let target = Target::find(&name.name, None, catalogue)?;
                tokens.push(Token::Table(target.table.oid));
                // The deleted rows referred to other rows, and the server does not report which.
                let parents = target.table.references.iter();
                tokens.extend(parents.map(|parent| Token::Index(parent.table, parent.index)));
            }
            Ok(Effect::Barrier(tokens))
        }
        Statement::Query(query) if writes_inside(query) => Err(Refusal::WritingWith),
        Statement::Query(query) if makes_table(query) => Ok(Effect::Barrier(vec![Token::Everything])),
        Statement::Query(_) => Ok(Effect::Nothing),
        Statement::Explain { analyze: true, statement, .. } if !matches!(**statement, Statement::Query(_)) => {
            Err(Refusal::NoReturning("EXPLAIN ANALYZE"))
        }
        Statement::Merge(_) => Err(Refusal::NoReturning("MERGE")),
        Statement::Copy { source: CopySource::Table { table_name, .. }, to: false, .. }
            if Target::find(table_name, None, catalogue).is_ok_and(|target| target.table.temporary) =>
        {
            Ok(Effect::Nothing)
        }
        Statement::Copy { to: false, .. } => Err(Refusal::NoReturning("COPY FROM")),
        // These change no row of any table.
        Statement::Copy { to: true, .. } | Statement::Declare { .. } | Statement::Explain { .. } => Ok(Effect::Nothing),
        _ => Ok(Effect::Barrier(vec![Token::Everything])),
    }
}

/// Returns true if the statement creates or drops only temporary tables or views of the session.
fn is_temporary(statement: &Statement, catalogue: &Catalogue) -> bool {
    match statement {
        Statement::CreateTable(table) => table.temporary,
        Statement::CreateView(view) => view.temporary,
        Statement::Drop { object_type: ObjectType::Table, names, .. } => {
            names.iter().all(|name| Target::find(name, None, catalogue).is_ok_and(|target| target.table.temporary))
        }
        _ => false,
    }
}

/// `SELECT ... INTO`.
fn makes_table(query: &Query) -> bool {
    matches!(&*query.body, SetExpr::Select(select) if select.into.is_some())
}

/// Returns true if the first word is one of the DDL words.
fn changes_schema(text: &str) -> bool {
    let first = words(text).into_iter().find(|token| token.token != SqlToken::SemiColon);
    let ddl = [Keyword::CREATE, Keyword::ALTER, Keyword::DROP, Keyword::COMMENT, Keyword::GRANT, Keyword::REVOKE];
    first.is_some_and(|first| matches!(first.token, SqlToken::Word(word) if ddl.contains(&word.keyword)))
}

fn writes_inside(query: &Query) -> bool {
    let in_body =
        matches!(*query.body, SetExpr::Insert(_) | SetExpr::Update(_) | SetExpr::Delete(_) | SetExpr::Merge(_));
    let with = query.with.iter().flat_map(|with| &with.cte_tables);
    in_body || with.into_iter().any(|cte| writes_inside(&cte.query))
}

/// Refuses a statement that calls a function that may write; SELECT can do so too.
fn only_harmless_functions(statement: &Statement, catalogue: &Catalogue) -> Result<(), Refusal> {
    struct Functions<'a>(&'a Catalogue);
    impl Functions<'_> {
        fn judge(&self, name: &ObjectName) -> ControlFlow<String> {
            let parts = name_parts(name);
            match parts.last() {
                Some(last) if self.0.may_write.contains(last) => ControlFlow::Break(parts.join(".")),
                _ => ControlFlow::Continue(()),
            }
        }
    }
    impl Visitor for Functions<'_> {
        type Break = String;

        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<String> {
            match expr {
                Expr::Function(function) => self.judge(&function.name),
                _ => ControlFlow::Continue(()),
            }
        }

        fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<String> {
            match table {
                TableFactor::Table { name, args: Some(_), .. } | TableFactor::Function { name, .. } => self.judge(name),
                _ => ControlFlow::Continue(()),
            }
        }
    }
    match statement.visit(&mut Functions(catalogue)) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(name) => Err(Refusal::Function(name)),
    }
}

fn only_table<'a>(
    table: &'a TableWithJoins,
    statement: &'static str,
) -> Result<(&'a ObjectName, Option<&'a Ident>), Refusal> {
    match &table.relation {
        TableFactor::Table { name, alias, args: None, .. } if table.joins.is_empty() => {
            Ok((name, alias.as_ref().map(|alias| &alias.name)))
        }
        _ => Err(Refusal::NoReturning(statement)),
    }
}

pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The tokens of a text with their locations, without blanks and comments.
fn words(text: &str) -> Vec<TokenWithSpan> {
    let tokens = parse::tokens(text).unwrap_or_default();
    tokens.into_iter().filter(|token| !matches!(token.token, SqlToken::Whitespace(_) | SqlToken::EOF)).collect()
}

/// The text up to the semicolon that ends the statement, if there is one; comments may follow it.
fn without_semicolon(text: &str) -> &str {
    match words(text).last() {
        Some(last) if last.token == SqlToken::SemiColon => &text[..Places::of(text).byte(last.span.start)],
        _ => text,
    }
}

/// The RETURNING list of a statement.
fn returned(statement: &mut Statement) -> Option<&mut Vec<SelectItem>> {
    match statement {
        Statement::Insert(insert) => insert.returning.as_mut(),
        Statement::Update(update) => update.returning.as_mut(),
        Statement::Delete(delete) => delete.returning.as_mut(),
        _ => None,
    }
}

fn has_returning(statement: &Statement) -> bool {
    match statement {
        Statement::Insert(insert) => insert.returning.is_some(),
        Statement::Update(update) => update.returning.is_some(),
        Statement::Delete(delete) => delete.returning.is_some(),
        _ => false,
    }
}

/// The text with `column` before the columns that it returns. `None` if it is unclear which RETURNING is the clause, because
/// the word may also be a name. `statement` is the text without that column.
fn with_first(text: &str, statement: &Statement, column: &str) -> Option<String> {
    let mut places = Places::of(text);
    let ends: Vec<usize> = words(text)
        .into_iter()
        .filter_map(|token| match token.token {
            SqlToken::Word(word) if word.keyword == Keyword::RETURNING => {
                Some(places.byte(token.span.start) + word.value.len())
            }
            _ => None,
        })
        .collect();
    let mut texts = ends.into_iter().rev().take(RETURNING_TRIED_MAX).map(|at| {
        let (before, behind) = text.split_at(at);
        format!("{before} {column},{behind}")
    });
    texts.find(|text| {
        let is_meant = parsed(text, |mut found| {
            let [found] = &mut found[..] else { return Ok(false) };
            let Some(items) = returned(found).filter(|items| !items.is_empty()) else { return Ok(false) };
            items.remove(0);
            Ok(*found == *statement)
        });
        is_meant.unwrap_or(false)
    })
}

/// The table that a statement writes.
struct Target<'a> {
    table: &'a Arc<Table>,
    /// Quoted alias or name that qualifies its columns.
    qualifier: String,
}

impl<'a> Target<'a> {
    fn find(name: &ObjectName, alias: Option<&Ident>, catalogue: &'a Catalogue) -> Result<Target<'a>, Refusal> {
        let table = catalogue.table(&name_parts(name)).ok_or_else(|| Refusal::UnknownTable(name.to_string()))?;
        if let Some(kind) = table.kind {
            return Err(Refusal::NotATable(table.name.clone(), kind));
        }
        let qualifier = quoted(&alias.map_or_else(|| table.name.clone(), fold_case));
        Ok(Target { table, qualifier })
    }

    /// Positions of the columns that the statement assigns to.
    fn assigned(&self, assignments: &[Assignment]) -> Result<Vec<usize>, Refusal> {
        let mut positions = Vec::new();
        for assignment in assignments {
            let names = match &assignment.target {
                AssignmentTarget::ColumnName(name) => std::slice::from_ref(name),
                AssignmentTarget::Tuple(names) => &names[..],
            };
            for name in names {
                // A field of a composite column is written `column.field`: only the first part counts.
                let column = name.0.first().and_then(|part| part.as_ident()).map(fold_case).unwrap_or_default();
                let position = self.table.columns.iter().position(|other| other.name == column);
                positions.push(position.ok_or_else(|| Refusal::UnknownTable(format!("{}.{column}", self.table.name)))?);
            }
        }
        Ok(positions)
    }

    fn returning(
        &self,
        text: &str,
        statement: &Statement,
        action: Action,
        changed: &[usize],
    ) -> Result<Effect, Refusal> {
        if self.table.temporary {
            return Ok(Effect::Nothing);
        }
        let key = self.may_capture(action, changed)?;
        let image: Vec<usize> = (0..self.table.columns.len()).filter(|at| !self.table.columns[*at].generated).collect();
        let mut columns: Vec<String> = image.iter().map(|at| self.column(*at)).collect();
        let mut hashes = Vec::new();
        if let Some(key) = key {
            hashes.push(Hash::Row);
            columns.push(self.hash(key, true));
        }
        let (tokens, more) = self.values(action, changed);
        for (hash, value) in more {
            hashes.push(hash);
            columns.push(value);
        }
        let text = without_semicolon(text);
        // One column of type text, because it looks the same in every format that the client may ask for. It is the first, so
        // that its end is known before the whole row has arrived.
        let hidden = format!("ROW({})::pg_catalog.text", columns.join(", "));
        let unclear = || Refusal::Unparsable(": the position of RETURNING is ambiguous".into());
        let has_returning = has_returning(statement);
        let text = match has_returning {
            true => with_first(text, statement, &hidden).ok_or_else(unclear)?,
            false => format!("{text}\nRETURNING {hidden}"),
        };
        Ok(Effect::Writes(RewrittenStatement {
            text,
            table: Arc::clone(self.table),
            action,
            image,
            hashes,
            tokens,
            client_sees_rows: has_returning,
            may_conflict: false,
        }))
    }

    /// Refuses a write that RETURNING would not show completely; returns the key, which a table needs unless rows are only
    /// inserted.
    fn may_capture(&self, action: Action, changed: &[usize]) -> Result<Option<&[usize]>, Refusal> {
        let table = self.table;
        let (insert, update, delete) = match action {
            Action::Insert => (true, false, false),
            Action::Upsert => (true, true, false),
            Action::Update => (false, true, false),
            Action::Delete => (false, false, true),
        };
        let more = table.writes_more.iter();
        let mut more = more.filter(|m| (m.insert && insert) || (m.update && update) || (m.delete && delete));
        if let Some(more) = more.next() {
            return Err(Refusal::WritesMore { table: table.name.clone(), what: more.what.clone() });
        }
        if let Some(why) = table.unreadable {
            return Err(Refusal::NotReadable(table.name.clone(), why));
        }
        let Some(key) = table.key.as_deref() else {
            return if action == Action::Insert { Ok(None) } else { Err(Refusal::NoKey(table.name.clone())) };
        };
        // A column that the server computes from others changes with them.
        let generated = |at: &&usize| self.table.columns[**at].generated;
        if let Some(at) = key.iter().find(generated) {
            let column = table.columns[*at].name.clone();
            return Err(Refusal::KeyChanged { table: table.name.clone(), column });
        }
        match changed.iter().find(|at| key.contains(at)) {
            Some(at) => {
                let column = table.columns[*at].name.clone();
                Err(Refusal::KeyChanged { table: table.name.clone(), column })
            }
            None => Ok(Some(key)),
        }
    }

    /// Tokens of unique values and of parents: those known now, and those whose hash the server computes.
    fn values(&self, action: Action, changed: &[usize]) -> (Vec<Token>, Vec<(Hash, String)>) {
        let (mut tokens, mut hashes) = (Vec::new(), Vec::new());
        let touches =
            |columns: &[usize]| columns.iter().any(|at| changed.contains(at) || self.table.columns[*at].generated);
        for unique in &self.table.uniques {
            let whole = Token::Index(self.table.oid, unique.oid);
            match &unique.columns {
                // RETURNING does not show the old value of a changed column; for an expression, the columns it reads are
                // unknown.
                None if action != Action::Update || !changed.is_empty() => tokens.push(whole),
                None => {}
                Some(_) if !unique.by_hash => tokens.push(whole),
                Some(columns) if matches!(action, Action::Update | Action::Upsert) && touches(columns) => {
                    tokens.push(whole);
                }
                Some(_) if action == Action::Update => {}
                Some(columns) => {
                    let hash = Hash::Unique { index: unique.oid };
                    hashes.push((hash, self.hash(columns, unique.nulls_equal)));
                }
            }
        }
        for parent in &self.table.references {
            let touched = touches(&parent.columns);
            if matches!(action, Action::Update | Action::Upsert) && touched {
                // RETURNING does not show the parent that the row had before.
                tokens.push(Token::Index(parent.table, parent.index));
            } else if action != Action::Update {
                let hash = Hash::Parent { table: parent.table, index: parent.index };
                hashes.push((hash, self.hash(&parent.columns, false)));
            }
        }
        (tokens, hashes)
    }

    fn column(&self, at: usize) -> String {
        format!("{}.{}", self.qualifier, quoted(&self.table.columns[at].name))
    }

    /// The SQL expression of a hash that uses the equality of the columns' types; NULL if one of them is NULL, unless NULLs
    /// count as values.
    fn hash(&self, columns: &[usize], nulls_count: bool) -> String {
        let list: Vec<String> = columns.iter().map(|at| self.column(*at)).collect();
        let hash = format!("pg_catalog.hash_record_extended(ROW({}), 0)", list.join(", "));
        if nulls_count {
            return hash;
        }
        let any: Vec<String> = list.iter().map(|column| format!("{column} IS NULL")).collect();
        format!("CASE WHEN {} THEN NULL ELSE {hash} END", any.join(" OR "))
    }
}
