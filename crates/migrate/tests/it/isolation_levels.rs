//! Migrations there and back at each isolation level, under load with hot rows and unique keys that are used again.
//! Both sides are compared row by row on each way, and every client's history is in order. They are repeated with a
//! last transaction that holds the switch-over up, and sees the same rows after it as before. Long form: 102 migrations
//! each.

use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_tests::{Fault, LEVELS, Moment, Random, Testbed, Trial, is_soak, random, rounds};
use stillpoint_testing::postgresql::{Load, available};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

const TABLES: &str = "
    CREATE TABLE hot (id int PRIMARY KEY, n bigint NOT NULL);
    INSERT INTO hot SELECT i, 0 FROM generate_series(1, 3) i;
    CREATE TABLE seats (holder int PRIMARY KEY, seat int UNIQUE, note text);
    CREATE TABLE owners (id int PRIMARY KEY, mail text UNIQUE NULLS NOT DISTINCT);
    CREATE TABLE things (id serial PRIMARY KEY, owner int REFERENCES owners ON DELETE CASCADE ON UPDATE CASCADE, n numeric UNIQUE);
";

/// Each script frees a key that another takes in the same moment.
const SCRIPTS: [&str; 4] = [
    r"
\set h random(1, 3)
\set d random(-5, 5)
UPDATE hot SET n = n + :d WHERE id = :h;
",
    r"
\set holder random(1, 8)
\set seat random(1, 10)
BEGIN;
DELETE FROM seats WHERE seat = :seat;
INSERT INTO seats VALUES (:holder, :seat, 'taken') ON CONFLICT DO NOTHING;
UPDATE seats SET seat = NULL, note = note || 'x' WHERE holder = :holder % 8 + 1 AND length(note) < 50;
COMMIT;
",
    r"
\set a random(1, 6)
\set b random(1, 6)
BEGIN;
INSERT INTO owners VALUES (:a, 'mail' || :b) ON CONFLICT DO NOTHING;
INSERT INTO things (owner, n) SELECT id, :b + random()::numeric FROM (SELECT id FROM owners WHERE id = :a FOR KEY SHARE) o;
UPDATE owners SET mail = 'was' || id WHERE mail = 'mail' || :b AND id <> :a;
COMMIT;
",
    r"
\set a random(1, 6)
DELETE FROM owners WHERE id = :a;
",
];

/// PostgreSQL's names of [`LEVELS`].
const NAMES: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

/// Writes of the last transaction; nothing is written after it.
const LAST: &str = "
    UPDATE hot SET n = n + id;
    DELETE FROM seats WHERE seat % 2 = 0;
    UPDATE seats SET seat = NULL;
    INSERT INTO seats SELECT i, 11 - i, 'last' FROM generate_series(1, 8) i ON CONFLICT DO NOTHING;
    DELETE FROM owners WHERE id = 1 OR id > 6;
    UPDATE owners SET id = id + 10, mail = NULL WHERE id = 2;
    INSERT INTO owners VALUES (2, 'last') ON CONFLICT DO NOTHING;
    INSERT INTO things (owner, n) SELECT id, -id FROM owners;
    DELETE FROM things WHERE n < 0;
    INSERT INTO things (owner, n) SELECT id, id + random() FROM owners;
";

