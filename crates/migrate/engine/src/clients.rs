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

use crate::Error;
use crate::follow::Standing;
use crate::front::{Front, Served};
use crate::light::{Light, Weighed, give_back};
use crate::link::{Link, Purpose};
use crate::options::Options;
use crate::progress::Teller;
use crate::throttle::{COMPARED, Throttle};
use crate::weight::WEIGHT;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Time for which clients are measured before any work begins.
const BEFORE: Duration = Duration::from_secs(2);
/// Time after which clients that have sent no statement count as absent.
const SILENT: Duration = Duration::from_millis(300);
const WINDOW: Duration = Duration::from_secs(1);
/// Length that counts as a whole window, because ticks are not exact to the millisecond.
const NEARLY: Duration = Duration::from_millis(900);
/// Statements a second below which a rate is not significant.
const FEW: f64 = 20.0;
/// Number of windows at the lowest rate after which clients suffer from another cause than the migration.
const IN_VAIN: u32 = 10;
/// Maximum of that number, after the migration was the cause each time before.
const PATIENCE_MAX: u32 = 16 * IN_VAIN;
/// Number of statements below which their slowest are not significant.
const FEW_WAITS: u64 = 100;
/// Increase in microseconds that clients do not notice, even for very short statements.
const UNNOTICED_US: f64 = 5000.0;

/// Throughput of the clients, as far as it is known.
pub(crate) struct Clients {
    front: Front,
    share: f64,
    /// Time of the last count, and the count.
    last: (Instant, Served),
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
    in_vain: u32,
    /// Number of windows in vain after which the usual rate is given up.
    patience: u32,
    /// Usual rate before it was given up.
    given_up: Option<f64>,
}

impl Throughput {
    fn of(usual: f64) -> Throughput {
        Throughput { usual, smoothed: usual, last: usual, in_vain: 0, patience: IN_VAIN, given_up: None }
    }

    /// Returns the share of the usual rate that clients keep; `None` if there are too few statements.
    fn take(&mut self, rate: f64) -> Option<f64> {
        self.smoothed = self.smoothed * 0.8 + rate * 0.2;
        self.usual = self.usual.max(self.smoothed);
        let kept = (rate + self.last) / 2.0 / self.usual;
        self.last = rate;
        (self.usual >= FEW).then_some(kept)
    }

    /// Records a window in which the migration runs at its lowest rate and clients still suffer. Returns true if the usual rate
    /// is given up: the present rate counts as usual from now on.
    fn nothing_helps(&mut self) -> bool {
        self.in_vain += 1;
        let given_up = self.in_vain >= self.patience;
        if given_up {
            self.given_up = Some(self.usual);
            (self.usual, self.in_vain) = (self.smoothed, 0);
        }
        given_up
    }

    /// Records that clients lose throughput when the migration runs faster. Returns true if the usual rate had been given up:
    /// the migration was the cause then, so the earlier rate is the usual one again, for longer.
    fn it_was_us(&mut self) -> bool {
        let Some(usual) = self.given_up.take() else { return false };
        self.usual = self.usual.max(usual);
        self.patience = (2 * self.patience).min(PATIENCE_MAX);
        true
    }
}

impl Clients {
    /// Measures clients undisturbed; `None` if the migration is to ignore them.
    pub(crate) async fn look(options: &Options) -> Result<Option<Clients>, Error> {
        if options.share <= 0.0 {
            return Ok(None);
        }
        let mut front = Front::connect(&options.proxy, &options.tenant).await?;
        let last = (Instant::now(), front.served().await?);
        let (share, rates) = (options.share, Throughput::default());
        let mut clients =
            Clients { front, share, last: last.clone(), rates, usual_wait: None, last_wait: None, given_up_wait: None };
        tokio::time::sleep(SILENT).await;
        if clients.window().await?.rate == 0.0 {
            return Ok(Some(clients));
        }
        clients.last = last;
        tokio::time::sleep(BEFORE - SILENT).await;
        let Window { rate, wait } = clients.window().await?;
        (clients.rates, clients.usual_wait) = (Throughput::of(rate), wait);
        Ok(Some(clients))
    }

