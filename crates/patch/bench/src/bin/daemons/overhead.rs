//! Memory, processor time and latency of servers with quiescence points, libstillpoint and patches, beside Debian's own
//! program (OSDI 2020, tables 2 and 3): each variant under the same load by schedule, in turns.

use crate::{Subject, USAGE};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use stillpoint_measure::record::Record;
use stillpoint_measure::summary::Distribution;
use stillpoint_patch_bench::consumption::{cpu_us, memory};
use stillpoint_patch_bench::operation::{MODES, Spread};
use stillpoint_patch_tests::shipped_program::MonitoredLoad;

/// Runs of each variant.
const RUNS: usize = 3;
/// Time for connecting and filling caches.
const BEFORE: Duration = Duration::from_secs(2);

/// One program, with the mode in which it was patched before.
struct Variant<'a> {
    name: String,
    subject: &'a Subject,
    mode: Option<&'static str>,
}

/// One measurement: a value of each column.
type Measurement = BTreeMap<&'static str, f64>;

/// Columns, with what a value is divided by.
const COLUMNS: [(&str, f64); 6] = [
    ("processor time of a request, us", 1.0),
    ("p50, us", 1.0),
    ("mean, us", 1.0),
    ("Pss, MiB", 1024.0),
    ("private, MiB", 1024.0),
    ("page tables, KiB", 1.0),
];

/// Prints a table of all subjects, each with and without points.
pub(crate) fn overhead(state: &Path, seconds: u32, names: &[String]) -> Result<(), String> {
    if names.is_empty() {
        return Err(USAGE.into());
    }
    println!(
        "\n### Servers with points, libstillpoint and patches: medians of {RUNS} runs of {seconds} s in turns (smallest to largest)\n"
    );
    println!("| server | program | {} |", COLUMNS.map(|(name, _)| name).join(" | "));
    println!("|{}", " --- |".repeat(COLUMNS.len() + 2));
    for name in names {
        let (plain, points) = (Subject::named(name)?, Subject::named(&format!("{name}-points"))?);
        let variant = |what: &str, subject, mode: Option<&'static str>| Variant {
            name: mode.map_or(what.to_owned(), |mode| format!("{what}, patched by `--quiescence {mode}`")),
            subject,
            mode,
        };
        let mut variants = vec![
            variant("as shipped", &plain, None),
            variant("as shipped", &plain, Some("probe")),
            variant("with points", &points, None),
        ];
        variants.extend(MODES.map(|mode| variant("with points", &points, Some(mode))));
        let mut measured: Vec<Vec<Measurement>> = variants.iter().map(|_| Vec::new()).collect();
        for round in 0..RUNS {
            // forward and backward: changes over time affect all variants equally
            let mut order: Vec<usize> = (0..variants.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for at in order {
                measured[at].push(measure(&variants[at], state, seconds)?);
            }
        }
        for (variant, runs) in variants.iter().zip(&measured) {
            let cell = |(column, by): (&str, f64)| {
                let spread = Spread::of(runs.iter().map(|run| run[column] / by).collect());
                format!("{:.1} ({:.1} to {:.1})", spread.median, spread.min, spread.max)
            };
            println!("| {name} | {} | {} |", variant.name, COLUMNS.map(cell).join(" | "));
        }
    }
    println!(
        "\nMemory is that of all processes, before the load. A restart brings in what is in the program as shipped, without patches."
    );
    Ok(())
}

fn measure(variant: &Variant<'_>, state: &Path, seconds: u32) -> Result<Measurement, String> {
    let state = variant.subject.directory(state)?;
    let (mut daemon, mut plan) = variant.subject.serve()?;
    if let Some(mode) = variant.mode {
        let (patch, _) = variant.subject.patch_of_all(&state)?;
        daemon.call("apply").arg(&patch).args(["--timeout", "60s", "--quiescence", mode]).succeed();
    }
    std::thread::sleep(BEFORE);
    let memory = memory(&daemon.processes());
    let record = state.join("overhead.record");
    plan.record = Some(record.clone());
    let load = MonitoredLoad::of(plan);
    std::thread::sleep(BEFORE);
    let before = cpu_us(&daemon.processes());
    let from = stillpoint_measure::clock::now_ns();
    std::thread::sleep(Duration::from_secs(u64::from(seconds)));
    let (to, used) = (stillpoint_measure::clock::now_ns(), cpu_us(&daemon.processes()) - before);
    load.assert_clean();
    daemon.assert_unharmed();
    let seen = Record::open(&record).map_err(|e| format!("{}: {e}", record.display()))?;
    std::fs::remove_file(&record).map_err(|e| format!("{}: {e}", record.display()))?;
    let (mut latencies, mut sum) = (Distribution::default(), 0);
    for sample in seen.samples.iter().filter(|s| s.ended_ns() >= from && s.ended_ns() <= to) {
        latencies.add(sample.ended_ns() - sample.scheduled_ns);
        sum += sample.ended_ns() - sample.scheduled_ns;
    }
    let requests = latencies.count() as f64;
    Ok(Measurement::from([
        ("processor time of a request, us", used / requests),
        ("p50, us", latencies.quantile(0.5) as f64 / 1e3),
        ("mean, us", sum as f64 / 1e3 / requests),
        ("Pss, MiB", memory.pss),
        ("private, MiB", memory.private),
        ("page tables, KiB", memory.page_tables),
    ]))
}
