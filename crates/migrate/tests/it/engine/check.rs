//! Preflight on real servers: every refusal has a name, and nothing is touched.

use stillpoint_migrate_engine::{
    AcceptedRestrictions, Capture, Coverage, Options, Report, Server, TableSources, Verdict, check,
};
use stillpoint_testing::postgresql::{Cluster, available};

/// Statements each of which alone makes a migration impossible, with the name that must be in the refusal.
const REFUSED: &[(&str, &str)] = &[
    ("CREATE UNLOGGED TABLE scratch (a int PRIMARY KEY)", "public.scratch"),
    ("CREATE ROLE absent; CREATE TABLE theirs (a int PRIMARY KEY); ALTER TABLE theirs OWNER TO absent", "role absent"),
    (
        "CREATE TABLE numbers (a int PRIMARY KEY, b regclass); INSERT INTO numbers VALUES (1, 'numbers_pkey'), (2, 'numbers')",
        "object name public.numbers.b: 1 values",
    ),
    (
        "CREATE TABLE numbers (a int PRIMARY KEY, b regproc[]); INSERT INTO numbers VALUES (1, '{pg_catalog.now}'); \
         CREATE FUNCTION twice(int) RETURNS int LANGUAGE sql AS 'SELECT 1'; INSERT INTO numbers VALUES (2, '{twice}'); \
         CREATE FUNCTION twice(text) RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "object name public.numbers.b: 1 values",
    ),
    (
        "CREATE ROLE missing; CREATE TABLE numbers (a int PRIMARY KEY, b regrole); INSERT INTO numbers VALUES (1, 'missing')",
        "it names role missing",
    ),
    (
        "CREATE FUNCTION e() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'; \
         CREATE EVENT TRIGGER on_ddl ON ddl_command_end EXECUTE FUNCTION e(); ALTER EVENT TRIGGER on_ddl ENABLE ALWAYS",
        "on_ddl",
    ),
    (
        "CREATE SUBSCRIPTION theirs CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false)",
        "subscription theirs",
    ),
    (
        "BEGIN; CREATE TABLE undecided (a int PRIMARY KEY); PREPARE TRANSACTION 'long ago'",
        "prepared transaction long ago",
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_supported_is_refused_by_name() {
    if !available() {
        return;
    }
    let source = Cluster::start(&["wal_level=logical", "max_prepared_transactions=10"]);
    let target = Cluster::start(&["wal_level=logical"]);
    for (number, (sql, name)) in REFUSED.iter().enumerate() {
        let database = format!("d{number}");
        source.sql("postgres", &format!("CREATE DATABASE {database}"));
        source.sql(&database, sql);
        let report = report(&source, &target, &database, AcceptedRestrictions::default()).await;
        let refusals = report.refusals();
        assert!(refusals.len() == 1 && refusals[0].contains(name), "{sql}: {refusals:?}");
        assert!(report.accepted().is_err());
    }
    assert_eq!(target.sql("postgres", "SELECT count(*) FROM pg_database"), "3", "the target is as it was");
    let accepted = AcceptedRestrictions { unlogged_empty: true, ..AcceptedRestrictions::default() };
    assert!(report(&source, &target, "d0", accepted).await.accepted().is_ok(), "an unlogged table can be accepted");
    // The name of a prepared transaction belongs to the whole server, and would keep it from ending.
    source.sql("d7", "ROLLBACK PREPARED 'long ago'");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_and_servers_are_looked_at() {
    if !available() {
        return;
    }
    let source = Cluster::start(&["wal_level=replica", "max_replication_slots=0"]);
    source.sql("postgres", "CREATE DATABASE shop");
    let refusals = report(&source, &source, "shop", AcceptedRestrictions::default()).await.refusals().join("\n");
    for needle in [
        "same cluster",
        "already exists on the target",
        "target's wal_level: it is replica",
        "try: ALTER SYSTEM SET wal_level = logical, and restart the target",
        "target's max_replication_slots: no slot is free",
        "try: ALTER SYSTEM SET max_replication_slots = 1, and restart the target",
    ] {
        assert!(refusals.contains(needle), "{needle}: {refusals}");
    }
    let log = report_by(&source, &source, "shop", AcceptedRestrictions::default(), Some(Capture::Log))
        .await
        .refusals()
        .join("\n");
    assert!(log.contains("wal_level: it is replica"), "{log}");
}

/// A server that maps its clients' role names to other names, on either side.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_calls_roles_otherwise_is_refused() {
    if !available() {
        return;
    }
    let clusters = [Cluster::start(&["wal_level=logical"]), Cluster::start(&["wal_level=logical"])];
    let [source, target] = &clusters;
    source.sql("postgres", "CREATE DATABASE shop");
    for (cluster, side) in [(source, "source"), (target, "target")] {
        for database in ["shop", "postgres"] {
            cluster.sql("postgres", &format!("CREATE ROLE \"postgres@{database}\" SUPERUSER LOGIN"));
        }
        cluster.sql("postgres", "ALTER SYSTEM SET db_user_namespace = on");
        cluster.sql("postgres", "SELECT pg_reload_conf()");
        let on = || (cluster.sql("postgres", "SHOW db_user_namespace") == "on").then_some(());
        stillpoint_testing::wait::until("the setting to be read", on);
        let refusals = report(source, target, "shop", AcceptedRestrictions::default()).await.refusals();
        let wanted = format!("setting db_user_namespace: it is on at the {side}");
        assert!(refusals.iter().any(|refusal| refusal.starts_with(&wanted)), "{refusals:?}");
    }
}

/// Databases that can be moved by the log, but not if rows come from statements.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_gives_no_images_of_rows_is_refused_by_name() {
    if !available() {
        return;
    }
    let (source, target) = (Cluster::start(&["wal_level=replica"]), Cluster::start(&["wal_level=logical"]));
    source.sql("postgres", "CREATE DATABASE shop");
    let plain = "CREATE TABLE keyed (id int PRIMARY KEY); CREATE TABLE keyless (a int)";
    source.sql("shop", plain);
    let report = report(&source, &target, "shop", AcceptedRestrictions::default()).await;
    assert_eq!((report.source, report.refusals()), (Capture::Rows, Vec::new()), "chosen, as the log tells of no rows");
    let note = |name: &str| &report.findings.iter().find(|finding| finding.name == name).expect("a table").note;
    assert!(note("public.keyed").contains("A (row images)"), "{}", note("public.keyed"));
    assert!(note("public.keyless").contains("new rows are captured"), "{}", note("public.keyless"));
    source.sql(
        "shop",
        "CREATE TABLE cost (a int PRIMARY KEY, m money); CREATE TABLE watched (a int PRIMARY KEY); \
         CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
         CREATE TRIGGER watcher AFTER INSERT ON watched EXECUTE FUNCTION f(); \
         CREATE TABLE owner (a int PRIMARY KEY); CREATE TABLE owned (a int PRIMARY KEY, o int CONSTRAINT owns REFERENCES owner \
         ON DELETE CASCADE)",
    );
    for (by, wanted) in [
        (Capture::Rows, vec!["cost: the text of money", "owner: foreign key owns", "watched: trigger watcher"]),
        (Capture::Log, Vec::new()),
    ] {
        let mut refusals =
            report_by(&source, &target, "shop", AcceptedRestrictions::default(), Some(by)).await.refusals();
        refusals.retain(|refusal| !refusal.contains("wal_level"));
        assert_eq!(refusals.len(), wanted.len(), "{by:?}: {refusals:?}");
        for needle in wanted {
            assert!(refusals.iter().any(|refusal| refusal.contains(needle)), "{needle}: {refusals:?}");
        }
    }
}

/// The capture source that carries each table, and the effect of the other one, for people and for programs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_table_is_told_its_sources() {
    if !available() {
        return;
    }
    let (source, target) = (Cluster::start(&["wal_level=logical"]), Cluster::start(&["wal_level=logical"]));
    source.sql("postgres", "CREATE DATABASE shop");
    source.sql(
        "shop",
        "CREATE TABLE keyed (id int PRIMARY KEY); CREATE TABLE keyless (a int); CREATE TABLE cost (a int PRIMARY KEY, m money); \
         CREATE TABLE parts (a int PRIMARY KEY) PARTITION BY RANGE (a); \
         CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10); \
         CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
         CREATE TRIGGER watcher AFTER INSERT ON parts EXECUTE FUNCTION f()",
    );
    let only = "rows can only be added: it has no key whose values can be hashed";
    let money = "the text of money depends on the session";
    let by_rows = [
        ("public.cost", Coverage::Nothing, Some(money)),
        ("public.keyed", Coverage::All, None),
        ("public.keyless", Coverage::NewRows, Some(only)),
        // The trigger belongs to the partitioned table.
        ("public.parts_1", Coverage::Nothing, Some("trigger watcher")),
    ];
    let seen = |report: &Report, way: fn(&TableSources) -> &stillpoint_migrate_engine::SourceCoverage| {
        let of = |sources: &TableSources| (sources.table.clone(), way(sources).carries, way(sources).why.clone());
        report.tables.iter().map(of).collect::<Vec<_>>()
    };
    let by_rows = by_rows.map(|(table, carries, why)| (table.to_owned(), carries, why.map(str::to_owned)));
    let by_log = by_rows.clone().map(|(table, ..)| (table, Coverage::All, None));
    let report = report(&source, &target, "shop", AcceptedRestrictions::default()).await;
    assert_eq!(seen(&report, |sources| &sources.rows), by_rows);
    assert_eq!(seen(&report, |sources| &sources.log), by_log, "which is why it is the one that is taken");
    assert!(report.tables.iter().all(|sources| sources.by == Capture::Log) && report.accepted().is_ok());
    let note = |report: &Report, name: &str| {
        report.findings.iter().find(|finding| finding.name == name).expect("a table").note.clone()
    };
    let cost = note(&report, "public.cost");
    assert!(cost.contains("then C (pgoutput)") && cost.ends_with(&format!("not by A (row images): {money}")), "{cost}");
    assert!(!note(&report, "public.keyed").contains("not by"));
    let new_rows = serde_json::json!({"carries": "new-rows", "why": only});
    let wanted = serde_json::json!({"table": "public.keyless", "by": "log", "log": {"carries": "all"},
                                    "rows": new_rows, "statements": new_rows});
    assert_eq!(serde_json::to_value(&report.tables[2]).unwrap(), wanted);

    let source = Cluster::start(&["wal_level=replica"]);
    source.sql("postgres", "CREATE DATABASE shop");
    source.sql("shop", "CREATE TABLE keyed (id int PRIMARY KEY)");
    let report = report_by(&source, &target, "shop", AcceptedRestrictions::default(), None).await;
    let (by, log) = (report.tables[0].by, report.tables[0].log.clone());
    assert_eq!((by, log.carries), (Capture::Rows, Coverage::Nothing));
    let note = note(&report, "public.keyed");
    assert!(note.ends_with("not by C (pgoutput): wal_level is replica on the source"), "{note}");
}

