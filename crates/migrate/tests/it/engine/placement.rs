//! A target with other tablespaces, another locale and another encoding than the source.

use crate::engine::support::{Bench, observer};
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_engine::{Options, Outcome, Placement, SwitchOrder, check, fallback, order_switch, run, status};
use stillpoint_testing::postgresql::available;

const SETUP: &str = "CREATE TABLE goods (id int PRIMARY KEY USING INDEX TABLESPACE slow, name text) TABLESPACE fast; \
    CREATE INDEX by_name ON goods (name) TABLESPACE fast; \
    CREATE TABLE parts (id int NOT NULL) PARTITION BY RANGE (id) TABLESPACE slow; \
    CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (100); \
    CREATE MATERIALIZED VIEW names TABLESPACE slow AS SELECT name FROM goods; \
    INSERT INTO goods SELECT g, E'Gr\\u00f6\\u00dfe ' || g FROM generate_series(1, 100) g; INSERT INTO parts SELECT generate_series(1, 50)";

/// Tablespace of each relation that is not in the database's own.
const SPACES: &str = "SELECT string_agg(c.relname || ' ' || t.spcname, ', ' ORDER BY c.relname COLLATE \"C\") FROM pg_class c \
    JOIN pg_tablespace t ON t.oid = c.reltablespace WHERE c.relkind <> 't' AND t.spcname <> 'pg_global' \
    AND c.relnamespace = 'public'::regnamespace";

const DATABASE: &str = "SELECT concat_ws(' ', t.spcname, pg_encoding_to_char(d.encoding), d.datcollate, d.datctype) \
    FROM pg_database d JOIN pg_tablespace t ON t.oid = d.dattablespace WHERE d.datname = 'shop'";

fn placed(spaces: &[&str], none: bool, locale: Option<&str>, encoding: Option<&str>) -> Placement {
    let spaces: Vec<String> = spaces.iter().map(|space| (*space).to_owned()).collect();
    Placement::parse(&spaces, none, locale.map(str::to_owned), encoding.map(str::to_owned)).unwrap()
}

/// Moves while definitions and rows change, and back. Returns the place of the target's relations and database.
async fn there_and_back(bench: &Arc<Bench>, options: &Options) -> [String; 2] {
    let holder = std::thread::spawn({
        let options = options.clone();
        move || tokio::runtime::Runtime::new().unwrap().block_on(run(&options, observer().0)).map_err(Box::new)
    });
    let begun = std::time::Instant::now();
    while status(options).await.unwrap().holding.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60) && !holder.is_finished(), "{:?}", holder.join());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for sql in [
        "UPDATE goods SET name = E'Ma\\u00df ' || id WHERE id < 10",
        "CREATE TABLE later (v text) TABLESPACE slow",
        "INSERT INTO later VALUES (E'\\u00e4'), (E'\\u00df')",
        "ALTER TABLE parts_1 SET TABLESPACE fast",
        "CREATE INDEX of_later ON later (v) TABLESPACE fast",
    ] {
        bench.source.sql("shop", sql);
    }
    order_switch(options, &SwitchOrder::default()).await.unwrap();
    let ended = tokio::task::spawn_blocking(|| holder.join().unwrap()).await.unwrap();
    assert!(matches!(ended, Ok(Outcome::Switched { .. })), "{ended:?}");
    bench.look_into_source("shop");
    let sums = "SELECT string_agg(md5(convert_to(v, 'UTF8')), ',' ORDER BY md5(convert_to(v, 'UTF8'))) FROM (SELECT v FROM later UNION ALL \
                SELECT name FROM goods) x";
    assert_eq!(bench.target.sql("shop", sums), bench.source.sql("shop", sums));
    let place = [bench.target.sql("shop", SPACES), bench.target.sql("postgres", DATABASE)];
    bench.target.sql("shop", "INSERT INTO later VALUES (E'zur\\u00fcck')");
    let outcome = fallback(options, observer().0).await.unwrap();
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM later WHERE v = E'zur\\u00fcck'"), "1");
    place
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tablespaces_have_other_names_on_the_target() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::start_with(&["allow_in_place_tablespaces=on"]));
    for space in ["fast", "slow", "whole"] {
        bench.source.sql("postgres", &format!("CREATE TABLESPACE {space} LOCATION ''"));
    }
    for space in ["\"quick; one\"", "slow"] {
        bench.target.sql("postgres", &format!("CREATE TABLESPACE {space} LOCATION ''"));
    }
    bench.source.sql("postgres", "CREATE DATABASE shop TABLESPACE whole");
    bench.source.sql("shop", SETUP);
    let plain = Options { share: 0.0, hold: true, ..bench.options("shop") };
    let refused = |report: stillpoint_migrate_engine::Report| {
        let names = report.findings.into_iter().filter(|finding| finding.kind == "tablespace");
        let mut names: Vec<String> = names.map(|finding| format!("{}: {}", finding.name, finding.note)).collect();
        names.sort();
        names
    };
    let told = refused(check(&plain).await.unwrap());
    assert!(told.len() == 2 && told[0].starts_with("fast: ") && told[1].starts_with("whole: "), "{told:?}");
    let wrong = Options {
        placement: placed(&["fast=nowhere", "whole=pg_default", "typo=slow"], false, None, None),
        ..plain.clone()
    };
    let told = refused(check(&wrong).await.unwrap());
    assert!(told.len() == 2 && told[0].contains("nowhere") && told[1].starts_with("typo: "), "{told:?}");

    let moved = placed(&["fast=quick; one", "whole=slow"], false, None, None);
    let options = Options { placement: moved, ..plain.clone() };
    let [spaces, database] = there_and_back(&bench, &options).await;
    assert_eq!(
        spaces,
        // The others are in the database's own, which is slow.
        "by_name quick; one, goods quick; one, of_later quick; one, parts_1 quick; one"
    );
    assert!(database.starts_with("slow "), "{database}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_gets_another_encoding_and_locale_and_no_tablespaces() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::start_with(&["allow_in_place_tablespaces=on"]));
    for space in ["fast", "slow"] {
        bench.source.sql("postgres", &format!("CREATE TABLESPACE {space} LOCATION ''"));
    }
    bench.source.sql("postgres", "CREATE DATABASE shop TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'");
    bench.source.sql("shop", SETUP);
    let placement = placed(&[], true, Some("C.UTF-8"), Some("UTF8"));
    let options = Options { share: 0.0, hold: true, placement, ..bench.options("shop") };
    let place = there_and_back(&bench, &options).await;
    assert_eq!(place, ["", "pg_default UTF8 C.UTF-8 C.UTF-8"]);
}
