//! `experiments/madeus-fig6`: the time in which a target catches up with a load, in each mode of the replay's
//! scheduler, by the load and by the duration of a flush of the target's log (Fig. 6 of the paper).
//!
//! Prints a page. Each load is recorded once, statements and rows of the same transactions, and replayed in all modes
//! on copies of one database; each replay must end with the rows of the source. The page does not judge the results.
#![forbid(unsafe_code)]

mod chart;

use std::process::ExitCode;
use std::time::Duration;
use stillpoint_migrate_replay::Mode;
use stillpoint_migrate_tests::recording::{ProxiedServers, Recording, ReplayResult, ReplaySettings, Target, record};
use stillpoint_testing::postgresql::available;

/// Default settings, with memory for this machine.
const SETTINGS: [&str; 4] = ["fsync=on", "shared_buffers=256MB", "max_wal_size=2GB", "max_connections=300"];

/// Names and numbers of clients; each client thinks for `THINK` between two transactions.
const LOADS: [(&str, usize); 3] = [("light", 4), ("medium", 16), ("heavy", 64)];
const THINK: Duration = Duration::from_millis(100);
/// Delays that are added to each flush, in milliseconds.
const DELAYS_MS: [u64; 2] = [0, 5];
/// Number of players of the product, with its settings: only the last commit of all waits for the disk.
const PRODUCT_PLAYERS: usize = 4;

/// One replay, as a column of the table.
struct Column {
    name: &'static str,
    mode: Mode,
    product: bool,
}

const COLUMNS: [Column; 6] = [
    Column { name: "b-all", mode: Mode::BAll, product: false },
    Column { name: "b-min", mode: Mode::BMin, product: false },
    Column { name: "b-con", mode: Mode::BCon, product: false },
    Column { name: "lsir", mode: Mode::Lsir, product: false },
    Column { name: "rows", mode: Mode::Rows, product: false },
    Column { name: "rows, lazy", mode: Mode::Rows, product: true },
];

/// Legend of the columns, for readers of the page.
const LEGEND: &str = "\
## What is compared

One recording of each load is replayed in every mode, with everything known from the beginning, on a copy of the database
from before the load; each replay ended in what the source held. The load: half of the transactions order something
(three reads, two inserts, two updates, 1 to 2 rows each), the others read; all at REPEATABLE READ; clients think 100 ms
on average.

- `b-all`, `b-min`: one transaction after another, with all operations of all transactions, and with the paper's minimal
  set. Every commit waits for a flush of its own.
- `b-con`: first reads and writes at once, commits one after another: a flush for each as well.
- `lsir`: the paper's rule. Commits that no first read separates on the source are sent at once and share flushes.
  Players: as many as the source had sessions. What has to wait for nothing goes out at once (a transaction beside which no
  other ran: the whole of it, as with `b-min`), unlike in the paper, where each operation waits for the answer to the one
  before. `b-con` does the same.
- `rows`: row images in the order of their tokens alone, by as many players, a transaction at once too: what does not conflict
  shares flushes, however it was ordered on the source.
- `rows, lazy`: the same by four players, commits that do not wait for the disk, as `migrate run` has its players. It sends
  batches besides, which is not done here.

The time of a flush: as the machine's disk has it (0 ms more), and with the target's `commit_delay`, for which the process that flushes
sleeps before it, and others wait meanwhile (`commit_siblings = 0`: also when no other process is at work). What comes to be
committed while it sleeps goes with that flush, and not with the next one, as it would on a slow disk.
";

