//! Migrations whose roles are no superusers, as hosting providers give them.

use crate::engine::support::{Bench, assert_same_definitions, observer};

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use stillpoint_migrate_engine::{Options, Outcome, Roles, Verdict, check, fallback, finish, run};
use stillpoint_testing::postgresql::{Cluster, NEWER_MAJOR, available, newer_available};
use stillpoint_testing::wait::until;

/// A role with what providers give at most; `app` owns what the application makes, and `reader` has rights on it.
pub(crate) const PROVIDER_ROLES: &str = "CREATE ROLE mover LOGIN NOSUPERUSER CREATEDB CREATEROLE REPLICATION; GRANT pg_monitor, pg_signal_backend TO \
                     mover; CREATE ROLE app LOGIN; CREATE ROLE reader LOGIN; GRANT app, reader TO mover; \
                     GRANT CREATE ON DATABASE postgres TO mover";

const SCHEMA: &str = "SET ROLE app; CREATE SCHEMA sales; \
    CREATE TABLE sales.client (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, changed int NOT NULL DEFAULT 0); \
    CREATE TABLE sales.bill (id bigserial PRIMARY KEY, client int NOT NULL REFERENCES sales.client ON DELETE CASCADE, \
    amount numeric CHECK (amount >= 0)); CREATE INDEX ON sales.bill (client); \
    CREATE TABLE sales.day (at date NOT NULL, bill bigint REFERENCES sales.bill ON DELETE SET NULL, n int DEFAULT 1) \
    PARTITION BY RANGE (at); \
    CREATE TABLE sales.day_1 PARTITION OF sales.day FOR VALUES FROM ('2026-01-01') TO ('2026-07-01'); \
    CREATE TABLE sales.day_2 PARTITION OF sales.day DEFAULT; \
    CREATE TABLE sales.log (of text, at int DEFAULT 1); ALTER TABLE sales.log REPLICA IDENTITY FULL; \
    CREATE FUNCTION sales.note() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO sales.log VALUES (TG_OP); \
    NEW.changed := NEW.changed + 1; RETURN NEW; END$$; \
    CREATE TRIGGER note BEFORE INSERT OR UPDATE ON sales.client FOR EACH ROW EXECUTE FUNCTION sales.note(); \
    CREATE RULE also AS ON INSERT TO sales.bill DO ALSO INSERT INTO sales.log VALUES ('bill'); \
    CREATE VIEW sales.sum AS SELECT b.client, sum(b.amount), max(c.name) FROM sales.bill b JOIN sales.client c ON c.id = b.client GROUP BY 1; \
    CREATE MATERIALIZED VIEW sales.kept AS SELECT count(*) FROM sales.client; \
    GRANT SELECT ON sales.client, sales.sum TO reader; GRANT USAGE ON SCHEMA sales TO reader; \
    ALTER DEFAULT PRIVILEGES IN SCHEMA sales GRANT SELECT ON TABLES TO reader; \
    INSERT INTO sales.client (name) SELECT 'client ' || g FROM generate_series(1, 500) g; \
    INSERT INTO sales.bill (client, amount) SELECT g, g FROM generate_series(1, 500) g; \
    INSERT INTO sales.day (at, bill) SELECT date '2026-01-01' + g, g FROM generate_series(1, 300) g; \
    SELECT lo_from_bytea(0, 'contents'); RESET ROLE; ANALYZE";

/// Changes by which triggers, rules and each action of a foreign key act.
const WRITES: &str = "\\set n random(1, 100000)
BEGIN;
INSERT INTO sales.client (name) VALUES ('new :n');
INSERT INTO sales.bill (client, amount) SELECT max(id), :n FROM sales.client;
INSERT INTO sales.day (at, bill) SELECT date '2026-06-25' + :n % 10, max(id) FROM sales.bill;
UPDATE sales.client SET name = name || '!' WHERE id = :n % 500;
UPDATE sales.bill SET amount = amount + 1 WHERE id = :n % 500;
SELECT lo_from_bytea(0, 'more :n');
COMMIT;
DELETE FROM sales.client WHERE id = :n % 400;
";

fn start(newer: bool) -> Bench {
    if newer { Bench::to_newer(NEWER_MAJOR, &[]) } else { Bench::start() }
}

fn prepare(bench: &Bench) {
    for side in [&bench.source, &bench.target] {
        side.sql("postgres", PROVIDER_ROLES);
    }
    bench.source.sql("postgres", "CREATE DATABASE shop OWNER app");
    bench.source.sql("shop", SCHEMA);
}

fn options(bench: &Bench) -> Options {
    Options { rehearse: true, ..bench.options_as("user=mover dbname=shop", None) }
}

