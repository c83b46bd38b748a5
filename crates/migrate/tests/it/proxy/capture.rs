//! Row images captured in the proxy bring a second server to the state of the first, and clients notice nothing.

use crate::proxy::support;
use crate::proxy::support::follower::{Followed, Follower};
use crate::proxy::support::{Proxy, server};
use stillpoint_migrate_control::{Reply, Request};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};
use tokio_postgres::NoTls;

/// Two servers with a database, and a proxy in front of the first.
fn two() -> (Cluster, Cluster, Proxy) {
    let (source, target) = (Cluster::start(&[]), Cluster::start(&[]));
    for cluster in [&source, &target] {
        cluster.sql("postgres", "CREATE DATABASE shop");
    }
    let proxy = Proxy::start("", &format!("{}[tenants.shop]\nserver = \"a\"\n", server("a", &source)));
    (source, target, proxy)
}

/// The last stamp that was taken, and the reason for the end of the capture.
fn captured(proxy: &Proxy) -> (u64, Option<String>) {
    match proxy.ask(Request::Captured { tenant: "shop".into() }) {
        Reply::Captured { stamp, over } => (stamp, over),
        other => panic!("{other:?}"),
    }
}

/// All rows of all tables, sorted.
fn rows(cluster: &Cluster) -> Vec<String> {
    let output = cluster.client("pg_dump").args(["-a", "--inserts", "-d", "shop"]).output().expect("run pg_dump");
    let text = String::from_utf8(output.stdout).expect("a dump");
    let mut lines: Vec<String> = text.lines().filter(|line| line.starts_with("INSERT")).map(str::to_owned).collect();
    lines.sort();
    lines
}

#[track_caller]
fn assert_alike(source: &Cluster, target: &Cluster) {
    let (a, b) = (rows(source), rows(target));
    let differs = a.iter().zip(&b).find(|(a, b)| a != b);
    assert!(a == b, "{} rows and {}, first {differs:?}", a.len(), b.len());
    assert!(!a.is_empty(), "something was written");
}

/// Ends a follower at the last commit.
fn finish(proxy: &Proxy, follower: Follower) -> Followed {
    let (stamp, over) = captured(proxy);
    assert_eq!(over, None);
    let followed = follower.finish(stamp);
    assert_eq!(followed.over, None);
    followed
}

#[test]
fn pgbench_in_every_mode_ends_alike_on_both_servers() {
    if !available() {
        return;
    }
    let (source, target, proxy) = two();
    source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    let follower = Follower::start(&proxy, "shop", &source, &target);
    let mut committed = 0;
    for mode in ["simple", "extended", "prepared"] {
        // With one connection for all of a client's transactions, and with one connection for each.
        for (each, more) in [("100", &[][..]), ("25", &["-C"])] {
            let arguments = [&["-n", "-c", "4", "-t", each, "-M", mode, "--random-seed", "7"], more].concat();
            let outcome = source.pgbench_load("shop", proxy.port, &arguments).finish();
            let wanted = 4 * each.parse::<u64>().unwrap();
            assert_eq!((outcome.failed, outcome.transactions), (0, wanted), "{arguments:?}: {}", outcome.text);
            committed += wanted as usize;
        }
    }
    let followed = finish(&proxy, follower);
    assert_eq!(followed.applied, committed, "every transaction once: {followed:?}");
    assert_alike(&source, &target);
}

/// Both sessions insert the row before either knows about the other: the first of two indexes is slow. The server
/// counts the row that is discarded as inserted and as deleted.
#[test]
fn sessions_that_insert_the_same_row_at_the_same_moment_do_not_end_the_capture() {
    if !available() {
        return;
    }
    let (source, target, proxy) = two();
    source.sql(
        "shop",
        "CREATE TABLE stock (name text NOT NULL, amount int); CREATE FUNCTION slow(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS \
         'BEGIN PERFORM pg_catalog.pg_sleep(0.2); RETURN $1; END'; \
         CREATE INDEX first ON stock (slow(name)); ALTER TABLE stock ADD PRIMARY KEY (name)",
    );
    let follower = Follower::start(&proxy, "shop", &source, &target);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let upsert =
                    "INSERT INTO stock VALUES ('a', 1) ON CONFLICT (name) DO UPDATE SET amount = stock.amount + 1";
                support::psql(&proxy.conninfo("shop"), "", upsert).expect("an upsert");
            });
        }
    });
    let inserted = "SELECT n_tup_ins > 1 FROM pg_stat_user_tables WHERE relname = 'stock'";
    until("a row to be given up", || (source.sql("shop", inserted) == "t").then_some(()));
    assert_eq!(finish(&proxy, follower).applied, 4);
    assert_eq!(target.sql("shop", "SELECT amount FROM stock"), "4");
}

