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
const BEARABLE: u64 = 9 << 20;

#[tokio::test]
async fn rows_are_copied_no_faster_than_throughput_bears() {
    copied_with_care((400.0, 3000)).await;
}

#[tokio::test]
async fn rows_are_copied_no_faster_than_waits_bear() {
    copied_with_care((1000.0, 40_000)).await;
}

async fn copied_with_care(suffering: Fare) {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.fill_big();
    bench.front.lock().unwrap().clients = Some(FakeClients::at(USUAL.0, USUAL.1));
    let (front, rates) = (Arc::clone(&bench.front), Arc::new(Mutex::new(Vec::new())));
    let told = Arc::clone(&rates);
    let observer: Observer = Arc::new(move |event| {
        println!("{:?}", event.kind);
        let go_at =
            |(rate, wait)| front.lock().unwrap().clients.iter_mut().for_each(|clients| clients.go_at(rate, wait));
        match event.kind {
            EventKind::PhaseStarted { phase, .. } if phase == "copy" => go_at(suffering),
            EventKind::PhaseStarted { phase, .. } if phase == "indexes" => go_at(USUAL),
            EventKind::Throttled { allowed_per_s, .. } => {
                if allowed_per_s <= BEARABLE {
                    go_at(USUAL);
                }
                told.lock().unwrap().push(allowed_per_s);
            }
            _ => {}
        }
    });
    let outcome = run(&bench.options("shop"), observer).await;
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    let rates = rates.lock().unwrap();
    let lowest = rates.iter().position(|rate| *rate <= BEARABLE).expect("it went slower for them");
    assert!(rates[..lowest].is_sorted_by(|earlier, later| earlier > later), "slower while they suffer: {rates:?}");
    assert!(rates[lowest..].windows(2).any(|pair| pair[1] > pair[0]), "faster when they do not: {rates:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
}
