//! Summary at the end of a run: seconds by pillar, the slowest units, and the cache's hits and misses.

use crate::process::{Counts, Outcome};
use std::collections::BTreeMap;
use std::path::Path;

/// Number of slowest units that are listed.
const SLOWEST: usize = 10;

/// Misses in the cache that took at least this many seconds are named.
const SLOW_MISS_SECONDS: f64 = 5.0;

/// Unit or step that ran.
struct Entry {
    name: String,
    pillar: &'static str,
    wall_seconds: f64,
    processor_seconds: f64,
}

/// Results of a run.
#[derive(Default)]
pub(crate) struct Summary {
    entries: Vec<Entry>,
    /// Tests that passed, failed and were skipped.
    pub(crate) total: Counts,
    /// Tests of these that did not run, since they passed before with the same inputs.
    pub(crate) passed_before: u64,
    /// Commands that run the failed steps by hand.
    pub(crate) failed: Vec<String>,
}

impl Summary {
    /// Adds a step that has ended; `by_hand` is the command that repeats it.
    pub(crate) fn add(&mut self, name: &str, by_hand: &str, outcome: &Outcome, counts: Counts) {
        if counts.failed > 0 {
            self.failed.push(by_hand.to_owned());
        }
        self.total += counts;
        self.entries.push(Entry {
            name: name.to_owned(),
            pillar: pillar(name),
            wall_seconds: outcome.elapsed.as_secs_f64(),
            processor_seconds: outcome.processor.as_secs_f64(),
        });
    }

    /// Adds tests that passed before and do not run.
    pub(crate) fn add_passed_before(&mut self, counts: Counts) {
        self.total += counts;
        self.passed_before += counts.passed;
    }

    /// Seconds of all steps.
    pub(crate) fn seconds(&self) -> f64 {
        self.entries.iter().map(|entry| entry.wall_seconds).sum()
    }

    /// Prints seconds by pillar, the slowest units, and the hits and misses in `cache_log`.
    pub(crate) fn print(&self, cache_log: &Path) {
        println!("\nseconds by pillar (processor seconds; units that ran side by side count in full)");
        let mut pillars: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for entry in &self.entries {
            let (wall, processor) = pillars.entry(entry.pillar).or_default();
            *wall += entry.wall_seconds;
            *processor += entry.processor_seconds;
        }
        for (pillar, (wall, processor)) in pillars {
            println!("{wall:>9.0} s  {processor:>7.0}  {pillar}");
        }
        println!("the slowest");
        let mut entries: Vec<&Entry> = self.entries.iter().collect();
        entries.sort_by(|a, b| b.wall_seconds.total_cmp(&a.wall_seconds));
        for Entry { name, wall_seconds, processor_seconds, .. } in entries.into_iter().take(SLOWEST) {
            println!("{wall_seconds:>9.0} s  {processor_seconds:>7.0}  {name}");
        }
        println!("{}", cache(&std::fs::read_to_string(cache_log).unwrap_or_default()));
    }
}

/// Pillar of a unit or a step.
fn pillar(name: &str) -> &'static str {
    let package = name.split(' ').next().unwrap_or_default();
    match package.strip_prefix("stillpoint-").unwrap_or(package).split('-').next() {
        Some("patch" | "runtime" | "generations" | "integrations" | "kernel_with_generations") => "patch",
        Some("migrate") => "migrate",
        Some("kernel") => "kernel",
        Some("measure") => "measure",
        _ => "shared",
    }
}

/// Summarizes a log with a line `hit KIND/NAME` or `miss KIND/NAME SECONDS` for each lookup.
fn cache(log: &str) -> String {
    let (mut hits, mut misses, mut slow) = (0, 0, Vec::new());
    for line in log.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["hit", _] => hits += 1,
            ["miss", name, seconds] => {
                misses += 1;
                let seconds = seconds.parse().unwrap_or(0.0);
                slow.extend((seconds >= SLOW_MISS_SECONDS).then(|| format!("\n{seconds:>9.0} s  made {name}")));
            }
            _ => {}
        }
    }
    format!("cache: {hits} hits, {misses} misses{}", slow.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_crate_belongs_to_a_pillar() {
        assert_eq!(pillar("stillpoint-patch-tests crash"), "patch");
        assert_eq!(pillar("stillpoint-migrate-proxy unit"), "migrate");
        assert_eq!(pillar("stillpoint unit (stillpoint)"), "shared");
        assert_eq!(pillar("fuzz elf"), "shared");
    }

    #[test]
    fn lookups_add_up_and_slow_ones_are_named() {
        let log = "hit root/a\nmiss built/b 220.4\nmiss text/c 0.1\nhit root/a\ncut of";
        assert_eq!(cache(log), "cache: 2 hits, 2 misses\n      220 s  made built/b");
    }
}
