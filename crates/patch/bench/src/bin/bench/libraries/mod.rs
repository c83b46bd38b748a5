//! Time to patch a library in all processes of a machine that map it, and the answers that their clients get meanwhile.

mod clients;
mod crypto_patch;
mod programs;

use crate::results::{Section, number};
use clients::Clients;
use programs::Machine;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use stillpoint_patch_tests::cli::Stillpoint;

/// Number of processes, and of rounds of apply and revert.
pub(crate) struct Amount {
    pub(crate) processes: usize,
    pub(crate) rounds: usize,
}

#[derive(Serialize)]
struct Measurement {
    processes: BTreeMap<String, usize>,
    calls: Vec<Call>,
}

#[derive(Serialize)]
struct Call {
    operation: &'static str,
    seconds: f64,
    changed: u64,
    answers: u64,
    failed: usize,
    longest_gap_ms: f64,
}

/// Measures applies and reverts of a patch for OpenSSL's `libcrypto`.
pub(crate) fn libraries(amount: &Amount) -> Result<Section, String> {
    let patch = crypto_patch::build().map_err(|error| error.text().to_owned())?;
    let mut machine = Machine::start(&patch, amount.processes)?;
    let clients = Clients::start(&mut machine);
    clients.await_answers();
    let processes = mapping(&patch.library);
    let mut calls = vec![watch("left alone", &clients, || {
        std::thread::sleep(Duration::from_secs(5));
        0
    })];
    for _ in 0..amount.rounds {
        let library = || Stillpoint::new().arg("patch");
        let apply = library().arg("apply").arg(&patch.file).arg("--library").arg(&patch.library);
        let revert = library().arg("revert").arg("--library").arg(&patch.library);
        for (operation, call) in [("apply", &apply), ("apply again", &apply), ("revert", &revert)] {
            calls.push(watch(operation, &clients, || changed(call)));
        }
    }
    let failures = clients.end();
    machine.assert_running();
    let mut section = section(&processes, &calls);
    section.notes.extend(failures.iter().take(5).map(|failure| format!("failed: {failure}")));
    section.raw(&Measurement { processes, calls });
    Ok(section)
}

/// Runs the call, and returns the number of processes that it has changed.
fn changed(call: &Stillpoint) -> u64 {
    let run = call.clone().json().run();
    assert_eq!(run.code, Some(0), "{run}");
    let lines = run.json();
    let wave = lines.iter().find(|line| line["event"] == "wave").unwrap_or_else(|| panic!("no result\n{run}"));
    wave["done"].as_u64().unwrap_or_default()
}

fn watch(operation: &'static str, clients: &Clients, work: impl FnOnce() -> u64) -> Call {
    let (before, begun) = (clients.counts(), Instant::now());
    clients.begin_window();
    let changed = work();
    let seconds = begun.elapsed().as_secs_f64();
    // answers to requests that were sent meanwhile
    clients.await_answers();
    let after = clients.counts();
    Call {
        operation,
        seconds,
        changed,
        answers: after.answers - before.answers,
        failed: after.failed - before.failed,
        longest_gap_ms: clients.longest_gap().as_secs_f64() * 1e3,
    }
}

/// Returns the number of processes that map a file, by command name.
fn mapping(library: &Path) -> BTreeMap<String, usize> {
    let mut processes = BTreeMap::new();
    let name = library.display().to_string();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let text = |file: &str| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        if text("maps").lines().any(|line| line.ends_with(&name)) {
            *processes.entry(text("comm").trim_end().to_owned()).or_default() += 1;
        }
    }
    processes
}

fn section(processes: &BTreeMap<String, usize>, calls: &[Call]) -> Section {
    let count: usize = processes.values().sum();
    let columns =
        ["operation", "seconds", "processes changed", "answers meanwhile", "failed", "longest gap of a client, ms"];
    let mut section =
        Section::new("libraries", format!("libcrypto patched in {count} processes of one machine"), &columns);
    for call in calls {
        section.rows.push(vec![
            call.operation.into(),
            number(call.seconds),
            call.changed.to_string(),
            call.answers.to_string(),
            call.failed.to_string(),
            number(call.longest_gap_ms),
        ]);
    }
    let kinds: Vec<String> = processes.iter().map(|(name, count)| format!("{count} {name}")).collect();
    section.notes.push(format!("Processes: {}.", kinds.join(", ")));
    section
}
