//! Fig. 6: the time of a whole migration in each of the paper's schedules, and from the source's log, by load.

use crate::Page;
use crate::chart::{Panel, draw};
use crate::testbed::line;
use std::process::Stdio;
use std::time::{Duration, Instant};
use stillpoint_migrate_tests::recording::{ProxiedServers, busy};
use stillpoint_migrate_tests::stillpoint;

const SETTINGS: [&str; 5] =
    ["wal_level=logical", "fsync=on", "shared_buffers=256MB", "max_wal_size=2GB", "max_connections=300"];
/// Clients of each load; each client thinks for `THINK` between two transactions.
const LOADS: [(&str, usize); 3] = [("light", 4), ("medium", 16), ("heavy", 48)];
const THINK: Duration = Duration::from_millis(100);
/// The paper's schedules and the source's log, each without the throttle; and the log with it.
const REPLAY_VARIANTS: [(&str, &[&str]); 6] = [
    ("b-all", &["--capture", "statements", "--schedule", "b-all", "--share", "0"]),
    ("b-min", &["--capture", "statements", "--schedule", "b-min", "--share", "0"]),
    ("b-con", &["--capture", "statements", "--schedule", "b-con", "--share", "0"]),
    ("lsir", &["--capture", "statements", "--schedule", "lsir", "--share", "0"]),
    ("log", &["--share", "0"]),
    ("log, gently", &[]),
];
/// Rows of a table without writes, for each thousand items; 1 MB or so.
const FILLER_ROWS: u32 = 2500;
/// Time for which clients work before anything begins.
const SETTLE_TIME: Duration = Duration::from_secs(3);
/// Limit of a migration, in lengths of the stretch; a longer one is aborted.
const STRETCHES_MAX: u32 = 3;

/// One migration.
struct MigrationTime {
    whole_s: f64,
    over: bool,
    text: String,
    /// Transactions a second of the clients, from beginning to end.
    load: f64,
}

pub(crate) fn measure(stretch: Duration, items: u32) -> Page {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build();
    let runtime = runtime.unwrap_or_else(|error| panic!("a runtime: {error}"));
    let names: Vec<&str> = REPLAY_VARIANTS.iter().map(|(name, _)| *name).collect();
    let mut text = line(&std::iter::once("load").chain(names.iter().copied()).map(str::to_owned).collect::<Vec<_>>());
    text += &line(&vec!["---".to_owned(); names.len() + 1]);
    let (mut values, mut lines) = (Vec::new(), vec![Vec::new(); names.len()]);
    for (load, clients) in LOADS {
        let mut all: Vec<MigrationTime> = Vec::new();
        for (name, words) in REPLAY_VARIANTS {
            all.push(runtime.block_on(migrate(words, clients, stretch * STRETCHES_MAX, items)));
            eprintln!("{load}, {name}: {}", all[all.len() - 1].text);
        }
        let mut cells = vec![format!("{load}: {clients} clients")];
        cells.extend(all.iter().map(|took| took.text.clone()));
        text += &line(&cells);
        for (points, took) in lines.iter_mut().zip(&all) {
            if took.over {
                points.push((clients as f64, took.whole_s));
            }
        }
        let of: serde_json::Map<_, _> = names
            .iter()
            .zip(&all)
            .map(|(name, took)| {
                let value = serde_json::json!({ "seconds": took.whole_s, "over": took.over, "load": took.load });
                ((*name).to_owned(), value)
            })
            .collect();
        values.push(serde_json::json!({ "load": load, "clients": clients, "migrations": of }));
    }
    text += &format!("\n{}\nGiven up: after {:.0} s.\n", LEGEND, (stretch * STRETCHES_MAX).as_secs_f64());
    let lines = names.iter().map(|name| (*name).to_owned()).zip(lines).collect();
    let panel = Panel { title: "time of the migration, s".into(), across: "clients", lines, marked: None };
    Page { text, values: values.into(), drawings: vec![("", draw(&[panel]))] }
}

const LEGEND: &str = "\
Seconds from the beginning of `migrate run` to its end, of one run: checks, snapshot, copy, catch-up, comparing both sides,
sending clients over, and a way back; then transactions a second that clients committed meanwhile. Half of the transactions order
something (three reads, two inserts, two updates), the others read, all at REPEATABLE READ; clients think 100 ms on average. In
the paper's schedules it is fed by the statements that the proxy captures, with as many players as clients; the others read the
source's log. The last one looks at clients undisturbed for 2 s, and spares them. Players' commits do not wait for the disk in any
of them, as they do in the paper: what that is worth is measured by `madeus-fig6`. All on the same processors.
";

fn start(items: u32) -> ProxiedServers {
    let servers = ProxiedServers::start(&SETTINGS);
    let rows = items / 1000 * FILLER_ROWS;
    servers.source.sql(
        "shop",
        &format!(
            "CREATE TABLE ballast (id int PRIMARY KEY, v text); \
             INSERT INTO ballast SELECT i, repeat(md5(i::text), 10) FROM generate_series(1, {rows}) i; ANALYZE ballast"
        ),
    );
    servers.source.sql("postgres", "CHECKPOINT");
    servers
}

async fn migrate(words: &[&str], clients: usize, limit: Duration, items: u32) -> MigrationTime {
    let servers = start(items);
    let busy = busy(&servers, clients, THINK).await;
    tokio::time::sleep(SETTLE_TIME).await;
    let mut tool = tokio::process::Command::new(stillpoint());
    tool.args(["--json", "migrate", "run"]).args(words);
    if words.contains(&"statements") {
        tool.args(["--players", &clients.to_string()]);
    }
    tool.stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    tool.arg("--source").arg(servers.source.conninfo("shop")).arg("--target").arg(servers.target.conninfo("shop"));
    tool.arg("--proxy").arg(servers.control()).arg("--state").arg(servers.dir().join("state"));
    let begun = Instant::now();
    let output = tokio::time::timeout(limit, tool.output()).await;
    let whole_s = begun.elapsed().as_secs_f64();
    let over = output.is_ok();
    if let Ok(output) = output {
        let output = output.expect("run stillpoint");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let load = busy.end().await;
    let text = if over { format!("{whole_s:.1}; {load:.0}") } else { format!("given up; {load:.0}") };
    MigrationTime { whole_s, over, text, load }
}
