//! Rewritten statements on a real server: they keep their effect, and return what they wrote.

use stillpoint_migrate_capture::{
    Action, Catalogue, Column, Effect, Hash, Image, Reference, Refusal, RewrittenStatement, Table, Unique, WritesMore,
    rewrite,
};
use stillpoint_migrate_replay::Token;
use stillpoint_testing::postgresql::{Cluster, available};

const SCHEMA: &str = "CREATE TABLE parent (id int PRIMARY KEY, note text); \
    CREATE TABLE item (id numeric PRIMARY KEY, code text UNIQUE, amount int NOT NULL, \
        twice int GENERATED ALWAYS AS (amount * 2) STORED, \"Parent\" int REFERENCES parent); \
    INSERT INTO parent SELECT i, 'p' || i FROM generate_series(1, 3) i;";

fn columns(names: &[&str]) -> Vec<Column> {
    names.iter().map(|name| Column { name: (*name).into(), generated: *name == "twice", ..Column::default() }).collect()
}

/// The catalogue of [`SCHEMA`], with the test's own numbers for objects.
fn catalogue() -> Catalogue {
    let mut catalogue = Catalogue::new(["public".to_owned()]);
    catalogue.may_write = ["my_function", "steal"].map(String::from).into();
    let table = |oid, name: &str, names: &[&str]| Table {
        oid,
        schema: "public".into(),
        name: name.into(),
        columns: columns(names),
        key: Some(vec![0]),
        ..Table::default()
    };
    let unique = |oid, at| Unique { oid, columns: Some(vec![at]), by_hash: true, nulls_equal: false };
    catalogue.add(Table { uniques: vec![unique(11, 0)], ..table(1, "parent", &["id", "note"]) });
    catalogue.add(Table {
        uniques: vec![unique(21, 1)],
        references: vec![Reference { columns: vec![4], table: 1, index: 11 }],
        ..table(2, "item", &["id", "code", "amount", "twice", "Parent"])
    });
    let more = WritesMore { what: "trigger audit".into(), insert: true, update: false, delete: false };
    catalogue.add(Table { writes_more: vec![more], ..table(3, "audited", &["id", "x"]) });
    catalogue.add(Table { key: None, ..table(4, "keyless", &["x"]) });
    catalogue.add(Table { kind: Some("view"), ..table(5, "look", &["x"]) });
    catalogue.add(Table { unreadable: Some("row security"), ..table(6, "secret", &["id"]) });
    catalogue
}

fn writes(text: &str) -> RewrittenStatement {
    match rewrite(text, &catalogue()) {
        Ok(Effect::Writes(rewritten)) => rewritten,
        other => panic!("{text}: {other:?}"),
    }
}

fn refused(text: &str) -> Refusal {
    rewrite(text, &catalogue()).expect_err(text)
}

/// Results of a statement's rewritten form on the server.
fn run(cluster: &Cluster, text: &str) -> Vec<(String, Image)> {
    let rewritten = writes(text);
    let answer = cluster.sql("shop", &rewritten.text);
    let rows = answer.lines().map(|line| line.split_once('|').unwrap_or((line, "")));
    rows.map(|(hidden, shown)| (shown.to_owned(), rewritten.read(hidden).expect(hidden))).collect()
}

fn values(image: &Image) -> Vec<&str> {
    image.values.iter().map(|value| value.as_deref().unwrap_or("NULL")).collect()
}

#[test]
fn every_written_row_is_shown_with_its_tokens() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    cluster.sql("postgres", "CREATE DATABASE shop");
    cluster.sql("shop", SCHEMA);

    let insert = "INSERT INTO item (id, code, amount, \"Parent\") VALUES (1.0, 'a', 5, 2), (2, NULL, 6, NULL);";
    let rewritten = writes(insert);
    assert_eq!(rewritten.hashes, [Hash::Row, Hash::Unique { index: 21 }, Hash::Parent { table: 1, index: 11 }]);
    assert_eq!(rewritten.image, [0, 1, 2, 4]);
    let rows = run(&cluster, insert);
    assert_eq!(values(&rows[0].1), ["1.0", "a", "5", "2"]);
    assert_eq!(values(&rows[1].1), ["2", "NULL", "6", "NULL"]);
    assert_eq!((rows[0].1.tokens.len(), rows[1].1.tokens.len()), (3, 1), "a NULL has no token: {rows:?}");
    let row = rows[0].1.tokens[0];

    // 1 = 1.0 = 1.00: one key, one token.
    let updated = run(&cluster, "UPDATE item AS i SET amount = amount + 1 WHERE i.id = 1 -- the first\n");
    assert_eq!((values(&updated[0].1), &updated[0].1.tokens[..]), (vec!["1.0", "a", "6", "2"], &[row][..]));
    assert_eq!(writes("UPDATE item SET amount = 1").tokens, []);
    let upserted = run(
        &cluster,
        "INSERT INTO item (id, amount) VALUES (1.00, 9) ON CONFLICT (id) DO UPDATE SET amount = excluded.amount; -- new",
    );
    assert_eq!(values(&upserted[0].1), ["1.0", "a", "9", "2"]);
    assert_eq!(upserted[0].1.tokens[0], row);

    // The client's own columns come after it.
    let deleted = run(&cluster, "DELETE FROM item USING parent p WHERE p.id = item.\"Parent\" RETURNING p.note");
    assert_eq!((deleted[0].0.as_str(), values(&deleted[0].1)), ("p2", vec!["1.0", "a", "9", "2"]));
    assert_eq!(deleted[0].1.tokens, rows[0].1.tokens);
    assert_eq!(cluster.sql("shop", "SELECT id, amount FROM item"), "2|6");
    // The parent's own token equals the token of the rows that refer to it.
    let parent = run(&cluster, "DELETE FROM parent WHERE id = 2");
    let (Token::Unique(_, _, own), Token::Parent(_, _, theirs)) = (parent[0].1.tokens[1], rows[0].1.tokens[2]) else {
        panic!("{parent:?} {rows:?}")
    };
    assert_eq!(own, theirs);
    // Text that looks like the record's own punctuation comes back unchanged.
    let tricky = run(&cluster, r#"INSERT INTO item (id, code, amount) VALUES (9, E'a"b\\c,d)''\t', 1) RETURNING 'x'"#);
    assert_eq!(values(&tricky[0].1)[1], "a\"b\\c,d)'\t");
}

