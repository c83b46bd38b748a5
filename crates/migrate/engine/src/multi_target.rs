//! Several targets: each is brought up until it follows and has been compared, all at the same time. A target that fails is
//! dropped (section 4.3 of the paper). Clients go to the first target that is left. If that target fails while clients are
//! paused, they continue on the source, and the next target is tried.
//!
//! ```text
//!  target 1   copy  catch-up  compare  follows ............. prepare  switch-over x dropped
//!  target 2   copy  x dropped
//!  target 3   copy  catch-up  compare  follows .................................... prepare  switch-over
//!  target 4   copy  catch-up  compare  follows .................................................... settle: removed
//! ```
//!
//! Each target has its own slot, and so its own snapshot and stream of changes: no target depends on another. Each adjusts its
//! own speed to the clients, so all of them together are as slow as clients need.

use crate::clients::Clients;
use crate::journal::{Journal, OtherTarget, Phase, SharedJournal};
use crate::link::{Link, Purpose};
use crate::options::Options;
use crate::progress::Reporter;
use crate::proxy_client::ProxyClient;
use crate::run::{FollowState, prepare_source, set_up_target};
use crate::switch::{self, Direction};
use crate::undo::has_slot_log;
use crate::{Error, replication_objects, undo};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;
use stillpoint_events::migrate;

/// Interval at which targets that follow are checked while others are brought up.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A target: its number, and options to reach it.
struct Candidate {
    number: usize,
    options: Options,
}

/// A target that follows and holds the same data as the source.
struct ReadyTarget {
    of: Candidate,
    following: FollowState,
}

/// Work for one target; the work of all targets runs at the same time.
type Work<'w> = Pin<Box<dyn Future<Output = WorkResult> + 'w>>;

/// Result of such work.
enum WorkResult {
    /// A target was brought up, or its bring-up failed.
    BringUp(Box<(Candidate, Result<FollowState, Error>)>),
    /// Everything that was made for a dropped target has been removed.
    Removal(Result<(), Error>),
}

/// Brings all targets up, and moves clients to the first one that is fit, which the journal then names. Returns how long
/// clients were paused, and a connection to the source that was made before its connections were disabled.
pub(crate) async fn migrate_clients(
    options: &Options,
    journal: &mut Journal,
    clients: Option<Clients>,
    reporter: &Reporter,
) -> Result<(Duration, Link), Error> {
    let candidates = candidates(options, journal, reporter).await?;
    if journal.record.phase != Phase::Following {
        prepare_source(options, journal).await?;
    }
    let mut ready = set_up_targets(candidates, journal, clients, reporter).await?;
    ready.sort_by_key(|ready| ready.of.number);
    let mut ready = ready.into_iter();
    while let Some(ReadyTarget { of, following }) = ready.next() {
        journal.choose_target(of.number)?;
        match switch_to(&of, journal, following, reporter).await {
            Ok(switched) => return Ok(switched),
            Err(error) => {
                // Clients are on the source, or their place is not for this command to decide.
                let stay = journal.record.phase == Phase::Following;
                if ready.len() == 0 || !stay || !is_of_target(&error, &of.options).await {
                    return Err(error);
                }
                drop_target(&of, &error, &SharedJournal::new(journal), reporter)?;
                if let Ok(mut proxy) = ProxyClient::connect(&options.proxy, &options.tenant).await {
                    // It is not an error if nothing was prepared.
                    let _ = proxy.abandon().await;
                }
                remove_target(&of, &SharedJournal::new(journal), reporter).await?;
            }
        }
    }
    Err(Error::WrongPhase("no target is left".into()))
}

/// Step 4 of the paper (prepare and switch over) for one target.
async fn switch_to(
    of: &Candidate,
    journal: &mut Journal,
    mut following: FollowState,
    reporter: &Reporter,
) -> Result<(Duration, Link), Error> {
    if let Some(error) = following.follower.failure().await {
        return Err(error);
    }
    let (direction, reporter) = (Direction::forward(&of.options), reporter.of_target(of.number));
    let prepared = reporter.phase("prepare", switch::prepare(&of.options, journal, following, &direction)).await?;
    reporter.phase("switch-over", switch::switch(&of.options, journal, prepared, &direction, &reporter)).await
}

/// Returns true if another target may succeed: the failure concerns this target, or this target cannot be reached.
async fn is_of_target(error: &Error, of: &Options) -> bool {
    error.is_of_target() || Link::connect(&of.target.database("postgres"), Purpose::Statements, &[]).await.is_err()
}

/// Brings all targets up; returns those for which that succeeded.
async fn set_up_targets(
    candidates: Vec<Candidate>,
    journal: &mut Journal,
    clients: Option<Clients>,
    reporter: &Reporter,
) -> Result<Vec<ReadyTarget>, Error> {
    // Connect before any work begins that clients might notice.
    let mut loads = Vec::new();
    for _ in 1..candidates.len() {
        loads.push(match &clients {
            Some(clients) => Some(clients.reconnect().await?),
            None => None,
        });
    }
    loads.push(clients);
    let journal = SharedJournal::new(journal);
    let (mut pending, mut ready) = (candidates.len(), Vec::<ReadyTarget>::new());
    let mut work: Vec<Work<'_>> = Vec::new();
    for (Candidate { number, options }, clients) in candidates.into_iter().zip(loads) {
        let (journal, reporter) = (&journal, reporter.of_target(number));
        work.push(Box::pin(async move {
            let result = set_up_target(&options, number, journal, clients, &reporter).await;
            WorkResult::BringUp(Box::new((Candidate { number, options }, result)))
        }));
    }
    loop {
        let mut failed = None;
        match tokio::time::timeout(POLL_INTERVAL, next_result(&mut work)).await {
            Ok(None) => return Ok(ready),
            Ok(Some(WorkResult::Removal(gone))) => gone?,
            Ok(Some(WorkResult::BringUp(done))) => {
                let (of, result) = *done;
                pending -= 1;
                match result {
                    Ok(following) => ready.push(ReadyTarget { of, following }),
                    Err(error) => failed = Some((of, error)),
                }
            }
            Err(_) => failed = take_ended(&mut ready).await,
        }
        if let Some((of, error)) = failed {
            let alone = ready.is_empty() && pending == 0;
            let ours = matches!(error, Error::Interrupted | Error::Fault(_));
            if alone || ours || ready.is_empty() && !is_of_target(&error, &of.options).await {
                return Err(error);
            }
            drop_target(&of, &error, &journal, reporter)?;
            let (journal, reporter) = (&journal, reporter.of_target(of.number));
            work.push(Box::pin(async move { WorkResult::Removal(remove_target(&of, journal, &reporter).await) }));
        }
    }
}

