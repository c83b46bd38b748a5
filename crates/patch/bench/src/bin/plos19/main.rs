//! PLOS'19, figure 4: latencies of the hash server around a live patch; threads synchronised by a barrier, compared
//! with threads that migrate one by one, at their points or by probing. Scaled to two cores; prints a table in
//! Markdown, writes the latency of every request, and a figure: requests by send time, relative to the start of the
//! tool.
//!
//! usage: plos19 JSON SVG [--short | --tiny | RUNS [SECONDS]]

use serde::Serialize;
use std::time::{Duration, Instant};
use stillpoint_patch_bench::operation::{Operation, Spread};
use stillpoint_patch_tests::hash_server::{HashServer, Sample, seeds};
use stillpoint_patch_tests::quiescence_program::in_mode;
use stillpoint_patch_tests::victim::apply;
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Zero bits: a request takes some 65,000 hashes, and some tens of milliseconds.
const BITS: u32 = 16;
/// Number of clients, one for each processor: any other running thread would show as latency.
const CLIENTS: u32 = 2;
const PAUSE: Duration = Duration::from_millis(10);
const MODES: [(&str, &str); 4] = [
    ("global", "barrier"),
    ("local", "wait-free, at points"),
    ("probe", "wait-free, probed"),
    (RESTART, "ended and started again"),
];
const RESTART: &str = "restart";

/// Returns a seed with the same hash from old and new code, after the same work: the middle one by latency.
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

/// Range of the figure around the start of the tool, in ms.
const SHOWN: std::ops::Range<f64> = -100.0..200.0;

/// One run of a mode.
#[derive(Serialize)]
struct Run {
    /// Time from the start of the tool to its end, or from the request to end to the first answer.
    tool_ms: f64,
    /// Time from the start of the transition until every thread ran the new code; for a restart, all of it.
    over_ms: Option<f64>,
    /// Connections that ended.
    lost: u32,
    /// Send time of each request, relative to the start of the tool, and its latency.
    requests_ms: Vec<(f64, f64)>,
}

impl Run {
    fn of(samples: &[Sample], (from, to): (u64, u64), over_ns: Option<u64>) -> Run {
        let since = |ns: u64| (ns as f64 - from as f64) / 1e6;
        Run {
            tool_ms: since(to),
            over_ms: over_ns.map(|ns| ns as f64 / 1e6),
            lost: samples.iter().map(|sample| sample.lost).sum(),
            requests_ms: samples.iter().map(|s| (since(s.sent_ns), (s.received_ns - s.sent_ns) as f64 / 1e6)).collect(),
        }
    }

    /// Returns the latencies of requests that were answered before the tool began.
    fn before(&self) -> impl Iterator<Item = f64> {
        self.requests_ms.iter().filter(|(sent, latency)| sent + latency < 0.0).map(|(_, latency)| *latency)
    }

    /// Returns the latencies of requests in progress while it ran.
    fn during(&self) -> impl Iterator<Item = f64> {
        let under_way = |(sent, latency): &&(f64, f64)| sent + latency >= 0.0 && *sent < self.tool_ms;
        self.requests_ms.iter().filter(under_way).map(|(_, latency)| *latency)
    }
}

fn figure(modes: &[(&str, Vec<Run>)]) -> Figure {
    let curve = |(name, runs): &(&str, Vec<Run>)| {
        let requests = runs.iter().flat_map(|run| &run.requests_ms).copied();
        Curve {
            name: (*name).into(),
            points: requests.filter(|(sent, _)| SHOWN.contains(sent)).collect(),
            joined: false,
        }
    };
    Figure {
        x: Axis { label: "request sent, ms from the start of the patch", logarithmic: false },
        y: Axis { label: "latency, ms", logarithmic: false },
        curves: modes.iter().map(curve).collect(),
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number = |word: &str| word.parse::<u32>().unwrap_or_else(|_| panic!("`{word}` is not a number"));
    let [json, svg, words @ ..] = &words[..] else {
        panic!("usage: plos19 JSON SVG [--short | --tiny | RUNS [SECONDS]]")
    };
    let (runs, seconds) = match *words {
        [] => (10, 4),
        ["--short"] => (5, 2),
        ["--tiny"] => (1, 1),
        [runs] => (number(runs), 2),
        [runs, seconds, ..] => (number(runs), number(seconds)),
    };
    let server = HashServer::build();
    let seed = seed(&server);
    println!(
        "| method | runs | request before: median (p99) ms | meanwhile: median (max) ms | all over in ms | connections lost |"
    );
    println!("|---|---|---|---|---|---|");
    let mut modes = Vec::new();
    for (mode, name) in MODES {
        let mut all = Vec::new();
        for _ in 0..runs {
            let mut running = server.start(BITS);
            let load = running.load(CLIENTS, seed, PAUSE);
            let half = Duration::from_secs(u64::from(seconds)) / 2;
            std::thread::sleep(half);
            let began = Instant::now();
            let (window_ns, over_ns) = if mode == RESTART {
                let done = server.restart(&mut running, seed);
                ((done.began_ns, done.answered_ns), Some(done.answered_ns - done.began_ns))
            } else {
                let patch = in_mode(apply(server.patch(), running.pid()), mode, "30s");
                let operation = Operation::of(patch).succeeded();
                (operation.window_ns, operation.migrated_ns)
            };
            std::thread::sleep(half.saturating_sub(began.elapsed()));
            let run = Run::of(&load.end().concat(), window_ns, over_ns);
            assert!(mode == RESTART || run.lost == 0, "a patch has ended {} connections", run.lost);
            all.push(run);
        }
        let before = Spread::of(all.iter().flat_map(Run::before).collect());
        let during = Spread::of(all.iter().flat_map(Run::during).collect());
        let over = Spread::of(all.iter().filter_map(|run| run.over_ms).collect());
        let lost: u32 = all.iter().map(|run| run.lost).sum();
        println!(
            "| {name} (`{mode}`) | {runs} | {:.1} ({:.1}) | {:.1} ({:.1}) | {:.1} ({:.1} to {:.1}) | {lost} |",
            before.median, before.p99, during.median, during.max, over.median, over.min, over.max
        );
        modes.push((name, all));
    }
    std::fs::write(svg, figure(&modes).svg()).expect("write the figure");
    let numbers: std::collections::BTreeMap<_, _> = modes.into_iter().collect();
    let text = serde_json::to_string(&numbers).expect("numbers are JSON");
    std::fs::write(json, text + "\n").expect("write the numbers");
}
