//! `migrate mirror` as an operator calls it: reads of clients on a target that follows.

use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_tests::Testbed;
use stillpoint_testing::postgresql::available;
use stillpoint_testing::wait::until;
use tokio_postgres::{Client, NoTls};

/// Tables, a view, functions and a policy of a client that is no superuser.
const SHOP: &str = "GRANT CREATE ON SCHEMA public TO app; SET ROLE app; \
    CREATE TABLE item (id int PRIMARY KEY, name text, price numeric); \
    INSERT INTO item SELECT g, 'item ' || g, g / 7.0 FROM generate_series(1, 200) g; \
    CREATE TABLE note (id int PRIMARY KEY, owner text); INSERT INTO note VALUES (1, 'app'), (2, 'other'); \
    CREATE TABLE hit (at timestamptz); CREATE SEQUENCE ticket; \
    CREATE VIEW cheap AS SELECT id FROM item WHERE price < 3; \
    CREATE VIEW drawn AS SELECT id, random() AS r FROM item; \
    CREATE FUNCTION touch() RETURNS int LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_lock(77); RETURN 1; END'; \
    CREATE VIEW touched AS SELECT touch(); \
    CREATE FUNCTION never(int, int) RETURNS bool LANGUAGE sql AS 'SELECT touch() = 2'; \
    CREATE OPERATOR <%> (LEFTARG = int, RIGHTARG = int, FUNCTION = never)";

