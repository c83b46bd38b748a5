//! Texts with which a client could exhaust the parser's stack or memory: each ends in an answer, on a thread with a
//! small stack.

use stillpoint_migrate_capture::{
    Action, Catalogue, Column, Effect, Refusal, Table, check_repeatable, only_reads, rewrite, split,
};

/// Bytes of stack of the thread that asks: an eighth of a usual thread's.
const STACK: usize = 256 << 10;

fn catalogue() -> Catalogue {
    let mut catalogue = Catalogue::new(["public".to_owned()]);
    let columns = ["id", "v"].map(|name| Column { name: name.into(), ..Column::default() }).to_vec();
    let (schema, name) = ("public".into(), "item".into());
    catalogue.add(Table { oid: 7, schema, name, columns, key: Some(vec![0]), ..Table::default() });
    catalogue
}

/// Runs `ask` on a small stack.
fn on_small_stack<T: Send>(ask: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, ask).unwrap();
        thread.join().unwrap()
    })
}

fn judged(text: &str) -> Result<Effect, Refusal> {
    on_small_stack(|| rewrite(text, &catalogue()))
}

/// Constructs that make a tree deeper, in a loop of the parser or by its recursion; each `levels` deep.
fn chains(levels: usize) -> Vec<(&'static str, String)> {
    let around = |each: usize, open: &str, inside: &str, close: &str| {
        format!("{}{inside}{}", open.repeat(levels / each), close.repeat(levels / each))
    };
    let behind = |each: usize, first: &str, more: &str| format!("{first}{}", more.repeat(levels / each));
    let before = |first: &str, last: &str| format!("SELECT {} {last}", first.repeat(levels));
    vec![
        ("sum", behind(1, "SELECT 1", "+1")),
        ("or", behind(3, "SELECT FROM item WHERE id = 1", " OR id = 1")),
        ("and", behind(2, "SELECT FROM item WHERE v", " AND v")),
        ("concatenation", behind(1, "SELECT 'a'", "||'a'")),
        ("not", before("NOT ", "v")),
        ("minus", before("- ", "1")),
        ("tilde", before("~ ", "1")),
        ("interval", before("INTERVAL ", "'1'")),
        ("parentheses", format!("SELECT {}", around(1, "(", "1", ")"))),
        ("tables in parentheses", format!("SELECT FROM {}", around(1, "(", "item JOIN item ON v", ")"))),
        ("subqueries", format!("SELECT {}", around(2, "(SELECT ", "1", ")"))),
        ("derived tables", format!("SELECT {}", around(3, "FROM (SELECT ", "1", ") t"))),
        ("function calls", format!("SELECT {}", around(2, "f(", "'a'", ")"))),
        ("arrays", format!("SELECT ARRAY{}", around(1, "[", "1", "]"))),
        ("subscripts", behind(1, "SELECT v", "[1]")),
        ("case", format!("SELECT {}", around(5, "CASE WHEN v THEN ", "1", " END"))),
        ("else", format!("SELECT {}", around(6, "CASE WHEN v THEN 1 ELSE ", "1", " END"))),
        ("casts", behind(2, "SELECT 1", "::int")),
        ("array types", behind(1, "SELECT v::int", "[]")),
        ("is null", behind(2, "SELECT v", " IS NULL")),
        ("isnull", behind(1, "SELECT v", " ISNULL")),
        ("collate", behind(2, "SELECT v", " COLLATE one")),
        ("at time zone", behind(3, "SELECT v", " AT TIME ZONE 'UTC'")),
        ("between", behind(2, "SELECT v", " BETWEEN 1 AND 2")),
        ("union", behind(3, "SELECT 1", " UNION ALL SELECT 1")),
        ("union of lists", behind(1, "SELECT 1, 2", " UNION ALL SELECT 1, 2")),
        ("union of values", behind(1, "VALUES (1), (2)", " UNION VALUES (1), (2)")),
        ("except", behind(1, "SELECT 1, 2", " EXCEPT SELECT 1, 2")),
        ("joins", behind(4, "SELECT FROM item", " JOIN item ON v")),
        ("joins without condition", behind(3, "SELECT FROM item", " NATURAL JOIN item")),
        ("explain", format!("{}SELECT 1", "EXPLAIN ".repeat(levels))),
        ("with", around(4, "WITH one AS (", "SELECT 1", ") SELECT 1")),
        ("braces", format!("SELECT {}", around(1, "{", "1", "}"))),
        ("open parentheses", before("(", "")),
        ("open cases", before("CASE ", "")),
        ("closed parentheses", behind(1, "SELECT 1", ")+1")),
    ]
}

