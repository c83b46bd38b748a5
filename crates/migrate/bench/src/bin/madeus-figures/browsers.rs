//! Fig. 5: numbers of browsers for a light, a medium and a heavy load.

use crate::Page;
use crate::chart::{Panel, draw};
use crate::testbed::{Bench, line, number_of_browsers};
use std::time::Duration;
use stillpoint_migrate_bench::processors::processors;

/// Loads, in hundredths of the source's capacity.
const PARTS: [u32; 8] = [10, 25, 40, 55, 70, 85, 95, 105];
/// Time that is not counted: clients have connected, and nothing is in memory yet.
const SETTLE_TIME: Duration = Duration::from_secs(2);

pub(crate) fn measure(stretch: Duration, items: u32) -> Page {
    let bench = Bench::start(&["shop"], items);
    let capacity = bench.capacity("shop", items);
    let mut text = format!(
        "The source alone, through the proxy, can do {capacity:.0} interactions a second; the database has {:.0} MB.\n\n",
        bench.mebibytes("shop")
    );
    text +=
        &line(&["browsers", "due a second", "answered a second", "mean, ms", "p99, ms", "failed"].map(str::to_owned));
    text += &line(&["---"; 6].map(str::to_owned));
    let (mut values, mut means, mut p99s) = (Vec::new(), Vec::new(), Vec::new());
    for part in PARTS {
        let due = capacity * f64::from(part) / 100.0;
        let browsers = bench.browsers("shop", items, due);
        std::thread::sleep(SETTLE_TIME);
        let from = stillpoint_measure::clock::now_ns();
        std::thread::sleep(stretch);
        let to = stillpoint_measure::clock::now_ns();
        let answers = browsers.end();
        let seen = answers.between(from, to);
        let count = number_of_browsers(due);
        eprintln!("{part} %: {count} browsers, {:.1} ms", seen.mean_ms());
        text += &line(&[
            count.to_string(),
            format!("{due:.0} ({part} %)"),
            format!("{:.0}", seen.rate()),
            format!("{:.1}", seen.mean_ms()),
            format!("{:.1}", seen.percentile_ms(99)),
            seen.failed.to_string(),
        ]);
        means.push((f64::from(count), seen.mean_ms()));
        p99s.push((f64::from(count), seen.percentile_ms(99)));
        values.push(serde_json::json!({ "browsers": count, "due": due, "part": part, "seen": seen.json() }));
    }
    text += &format!(
        "\n{:.0} s for each line. A browser thinks 200 ms on average from due time to due time, whether it has been answered or \
         not: where more is due than can be done the response time has no limit, and grows with the time that is measured. \
         The paper's browsers wait for their answers. Its light, medium and heavy loads answer within 0.1 s, 2 s and more.\n",
        stretch.as_secs_f64()
    );
    let panel = Panel {
        title: "response time, ms".into(),
        across: "browsers",
        lines: vec![("mean".into(), means), ("p99".into(), p99s)],
        marked: None,
    };
    let values = serde_json::json!({ "capacity": capacity, "processors": processors(), "loads": values });
    Page { text, values, drawings: vec![("", draw(&[panel]))] }
}