const SCHEMA: &str = "CREATE TABLE parent (id int PRIMARY KEY, note text UNIQUE); \
    CREATE TABLE item (id numeric PRIMARY KEY, parent int REFERENCES parent, at timestamptz DEFAULT clock_timestamp(), \
      chance float8 DEFAULT random(), data jsonb, list text[], twice int GENERATED ALWAYS AS (amount * 2) STORED, \
      amount int NOT NULL DEFAULT 1); \
    CREATE TABLE counted (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text, CHECK (v <> 'bad')); \
    CREATE TABLE parted (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part); \
    CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1); CREATE TABLE parted_2 PARTITION OF parted DEFAULT; \
    CREATE TABLE late (id int PRIMARY KEY, other int UNIQUE DEFERRABLE INITIALLY DEFERRED); \
    INSERT INTO parent SELECT i, 'p' || i FROM generate_series(1, 5) i; INSERT INTO late VALUES (1, 1), (2, 2);";

#[test]
fn statements_prepared_before_and_binary_results_are_captured() {
    if !available() {
        return;
    }
    let (source, target, proxy) = two();
    source.sql("shop", SCHEMA);
    let runtime = support::runtime();
    let (client, connection) =
        runtime.block_on(tokio_postgres::connect(&proxy.conninfo("shop"), NoTls)).expect("connect");
    let connection = runtime.spawn(connection);
    // tokio-postgres asks for binary results, by one format for all columns.
    let insert = "INSERT INTO item (id, parent, amount) VALUES ($1::int, $2, 7) RETURNING amount, parent";
    let (insert, delete) = runtime.block_on(async {
        let insert = client.prepare(insert).await.expect("prepare");
        (insert, client.prepare("DELETE FROM item WHERE id = $1::int").await.expect("prepare"))
    });
    // The session must be able to reach its boundary while the follower waits for it.
    let follower = std::thread::scope(|scope| {
        let starting = scope.spawn(|| Follower::start(&proxy, "shop", &source, &target));
        while !starting.is_finished() {
            runtime.block_on(async { tokio::time::sleep(std::time::Duration::from_millis(5)).await });
        }
        starting.join().expect("a follower")
    });
    runtime.block_on(async {
        for i in 1..=50_i32 {
            let row = client.query_one(&insert, &[&i, &(i % 5 + 1)]).await.expect("insert");
            assert_eq!((row.len(), row.get::<_, i32>(0), row.get::<_, i32>(1)), (2, 7, i % 5 + 1));
        }
        for i in 1..=10_i32 {
            assert_eq!(client.execute(&delete, &[&i]).await.expect("delete"), 1);
        }
        // Pipelined; one of them fails.
        let (good, bad, after) = (
            client.execute(&delete, &[&11_i32]),
            client.query_one(&insert, &[&12_i32, &1_i32]),
            client.execute(&delete, &[&13_i32]),
        );
        let (good, bad, after) = tokio::join!(good, bad, after);
        assert_eq!((good.expect("delete"), after.expect("delete")), (1, 1));
        assert_eq!(bad.unwrap_err().code().map(|code| code.code().to_owned()).as_deref(), Some("23505"));
        let names = client.query("SELECT name FROM pg_prepared_statements WHERE name !~ '^stillpoint_'", &[]).await;
        assert_eq!(names.expect("names").len(), 3, "the client's statements are its own");
    });
    let followed = finish(&proxy, follower);
    assert_eq!(followed.applied, 62);
    assert_alike(&source, &target);
    // The capture is over; the session goes on as if there had been none, and the proxy's statements are gone.
    runtime.block_on(async {
        assert_eq!(client.execute(&delete, &[&14_i32]).await.expect("delete"), 1);
        let ours = "SELECT count(*) FROM pg_prepared_statements WHERE name ~ '^stillpoint_'";
        let count = async || client.query_one(ours, &[]).await.expect("a count").get::<_, i64>(0);
        while count().await > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
    drop(client);
    runtime.block_on(connection).expect("the connection ends").expect("in peace");
}

/// Statements each of which ends the capture with a reason that names it, and succeeds for the client.
const BEYOND: &[(&str, &str)] = &[
    ("UPDATE item SET id = id + 1", "key column id of table item is changed"),
    ("CREATE TABLE more (a int)", "CREATE TABLE is not captured"),
    ("TRUNCATE item", "TRUNCATE ITEM is not captured"),
    ("COPY parent FROM '/dev/null'", "COPY FROM cannot return the rows"),
    ("WITH x AS (DELETE FROM item RETURNING 1) SELECT count(*) FROM x", "WITH contains a statement that writes"),
    ("DO $$ BEGIN DELETE FROM item; END $$", "DO cannot return the rows"),
    ("SELECT sneak()", "function sneak may write"),
    ("SELECT lo_create(0)", "function lo_create may write"),
    ("INSERT INTO watched VALUES (1)", "table watched has trigger watch"),
    ("DELETE FROM owner", "foreign key owned_id_fkey that cascades"),
    ("UPDATE keyless SET a = 1", "table keyless has no key"),
    ("INSERT INTO look VALUES (7)", "look is not a table but a view"),
    ("INSERT INTO parted_1 VALUES (7, 1, 'x')", "parted_1 is not a table but a partition"),
    ("MERGE INTO parent p USING late l ON p.id = l.id WHEN MATCHED THEN DELETE", "MERGE"),
    ("INSERT INTO quiet SELECT 1", "audit: the server wrote 2 rows in a transaction of which 1 were captured"),
];

#[test]
fn what_is_not_captured_ends_the_capture_by_name_and_not_the_client() {
    if !available() {
        return;
    }
    let (source, _target, proxy) = two();
    source.sql("shop", SCHEMA);
    // `nested` hides a write that no text shows: in a default's function that is declared stable.
    source.sql(
        "shop",
        "CREATE TABLE watched (a int PRIMARY KEY); CREATE TABLE keyless (a int); CREATE VIEW look AS SELECT a FROM keyless; \
         CREATE TABLE owner (id int PRIMARY KEY); CREATE TABLE owned (id int PRIMARY KEY REFERENCES owner ON DELETE CASCADE); \
         CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; \
         CREATE TRIGGER watch BEFORE INSERT ON watched FOR EACH ROW EXECUTE FUNCTION watch(); \
         CREATE FUNCTION sneak() RETURNS int LANGUAGE sql AS 'INSERT INTO keyless VALUES (1); SELECT 1'; \
         CREATE FUNCTION nested() RETURNS int STABLE LANGUAGE plpgsql AS 'BEGIN RETURN sneak(); END'; \
         CREATE TABLE quiet (a int PRIMARY KEY, b int DEFAULT nested());",
    );
    // The parser builds no tree that is too deep; one of 60,000 terms overflowed the stack of a thread with all its
    // sessions.
    let deep = format!("SELECT count(*) FROM keyless WHERE a = 1{}", " OR a=1".repeat(17_000));
    ends_the_capture(&proxy, false, &deep, "SELECT: the statement is too deep");
    for (text, why) in BEYOND {
        ends_the_capture(&proxy, false, text, why);
    }
}

/// Captures, lets a client send a text, which must succeed, and checks the end of the capture.
#[track_caller]
fn ends_the_capture(proxy: &Proxy, statements: bool, text: &str, why: &str) {
    let told = support::runtime().block_on(async {
        let mut control = proxy.control().await;
        let request = Request::Capture { tenant: "shop".into(), limit_ms: 30_000, statements };
        let begun = control.ask(&request).await;
        assert!(matches!(begun, Ok(Reply::Capturing { .. })), "{text}: {begun:?}");
        let (conninfo, text) = (proxy.conninfo("shop"), text.to_owned());
        let said = tokio::task::spawn_blocking(move || support::psql(&conninfo, "", &text)).await.expect("psql");
        assert!(said.is_ok(), "{said:?}");
        loop {
            match control.next().await.expect("a line") {
                Reply::CaptureOver { why } => break why,
                Reply::Error { message } => panic!("{message}"),
                _ => {}
            }
        }
    });
    assert!(told.contains(why), "{text}: {told:?}, not {why:?}");
}

/// Statements each of which succeeds for the client, and cannot be repeated by its text.
const BEYOND_REPEATING: &[(&str, &str)] = &[
    ("UPDATE late SET other = 7 WHERE id = 1", "a transaction that writes is not at REPEATABLE READ"),
    ("BEGIN ISOLATION LEVEL REPEATABLE READ; SAVEPOINT a; COMMIT", "a savepoint"),
    (
        "BEGIN ISOLATION LEVEL REPEATABLE READ; INSERT INTO item (id, parent, amount) VALUES (1, 1, 1); COMMIT",
        "the default of column at",
    ),
    (
        "BEGIN ISOLATION LEVEL REPEATABLE READ; UPDATE late SET other = (random() * 1000)::int WHERE id = 2; COMMIT",
        "function random",
    ),
    ("SET work_mem = '7MB'", "SET changes the effect of later statements"),
    ("TRUNCATE item", "TRUNCATE ITEM is not captured"),
];

#[test]
fn what_cannot_be_repeated_ends_a_capture_of_statements_by_name_and_not_the_client() {
    if !available() {
        return;
    }
    let (source, _target, proxy) = two();
    source.sql("shop", SCHEMA);
    for (text, why) in BEYOND_REPEATING {
        ends_the_capture(&proxy, true, text, why);
    }
}

#[test]
fn statements_come_with_what_their_transactions_saw_in_one_order_with_commits() {
    if !available() {
        return;
    }
    let (source, _target, proxy) = two();
    source.sql("shop", SCHEMA);
    support::runtime().block_on(async {
        let mut control = proxy.control().await;
        let request = Request::Capture { tenant: "shop".into(), limit_ms: 30_000, statements: true };
        assert!(matches!(control.ask(&request).await, Ok(Reply::Capturing { .. })));
        let (client, connection) = tokio_postgres::connect(&proxy.conninfo("shop"), NoTls).await.expect("connect");
        tokio::spawn(connection);
        let write = "UPDATE parent SET note = 'new' WHERE id = 1";
        for text in [
            "BEGIN ISOLATION LEVEL REPEATABLE READ",
            "SELECT count(*) FROM item",
            write,
            "COMMIT",
            "SELECT 1",
            "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 2",
            "ROLLBACK",
        ] {
            client.batch_execute(text).await.unwrap_or_else(|error| panic!("{text}: {error:?}"));
        }
        let mut lines = Vec::new();
        while lines.last() != Some(&"ended 2".to_owned()) {
            lines.push(match control.next().await.expect("a line") {
                Reply::Table(shape) => shape.name,
                Reply::Begins { running } => format!("begins {running}"),
                Reply::Began { running, snapshot } => {
                    assert_eq!(snapshot.split(':').count(), 3, "{snapshot}");
                    format!("began {running}")
                }
                Reply::Ended { running } => format!("ended {running}"),
                Reply::Syncset(set) => {
                    let statements = set.statements.expect("statements were asked for");
                    let texts: Vec<String> =
                        statements.operations.iter().map(|one| format!("{}{}", one.writes, one.text)).collect();
                    format!("{:?} {} rows: {}", statements.running, set.rows.len(), texts.join("; "))
                }
                other => panic!("{other:?}"),
            });
        }
        let written = format!("Some(1) 1 rows: falseSELECT count(*) FROM item; true{write}");
        let wanted =
            ["begins 1", "began 1", "parent", &written, "None 0 rows: falseSELECT 1", "begins 2", "began 2", "ended 2"];
        assert_eq!(lines, wanted);
    });
}