async fn connect(testbed: &Testbed, user: &str) -> Client {
    let conninfo = format!("host=127.0.0.1 port={} user={user} dbname=shop", testbed.port());
    let (client, connection) = tokio_postgres::connect(&conninfo, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// Result of a mirror of a few seconds.
fn mirrored(testbed: &Testbed) -> Value {
    let words = ["mirror", "--share", "100%", "--for", "3s", "--max-slower", "1000"];
    tokio::task::block_in_place(|| testbed.ask(&words))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_are_compared_and_nothing_else_is_run_again() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    for cluster in [&testbed.source, &testbed.target] {
        cluster.sql("postgres", "CREATE ROLE app LOGIN");
    }
    testbed.source.sql("shop", SHOP);
    let refused = testbed.run(&["mirror"]);
    assert_eq!(refused.code, Some(3), "no target follows: {refused:?}");
    let holder = testbed.tool(&["run", "--hold", "--share", "0"]);
    until("a command that holds", || testbed.ask(&["status"])["holding"]["why_not"].as_str().map(drop));
    let client = Arc::new(connect(&testbed, "app").await);

    // Reads in each form, with writes between them, and everything that must not be run twice.
    let own = Arc::clone(&client);
    let reads = tokio::spawn(async move {
        let client = own;
        let by_key = client.prepare("SELECT name, price FROM item WHERE id = $1").await.unwrap();
        let begun = std::time::Instant::now();
        let mut round = 0;
        while begun.elapsed() < Duration::from_secs(4) {
            round += 1;
            client.batch_execute("BEGIN").await.unwrap();
            client.simple_query("SELECT name FROM item WHERE id = 3").await.unwrap();
            client.batch_execute(&format!("UPDATE item SET price = {round} WHERE id = 1; COMMIT")).await.unwrap();
            for text in [
                "SELECT count(*), sum(price) FROM item",
                "SELECT * FROM cheap",
                "SELECT id, name FROM item ORDER BY price DESC, id LIMIT 5",
                "WITH x AS (SELECT id FROM item WHERE id % 2 = 0) SELECT count(*) FROM x",
                "SELECT 1 / (id - id) FROM item",
                "SELECT nextval('ticket')",
                "SELECT 1; SELECT 2",
                "SELECT * FROM drawn",
                "SELECT * FROM touched",
                "SELECT id FROM item WHERE id <%> 1 AND id < 2",
                "SELECT relname FROM pg_class",
                "SELECT id FROM item WHERE id = 1 FOR UPDATE",
                "WITH x AS (INSERT INTO hit VALUES (now()) RETURNING at) SELECT count(*) FROM x",
                "SET search_path = public, pg_catalog",
                "SELECT pg_advisory_lock(4711); SELECT pg_advisory_unlock(4711)",
                "SELECT pg_advisory_lock(4711)",
                "SELECT pg_advisory_unlock_all()",
            ] {
                let _ = client.simple_query(text).await;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
            client.query(&by_key, &[&(round % 200)]).await.unwrap();
        }
        round
    });
    let report = mirrored(&testbed);
    let rounds = reads.await.expect("the client's work");
    let told = format!("{report:#}");
    assert_eq!(report["against"], serde_json::json!([]), "{told}");
    let report = &report["report"];
    let number = |name: &str| report[name].as_u64().unwrap_or_default();
    assert!(number("equal") > 20 && number("different") + number("failed") == 0, "{told}");
    for why in [
        "function nextval",
        "function random",
        "function touch",
        "operator <%>",
        "a catalog",
        "a row lock",
        "a write inside WITH",
        "not a SELECT",
        "several statements",
    ] {
        let left_out = report["left_out"].as_object().expect("reasons");
        assert!(left_out.keys().any(|reason| reason.contains(why)), "{why}: {told}");
    }
    // Each was run as often as the client sent it.
    assert_eq!(testbed.source.sql("shop", "SELECT last_value FROM ticket"), rounds.to_string());
    assert_eq!(testbed.source.sql("shop", "SELECT count(*) FROM hit"), rounds.to_string());
    let own = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'";
    until("the mirror's sessions to end", || (testbed.target.sql("shop", own) == "0").then_some(()));
    assert_eq!(testbed.source.sql("shop", own), "1", "the client's own session");

    // A row that only the target has otherwise.
    testbed.target.sql("shop", "BEGIN READ WRITE; UPDATE item SET name = 'wrong' WHERE id = 3; COMMIT");
    let own = Arc::clone(&client);
    let asks = tokio::spawn(async move {
        for _ in 0..22 {
            own.simple_query("SELECT name FROM item WHERE id = 3").await.unwrap();
            own.simple_query("SELECT id FROM item ORDER BY name, id").await.unwrap();
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    });
    let found = mirrored(&testbed);
    asks.await.expect("the client's work");
    let told = format!("{found:#}");
    assert!(found["against"][0].as_str().is_some_and(|why| why.contains("other answers")), "{told}");
    let differences = found["report"]["differences"].as_array().expect("a list");
    let shown = |kind: &str| differences.iter().find(|d| d["kind"] == kind).map(|d| d["statement"].clone());
    assert_eq!(shown("different"), Some("SELECT name FROM item WHERE id = ?".into()), "{told}");
    assert_eq!(shown("reordered"), Some("SELECT id FROM item ORDER BY name, id".into()), "{told}");
    testbed.target.sql("shop", "BEGIN READ WRITE; UPDATE item SET name = 'item 3' WHERE id = 3; COMMIT");

    // Clients move while reads are mirrored: nothing holds that up, and clients notice nothing.
    let mirror = testbed.tool(&["mirror", "--share", "100%", "--for", "1h", "--max-slower", "1000"]);
    for _ in 0..10 {
        client.simple_query("SELECT count(*) FROM item").await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let shown = tokio::task::block_in_place(|| testbed.ask(&["status"]));
    assert!(shown["mirror"]["equal"].as_u64() > Some(0), "{shown:#}");
    tokio::task::block_in_place(|| testbed.succeed(&["switch"]));
    let ended = tokio::task::block_in_place(|| mirror.end());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(tokio::task::block_in_place(|| holder.end()).code, Some(0));
    client.simple_query("SELECT count(*) FROM item").await.unwrap();
    assert_eq!(testbed.standing(), (Some("switched".into()), Some("target".into())));
}