/// Statement replay is never chosen by default, and the report gives for each table the statements that cannot be
/// repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_are_possible_and_taken_only_when_asked_for() {
    if !available() {
        return;
    }
    let (source, target) = (Cluster::start(&["wal_level=replica"]), Cluster::start(&["wal_level=logical"]));
    source.sql("postgres", "CREATE DATABASE shop");
    source.sql(
        "shop",
        "CREATE TABLE plain (id int PRIMARY KEY, n int DEFAULT 7); CREATE TABLE cost (a int PRIMARY KEY, m money); \
         CREATE TABLE stamped (id int PRIMARY KEY, at timestamptz DEFAULT now())",
    );
    let report = report(&source, &target, "shop", AcceptedRestrictions::default()).await;
    assert_eq!(report.source, Capture::Rows);
    assert!(
        report.capture.ends_with("B (statements) (--capture statements) is possible for 2 of 3"),
        "{}",
        report.capture
    );
    let asked = report_by(&source, &target, "shop", AcceptedRestrictions::default(), Some(Capture::Statements)).await;
    assert_eq!(asked.source, Capture::Statements);
    assert!(
        asked.capture.starts_with("B (statements, by the proxy, replayed in the schedule lsir)"),
        "{}",
        asked.capture
    );
    let why = "a statement that leaves column at to its default cannot be replayed";
    let wanted = [(Coverage::Nothing, "the text of money"), (Coverage::All, ""), (Coverage::Given, why)];
    for (table, (carries, why)) in asked.tables.iter().zip(wanted) {
        let told = table.statements.why.clone().unwrap_or_default();
        assert!((table.statements.carries, table.by) == (carries, Capture::Statements), "{table:?}");
        assert!(told.contains(why) && told.is_empty() == why.is_empty(), "{table:?}");
    }
    let note = &asked.findings.iter().find(|finding| finding.name == "public.stamped").expect("a table").note;
    assert!(note.contains("then B (statements)") && note.contains(why), "{note}");
    assert!(asked.refusals().iter().any(|refusal| refusal.contains("cost")), "{:?}", asked.refusals());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_is_listed_with_what_becomes_of_it() {
    if !available() {
        return;
    }
    let source = Cluster::start(&["wal_level=logical"]);
    let target = Cluster::start(&["wal_level=logical"]);
    source.sql("postgres", "CREATE DATABASE shop");
    source.sql(
        "shop",
        "CREATE TYPE mood AS ENUM ('ok', 'bad'); CREATE TABLE keyed (id bigserial PRIMARY KEY, m mood, ms mood[]); \
         CREATE TABLE keyless (a int); CREATE TABLE parts (a int PRIMARY KEY) PARTITION BY RANGE (a); \
         CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10); CREATE VIEW v AS SELECT 1 AS a; \
         CREATE TABLE ruled (a int PRIMARY KEY); CREATE RULE also AS ON DELETE TO ruled DO ALSO SELECT 1; \
         CREATE TABLE wide (a int PRIMARY KEY, w text); ALTER TABLE wide ALTER COLUMN w SET STORAGE EXTERNAL; \
         INSERT INTO wide VALUES (1, repeat('w', 9000))",
    );
    let report = report(&source, &target, "shop", AcceptedRestrictions::default()).await;
    assert!(report.accepted().is_ok(), "{:?}", report.refusals());
    assert!(report.capture.contains("pgoutput"));
    let of = |kind: &str, name: &str| {
        let found = report.findings.iter().find(|finding| finding.kind == kind && finding.name == name);
        found.unwrap_or_else(|| panic!("{kind} {name} in {:?}", report.findings))
    };
    assert_eq!(of("table", "public.keyed").verdict, Verdict::Moved);
    // An array of the user's own type carries the type's number in its binary form.
    assert!(of("table", "public.keyed").note.contains("text"));
    assert!(of("table", "public.parts_1").note.contains("binary"));
    assert_eq!(of("table", "public.keyless").verdict, Verdict::Changed);
    for (name, held) in [("keyed", false), ("parts_1", false), ("keyless", true), ("ruled", true), ("wide", true)] {
        let note = &of("table", &format!("public.{name}")).note;
        assert_eq!(note.contains("while a snapshot is held"), held, "{name}: {note}");
    }
    for (kind, name) in [
        ("type", "public.mood"),
        ("partitioned table", "public.parts"),
        ("view", "public.v"),
        ("sequence", "public.keyed_id_seq"),
    ] {
        assert_eq!(of(kind, name).verdict, Verdict::Moved, "{kind} {name}");
    }
}