/// Removes a target that no longer follows from `ready`; returns it with its error.
async fn take_ended(ready: &mut Vec<ReadyTarget>) -> Option<(Candidate, Error)> {
    for at in 0..ready.len() {
        if let Some(error) = ready[at].following.follower.failure().await {
            return Some((ready.remove(at).of, error));
        }
    }
    None
}

/// Waits for the first work that is done; `None` if no work is left. The other work makes no progress until the next call.
async fn next_result(work: &mut Vec<Work<'_>>) -> Option<WorkResult> {
    poll_fn(|context| {
        for at in 0..work.len() {
            if let Poll::Ready(done) = work[at].as_mut().poll(context) {
                drop(work.swap_remove(at));
                return Poll::Ready(Some(done));
            }
        }
        if work.is_empty() { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}

/// Lists the targets, that of the journal first; it may follow already, and others may too. For every target that does not
/// follow, removes everything that an earlier command may have begun.
async fn candidates(options: &Options, journal: &mut Journal, reporter: &Reporter) -> Result<Vec<Candidate>, Error> {
    let own = Candidate { number: journal.record.number, options: options.to(&options.target) };
    let mut candidates = vec![own];
    for other in journal.record.others.clone().into_iter().filter(|other| other.dropped.is_none()) {
        let Some(server) = options.others.iter().find(|server| server.to_string() == other.server) else {
            let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
            replication_objects::drop_slot(&mut source, &journal.record.slot_of(other.number)).await?;
            let reason = "no --target names it any more; its database stays there".to_owned();
            reporter.report(migrate::Event::TargetDropped { target: other.server, reason: reason.clone() });
            journal.drop_target(other.number, reason)?;
            continue;
        };
        let of = Candidate { number: other.number, options: options.to(server) };
        if !(other.is_following() && has_slot_log(options, &journal.record.slot_of(other.number)).await) {
            remove_target(&of, &SharedJournal::new(journal), reporter).await?;
        }
        candidates.push(of);
    }
    for server in &options.others {
        let (known, server_name) = (&journal.record.others, server.to_string());
        if known.iter().all(|other| other.server != server_name) {
            let highest = known.iter().map(|other| other.number).max().unwrap_or(0).max(journal.record.number);
            candidates.push(Candidate { number: highest + 1, options: options.to(server) });
            journal.update(|record| record.others.push(OtherTarget::new(highest + 1, server_name)))?;
        }
    }
    Ok(candidates)
}

/// Drops a target, and reports it: the migration continues without it.
fn drop_target(of: &Candidate, error: &Error, journal: &SharedJournal<'_>, reporter: &Reporter) -> Result<(), Error> {
    let (target, reason) = (of.options.target.to_string(), error.to_string());
    reporter.of_target(of.number).report(migrate::Event::TargetDropped { target, reason: reason.clone() });
    journal.lock().drop_target(of.number, reason)
}

/// Removes everything that was made for a target to which clients do not go. If the target's server cannot be reached, its
/// database stays and a warning says so. An unreachable source is an error, because its slot must not stay.
async fn remove_target(of: &Candidate, journal: &SharedJournal<'_>, reporter: &Reporter) -> Result<(), Error> {
    let Candidate { number, options } = of;
    let record = journal.lock().record.clone();
    let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    replication_objects::drop_slot(&mut source, &record.slot_of(*number)).await?;
    if record.others.iter().any(|other| other.number == *number && other.made_database)
        && let Err(error) = undo::drop_database(&options.target, &record, *number).await
    {
        reporter.warn(leftover_message(&options.target.to_string(), &error));
        return Ok(());
    }
    journal.lock().record_removal(*number)
}

fn leftover_message(server: &str, error: &Error) -> String {
    format!("the database on {server} could not be dropped; drop it by hand: {error}")
}

/// Removes, after the switch, what was made for the targets to which clients did not go. Returns messages for the
/// operator about targets that cannot be reached; no later command tries them again.
pub(crate) async fn remove_others(
    options: &Options,
    journal: &mut Journal,
    source: &mut Link,
) -> Result<Vec<String>, Error> {
    let mut left = Vec::new();
    for other in journal.record.others.clone().into_iter().filter(|other| other.dropped.is_none()) {
        replication_objects::drop_slot(source, &journal.record.slot_of(other.number)).await?;
        let gone = match options.others.iter().find(|server| server.to_string() == other.server) {
            _ if !other.made_database => Ok(()),
            Some(server) => undo::drop_database(server, &journal.record, other.number).await,
            None => Err(Error::WrongPhase("no --target names it".into())),
        };
        match gone {
            Ok(()) => journal.record_removal(other.number)?,
            Err(error) => {
                left.push(leftover_message(&other.server, &error));
                journal.drop_target(other.number, error.to_string())?;
            }
        }
    }
    Ok(left)
}
