//! Reports of a running command to the proxy, which shows them on its live page and in its metrics, and orders to switch
//! that an operator gives there.
//!
//! A report that does not arrive stops nothing: the command does its work without the proxy's page.

use crate::hold::{Holding, holding};
use crate::options::{Failure, Options};
use crate::progress::{Observer, PROGRESS_INTERVAL, Reporter};
use crate::state_files::{self, ORDER};
use crate::switch_order::SwitchOrder;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_control::{
    Client, CompareReport, ControlError, CopyReport, FollowReport, Progress, Reply, Request, ShortText, SwitchReport,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Time after which the distance of the target is not shown any more, unless it is measured again.
const DISTANCE_AGE_MAX: Duration = Duration::from_secs(5);
/// Time in which the proxy must answer a report.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Progress as the events so far show it.
#[derive(Debug, Default)]
struct EventSummary {
    progress: Progress,
    /// Moment at which the distance of the target was measured.
    followed_at: Option<Instant>,
    /// A target was dropped: numbers of the others are shown from then on.
    shows_others: bool,
}

impl EventSummary {
    fn record(&mut self, event: &Event) {
        let progress = &mut self.progress;
        match &event.kind {
            EventKind::PhaseStarted { phase, .. } => progress.phases.begin(ShortText::shorten(phase)),
            EventKind::PhaseEnded { phase, duration_ns, .. } => {
                progress.phases.end(&ShortText::shorten(phase), duration_ns / 1_000_000);
                progress.kept_percent = None;
            }
            EventKind::FellBack { reason, .. } => progress.warning = Some(ShortText::shorten(reason)),
            EventKind::Warning { text } => progress.warning = Some(ShortText::shorten(text)),
            EventKind::Migrate(migrate::Event::TargetDropped { target, reason }) => {
                self.shows_others = true;
                progress.warning = Some(ShortText::shorten(&format!("{target} was dropped: {reason}")));
            }
            EventKind::Migrate(event_of_target) if event.target.is_none() || self.shows_others => {
                record_numbers(progress, event_of_target);
                if matches!(event_of_target, migrate::Event::Following { .. }) {
                    self.followed_at = Some(Instant::now());
                }
            }
            _ => {}
        }
    }

    /// Present progress, with the measurements of a command that holds.
    fn progress(&self, holding: Option<&Holding>) -> Progress {
        let mut progress = self.progress.clone();
        if self.followed_at.is_none_or(|at| at.elapsed() > DISTANCE_AGE_MAX) {
            progress.following = None;
        }
        if let Some(Holding { load, why_not, .. }) = holding {
            let (lag_ms, tps) = ((load.lag_s * 1e3) as u64, load.tps as u64);
            progress.following = Some(FollowReport { lag_ms, lag_bytes: load.lag_bytes, tps });
            progress.holding = Some(ShortText::shorten(why_not));
        }
        progress
    }
}

fn record_numbers(progress: &mut Progress, event: &migrate::Event) {
    match *event {
        migrate::Event::Copying { bytes, bytes_total, bytes_per_s, .. } => {
            progress.copying = Some(CopyReport { bytes, bytes_total, bytes_per_s });
        }
        migrate::Event::Following { lag_ms, lag_bytes, tps, .. } => {
            progress.following = Some(FollowReport { lag_ms, lag_bytes, tps });
        }
        migrate::Event::Throttled { kept_percent, .. } | migrate::Event::Yielding { kept_percent, .. } => {
            progress.kept_percent = Some(kept_percent);
        }
        migrate::Event::Compared { tables, rows, .. } => progress.compared = Some(CompareReport { tables, rows }),
        migrate::Event::SwitchedOver { paused_us, drained_us, sessions } => {
            progress.switched = Some(SwitchReport { paused_us, drained_us, sessions });
        }
        migrate::Event::TargetDropped { .. }
        | migrate::Event::Redefining { .. }
        | migrate::Event::Redefined { .. }
        | migrate::Event::SettingsWritten { .. }
        | migrate::Event::SlotMade { .. } => {}
    }
}

/// A task that reports until the command ends.
pub(crate) struct LiveReport {
    summary: Arc<Mutex<EventSummary>>,
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

fn lock(summary: &Mutex<EventSummary>) -> MutexGuard<'_, EventSummary> {
    summary.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LiveReport {
    /// Begins. The returned observer passes events on.
    pub(crate) fn begin(options: &Options, operation: &'static str, observer: Observer) -> (Observer, LiveReport) {
        let (from, to) = match operation {
            "fallback" => (&options.target, &options.source),
            _ => (&options.source, &options.target),
        };
        let of = match options.selection.is_all() {
            true => from.to_string(),
            false => format!("{from} ({})", options.selection),
        };
        let [operation_name, source, target] = [operation, &of, &to.to_string()].map(ShortText::shorten);
        let progress = Progress { operation: operation_name, source, target, ..Progress::default() };
        let summary = Arc::new(Mutex::new(EventSummary { progress, ..EventSummary::default() }));
        let (end, ended) = oneshot::channel();
        let publisher = Publisher {
            options: options.clone(),
            summary: Arc::clone(&summary),
            reporter: Reporter::new(Arc::clone(&observer), operation),
            client: None,
        };
        let task = tokio::spawn(publisher.run(ended));
        let summarized = Arc::clone(&summary);
        let observer: Observer = Arc::new(move |event| {
            lock(&summarized).record(&event);
            observer(event);
        });
        (observer, LiveReport { summary, end, task })
    }

    /// Reports the end of the command.
    pub(crate) async fn end(self, result: Result<&str, &Failure>) {
        let text = match result {
            Ok(text) => text.to_owned(),
            Err(failed) => format!("{}; {}", failed.error, failed.state),
        };
        lock(&self.summary).progress.ended = Some(ShortText::shorten(&text));
        let _ = self.end.send(());
        let _ = self.task.await;
    }
}

struct Publisher {
    options: Options,
    summary: Arc<Mutex<EventSummary>>,
    reporter: Reporter,
    client: Option<Client>,
}

impl Publisher {
    async fn run(mut self, mut ended: oneshot::Receiver<()>) {
        loop {
            let is_last = tokio::select! {
                // The sender is dropped without a result if the command is abandoned.
                _ = &mut ended => true,
                () = tokio::time::sleep(PROGRESS_INTERVAL) => false,
            };
            match tokio::time::timeout(REPLY_TIMEOUT, self.report()).await {
                Ok(Ok(switch)) if switch => self.order_switch(),
                Ok(Ok(_)) => {}
                // The proxy is an earlier version, or has no such tenant.
                Ok(Err(ControlError::Refused(_) | ControlError::NotUnderstood(_))) => return,
                // Another proxy may serve soon.
                Ok(Err(_)) | Err(_) => self.client = None,
            }
            if is_last {
                return;
            }
        }
    }

    /// Sends the present progress; returns true if the operator has ordered the switch.
    async fn report(&mut self) -> Result<bool, ControlError> {
        let progress = lock(&self.summary).progress(holding(&self.options).as_ref());
        let client = match &mut self.client {
            Some(client) => client,
            None => self.client.insert(Client::connect(&self.options.proxy).await?),
        };
        let request = Request::Progress { tenant: self.options.tenant.clone(), progress: Box::new(progress) };
        Ok(matches!(client.ask(&request).await?, Reply::Shown { switch: true }))
    }

    /// Writes the order as `stillpoint migrate switch` does.
    fn order_switch(&self) {
        let (state, database) = (&self.options.state, &self.options.source.database);
        if holding(&self.options).is_none() {
            return;
        }
        self.reporter.warn("the switch was ordered on the proxy's page".into());
        let written = state_files::write_beside(state, database, ORDER, &SwitchOrder::default());
        // An order must not outlive the command that it was for: a later command would carry it out.
        let done = match holding(&self.options) {
            Some(_) => written,
            None => written.and_then(|()| state_files::remove_beside(state, database, ORDER)),
        };
        if let Err(error) = done {
            self.reporter.warn(format!("the order to switch cannot be stored: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::switch_order::FollowLoad;

    fn summary(events: Vec<(Option<u32>, EventKind)>) -> Progress {
        summary_of(events).progress(None)
    }

    fn summary_of(events: Vec<(Option<u32>, EventKind)>) -> EventSummary {
        let mut summary = EventSummary::default();
        for (target, kind) in events {
            summary.record(&Event { target, ..Event::new(0, None, kind) });
        }
        summary
    }

    fn following(lag_ms: u64) -> EventKind {
        migrate::Event::Following { lag_ms, lag_bytes: 1, tps: 2, estimate_s: None }.into()
    }

    #[test]
    fn events_become_one_state() {
        let phase = |phase: &str| (("migrate".to_owned()), phase.to_owned());
        let started = |name| {
            let (operation, phase) = phase(name);
            (None, EventKind::PhaseStarted { operation, phase })
        };
        let ended = |name| {
            let (operation, phase) = phase(name);
            (None, EventKind::PhaseEnded { operation, phase, duration_ns: 7_900_000 })
        };
        let progress = summary(vec![
            started("copy"),
            (None, migrate::Event::Copying { bytes: 1, bytes_total: 2, bytes_per_s: 3, estimate_s: None }.into()),
            ended("copy"),
            started("catch-up"),
            (None, following(5)),
            (None, EventKind::Warning { text: "a\nb".into() }),
        ]);
        let phases: Vec<_> = progress.phases.all().iter().map(|phase| (&*phase.name, phase.duration_ms)).collect();
        assert_eq!(phases, [("copy", Some(7)), ("catch-up", None)]);
        assert_eq!(progress.copying, Some(CopyReport { bytes: 1, bytes_total: 2, bytes_per_s: 3 }));
        assert_eq!(progress.following.map(|report| report.lag_ms), Some(5));
        assert_eq!(progress.warning.as_deref(), Some("a b"));
    }

    #[test]
    fn the_distance_is_that_of_now() {
        let mut summary = summary_of(vec![(None, following(5))]);
        assert_eq!(summary.progress(None).following.map(|report| report.lag_ms), Some(5));
        summary.followed_at = Instant::now().checked_sub(2 * DISTANCE_AGE_MAX);
        assert_eq!(summary.progress(None).following, None);
        let load = FollowLoad { lag_s: 0.25, lag_bytes: 7, tps: 9.5 };
        let holding = Holding { load, order: None, why_not: "no switch is ordered".into() };
        let progress = summary.progress(Some(&holding));
        assert_eq!(progress.following, Some(FollowReport { lag_ms: 250, lag_bytes: 7, tps: 9 }));
        assert_eq!(progress.holding.as_deref(), Some("no switch is ordered"));
    }

    #[test]
    fn numbers_are_those_of_the_first_target_until_one_is_dropped() {
        let dropped = migrate::Event::TargetDropped { target: "b".into(), reason: "gone".into() };
        let lag = |progress: Progress| progress.following.map(|report| report.lag_ms);
        assert_eq!(lag(summary(vec![(None, following(5)), (Some(2), following(9))])), Some(5));
        assert_eq!(lag(summary(vec![(None, following(5)), (None, dropped.into()), (Some(2), following(9))])), Some(9));
    }
}
