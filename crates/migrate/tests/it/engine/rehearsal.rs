//! Rehearsals on real servers: the check finds what a run would meet late, and leaves nothing behind.

use crate::engine::support::{Bench, observer, proxy_for};
use std::path::PathBuf;
use std::sync::Arc;
use stillpoint_migrate_engine::{Error, Finding, Options, Outcome, Report, Server, Verdict, check, run};
use stillpoint_testing::{
    postgresql::{Cluster, NEWER_MAJOR, available, newer_available},
    wait::until,
};

/// Statements that fill a database, each with the beginning of its only refusal.
const REFUSED: &[(&str, &str)] = &[
    (
        "CREATE TABLE limits AS SELECT 10 AS n; CREATE FUNCTION below(int) RETURNS boolean LANGUAGE sql AS \
         'SELECT $1 < (SELECT max(n) FROM limits)'; CREATE TABLE checked (id int PRIMARY KEY, n int CHECK (below(n))); \
         INSERT INTO checked VALUES (1, 1)",
        "rows public.checked",
    ),
    (
        "CREATE FUNCTION twice(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 2 * $1'; \
         CREATE FUNCTION fourfold(a int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN twice(twice(a)); END'; \
         CREATE TABLE made (id int PRIMARY KEY, f int GENERATED ALWAYS AS (fourfold(id)) STORED); INSERT INTO made VALUES (1)",
        "rows public.made",
    ),
    (
        "CREATE FUNCTION twice(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 2 * $1'; \
         CREATE FUNCTION fourfold(a int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN twice(twice(a)); END'; \
         CREATE TABLE found (id int PRIMARY KEY); INSERT INTO found VALUES (1); CREATE INDEX by_f ON found (fourfold(id))",
        "definition INDEX by_f",
    ),
    (
        "CREATE FUNCTION twice(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 2 * $1'; \
         CREATE FUNCTION short(text) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN length($1) < twice(9); END'; \
         CREATE DOMAIN word AS text CHECK (short(VALUE)); CREATE TABLE words (w word); INSERT INTO words VALUES ('a')",
        "rows public.words",
    ),
];

/// More of them, for a target of a newer version.
const REFUSED_THERE: &[(&str, &str)] = &[
    ("CREATE VIEW written AS SELECT buffers_backend FROM pg_stat_bgwriter", "definition VIEW written"),
    (
        "CREATE VIEW a AS SELECT 1 AS a; CREATE FUNCTION made() RETURNS bigint LANGUAGE sql BEGIN ATOMIC SELECT \
         checkpoints_timed FROM pg_stat_bgwriter; END",
        "definition FUNCTION made(",
    ),
];

async fn report(source: &Cluster, target: &Cluster, database: &str) -> Report {
    check(&options(source, target, database)).await.expect("a report")
}

fn options(source: &Cluster, target: &Cluster, database: &str) -> Options {
    let source = Server::parse("source", &source.conninfo(database), None).expect("a connection string");
    let target = Server::parse("target", &target.conninfo(database), None).expect("a connection string");
    let nowhere = PathBuf::from("/nonexistent");
    Options { rehearse: true, ..Options::new(source, target, nowhere.clone(), nowhere) }
}

/// Findings with a verdict, except about poolers: those before a proxy are never looked at.
fn of(report: &Report, verdict: Verdict) -> Vec<&Finding> {
    report.findings.iter().filter(|finding| finding.verdict == verdict && finding.kind != "pooler").collect()
}

