//! How clients fare while a migration is at work, as the proxy counts their statements, and what follows for its speed.
//!
//! ```text
//! kept = statements a second, of the last two windows / the usual ones
//! usual = before anything began; more when there is more; what is left when nothing that we do makes a difference
//! ```
//!
//! Throughput is looked at and not latency: clients that wait for their answers show in it that they are made to wait, and
//! it is what people ask for. A load that comes only later, while the migration is at work, is not known undisturbed.

use crate::Error;
use crate::front::Front;
use crate::link::{Link, Purpose};
use crate::options::Options;
use crate::progress::Teller;
use crate::throttle::{COMPARED, Throttle};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_events::EventKind;
use tokio::task::JoinHandle;

/// How long clients are looked at before anything begins.
const BEFORE: Duration = Duration::from_secs(2);
const WINDOW: Duration = Duration::from_secs(1);
/// Fewer statements a second tell nothing.
const FEW: f64 = 20.0;
/// After so many windows at the least rate it is not us whom clients suffer from.
const IN_VAIN: u32 = 10;

/// What is known of the clients' throughput.
pub(crate) struct Clients {
    front: Front,
    share: f64,
    /// When, and how many statements each session had sent by then.
    last: (Instant, HashMap<u32, u64>),
    rates: Throughput,
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

    /// The migration goes as slowly as it can, and clients are no better off.
    fn nothing_helps(&mut self) {
        self.in_vain += 1;
        if self.in_vain >= IN_VAIN {
            (self.usual, self.in_vain) = (self.smoothed, 0);
        }
    }
}

impl Clients {
    /// Looks at them undisturbed; `None` when they are not to be heeded.
    pub(crate) async fn look(options: &Options) -> Result<Option<Clients>, Error> {
        if options.share <= 0.0 {
            return Ok(None);
        }
        let mut front = Front::connect(&options.proxy, &options.tenant).await?;
        let last = (Instant::now(), front.statements().await?);
        let mut clients = Clients { front, share: options.share, last, rates: Throughput::default() };
        tokio::time::sleep(BEFORE).await;
        clients.rates = Throughput::of(clients.rate().await?);
        Ok(Some(clients))
    }

    /// Whether there is a load worth heeding.
    pub(crate) fn any(&self) -> bool {
        self.rates.usual >= FEW
    }

    async fn rate(&mut self) -> Result<f64, Error> {
        let now = (Instant::now(), self.front.statements().await?);
        let sent = |(session, count): (&u32, &u64)| count.saturating_sub(*self.last.1.get(session).unwrap_or(&0));
        let statements: u64 = now.1.iter().map(sent).sum();
        let rate = statements as f64 / (now.0 - self.last.0).as_secs_f64().max(0.001);
        self.last = now;
        Ok(rate)
    }

    /// Once in a window: adjusts how fast that may go which is at work, and tells.
    pub(crate) async fn heed(&mut self, throttles: &[&Throttle], teller: &Teller) -> Result<(), Error> {
        let window = self.last.0.elapsed();
        if window < WINDOW {
            return Ok(());
        }
        let rate = self.rate().await?;
        let Some(kept) = self.rates.take(rate) else { return Ok(()) };
        for throttle in throttles {
            let before = throttle.rate();
            let Some(allowed) = throttle.heed(kept, self.share, window) else { continue };
            if kept < self.share && throttle.is_least() {
                self.rates.nothing_helps();
            } else {
                self.rates.in_vain = 0;
            }
            if allowed != before {
                teller.tell(EventKind::Throttled { kept_percent: (kept * 100.0) as u64, allowed_per_s: allowed });
            }
        }
        Ok(())
    }
}

/// Adjusts the speed of the replay and of the comparison beside them, until dropped; then they go as fast as they can.
pub(crate) struct Guide {
    task: JoinHandle<()>,
    pace: Arc<Throttle>,
    /// Of the comparison.
    pub(crate) reading: Arc<Throttle>,
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
        let (replay, comparison) = (Arc::clone(&pace), Arc::clone(&reading));
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
                if clients.heed(&[&replay, &comparison], &teller).await.is_err() {
                    break;
                }
            }
            // Who was asked is gone, which others find and tell.
            replay.release();
            comparison.release();
        });
        Ok(Guide { task, pace, reading })
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
    fn few_tell_nothing() {
        assert_eq!(Throughput::of(0.0).take(10.0), None);
    }
}
