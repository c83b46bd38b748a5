//! Measures how much clients suffer while a migration is at work, from the proxy's counts of their statements, and sets its
//! speed.
//!
//! ```text
//! kept = the lesser of: statements a second, of the last two windows / the usual ones
//!                       share * bearable / 95th percentile of the statements' time in the window
//! usual = before the work began; more if there is more; the present rate if nothing that we do makes a difference, until
//!         it does; bearable = twice the usual and a little
//! ```
//!
//! Clients that wait for their answers before they continue show a slow server in their throughput. Clients that arrive
//! independently of others' answers, as people do, keep their throughput until the server stops, and show it in the time of
//! their statements. For a load that begins while the migration is at work, the undisturbed state is unknown.
//!
//! A larger distance from the share gains nothing: where clients and both servers filled two processors, a throttle with twice the distance
//! took 284 s, and clients kept 82 to 85 % as before.

use crate::options::Options;
use crate::priority::{LoweredProcesses, SessionPriority, restore_priority};
use crate::progress::Reporter;
use crate::proxy_client::{ProxyClient, StatementCounts};
use crate::weight::WEIGHT_BOUNDS;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::throttle::{COMPARISON_BOUNDS, Throttle};
use stillpoint_migrate_apply::{Error, ReplayStatus};
use stillpoint_migrate_postgres::link::{Link, Purpose};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Time for which clients are measured before any work begins.
const BASELINE_TIME: Duration = Duration::from_secs(2);
/// Time after which clients that have sent no statement count as absent.
const ABSENCE_TIMEOUT: Duration = Duration::from_millis(300);
const WINDOW_LENGTH: Duration = Duration::from_secs(1);
/// Length that counts as a whole window, because ticks are not exact to the millisecond.
const WINDOW_MIN: Duration = Duration::from_millis(900);
/// Statements a second below which a rate is not significant.
const RATE_MIN: f64 = 20.0;
/// Number of windows at the lowest rate after which clients suffer from another cause than the migration.
const VAIN_WINDOWS: u32 = 10;
/// Maximum of that number, after the migration was the cause each time before.
const VAIN_WINDOWS_MAX: u32 = 16 * VAIN_WINDOWS;
/// Number of statements below which their slowest are not significant.
const WAITS_MIN: u64 = 100;
/// Increase in microseconds that clients do not notice, even for very short statements.
const UNNOTICED_INCREASE_US: f64 = 5000.0;

/// Throughput of the clients, as far as it is known.
pub(crate) struct Clients {
    proxy: ProxyClient,
    share: f64,
    /// Time of the last count, and the count.
    last: (Instant, StatementCounts),
    rates: Throughput,
    /// 95th percentile of the statements' time in microseconds, usual and last, if known.
    usual_wait: Option<f64>,
    last_wait: Option<f64>,
    /// The usual value before it was given up.
    given_up_wait: Option<f64>,
}

/// Measurements of one window.
struct Window {
    /// Statements a second.
    rate: f64,
    /// 95th percentile of the statements' time in microseconds, if there were enough.
    wait: Option<f64>,
}

/// Calculations on rates, in statements a second.
#[derive(Debug, Clone, Copy, Default)]
struct Throughput {
    usual: f64,
    smoothed: f64,
    last: f64,
    vain_windows: u32,
    /// Number of windows in vain after which the usual rate is given up.
    vain_windows_limit: u32,
    /// Usual rate before it was given up.
    given_up: Option<f64>,
}

impl Throughput {
    fn of(usual: f64) -> Throughput {
        let vain_windows_limit = VAIN_WINDOWS;
        Throughput { usual, smoothed: usual, last: usual, vain_windows_limit, ..Throughput::default() }
    }

