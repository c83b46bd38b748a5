//! The clients' requests as a record of `stillpoint measure`.

use std::time::{Instant, SystemTime, UNIX_EPOCH};
use stillpoint_measure::record::{Header, Outcome, Record, Sample};
use stillpoint_testing::machine::clients::TimedRequest;

/// Converter of instants to nanoseconds: any zero is valid if records and events share it.
pub(crate) struct Clock {
    now: Instant,
    unix_ns: u64,
}

impl Clock {
    pub(crate) fn now() -> Clock {
        let unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        Clock { now: Instant::now(), unix_ns }
    }

    /// Returns the nanoseconds of an instant in the past.
    pub(crate) fn ns(&self, instant: Instant) -> u64 {
        self.unix_ns.saturating_sub(self.now.saturating_duration_since(instant).as_nanos() as u64)
    }
}

/// Makes a record of all requests, by kind and connection.
pub(crate) fn of_requests(beats: &[(u8, Vec<TimedRequest>)], clock: &Clock) -> Record {
    let mut samples = Vec::new();
    for (connection, (kind, beats)) in (0..).zip(beats) {
        samples.extend(beats.iter().map(|beat| Sample {
            scheduled_ns: clock.ns(beat.sent),
            latency_ns: beat.latency.as_nanos() as u64,
            late_us: 0,
            connection,
            kind: *kind,
            outcome: Outcome::Ok,
        }));
    }
    let header = Header {
        protocol: "redis, memcached and MariaDB".into(),
        target: "one emulated machine".into(),
        kinds: vec!["mariadb".into(), "memcached".into(), "redis".into()],
        arrivals: "closed".into(),
        connections: beats.len() as u32,
        pipeline: 1,
        ..Header::default()
    };
    Record::of_others(header, samples, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn requests_become_samples_in_the_order_of_their_ends() {
        let clock = Clock::now();
        let asked = clock.now - Duration::from_secs(10);
        let beat = |after: u64, took: u64| TimedRequest {
            sent: asked + Duration::from_secs(after),
            latency: Duration::from_secs(took),
        };
        let record = of_requests(&[(0, vec![beat(1, 7)]), (2, vec![beat(2, 1)])], &clock);
        let seen: Vec<(u32, u8)> = record.samples.iter().map(|sample| (sample.connection, sample.kind)).collect();
        assert_eq!(seen, [(1, 2), (0, 0)]);
        assert_eq!(record.end.unwrap().ended_ns - record.header.started_ns, 7_000_000_000);
    }
}
