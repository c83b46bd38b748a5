//! Settings that are meant for clients, and that the command's own sessions inherit, change nothing for a migration.

use crate::engine::support::{Bench, observer};
use stillpoint_migrate_engine::{Options, Outcome, Settings, State, Verdict, check, fallback, run};
use stillpoint_operation::{FaultPoint, Faults};
use stillpoint_testing::postgresql::{Cluster, available};

/// Settings of the manager's role on both servers. Each alone ends a migration, or changes what it does.
const INHERITED: [&str; 13] = [
    "idle_session_timeout = '200ms'",
    "idle_in_transaction_session_timeout = '200ms'",
    "statement_timeout = '20ms'",
    "lock_timeout = '1ms'",
    "default_transaction_isolation = serializable",
    "default_transaction_read_only = on",
    "default_transaction_deferrable = on",
    "role = guest",
    "quote_all_identifiers = on",
    "session_replication_role = replica",
    "exit_on_error = on",
    "temp_file_limit = 0",
    "array_nulls = off",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_our_sessions_would_inherit_is_of_no_effect() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "3", "-q"]);
    bench
        .source
        .sql("shop", "CREATE TABLE lists (id serial PRIMARY KEY, l text[]); INSERT INTO lists (l) VALUES ('{a,NULL}')");
    for cluster in [&bench.source, &bench.target] {
        cluster.sql("postgres", "CREATE ROLE guest; CREATE ROLE mover SUPERUSER LOGIN");
        for setting in INHERITED {
            cluster.sql("postgres", &format!("ALTER ROLE mover SET {setting}"));
        }
    }
    bench.source.sql("postgres", "ALTER DATABASE shop SET idle_session_timeout = '300ms'");
    let options = bench.options_as("user=mover dbname=shop", None);
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    bench.target.sql("shop", "INSERT INTO lists (l) VALUES ('{NULL,b}')");
    fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.source.sql("shop", "SELECT l[1] IS NULL FROM lists WHERE id = 2"), "t");
    bench.assert_clean("shop");
}

/// Values of settings in the file that ALTER SYSTEM writes.
fn written(cluster: &Cluster) -> String {
    let sql = "SELECT string_agg(format('%s=%s', name, setting), ' ' ORDER BY name) FROM pg_file_settings WHERE sourcefile LIKE \
               '%postgresql.auto.conf'";
    cluster.sql("postgres", sql)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_are_copied_and_restored_if_clients_do_not_stay() {
    if !available() {
        return;
    }
    let bench = Bench::start_apart(&["max_locks_per_transaction=99"], &[]);
    let set = |cluster: &Cluster, settings: &[&str]| {
        settings.iter().for_each(|setting| drop(cluster.sql("postgres", &format!("ALTER SYSTEM SET {setting}"))));
        cluster.sql("postgres", "SELECT pg_reload_conf()");
    };
    let copied = [
        "work_mem = '7MB'",
        "search_path = '$user', 'My, path', public",
        "statement_timeout = '90s'",
        "random_page_cost = 1.5",
    ];
    set(&bench.source, &copied);
    // The same in another unit, and what is the machine's, the log's, or read at the start.
    set(&bench.source, &["lock_timeout = '60s'", "effective_cache_size = '99MB'", "log_min_messages = error"]);
    set(&bench.target, &["lock_timeout = '1min'", "work_mem = '5MB'", "default_statistics_target = 77"]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", "CREATE TABLE t (id int PRIMARY KEY); ALTER DATABASE shop SET work_mem = '6MB'");
    bench.target.sql("postgres", "CREATE DATABASE other");
    let before = written(&bench.target);

    bench.target.sql("postgres", "CREATE ROLE mover LOGIN SUPERUSER");
    let options = Options { settings: Settings::Copy, ..bench.options_as("user=postgres dbname=shop", None) };
    let report = check(&options).await.expect("a report");
    assert_eq!(report.refusals(), Vec::<String>::new());
    let found: Vec<(&str, Verdict)> = report
        .findings
        .iter()
        .filter(|finding| finding.kind == "server setting")
        .map(|finding| (finding.name.as_str(), finding.verdict))
        .collect();
    let restarts = ("max_locks_per_transaction", Verdict::NotMoved);
    let moved = ["random_page_cost", "search_path", "statement_timeout", "work_mem"].map(|name| (name, Verdict::Moved));
    assert_eq!(found, [&[restarts][..], &moved].concat());
    assert!(report.findings.iter().any(|finding| finding.note.contains("for the databases there too: other")));
    assert!(!report.findings.iter().any(|finding| finding.kind == "setting" && finding.name == "statement_timeout"));
    assert_eq!(written(&bench.target), before, "a check changes nothing");

    let failing = Options { faults: Faults::none().failing(FaultPoint::after("drain")), ..options.clone() };
    let failure = run(&failing, observer().0).await.expect_err("a fault");
    assert_eq!(failure.state, State::OnSource, "{failure:?}");
    assert_eq!(written(&bench.target), before);
    assert_eq!(bench.target.sql("postgres", "SHOW work_mem"), "5MB");

    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let now = "default_statistics_target=77 lock_timeout=1min random_page_cost=1.5 search_path=\"$user\", \"My, path\", public \
               statement_timeout=90s work_mem=7MB";
    let values = |text: &str| text.replace("1min30s", "90s").replace("90000", "90s").replace("1.5min", "90s");
    assert_eq!(values(&written(&bench.target)), now);
    assert_eq!(bench.target.sql("other", "SHOW work_mem; SHOW search_path"), "7MB\n\"$user\", \"My, path\", public");
    assert_eq!(bench.target.sql("shop", "SHOW work_mem"), "6MB", "settings of the database count more");
    // What is changed by hand meanwhile stays.
    bench.target.sql("postgres", "ALTER SYSTEM SET random_page_cost = 2");
    fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(
        written(&bench.target),
        "default_statistics_target=77 lock_timeout=1min random_page_cost=2 work_mem=5MB"
    );
    bench.assert_clean("shop");
}
