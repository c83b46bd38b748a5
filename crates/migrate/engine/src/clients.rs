//! How clients fare while a migration is at work, as the proxy counts their statements, and what follows for its speed.
//!
//! ```text
//! kept = the lesser of: statements a second, of the last two windows / the usual ones
//!                       share * bearable / what 95 of 100 statements of the window stay below
//! usual = before anything began; more when there is more; what is left when nothing that we do makes a difference;
//! bearable = twice the usual and a little
//! ```
//!
//! Clients that wait for their answers before they go on show in their throughput that they are made to wait. Those that
//! come whether others have been answered or not, as people do, keep it until nothing goes any more, and show it in the
//! time that their statements take. A load that comes only later, while the migration is at work, is not known
//! undisturbed.

use crate::Error;
use crate::front::{Front, Served};
use crate::link::{Link, Purpose};
use crate::options::Options;
use crate::progress::Teller;
use crate::throttle::{COMPARED, Throttle};
use crate::weight::WEIGHT;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// How long clients are looked at before anything begins.
const BEFORE: Duration = Duration::from_secs(2);
const WINDOW: Duration = Duration::from_secs(1);
/// One that is as good: ticks do not come to the millisecond.
const NEARLY: Duration = Duration::from_millis(900);
/// Fewer statements a second tell nothing.
const FEW: f64 = 20.0;
/// After so many windows at the least rate it is not us whom clients suffer from.
const IN_VAIN: u32 = 10;
/// Of so few statements the slowest tell nothing.
const FEW_WAITS: u64 = 100;
/// Longer by so much is not noticed, however short it was.
const UNNOTICED_US: f64 = 5000.0;

/// What is known of the clients' throughput.
pub(crate) struct Clients {
    front: Front,
    share: f64,
    /// When, and what had been done by then.
    last: (Instant, Served),
    rates: Throughput,
    /// What 95 of 100 statements usually stay below, and what they did last, in microseconds, where that is known.
    usual_wait: Option<f64>,
    last_wait: Option<f64>,
}

/// What was seen in a window.
struct Window {
    /// Statements a second.
    rate: f64,
    /// What 95 of 100 stayed below, in microseconds, where there were enough.
    wait: Option<f64>,
}

/// The arithmetic; rates are statements a second.
#[derive(Debug, Clone, Copy, Default)]
struct Throughput {
    usual: f64,
    smoothed: f64,
    last: f64,
    in_vain: u32,
}

impl Throughput {
    fn of(usual: f64) -> Throughput {
        Throughput { usual, smoothed: usual, last: usual, in_vain: 0 }
    }

    /// The part of it that clients keep; `None` where there is too little to tell.
    fn take(&mut self, rate: f64) -> Option<f64> {
        self.smoothed = self.smoothed * 0.8 + rate * 0.2;
        self.usual = self.usual.max(self.smoothed);
        let kept = (rate + self.last) / 2.0 / self.usual;
        self.last = rate;
        (self.usual >= FEW).then_some(kept)
    }

    /// The migration goes as slowly as it can, and clients are no better off. Whether that is how things are from now on.
    fn nothing_helps(&mut self) -> bool {
        self.in_vain += 1;
        let given_up = self.in_vain >= IN_VAIN;
        if given_up {
            (self.usual, self.in_vain) = (self.smoothed, 0);
        }
        given_up
    }
}

impl Clients {
    /// Looks at them undisturbed; `None` when they are not to be heeded.
    pub(crate) async fn look(options: &Options) -> Result<Option<Clients>, Error> {
        if options.share <= 0.0 {
            return Ok(None);
        }
        let mut front = Front::connect(&options.proxy, &options.tenant).await?;
        let last = (Instant::now(), front.served().await?);
        let (share, rates) = (options.share, Throughput::default());
        let mut clients = Clients { front, share, last, rates, usual_wait: None, last_wait: None };
        tokio::time::sleep(BEFORE).await;
        let Window { rate, wait } = clients.window().await?;
        (clients.rates, clients.usual_wait) = (Throughput::of(rate), wait);
        Ok(Some(clients))
    }

    /// The same once more, for somebody else who heeds them.
    pub(crate) async fn again(&self) -> Result<Clients, Error> {
        let mut front = self.front.again().await?;
        let last = (Instant::now(), front.served().await?);
        let (share, rates, usual_wait) = (self.share, self.rates, self.usual_wait);
        Ok(Clients { front, share, last, rates, usual_wait, last_wait: None })
    }

    /// Whether there is a load worth heeding.
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

    /// The same where another proxy may have taken the place of the first: it counts anew. While there is none, there is
    /// nobody to heed.
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

    /// Once in a window: the part of their speed that clients keep; `None` where there is too little to tell.
    async fn kept(&mut self) -> Result<Option<f64>, Error> {
        let Some(Window { rate, wait }) = self.look_again().await? else { return Ok(None) };
        self.last_wait = wait;
        let Some(kept) = self.rates.take(rate) else { return Ok(None) };
        let (Some(usual), Some(wait)) = (self.usual_wait, wait) else { return Ok(Some(kept)) };
        Ok(Some(kept.min(self.share * (2.0 * usual + UNNOTICED_US) / wait)))
    }

    /// Once in a window: adjusts how fast that may go which is at work, and tells.
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
        for throttle in throttles {
            let before = throttle.rate();
            let Some(allowed) = throttle.heed(kept, self.share, window) else { continue };
            if kept < self.share && throttle.is_least() {
                if self.rates.nothing_helps() {
                    self.usual_wait = self.last_wait;
                }
            } else {
                self.rates.in_vain = 0;
            }
            if allowed != before {
                teller.tell(throttle.tell(kept, allowed));
            }
        }
    }
}

/// What 95 of 100 of the statements between two counts stayed below, in microseconds; none where there are few.
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

/// Adjusts the speed of the replay, of the comparison and of what makes indexes beside them, until dropped; then they go as
/// fast as they can.
pub(crate) struct Guide {
    task: JoinHandle<()>,
    pace: Arc<Throttle>,
    /// Of the comparison.
    pub(crate) reading: Arc<Throttle>,
    /// Of processes that make indexes and check foreign keys.
    pub(crate) weight: Arc<Throttle>,
}

impl Guide {
    /// The replay never falls below twice what the source commits: else it would not catch up.
    pub(crate) async fn start(
        mut clients: Clients,
        options: &Options,
        pace: Arc<Throttle>,
        teller: Teller,
    ) -> Result<Guide, Error> {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let mut last = (Instant::now(), next_xid(&mut source).await?);
        let reading = Arc::new(Throttle::new(COMPARED));
        let weight = Arc::new(Throttle::new(WEIGHT));
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
                if clients.heed(&[&replay, &comparison, &indexes], &teller).await.is_err() {
                    break;
                }
            }
            // Who was asked is gone, which others find and tell.
            replay.release();
            comparison.release();
            indexes.release();
        });
        Ok(Guide { task, pace, reading, weight })
    }
}

impl Drop for Guide {
    fn drop(&mut self) {
        self.task.abort();
        self.pace.release();
        self.reading.release();
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
