//! PLOS'19, figure 4: latencies of the hash server around a live patch, threads synchronised by a barrier against threads
//! that change over one by one, at their points or probed. Scaled to two cores; prints a table in Markdown.
//!
//! usage: plos19 [--short | --tiny | RUNS [SECONDS]]

use std::time::{Duration, Instant};
use stillpoint_e2e::hash_server::{HashServer, Sample, seeds};
use stillpoint_e2e::operation::{Operation, Spread};
use stillpoint_e2e::points::in_mode;
use stillpoint_e2e::victim::apply;

/// Zero bits: some 65,000 hashes, and some tens of milliseconds, for a request.
const BITS: u32 = 16;
/// As many as processors: what else runs would show as latency.
const CLIENTS: u32 = 2;
const REST: Duration = Duration::from_millis(10);
const MODES: [(&str, &str); 3] =
    [("global", "barrier"), ("local", "wait-free, at points"), ("probe", "wait-free, probed")];

/// A seed that old and new code answer with the same hash, after the same work: the middle one by latency.
fn seed(server: &HashServer) -> [u8; 16] {
    let running = server.start(BITS);
    let mut client = running.client();
    let mut ask = || seeds().map(|seed| (seed, client.ask(seed))).collect::<Vec<_>>();
    let old = ask();
    apply(server.patch(), running.pid()).succeed();
    let new = ask();
    let mut same: Vec<_> = old.iter().zip(&new).filter(|(a, b)| a.1.hash == b.1.hash).map(|(a, _)| a).collect();
    same.sort_by_key(|(_, sample)| sample.received_ns - sample.sent_ns);
    same.get(same.len() / 2).expect("half of all seeds are such").0
}

/// Latencies in ms of requests that ended before the patch began, and of those that were under way while it was made.
fn latencies(samples: impl Iterator<Item = Sample>, window: (u64, u64)) -> (Vec<f64>, Vec<f64>) {
    let (mut before, mut during) = (Vec::new(), Vec::new());
    for sample in samples {
        let latency = (sample.received_ns - sample.sent_ns) as f64 / 1e6;
        if sample.received_ns < window.0 {
            before.push(latency);
        } else if sample.sent_ns < window.1 {
            during.push(latency);
        }
    }
    (before, during)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number = |word: &str| word.parse::<u32>().unwrap_or_else(|_| panic!("`{word}` is not a number"));
    let (runs, seconds) = match words[..] {
        [] => (10, 4),
        ["--short"] => (5, 2),
        ["--tiny"] => (1, 1),
        [runs] => (number(runs), 2),
        [runs, seconds, ..] => (number(runs), number(seconds)),
    };
    let server = HashServer::build();
    let seed = seed(&server);
    println!(
        "| method | runs | request before: median (p99) ms | during the patch: median (max) ms | all over in ms |"
    );
    println!("|---|---|---|---|---|");
    for (mode, name) in MODES {
        let (mut before, mut during, mut over) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..runs {
            let running = server.start(BITS);
            let load = running.load(CLIENTS, seed, REST);
            let half = Duration::from_secs(u64::from(seconds)) / 2;
            std::thread::sleep(half);
            let began = Instant::now();
            let operation = Operation::of(in_mode(apply(server.patch(), running.pid()), mode, "30s")).succeeded();
            std::thread::sleep(half.saturating_sub(began.elapsed()));
            let (b, d) = latencies(load.end().into_iter().flatten(), operation.window_ns);
            before.extend(b);
            during.extend(d);
            over.extend(operation.migrated_ns.map(|ns| ns as f64 / 1e6));
        }
        let (before, during, over) = (Spread::of(before), Spread::of(during), Spread::of(over));
        println!(
            "| {name} (`{mode}`) | {runs} | {:.1} ({:.1}) | {:.1} ({:.1}) | {:.1} ({:.1} to {:.1}) |",
            before.median, before.p99, during.median, during.max, over.median, over.min, over.max
        );
    }
}