#[test]
fn the_hidden_column_stands_first_if_other_things_bear_the_word_s_name() {
    for text in [
        "DELETE FROM item RETURNING *",
        "delete from item returning id as returning, code",
        "INSERT INTO item SELECT id AS returning, code, 1 FROM item returning *",
        "UPDATE item SET code = 'returning x' /* returning */ WHERE id = 1 RETURNING \"returning\"",
        "UPDATE item SET code = '\u{fc} returning\n\u{df}'\nReturning\nid, 'returning' -- returning\n",
    ] {
        let rewritten = writes(&format!("{text};"));
        assert!(rewritten.client_sees_rows);
        let (before, hidden) = rewritten.text.split_once(" ROW(\"item\"").expect("the hidden column");
        let (_, behind) = hidden.split_once("::pg_catalog.text,").expect("its end");
        assert!(before.to_lowercase().ends_with("returning"), "{}", rewritten.text);
        assert_eq!(format!("{before}{behind}"), text);
    }
}

#[test]
fn what_is_not_returned_becomes_a_token_of_the_whole_index() {
    let code = writes("UPDATE item SET code = 'b' WHERE id = 1");
    assert_eq!((code.action, code.tokens), (Action::Update, vec![Token::Index(2, 21)]));
    let parent = writes("UPDATE item SET (amount, \"Parent\") = (1, 2)");
    assert_eq!(parent.tokens, [Token::Index(1, 11)]);
    let upsert = writes("INSERT INTO item VALUES (1) ON CONFLICT (id) DO UPDATE SET code = 'x'");
    assert_eq!((upsert.action, upsert.tokens), (Action::Upsert, vec![Token::Index(2, 21)]));
}

#[test]
fn barriers_are_told_with_their_tokens() {
    let barrier = |text: &str| match rewrite(text, &catalogue()) {
        Ok(Effect::Barrier(tokens)) => tokens,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(barrier("TRUNCATE item"), [Token::Table(2), Token::Index(1, 11)]);
    for ddl in ["CREATE TABLE x (y int)", "ALTER TABLE item ADD z int", "DROP TABLE item"] {
        assert_eq!(barrier(ddl), [Token::Everything], "{ddl}");
    }
}

#[test]
fn what_writes_nothing_goes_as_it_is() {
    for text in [
        "",
        "SELECT * FROM item WHERE id = $1 FOR UPDATE",
        "SELECT now()",
        "CREATE TEMP TABLE mine (a int)",
        "DECLARE c CURSOR FOR SELECT * FROM item",
        "SET search_path = x",
        "COPY item TO STDOUT",
    ] {
        assert_eq!(rewrite(text, &catalogue()), Ok(Effect::Nothing), "{text}");
    }
}

#[test]
fn what_cannot_be_captured_is_refused_by_name() {
    let key = Refusal::KeyChanged { table: "item".into(), column: "id".into() };
    assert_eq!(refused("UPDATE item SET id = 3"), key);
    let more = Refusal::WritesMore { table: "audited".into(), what: "trigger audit".into() };
    assert_eq!(refused("INSERT INTO audited VALUES (1, 2)"), more);
    assert!(rewrite("DELETE FROM audited", &catalogue()).is_ok(), "the trigger is one of INSERT");
    assert_eq!(writes("INSERT INTO keyless VALUES (1)").hashes, [], "rows that are only added need no key");
    assert_eq!(refused("DELETE FROM keyless"), Refusal::NoKey("keyless".into()));
    assert_eq!(refused("INSERT INTO look VALUES (1)"), Refusal::NotATable("look".into(), "view"));
    assert_eq!(refused("DELETE FROM secret"), Refusal::NotReadable("secret".into(), "row security"));
    assert_eq!(refused("DELETE FROM gone"), Refusal::UnknownTable("gone".into()));
    assert_eq!(refused("SELECT * FROM my_function(1) f"), Refusal::Function("my_function".into()));
    assert_eq!(refused("SELECT my_function(1)"), Refusal::Function("my_function".into()));
    assert_eq!(refused("INSERT INTO item SELECT s.steal(1), 'x', 2"), Refusal::Function("s.steal".into()));
    let with = "WITH gone AS (DELETE FROM item RETURNING *) SELECT * FROM gone";
    assert_eq!(refused(with), Refusal::WritingWith);
    assert_eq!(refused("SELECT 1; SELECT 2"), Refusal::Several(2));
    assert_eq!(refused("COPY item FROM STDIN"), Refusal::NoReturning("COPY FROM"));
    assert_eq!(refused("CALL work()"), Refusal::NoReturning("CALL"));
    let merge = "MERGE INTO item USING parent p ON item.id = p.id WHEN MATCHED THEN DELETE";
    assert_eq!(refused(merge), Refusal::NoReturning("MERGE"));
    assert!(matches!(refused("UPDATE SET WHERE"), Refusal::Unparsable(_)));
}
