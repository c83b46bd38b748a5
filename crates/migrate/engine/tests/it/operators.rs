//! Two operators and one database: the second is refused, wherever each has its journal.

use crate::support::{Bench, observer};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_engine::{Error, Failure, Observer, Options, Outcome, State, abort, run, status};
use stillpoint_migrate_testbed::available;

/// First halves of the keys of the locks that a command holds beside the database.
const COMMANDS: u32 = 0x0053_5443;
const MIGRATIONS: u32 = 0x0053_544e;

fn bench() -> Bench {
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    bench
}

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
    let bench = Arc::new(bench());
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

/// The source does not notice that a command has died whose network stands still: its session stays, with what it held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_died_keeps_nothing_from_the_next_one_with_its_journal() {
    if !available() {
        return;
    }
    let bench = bench();
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
    // Dropped in the midst of it, as by a kill.
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
