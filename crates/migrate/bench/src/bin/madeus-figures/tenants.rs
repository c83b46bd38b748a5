//! Figs. 10 to 19: a hot spot. Three databases on one server, B with a heavy load, A and C with light ones: B or C is
//! moved to an idle server.

use crate::Page;
use crate::chart::draw;
use crate::series::{Answers, values};
use crate::single_database::panels;
use crate::testbed::{Bench, line};
use std::time::Duration;

const TENANTS: [&str; 3] = ["a", "b", "c"];
/// Loads of the three, as parts of the source's capacity with one database.
const LOADS: [f64; 3] = [0.15, 0.55, 0.15];
const SETTLE_TIME: Duration = Duration::from_secs(3);
/// Database that is moved, and the names of both cases.
const CASES: [(&str, &str, &str); 2] = [
    ("b", "Case 1: the heavy tenant B is moved (Figs. 10 to 13)", "-heavy"),
    ("c", "Case 2: the light tenant C is moved (Figs. 14 to 19)", "-light"),
];

pub(crate) fn measure(stretch: Duration, items: u32) -> Page {
    let mut text = String::new();
    let (mut all, mut drawings) = (Vec::new(), Vec::new());
    for (moved, title, name) in CASES {
        let bench = Bench::start(&TENANTS, items);
        let capacity = bench.capacity("a", items);
        let size = bench.mebibytes(moved);
        let browsers: Vec<_> =
            TENANTS.iter().zip(LOADS).map(|(tenant, load)| bench.browsers(tenant, items, capacity * load)).collect();
        std::thread::sleep(SETTLE_TIME);
        let from = stillpoint_measure::clock::now_ns();
        std::thread::sleep(stretch);
        let migration = bench.migrate(moved);
        std::thread::sleep(stretch);
        let to = stillpoint_measure::clock::now_ns();
        let answers: Vec<Answers> = browsers.into_iter().map(crate::testbed::Browsers::end).collect();
        eprintln!("{moved}: {}", migration.text());

        text += &format!(
            "## {title}\n\n{:.0}, {:.0} and {:.0} interactions a second are due, of the {capacity:.0} that the source can do with one \
             database. The one that is moved has {size:.0} MB. The migration took {}. Sessions lost: {}.\n\n",
            capacity * LOADS[0],
            capacity * LOADS[1],
            capacity * LOADS[2],
            migration.text(),
            answers.iter().map(|answers| answers.dropped).sum::<u64>()
        );
        let stretches = [
            ("before", from, migration.from_ns),
            ("during", migration.from_ns, migration.to_ns),
            ("after", migration.to_ns, to),
        ];
        let mut head = vec!["tenant".to_owned()];
        head.extend(stretches.iter().map(|(name, ..)| format!("{name}: mean response (p99), ms")));
        head.extend(stretches.iter().map(|(name, ..)| format!("{name}: answered a second")));
        head.push("failed".into());
        text += &line(&head);
        text += &line(&vec!["---".to_owned(); head.len()]);
        let mut of_tenants = serde_json::Map::new();
        for (tenant, answers) in TENANTS.iter().zip(&answers) {
            let seen = stretches.map(|(_, from, to)| answers.between(from, to));
            let mut cells = vec![tenant.to_uppercase()];
            cells.extend(seen.iter().map(|seen| seen.cells()[0].clone()));
            cells.extend(seen.iter().map(|seen| seen.cells()[1].clone()));
            cells.push(seen.iter().map(|seen| seen.failed).sum::<usize>().to_string());
            text += &line(&cells);
            let [before, during, after] = seen.map(|seen| seen.json());
            let seconds = values(&answers.points(from, to));
            let of = serde_json::json!({ "before": before, "during": during, "after": after, "seconds": seconds });
            of_tenants.insert((*tenant).to_owned(), of);
        }
        text.push('\n');
        let marked = Some(((migration.from_ns - from) as f64 / 1e9, (migration.to_ns - from) as f64 / 1e9));
        let named: Vec<(&str, &Answers)> = TENANTS.into_iter().zip(&answers).collect();
        let drawn: Vec<_> = named
            .iter()
            .flat_map(|one| panels(&format!(" of {}", one.0.to_uppercase()), &[*one], (from, to), marked))
            .collect();
        drawings.push((name, draw(&drawn)));
        all.push(serde_json::json!({
            "moved": moved, "capacity": capacity, "mebibytes": size, "migration_s": migration.seconds(),
            "over": migration.is_over(), "paused_ms": migration.paused_ms(), "marked": marked, "tenants": of_tenants,
        }));
    }
    Page { text, values: all.into(), drawings }
}