    /// Returns the share of the usual rate that clients keep; `None` if there are too few statements.
    fn take(&mut self, rate: f64) -> Option<f64> {
        self.smoothed = self.smoothed * 0.8 + rate * 0.2;
        self.usual = self.usual.max(self.smoothed);
        let kept = (rate + self.last) / 2.0 / self.usual;
        self.last = rate;
        (self.usual >= RATE_MIN).then_some(kept)
    }

    /// Records a window in which the migration runs at its lowest rate and clients still suffer. Returns true if the usual rate
    /// is given up: the present rate counts as usual from now on.
    fn record_vain_window(&mut self) -> bool {
        self.vain_windows += 1;
        let given_up = self.vain_windows >= self.vain_windows_limit;
        if given_up {
            self.given_up = Some(self.usual);
            (self.usual, self.vain_windows) = (self.smoothed, 0);
        }
        given_up
    }

    /// Records that clients lose throughput when the migration runs faster. Returns true if the usual rate had been given up:
    /// the migration was the cause then, so the earlier rate is the usual one again, for longer.
    fn record_own_effect(&mut self) -> bool {
        let Some(usual) = self.given_up.take() else { return false };
        self.usual = self.usual.max(usual);
        self.vain_windows_limit = (2 * self.vain_windows_limit).min(VAIN_WINDOWS_MAX);
        true
    }
}

impl Clients {
    /// Measures clients undisturbed; `None` if the migration is to ignore them.
    pub(crate) async fn measure(options: &Options) -> Result<Option<Clients>, Error> {
        if options.share <= 0.0 {
            return Ok(None);
        }
        let mut proxy = ProxyClient::connect(&options.proxy, &options.tenant).await?;
        let last = (Instant::now(), proxy.served().await?);
        let (share, rates) = (options.share, Throughput::default());
        let mut clients =
            Clients { proxy, share, last: last.clone(), rates, usual_wait: None, last_wait: None, given_up_wait: None };
        tokio::time::sleep(ABSENCE_TIMEOUT).await;
        if clients.measure_window().await?.rate == 0.0 {
            return Ok(Some(clients));
        }
        clients.last = last;
        tokio::time::sleep(BASELINE_TIME - ABSENCE_TIMEOUT).await;
        let Window { rate, wait } = clients.measure_window().await?;
        (clients.rates, clients.usual_wait) = (Throughput::of(rate), wait);
        Ok(Some(clients))
    }

    /// Makes a second measurement of the same clients, for another task that adjusts to them.
    pub(crate) async fn reconnect(&self) -> Result<Clients, Error> {
        let mut proxy = self.proxy.reconnect().await?;
        let last = (Instant::now(), proxy.served().await?);
        let (share, rates, usual_wait) = (self.share, self.rates, self.usual_wait);
        Ok(Clients { proxy, share, last, rates, usual_wait, last_wait: None, given_up_wait: None })
    }

    /// Returns true if the load is large enough to adjust to.
    pub(crate) fn is_significant(&self) -> bool {
        self.rates.usual >= RATE_MIN
    }

    async fn measure_window(&mut self) -> Result<Window, Error> {
        let now = (Instant::now(), self.proxy.served().await?);
        let before = &self.last.1;
        let sent = |(session, count): (&u32, &u64)| count.saturating_sub(*before.statements.get(session).unwrap_or(&0));
        let statements: u64 = now.1.statements.iter().map(sent).sum();
        let rate = statements as f64 / (now.0 - self.last.0).as_secs_f64().max(0.001);
        let wait = percentile_95(&before.waits, &now.1.waits);
        self.last = now;
        Ok(Window { rate, wait })
    }

    /// Measures a window, even if another proxy may have replaced the first: that one counts from zero. `None` if there is no
    /// proxy, and so no client.
    async fn measure_window_or_reconnect(&mut self) -> Result<Option<Window>, Error> {
        match self.measure_window().await {
            Err(Error::ProxyGone(_)) => {
                if let Ok(proxy) = self.proxy.reconnect().await {
                    self.proxy = proxy;
                    self.last = (Instant::now(), self.proxy.served().await.unwrap_or_default());
                }
                Ok(None)
            }
            window => window.map(Some),
        }
    }

