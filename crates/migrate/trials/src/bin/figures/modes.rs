//! Fig. 6: the time of a whole migration in each of the paper's modes, and of ours, by load.

use crate::Page;
use crate::chart::{Panel, draw};
use crate::scene::line;
use std::process::Stdio;
use std::time::{Duration, Instant};
use stillpoint_migrate_replay::Mode;
use stillpoint_migrate_trials::recording::{Front, busy};
use stillpoint_migrate_trials::stillpoint;

const SETTINGS: [&str; 5] =
    ["wal_level=logical", "fsync=on", "shared_buffers=256MB", "max_wal_size=2GB", "max_connections=300"];
/// Clients of each load; each thinks for so long between two transactions.
const LOADS: [(&str, usize); 3] = [("light", 4), ("medium", 16), ("heavy", 48)];
const THINK: Duration = Duration::from_millis(100);
/// The paper's modes.
const MODES: [(&str, Mode); 4] =
    [("b-all", Mode::BAll), ("b-min", Mode::BMin), ("b-con", Mode::BCon), ("lsir", Mode::Lsir)];
/// Ours, and ours with no regard for clients.
const OURS: [(&str, &[&str]); 2] = [("migrate run", &["run"]), ("migrate run --share 0", &["run", "--share", "0"])];
/// Rows of a table that nobody writes to, for each thousand items that were asked for; 1 MB or so.
const BALLAST: u32 = 2500;
/// For how long clients are at work before anything begins.
const SETTLING: Duration = Duration::from_secs(3);
/// What has not caught up after so many times the stretch is given up.
const PATIENCE: u32 = 3;

/// One migration.
struct Took {
    whole_s: f64,
    over: bool,
    text: String,
    /// Transactions a second of the clients, from beginning to end.
    load: f64,
}

pub(crate) fn measure(stretch: Duration, items: u32) -> Page {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build();
    let runtime = runtime.unwrap_or_else(|error| panic!("a runtime: {error}"));
    let names: Vec<&str> = MODES.iter().map(|(name, _)| *name).chain(OURS.iter().map(|(name, _)| *name)).collect();
    let mut text = line(&std::iter::once("load").chain(names.iter().copied()).map(str::to_owned).collect::<Vec<_>>());
    text += &line(&vec!["---".to_owned(); names.len() + 1]);
    let (mut values, mut lines) = (Vec::new(), vec![Vec::new(); names.len()]);
    for (load, clients) in LOADS {
        let mut all: Vec<Took> = Vec::new();
        for (name, mode) in MODES {
            all.push(runtime.block_on(theirs(mode, clients, stretch * PATIENCE, items)));
            eprintln!("{load}, {name}: {}", all[all.len() - 1].text);
        }
        for (name, words) in OURS {
            all.push(runtime.block_on(ours(words, clients, items)));
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
    text += &format!("\n{}\nGiven up: after {:.0} s.\n", LEGEND, (stretch * PATIENCE).as_secs_f64());
    let lines = names.iter().map(|name| (*name).to_owned()).zip(lines).collect();
    let panel = Panel { title: "time of the migration, s".into(), across: "clients", lines, marked: None };
    Page { text, values: values.into(), drawings: vec![("", draw(&[panel]))] }
}

const LEGEND: &str = "\
Seconds from the first to the last step, of one run; in brackets the steps of section 4.3 of the paper: snapshot, creating the
slave, propagating, standing still until all is there; then transactions a second that clients committed meanwhile. Half of the
transactions order something (three reads, two inserts, two updates), the others read, all at REPEATABLE READ; clients think
100 ms on average. The paper's modes are fed by the statements that the proxy captures, with everybody standing still for the
snapshot, `pg_dump` and `psql` for the slave, as many players as clients, and commits that wait for the disk; each ends with both
sides compared while clients stand, which is not counted. Clients are not sent over there, and no way back is made. `migrate run`
counts from the command's start to its end: checks, looking at clients undisturbed for 2 s (not with `--share 0`), comparing both
sides, sending clients over, and a way back. Its changes come from the source's log. All on the same processors.
";

fn start(items: u32) -> Front {
    let front = Front::start(&SETTINGS);
    let rows = items / 1000 * BALLAST;
    front.source.sql(
        "shop",
        &format!(
            "CREATE TABLE ballast (id int PRIMARY KEY, v text); \
             INSERT INTO ballast SELECT i, repeat(md5(i::text), 10) FROM generate_series(1, {rows}) i; ANALYZE ballast"
        ),
    );
    front.source.sql("postgres", "CHECKPOINT");
    front
}

async fn theirs(mode: Mode, clients: usize, limit: Duration, items: u32) -> Took {
    let front = start(items);
    let busy = busy(&front, clients, THINK).await;
    tokio::time::sleep(SETTLING).await;
    let migrated = busy.migrate(mode, limit).await;
    let load = busy.end().await;
    let whole_s = migrated.whole_s();
    let text = if migrated.caught_up {
        format!(
            "{whole_s:.1} ({:.2}, {:.1}, {:.1}, {:.2}); {load:.0}",
            migrated.snapshot_s, migrated.create_s, migrated.propagate_s, migrated.switch_s
        )
    } else {
        format!("given up, {} repeated; {load:.0}", migrated.repeated)
    };
    Took { whole_s, over: migrated.caught_up, text, load }
}

async fn ours(words: &[&str], clients: usize, items: u32) -> Took {
    let front = start(items);
    let busy = busy(&front, clients, THINK).await;
    tokio::time::sleep(SETTLING).await;
    let mut tool = tokio::process::Command::new(stillpoint());
    tool.args(["--json", "migrate"]).args(words).stdout(Stdio::null()).stderr(Stdio::piped());
    tool.arg("--source").arg(front.source.conninfo("shop")).arg("--target").arg(front.target.conninfo("shop"));
    tool.arg("--proxy").arg(front.control()).arg("--state").arg(front.dir().join("state"));
    let begun = Instant::now();
    let output = tool.output().await.expect("run stillpoint");
    let whole_s = begun.elapsed().as_secs_f64();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let load = busy.end().await;
    Took { whole_s, over: true, text: format!("{whole_s:.1}; {load:.0}"), load }
}