/// Starts a load of two clients of the application, which the next pause ends.
fn start_writing(bench: &Bench, at: &Cluster) {
    let script = bench.dir.path().join("writes.sql");
    std::fs::write(&script, WRITES).unwrap();
    // pgbench does not run as root.
    std::fs::set_permissions(bench.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    let load =
        at.pgbench_load("shop", at.port(), &["-n", "-U", "app", "-c", "2", "-T", "600", "-R", "100", "-f", &script]);
    bench.fake_proxy.lock().unwrap().loads.push(load);
    let count = "SELECT count(*) FROM sales.client";
    let before = at.sql("shop", count);
    until("clients write", || (at.sql("shop", count) != before).then_some(()));
}

fn assert_same(bench: &Bench) {
    let (source, target) = bench.sums("shop");
    let sorted = |sums: &str| sums.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(sorted(&source), sorted(&target));
    assert_same_definitions(bench);
    let objects = "SELECT string_agg(md5(lo_get(oid)) || pg_get_userbyid(lomowner), ' ' ORDER BY oid) FROM pg_largeobject_metadata";
    assert_eq!(bench.source.sql("shop", objects), bench.target.sql("shop", objects));
}

async fn there_and_back(bench: &Bench, roles: Roles) {
    let options = Options { roles, ..options(bench) };
    bench.source.sql("postgres", "ALTER SYSTEM SET gin_fuzzy_search_limit = 77");
    bench.source.sql("postgres", "SELECT pg_reload_conf()");
    let report = check(&options).await.unwrap();
    assert_eq!(report.refusals(), Vec::<String>::new());
    let differs = |name: &str| report.findings.iter().any(|found| found.kind == "setting" && found.name == name);
    assert!(differs("gin_fuzzy_search_limit"), "{:?}", report.findings);
    let not_looked_at = report.findings.iter().filter(|finding| finding.verdict == Verdict::NotLookedAt);
    // A rehearsal does not make roles, so it leaves out what they own.
    let not_looked_at = not_looked_at.filter(|finding| roles == Roles::Check || finding.kind != "definitions");
    let not_looked_at: Vec<_> = not_looked_at.map(|finding| (finding.kind.as_str(), finding.name.as_str())).collect();
    assert_eq!(not_looked_at, [("pooler", "before the proxy"), ("right", "source"), ("setting", "others")]);

    start_writing(bench, &bench.source);
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_same(bench);

    // What was kept from acting acts again.
    let log = "SELECT count(*) FROM sales.log";
    let before: u64 = bench.target.sql("shop", log).parse().unwrap();
    bench.target.sql(
        "shop",
        "INSERT INTO sales.client (name) VALUES ('there'); INSERT INTO sales.bill (client, amount) VALUES (500, 1)",
    );
    assert_eq!(bench.target.sql("shop", log).parse::<u64>().unwrap(), before + 2);
    let orphan = bench.target.try_sql("shop", "INSERT INTO sales.bill (client, amount) VALUES (1000000, 1)");
    assert!(orphan.is_err_and(|error| error.contains("foreign key")), "keys are checked again");

    start_writing(bench, &bench.target);
    let outcome = fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    bench.assert_clean("shop");
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM sales.client WHERE name = 'there'"), "1");
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM pg_constraint WHERE NOT convalidated"), "0");
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM pg_trigger WHERE tgenabled = 'D'"), "0");
    let orphan = bench.source.try_sql("shop", "INSERT INTO sales.bill (client, amount) VALUES (1000000, 1)");
    assert!(orphan.is_err_and(|error| error.contains("foreign key")));

    // Once more, for good.
    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    finish(&options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_same(bench);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_that_may_quiet_triggers_move_a_database_there_and_back() {
    if !available() {
        return;
    }
    let bench = start(newer_available());
    prepare(&bench);
    for side in [&bench.source, &bench.target] {
        side.sql("postgres", "GRANT SET ON PARAMETER session_replication_role TO mover");
    }
    there_and_back(&bench, Roles::Check).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_that_may_not_quiet_triggers_move_a_database_there_and_back() {
    if !available() {
        return;
    }
    let bench = start(false);
    prepare(&bench);
    bench.target.sql("postgres", "DROP ROLE app; DROP ROLE reader");
    there_and_back(&bench, Roles::Create).await;
}

/// A role that may only log in is told what it lacks, and what it is told is enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_is_told_each_right_that_it_lacks() {
    if !available() {
        return;
    }
    let bench = start(false);
    for side in [&bench.source, &bench.target] {
        side.sql(
            "postgres",
            "CREATE ROLE mover LOGIN; CREATE ROLE app LOGIN; CREATE ROLE reader LOGIN; CREATE ROLE \"Other One\" LOGIN",
        );
    }
    bench.source.sql("postgres", "CREATE DATABASE shop OWNER app");
    bench.source.sql("shop", SCHEMA);
    bench.source.sql(
        "shop",
        "GRANT CREATE ON DATABASE shop TO \"Other One\"; SET ROLE \"Other One\"; CREATE SCHEMA \"Own\"; CREATE TABLE \"Own\".hidden (id int \
         PRIMARY KEY); INSERT INTO \"Own\".hidden VALUES (1); ALTER TABLE \"Own\".hidden ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    );
    bench.source.sql("postgres", "ALTER DATABASE shop SET default_transaction_read_only = off");
    bench.target.sql("postgres", "ALTER ROLE mover CONNECTION LIMIT 5");
    let options = options(&bench);
    let mut rounds = 0;
    loop {
        let report = check(&options).await.unwrap();
        let refused = report.findings.iter().filter(|finding| finding.verdict == Verdict::Refused);
        let refused: Vec<_> =
            refused.map(|finding| (finding.kind.clone(), finding.name.clone(), finding.note.clone())).collect();
        println!("{refused:#?}");
        if refused.is_empty() {
            break;
        }
        rounds += 1;
        assert!(rounds < 5, "{refused:?}");
        for (kind, name, note) in refused {
            if name == "default_transaction_read_only" {
                bench.source.sql("postgres", "ALTER DATABASE shop RESET default_transaction_read_only");
                continue;
            }
            if kind == "connections" {
                bench.target.sql("postgres", "ALTER ROLE mover CONNECTION LIMIT 40");
                continue;
            }
            let at = if name == "target" || note.contains("on the target") { &bench.target } else { &bench.source };
            let (_, statement) = note.split_once("try: ").unwrap_or_else(|| panic!("{kind} {name}: {note}"));
            let database = if statement.contains("SCHEMA") { "shop" } else { "postgres" };
            at.sql(database, statement.split(", or ").next().unwrap());
        }
    }
    assert!(rounds > 0);
    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.assert_clean("shop");
}
