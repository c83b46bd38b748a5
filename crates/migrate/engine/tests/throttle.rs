//! A migration goes slower while clients suffer, and faster when they do not.

mod support;

use std::sync::{Arc, Mutex};
use stillpoint_events::EventKind;
use stillpoint_migrate_engine::{Observer, Outcome, run};
use stillpoint_migrate_testbed::available;
use support::{Bench, FakeClients};

/// Statements a second of clients, and how many microseconds each takes.
type Fare = (f64, u64);

const USUAL: Fare = (1000.0, 3000);
/// Bytes a second that let them recover.
const BEARABLE: u64 = 11 << 20;
/// Of a kilobyte: enough for it to fall below that, and to rise again.
const ROWS: u32 = 220_000;

#[tokio::test]
async fn rows_are_copied_no_faster_than_throughput_bears() {
    copied_with_care((400.0, 3000)).await;
}

#[tokio::test]
async fn rows_are_copied_no_faster_than_waits_bear() {
    copied_with_care((1000.0, 40_000)).await;
}

async fn copied_with_care(suffering: Fare) {
    let Some(rates) = copied(move |bytes_per_s| if bytes_per_s > BEARABLE { suffering } else { USUAL }).await else {
        return;
    };
    let lowest = rates.iter().position(|rate| *rate <= BEARABLE).expect("slower while they suffer");
    assert!(rates[lowest..].windows(2).any(|pair| pair[1] > pair[0]), "faster when they do not: {rates:?}");
}

/// Migrates beside clients who fare like this while so many bytes a second are copied; what the copy was allowed.
async fn copied(fare: impl Fn(u64) -> Fare + Send + Sync + 'static) -> Option<Vec<u64>> {
    if !available() {
        return None;
    }
    let bench = Bench::start();
    bench.fill_big(ROWS);
    bench.front.lock().unwrap().clients = Some(FakeClients::at(USUAL.0, USUAL.1));
    let (front, rates) = (Arc::clone(&bench.front), Arc::new(Mutex::new((true, Vec::new()))));
    let told = Arc::clone(&rates);
    let observer: Observer = Arc::new(move |event| {
        println!("{:?}", event.kind);
        let go_at =
            |(rate, wait)| front.lock().unwrap().clients.iter_mut().for_each(|clients| clients.go_at(rate, wait));
        match event.kind {
            EventKind::Copying { bytes_per_s, .. } => go_at(fare(bytes_per_s)),
            EventKind::PhaseStarted { phase, .. } if phase == "indexes" => {
                go_at(USUAL);
                told.lock().unwrap().0 = false;
            }
            EventKind::Throttled { allowed_per_s, .. } => {
                let (copies, rates) = &mut *told.lock().unwrap();
                if *copies {
                    rates.push(allowed_per_s);
                }
            }
            _ => {}
        }
    });
    let outcome = run(&bench.options("shop"), observer).await;
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    Some(std::mem::take(&mut rates.lock().unwrap().1))
}
