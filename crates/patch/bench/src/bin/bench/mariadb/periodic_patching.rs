//! Latencies of clients while MariaDB is patched once a second, compared with the same server without patching.
//!
//! The speed of a shared machine varies from minute to minute by more than the effect to measure. So the windows of a
//! round are interleaved, in blocks of some seconds, in another order each time. One run adds one round to a file
//! beside the table: a window without patching and one in each mode. The tables are of all rounds with windows and
//! blocks of the same length.

use super::{Amount, MODES, WITHOUT, start};
use crate::latency::{Span, Window, once_a_second, read, rest, timed, windows};
use crate::results::{Section, number};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use stillpoint_patch_bench::machine::machine;
use stillpoint_patch_bench::operation::{Operation, PendingOperation, Spread, StopsUs, Why};
use stillpoint_patch_bench::stalls::{Stall, Watch};
use stillpoint_patch_tests::mariadb::Policy;
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::client::Client;
use stillpoint_patch_tests::mariadb::effect::nothing;
use stillpoint_patch_tests::mariadb::load::{Latencies, Sysbench, SysbenchCounts};
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_patch_tests::workspace_root;

pub(super) const CONNECTIONS: u32 = 16;
pub(super) const IDLE: usize = 50;
/// Time after an operation within which every delayed request has its answer.
const DELAY_MAX_NS: u64 = 20_000_000;
/// Statements a second.
pub(super) const STATEMENTS_PER_S: f64 = 1_500.0;
/// Transactions of sysbench a second, 20 statements each: for a lightly loaded server, and at about half the maximum of
/// two processors.
const LIGHT_RATE: u32 = 100;
const HALF_LOAD_RATE: u32 = 500;
/// Default option of a server: it writes a commit to the disk before it answers.
const DURABLE: &str = "--innodb-flush-log-at-trx-commit=1";

/// Load of the clients during the measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Load {
    /// Statements of one row, by our own client.
    Statements,
    /// Transactions of sysbench's `oltp_read_write`, durable.
    Transactions,
    /// Transactions, five times as many.
    ManyTransactions,
}

impl Load {
    /// Returns the name of the section and of its files.
    fn name(self) -> &'static str {
        match self {
            Load::Statements => "mariadb-latency",
            Load::Transactions => "mariadb-latency-oltp",
            Load::ManyTransactions => "mariadb-latency-busy",
        }
    }

    /// Returns the number of sysbench's transactions a second, if that is the load.
    fn transactions_a_second(self) -> Option<u32> {
        match self {
            Load::Statements => None,
            Load::Transactions => Some(LIGHT_RATE),
            Load::ManyTransactions => Some(HALF_LOAD_RATE),
        }
    }

    /// Returns the length of a block without patching or in one mode, for windows of so many seconds. Each block of
    /// transactions is a separate run, whose beginning and end should have little weight. The script that counts kept
    /// rounds, `experiments/mariadb-latency`, has these lengths too.
    fn block_seconds(self, window: u64) -> u64 {
        let longest = match self {
            // one apply, one revert
            Load::Statements => 2,
            Load::Transactions | Load::ManyTransactions => 30,
        };
        window.min(longest)
    }

    fn described(self) -> String {
        match self.transactions_a_second() {
            None => format!("{STATEMENTS_PER_S} statements a second by {CONNECTIONS} clients"),
            Some(rate) => {
                format!("{rate} transactions a second of sysbench's oltp_read_write by {CONNECTIONS} clients")
            }
        }
    }
}

/// One window of one round.
#[derive(Serialize, Deserialize)]
struct WindowLatencies {
    window: Window,
    operations: usize,
    over_ms: Vec<f64>,
    probe_us_max: f64,
    /// Longest time for which all threads were stopped, of each operation.
    all_us: Vec<f64>,
    /// Longest time in which the machine itself gave a processor to no thread.
    #[serde(default)]
    stall_us_max: Option<f64>,
    /// Requests in progress during an operation or just after it, and the other requests.
    #[serde(default)]
    during: Option<Window>,
    #[serde(default)]
    beside: Option<Window>,
}