/// Settings and roles of the server, which do not move with the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_find_changed_is_said_before() {
    if !available() {
        return;
    }
    let source = Cluster::start(&["wal_level=logical"]);
    let target = Cluster::start(&["wal_level=logical", "max_connections=50"]);
    source.sql("postgres", "CREATE DATABASE shop");
    let same = report(&source, &source, "shop", AcceptedRestrictions::default()).await;
    let outside = |report: &Report| -> Vec<(String, String)> {
        let findings = report.findings.iter().filter(|found| found.verdict == Verdict::NotMoved);
        let findings = findings.filter(|found| ["setting", "limit", "role"].contains(&&found.kind[..]));
        findings.map(|found| (found.name.clone(), found.note.clone())).collect()
    };
    assert_eq!(outside(&same), Vec::new());
    for sql in [
        "ALTER SYSTEM SET timezone = 'Asia/Tokyo'",
        "ALTER SYSTEM SET default_transaction_isolation = 'serializable'",
        "ALTER SYSTEM SET lock_timeout = '7s'",
        "ALTER SYSTEM SET search_path = 'other'",
    ] {
        target.sql("postgres", sql);
    }
    target.sql("postgres", "SELECT pg_reload_conf()");
    let alice = "CREATE ROLE staff; CREATE ROLE alice LOGIN PASSWORD 'one' IN ROLE staff; ALTER ROLE alice SET work_mem = '5MB'";
    source.sql("postgres", &format!("{alice}; CREATE ROLE bob LOGIN; CREATE ROLE carol"));
    target.sql("postgres", "CREATE ROLE alice PASSWORD 'two'");
    stillpoint_testing::wait::until("the configuration to be read again", || {
        (target.sql("postgres", "SHOW search_path") == "other").then_some(())
    });
    let report = report(&source, &target, "shop", AcceptedRestrictions::default()).await;
    assert!(report.accepted().is_ok(), "{:?}", report.refusals());
    let found = outside(&report);
    let names: Vec<&str> = found.iter().map(|(name, _)| &name[..]).collect();
    let settings = ["TimeZone", "default_transaction_isolation", "lock_timeout", "search_path"];
    assert_eq!(names, [&["max_connections", "alice", "bob"], &settings[..]].concat(), "{found:?}");
    let note = |name: &str| &found.iter().find(|(known, _)| known == name).expect("it is found").1;
    for part in
        ["NOLOGIN instead of LOGIN", "a different password", "memberships none instead of staff", "work_mem=5MB"]
    {
        assert!(note("alice").contains(part), "{part}: {}", note("alice"));
    }
    assert!(note("TimeZone").contains("\"Asia/Tokyo\" on the target"), "{}", note("TimeZone"));
}

async fn report(source: &Cluster, target: &Cluster, database: &str, accepted: AcceptedRestrictions) -> Report {
    report_by(source, target, database, accepted, None).await
}

async fn report_by(
    source: &Cluster,
    target: &Cluster,
    database: &str,
    accepted: AcceptedRestrictions,
    capture: Option<Capture>,
) -> Report {
    let source = Server::parse("source", &source.conninfo(database), None).unwrap();
    let target = Server::parse("target", &target.conninfo(database), None).unwrap();
    let nowhere = std::path::PathBuf::from("/nonexistent");
    let options = Options { accepted, capture, ..Options::new(source, target, nowhere.clone(), nowhere) };
    check(&options).await.unwrap()
}
