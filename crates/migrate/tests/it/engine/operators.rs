//! Two operators and one database: the second is refused, no matter where each has its journal.

use crate::engine::support::{Bench, observer};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_engine::{
    Error, Failure, Observer, Options, Outcome, State, abort, check, fallback, finish, run, status,
};
use stillpoint_testing::postgresql::available;

/// First halves of the keys of the locks that a command holds beside the database.
const COMMANDS: u32 = 0x0053_5443;
const MIGRATIONS: u32 = 0x0053_544e;

#[track_caller]
fn assert_refused(failure: &Failure) {
    assert!(matches!(&failure.error, Error::AtWork { who, .. } if who.starts_with("process ")), "{failure:?}");
    assert!(failure.error.is_refusal() && failure.state == State::Untouched, "{failure:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_operator_is_refused_whose_journal_is_elsewhere() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::with_shop());
    let first = Options { share: 0.0, ..bench.options("shop") };
    let second = Options { state: bench.dir.path().join("elsewhere"), ..first.clone() };
    let (told, handle) = (Arc::new(Mutex::new(Vec::new())), tokio::runtime::Handle::current());
    let heard = Arc::clone(&told);
    let acting: Observer = Arc::new(move |event: Event| {
        if !matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            return;
        }
        let second = second.clone();
        let refused = tokio::task::block_in_place(|| {
            handle.block_on(async {
                let at_work = status(&second).await.expect("servers answer").at_work;
                assert!(at_work.is_some_and(|who| who.starts_with("process ")));
                [run(&second, observer().0).await.unwrap_err(), abort(&second).await.unwrap_err()]
            })
        });
        heard.lock().unwrap().extend(refused);
    });
    let outcome = run(&first, acting).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "the first is not disturbed: {outcome:?}");
    let told = told.lock().unwrap();
    assert_eq!(told.len(), 2, "the second had its turn");
    told.iter().for_each(assert_refused);
}

/// The source does not notice the death of a command whose network is stalled: its session stays, with all that it
/// held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_died_keeps_nothing_from_the_next_one_with_its_journal() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let options = Options { share: 0.0, ..bench.options("shop") };
    let compared = Arc::new(AtomicBool::new(false));
    let comparing = Arc::clone(&compared);
    let acting: Observer = Arc::new(move |event: Event| {
        let is_there = matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare");
        comparing.fetch_or(is_there, SeqCst);
    });
    let until_compared = async {
        while !compared.load(SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // Dropped in the middle, as by a kill.
    tokio::select! {
        ended = run(&options, acting) => panic!("{ended:?}"),
        () = until_compared => {}
    }
    let record = status(&options).await.unwrap().record.expect("a migration that was cut off");
    let place = format!("{} application_name='stillpoint migrate'", bench.source.conninfo("postgres"));
    let (left, connection) = tokio_postgres::connect(&place, tokio_postgres::NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    let number = u32::from_str_radix(&record.migration, 16).unwrap().cast_signed();
    let locks =
        format!("SELECT pg_advisory_lock({COMMANDS}, hashtext('shop')), pg_advisory_lock({MIGRATIONS}, {number})");
    left.batch_execute(&locks).await.unwrap();

    let elsewhere = Options { state: bench.dir.path().join("elsewhere"), ..options.clone() };
    assert_refused(&run(&elsewhere, observer().0).await.unwrap_err());
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert!(connection.await.unwrap().is_err(), "its session was ended");
}

/// Query for the session that holds a command's lock.
const HOLDER: &str = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = 5461059 AND granted";

fn end_holder(bench: &Bench) -> String {
    bench.source.sql("postgres", &format!("SELECT count(pg_terminate_backend(pid, 10000)) FROM ({HOLDER}) h"))
}

/// An observer that ends the session with the lock before clients are moved, and the events that it saw.
fn losing(bench: &Arc<Bench>) -> (Observer, Arc<Mutex<Vec<Event>>>) {
    let (observer, events) = observer();
    let acting = Arc::clone(bench);
    let losing: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "switch-over") {
            assert_eq!(end_holder(&acting), "1");
        }
        observer(event);
    });
    (losing, events)
}

