//! Measures what docs/numbers.md states: `make bench`, or `make bench BENCH_ARGS=--short`; and, one section at a
//! time, the numbers of the scripts in `experiments/`.
//!
//! Each section makes its comparison within one run, keeps the raw numbers, and is written to `experiments/` as soon as
//! it is complete. The program does not judge results.

mod alternatives;
mod buildable;
mod builds;
mod cost;
mod latency;
mod libraries;
mod mariadb;
mod migrate;
mod modes;
mod overhead;
mod proxy;
mod results;
mod series;
mod sizes;
mod tail_latency;
mod threads;

use modes::RestartTimes;
use results::{Results, Section};
use std::process::ExitCode;
use stillpoint_patch_tests::load::Clients;
use stillpoint_patch_tests::series::Series;
use stillpoint_patch_tests::server::{Memcached, Redis};
use stillpoint_patch_tests::victim::Program;
use stillpoint_patch_tests::{annotation, cli, packages, workspace_root};

/// Number and size of the measurements.
struct Amount {
    pairs: usize,
    seconds: u64,
    runs: usize,
    cost_rounds: usize,
    keys: u64,
    gigabytes: &'static [f64],
    /// Names of redis' fixes to use; all fixes when empty.
    fixes: &'static [&'static str],
    /// Rounds of the comparisons of proxies, and of migrations.
    rounds: usize,
    round_seconds: u64,
    /// Processes of a machine on which a library is patched.
    processes: usize,
}

const FULL: Amount = Amount {
    pairs: 5,
    seconds: 60,
    runs: 10,
    cost_rounds: 10,
    keys: 1_000_000,
    gigabytes: &[0.1, 1.0, 2.0, 4.0, 8.0],
    fixes: &[],
    rounds: 5,
    round_seconds: 2,
    processes: 300,
};
const SHORT: Amount = Amount {
    pairs: 5,
    seconds: 10,
    runs: 3,
    cost_rounds: 3,
    keys: 1_000_000,
    gigabytes: &[0.1, 0.5, 1.0],
    fixes: &[],
    rounds: 3,
    round_seconds: 2,
    processes: 300,
};
/// The smallest amount, to check that a section works.
const TINY: Amount = Amount {
    pairs: 1,
    seconds: 2,
    runs: 1,
    cost_rounds: 1,
    keys: 10_000,
    gigabytes: &[0.05, 0.1],
    fixes: &["CVEs-1113", "CVE-2024-51741"],
    rounds: 1,
    round_seconds: 2,
    processes: 60,
};

/// Request of the command line.
struct SectionRequest {
    amount: &'static Amount,
    /// Name of the results; the date when `None`.
    name: Option<String>,
    sections: Vec<String>,
    /// Packages whose builds are measured, `PACKAGE/PROGRAM` each.
    packages: Vec<String>,
}

/// Sections of `make bench`, in order; only experiments request the others.
const SECTIONS: [&str; 9] = ["cost", "threads", "series", "latency", "rivals", "sizes", "libraries", "builds", "proxy"];
const EXPERIMENTS: [&str; 5] = ["patches", "operations", "tail", "buildable", "overhead"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(wish) = wish(&arguments) else {
        eprintln!(
            "usage: bench [--short|--tiny] [--as NAME] [--packages PACKAGE/PROGRAM,...] [{}]...",
            names().join("|")
        );
        return ExitCode::from(2);
    };
    let command = match (&wish.name, arguments.is_empty()) {
        (Some(name), _) => format!("experiments/{name}{}", if wish.is_full() { "" } else { " (in small)" }),
        (None, true) => "make bench".to_owned(),
        (None, false) => format!("make bench BENCH_ARGS=\"{}\"", arguments.join(" ")),
    };
    match run(&wish, &command) {
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

fn wish(arguments: &[String]) -> Option<SectionRequest> {
    let mut wish = SectionRequest {
        amount: &FULL,
        name: None,
        sections: Vec::new(),
        packages: builds::DEFAULT.map(str::to_owned).into(),
    };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--short" => wish.amount = &SHORT,
            "--tiny" => wish.amount = &TINY,
            "--as" => wish.name = Some(arguments.next()?.clone()),
            "--packages" => wish.packages = arguments.next()?.split(',').map(str::to_owned).collect(),
            name if names().contains(&name) => wish.sections.push(name.to_owned()),
            _ => return None,
        }
    }
    if wish.sections.is_empty() {
        wish.sections = SECTIONS.iter().chain(&migrate::SECTIONS).map(ToString::to_string).collect();
    }
    Some(wish)
}