#[test]
fn what_is_too_deep_is_refused_by_name() {
    let too_deep = |answer: Result<Effect, Refusal>| matches!(answer, Err(Refusal::TooDeep(_)));
    for (what, text) in [
        ("sum", format!("select 1{}", "+1".repeat(39_999))),
        ("or", format!("SELECT FROM item WHERE id = 1{}", " OR id = 1".repeat(60_000))),
        ("parentheses", format!("SELECT {}1{}", "(".repeat(100_000), ")".repeat(100_000))),
        ("not", format!("SELECT {}v", "NOT ".repeat(100_000))),
    ] {
        assert!(too_deep(judged(&text)), "{what}");
    }
    for (what, text) in chains(10_600) {
        assert!(too_deep(judged(&text)), "{what}");
    }
    let update = format!("UPDATE item SET v = 1{} WHERE id = 1 RETURNING v", "+1".repeat(40_000));
    assert!(matches!(on_small_stack(|| check_repeatable(&update, &catalogue())), Err(Refusal::TooDeep(_))));
    let select = format!("SELECT 1{}", "+1".repeat(40_000));
    assert!(!on_small_stack(|| only_reads(&select, &catalogue())));
    assert_eq!(on_small_stack(|| split(&format!("{update}; {select}"))).map(|pieces| pieces.len()), Some(2));
    let said = judged(&update).unwrap_err().to_string();
    assert_eq!(said, "the statement is too deep: more than 10000 tokens without a comma between them");
}

#[test]
fn what_is_as_deep_as_may_be_has_stack_enough() {
    let mut taken = Vec::new();
    for (what, text) in chains(9_900) {
        match judged(&text) {
            Ok(Effect::Nothing) => taken.push(what),
            // The parser's own limit applies to nesting, and is reached sooner.
            Err(Refusal::Unparsable(_)) => {}
            other => panic!("{what}: {other:?}"),
        }
    }
    assert!(taken.len() >= 16, "{taken:?}");
    let select = format!("SELECT 1{}", "+1".repeat(9_990));
    assert!(on_small_stack(|| only_reads(&select, &catalogue())));
}

#[test]
fn a_deep_write_is_captured() {
    for (n, more) in [(9_980, "+1"), (4_980, "::int"), (4_980, " AND v"), (4_980, " IS NULL"), (9_980, "||'v'")] {
        let text = format!("UPDATE item SET v = v{} WHERE id = 1 RETURNING v", more.repeat(n));
        let Ok(Effect::Writes(rewritten)) = judged(&text) else { panic!("{more}") };
        assert!(rewritten.client_sees_rows && rewritten.action == Action::Update);
        assert_eq!(on_small_stack(|| check_repeatable(&text, &catalogue())), Ok(()), "{more}");
    }
}

#[test]
fn what_is_wide_is_captured() {
    let list = |one: &str, n: usize| vec![one; n].join(", ");
    let insert = format!("INSERT INTO item (id, v) VALUES {}", list("(1, -1 + 2)", 10_000));
    let delete = format!("DELETE FROM item WHERE id IN ({}) OR v IN ({})", list("1", 20_000), list("-$1", 20_000));
    let array = format!("UPDATE item SET v = 1 WHERE id = ANY (ARRAY[{}]) RETURNING *", list("1", 20_000));
    let cases = format!("UPDATE item SET v = CASE{} END", " WHEN id = 1 THEN 2".repeat(2_000));
    let pairs = format!("DELETE FROM item WHERE (id = 1 AND v = 2){}", " OR (id = 1 AND v = 2)".repeat(4_900));
    for text in [&insert, &delete, &array, &cases, &pairs] {
        assert!(matches!(judged(text), Ok(Effect::Writes(_))), "{}", &text[..60]);
    }
    let columns = format!("SELECT {} FROM item", list("coalesce(id, 1) AS one", 5_000));
    assert_eq!(judged(&columns), Ok(Effect::Nothing));
    let union = format!("SELECT {0} UNION ALL SELECT {0}", list("1", 5_000));
    assert_eq!(judged(&union), Ok(Effect::Nothing));
}

#[test]
fn what_is_too_long_is_refused_by_name_and_a_long_value_is_not() {
    let value = "{\"a\": [1, 2, 'x']}, ".repeat(100_000).replace('\'', "''");
    let insert = format!("INSERT INTO item (id, v) VALUES (1, '{value}')");
    assert!(matches!(judged(&insert), Ok(Effect::Writes(_))));
    let rows = format!("INSERT INTO item (id, v) VALUES (1, 2){}", ", (1, 2)".repeat(200_000));
    assert!(matches!(judged(&rows), Err(Refusal::TooLong(_))));
    assert_eq!(split(&format!("{rows};")), None);
}

#[test]
fn what_only_looks_deep_is_nothing_to_the_parser() {
    let quoted = "1+(".repeat(20_000);
    let nested = format!("{}{}", "/*".repeat(20_000), "*/".repeat(20_000));
    for text in [
        format!("SELECT '{quoted}'"),
        format!("SELECT $x${quoted}$x$"),
        format!("SELECT \"{quoted}\" FROM item"),
        format!("SELECT 1 -- {quoted}"),
        format!("SELECT 1 /* {quoted} */"),
        format!("SELECT {nested} 1"),
    ] {
        assert_eq!(judged(&text), Ok(Effect::Nothing), "{}", &text[..20]);
    }
}

#[test]
fn a_text_with_many_words_returning_ends() {
    let text = format!("DELETE FROM item WHERE id = 1 RETURNING v{}", ", v AS returning".repeat(2_000));
    // The parser does not search without end for the one that is meant.
    assert!(matches!(judged(&text), Err(Refusal::Unparsable(_)) | Ok(Effect::Writes(_))));
    let few = format!("DELETE FROM item WHERE id = 1 RETURNING v{}", ", v AS returning".repeat(5));
    assert!(matches!(judged(&few), Ok(Effect::Writes(_))));
}
