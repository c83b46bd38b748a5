//! Statements of clients, which a proxy parses while it captures, and the hidden column that a server returns. A NUL ends the statement and
//! begins the column.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use stillpoint_migrate_capture::{Catalogue, Column, Effect, Table, Unique, only_reads, check_repeatable, rewrite, split};

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Ok(text) = std::str::from_utf8(input) else { return Corpus::Reject };
    let (statement, column) = text.split_once('\0').unwrap_or((text, ""));
    let catalogue = catalogue();
    if let Some(pieces) = split(statement) {
        let mut end = 0;
        for piece in pieces {
            assert!(end <= piece.start && statement.get(piece.clone()).is_some(), "{piece:?}");
            end = piece.end;
        }
    }
    if let Ok(Effect::Writes(rewritten)) = rewrite(statement, &catalogue) {
        // the client's own text stays complete
        assert!(rewritten.text.len() > statement.trim_end().len());
        if let Ok(image) = rewritten.read(column) {
            assert_eq!(image.values.len(), rewritten.image.len());
            assert!(image.tokens.len() <= rewritten.hashes.len());
        }
    }
    let _ = (check_repeatable(statement, &catalogue), only_reads(statement, &catalogue));
    Corpus::Keep
});

/// A table with a key and a unique value, and a view.
fn catalogue() -> Catalogue {
    let mut catalogue = Catalogue::new(["public".to_owned()]);
    let columns = ["id", "v", "w"].map(|name| Column { name: name.into(), ..Column::default() }).to_vec();
    let table = |oid, name: &str| Table { oid, schema: "public".into(), name: name.into(), ..Table::default() };
    let uniques = vec![Unique { oid: 9, columns: Some(vec![1]), by_hash: true, nulls_equal: false }];
    catalogue.add(Table { columns, uniques, key: Some(vec![0]), ..table(7, "item") });
    catalogue.add(Table { kind: Some("view"), ..table(8, "seen") });
    catalogue
}

fn seeds() -> Vec<Vec<u8>> {
    [
        "INSERT INTO item VALUES (1, 'a', NULL), (2, $$b$$, $1) RETURNING id\0(1,\"a \"\"b\"\"\",,5,-7)",
        "INSERT INTO item (id, v) SELECT 1, 'x' ON CONFLICT (id) DO UPDATE SET v = excluded.v",
        "UPDATE public.item AS i SET w = E'it\\'s' WHERE i.id IN (SELECT id FROM seen)",
        "DELETE FROM item WHERE id = 1 OR id = 2; SELECT 1;;",
        "WITH gone AS (DELETE FROM item RETURNING *) SELECT * FROM gone",
        "BEGIN; SAVEPOINT a; TRUNCATE item; ROLLBACK TO a; COMMIT",
        "CREATE FUNCTION f() BEGIN ATOMIC SELECT 1; END",
        "COPY item FROM STDIN; EXPLAIN ANALYZE SELECT now(), nextval('s')",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}
