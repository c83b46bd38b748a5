//! Transactions in pgbench's logs.

use rustix::time::{ClockId, clock_gettime};
use std::fs;
use stillpoint_testing::postgresql::Cluster;

/// One transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    /// Number of the load's session that asked.
    pub(crate) client: u32,
    /// Time of its commit: seconds since 1970.
    pub(crate) at_s: f64,
    pub(crate) latency_ms: f64,
}

fn clock_s(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// Current time in seconds, by the clock of the logs.
pub(crate) fn now_s() -> f64 {
    clock_s(ClockId::Realtime)
}

/// Time of an event in seconds, by the clock of the logs.
pub(crate) fn of_event_s(t_ns: u64) -> f64 {
    t_ns as f64 / 1e9 + now_s() - clock_s(ClockId::Monotonic)
}

/// Transactions in the logs of all loads started at a server: `client transaction latency_us script seconds
/// microseconds`.
pub(crate) fn answers(at_server: &Cluster) -> Vec<Answer> {
    let mut answers = Vec::new();
    for entry in fs::read_dir(at_server.socket_dir()).expect("list the logs").flatten() {
        if !entry.file_name().to_string_lossy().starts_with("pgbench_log.") {
            continue;
        }
        for line in fs::read_to_string(entry.path()).expect("read a log").lines() {
            let words: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let [client, _, latency_us, _, seconds, microseconds, ..] = words[..] else { continue };
            answers.push(Answer {
                client: client as u32,
                at_s: seconds + microseconds / 1e6,
                latency_ms: latency_us / 1e3,
            });
        }
    }
    answers
}