/// Results of one load with one delay.
struct Line {
    load: &'static str,
    clients: usize,
    delay_ms: u64,
    recording: (u64, u64, f64),
    replayed: Vec<Vec<ReplayResult>>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [seconds, rounds, json, svg] = &arguments[..] else { return usage() };
    let (Ok(seconds), Ok(rounds)) = (seconds.parse::<f64>(), rounds.parse::<usize>()) else { return usage() };
    if rounds == 0 {
        return usage();
    }
    if !available() {
        return ExitCode::from(3);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let lines = match runtime {
        Ok(runtime) => runtime.block_on(measure(seconds, rounds)),
        Err(error) => {
            eprintln!("error: a runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    print(&lines, seconds, rounds);
    let written = std::fs::write(json, values(&lines)).and_then(|()| std::fs::write(svg, chart::draw(&bars(&lines))));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {json}, {svg}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: madeus-fig6 SECONDS-OF-LOAD ROUNDS FILE-FOR-THE-VALUES FILE-FOR-THE-PLOT");
    ExitCode::from(2)
}

async fn measure(seconds: f64, rounds: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for (load, clients) in LOADS {
        let servers = ProxiedServers::start(&SETTINGS);
        let recording = record(&servers, clients, THINK, seconds).await;
        eprintln!("{load}: {} transactions, {} wrote", recording.transactions, recording.writing);
        let target = Target::new(&servers.target);
        for delay_ms in DELAYS_MS {
            target.delay_flushes(Duration::from_millis(delay_ms));
            let mut replayed: Vec<Vec<ReplayResult>> = COLUMNS.iter().map(|_| Vec::new()).collect();
            // In turns: a disturbance of the machine then affects all of them.
            for _ in 0..rounds {
                for (column, results) in COLUMNS.iter().zip(&mut replayed) {
                    results.push(replay(&target, &recording, column, clients).await);
                    eprintln!("{load}, {delay_ms} ms, {}: {:?}", column.name, results.last());
                }
            }
            let recording = (recording.transactions, recording.writing, recording.seconds);
            lines.push(Line { load, clients, delay_ms, recording, replayed });
        }
    }
    lines
}

async fn replay(target: &Target<'_>, recording: &Recording, column: &Column, clients: usize) -> ReplayResult {
    let players = if column.product { PRODUCT_PLAYERS } else { clients };
    target.replay(recording, ReplaySettings { mode: column.mode, players, synchronous: !column.product }).await
}

fn median(results: &[ReplayResult], of: impl Fn(&ReplayResult) -> f64) -> f64 {
    let mut values: Vec<f64> = results.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn print(lines: &[Line], seconds: f64, rounds: usize) {
    let names: Vec<&str> = COLUMNS.iter().map(|column| column.name).collect();
    let head = |first: &str| {
        println!("| {first} | {} |", names.join(" | "));
        println!("|---{}|", "|---".repeat(names.len()));
    };
    println!("## Seconds to catch up with {seconds:.0} seconds of load\n");
    println!("Median of {rounds}, in turns; in brackets smallest and largest.\n");
    head("load, flush slower by");
    for line in lines {
        let (transactions, writing, took) = line.recording;
        let cell = |results: &Vec<ReplayResult>| {
            let least = results.iter().map(|r| r.seconds).fold(f64::INFINITY, f64::min);
            let most = results.iter().map(|r| r.seconds).fold(0.0, f64::max);
            format!("{:.2} ({least:.2} to {most:.2})", median(results, |r| r.seconds))
        };
        let cells: Vec<String> = line.replayed.iter().map(cell).collect();
        println!(
            "| {}, {} clients, {:.0} orders of {:.0} transactions a second; {} ms | {} |",
            line.load,
            line.clients,
            writing as f64 / took,
            transactions as f64 / took,
            line.delay_ms,
            cells.join(" | ")
        );
    }
    println!("\n## Flushes of the target's log for each order\n");
    head("load, flush slower by");
    for line in lines {
        let orders = line.recording.1.max(1) as f64;
        let cell = |results: &Vec<ReplayResult>| format!("{:.2}", median(results, |r| r.flushes as f64) / orders);
        let cells: Vec<String> = line.replayed.iter().map(cell).collect();
        println!("| {}; {} ms | {} |", line.load, line.delay_ms, cells.join(" | "));
    }
    let retries: u64 = lines.iter().flat_map(|line| line.replayed.iter().flatten()).map(|r| r.retries).sum();
    println!("\nTransactions that had to be tried again, in all replays together: {retries}.\n\n{LEGEND}");
}

fn values(lines: &[Line]) -> String {
    let line = |line: &Line| {
        let of = |results: &Vec<ReplayResult>| -> Vec<serde_json::Value> {
            let value = |r: &ReplayResult| {
                serde_json::json!({
                    "seconds": r.seconds, "flushes": r.flushes, "retries": r.retries,
                    "players": r.players, "transactions": r.transactions,
                })
            };
            results.iter().map(value).collect()
        };
        let modes =
            COLUMNS.iter().zip(&line.replayed).map(|(column, results)| (column.name.to_owned(), of(results).into()));
        let modes: serde_json::Map<String, serde_json::Value> = modes.collect();
        let (transactions, writing, seconds) = line.recording;
        serde_json::json!({
            "load": line.load, "clients": line.clients, "flush_delay_ms": line.delay_ms, "transactions": transactions,
            "orders": writing, "seconds": seconds, "replayed": modes,
        })
    };
    let mut text = String::new();
    for value in lines.iter().map(line) {
        text.push_str(&format!("{value}\n"));
    }
    text
}

fn bars(lines: &[Line]) -> Vec<chart::Group> {
    let group = |line: &Line| chart::Group {
        name: format!("{}, {} ms", line.load, line.delay_ms),
        bars: COLUMNS
            .iter()
            .zip(&line.replayed)
            .map(|(column, results)| (column.name, median(results, |r| r.seconds)))
            .collect(),
    };
    lines.iter().map(group).collect()
}
