//! Each phase is made to fail: the guarantees for both sides hold, and the next attempt succeeds.

use crate::engine::support::{Bench, observer};
use std::fs;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_engine::{
    Error, Failure, Observer, Options, Outcome, Phase, Server, State, abort, fallback, finish, run, status,
};
use stillpoint_operation::{FaultPoint, Faults};
use stillpoint_testing::postgresql::{Relay, available};

/// Full speed: these tests are not about the throttle.
fn options(bench: &Bench) -> Options {
    Options { share: 0.0, ..bench.options("shop") }
}

async fn attempt(options: &Options) -> Result<Outcome, Failure> {
    let (observer, _events) = observer();
    run(options, observer).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_switch_everything_is_taken_away_again() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    for point in [
        FaultPoint::after("snapshot"),
        FaultPoint::after("definitions"),
        FaultPoint::after("rows"),
        FaultPoint::after("catch-up"),
        FaultPoint::after("prepare"),
        FaultPoint::after("fence"),
        FaultPoint::after("drain"),
    ] {
        let failing = Options { faults: Faults::none().failing(point.clone()), ..options(&bench) };
        let failure = attempt(&failing).await.unwrap_err();
        assert!(matches!(&failure.error, Error::Fault(at) if at.0 == point), "{point:?}: {failure:?}");
        assert_eq!(failure.state, State::OnSource, "{point:?}");
        assert_eq!(bench.fake_proxy.lock().unwrap().serving.1, bench.source.port(), "{point:?}");
        bench.assert_clean("shop");
        bench.source.sql("shop", "INSERT INTO pgbench_history (tid) VALUES (1)");
    }
    let outcome = attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }));
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    let outcome = attempt(&options(&bench)).await.unwrap();
    assert_eq!(outcome, Outcome::AlreadyThere, "a second run has nothing to do");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_comes_before_the_snapshot_is_not_taken_for_one_that_the_log_tells_of() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::with_shop());
    let making = Arc::clone(&bench);
    let observer: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "snapshot") {
            making.source.sql("shop", "CREATE TABLE late (id int PRIMARY KEY)");
        }
    });
    let failure = run(&options(&bench), observer).await.unwrap_err();
    assert!(matches!(&failure.error, Error::SchemaChanged(what) if what.contains("late")), "{failure:?}");
    assert_eq!(failure.state, State::OnSource, "{failure:?}");
    bench.assert_clean("shop");
    attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
}

/// A slot waits for transactions that are under way; one of them may make a table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_being_made_when_the_slot_is_made_is_not_left_behind() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let conninfo = format!("host=127.0.0.1 port={} user=postgres dbname=shop", bench.source.port());
    let (maker, connection) = tokio_postgres::connect(&conninfo, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    maker.batch_execute("BEGIN; CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)").await.unwrap();
    let options = options(&bench);
    let making = async {
        while !bench.source.log_text().contains("logical decoding found initial starting point") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        maker.batch_execute("COMMIT").await.unwrap();
    };
    let (outcome, ()) = tokio::join!(attempt(&options), making);
    let failure = outcome.unwrap_err();
    assert!(matches!(&failure.error, Error::SchemaChanged(what) if what.contains("late")), "{failure:?}");
    assert_eq!(failure.state, State::OnSource, "{failure:?}");
    bench.assert_clean("shop");
    attempt(&options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.target.sql("shop", "SELECT count(*) FROM late"), "1");
}