/// Returns the names of all sections.
fn names() -> Vec<&'static str> {
    [&SECTIONS[..], &migrate::SECTIONS[..], &EXPERIMENTS[..], &mariadb::SECTIONS[..]].concat()
}

impl SectionRequest {
    fn has(&self, section: &str) -> bool {
        self.sections.iter().any(|wanted| wanted == section)
    }

    fn is_full(&self) -> bool {
        std::ptr::eq(self.amount, &FULL)
    }
}

fn run(wish: &SectionRequest, command: &str) -> Result<String, String> {
    println!("stillpoint: {}", cli::binary().display());
    let mut results = Results::new(&workspace_root().join("experiments"), wish.name.as_deref(), command);
    let mut add = |section: Section| results.add(section).map_err(|e| format!("write the results: {e}"));
    let amount = wish.amount;
    if wish.has("cost") || wish.has("threads") {
        let program = Program::build("bench").strip();
        let patch = program.patch(2);
        if wish.has("cost") {
            add(cost::cost(&program, &patch, amount.cost_rounds))?;
        }
        if wish.has("threads") {
            add(threads::threads(&program, &patch, amount.runs))?;
        }
    }
    if ["series", "latency", "rivals", "buildable", "overhead"].into_iter().any(|name| wish.has(name)) {
        as_shipped(wish, &mut add)?;
    }
    if ["sizes", "patches", "operations", "tail"].into_iter().any(|name| wish.has(name)) {
        with_points(wish, &mut add)?;
    }
    let of_mariadb = mariadb::Amount { seconds: amount.seconds, runs: amount.runs };
    mariadb::run(&|name| wish.has(name), of_mariadb, &mut add)?;
    if wish.has("libraries") {
        let amount = libraries::Amount { processes: amount.processes, rounds: amount.runs.min(3) };
        match libraries::libraries(&amount) {
            Ok(section) => add(section)?,
            Err(why) if wish.sections.len() > 1 => println!("libraries are left out: {why}"),
            Err(why) => return Err(why),
        }
    }
    if wish.has("builds") {
        match builds::builds(&wish.packages, amount.runs.min(3)) {
            Ok(section) => add(section)?,
            Err(why) if wish.sections.len() > 1 => println!("builds are left out: {why}"),
            Err(why) => return Err(why),
        }
    }
    if wish.has("proxy") {
        add(proxy::proxy(amount.rounds, amount.round_seconds)?)?;
    }
    for key in migrate::SECTIONS.into_iter().filter(|key| wish.has(key)) {
        add(migrate::section(key, amount.rounds.min(3), !wish.is_full())?)?;
    }
    Ok(results.tables().display().to_string())
}

type Add<'a> = dyn FnMut(Section) -> Result<(), String> + 'a;

/// Runs the sections about a redis without quiescence points.
fn as_shipped(wish: &SectionRequest, add: &mut Add) -> Result<(), String> {
    let amount = wish.amount;
    let series = Series::build(amount.fixes, &mut |text| println!("{text}"))?;
    let clients = Clients::default();
    // The patch that can be applied and reverted alone; it also replaces the most functions, six.
    let patch = &series.first().file;
    if wish.has("series") {
        add(series::series(&series, amount.runs))?;
    }
    if wish.has("latency") {
        let redis = Redis::start(&series.binary, &[]);
        redis.populate(amount.keys);
        stillpoint_patch_tests::load::Load::fill(redis.port(), &clients);
        add(latency::latency(&redis, patch, &clients, amount.pairs, amount.seconds))?;
    }
    if wish.has("rivals") {
        add(alternatives::alternatives(&series.binary, patch, &clients, amount.keys, amount.runs))?;
    }
    if wish.has("buildable") || wish.has("overhead") {
        with_and_without_points(wish, &series, add)?;
    }
    Ok(())
}