    /// Returns, once in a window, the share of their speed that clients keep; `None` if there are too few statements.
    async fn kept_share(&mut self) -> Result<Option<f64>, Error> {
        let Some(Window { rate, wait }) = self.measure_window_or_reconnect().await? else { return Ok(None) };
        self.last_wait = wait;
        let Some(kept) = self.rates.take(rate) else { return Ok(None) };
        let (Some(usual), Some(wait)) = (self.usual_wait, wait) else { return Ok(Some(kept)) };
        Ok(Some(kept.min(self.share * (2.0 * usual + UNNOTICED_INCREASE_US) / wait)))
    }

    /// Adjusts, once in a window, the speed of the work under way, and reports it.
    pub(crate) async fn adjust_speed(&mut self, throttles: &[&Throttle], reporter: &Reporter) -> Result<(), Error> {
        let window = self.last.0.elapsed();
        if window >= WINDOW_MIN
            && let Some(kept) = self.kept_share().await?
        {
            self.adjust_throttles(throttles, kept, window, reporter);
        }
        Ok(())
    }

    fn adjust_throttles(&mut self, throttles: &[&Throttle], kept: f64, window: Duration, reporter: &Reporter) {
        let mut at_work = false;
        let mut at_least = true;
        for throttle in throttles {
            let before = throttle.rate();
            let Some(allowed) = throttle.adjust(kept, self.share, window) else { continue };
            at_work = true;
            at_least &= throttle.is_at_min();
            if allowed != before {
                reporter.report(throttle.event(kept, allowed));
            }
        }
        if !at_work {
            return;
        }
        if kept < self.share && self.rates.record_own_effect() {
            self.usual_wait = self.given_up_wait.take();
        }
        if kept >= self.share || !at_least {
            self.rates.vain_windows = 0;
        } else if self.rates.record_vain_window() {
            self.given_up_wait = std::mem::replace(&mut self.usual_wait, self.last_wait);
        }
    }
}

/// 95th percentile of the time of the statements between two counts, in microseconds; `None` if there are few.
fn percentile_95(before: &[(u64, u64)], now: &[(u64, u64)]) -> Option<f64> {
    let known = |end: u64| before.iter().find(|(known, _)| *known == end).map_or(0, |(_, count)| *count);
    let new: Vec<(u64, u64)> = now.iter().map(|(end, count)| (*end, count.saturating_sub(known(*end)))).collect();
    let all: u64 = new.iter().map(|(_, count)| count).sum();
    let mut so_far = 0;
    let reached = new.iter().find(|(_, count)| {
        so_far += count;
        so_far * 100 >= all * 95
    });
    reached.filter(|_| all >= WAITS_MIN).map(|(end, _)| *end as f64)
}

/// Adjusts the speed of the replay, of the comparison and of sessions that build indexes beside them, until it is dropped; then
/// they run at full speed.
pub(crate) struct SpeedController {
    task: JoinHandle<()>,
    pace: Arc<Throttle>,
    /// Throttle of the comparison.
    pub(crate) reading: Arc<Throttle>,
    /// Throttle of processes that build indexes and check foreign keys.
    pub(crate) weight: Arc<Throttle>,
    lowered: LoweredProcesses,
}

