//! Cost of an operation for clients, by single seconds of all kinds in random order. Disturbances by the machine affect
//! all kinds equally, and the cost of starting any program is separated from that of patching.

use super::periodic_patching::{CONNECTIONS, IDLE, STATEMENTS_PER_S};
use super::{Amount, start, until};
use crate::latency::{Span, windows};
use crate::results::{Section, number};
use serde::Serialize;
use std::path::Path;
use stillpoint_measure::clock::now_ns;
use stillpoint_patch_bench::operation::PendingOperation;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::mariadb::Policy;
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::client::Client;
use stillpoint_patch_tests::mariadb::effect::nothing;
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_patch_tests::patch_calls;
use stillpoint_testing::random::Random;

/// Event at the beginning of a second: none, a program without effect on the server, one apply or revert.
const KINDS: [&str; 4] = ["none", "program", "probe", "local"];
/// Latency above which a statement is slow.
const SLOW_NS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

#[derive(Serialize)]
struct SecondSample {
    kind: &'static str,
    seconds: usize,
    slow_a_second: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
}

pub(super) fn measure(server: &Annotated, amount: Amount) -> Section {
    let mariadb = start(server, Policy::ThreadPerConnection, Work::Ycsb, &[]);
    let patch = nothing(server);
    let idle: Vec<Client> = (0..IDLE).map(|_| mariadb.client()).collect();
    let plan = Plan { work: Work::Ycsb, connections: CONNECTIONS, rate: Some(STATEMENTS_PER_S), first: 0 };
    let mut load = Traffic::start(&mariadb, &plan);
    // The first seconds of a load include connecting and filling caches.
    super::rest(3.0);
    let kinds = shuffled(5 * amount.seconds as usize);
    let begun = now_ns();
    let mut patched = false;
    let mut called = Vec::new();
    for (second, &kind) in (0..).zip(&kinds) {
        until(begun + second * SECOND);
        called.extend(act(kind, mariadb.pid(), patch, &mut patched));
    }
    until(begun + kinds.len() as u64 * SECOND);
    load.assert_running();
    let observed = load.finish();
    drop(idle);
    called.into_iter().for_each(|called| drop(called.operation().succeeded()));
    let of_kind = |wanted| {
        let at = |(second, _): (u64, &&str)| (begun + second * SECOND, begun + (second + 1) * SECOND);
        (0..).zip(&kinds).filter(|(_, kind)| **kind == wanted).map(at).collect::<Vec<Span>>()
    };
    let seen = KINDS.map(|kind| {
        let spans = of_kind(kind);
        let inside = |at: u64| spans.iter().any(|span| (span.0..span.1).contains(&at));
        let slow = observed.record.samples.iter().filter(|sample| sample.ended_ns() - sample.scheduled_ns > SLOW_NS);
        let slow = slow.filter(|sample| inside(sample.scheduled_ns)).count();
        let window = windows(&observed, &spans);
        SecondSample {
            kind,
            seconds: spans.len(),
            slow_a_second: slow as f64 / spans.len() as f64,
            p50_us: window.p50_us,
            p99_us: window.p99_us,
            p999_us: window.p999_us,
            max_us: window.max_us,
        }
    });
    section(&seen)
}

/// Returns the same number of each kind, in an order that depends only on the number.
fn shuffled(of_each: usize) -> Vec<&'static str> {
    let mut kinds: Vec<&str> = KINDS.iter().flat_map(|&kind| std::iter::repeat_n(kind, of_each)).collect();
    let mut random = Random::new(1);
    for at in (1..kinds.len()).rev() {
        kinds.swap(at, random.index(at + 1));
    }
    kinds
}

fn act(kind: &str, pid: i32, patch: &Path, patched: &mut bool) -> Option<PendingOperation> {
    match kind {
        "none" => None,
        "program" => {
            Stillpoint::new().arg("--version").run_unread();
            None
        }
        mode => {
            let call = if *patched { patch_calls::revert(pid) } else { patch_calls::apply(patch, pid) };
            *patched = !*patched;
            Some(PendingOperation::of(call.args(["--quiescence", mode])))
        }
    }
}

fn section(seen: &[SecondSample]) -> Section {
    let columns = [
        "at the beginning of a second",
        "seconds",
        "over 1 ms a second",
        "p50",
        "p99",
        "p99.9",
        "max",
        "p99.9 to nothing",
    ];
    let title = format!(
        "MariaDB, a thread per connection, {STATEMENTS_PER_S} statements a second by {CONNECTIONS} clients, {IDLE} idle: latency, us, by single seconds"
    );
    let mut section = Section::new("mariadb-seconds", title, &columns);
    let alone = seen[0].p999_us;
    for seen in seen {
        let name = match seen.kind {
            "none" => "nothing".to_owned(),
            "program" => "`stillpoint --version`".to_owned(),
            mode => format!("apply or revert, --quiescence {mode}"),
        };
        section.rows.push(vec![
            name,
            seen.seconds.to_string(),
            number(seen.slow_a_second),
            number(seen.p50_us),
            number(seen.p99_us),
            number(seen.p999_us),
            number(seen.max_us),
            number(seen.p999_us / alone),
        ]);
    }
    section.raw(&seen);
    section
}
