//! Migrations there and back at each isolation level under load with hot rows and unique keys that are used again: both
//! sides are compared row by row on each way, and every client's history is in order. Long form: 102 migrations.

use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_testbed::{Load, available};
use stillpoint_migrate_trials::{Fault, LEVELS, Moment, Random, Stage, Trial, is_soak, rounds};

const TABLES: &str = "
    CREATE TABLE hot (id int PRIMARY KEY, n bigint NOT NULL);
    INSERT INTO hot SELECT i, 0 FROM generate_series(1, 3) i;
    CREATE TABLE seats (holder int PRIMARY KEY, seat int UNIQUE, note text);
    CREATE TABLE owners (id int PRIMARY KEY, mail text UNIQUE NULLS NOT DISTINCT);
    CREATE TABLE things (id serial PRIMARY KEY, owner int REFERENCES owners ON DELETE CASCADE ON UPDATE CASCADE, n numeric UNIQUE);
";

/// Each gives a key away that another takes in the same moment.
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

fn churn(stage: &Stage, level: &str) -> Load {
    let dir = stage.source.socket_dir();
    let mut arguments: Vec<String> =
        ["-n", "-c", "6", "-R", "150", "-T", "600", "--max-tries", "1000"].map(str::to_owned).into();
    for (number, script) in SCRIPTS.iter().enumerate() {
        let path = dir.join(format!("churn{number}.sql"));
        // A level that is asked for in the script goes wherever the session goes.
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
    stage.source.pgbench_load("shop", stage.port(), &arguments)
}

#[test]
fn both_sides_are_equal_at_every_level() {
    if !available() {
        return;
    }
    let mut stage = Stage::start();
    Trial::prepare(&stage);
    stage.source.sql("shop", TABLES);
    let (rounds, mut random) = (rounds(2, 102), Random::new(if is_soak() { Random::seed() } else { 1 }));
    for round in 0..rounds {
        println!("migration {round} of {rounds}");
        // There and back at one level.
        let number = round / 2 % 3;
        let level = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"][number];
        let mut load = churn(&stage, level);
        let moment = Moment { phase: None, after: Duration::ZERO };
        let trial = Trial {
            back: round % 2 == 1,
            fault: Fault::None,
            moment,
            isolation: LEVELS[number],
            seed: random.number(),
        };
        let ended = trial.run(&mut stage);
        let compared = |event: &Event| matches!(event.kind, EventKind::Compared { tables, .. } if tables >= 8);
        assert!(ended.events.iter().any(compared), "both sides were compared: {:?}", ended.events);
        assert!(load.running(), "clients went on to the end: {}", load.finish().text);
        load.end();
    }
    println!("COUNT migrations {rounds}");
}