impl SpeedController {
    /// Starts the task. The replay never runs slower than twice the source's commits, because otherwise it would not catch up.
    /// `status` reports if a target that follows has caught up.
    pub(crate) async fn start(
        mut clients: Clients,
        options: &Options,
        pace: Arc<Throttle>,
        status: Option<watch::Receiver<ReplayStatus>>,
        reporter: Reporter,
    ) -> Result<SpeedController, Error> {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let mut last = (Instant::now(), next_xid(&mut source).await?);
        let reading = Arc::new(Throttle::new(COMPARISON_BOUNDS));
        let weight = Arc::new(Throttle::without_probing(WEIGHT_BOUNDS));
        let lowered: LoweredProcesses = Arc::new(Mutex::new(Some(HashSet::new())));
        let mut priority = match status {
            Some(status) => SessionPriority::new(options, status, &lowered).await?,
            None => None,
        };
        let (replay, comparison, indexes) = (Arc::clone(&pace), Arc::clone(&reading), Arc::clone(&weight));
        let task = tokio::spawn(async move {
            let mut tick = tokio::time::interval(WINDOW_LENGTH);
            loop {
                tick.tick().await;
                let Ok(xid) = next_xid(&mut source).await else { break };
                let elapsed = last.0.elapsed().as_secs_f64();
                if elapsed > 0.5 {
                    replay.set_min((2.0 * (xid.saturating_sub(last.1)) as f64 / elapsed) as u64 + 100);
                    last = (Instant::now(), xid);
                }
                if let Some(priority) = &mut priority
                    && priority.set_weights().await.is_err()
                {
                    break;
                }
                if clients.adjust_speed(&[&replay, &comparison, &indexes], &reporter).await.is_err() {
                    break;
                }
            }
            // The server or proxy that this task asks is gone; other tasks find and report that.
            replay.release();
            comparison.release();
            indexes.release();
        });
        Ok(SpeedController { task, pace, reading, weight, lowered })
    }
}

impl Drop for SpeedController {
    fn drop(&mut self) {
        self.task.abort();
        self.pace.release();
        self.reading.release();
        restore_priority(&self.lowered);
    }
}

async fn next_xid(link: &mut Link) -> Result<u64, Error> {
    Ok(link.text("SELECT pg_snapshot_xmax(pg_current_snapshot())").await?.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_bad_second_is_half_as_bad() {
        let mut rates = Throughput::of(1000.0);
        assert_eq!(rates.take(800.0), Some(0.9));
        assert_eq!(rates.take(800.0), Some(0.8));
    }

    #[test]
    fn clients_who_do_more_are_measured_by_that() {
        let mut rates = Throughput::of(1000.0);
        for _ in 0..40 {
            rates.take(2000.0);
        }
        assert!(rates.take(1000.0).unwrap() < 0.8);
    }

    #[test]
    fn clients_who_do_less_by_themselves_do_not_hold_it_for_ever() {
        let mut rates = Throughput::of(1000.0);
        for _ in 0..20 {
            rates.take(300.0);
            rates.record_vain_window();
        }
        assert!(rates.take(300.0).unwrap() > 0.9, "{rates:?}");
    }

    #[test]
    fn what_was_given_up_is_usual_again_when_it_was_us_after_all() {
        let mut rates = Throughput::of(1000.0);
        let given_up = |rates: &mut Throughput| {
            (1..=2 * VAIN_WINDOWS_MAX).find(|_| {
                rates.take(800.0);
                rates.record_vain_window()
            })
        };
        assert_eq!(given_up(&mut rates), Some(VAIN_WINDOWS));
        assert!(rates.take(800.0).unwrap() > 0.9);
        assert!(rates.record_own_effect());
        assert_eq!(rates.take(800.0), Some(0.8));
        assert!(!rates.record_own_effect(), "nothing is given up");
        assert_eq!(given_up(&mut rates), Some(2 * VAIN_WINDOWS), "and not so soon again");
    }

    #[test]
    fn the_slowest_few_are_left_out_and_what_was_before_is_too() {
        let before = [(20, 500), (7168, 80)];
        let now = [(20, 500), (112, 95), (160, 3), (7168, 82)];
        assert_eq!(percentile_95(&before, &now), Some(112.0));
        assert_eq!(percentile_95(&[], &now), Some(7168.0));
        assert_eq!(percentile_95(&now, &now), None);
    }

    #[test]
    fn few_tell_nothing() {
        assert_eq!(Throughput::of(0.0).take(10.0), None);
    }
}
