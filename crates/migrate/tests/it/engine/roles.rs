//! Roles move with the database if that is requested, stay in step until clients are on the target, and are removed
//! with it.

use crate::engine::support::{Bench, observer};
use std::sync::Arc;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_engine::{Error, Observer, Options, Roles, State, Verdict, check, fallback, run};
use stillpoint_operation::{FaultPoint, Faults};
use stillpoint_testing::postgresql::{NEWER_MAJOR, available, newer_available};

const MADE: &str = "('alice', 'bob', 'keeper', 'staff')";

/// Servers whose target logs all statements, and a database with roles of each kind.
fn bench(newer: bool) -> Bench {
    let bench = match newer {
        true => Bench::to_newer(NEWER_MAJOR, &["log_statement=all"]),
        false => Bench::start_apart(&[], &["log_statement=all"]),
    };
    let source = &bench.source;
    source.sql(
        "postgres",
        "CREATE ROLE staff NOINHERIT; CREATE ROLE keeper CREATEDB; CREATE ROLE outsider LOGIN; CREATE ROLE dba SUPERUSER LOGIN; \
         CREATE ROLE bob LOGIN PASSWORD 'one' BYPASSRLS; COMMENT ON ROLE bob IS 'it''s bob'; \
         CREATE ROLE alice LOGIN NOINHERIT PASSWORD 'two' CONNECTION LIMIT 7 VALID UNTIL '2099-01-01 00:00:00+00'; \
         GRANT staff TO alice WITH ADMIN OPTION; GRANT pg_monitor TO alice; GRANT keeper TO staff; \
         ALTER ROLE alice SET work_mem = '5MB'; ALTER ROLE alice SET search_path = \"$user\", 'a, b'; \
         ALTER ROLE alice SET app.tenant = 'it''s 7'",
    );
    source.sql("postgres", "CREATE DATABASE shop OWNER keeper");
    source.sql("postgres", "REVOKE CONNECT ON DATABASE shop FROM PUBLIC; GRANT CONNECT ON DATABASE shop TO alice, bob");
    source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    source.sql("shop", "GRANT SELECT ON pgbench_tellers TO staff");
    bench
}

fn creating(bench: &Bench) -> Options {
    Options { share: 0.0, roles: Roles::Create, ..bench.options("shop") }
}

/// All properties of the database's roles.
fn role_properties(cluster: &stillpoint_testing::postgresql::Cluster) -> String {
    cluster.sql(
        "postgres",
        &format!(
            "SELECT rolname, rolsuper, rolinherit, rolcreaterole, rolcreatedb, rolcanlogin, rolreplication, rolbypassrls, \
             rolconnlimit, rolvaliduntil, rolpassword, (SELECT string_agg(g.rolname || m.admin_option, ' ' ORDER BY g.rolname) \
             FROM pg_auth_members m JOIN pg_authid g ON g.oid = m.roleid WHERE m.member = r.oid), \
             (SELECT array_agg(s ORDER BY s) FROM pg_db_role_setting, unnest(setconfig) s WHERE setrole = r.oid AND setdatabase = 0), \
             shobj_description(r.oid, 'pg_authid') FROM pg_authid r WHERE rolname IN {MADE} ORDER BY 1"
        ),
    )
}

fn present(cluster: &stillpoint_testing::postgresql::Cluster) -> String {
    cluster.sql(
        "postgres",
        "SELECT coalesce(string_agg(rolname, ' ' ORDER BY rolname), '') FROM pg_roles WHERE rolname !~ '^(pg_|postgres$)'",
    )
}

/// Asserts that the journal's directory and the logs of both servers hold no verifier.
fn assert_secret(bench: &Bench) {
    for cluster in [&bench.source, &bench.target] {
        assert!(!cluster.log_text().contains("SCRAM-SHA-256$"), "{}", cluster.log_text());
    }
    for entry in std::fs::read_dir(bench.state()).expect("the journal's directory") {
        let file = std::fs::read(entry.expect("an entry").path()).expect("a file");
        assert!(!String::from_utf8_lossy(&file).contains("SCRAM-SHA-256$"));
    }
}

