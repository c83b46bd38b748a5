//! Definitions made on the source during a migration are not lost: they are repeated, or end the migration by name.

use crate::engine::support::{Bench, dumped, observer};
use std::sync::Arc;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_engine::{Error, Observer, Options, Outcome, State, fallback, run};
use stillpoint_operation::{FaultPoint, Faults};
use stillpoint_testing::postgresql::available;

/// Statements that write no row of a table, each with the name that must be reported.
const DEFINED: [(&str, &str); 20] = [
    ("ALTER DATABASE shop SET work_mem = '5MB'", "changed database shop"),
    ("ALTER DATABASE shop SET default_transaction_read_only = off", "changed database shop"),
    ("ALTER ROLE guest IN DATABASE shop SET work_mem = '5MB'", "changed database shop"),
    ("GRANT CREATE ON DATABASE shop TO guest", "changed database shop"),
    ("GRANT CONNECT ON DATABASE shop TO guest", "changed database shop"),
    ("COMMENT ON DATABASE shop IS 'x'", "changed database shop"),
    ("GRANT CREATE ON SCHEMA public TO guest", "changed schema public"),
    ("ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO guest", "new default acl for role postgres on tables"),
    ("CREATE TEXT SEARCH CONFIGURATION words (COPY = simple)", "new text search configuration public.words"),
    ("CREATE COLLATION c (locale = 'C')", "new collation public.c"),
    (
        "CREATE OPERATOR === (LEFTARG = int, RIGHTARG = int, FUNCTION = int4eq)",
        "new operator public.===(integer,integer)",
    ),
    ("CREATE SERVER there FOREIGN DATA WRAPPER far", "new server there"),
    ("CREATE USER MAPPING FOR guest SERVER there", "new user mapping guest on server there"),
    ("CREATE STATISTICS s ON tid, bid FROM pgbench_history", "new statistics object public.s"),
    ("ALTER SEQUENCE tickets INCREMENT 5", "changed sequence public.tickets"),
    ("CREATE PUBLICATION p FOR TABLE pgbench_tellers", "new publication p"),
    ("CREATE PUBLICATION whole FOR ALL TABLES", "new publication whole"),
    ("CREATE SCHEMA more", "new schema more"),
    ("CREATE CAST (mood AS int) WITH INOUT", "new cast (public.mood AS integer)"),
    ("CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION e()", "new event trigger e"),
];

fn bench() -> Bench {
    let bench = Bench::start();
    for cluster in [&bench.source, &bench.target] {
        cluster.sql("postgres", "CREATE ROLE guest");
    }
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    bench.source.sql(
        "shop",
        "CREATE SEQUENCE tickets; CREATE TYPE mood AS ENUM ('ok'); CREATE FOREIGN DATA WRAPPER far; \
         CREATE FUNCTION e() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'",
    );
    bench
}

/// Runs, and calls `act` for the source when a phase begins.
async fn run_with(
    bench: &Arc<Bench>,
    options: &Options,
    at: &'static str,
    act: impl Fn(&Bench) + Send + Sync + 'static,
) -> Result<Outcome, stillpoint_migrate_engine::Failure> {
    let acting = Arc::clone(bench);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == at) {
            act(&acting);
        }
    });
    run(options, observer).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_defined_in_mid_run_is_repeated_by_name() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench());
    let (observer, events) = observer();
    let acting = Arc::clone(&bench);
    // It is compared again afterwards.
    let once = std::sync::Once::new();
    let watching: Observer = Arc::new(move |event: Event| {
        let is_compared = matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare");
        if is_compared {
            once.call_once(|| {
                DEFINED.iter().for_each(|(sql, _)| drop(acting.source.sql("shop", sql)));
            });
        }
        observer(event);
    });
    let options = Options { share: 0.0, ..bench.options("shop") };
    let outcome = run(&options, watching).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let events = events.lock().unwrap();
    let told = events.iter().find_map(|event| match &event.kind {
        EventKind::Migrate(migrate::Event::Redefining { changes }) => Some(changes.clone()),
        _ => None,
    });
    let told = told.unwrap();
    for (sql, name) in DEFINED {
        assert!(told.iter().any(|told| told == name), "{sql}: {told:?}");
    }
    bench.look_into_source("shop");
    let [source, target] = [&bench.source, &bench.target].map(|cluster| dumped(&bench, cluster));
    assert_eq!(source, target);
    for sql in [
        "SELECT string_agg(pubname || puballtables, ' ' ORDER BY pubname) FROM pg_publication WHERE pubname !~ '^stillpoint'",
        "SELECT string_agg(s, ' ' ORDER BY s) FROM pg_db_role_setting d JOIN pg_database b ON b.oid = setdatabase, \
         unnest(setconfig) s WHERE datname = 'shop' AND s !~ 'read_only'",
        "SELECT string_agg(a::text, ' ' ORDER BY a::text) FROM pg_database, aclexplode(datacl) a WHERE datname = 'shop' \
         AND a.grantee = 'guest'::regrole AND a.privilege_type <> 'CONNECT'",
        "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = 'shop'",
    ] {
        let [source, target] = [&bench.source, &bench.target].map(|cluster| cluster.sql("shop", sql));
        assert!(
            !target.is_empty() && source.split(' ').count() == target.split(' ').count(),
            "{sql}: {source} {target}"
        );
    }
}