    /// Makes a second measurement of the same clients, for another task that adjusts to them.
    pub(crate) async fn again(&self) -> Result<Clients, Error> {
        let mut front = self.front.again().await?;
        let last = (Instant::now(), front.served().await?);
        let (share, rates, usual_wait) = (self.share, self.rates, self.usual_wait);
        Ok(Clients { front, share, last, rates, usual_wait, last_wait: None, given_up_wait: None })
    }

    /// Returns true if the load is large enough to adjust to.
    pub(crate) fn any(&self) -> bool {
        self.rates.usual >= FEW
    }

    async fn window(&mut self) -> Result<Window, Error> {
        let now = (Instant::now(), self.front.served().await?);
        let before = &self.last.1;
        let sent = |(session, count): (&u32, &u64)| count.saturating_sub(*before.statements.get(session).unwrap_or(&0));
        let statements: u64 = now.1.statements.iter().map(sent).sum();
        let rate = statements as f64 / (now.0 - self.last.0).as_secs_f64().max(0.001);
        let wait = most_stay_below(&before.waits, &now.1.waits);
        self.last = now;
        Ok(Window { rate, wait })
    }

    /// Measures a window, even if another proxy may have replaced the first: that one counts from zero. `None` if there is no
    /// proxy, and so no client.
    async fn look_again(&mut self) -> Result<Option<Window>, Error> {
        match self.window().await {
            Err(Error::ProxyGone(_)) => {
                if let Ok(front) = self.front.again().await {
                    self.front = front;
                    self.last = (Instant::now(), self.front.served().await.unwrap_or_default());
                }
                Ok(None)
            }
            window => window.map(Some),
        }
    }

    /// Returns, once in a window, the share of their speed that clients keep; `None` if there are too few statements.
    async fn kept(&mut self) -> Result<Option<f64>, Error> {
        let Some(Window { rate, wait }) = self.look_again().await? else { return Ok(None) };
        self.last_wait = wait;
        let Some(kept) = self.rates.take(rate) else { return Ok(None) };
        let (Some(usual), Some(wait)) = (self.usual_wait, wait) else { return Ok(Some(kept)) };
        Ok(Some(kept.min(self.share * (2.0 * usual + UNNOTICED_US) / wait)))
    }

    /// Adjusts, once in a window, the speed of the work under way, and reports it.
    pub(crate) async fn heed(&mut self, throttles: &[&Throttle], teller: &Teller) -> Result<(), Error> {
        let window = self.last.0.elapsed();
        if window >= NEARLY
            && let Some(kept) = self.kept().await?
        {
            self.adjust(throttles, kept, window, teller);
        }
        Ok(())
    }

    fn adjust(&mut self, throttles: &[&Throttle], kept: f64, window: Duration, teller: &Teller) {
        let mut at_work = false;
        let mut at_least = true;
        for throttle in throttles {
            let before = throttle.rate();
            let Some(allowed) = throttle.heed(kept, self.share, window) else { continue };
            at_work = true;
            at_least &= throttle.is_least();
            if allowed != before {
                teller.tell(throttle.tell(kept, allowed));
            }
        }
        if !at_work {
            return;
        }
        if kept < self.share && self.rates.it_was_us() {
            self.usual_wait = self.given_up_wait.take();
        }
        if kept >= self.share || !at_least {
            self.rates.in_vain = 0;
        } else if self.rates.nothing_helps() {
            self.given_up_wait = std::mem::replace(&mut self.usual_wait, self.last_wait);
        }
    }
}

/// 95th percentile of the time of the statements between two counts, in microseconds; `None` if there are few.
fn most_stay_below(before: &[(u64, u64)], now: &[(u64, u64)]) -> Option<f64> {
    let known = |end: u64| before.iter().find(|(known, _)| *known == end).map_or(0, |(_, count)| *count);
    let new: Vec<(u64, u64)> = now.iter().map(|(end, count)| (*end, count.saturating_sub(known(*end)))).collect();
    let all: u64 = new.iter().map(|(_, count)| count).sum();
    let mut so_far = 0;
    let reached = new.iter().find(|(_, count)| {
        so_far += count;
        so_far * 100 >= all * 95
    });
    reached.filter(|_| all >= FEW_WAITS).map(|(end, _)| *end as f64)
}