async fn there_and_back(bench: Arc<Bench>) {
    let options = creating(&bench);
    let acting = Arc::clone(&bench);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            // Nothing in the database belongs to bob, and staff has rights on an object.
            acting.source.sql("postgres", "ALTER ROLE bob PASSWORD 'three'; ALTER ROLE bob SET lock_timeout = '5s'");
            acting.source.sql("postgres", "ALTER ROLE staff CREATEROLE CONNECTION LIMIT 3");
        }
    });
    bench.fake_proxy.lock().unwrap().at_pause =
        vec!["ALTER ROLE bob PASSWORD 'four' CREATEDB; GRANT pg_monitor TO bob"];
    run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(role_properties(&bench.target), role_properties(&bench.source));
    assert!(role_properties(&bench.target).contains("SCRAM-SHA-256$"));
    assert_eq!(present(&bench.target), "alice bob keeper staff", "no superuser, and none that may not connect");
    assert_secret(&bench);
    fallback(&options, crate::engine::support::observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(present(&bench.target), "");
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_go_with_the_database_and_leave_with_it() {
    if available() {
        there_and_back(Arc::new(bench(false))).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_go_to_a_newer_server() {
    if available() && newer_available() {
        there_and_back(Arc::new(bench(true))).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_that_the_target_has_stay_as_they_are() {
    if !available() {
        return;
    }
    let bench = bench(false);
    bench.target.sql("postgres", "CREATE ROLE bob LOGIN PASSWORD 'other'; CREATE ROLE staff CREATEROLE");
    let options = Options { faults: Faults::none().failing(FaultPoint::after("catch-up")), ..creating(&bench) };
    let before = bench.target.sql("postgres", "SELECT oid, r FROM pg_authid r WHERE rolname IN ('bob', 'staff')");
    let failure = run(&options, observer().0).await.unwrap_err();
    assert_eq!(failure.state, State::OnSource, "{failure:?}");
    let after = bench.target.sql("postgres", "SELECT oid, r FROM pg_authid r WHERE rolname IN ('bob', 'staff')");
    assert_eq!((before, present(&bench.target)), (after, "bob staff".into()));
    bench.assert_clean("shop");
}

/// A role that something else depends on by then is not dropped, and does not prevent the end of the migration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_something_else_needs_stays() {
    if !available() {
        return;
    }
    let bench = bench(false);
    let options = creating(&bench);
    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.target.sql("postgres", "CREATE TABLE of_alice (a int); ALTER TABLE of_alice OWNER TO alice");
    fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(present(&bench.target), "alice");
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_becomes_of_roles_is_said_before() {
    if !available() {
        return;
    }
    let bench = bench(false);
    bench.target.sql("postgres", "CREATE ROLE bob LOGIN");
    let found = async |roles| {
        let report = check(&Options { roles, ..bench.options("shop") }).await.unwrap();
        let roles = report.findings.iter().filter(|finding| finding.kind == "role");
        roles.map(|finding| (finding.name.clone(), finding.verdict, finding.note.clone())).collect::<Vec<_>>()
    };
    let verdicts = |found: &[(String, Verdict, String)]| {
        found.iter().map(|(name, verdict, _)| format!("{name} {verdict:?}")).collect::<Vec<_>>()
    };
    let created = found(Roles::Create).await;
    let wanted = ["alice Moved", "bob NotMoved", "dba NotMoved", "keeper Moved", "staff Moved"];
    assert_eq!(verdicts(&created), wanted, "{created:?}");
    assert!(created[0].2.contains("(pg_monitor, staff with admin option)"), "{created:?}");
    assert!(created[1].2.contains("NOBYPASSRLS instead of BYPASSRLS; a different password"), "{created:?}");
    let checked = found(Roles::Check).await;
    let wanted = ["alice Refused", "bob NotMoved", "dba NotMoved", "keeper Refused", "staff Refused"];
    assert_eq!(verdicts(&checked), wanted, "{checked:?}");
    assert_eq!(verdicts(&found(Roles::Ignore).await), ["alice Refused", "keeper Refused", "staff Refused"]);
    let refused = run(&Options { roles: Roles::Ignore, ..creating(&bench) }, observer().0).await.unwrap_err();
    assert!(matches!(refused.error, Error::Refused(_)) && refused.state == State::Untouched, "{refused:?}");
}