fn churn(testbed: &Testbed, level: &str) -> Load {
    let dir = testbed.source.socket_dir();
    let mut arguments: Vec<String> =
        ["-n", "-c", "6", "-R", "150", "-T", "600", "--max-tries", "1000"].map(str::to_owned).into();
    for (number, script) in SCRIPTS.iter().enumerate() {
        let path = dir.join(format!("churn{number}.sql"));
        // A level that is set in the script stays with the session on any server.
        let begin = format!("BEGIN ISOLATION LEVEL {level};");
        let script = if script.contains("BEGIN;") {
            script.replace("BEGIN;", &begin)
        } else {
            let (sets, statement) = script.trim().rsplit_once('\n').expect("a script has two lines");
            format!("{sets}\n{begin}\n{statement}\nCOMMIT;\n")
        };
        std::fs::write(&path, script).expect("write a script");
        arguments.extend(["-f".to_owned(), path.display().to_string()]);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    testbed.source.pgbench_load("shop", testbed.port(), &arguments)
}

#[test]
fn both_sides_are_equal_at_every_level() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    testbed.source.sql("shop", TABLES);
    let (rounds, mut random) = (rounds(2, 102), Random::new(if is_soak() { random::seed() } else { 1 }));
    for round in 0..rounds {
        println!("migration {round} of {rounds}");
        // A way there and the way back have the same level.
        let number = round / 2 % 3;
        let mut load = churn(&testbed, NAMES[number]);
        let moment = Moment { phase: None, after: Duration::ZERO };
        let trial = Trial {
            back: round % 2 == 1,
            fault: Fault::None,
            moment,
            isolation: LEVELS[number],
            seed: random.number(),
        };
        let ended = trial.run(&mut testbed);
        let compared = |event: &Event| matches!(event.kind, EventKind::Migrate(migrate::Event::Compared { tables, .. }) if tables >= 8);
        assert!(ended.events.iter().any(compared), "both sides were compared: {:?}", ended.events);
        assert!(load.running(), "clients went on to the end: {}", load.finish().text);
        load.end();
    }
    println!("COUNT migrations {rounds}");
}

/// Number of rows and a checksum of them, for each table.
async fn rows(client: &Client) -> Vec<String> {
    let each = "SELECT string_agg(format('SELECT %L || '': '' || count(*) || '', '' || coalesce(sum(hashtextextended(x::text, 0)), 0) \
                FROM ONLY %s x', oid::regclass, oid::regclass), ' UNION ALL ' ORDER BY oid::regclass::text) FROM pg_class \
                WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace";
    let each: String = client.query_one(each, &[]).await.expect("ask for tables").get(0);
    let told = client.simple_query(&each).await.expect("ask for rows");
    let row = |message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    };
    told.into_iter().filter_map(row).collect()
}

#[test]
fn a_session_sees_the_same_rows_behind_the_switch_at_every_level() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    testbed.source.sql("shop", TABLES);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let last = runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(&testbed.conninfo(), NoTls).await.expect("connect");
        tokio::spawn(connection);
        client
    });
    let say =
        |text: &str| runtime.block_on(last.batch_execute(text)).unwrap_or_else(|error| panic!("{text}: {error:?}"));
    let rounds = rounds(2, 102);
    for round in 0..rounds {
        let level = NAMES[round / 2 % 3];
        println!("migration {round} of {rounds}, {level}");
        let load = churn(&testbed, level);
        // It takes no snapshot yet, and no client is moved while it is open.
        say(&format!("BEGIN ISOLATION LEVEL {level}"));
        let words = [&["run", "--share", "0", "--snapshot-timeout", "20s"][..], &["fallback"]][round % 2];
        let mut tool = testbed.tool(&[words, &["--pause-timeout", "3s"]].concat());
        let prepares =
            |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "prepare");
        let reached = tool.await_event(prepares);
        let outcome = load.stop();
        assert!(outcome.success && outcome.failed == 0 && outcome.transactions > 0, "{}", outcome.text);
        assert!(reached, "the target follows: {:?}", tool.end());
        say(LAST);
        let before = runtime.block_on(rows(&last));
        say("COMMIT");
        let ended = tool.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let after = runtime.block_on(rows(&last));
        assert!(before.len() == 4 && before == after, "{before:#?} {after:#?}");
        let serves = if round % 2 == 0 { &testbed.target } else { &testbed.source };
        let port = runtime.block_on(last.query_one("SELECT inet_server_port()", &[])).expect("ask for the port");
        assert_eq!(port.get::<_, i32>(0), i32::from(serves.port()), "it has gone over");
    }
    if rounds.is_multiple_of(2) {
        testbed.assert_clean();
    }
    println!("COUNT migrations compared behind the switch {rounds}");
}
