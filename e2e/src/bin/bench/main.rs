//! Measures everything that README states: `make bench`, or `make bench BENCH_ARGS=--short`.
//!
//! Each section compares what it compares within one run, keeps the raw numbers, and is written to `experiments/` as
//! soon as it is done. Nothing is judged here; `--check` ends with an error when a promised figure is missed.

mod cost;
mod latency;
mod results;
mod rivals;
mod series;
mod threads;

use results::{Results, Section};
use std::process::ExitCode;
use stillpoint_e2e::load::Clients;
use stillpoint_e2e::series::Series;
use stillpoint_e2e::server::Redis;
use stillpoint_e2e::victim::Program;
use stillpoint_e2e::{cli, workspace_root};

/// How much is measured.
struct Amount {
    pairs: usize,
    seconds: u64,
    runs: usize,
    cost_rounds: usize,
    keys: u64,
    gigabytes: &'static [f64],
}

const FULL: Amount =
    Amount { pairs: 5, seconds: 60, runs: 10, cost_rounds: 10, keys: 1_000_000, gigabytes: &[0.1, 1.0, 2.0, 4.0, 8.0] };
const SHORT: Amount =
    Amount { pairs: 5, seconds: 10, runs: 3, cost_rounds: 3, keys: 1_000_000, gigabytes: &[0.1, 0.5, 1.0] };

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut amount = &FULL;
    let mut only: Vec<&str> = Vec::new();
    for argument in &arguments {
        match argument.as_str() {
            "--short" => amount = &SHORT,
            name if SECTIONS.contains(&name) => only.push(name),
            _ => {
                eprintln!("usage: bench [--short] [{}]...", SECTIONS.join("|"));
                return ExitCode::from(2);
            }
        }
    }
    let wanted = |name: &str| only.is_empty() || only.contains(&name);
    let command = match arguments.is_empty() {
        true => "make bench".to_owned(),
        false => format!("make bench BENCH_ARGS=\"{}\"", arguments.join(" ")),
    };
    match run(amount, &wanted, &command) {
        Ok(tables) => {
            println!("written: {tables}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

const SECTIONS: [&str; 6] = ["cost", "threads", "series", "latency", "rivals", "sizes"];

fn run(amount: &Amount, wanted: &dyn Fn(&str) -> bool, command: &str) -> Result<String, String> {
    println!("stillpoint: {}", cli::binary().display());
    let mut results = Results::new(&workspace_root().join("experiments"), command);
    let mut add = |section: Section| results.add(section).map_err(|e| format!("write the results: {e}"));

    if wanted("cost") || wanted("threads") {
        let program = Program::build("bench").strip();
        let patch = program.patch(2);
        if wanted("cost") {
            add(cost::cost(&program, &patch, amount.cost_rounds))?;
        }
        if wanted("threads") {
            add(threads::threads(&program, &patch, amount.runs))?;
        }
    }
    if ["series", "latency", "rivals", "sizes"].into_iter().any(wanted) {
        let series = Series::build(&mut |text| println!("{text}"))?;
        let clients = Clients::default();
        // The one that can be applied and reverted alone; it also replaces the most functions, six.
        let patch = &series.first().file;
        if wanted("series") {
            add(series::series(&series, amount.runs))?;
        }
        if wanted("latency") {
            let redis = Redis::start(&series.binary, &[]);
            redis.populate(amount.keys);
            stillpoint_e2e::load::Load::fill(redis.port(), &clients);
            add(latency::latency(&redis, patch, &clients, amount.pairs, amount.seconds))?;
        }
        if wanted("rivals") {
            add(rivals::rivals(&series.binary, patch, &clients, amount.keys, amount.runs))?;
        }
        if wanted("sizes") {
            add(rivals::sizes(&series.binary, patch, amount.gigabytes, amount.runs))?;
        }
    }
    Ok(results.tables().display().to_string())
}
