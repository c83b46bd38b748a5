//! A client writes to the source without the proxy, from before the migration until after it: every acknowledged row is
//! on the target, and every other write was refused with an error that gives the reason.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use stillpoint_measure::postgres::Isolation;
use stillpoint_migrate_tests::{Fault, Moment, Testbed, Trial};
use stillpoint_testing::{postgresql::available, wait::until};
use tokio_postgres::{Client, Error, NoTls};

/// Results that a writer got.
#[derive(Debug, Default)]
struct WriterResult {
    acknowledged: BTreeSet<i32>,
    /// The writer got no result for these.
    doubtful: BTreeSet<i32>,
    /// SQLSTATEs of all refusals.
    refusals: BTreeSet<String>,
}

struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<WriterResult>,
}

impl Writer {
    /// Writes numbers from `first` on, each in a transaction of this length.
    fn start(port: u16, first: i32, lasting: Duration) -> Writer {
        let stop = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(write(port, first, lasting, &over))
        });
        Writer { stop, thread }
    }

    fn end(self) -> WriterResult {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

async fn write(port: u16, first: i32, lasting: Duration, over: &AtomicBool) -> WriterResult {
    let (mut told, mut number) = (WriterResult::default(), first);
    while !over.load(Ordering::Relaxed) {
        let place = format!("host=127.0.0.1 port={port} user=postgres dbname=shop application_name=batch");
        let (client, connection) = match tokio_postgres::connect(&place, NoTls).await {
            Ok(connected) => connected,
            Err(error) => {
                note(&mut told, &error);
                tokio::time::sleep(Duration::from_millis(2)).await;
                continue;
            }
        };
        let connection = tokio::spawn(connection);
        while !over.load(Ordering::Relaxed) {
            number += 1;
            match insert(&client, number, lasting).await {
                Ok(()) => drop(told.acknowledged.insert(number)),
                Err(error) => {
                    told.doubtful.insert(number);
                    note(&mut told, &error);
                    break;
                }
            }
        }
        drop(client);
        let _ = connection.await;
    }
    told
}

/// Inserts as a superuser that overrides every default against its writes.
async fn insert(client: &Client, number: i32, lasting: Duration) -> Result<(), Error> {
    client.batch_execute(&format!("BEGIN READ WRITE; INSERT INTO bypass VALUES ({number})")).await?;
    tokio::time::sleep(lasting).await;
    client.batch_execute("COMMIT").await
}

fn note(told: &mut WriterResult, error: &Error) {
    told.refusals.extend(error.code().map(|code| code.code().to_owned()));
}

#[test]
fn what_bypasses_the_proxy_is_on_the_target_or_refused() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    testbed.source.sql("shop", "CREATE TABLE bypass (n int PRIMARY KEY)");
    let port = testbed.source.port();
    let writers = [(0, 0), (1_000_000, 30), (2_000_000, 0)]
        .map(|(first, ms)| Writer::start(port, first, Duration::from_millis(ms)));
    until("the writers to write", || (testbed.source.sql("shop", "SELECT count(*) FROM bypass") != "0").then_some(()));

    let checked = testbed.ask(&["check"]);
    let findings = checked["findings"].as_array().expect("check lists what it found").clone();
    let named = |finding: &serde_json::Value| {
        finding["kind"] == "session" && finding["name"].as_str().is_some_and(|name| name.contains("batch of postgres"))
    };
    assert!(findings.iter().any(named), "check names those who bypass the proxy: {checked}");

    let moment = Moment { phase: None, after: Duration::ZERO };
    let isolation = Isolation::ReadCommitted;
    let ended = Trial { back: false, fault: Fault::None, moment, isolation, seed: 3 }.run(&mut testbed);
    let warned = ended.events.iter().any(|event| format!("{event:?}").contains("batch of postgres"));
    assert!(warned, "run tells whom it ended: {:?}", ended.events);

    let there: BTreeSet<i32> =
        testbed.target.sql("shop", "SELECT n FROM bypass").lines().map(|line| line.parse().unwrap()).collect();
    for writer in writers {
        let told = writer.end();
        println!("{} acknowledged, {:?}", told.acknowledged.len(), told.refusals);
        let lost: Vec<_> = told.acknowledged.difference(&there).collect();
        assert!(lost.is_empty(), "acknowledged and not on the target: {lost:?}");
        assert!(told.acknowledged.len() > 5, "{told:?}");
        // The database does not accept connections. A session that was ended while idle gets no reason.
        assert!(told.refusals.contains("55000"), "{:?}", told.refusals);
        assert!(told.doubtful.len() < 10, "{:?}", told.doubtful);
    }
    let wrong = testbed.source.try_sql("shop", "INSERT INTO bypass VALUES (-1)").unwrap_err();
    assert!(wrong.contains("not currently accepting connections"), "{wrong}");
}
