//! A command that holds, and the orders that it gets.

use crate::engine::support::{Bench, observer};
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_engine::{
    Condition, Error, Options, Outcome, Phase, State, SwitchHooks, SwitchOrder, order_switch, run, status,
};
use stillpoint_testing::postgresql::available;

async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn when(conditions: &str) -> SwitchOrder {
    SwitchOrder { when: Condition::all(conditions).unwrap(), ..SwitchOrder::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_stay_until_the_switch_is_ordered_and_no_hook_vetoes() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::with_shop());
    let told = bench.dir.path().join("told");
    let veto = bench.dir.path().join("veto");
    std::fs::write(&veto, "").unwrap();
    let hooks = SwitchHooks {
        before_switch: Some(format!("cat >> {}; test ! -e {}", told.display(), veto.display())),
        after_switch: Some(format!("cat >> {}; exit 7", told.display())),
    };
    let options = Options { share: 0.0, hold: true, hooks, ..bench.options("shop") };
    let nothing = order_switch(&options, &SwitchOrder::default()).await.unwrap_err();
    assert!(matches!(&nothing, Error::WrongPhase(why) if why.contains("run --hold")), "{nothing}");
    let (observer, events) = observer();
    let holder = std::thread::spawn({
        let options = options.clone();
        move || {
            let ended = tokio::runtime::Runtime::new().unwrap().block_on(run(&options, observer));
            ended.unwrap_or_else(|failure| panic!("{failure:?}"))
        }
    });
    let holding = async || status(&options).await.unwrap().holding;
    let first = until("a command that holds", holding).await;
    assert_eq!((first.order, first.why_not.as_str()), (None, "no switch is ordered"));
    assert!(first.load.lag_s < 5.0, "{:?}", first.load);

    // What is written meanwhile arrives.
    bench.source.sql("shop", "INSERT INTO pgbench_history (tid, delta) VALUES (1, 4711)");
    order_switch(&options, &when("lag<1m and tps>1000000")).await.unwrap();
    let waiting = until("the order", async || holding().await.filter(|now| now.order.is_some())).await;
    assert_eq!(waiting.why_not, "tps>1000000 does not hold");
    order_switch(&options, &SwitchOrder::default()).await.unwrap();
    let vetoed = until("a veto", async || holding().await.filter(|now| now.why_not.contains("vetoed"))).await;
    assert!(vetoed.why_not.contains("before-switch"), "{vetoed:?}");
    until("the order to be removed", async || holding().await.filter(|now| now.order.is_none())).await;
    assert_eq!(status(&options).await.unwrap().record.unwrap().phase, Phase::Following, "clients are where they were");
    assert!(!holder.is_finished());

    std::fs::remove_file(&veto).unwrap();
    order_switch(&options, &when("lag<1m")).await.unwrap();
    let outcome = tokio::task::spawn_blocking(|| holder.join().unwrap()).await.unwrap();
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    bench.look_into_source("shop");
    assert_eq!(bench.target.sql("shop", "SELECT count(*) FROM pgbench_history WHERE delta = 4711"), "1");
    let told = std::fs::read_to_string(&told).unwrap();
    let lines: Vec<serde_json::Value> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let events_told: Vec<&str> = lines.iter().map(|line| line["event"].as_str().unwrap()).collect();
    assert_eq!(events_told, ["before-switch", "before-switch", "after-switch"]);
    assert!(
        lines.iter().all(|line| line["database"] == "shop") && lines[2]["measured"]["paused_us"].as_u64() > Some(0)
    );
    let warned = format!("{:?}", events.lock().unwrap());
    assert!(
        warned.contains("the hook after-switch vetoed") && warned.contains("clients stay on the target"),
        "{warned}"
    );
    assert_eq!(status(&options).await.unwrap().holding, None);
}

/// Without a hold a veto ends the migration, and an order outlives the command that held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_veto_ends_a_migration_that_does_not_hold() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::with_shop());
    let hooks = SwitchHooks { before_switch: Some("exit 3".into()), ..SwitchHooks::default() };
    let options = Options { share: 0.0, compare: false, hooks, ..bench.options("shop") };
    let failure = run(&options, observer().0).await.unwrap_err();
    assert!(matches!(&failure.error, Error::Vetoed { .. }), "{failure:?}");
    assert_eq!(failure.state, State::OnSource);
    bench.assert_clean("shop");
}