/// Adjusts the speed of the replay, of the comparison and of sessions that build indexes beside them, until it is dropped; then
/// they run at full speed.
pub(crate) struct Guide {
    task: JoinHandle<()>,
    pace: Arc<Throttle>,
    /// Throttle of the comparison.
    pub(crate) reading: Arc<Throttle>,
    /// Throttle of processes that build indexes and check foreign keys.
    pub(crate) weight: Arc<Throttle>,
    weighed: Weighed,
}

impl Guide {
    /// Starts the task. The replay never runs slower than twice the source's commits, because otherwise it would not catch up.
    /// `standing` reports if a target that follows has caught up.
    pub(crate) async fn start(
        mut clients: Clients,
        options: &Options,
        pace: Arc<Throttle>,
        standing: Option<watch::Receiver<Standing>>,
        teller: Teller,
    ) -> Result<Guide, Error> {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let mut last = (Instant::now(), next_xid(&mut source).await?);
        let reading = Arc::new(Throttle::new(COMPARED));
        let weight = Arc::new(Throttle::careful(WEIGHT));
        let weighed: Weighed = Arc::new(Mutex::new(Some(HashSet::new())));
        let mut light = match standing {
            Some(standing) => Light::of(options, standing, &weighed).await?,
            None => None,
        };
        let (replay, comparison, indexes) = (Arc::clone(&pace), Arc::clone(&reading), Arc::clone(&weight));
        let task = tokio::spawn(async move {
            let mut tick = tokio::time::interval(WINDOW);
            loop {
                tick.tick().await;
                let Ok(xid) = next_xid(&mut source).await else { break };
                let elapsed = last.0.elapsed().as_secs_f64();
                if elapsed > 0.5 {
                    replay.least((2.0 * (xid.saturating_sub(last.1)) as f64 / elapsed) as u64 + 100);
                    last = (Instant::now(), xid);
                }
                if let Some(light) = &mut light
                    && light.weigh().await.is_err()
                {
                    break;
                }
                if clients.heed(&[&replay, &comparison, &indexes], &teller).await.is_err() {
                    break;
                }
            }
            // The server or proxy that this task asks is gone; other tasks find and report that.
            replay.release();
            comparison.release();
            indexes.release();
        });
        Ok(Guide { task, pace, reading, weight, weighed })
    }
}

impl Drop for Guide {
    fn drop(&mut self) {
        self.task.abort();
        self.pace.release();
        self.reading.release();
        give_back(&self.weighed);
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
            rates.nothing_helps();
        }
        assert!(rates.take(300.0).unwrap() > 0.9, "{rates:?}");
    }

    #[test]
    fn what_was_given_up_is_usual_again_when_it_was_us_after_all() {
        let mut rates = Throughput::of(1000.0);
        let given_up = |rates: &mut Throughput| {
            (1..=2 * PATIENCE_MAX).find(|_| {
                rates.take(800.0);
                rates.nothing_helps()
            })
        };
        assert_eq!(given_up(&mut rates), Some(IN_VAIN));
        assert!(rates.take(800.0).unwrap() > 0.9);
        assert!(rates.it_was_us());
        assert_eq!(rates.take(800.0), Some(0.8));
        assert!(!rates.it_was_us(), "nothing is given up");
        assert_eq!(given_up(&mut rates), Some(2 * IN_VAIN), "and not so soon again");
    }

    #[test]
    fn the_slowest_few_are_left_out_and_what_was_before_is_too() {
        let before = [(20, 500), (7168, 80)];
        let now = [(20, 500), (112, 95), (160, 3), (7168, 82)];
        assert_eq!(most_stay_below(&before, &now), Some(112.0));
        assert_eq!(most_stay_below(&[], &now), Some(7168.0));
        assert_eq!(most_stay_below(&now, &now), None);
    }

    #[test]
    fn few_tell_nothing() {
        assert_eq!(Throughput::of(0.0).take(10.0), None);
    }
}