/// Databases of a cluster, except those that every cluster has.
fn databases(cluster: &Cluster) -> String {
    cluster.sql("postgres", "SELECT coalesce(string_agg(datname, ' '), '') FROM pg_database WHERE oid >= 16384")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_target_does_not_take_is_refused_by_name_and_nothing_is_left() {
    if !available() {
        return;
    }
    let newer = newer_available();
    let source = Cluster::start(&["wal_level=logical"]);
    let target = if newer {
        Cluster::of_major(NEWER_MAJOR, &["wal_level=logical"])
    } else {
        Cluster::start(&["wal_level=logical"])
    };
    let cases: Vec<_> = REFUSED.iter().chain(if newer { REFUSED_THERE } else { &[] }).collect();
    for (number, (sql, name)) in cases.into_iter().enumerate() {
        let database = format!("d{number}");
        source.sql("postgres", &format!("CREATE DATABASE {database}"));
        source.sql(&database, sql);
        let refusals = report(&source, &target, &database).await.refusals();
        assert!(refusals.len() == 1 && refusals[0].starts_with(name), "{sql}: {refusals:?}");
        // The report names what it did not rehearse.
        let unrehearsed = Options { rehearse: false, ..options(&source, &target, &database) };
        let unrehearsed = check(&unrehearsed).await.expect("a report");
        assert_eq!(unrehearsed.refusals(), Vec::<String>::new());
        assert_eq!(of(&unrehearsed, Verdict::NotLookedAt).len(), 1, "{:?}", unrehearsed.findings);
    }
    assert_eq!(databases(&target), "");
    let sessions =
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    until("sessions to end", || (target.sql("postgres", sessions) == "0").then_some(()));
}

/// A database that keeps bytes of any encoding.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_text_arrive_as_they_are() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'");
    bench.source.sql(
        "shop",
        "CREATE TABLE odd (id int PRIMARY KEY, note text, many text[]); \
         INSERT INTO odd SELECT g, E'a\\xff' || g, ARRAY[E'\\xfe', E'\\xc3'] FROM generate_series(1, 9) g",
    );
    let changes = "UPDATE odd SET note = E'\\xfd' || note WHERE id < 4; INSERT INTO odd VALUES (10, E'\\xe9', '{}'); \
                   DELETE FROM odd WHERE id = 9";
    bench.fake_proxy.lock().unwrap().at_pause = vec![changes];
    let options = bench.options("shop");
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let bytes = "SELECT md5(string_agg(encode(convert_to(id || note || many::text, 'SQL_ASCII'), 'hex'), ' ' ORDER BY id)), \
                 count(*), count(*) FILTER (WHERE note LIKE E'\\xfd%') FROM odd";
    bench.look_into_source("shop");
    let there = bench.target.sql("shop", bytes);
    assert_eq!(there, bench.source.sql("shop", bytes));
    assert!(there.ends_with("|9|3"), "{there}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_are_no_text_are_refused() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'");
    let odd = "DO $$ BEGIN EXECUTE 'CREATE TABLE t (id int PRIMARY KEY, \"' || E'\\xff' || '\" int)'; END $$";
    bench.source.sql("shop", odd);
    let refusals = check(&bench.options("shop")).await.expect("a report").refusals().join("\n");
    assert!(refusals.contains("is not valid UTF-8"), "{refusals}");
}

