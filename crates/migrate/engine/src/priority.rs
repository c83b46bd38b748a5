//! Gives our own sessions at servers of this machine less weight than clients' sessions while a target follows.
//!
//! Following takes about as much processor time as clients leave idle while they wait for the disk, but at the wrong moments:
//! every commit wakes the process that reads the log, that one wakes us, and we wake apply workers, each ahead of a client.
//! With less weight they take what is left, and more work in each turn. But a replay must not fall behind for ever if clients
//! leave nothing idle. So while the replay does not gain on the source, its sessions get more weight, in the end more than
//! clients, and keep it until the lag is short. Otherwise the reader of an overloaded server's log gets less than a hundredth
//! of its time, and such servers are the ones to move away from.
//!
//! Weight must be restored before clients wait for the target, and only root may do that for others' processes; without root no
//! weight is changed. Our sessions end with this process, so a kill leaves nothing behind.

use crate::options::Options;
use crate::weight::{FULL_WEIGHT, check_local_process, niceness, set_weight};
use rustix::thread::CapabilitySet;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use stillpoint_migrate_apply::replication_objects;
use stillpoint_migrate_apply::{Error, ReplayStatus};
use stillpoint_migrate_postgres::link::{Link, Purpose, literal, number};
use tokio::sync::watch;

/// Weight of each process, at least; it is doubled while it is not enough, up to the maximum.
const WEIGHT_MIN: u64 = 36;
const WEIGHT_MAX: u64 = 16 * FULL_WEIGHT;
/// Lag in bytes of log below which a replay is never late.
const LAG_BYTES_TOLERATED: u64 = 1 << 20;
/// Number of windows in which a late replay must catch up, at the rate of the last window.
const CATCH_UP_WINDOWS: u64 = 32;

/// Processes that have less weight now; `None` after it was restored.
pub(crate) type LoweredProcesses = Arc<Mutex<Option<HashSet<i32>>>>;

/// Adjusts the weight of our sessions.
pub(crate) struct SessionPriority {
    /// One connection to each server.
    links: Vec<Link>,
    sessions_sql: String,
    status: watch::Receiver<ReplayStatus>,
    weight: u64,
    lowered: LoweredProcesses,
    last: Option<ReplayLag>,
}

/// Position of the source, and the lag of the replay.
#[derive(Debug, Clone, Copy)]
struct ReplayLag {
    end: u64,
    lag_bytes: u64,
}

impl ReplayLag {
    /// Returns the new weight of sessions that had `weight` since `before`: more while the lag grows or shrinks too slowly;
    /// less only if the replay is not late, and then by little, because otherwise it would fall behind again.
    fn weight(self, before: ReplayLag, weight: u64) -> u64 {
        let written = self.end.saturating_sub(before.end);
        let weight = if self.lag_bytes <= LAG_BYTES_TOLERATED.max(written) {
            weight - weight / 8
        } else if self.lag_bytes + (written / 8).max(before.lag_bytes / CATCH_UP_WINDOWS) >= before.lag_bytes {
            weight * 2
        } else {
            weight
        };
        weight.clamp(WEIGHT_MIN, WEIGHT_MAX)
    }
}

impl SessionPriority {
    /// Makes one for a migration to one target, with both servers on this machine and the right to restore weight; otherwise
    /// `None`.
    pub(crate) async fn new(
        options: &Options,
        status: watch::Receiver<ReplayStatus>,
        lowered: &LoweredProcesses,
    ) -> Result<Option<SessionPriority>, Error> {
        let Options { source, target, others, .. } = options;
        if !(source.is_local() && target.is_local() && others.is_empty() && can_restore_priority()) {
            return Ok(None);
        }
        let mut links = Vec::new();
        for server in [source, target] {
            links.push(Link::connect(server, Purpose::Statements, &[]).await?);
        }
        let sessions_sql = format!(
            "SELECT pid, extract(epoch FROM clock_timestamp() - backend_start) FROM pg_stat_activity \
             WHERE application_name = {} AND datname = current_database()",
            literal(stillpoint_migrate_postgres::link::APPLICATION)
        );
        Ok(Some(SessionPriority {
            links,
            sessions_sql,
            status,
            weight: WEIGHT_MIN,
            lowered: Arc::clone(lowered),
            last: None,
        }))
    }

    /// Sets, once in a window, the weight of all our sessions.
    pub(crate) async fn set_weights(&mut self) -> Result<(), Error> {
        let end = replication_objects::lsn(&self.links[0].text("SELECT pg_current_wal_lsn()").await?);
        let lag = ReplayLag { end, lag_bytes: end.saturating_sub(self.status.borrow().position) };
        if let Some(last) = self.last.replace(lag) {
            self.weight = lag.weight(last, self.weight);
        }
        let nice = niceness(self.weight);
        for link in &mut self.links {
            for row in link.query(&self.sessions_sql).await? {
                let (pid, age_s) = (number(&row, 0), number(&row, 1));
                let mut lowered = self.lowered.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(lowered) = &mut *lowered else { return Ok(()) };
                // It may have ended meanwhile, or its server runs in another PID namespace.
                if check_local_process(pid, age_s).and_then(|()| set_weight(pid, nice)).is_ok() {
                    lowered.insert(pid);
                }
            }
        }
        Ok(())
    }
}

/// Restores the weight of all sessions; it is not reduced again.
pub(crate) fn restore_priority(lowered: &LoweredProcesses) {
    let lowered = lowered.lock().unwrap_or_else(PoisonError::into_inner).take();
    for pid in lowered.into_iter().flatten() {
        if let Err(error) = set_weight(pid, 0)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(pid, %error, "cannot restore the weight of a session; it stays below that of clients");
        }
    }
}

fn can_restore_priority() -> bool {
    rustix::process::geteuid().is_root()
        && rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_weighs_more_until_it_gains_on_the_source_and_less_when_it_is_there() {
        let lag = |end: u64, lag_bytes: u64| ReplayLag { end: end << 20, lag_bytes: lag_bytes << 20 };
        let weight = |now: ReplayLag, before: ReplayLag| now.weight(before, 8 * WEIGHT_MIN) / WEIGHT_MIN;
        let before = lag(100, 50);
        assert_eq!(weight(lag(108, 58), before), 16, "it stands");
        assert_eq!(weight(lag(108, 50), before), 16, "as far behind as before");
        assert_eq!(weight(lag(108, 40), before), 8, "it gains");
        assert_eq!(weight(lag(101, 639), lag(100, 640)), 16, "but would take minutes");
        assert_eq!(weight(lag(108, 4), lag(100, 2)), 7, "less than a window's worth");
        assert_eq!(weight(lag(100, 1), lag(100, 1)), 7, "nothing is written");
        assert_eq!(weight(lag(100, 2), lag(100, 2)), 16, "and it does not move");
        assert_eq!(before.weight(before, WEIGHT_MAX), WEIGHT_MAX);
        assert_eq!(lag(101, 0).weight(before, WEIGHT_MIN), WEIGHT_MIN);
    }
}
