//! pgbench's transaction logs as a record of `stillpoint measure`.

use rustix::time::{ClockId, clock_gettime};
use std::fs;
use std::path::Path;
use stillpoint_measure::record::{Header, Outcome, Record, Sample};

/// Reads everything that pgbench logged in a directory. With a rate, its latencies count from the time at which a
/// transaction was due, so no pause hides behind a client that waits. Adds the samples `others`, under the name
/// `called`.
pub(crate) fn of_logs(directory: &Path, port: u16, others: Vec<Sample>, called: String) -> Record {
    // The logs use wall-clock time, events the monotonic clock.
    let apart = nanoseconds(ClockId::Realtime) - now_ns();
    let mut samples = Vec::new();
    let logs = fs::read_dir(directory).expect("list the logs").flatten();
    for log in logs.filter(|entry| entry.file_name().to_string_lossy().starts_with("pgbench_log.")) {
        let text = fs::read_to_string(log.path()).expect("read a log of pgbench");
        samples.extend(text.lines().filter_map(|line| sample(line, apart)));
    }
    let of_logs = samples.iter().map(|sample| sample.connection + 1).max().unwrap_or(0);
    samples.extend(others.into_iter().map(|sample| Sample {
        connection: sample.connection + of_logs,
        kind: 1,
        ..sample
    }));
    let connections = samples.iter().map(|sample| sample.connection + 1).max().unwrap_or(0);
    let header = Header {
        protocol: "postgresql".into(),
        target: format!("127.0.0.1:{port}"),
        kinds: vec!["tpcb-like".into(), called],
        arrivals: "poisson".into(),
        connections,
        pipeline: 1,
        ..Header::default()
    };
    Record::of_others(header, samples, apart)
}

/// Current time in nanoseconds, by the clock that events use.
pub(crate) fn now_ns() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Parses `client transaction latency_us script seconds microseconds [lag_us]`; a latency that is not a number was a
/// failure.
fn sample(line: &str, apart: u64) -> Option<Sample> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
    let ended_ns = (number(4)? * 1_000_000 + number(5)?) * 1000 - apart;
    let latency_ns = number(2).unwrap_or(0) * 1000;
    let outcome = if number(2).is_some() { Outcome::Ok } else { Outcome::ErrorReply };
    let (scheduled_ns, connection) = (ended_ns.saturating_sub(latency_ns), number(0)? as u32);
    Some(Sample { scheduled_ns, latency_ns, late_us: 0, connection, kind: 0, outcome })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_log_is_a_sample() {
        let good = sample("3 17 2500 0 100 500 12", 1_000_000_000).unwrap();
        assert_eq!((good.connection, good.latency_ns, good.outcome), (3, 2_500_000, Outcome::Ok));
        assert_eq!(good.ended_ns(), 99_000_500_000);
        assert_eq!(sample("3 17 failed 0 100 500", 0).unwrap().outcome, Outcome::ErrorReply);
        assert!(sample("nonsense", 0).is_none());
    }
}
