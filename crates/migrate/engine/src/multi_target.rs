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
use crate::hold::{self, Gate, before_switch};
use crate::journal::{OtherTarget, Phase, Record, SharedJournal};
use crate::options::Options;
use crate::owner::Witness;
use crate::phases::Migration;
use crate::progress::Reporter;
use crate::removal;
use crate::removal::{drop_database, leftover_message};
use crate::snapshot::prepare_source;
use crate::switch_order::FollowLoad;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};
use stillpoint_events::migrate;
use stillpoint_migrate_apply::replication_objects::has_slot_log;
use stillpoint_migrate_apply::{Error, replication_objects};
use stillpoint_migrate_postgres::link::{Link, Purpose};

/// Interval at which targets that follow are checked while others are brought up.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum interval at which a command that holds looks for definitions that changed.
const DEFINITIONS_INTERVAL: Duration = Duration::from_secs(10);

/// A target: its number, and options to reach it alone.
type Target = (usize, Options);

/// Work for one target; the work of all targets runs at the same time.
type Work<'w, 'j> = Pin<Box<dyn Future<Output = WorkResult<'w, 'j>> + 'w>>;

/// Result of such work.
enum WorkResult<'w, 'j> {
    /// A target was brought up, or its bring-up failed.
    BringUp(Box<(Migration<'w, 'j>, Result<(), Error>)>),
    /// Everything that was made for a dropped target has been removed.
    Removal(Result<(), Error>),
}

/// Brings all targets up, and moves clients to the first one that is fit, which the journal then names. Returns the migration
/// to that target, of which only the clean-up is left.
pub(crate) async fn migrate_clients<'m, 'j>(
    options: &'m Options,
    journal: &'m SharedJournal<'j>,
    witness: Witness,
    clients: Option<Clients>,
    reporter: &'m Reporter,
) -> Result<Migration<'m, 'j>, Error> {
    let mut migrations = Vec::new();
    for target in targets(options, journal, reporter).await? {
        migrations.push(Migration::new(options, target, journal, reporter));
    }
    if journal.record().phase != Phase::Following && journal.record().copy.is_none() {
        prepare_source(options, journal).await?;
    }
    share_clients(&mut migrations, clients).await?;
    let mut ready = set_up_targets(migrations, journal, reporter).await?;
    ready.sort_by_key(|ready| ready.number);
    Box::pin(hold(options, &mut ready, journal, reporter)).await?;
    let mut ready = ready.into_iter();
    while let Some(mut migration) = ready.next() {
        migration.witness = Some(witness.clone());
        match migration.move_clients().await {
            Ok(()) => return Ok(migration),
            Err(error) => {
                // Clients are on the source, or their place is not for this command to decide.
                let stay = journal.record().phase == Phase::Following;
                if ready.len() == 0 || !stay || !is_of_target(&error, &migration.options).await {
                    return Err(error);
                }
                let target = (migration.number, migration.options.clone());
                // Its connections end before its slot is dropped.
                drop(migration);
                drop_target(&target, &error, journal, reporter)?;
                removal::abandon_sessions(options).await;
                remove_target(&target, journal, reporter).await?;
            }
        }
    }
    Err(Error::WrongPhase("no target is left".into()))
}

/// Gives each migration a measurement of the clients. It connects before any work begins that clients might notice.
async fn share_clients(migrations: &mut [Migration<'_, '_>], clients: Option<Clients>) -> Result<(), Error> {
    let Some((last, others)) = migrations.split_last_mut() else { return Ok(()) };
    for other in others {
        other.clients = match &clients {
            Some(clients) => Some(clients.reconnect().await?),
            None => None,
        };
    }
    last.clients = clients;
    Ok(())
}

/// Returns true if another target may succeed: the failure concerns this target, or this target cannot be reached.
async fn is_of_target(error: &Error, of: &Options) -> bool {
    error.is_of_target() || Link::connect(&of.target.database("postgres"), Purpose::Statements, &[]).await.is_err()
}

/// Brings all targets up; returns those for which that succeeded.
async fn set_up_targets<'w, 'j>(
    migrations: Vec<Migration<'w, 'j>>,
    journal: &'w SharedJournal<'j>,
    reporter: &'w Reporter,
) -> Result<Vec<Migration<'w, 'j>>, Error> {
    let (mut pending, mut ready) = (migrations.len(), Vec::new());
    let mut work: Vec<Work<'w, 'j>> = Vec::new();
    for mut migration in migrations {
        work.push(Box::pin(async move {
            let result = migration.set_up().await;
            WorkResult::BringUp(Box::new((migration, result)))
        }));
    }
    loop {
        let mut failed = None;
        match tokio::time::timeout(POLL_INTERVAL, next_result(&mut work)).await {
            Ok(None) => return Ok(ready),
            Ok(Some(WorkResult::Removal(gone))) => gone?,
            Ok(Some(WorkResult::BringUp(done))) => {
                let (migration, result) = *done;
                pending -= 1;
                match result {
                    Ok(()) => ready.push(migration),
                    Err(error) => failed = Some((migration, error)),
                }
            }
            Err(_) => failed = take_ended(&mut ready).await,
        }
        if let Some((migration, error)) = failed {
            let target = (migration.number, migration.options.clone());
            drop(migration);
            let alone = ready.is_empty() && pending == 0;
            let ours = matches!(error, Error::Interrupted | Error::Fault(_));
            if alone || ours || ready.is_empty() && !is_of_target(&error, &target.1).await {
                return Err(error);
            }
            drop_target(&target, &error, journal, reporter)?;
            let reporter = reporter.of_target(target.0);
            work.push(Box::pin(async move { WorkResult::Removal(remove_target(&target, journal, &reporter).await) }));
        }
    }
}

