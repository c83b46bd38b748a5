//! Figs. 7 and 8: response time and throughput of one database before, during and after its migration under heavy load.

use crate::Page;
use crate::chart::{Panel, draw};
use crate::series::{Answers, values};
use crate::testbed::{Bench, line};
use std::time::Duration;

/// Load as a part of the source's capacity.
const HEAVY: f64 = 0.7;
const SETTLE_TIME: Duration = Duration::from_secs(3);

pub(crate) fn measure(stretch: Duration, items: u32) -> Page {
    let bench = Bench::start(&["shop"], items);
    let capacity = bench.capacity("shop", items);
    let size = bench.mebibytes("shop");
    let browsers = bench.browsers("shop", items, capacity * HEAVY);
    std::thread::sleep(SETTLE_TIME);
    let from = stillpoint_measure::clock::now_ns();
    std::thread::sleep(stretch);
    let migration = bench.migrate("shop");
    std::thread::sleep(stretch);
    let to = stillpoint_measure::clock::now_ns();
    let answers = browsers.end();

    let mut text = format!(
        "One database of {size:.0} MB; {:.0} interactions a second are due, {:.0} % of the {capacity:.0} that the source can do. \
         The migration took {}. Sessions lost: {}.\n\n",
        capacity * HEAVY,
        HEAVY * 100.0,
        migration.text(),
        answers.dropped
    );
    text += &line(&["", "took, s", "mean response (p99), ms", "answered a second", "failed"].map(str::to_owned));
    text += &line(&["---"; 5].map(str::to_owned));
    let mut stretches = vec![("before".to_owned(), from, migration.from_ns)];
    stretches.extend(migration.phases());
    stretches.push(("after".into(), migration.to_ns, to));
    let mut seen_in = Vec::new();
    for (name, begun, over) in &stretches {
        let seen = answers.between(*begun, *over);
        let [response, rate] = seen.cells();
        let took = format!("{:.2}", (over - begun) as f64 / 1e9);
        text += &line(&[name.clone(), took, response, rate, seen.failed.to_string()]);
        seen_in.push(serde_json::json!({ "stretch": name, "seen": seen.json() }));
    }
    text += "\nA response counts from when its interaction was due, including all waits. Values second by second are in the \
             drawing, the migration in grey.\n";
    let marked = Some(((migration.from_ns - from) as f64 / 1e9, (migration.to_ns - from) as f64 / 1e9));
    let points = answers.points(from, to);
    let values = serde_json::json!({
        "capacity": capacity, "mebibytes": size, "migration_s": migration.seconds(), "over": migration.is_over(),
        "paused_ms": migration.paused_ms(), "marked": marked, "stretches": seen_in, "seconds": values(&points),
    });
    Page { text, values, drawings: vec![("", draw(&panels("", &[("shop", &answers)], (from, to), marked)))] }
}

/// Response times and throughput of databases over time.
pub(crate) fn panels(
    of: &str,
    answers: &[(&str, &Answers)],
    (from, to): (u64, u64),
    marked: Option<(f64, f64)>,
) -> [Panel; 2] {
    let lines = |value: fn(&crate::series::Point) -> f64| {
        let line = |(name, answers): &(&str, &Answers)| {
            let points = answers.points(from, to).iter().map(|point| (point.at_s, value(point))).collect();
            ((*name).to_owned(), points)
        };
        answers.iter().map(line).collect()
    };
    let across = "seconds";
    [
        Panel { title: format!("mean response time{of}, ms"), across, lines: lines(|point| point.response_ms), marked },
        Panel { title: format!("answered a second{of}"), across, lines: lines(|point| point.rate), marked },
    ]
}