/// A function that no row was given to is named; nothing is refused for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_row_can_show_is_said_not_to_be_looked_at() {
    if !available() {
        return;
    }
    let (source, target) = (Cluster::start(&["wal_level=logical"]), Cluster::start(&["wal_level=logical"]));
    source.sql("postgres", "CREATE DATABASE shop; ");
    source.sql("postgres", "ALTER DATABASE shop SET work_mem = '5MB'");
    source.sql("postgres", "COMMENT ON DATABASE shop IS 'it''s; a \"shop\"'");
    source.sql(
        "shop",
        "CREATE FUNCTION below(int) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN $1 < 7; END'; \
         CREATE TABLE empty (id int PRIMARY KEY, n int CHECK (below(n))); CREATE TABLE parent (id int PRIMARY KEY); \
         CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent CHECK (below(p))); \
         INSERT INTO parent SELECT generate_series(1, 5000); INSERT INTO child SELECT i, 6 FROM generate_series(1, 999) i; \
         DELETE FROM parent WHERE id < 4 AND id <> 6",
    );
    let report = report(&source, &target, "shop").await;
    assert_eq!(report.refusals(), Vec::<String>::new());
    let unseen = of(&report, Verdict::NotLookedAt);
    assert!(unseen.len() == 1 && unseen[0].name == "public.empty", "{unseen:?}");
    assert!(unseen[0].note.contains("public.below(integer)"), "{unseen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rehearsal_that_is_cut_off_leaves_nothing_for_long() {
    if !available() {
        return;
    }
    let (source, target) = (Cluster::start(&["wal_level=logical"]), Cluster::start(&["wal_level=logical"]));
    source.sql("postgres", "CREATE DATABASE shop");
    let function = |seconds: u32| {
        format!(
            "CREATE OR REPLACE FUNCTION slow(a int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS \
             'BEGIN PERFORM pg_catalog.pg_sleep({seconds}); RETURN a; END'"
        )
    };
    let table = "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE INDEX ON t (slow(id))";
    source.sql("shop", &format!("{}; {table}; {}", function(0), function(600)));
    let options = options(&source, &target, "shop");
    let interrupt = Arc::clone(&options.interrupt);
    let (checked, scratch) = tokio::join!(
        check(&options),
        tokio::task::spawn_blocking(move || {
            let scratch = until("the index to be made", || {
                let at_it = "SELECT datname FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%'";
                Some(target.sql("postgres", at_it)).filter(|name| !name.is_empty())
            });
            // Another rehearsal at the same time does not touch it.
            interrupt.notify_one();
            (target, scratch)
        })
    );
    let (target, scratch) = scratch.expect("a thread that looks");
    assert!(matches!(checked, Err(Error::Interrupted)), "{checked:?}");
    assert!(scratch.starts_with("stillpoint_rehearsal_"), "{scratch}");
    assert_eq!(databases(&target), "");
    // A killed command leaves it so.
    target.sql("postgres", &format!("CREATE DATABASE {scratch}"));
    target.sql("postgres", &format!("ALTER DATABASE {scratch} IS_TEMPLATE true"));
    source.sql("shop", &function(0));
    assert_eq!(report(&source, &target, "shop").await.refusals(), Vec::<String>::new());
    assert_eq!(databases(&target), "");
}

/// ANALYZE of a partitioned table would ask a third server, which lets none of the test's roles in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_partition_that_cannot_be_reached_keeps_no_database_from_moving() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql(
        "shop",
        "CREATE EXTENSION postgres_fdw; CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS (port '1'); \
         CREATE TABLE parts (a int) PARTITION BY RANGE (a); CREATE TABLE near PARTITION OF parts FOR VALUES FROM (0) TO (10); \
         CREATE FOREIGN TABLE away PARTITION OF parts FOR VALUES FROM (10) TO (20) SERVER far; INSERT INTO parts VALUES (1)",
    );
    let options = Options { rehearse: true, share: 0.0, ..bench.options("shop") };
    assert_eq!(check(&options).await.expect("a report").refusals(), Vec::<String>::new());
    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.target.sql("shop", "SELECT a FROM near"), "1");
    let known = "SELECT reltuples FROM pg_class WHERE relname = 'near'";
    assert_eq!(bench.target.sql("shop", known), "1", "statistics of what can be reached are there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_that_no_client_has_used_is_known_to_the_proxy() {
    if !available() {
        return;
    }
    for (tenant, known) in [("*", true), ("other", false)] {
        let bench = Bench::start();
        bench.source.sql("postgres", "CREATE DATABASE shop");
        bench.source.sql("shop", "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)");
        let (_port, control) = proxy_for(bench.dir.path(), &bench.source, tenant);
        let options = Options { proxy: control, share: 0.0, ..bench.options("shop") };
        let refusals = check(&options).await.expect("a report").refusals();
        let moved = run(&options, observer().0).await;
        if known {
            assert_eq!(refusals, Vec::<String>::new());
            assert!(matches!(moved, Ok(Outcome::Switched { .. })), "{moved:?}");
            assert_eq!(bench.target.sql("shop", "SELECT id FROM t"), "1");
        } else {
            assert!(refusals.len() == 1 && refusals[0].starts_with("tenant shop: "), "{refusals:?}");
            assert!(moved.is_err(), "{moved:?}");
            bench.assert_clean("shop");
        }
    }
}
