//! Rewritten statements on a real server: they do what they did, and show what they wrote.

use stillpoint_migrate_capture::{
    Action, Catalogue, Column, Hash, Reference, Refusal, Rewritten, Seen, Table, Unique, WritesMore, rewrite,
};
use stillpoint_migrate_replay::Token;
use stillpoint_migrate_testbed::{Cluster, available};

const SCHEMA: &str = "CREATE TABLE parent (id int PRIMARY KEY, note text); \
    CREATE TABLE item (id numeric PRIMARY KEY, code text UNIQUE, amount int NOT NULL, \
        twice int GENERATED ALWAYS AS (amount * 2) STORED, \"Parent\" int REFERENCES parent); \
    INSERT INTO parent SELECT i, 'p' || i FROM generate_series(1, 3) i;";

fn columns(names: &[&str]) -> Vec<Column> {
    names.iter().map(|name| Column { name: (*name).into(), generated: *name == "twice" }).collect()
}

/// The catalogue of [`SCHEMA`], with numbers of our own for objects.
fn catalogue() -> Catalogue {
    let mut catalogue = Catalogue::new(["public".to_owned()]);
    catalogue.harmless = ["now", "md5", "coalesce", "generate_series"].map(String::from).into();
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

fn writes(text: &str) -> Rewritten {
    match rewrite(text, &catalogue()) {
        Ok(Seen::Writes(rewritten)) => rewritten,
        other => panic!("{text}: {other:?}"),
    }
}

fn refused(text: &str) -> Refusal {
    rewrite(text, &catalogue()).expect_err(text)
}

/// What a statement's rewritten form answers on the server: rows of fields.
fn run(cluster: &Cluster, text: &str) -> Vec<Vec<String>> {
    let answer = cluster.sql("shop", &writes(text).text);
    answer.lines().map(|line| line.split('|').map(str::to_owned).collect()).collect()
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
    assert_eq!((rewritten.image.clone(), rewritten.hidden), (vec![0, 1, 2, 4], 7));
    let rows = run(&cluster, insert);
    assert_eq!(rows[0][..4], ["1.0", "a", "5", "2"]);
    assert_eq!(rows[1][..4], ["2", "", "6", ""]);
    assert!(rows[1][5].is_empty() && rows[1][6].is_empty(), "a NULL has no token: {rows:?}");

    // 1 = 1.0 = 1.00: one key, one token.
    let updated = run(&cluster, "UPDATE item AS i SET amount = amount + 1 WHERE i.id = 1 -- the first\n");
    assert_eq!(updated[0][..4], ["1.0", "a", "6", "2"]);
    assert_eq!(updated[0][4], rows[0][4]);
    assert_eq!(writes("UPDATE item SET amount = 1").tokens, []);
    let upserted = run(
        &cluster,
        "INSERT INTO item (id, amount) VALUES (1.00, 9) ON CONFLICT (id) DO UPDATE SET amount = excluded.amount; -- new",
    );
    assert_eq!(upserted[0][..4], ["1.0", "a", "9", "2"]);
    assert_eq!(upserted[0][4], rows[0][4]);

    // The client's own columns stand first.
    let deleted = run(&cluster, "DELETE FROM item USING parent p WHERE p.id = item.\"Parent\" RETURNING p.note");
    assert_eq!(deleted[0][..5], ["p2", "1.0", "a", "9", "2"]);
    assert_eq!((&deleted[0][5], &deleted[0][6], &deleted[0][7]), (&rows[0][4], &rows[0][5], &rows[0][6]));
    assert_eq!(cluster.sql("shop", "SELECT id, amount FROM item"), "2|6");
    // The parent's own token is the same as that of those who refer to it.
    let parent = run(&cluster, "DELETE FROM parent WHERE id = 2");
    assert_eq!(parent[0][3], rows[0][6]);
}

#[test]
fn what_is_not_returned_becomes_a_token_of_the_whole_index() {
    let code = writes("UPDATE item SET code = 'b' WHERE id = 1");
    assert_eq!((code.action, code.tokens), (Action::Update, vec![Token::Index { table: 2, index: 21 }]));
    let parent = writes("UPDATE item SET (amount, \"Parent\") = (1, 2)");
    assert_eq!(parent.tokens, [Token::Index { table: 1, index: 11 }]);
    let upsert = writes("INSERT INTO item VALUES (1) ON CONFLICT (id) DO UPDATE SET code = 'x'");
    assert_eq!((upsert.action, upsert.tokens), (Action::Upsert, vec![Token::Index { table: 2, index: 21 }]));
}

#[test]
fn barriers_are_told_with_their_tokens() {
    let barrier = |text: &str| match rewrite(text, &catalogue()) {
        Ok(Seen::Barrier(tokens)) => tokens,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(barrier("TRUNCATE item"), [Token::Table(2), Token::Index { table: 1, index: 11 }]);
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
        "BEGIN ISOLATION LEVEL REPEATABLE READ",
        "COMMIT",
        "ROLLBACK TO SAVEPOINT a",
        "SET search_path = x",
        "COPY item TO STDOUT",
    ] {
        assert_eq!(rewrite(text, &catalogue()), Ok(Seen::Nothing), "{text}");
    }
}

#[test]
fn what_cannot_be_captured_is_refused_by_name() {
    let key = Refusal::KeyChanged { table: "item".into(), column: "id".into() };
    assert_eq!(refused("UPDATE item SET id = 3"), key);
    let more = Refusal::WritesMore { table: "audited".into(), what: "trigger audit".into() };
    assert_eq!(refused("INSERT INTO audited VALUES (1, 2)"), more);
    assert!(rewrite("DELETE FROM audited", &catalogue()).is_ok(), "the trigger is one of INSERT");
    assert_eq!(refused("DELETE FROM keyless"), Refusal::NoKey("keyless".into()));
    assert_eq!(refused("INSERT INTO look VALUES (1)"), Refusal::NotATable("look".into(), "view"));
    assert_eq!(refused("DELETE FROM secret"), Refusal::NotReadable("secret".into(), "row security"));
    assert_eq!(refused("DELETE FROM gone"), Refusal::UnknownTable("gone".into()));
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
