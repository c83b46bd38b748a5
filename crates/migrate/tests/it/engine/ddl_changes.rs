//! Definitions made on the target since the switch: the way back does not drop them without a warning.

use crate::engine::support::{Bench, observer};
use stillpoint_migrate_engine::{
    AcceptedRestrictions, Error, Options, State, definitions_since_switch, fallback, run, status,
};
use stillpoint_testing::postgresql::available;

/// Statements of a server, or of an ordinary client, that define nothing.
const HOUSEKEEPING: [&str; 6] = [
    "VACUUM FULL",
    "ANALYZE",
    "REINDEX TABLE pgbench_accounts",
    "TRUNCATE pgbench_history",
    "CREATE TEMP TABLE passing (a int)",
    "SELECT nextval('tickets')",
];

/// Definitions, each with the name that must be reported.
const DEFINED: [(&str, &str); 11] = [
    ("CREATE INDEX CONCURRENTLY rich ON pgbench_accounts (abalance)", "new index public.rich"),
    ("CREATE VIEW poor AS SELECT * FROM pgbench_accounts WHERE abalance < 0", "new view public.poor"),
    ("CREATE TABLE notes (n int); INSERT INTO notes VALUES (1)", "new table public.notes"),
    ("GRANT SELECT ON pgbench_tellers TO guest", "changed table public.pgbench_tellers"),
    ("ALTER TABLE pgbench_branches ADD CHECK (bid > 0)", "changed table public.pgbench_branches"),
    ("GRANT CREATE ON SCHEMA public TO guest", "changed schema public"),
    ("CREATE SCHEMA more", "new schema more"),
    ("CREATE FUNCTION two() RETURNS int LANGUAGE sql AS 'SELECT 2'", "new function public.two()"),
    ("CREATE TYPE mood AS ENUM ('ok')", "new type public.mood"),
    ("ALTER DATABASE shop SET work_mem = '5MB'", "changed database shop"),
    ("DROP SEQUENCE tickets", "dropped sequence public.tickets"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_made_since_the_switch_are_named_and_kept() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    for cluster in [&bench.source, &bench.target] {
        cluster.sql("postgres", "CREATE ROLE guest");
    }
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    bench.source.sql("shop", "CREATE SEQUENCE tickets");
    // The replay alone would not notice a new table.
    let options = Options { share: 0.0, compare: false, ..bench.options("shop") };
    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    for sql in HOUSEKEEPING {
        bench.target.sql("shop", sql);
    }
    assert_eq!(definitions_since_switch(&options).await.unwrap(), Vec::<String>::new(), "nothing was defined");
    for (sql, _) in DEFINED {
        bench.target.sql("shop", sql);
    }
    let failure = fallback(&options, observer().0).await.unwrap_err();
    let Error::DefinedSince(named) = &failure.error else { panic!("{failure:?}") };
    assert_eq!(failure.state, State::Untouched);
    let mut wanted = DEFINED.map(|(_, name)| name.to_owned()).to_vec();
    let (mut told, before) = (named.clone(), &status(&options).await.unwrap().defined_since);
    assert_eq!(before, named, "`status` says it too");
    wanted.sort();
    told.sort();
    assert_eq!(told, wanted);
    assert_eq!(bench.fake_proxy.lock().unwrap().serving.1, bench.target.port());
    assert!(bench.source.try_sql("shop", "SELECT 1").is_err(), "the source is shut");

    let accepted = AcceptedRestrictions { definitions_dropped: true, ..AcceptedRestrictions::default() };
    let knowingly = Options { accepted, compare: true, ..options };
    bench.target.sql("shop", "INSERT INTO pgbench_history (tid) VALUES (7)");
    fallback(&knowingly, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.source.sql("shop", "SELECT tid FROM pgbench_history"), "7", "rows are back");
    bench.assert_clean("shop");
}