/// A server continues a statement after its client is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_being_made_at_an_interrupt_does_not_come() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let conninfo = format!("host=127.0.0.1 port={} user=postgres dbname=postgres", bench.target.port());
    let (holder, connection) = tokio_postgres::connect(&conninfo, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    // A session that makes a database waits for this.
    holder.batch_execute("BEGIN; COMMENT ON DATABASE template0 IS 'held'").await.unwrap();
    let options = options(&bench);
    let making = async {
        const MAKING: &str =
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE DATABASE%' AND wait_event_type = 'Lock'";
        while bench.target.sql("postgres", MAKING) != "1" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        options.interrupt.notify_one();
    };
    let (outcome, ()) = tokio::join!(attempt(&options), making);
    let failure = outcome.unwrap_err();
    assert!(matches!(failure.error, Error::Interrupted) && failure.state == State::OnSource, "{failure:?}");
    holder.batch_execute("ROLLBACK").await.unwrap();
    const LEFT: &str = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE DATABASE%'";
    assert_eq!(bench.target.sql("postgres", LEFT), "0", "no session makes it");
    bench.assert_clean("shop");
    attempt(&options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_switch_clients_stay_on_the_target() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let failing = Options { faults: Faults::none().failing(FaultPoint::after("switch-over")), ..options(&bench) };
    let failure = attempt(&failing).await.unwrap_err();
    assert_eq!(failure.state, State::OnTarget, "{failure:?}");
    assert_eq!(bench.fake_proxy.lock().unwrap().serving.1, bench.target.port());
    let told = status(&failing).await.unwrap();
    assert_eq!((told.record.map(|record| record.phase), told.serving), (Some(Phase::Switched), Some("target")));
    assert_eq!(abort(&failing).await.unwrap_err().state, State::OnTarget, "too late to abort");
    let slots = "SELECT count(*) FROM pg_replication_slots";
    assert_eq!(bench.source.sql("postgres", slots), "1", "left by the failure");
    assert_eq!(attempt(&options(&bench)).await.unwrap(), Outcome::AlreadyThere);
    assert_eq!(bench.source.sql("postgres", slots), "0", "the next run completes it");
    bench.target.sql("shop", "INSERT INTO pgbench_history (tid) VALUES (1)");
    fallback(&options(&bench), observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM pgbench_history"), "1");
    bench.assert_clean("shop");
}

/// A finished migration has no way back, also where its journal could not be removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_that_a_finished_migration_leaves_is_no_way_back() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let failing = Options { faults: Faults::none().failing(FaultPoint::after("release")), ..options(&bench) };
    attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let text = finish(&failing).await.unwrap_err();
    assert_eq!(text.state, State::OnTargetForGood, "{text:?}");
    let journal = fs::read_dir(&failing.state).unwrap().flatten().map(|entry| entry.path());
    let journal: Vec<_> = journal.filter(|path| path.extension().is_some_and(|ending| ending == "json")).collect();
    let [journal] = &journal[..] else { panic!("{journal:?}") };
    let left = fs::read(journal).unwrap();
    for command in ["fallback", "abort", "finish"] {
        fs::write(journal, &left).unwrap();
        let result = match command {
            "fallback" => fallback(&options(&bench), observer().0).await.map(drop),
            "abort" => abort(&options(&bench)).await.map(drop),
            _ => finish(&options(&bench)).await,
        };
        match result {
            Err(failure) => {
                assert!(failure.to_string().contains("clients are on the target"), "{command}: {failure:?}")
            }
            Ok(()) => assert_eq!(command, "finish"),
        }
        assert!(!journal.exists(), "{command}");
    }
    assert_eq!(bench.fake_proxy.lock().unwrap().serving.1, bench.target.port());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_way_back_that_fails_leaves_clients_on_the_target() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    for point in [FaultPoint::after("prepare"), FaultPoint::after("fence"), FaultPoint::after("drain")] {
        let failing = Options { faults: Faults::none().failing(point.clone()), ..options(&bench) };
        let failure = fallback(&failing, observer().0).await.unwrap_err();
        assert_eq!(failure.state, State::OnTarget, "{point:?}: {failure:?}");
        assert_eq!(bench.fake_proxy.lock().unwrap().serving.1, bench.target.port(), "{point:?}");
        bench.target.sql("shop", "INSERT INTO pgbench_history (tid) VALUES (1)");
        assert!(bench.source.try_sql("shop", "CREATE TABLE x ()").is_err(), "{point:?}: the source is shut");
    }
    fallback(&options(&bench), observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM pgbench_history"), "3");
    bench.assert_clean("shop");
}

/// Removes what an interrupted clean-up left, by the command of that name; `run` starts again at once.
async fn finish_clean_up(which: &str, options: &Options) {
    match which {
        "fallback" => {
            let outcome = fallback(options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
            assert_eq!(outcome, Outcome::AlreadyThere, "no client is moved");
        }
        "abort" => {
            let state = abort(options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
            assert_eq!(state, State::OnSource);
        }
        _ => {
            let outcome = attempt(options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
            assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_are_back_and_the_next_command_cleans_up() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    for next in ["fallback", "abort", "run"] {
        attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
        let failing = Options { faults: Faults::none().failing(FaultPoint::after("switch-over")), ..options(&bench) };
        let failure = fallback(&failing, observer().0).await.unwrap_err();
        assert!(matches!(failure.state, State::OnSourceWithRemains(_)), "{failure:?}");
        let told = status(&failing).await.unwrap();
        assert!(told.advice().is_some_and(|advice| advice.contains("`fallback` or `abort`")), "{told:?}");
        assert_eq!((told.record.map(|record| record.phase), told.serving), (Some(Phase::Returned), Some("source")));
        bench.source.sql("shop", "INSERT INTO pgbench_history (tid) VALUES (1)");
        finish_clean_up(next, &options(&bench)).await;
        if next == "run" {
            assert_eq!(bench.target.sql("shop", "SELECT count(*) FROM pgbench_history"), "3");
        } else {
            bench.assert_clean("shop");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clean_up_that_was_cut_off_is_finished_and_not_taken_for_a_migration() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let network = Arc::new(Relay::to(bench.source.port()));
    bench.fake_proxy.lock().unwrap().serving.1 = network.port();
    let behind = |faults| {
        let mut options = Options { faults, ..options(&bench) };
        let place = format!("host=127.0.0.1 port={} user=postgres dbname=shop", network.port());
        options.source = Server::parse("source", &place, None).unwrap();
        options
    };
    for (point, next) in [
        (FaultPoint::after("catch-up"), "fallback"),
        (FaultPoint::after("prepare"), "abort"),
        (FaultPoint::after("drain"), "run"),
    ] {
        let cut = Arc::clone(&network);
        let observer: Observer = Arc::new(move |event: Event| {
            println!("{:?}", event.kind);
            if matches!(event.kind, EventKind::FellBack { .. }) {
                cut.cut();
            }
        });
        let failure = run(&behind(Faults::none().failing(point.clone())), observer).await.unwrap_err();
        assert!(matches!(failure.state, State::OnSourceWithRemains(_)), "{point:?}: {failure:?}");
        network.restore();
        let there = bench.target.sql("postgres", "SELECT count(*) FROM pg_database WHERE datname = 'shop'");
        assert_eq!(there, "0", "{point:?}: the target could be reached");
        let told = status(&behind(Faults::none())).await.unwrap();
        assert!(told.kept_bytes.is_some() && told.orphans.is_empty(), "{point:?}: {told:?}");
        assert_eq!(told.record.map(|record| record.phase), Some(Phase::Returned), "{point:?}");
        finish_clean_up(next, &behind(Faults::none())).await;
        if next != "run" {
            bench.assert_clean("shop");
        }
    }
    assert_eq!(bench.fake_proxy.lock().unwrap().serving.1, bench.target.port());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_that_refuses_is_fallen_back_from() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    for refusal in ["prepare", "pause", "switch"] {
        bench.fake_proxy.lock().unwrap().refuse = vec![refusal];
        let failure = attempt(&options(&bench)).await.unwrap_err();
        assert!(failure.error.to_string().contains(refusal), "{failure:?}");
        assert_eq!(failure.state, State::OnSource, "{refusal}");
        bench.assert_clean("shop");
    }
    bench.fake_proxy.lock().unwrap().refuse.clear();
    attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    finish(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(fallback(&options(&bench), observer().0).await.is_err(), "there is no way back after finish");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_is_named() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let mut psql = bench.source.client("psql");
    psql.args(["-X", "-d", "shop", "-c", "BEGIN; UPDATE pgbench_branches SET bbalance = 1; SELECT pg_sleep(60)"]);
    let mut long = psql.stdout(std::process::Stdio::null()).spawn().unwrap();
    stillpoint_testing::wait::until("the long transaction to run", || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE query ~ 'pg_sleep' AND pid <> pg_backend_pid() \
                   AND backend_xid IS NOT NULL";
        (bench.source.sql("shop", sql) == "1").then_some(())
    });
    let hasty = Options { snapshot_limit: std::time::Duration::from_secs(2), ..options(&bench) };
    let failure = attempt(&hasty).await.unwrap_err();
    let Error::TimedOut { who, .. } = &failure.error else {
        // The change of replica identities may meet the lock that it holds first.
        panic!("{failure:?}")
    };
    assert!(who.iter().any(|who| who.contains("(postgres, psql), active for") && who.ends_with("BEGIN")), "{who:?}");
    assert!(!format!("{failure:?}").contains("bbalance"), "its text may hold a secret: {failure:?}");
    assert_eq!(failure.state, State::OnSource);
    long.kill().unwrap();
    long.wait().unwrap();
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_behind_the_copy_is_named_without_his_statement() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let network = Relay::to(bench.target.port());
    network.slow_down(2_000_000);
    let mut options = options(&bench);
    let place = format!("host=127.0.0.1 port={} user=postgres dbname=shop", network.port());
    options.target = Server::parse("target", &place, None).unwrap();
    let mut psql = bench.source.client("psql");
    psql.args(["-X", "-q", "-d", "shop", "-c", "ALTER TABLE pgbench_accounts ADD note text DEFAULT 'hunter2'"]);
    let waiting = Arc::new((Mutex::new(psql), Mutex::new(None::<Child>)));
    let begins = Arc::clone(&waiting);
    let observer: Observer = Arc::new(move |event: Event| {
        let mut child = begins.1.lock().unwrap();
        if child.is_none() && matches!(event.kind, EventKind::Migrate(migrate::Event::Copying { .. })) {
            *child = Some(begins.0.lock().unwrap().spawn().unwrap());
        }
    });
    let failure = run(&options, observer).await.unwrap_err();
    let told = failure.error.to_string();
    assert!(told.contains("locks block process") && told.contains("(postgres, psql), active for"), "{told}");
    assert!(told.ends_with("ALTER") && !format!("{failure:?}").contains("hunter2"), "{failure:?}");
    let altered = waiting.1.lock().unwrap().take().unwrap().wait().unwrap();
    assert!(altered.success(), "he got his lock");
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_that_were_passed_on_are_given_back_as_they_were() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    for cluster in [&bench.source, &bench.target] {
        cluster.sql("postgres", "CREATE ROLE clerk; CREATE ROLE \"a guest\"; CREATE ROLE friend");
    }
    bench.source.sql(
        "postgres",
        "GRANT CONNECT ON DATABASE shop TO clerk WITH GRANT OPTION; SET ROLE clerk; \
         GRANT CONNECT ON DATABASE shop TO \"a guest\" WITH GRANT OPTION; SET ROLE \"a guest\"; \
         GRANT CONNECT ON DATABASE shop TO friend",
    );
    let rights = || {
        let each = "SELECT item FROM pg_database, unnest(datacl) item WHERE datname = 'shop' ORDER BY item::text";
        bench.source.sql("postgres", each)
    };
    let before = rights();
    assert!(before.contains("friend=c/\"a guest\"") && before.contains("clerk=c*/postgres"), "{before}");
    let failing = Options { faults: Faults::none().failing(FaultPoint::after("drain")), ..options(&bench) };
    let failure = attempt(&failing).await.unwrap_err();
    assert!(matches!(&failure.error, Error::Fault(at) if at.0 == FaultPoint::after("drain")), "{failure:?}");
    assert_eq!((failure.state, rights()), (State::OnSource, before.clone()));
    attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let connect = "SELECT count(*) FROM pg_database, aclexplode(datacl) a WHERE datname = 'shop' \
                   AND a.privilege_type = 'CONNECT'";
    assert_eq!(bench.source.sql("postgres", connect), "0", "{}", rights());
    fallback(&options(&bench), observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(rights(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_is_dropped_behind_the_switch_keeps_no_other_role_out() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    for cluster in [&bench.source, &bench.target] {
        cluster
            .sql("postgres", "CREATE ROLE clerk LOGIN; CREATE ROLE \"a guest\"; CREATE ROLE friend; CREATE ROLE other");
    }
    bench.source.sql(
        "postgres",
        "REVOKE CONNECT ON DATABASE shop FROM PUBLIC; GRANT CONNECT ON DATABASE shop TO \"a guest\" WITH GRANT OPTION; \
         GRANT CONNECT ON DATABASE shop TO other; GRANT CONNECT ON DATABASE shop TO clerk; SET ROLE \"a guest\"; \
         GRANT CONNECT ON DATABASE shop TO friend",
    );
    attempt(&options(&bench)).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.source.sql("postgres", "DROP ROLE \"a guest\"; ALTER ROLE other RENAME TO another");
    // The source is opened, and closed again.
    let failing = Options { faults: Faults::none().failing(FaultPoint::after("prepare")), ..options(&bench) };
    let failure = fallback(&failing, observer().0).await.unwrap_err();
    assert!(matches!(&failure.error, Error::Fault(at) if at.0 == FaultPoint::after("prepare")), "{failure:?}");
    assert_eq!(failure.state, State::OnTarget);
    assert!(bench.source.try_sql("shop", "SELECT 1").is_err(), "the source is shut");
    let (observer, events) = observer();
    fallback(&options(&bench), observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let told = events.lock().unwrap();
    let warned = told.iter().find_map(|event| match &event.kind {
        EventKind::Warning { text } if text.contains("CONNECT could not be granted again") => Some(text.clone()),
        _ => None,
    });
    let warned = warned.unwrap_or_else(|| panic!("{told:?}"));
    assert!(warned.contains("to \"a guest\", other, friend:"), "{warned}");
    let rights = "SELECT string_agg(grantee::regrole::text, ' ' ORDER BY grantee::regrole::text) FROM pg_database, \
                  aclexplode(datacl) WHERE datname = 'shop' AND privilege_type = 'CONNECT'";
    assert_eq!(bench.source.sql("postgres", rights), "clerk postgres");
    bench.assert_clean("shop");
}
