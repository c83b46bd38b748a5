//! Commands for several databases at a time.

use crate::options::{Failure, Options};
use crate::progress::Observer;
use crate::rendezvous::Member;
use crate::retry::Outcome;
use crate::{fallback, run};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use stillpoint_events::Event;
use stillpoint_migrate_apply::Error;
use tokio::sync::Notify;

/// Moves several databases together; the options differ in their databases and tenants. Returns the result of each.
pub async fn run_together(
    all: &[Options],
    interrupt: &Notify,
    observer: impl Fn(Event) + Send + Sync + 'static,
) -> Vec<Result<Outcome, Failure>> {
    together(all, interrupt, observer, async |options, observer| run(options, observer).await).await
}

/// Moves the clients of several databases back together. Returns the result of each.
pub async fn fallback_together(
    all: &[Options],
    interrupt: &Notify,
    observer: impl Fn(Event) + Send + Sync + 'static,
) -> Vec<Result<Outcome, Failure>> {
    together(all, interrupt, observer, async |options, observer| fallback(options, observer).await).await
}

async fn together(
    all: &[Options],
    interrupt: &Notify,
    observer: impl Fn(Event) + Send + Sync + 'static,
    command: impl AsyncFn(&Options, Observer) -> Result<Outcome, Failure>,
) -> Vec<Result<Outcome, Failure>> {
    let members = Member::all(all.len());
    let observer = Arc::new(observer);
    let of_member = |(member, options): (&Member, &Options)| Options {
        together: Some(member.clone()),
        interrupt: Arc::default(),
        ..options.clone()
    };
    let all: Vec<Options> = members.iter().zip(all).map(of_member).collect();
    let interrupt_others = |number: usize| {
        all.iter().enumerate().filter(|(at, _)| *at != number).for_each(|(_, other)| other.interrupt.notify_one());
    };
    let mut running: Vec<_> = Vec::new();
    for (number, (options, member)) in all.iter().zip(&members).enumerate() {
        let (database, observer) = (options.source.database.clone(), Arc::clone(&observer));
        let observer: Observer =
            Arc::new(move |event: Event| observer(Event { database: Some(database.clone()), ..event }));
        let (command, interrupt_others) = (&command, &interrupt_others);
        let work: Pin<Box<dyn Future<Output = Result<Outcome, Failure>> + '_>> = Box::pin(async move {
            let mut ended = command(options, observer).await;
            match &mut ended {
                Ok(Outcome::AlreadyThere) => member.leave(),
                Ok(Outcome::Switched { .. }) => {}
                Err(failure) => {
                    if let (Error::Interrupted, Some(why)) = (&failure.error, member.why_ended()) {
                        failure.error = Error::WrongPhase(why);
                    }
                    if member.end(format!("the migration of {} ended: {failure}", options.source.database)) {
                        interrupt_others(number);
                    }
                }
            }
            ended
        });
        running.push(Running::Work(work));
    }
    let mut interrupted = Box::pin(interrupt.notified());
    let mut is_interrupted = false;
    poll_fn(|context| {
        if !is_interrupted && interrupted.as_mut().poll(context).is_ready() {
            is_interrupted = true;
            interrupt_others(usize::MAX);
        }
        let mut is_pending = false;
        for one in &mut running {
            if let Running::Work(work) = one {
                match work.as_mut().poll(context) {
                    Poll::Ready(ended) => *one = Running::Ended(ended),
                    Poll::Pending => is_pending = true,
                }
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    let ended = |one: Running<'_>| match one {
        Running::Ended(ended) => Some(ended),
        Running::Work(_) => None,
    };
    running.into_iter().filter_map(ended).collect()
}

/// A command at work, or its result.
enum Running<'w> {
    Work(Pin<Box<dyn Future<Output = Result<Outcome, Failure>> + 'w>>),
    Ended(Result<Outcome, Failure>),
}