/// Waits for the order to move clients, if the command holds, and asks the hook in any case. Targets that fail meanwhile are
/// dropped while another one is left.
async fn hold<'w, 'j>(
    options: &Options,
    ready: &mut Vec<Migration<'w, 'j>>,
    journal: &SharedJournal<'j>,
    reporter: &Reporter,
) -> Result<(), Error> {
    if !options.hold && options.together.is_none() {
        let Some(first) = ready.first_mut().filter(|_| options.hooks.before_switch.is_some()) else { return Ok(()) };
        let (load, options) = (first.load().await?, first.options.clone());
        return before_switch(&options, &load).await;
    }
    reporter.phase("hold", Box::pin(wait_for_order(options, ready, journal, reporter))).await
}

async fn wait_for_order<'w, 'j>(
    options: &Options,
    ready: &mut Vec<Migration<'w, 'j>>,
    journal: &SharedJournal<'j>,
    reporter: &Reporter,
) -> Result<(), Error> {
    let mut gate = Gate::new(options);
    let mut looked = Instant::now();
    let mut pause = DEFINITIONS_INTERVAL;
    let (mut load, mut is_open) = (FollowLoad::default(), false);
    loop {
        if looked.elapsed() > pause {
            let begun = Instant::now();
            for migration in ready.iter_mut() {
                if let Err(error) = gate.beside(&load, migration.redefine_if_changed()).await {
                    migration.failed = Some(error);
                }
            }
            looked = Instant::now();
            pause = DEFINITIONS_INTERVAL.max(begun.elapsed() * 20);
        }
        if let Some((migration, error)) = gate.beside(&load, take_ended(ready)).await {
            let target = (migration.number, migration.options.clone());
            drop(migration);
            if ready.is_empty() {
                return Err(error);
            }
            drop_target(&target, &error, journal, reporter)?;
            remove_target(&target, journal, &reporter.of_target(target.0)).await?;
        }
        let Some(first) = ready.first_mut() else { return Ok(()) };
        // A failure of the target is found by the next look.
        if let Ok(measured) = first.load().await {
            load = measured;
            is_open = is_open
                || match options.hold {
                    true => gate.is_open(&load).await?,
                    false => before_switch(options, &load).await.map(|()| true)?,
                };
            let all = options.together.as_ref().map_or(Ok(true), |together| together.all_follow(is_open))?;
            if is_open && all {
                return Ok(());
            }
        }
        tokio::time::sleep(hold::INTERVAL).await;
    }
}

/// Removes a target that no longer follows from `ready`; returns it with its error.
async fn take_ended<'m, 'j>(ready: &mut Vec<Migration<'m, 'j>>) -> Option<(Migration<'m, 'j>, Error)> {
    for at in 0..ready.len() {
        if let Some(error) = ready[at].failure().await
            && let Err(error) = ready[at].redefine(error).await
        {
            return Some((ready.remove(at), error));
        }
    }
    None
}

/// Waits for the first work that is done; `None` if no work is left. The other work makes no progress until the next call.
async fn next_result<'w, 'j>(work: &mut Vec<Work<'w, 'j>>) -> Option<WorkResult<'w, 'j>> {
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
async fn targets(options: &Options, journal: &SharedJournal<'_>, reporter: &Reporter) -> Result<Vec<Target>, Error> {
    let record = journal.record();
    let mut targets = vec![(record.number, options.to(&options.target))];
    for other in record.others.iter().filter(|other| other.dropped.is_none()) {
        let slot = record.slot_of(other.number);
        let Some(server) = options.others.iter().find(|server| server.to_string() == other.server) else {
            let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
            replication_objects::drop_slot(&mut source, &slot).await?;
            let reason = "no --target names it any more; its database stays there".to_owned();
            reporter.report(migrate::Event::TargetDropped { target: other.server.clone(), reason: reason.clone() });
            journal.lock().drop_target(other.number, reason)?;
            continue;
        };
        let target = (other.number, options.to(server));
        if !(other.is_following() && has_slot_log(&options.source, &slot).await) {
            remove_target(&target, journal, reporter).await?;
        }
        targets.push(target);
    }
    for server in &options.others {
        let (Record { number, others: known, .. }, server_name) = (journal.record(), server.to_string());
        if known.iter().all(|other| other.server != server_name) {
            let highest = known.iter().map(|other| other.number).max().unwrap_or(0).max(number);
            targets.push((highest + 1, options.to(server)));
            journal.lock().update(|record| record.others.push(OtherTarget::new(highest + 1, server_name)))?;
        }
    }
    Ok(targets)
}

/// Drops a target, and reports it: the migration continues without it.
fn drop_target(
    (number, options): &Target,
    error: &Error,
    journal: &SharedJournal<'_>,
    reporter: &Reporter,
) -> Result<(), Error> {
    let (target, reason) = (options.target.to_string(), error.to_string());
    reporter.of_target(*number).report(migrate::Event::TargetDropped { target, reason: reason.clone() });
    journal.lock().drop_target(*number, reason)
}

/// Removes everything that was made for a target to which clients do not go. If the target's server cannot be reached, its
/// database stays and a warning says so. An unreachable source is an error, because its slot must not stay.
async fn remove_target(
    (number, options): &Target,
    journal: &SharedJournal<'_>,
    reporter: &Reporter,
) -> Result<(), Error> {
    let record = journal.record();
    let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    replication_objects::drop_slot(&mut source, &record.slot_of(*number)).await?;
    if record.others.iter().any(|other| other.number == *number && other.made_database)
        && let Err(error) = drop_database(&options.target, &record, *number).await
    {
        reporter.warn(leftover_message(&options.target.to_string(), &error));
        return Ok(());
    }
    journal.lock().record_removal(*number)
}
