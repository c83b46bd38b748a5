//! Definitions as pg_dump shows them on both sides, and the target before clients are there.

use crate::engine::support::{Bench, observer};
use std::sync::{Arc, Mutex};
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_engine::{Observer, Options, Roles, Verdict, check, fallback, finish, run};
use stillpoint_testing::postgresql::{Cluster, available};

/// Lines of a dump about the database and its objects, without comments and psql's lock, which has a random word.
fn definitions(cluster: &Cluster, database: &str) -> Vec<String> {
    let mut dump = cluster.client("pg_dump");
    let output = dump.args(["--create", "--schema-only", database]).output().expect("run pg_dump");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_definition =
        |line: &&str| !line.is_empty() && !["--", "\\restrict ", "\\unrestrict "].iter().any(|no| line.starts_with(no));
    text.lines().filter(is_definition).map(str::to_owned).collect()
}

const SETUP: &str = "CREATE TABLE goods (id int PRIMARY KEY, price int, owner regrole, seen pg_snapshot); \
     INSERT INTO goods SELECT n, n, 'clerk', NULL FROM generate_series(1, 99) n; ALTER TABLE goods OWNER TO keeper; \
     CREATE TABLE keyless (n int); SELECT lo_create(4711), lo_create(4712); CREATE SCHEMA \"odd schema\"; CREATE TABLE \"odd schema\".t (id int PRIMARY KEY); \
     ALTER TABLE goods ENABLE ROW LEVEL SECURITY; CREATE POLICY priced ON goods TO clerk USING (price > 0); \
     COMMENT ON POLICY priced ON goods IS 'those with a price'; GRANT SELECT ON goods TO clerk; \
     CREATE PUBLICATION news FOR TABLE goods (id, price) WHERE (id > 5), \"odd schema\".t WITH (publish = 'insert'); \
     COMMENT ON PUBLICATION news IS 'of goods'; CREATE PUBLICATION odd FOR TABLES IN SCHEMA \"odd schema\"";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_of_the_target_says_what_one_of_the_source_said() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::start());
    let source = &bench.source;
    source.sql("postgres", "CREATE ROLE keeper; CREATE ROLE clerk LOGIN");
    source.sql("postgres", "CREATE DATABASE shop OWNER keeper");
    source.sql(
        "postgres",
        "COMMENT ON DATABASE shop IS 'all of it'; ALTER DATABASE shop SET work_mem = '5MB'; \
         ALTER DATABASE shop SET default_transaction_read_only = off; ALTER ROLE clerk IN DATABASE shop SET lock_timeout = '7s'; \
         REVOKE CONNECT ON DATABASE shop FROM PUBLIC; GRANT CREATE, CONNECT ON DATABASE shop TO clerk",
    );
    source.sql("shop", SETUP);
    let before = definitions(source, "shop");

    let options = Options { rehearse: true, share: 0.0, roles: Roles::Create, ..bench.options("shop") };
    let report = check(&options).await.expect("a report");
    assert_eq!(report.refusals(), Vec::<String>::new());
    let found = |kind: &str, name: &str, verdict| {
        report.findings.iter().any(|found| found.kind == kind && found.name == name && found.verdict == verdict)
    };
    assert!(found("publication", "news", Verdict::Moved), "{:?}", report.findings);
    assert!(found("transaction number", "public.goods.seen", Verdict::NotMoved), "{:?}", report.findings);
    assert!(found("definitions", "shop", Verdict::NotLookedAt), "roles are not rehearsed: {:?}", report.findings);

    // A session that bypasses the proxy cannot write to a target that clients have not reached.
    let written = Arc::new(Mutex::new(None));
    let (at, result) = (Arc::clone(&bench), Arc::clone(&written));
    let watching: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            let write = at.target.try_sql("shop", "INSERT INTO keyless VALUES (1)");
            *result.lock().expect("no test thread panicked") = Some(write);
        }
    });
    let run_options = Options { rehearse: false, ..options };
    run(&run_options, watching).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let written = written.lock().expect("no test thread panicked").take().expect("it compared");
    assert!(written.as_ref().is_err_and(|why| why.contains("read-only transaction")), "{written:?}");
    bench.target.sql("shop", "INSERT INTO keyless VALUES (1); SELECT lo_unlink(4711), lo_create(4713)");

    fallback(&run_options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let objects = source.sql("shop", "SELECT string_agg(oid::text, ' ' ORDER BY oid) FROM pg_largeobject_metadata");
    assert_eq!(objects, "4712 4713", "one was removed on the target, and one was made there");
    run(&run_options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    finish(&run_options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(definitions(&bench.target, "shop"), before);
}

/// A rehearsal that needed the real name may be killed: the next command drops what it left, and nothing else of that name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_marked_database_of_the_real_name_is_dropped() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    let options = bench.options("shop");
    bench.target.sql("postgres", "CREATE DATABASE shop");
    let refused = check(&options).await.expect("a report").refusals();
    assert!(refused.iter().any(|why| why.contains("already exists")), "{refused:?}");
    bench.target.sql("postgres", "ALTER DATABASE shop SET stillpoint.rehearsal = on");
    assert_eq!(check(&options).await.expect("a report").refusals(), Vec::<String>::new());
    assert_eq!(bench.target.sql("postgres", "SELECT count(*) FROM pg_database WHERE datname = 'shop'"), "0");
    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
}