/// Runs the sections that compare servers as they ship with the same servers with quiescence points.
fn with_and_without_points(wish: &SectionRequest, series: &Series, add: &mut Add) -> Result<(), String> {
    let mut tell = |text: &str| println!("{text}");
    let points = Series::annotated(wish.amount.fixes, &mut tell)?;
    let other = Series::memcached(&mut tell)?;
    if wish.has("buildable") {
        add(buildable::buildable(&[
            buildable::FixCounts {
                name: "redis",
                series,
                with_points: Some(&points),
                start: |binary| Box::new(Redis::start(binary, &[])),
            },
            buildable::FixCounts {
                name: "memcached",
                series: &other,
                with_points: None,
                start: |binary| Box::new(Memcached::start(binary, &[])),
            },
        ]))?;
    }
    if wish.has("overhead") {
        let fixed = packages::redis(None)?;
        let (plain, patched) = (overhead::files(series), overhead::files(&points));
        let redis =
            overhead::variants((&series.binary, plain.as_slice()), (&points.binary, patched.as_slice()), Some(&fixed));
        let (binary, patch) = annotation::memcached()?;
        let memcached = overhead::variants((&other.binary, &[][..]), (&binary, std::slice::from_ref(&patch)), None);
        let rounds = wish.amount.runs.min(5);
        add(overhead::overhead(&redis, &memcached, rounds, wish.amount.seconds.min(4)))?;
    }
    Ok(())
}

/// Runs the sections that compare modes, and so need servers with quiescence points.
fn with_points(wish: &SectionRequest, add: &mut Add) -> Result<(), String> {
    let amount = wish.amount;
    let only: &[&str] = if wish.has("patches") || wish.has("operations") { amount.fixes } else { &["CVEs-1113"] };
    let series = Series::annotated(only, &mut |text| println!("{text}"))?;
    if wish.has("sizes") {
        add(sizes::sizes(&series.binary, &series.first().file, amount.gigabytes, amount.runs))?;
    }
    if !["patches", "operations", "tail"].into_iter().any(|name| wish.has(name)) {
        return Ok(());
    }
    let (binary, patch) = annotation::memcached()?;
    if wish.has("patches") || wish.has("operations") {
        let mut applied = modes::redis(&series, amount.runs);
        let redis = RestartTimes::redis(&series.binary, amount.runs);
        if wish.has("patches") {
            add(modes::by_size(&applied, &redis))?;
        }
        if wish.has("operations") {
            applied.extend(modes::memcached(&binary, &patch, amount.runs));
            add(modes::extremes(&applied, &[redis, RestartTimes::memcached(&binary, amount.runs)]))?;
        }
    }
    if wish.has("tail") {
        let mut redis = Redis::start(&series.binary, &[]);
        let mut memcached = Memcached::start(&binary, &["-t", "4"]);
        let clients = Clients { rate: 4_000, blocking: 0, idle: 50, mix: "get=80,set=20", ..Clients::default() };
        let mut servers = [
            tail_latency::Server {
                name: "redis",
                pid: redis.pid(),
                port: redis.port(),
                restart: Box::new(|| redis.restart()),
                patch: &series.first().file,
                clients: clients.clone(),
            },
            tail_latency::Server {
                name: "memcached",
                pid: memcached.pid(),
                port: memcached.port(),
                restart: Box::new(|| memcached.restart()),
                patch: &patch,
                clients: Clients { protocol: "memcached", ..clients },
            },
        ];
        add(tail_latency::tail_latency(&mut servers, amount.seconds))?;
    }
    Ok(())
}