#[derive(Serialize, Deserialize)]
struct Round {
    commit: String,
    machine: String,
    seconds: u64,
    block_seconds: u64,
    windows: BTreeMap<String, WindowLatencies>,
}

pub(super) fn measure(server: &Annotated, load: Load, amount: Amount) -> Result<Section, String> {
    let path = workspace_root().join(format!("experiments/{}.jsonl", load.name()));
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let earlier = text.lines().map(serde_json::from_str::<Round>).collect::<Result<Vec<_>, _>>();
    let earlier = earlier.map_err(|e| format!("{}: {e}", path.display()))?;
    let block_seconds = load.block_seconds(amount.seconds);
    let alike = |round: &Round| (round.seconds, round.block_seconds) == (amount.seconds, block_seconds);
    let mut rounds: Vec<Round> = earlier.into_iter().filter(alike).collect();
    let blocks = blocks(rounds.len(), amount.seconds, block_seconds);
    let windows = match load.transactions_a_second() {
        None => statements(server, &blocks),
        Some(rate) => transactions(server, rate, &blocks)?,
    };
    let round = Round { commit: commit(), machine: machine(), seconds: amount.seconds, block_seconds, windows };
    // A few seconds only show that it works.
    if amount.seconds >= 10 {
        let line = serde_json::to_string(&round).expect("numbers and texts serialise");
        let file = std::fs::File::options().create(true).append(true).open(&path);
        file.and_then(|mut file| writeln!(file, "{line}")).map_err(|e| format!("write {}: {e}", path.display()))?;
    }
    rounds.push(round);
    Ok(section(load, &rounds, amount.seconds))
}

/// A block: some seconds without patching, or with patching in one mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    mode: &'static str,
    seconds: u64,
}

/// Returns the blocks of a round: for each mode `seconds` in total, each mode before and after every other.
fn blocks(round: usize, seconds: u64, longest: u64) -> Vec<Block> {
    let turns = seconds.div_ceil(longest);
    let turn = |turn: u64| {
        let mut order: Vec<&str> = [WITHOUT].into_iter().chain(MODES).collect();
        order.rotate_left((round + turn as usize / 2) % 4);
        if turn % 2 == 1 {
            order.reverse();
        }
        order.into_iter().map(move |mode| Block { mode, seconds: seconds / turns })
    };
    (0..turns).flat_map(turn).collect()
}

/// Sum of the blocks of one mode.
#[derive(Default)]
struct Sum {
    counted: SysbenchCounts,
    latencies: Latencies,
    seconds: u64,
    stall_us: f64,
    called: Vec<PendingOperation>,
}

impl Sum {
    fn seen(self) -> WindowLatencies {
        seen(counted_window(self.counted, &self.latencies, self.seconds), &read(self.called), self.stall_us)
    }
}

/// Measures with sysbench, which counts for itself: each block is a separate run, a second longer at both ends.
fn transactions(server: &Annotated, rate: u32, blocks: &[Block]) -> Result<BTreeMap<String, WindowLatencies>, String> {
    let mariadb = start(server, Policy::ThreadPerConnection, Work::NoOp, &[DURABLE]);
    let patch = nothing(server);
    let idle: Vec<Client> = (0..IDLE).map(|_| mariadb.client()).collect();
    Sysbench::prepare(&mariadb)?;
    let run = |seconds: u64| Sysbench::at_rate(&mariadb, CONNECTIONS, seconds as u32, rate);
    // The first seconds of a load include filling caches.
    run(3)?.finish();
    let mut done: BTreeMap<&str, Sum> = BTreeMap::new();
    for &Block { mode, seconds } in blocks {
        let watch = Watch::start();
        let load = run(seconds + 2)?;
        rest(1);
        let mut called: Vec<PendingOperation> = Vec::new();
        let span = timed(|| match mode {
            WITHOUT => rest(seconds),
            _ => called = once_a_second(mariadb.pid(), patch, seconds, &["--quiescence", mode]),
        });
        let (counted, latencies) = load.finish_paced();
        let stall = longest(&watch.finish(), &[span]);
        let of = done.entry(mode).or_default();
        of.counted += counted;
        of.latencies += latencies;
        of.seconds += seconds + 2;
        of.stall_us = of.stall_us.max(stall);
        of.called.extend(called);
    }
    drop(idle);
    Ok(done.into_iter().map(|(mode, sum)| (mode.to_owned(), sum.seen())).collect())
}

