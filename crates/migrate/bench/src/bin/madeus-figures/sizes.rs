//! Fig. 9: the time of a migration by the size of its database, under load.

use crate::Page;
use crate::chart::{Panel, draw};
use crate::testbed::{Bench, line};
use std::time::Duration;

/// Sizes, as fractions of the largest.
const PARTS: [u32; 4] = [8, 4, 2, 1];
/// Load as a part of the source's capacity.
const LOAD: f64 = 0.5;
/// Phases as columns, in the paper's steps: snapshot, creating, propagating, switching over.
const PHASES: [&str; 6] = ["snapshot", "copy", "catch-up", "compare", "prepare", "switch-over"];

pub(crate) fn measure(stretch: Duration, items: u32) -> Page {
    let mut text = String::new();
    let head = ["MB", "due a second", "whole, s"].iter().chain(&PHASES).map(|name| (*name).to_owned());
    let head: Vec<String> = head.chain(["paused, ms".to_owned(), "failed".to_owned()]).collect();
    text += &line(&head);
    text += &line(&vec!["---".to_owned(); head.len()]);
    let (mut values, mut points) = (Vec::new(), vec![(0.0, 0.0)]);
    for part in PARTS {
        let items = (items / part).max(1000);
        let bench = Bench::start(&["shop"], items);
        let due = bench.capacity("shop", items) * LOAD;
        let browsers = bench.browsers("shop", items, due);
        std::thread::sleep(stretch);
        let size = bench.mebibytes("shop");
        let migration = bench.migrate("shop");
        let answers = browsers.end();
        let failed = answers.between(migration.from_ns, migration.to_ns).failed;
        let phases = migration.phases();
        let took = |wanted: &str| -> f64 {
            let of = phases.iter().filter(|(phase, ..)| phase == wanted);
            of.map(|(_, from, to)| (to - from) as f64 / 1e9).sum()
        };
        eprintln!("{size:.0} MB: {}", migration.text());
        let mut cells = vec![format!("{size:.0}"), format!("{due:.0}")];
        cells.push(if migration.is_over() { format!("{:.1}", migration.seconds()) } else { migration.text() });
        cells.extend(PHASES.map(|phase| format!("{:.2}", took(phase))));
        cells.push(migration.paused_ms().map_or_else(|| "-".into(), |ms| format!("{ms:.0}")));
        cells.push(failed.to_string());
        text += &line(&cells);
        if migration.is_over() {
            points.push((size, migration.seconds()));
        }
        let phases: serde_json::Map<_, _> =
            PHASES.iter().map(|phase| ((*phase).to_owned(), took(phase).into())).collect();
        values.push(serde_json::json!({
            "mebibytes": size, "due": due, "seconds": migration.seconds(), "over": migration.is_over(),
            "phases": phases, "paused_ms": migration.paused_ms(), "failed": failed,
        }));
    }
    text += &format!(
        "\nUnder a load of {:.0} % of what the source can do. `copy` contains indexes and statistics; what is left of the whole is \
         looking at clients undisturbed (2 s), checking and clearing up. With the default `--share` rows are copied no faster \
         than clients bear.\n",
        LOAD * 100.0
    );
    let panel = Panel {
        title: "time of the migration, s".into(),
        across: "size of the database, MB",
        lines: vec![("migrate run".into(), points)],
        marked: None,
    };
    Page { text, values: values.into(), drawings: vec![("", draw(&[panel]))] }
}
