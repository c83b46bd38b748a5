//! Limits the processor time that sessions at a target take from clients on the same machine.
//!
//! An index is not built piece by piece, as rows are copied, and no server setting makes that slower. Stopping the process for
//! part of the time would be exact, but if this command were killed then, the process would stay stopped and hold its locks. So
//! if the target runs on this machine and we have the permission, its processes that build indexes get less weight than those
//! of clients, because no client waits for a target yet. Linux applies weight at two levels: to groups of processes by their
//! session (`autogroup`, if it is enabled), and to a process in its group. Each process of PostgreSQL is its own session.

use crate::progress::Reporter;
use rustix::io::Errno;
use rustix::process::{Pid, setpriority_process};
use std::io;
use std::time::Duration;
use stillpoint_events::migrate;
use stillpoint_host::kernel_files;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::throttle::{Bounds, Throttle};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, number};

/// Weight of a process with unchanged priority.
pub(crate) const FULL_WEIGHT: u64 = 1024;
/// Limits of a process's weight, relative to [`FULL_WEIGHT`]. With the lowest, an index takes about 20 times as long on a busy
/// machine.
pub(crate) const WEIGHT_BOUNDS: Bounds = Bounds {
    min: 70,
    initial: 110,
    max: FULL_WEIGHT,
    make_event: |kept_percent, weight| migrate::Event::Yielding {
        kept_percent,
        weight_percent: weight * 100 / FULL_WEIGHT,
    },
};
/// Interval at which sessions are searched for.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum difference in seconds between the start of a process and the start that its server reports.
const START_TOLERANCE_S: f64 = 2.0;

/// Runs `work` and limits the weight of the target's sessions that do it; `sessions` is a condition on `pg_stat_activity`.
pub(crate) async fn run_with_weight<T>(
    target: &Server,
    sessions: &str,
    weight: Option<&Throttle>,
    reporter: &Reporter,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(weight) = weight.filter(|_| target.is_local()) else { return work.await };
    let mut link = Link::connect(&target.database("postgres"), Purpose::Statements, &[]).await?;
    let which = format!(
        "SELECT pid, extract(epoch FROM clock_timestamp() - backend_start) FROM pg_stat_activity WHERE {sessions}"
    );
    let (mut tick, mut warned) = (tokio::time::interval(POLL_INTERVAL), false);
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = tick.tick() => {
                let nice = niceness(weight.rate());
                for row in link.query(&which).await? {
                    let (pid, age_s) = (number(&row, 0), number(&row, 1));
                    match check_local_process(pid, age_s).and_then(|()| set_weight(pid, nice)) {
                        Ok(()) => weight.record_uncounted_work(),
                        // The process has ended, or only a superuser may raise weight again.
                        Err(error) if warned || error.kind() == io::ErrorKind::NotFound => {}
                        Err(error) => {
                            warned = true;
                            reporter.warn(format!("cannot lower the weight of index builds on the target: {error}"));
                        }
                    }
                }
            }
        }
    }
}

/// The nice value nearest to `weight`; each step takes away a fifth of the weight.
pub(crate) fn niceness(weight: u64) -> i32 {
    let steps = (FULL_WEIGHT as f64 / weight.max(1) as f64).ln() / 1.25_f64.ln();
    steps.round().clamp(-20.0, 19.0) as i32
}

/// Returns `Ok` if `pid` is the server's process here. In another PID namespace the server's number may be another process
/// here.
pub(crate) fn check_local_process(pid: i32, age_s: f64) -> io::Result<()> {
    let stat = kernel_files::text(format!("/proc/{pid}/stat"))?;
    let uptime = kernel_files::text("/proc/uptime")?;
    let age = age_here_s(&stat, &uptime, rustix::param::clock_ticks_per_second());
    if age.is_some_and(|age| (age - age_s).abs() < START_TOLERANCE_S) {
        return Ok(());
    }
    Err(io::Error::other("its processes are not visible on this machine"))
}

/// Age in seconds of a process, if it is PostgreSQL's.
fn age_here_s(stat: &str, uptime: &str, ticks_per_s: u64) -> Option<f64> {
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let began: f64 = rest.split_whitespace().nth(19)?.parse().ok()?;
    let now: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    (name == "postgres").then_some(now - began / ticks_per_s as f64)
}

pub(crate) fn set_weight(pid: i32, nice: i32) -> io::Result<()> {
    match kernel_files::write(format!("/proc/{pid}/autogroup"), nice.to_string()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    setpriority_process(Pid::from_raw(pid), nice).map_err(|error| match error {
        Errno::SRCH => io::ErrorKind::NotFound.into(),
        error => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_become_nice_values() {
        let values = [16 * 1024, 1024, 820, 335, 110, 70, 15, 0].map(niceness);
        assert_eq!(values, [-12, 0, 1, 5, 10, 12, 19, 19]);
    }

    #[test]
    fn a_process_is_the_servers_when_it_is_as_old() {
        let stat = |name: &str| format!("42 ({name}) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 9000 1 2 3");
        assert_eq!(age_here_s(&stat("postgres"), "100.50 7.00\n", 100), Some(10.5));
        assert_eq!(age_here_s(&stat("a) (b"), "100.50 7.00\n", 100), None);
        assert_eq!(age_here_s("42", "100.50 7.00\n", 100), None);
    }

    #[test]
    fn who_is_not_there_is_not_weighed() {
        let absent = i32::MAX;
        assert_eq!(check_local_process(absent, 1.0).unwrap_err().kind(), io::ErrorKind::NotFound);
        let we = std::process::id() as i32;
        assert!(check_local_process(we, 1.0).unwrap_err().to_string().contains("not visible"));
    }
}