fn counted_window(counted: SysbenchCounts, latencies: &Latencies, seconds: u64) -> Window {
    let us = |share: f64| latencies.quantile_ms(share) * 1e3;
    Window {
        seconds: seconds as f64,
        requests: latencies.count(),
        // A transaction rolled back because of a dead-lock is repeated, and is no failure.
        failed: counted.reconnects,
        p50_us: us(0.5),
        p99_us: us(0.99),
        p999_us: us(0.999),
        max_us: latencies.max_ms() * 1e3,
        blackout_us: 0.0,
    }
}

fn seen(window: Window, operations: &[Operation], stall_us: f64) -> WindowLatencies {
    let stood = |operation: &Operation| operation.stopped(Why::All).max().unwrap_or(0) as f64 / 1e3;
    WindowLatencies {
        window,
        operations: operations.len(),
        over_ms: operations.iter().map(|o| super::ms(o.reached_and_rest_ns().0)).collect(),
        probe_us_max: StopsUs::of(operations).probe.max,
        all_us: operations.iter().map(stood).collect(),
        stall_us_max: Some(stall_us),
        during: None,
        beside: None,
    }
}

fn statements(server: &Annotated, blocks: &[Block]) -> BTreeMap<String, WindowLatencies> {
    let policy = Policy::ThreadPerConnection;
    let mariadb = start(server, policy, Work::Ycsb, &[]);
    let patch = nothing(server);
    let idle: Vec<Client> = (0..IDLE).map(|_| mariadb.client()).collect();
    let plan = Plan { work: Work::Ycsb, connections: CONNECTIONS, rate: Some(STATEMENTS_PER_S), first: 0 };
    let mut load = Traffic::start(&mariadb, &plan);
    // The first seconds of a load include connecting and filling caches.
    rest(3);
    let mut done: BTreeMap<&str, (Vec<Span>, Vec<PendingOperation>)> = BTreeMap::new();
    let watch = Watch::start();
    for &Block { mode, seconds } in blocks {
        let mut called: Vec<PendingOperation> = Vec::new();
        let options = ["--quiescence", mode];
        let span = timed(|| match mode {
            WITHOUT => rest(seconds),
            _ => called = once_a_second(mariadb.pid(), patch, seconds, &options),
        });
        let of = done.entry(mode).or_default();
        of.0.push(span);
        of.1.extend(called);
        load.assert_running();
    }
    let observed = load.finish();
    let stalls = watch.finish();
    drop(idle);
    let split = |(mode, (spans, called)): (&str, (Vec<Span>, Vec<PendingOperation>))| {
        let operations = read(called);
        let during: Vec<Span> = operations.iter().map(|o| (o.window_ns.0, o.window_ns.1 + DELAY_MAX_NS)).collect();
        let beside: Vec<Span> = spans.iter().flat_map(|span| between(*span, &during)).collect();
        let some = |spans: &[Span]| (!operations.is_empty()).then(|| windows(&observed, spans));
        let whole = seen(windows(&observed, &spans), &operations, longest(&stalls, &spans));
        (mode.to_owned(), WindowLatencies { during: some(&during), beside: some(&beside), ..whole })
    };
    done.into_iter().map(split).collect()
}