fn warned_of_loss(events: &[Event]) -> bool {
    events.iter().any(|event| matches!(&event.kind, EventKind::Warning { text } if text.contains("lock")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_lost_is_taken_again_and_held_when_clients_go_over() {
    if !available() {
        return;
    }
    assert_eq!(COMMANDS, 5_461_059);
    let bench = Arc::new(Bench::with_shop());
    let options = Options { share: 0.0, ..bench.options("shop") };
    let (observer, events) = losing(&bench);
    let outcome = run(&options, observer).await;
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    assert!(warned_of_loss(&events.lock().unwrap()), "{events:?}");
    let (observer, events) = losing(&bench);
    let outcome = fallback(&options, observer).await;
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    assert!(warned_of_loss(&events.lock().unwrap()), "{events:?}");
    bench.assert_clean("shop");
}

/// A pause in which the lock is lost has no effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_do_not_go_over_without_the_lock() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let options = Options { share: 0.0, pause_attempts: 1, ..bench.options("shop") };
    bench.fake_proxy.lock().unwrap().at_pause = vec![
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND classid = 5461059 AND granted",
    ];
    let (observer, events) = observer();
    match run(&options, observer).await {
        Err(failure) => {
            assert!(matches!(&failure.error, Error::LockLost { .. }), "{failure:?}");
            assert_eq!(failure.state, State::OnSource);
            assert!(!bench.fake_proxy.lock().unwrap().asked.contains(&"switch".to_owned()));
            bench.assert_clean("shop");
        }
        // The loss was noticed, and the lock taken again, in the same moment.
        Ok(outcome) => assert!(warned_of_loss(&events.lock().unwrap()), "{outcome:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_another_command_has_by_then_ends_the_run() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let options = Options { share: 0.0, ..bench.options("shop") };
    let place = format!("{} application_name='another command'", bench.source.conninfo("postgres"));
    let (other, connection) = tokio_postgres::connect(&place, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let handle = tokio::runtime::Handle::current();
    let acting: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            let taken = format!(
                "SELECT pg_terminate_backend(pid, 10000) FROM ({HOLDER}) h; \
                 SELECT pg_advisory_lock({COMMANDS}, hashtext('shop'))"
            );
            tokio::task::block_in_place(|| handle.block_on(other.batch_execute(&taken))).unwrap();
        }
    });
    let failure = run(&options, acting).await.unwrap_err();
    assert!(matches!(&failure.error, Error::LockLost { why, .. } if why.contains("another command")), "{failure:?}");
    assert_eq!(failure.state, State::OnSource);
    assert!(!bench.fake_proxy.lock().unwrap().asked.contains(&"switch".to_owned()));
    bench.assert_clean("shop");
}

#[track_caller]
fn assert_owned(failure: &Failure, options: &Options) {
    let journal = options.state.display().to_string();
    assert!(matches!(&failure.error, Error::Owned { owner, .. } if owner.ends_with(&journal)), "{failure:?}");
    assert!(failure.error.is_refusal() && failure.state == State::Untouched, "{failure:?}");
}

/// Number of owners that the source names.
fn owners(bench: &Bench) -> String {
    bench.source.sql("postgres", "SELECT count(*) FROM pg_namespace WHERE nspname = 'stillpoint_migrations'")
}

/// No command is running, and no command with another journal may run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn between_two_commands_a_database_is_of_one_journal() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let first = Options { share: 0.0, ..bench.options("shop") };
    let second = Options { state: bench.dir.path().join("elsewhere"), ..first.clone() };
    run(&first, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_owned(&run(&second, observer().0).await.unwrap_err(), &first);
    assert_owned(&abort(&second).await.unwrap_err(), &first);
    for options in [&first, &second] {
        let owner = status(options).await.unwrap().owner.expect("the source tells");
        assert!(owner.journal.ends_with(&first.state.display().to_string()), "{owner:?}");
    }
    fallback(&first, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(owners(&bench), "0");
    // The database is free again, for a migration of any journal.
    run(&second, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    finish(&second).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(owners(&bench), "0");
}

/// An interrupted migration is resumed and removed by its own journal, or by its number if the journal is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_without_its_journal_is_removed_by_its_number() {
    if !available() {
        return;
    }
    let bench = Bench::with_shop();
    let options = Options { share: 0.0, ..bench.options("shop") };
    let over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&over);
    let acting: Observer = Arc::new(move |event: Event| {
        seen.fetch_or(matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare"), SeqCst);
    });
    let until_over = async {
        while !over.load(SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        ended = run(&options, acting) => panic!("{ended:?}"),
        () = until_over => {}
    }
    let elsewhere = Options { state: bench.dir.path().join("elsewhere"), ..options.clone() };
    assert_owned(&run(&elsewhere, observer().0).await.unwrap_err(), &options);
    assert_owned(&abort(&elsewhere).await.unwrap_err(), &options);
    let refusals = check(&elsewhere).await.unwrap().refusals();
    assert!(refusals.iter().any(|refusal| refusal.starts_with("migration ")), "{refusals:?}");
    let slots = "SELECT count(*) FROM pg_replication_slots";
    assert_eq!(bench.source.sql("postgres", slots), "1", "it is still there to go on from");

    let number = status(&elsewhere).await.unwrap().owner.expect("the source tells").migration;
    let wrong = Options { without_journal: Some("0".into()), ..elsewhere.clone() };
    assert_owned(&abort(&wrong).await.unwrap_err(), &options);
    let lost = Options { without_journal: Some(number), ..elsewhere.clone() };
    assert_eq!(abort(&lost).await.unwrap_or_else(|failure| panic!("{failure:?}")), State::OnSource);
    assert_eq!((bench.source.sql("postgres", slots), owners(&bench)), ("0".into(), "0".into()));
    // Changes that only the journal knew.
    bench.target.sql("postgres", "DROP DATABASE shop WITH (FORCE)");
    bench.source.sql("shop", "ALTER TABLE pgbench_history REPLICA IDENTITY DEFAULT");
    // If the journal is found again, it describes nothing that is left: by now it could belong to another migration.
    let found = run(&options, observer().0).await.unwrap_err();
    assert!(matches!(&found.error, Error::WrongPhase(why) if why.contains("by its number")), "{found:?}");
    assert_eq!(found.state, State::Untouched);
    assert_eq!(abort(&options).await.unwrap_or_else(|failure| panic!("{failure:?}")), State::OnSource);
    bench.assert_clean("shop");
    run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
}

/// A role that may make schemas has made the product's schemas before, with code that would run with the command's
/// rights.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_of_our_names_that_another_role_has_made_are_refused() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE ROLE app; GRANT CREATE ON DATABASE postgres TO app");
    bench.source.sql("postgres", "CREATE DATABASE shop OWNER app");
    bench.target.sql("postgres", "CREATE ROLE app");
    bench.source.sql("shop", "CREATE TABLE item (id int PRIMARY KEY)");
    let rises = "BEGIN ALTER ROLE app SUPERUSER; RETURN";
    let traps = [
        (
            "shop",
            "stillpoint",
            format!(
                "CREATE TABLE stillpoint.position (position bigint); CREATE FUNCTION stillpoint.rise() RETURNS trigger \
                 LANGUAGE plpgsql AS '{rises} NEW; END'; CREATE TRIGGER rise BEFORE INSERT ON stillpoint.position \
                 FOR EACH ROW EXECUTE FUNCTION stillpoint.rise()"
            ),
        ),
        (
            "postgres",
            "stillpoint_migrations",
            format!(
                "CREATE FUNCTION stillpoint_migrations.rise() RETURNS text LANGUAGE plpgsql AS '{rises} 1; END'; \
                 CREATE VIEW stillpoint_migrations.owners AS SELECT 'shop' AS database, stillpoint_migrations.rise() AS migration, \
                 '' AS journal, now() AS since"
            ),
        ),
    ];
    for (database, schema, trap) in traps {
        bench.source.sql(database, &format!("SET ROLE app; CREATE SCHEMA {schema}; {trap}"));
        let failure = run(&bench.options("shop"), observer().0).await.unwrap_err();
        assert!(matches!(&failure.error, Error::Refused(why) if why[0].contains(schema)), "{failure:?}");
        assert_eq!(failure.state, State::Untouched);
        assert_eq!(bench.source.sql("postgres", "SELECT rolsuper FROM pg_roles WHERE rolname = 'app'"), "f");
        bench.source.sql(database, &format!("DROP SCHEMA {schema} CASCADE"));
    }
    let outcome = run(&bench.options("shop"), observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
}