/// Definitions that no dump of a database holds end the migration by name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_repeated_ends_it_by_name() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench());
    let options = Options { share: 0.0, ..bench.options("shop") };
    for (sql, name, back) in [
        (
            "CREATE SUBSCRIPTION s CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false)",
            "new subscription s",
            "ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s",
        ),
        ("GRANT SET ON PARAMETER work_mem TO guest", "new parameter ACL work_mem", "SELECT 1"),
    ] {
        let failure = run_with(&bench, &options, "compare", move |bench| drop(bench.source.sql("shop", sql)));
        let failure = failure.await.unwrap_err();
        assert!(matches!(&failure.error, Error::SchemaChanged(told) if told == name), "{sql}: {failure:?}");
        assert_eq!(failure.state, State::OnSource, "{failure:?}");
        assert_eq!(bench.fake_proxy.lock().unwrap().serving.1, bench.source.port());
        bench.source.sql("shop", back);
        bench.assert_clean("shop");
    }
}

/// Definitions after the last reading of all definitions: clients go on, and leave with the next pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_defined_in_the_pause_arrives_with_a_later_one() {
    if !available() {
        return;
    }
    let bench = bench();
    let options = Options { share: 0.0, ..bench.options("shop") };
    // The last one is the setting that the fence uses.
    bench.fake_proxy.lock().unwrap().at_pause = vec![
        "CREATE SCHEMA more",
        "GRANT CONNECT ON DATABASE shop TO guest",
        "ALTER DATABASE shop SET work_mem = '5MB'",
        "ALTER DATABASE shop SET default_transaction_read_only = off",
    ];
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let asked = bench.fake_proxy.lock().unwrap().asked.clone();
    assert_eq!(asked.iter().filter(|asked| *asked == "switch").count(), 1, "{asked:?}");
    assert!(asked.iter().filter(|asked| *asked == "pause").count() >= 5, "{asked:?}");
    let target = |sql: &str| bench.target.sql("shop", sql);
    assert_eq!(target("SELECT count(*) FROM pg_namespace WHERE nspname = 'more'"), "1");
    let granted = "SELECT count(*) FROM pg_database, aclexplode(datacl) WHERE datname = 'shop' \
                   AND grantee = 'guest'::regrole AND privilege_type = 'CONNECT'";
    assert_eq!(target(granted), "1");
    let settings = "SELECT string_agg(s, ' ' ORDER BY s) FROM pg_db_role_setting, unnest(setconfig) s";
    assert_eq!(target(settings), "default_transaction_read_only=off work_mem=5MB");
}

/// The fence sets the database read-only; the database's own value goes to the target, and is restored when the fence
/// is lifted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_keeps_its_own_default_of_read_only() {
    if !available() {
        return;
    }
    let bench = bench();
    let options = Options { share: 0.0, ..bench.options("shop") };
    let settings = "SELECT coalesce(string_agg(s, ' '), '') FROM pg_db_role_setting d JOIN pg_database b ON b.oid = d.setdatabase, \
                    unnest(setconfig) s WHERE datname = 'shop'";
    for own in ["false", "on"] {
        bench.source.sql("postgres", &format!("ALTER DATABASE shop SET default_transaction_read_only = '{own}'"));
        let own = format!("default_transaction_read_only={own}");
        let once = Options {
            faults: Faults::none().failing(FaultPoint::after("fence")),
            pause_attempts: 1,
            ..options.clone()
        };
        run(&once, observer().0).await.unwrap_err();
        assert_eq!(bench.source.sql("postgres", settings), own, "behind a pause that came to nothing");
        run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
        assert_eq!(bench.target.sql("postgres", settings), own);
        let fenced = bench.source.sql("postgres", settings);
        assert!(fenced.split(' ').any(|setting| setting == "default_transaction_read_only=on"), "{fenced}");
        fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
        assert_eq!(bench.source.sql("postgres", settings), own, "the fence is gone");
    }
    bench.source.sql("postgres", "ALTER DATABASE shop RESET default_transaction_read_only");
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_defines_nothing_does_not_keep_it_from_ending() {
    if !available() {
        return;
    }
    let bench = bench();
    let passing = "CREATE TEMP TABLE passing (a serial PRIMARY KEY, b text); TRUNCATE pgbench_history; ANALYZE";
    let once = Options { share: 0.0, pause_attempts: 1, ..bench.options("shop") };
    bench.fake_proxy.lock().unwrap().at_pause = vec![passing];
    run(&once, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.fake_proxy.lock().unwrap().at_pause = vec![passing];
    fallback(&once, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.assert_clean("shop");
}

/// A change that was undone prevents the use of one pause, and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_back_costs_a_pause() {
    if !available() {
        return;
    }
    let bench = bench();
    let options = Options { share: 0.0, ..bench.options("shop") };
    bench.fake_proxy.lock().unwrap().at_pause =
        vec!["CLUSTER pgbench_branches USING pgbench_branches_pkey; ALTER TABLE pgbench_branches SET WITHOUT CLUSTER"];
    let (observer, events) = observer();
    run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let events = events.lock().unwrap();
    let warned = events.iter().find_map(|event| match &event.kind {
        EventKind::Warning { text } if text.contains("definitions changed while clients were paused") => {
            Some(text.clone())
        }
        _ => None,
    });
    assert!(warned.is_some_and(|text| text.contains("pg_index")), "{events:?}");
}