/// Returns the longest of the stalls that overlap any of these spans, in microseconds.
fn longest(stalls: &[Stall], spans: &[Span]) -> f64 {
    let reaches = |stall: &&Stall, span: &Span| stall.ended_ns >= span.0 && stall.ended_ns - stall.ns <= span.1;
    let inside = stalls.iter().filter(|stall| spans.iter().any(|span| reaches(stall, span)));
    inside.map(|stall| stall.ns).max().unwrap_or(0) as f64 / 1e3
}

/// Returns the parts of `span` without these spans, which follow one another.
fn between(span: Span, without: &[Span]) -> Vec<Span> {
    let within = |w: &&Span| w.0 < span.1 && w.1 > span.0;
    let ends = std::iter::once(span.0).chain(without.iter().filter(within).map(|w| w.1));
    let begins = without.iter().filter(within).map(|w| w.0).chain(std::iter::once(span.1));
    ends.zip(begins).filter(|(from, to)| from < to).collect()
}

fn commit() -> String {
    let output =
        std::process::Command::new("git").args(["describe", "--always"]).current_dir(workspace_root()).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

fn section(load: Load, rounds: &[Round], seconds: u64) -> Section {
    let columns = [
        "round",
        "mode",
        "operations",
        "threads over, ms: median (max)",
        "all threads stopped: median (max)",
        "requests",
        "p50",
        "p99",
        "p99.9",
        "max",
        "p99.9, max during operations",
        "p99.9, max beside them",
        "longest stall of a processor",
        "p99.9 to left alone",
        "max to left alone",
    ];
    let title = format!(
        "MariaDB, a thread per connection, {}, {IDLE} idle: latency, us, left alone and patched or reverted once a second ({seconds} s each, by blocks of {} s)",
        load.described(),
        load.block_seconds(seconds)
    );
    let mut section = Section::new(load.name(), title, &columns);
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let mut ratios: BTreeMap<&str, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
    let mut failed = 0;
    for (at, round) in rounds.iter().enumerate() {
        let alone = &round.windows[WITHOUT].window;
        for mode in [WITHOUT].into_iter().chain(MODES) {
            let seen = &round.windows[mode];
            let w = &seen.window;
            failed += w.failed;
            let (p999, max) = (ratio(w.p999_us, alone.p999_us), ratio(w.max_us, alone.max_us));
            let (over, all) = (Spread::of(seen.over_ms.clone()), Spread::of(seen.all_us.clone()));
            let part = |of: &Option<Window>| match of {
                Some(w) => format!("{}, {}", number(w.p999_us), number(w.max_us)),
                None => "-".to_owned(),
            };
            let only = |text: String| if mode == WITHOUT { "-".to_owned() } else { text };
            section.rows.push(vec![
                (at + 1).to_string(),
                super::shown(mode),
                seen.operations.to_string(),
                only(format!("{} ({})", number(over.median), number(over.max))),
                only(format!("{} ({})", number(all.median), number(all.max))),
                w.requests.to_string(),
                number(w.p50_us),
                number(w.p99_us),
                number(w.p999_us),
                number(w.max_us),
                part(&seen.during),
                part(&seen.beside),
                seen.stall_us_max.map_or("-".to_owned(), number),
                only(number(p999)),
                only(number(max)),
            ]);
            if mode != WITHOUT {
                let of = ratios.entry(mode).or_default();
                of.0.push(p999);
                of.1.push(max);
            }
        }
    }
    for mode in MODES {
        let (p999, max) = &ratios[mode];
        let (p999, max) = (Spread::of(p999.clone()), Spread::of(max.clone()));
        section.notes.push(format!(
            "`{mode}`, {} pairs: ratio of p99.9 to left alone: median {} ({} to {}); of the maxima: median {} ({} to {}).",
            p999.count, number(p999.median), number(p999.min), number(p999.max), number(max.median), number(max.min), number(max.max)
        ));
    }
    section.notes.push(format!("{failed} requests failed. The patch is of the function under every statement."));
    section.raw(&rounds);
    section
}
