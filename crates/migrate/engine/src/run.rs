//! The command that moves a database: it begins a migration or continues one, runs its [`phases`], and decides after a failure
//! if they are undone.

use crate::clients::Clients;
use crate::hold::after_switch;
use crate::journal::{Journal, OtherTarget, Phase, Record, SharedJournal};
use crate::live_report::LiveReport;
use crate::options::{Failure, Options, State};
use crate::owner::{CommandLock, Witness};
use crate::progress::{Observer, Reporter};
use crate::proxy_client::{ProxyClient, is_served};
use crate::rendezvous::Member;
use crate::retry::{name_long_rows, retry_with_any_proxy};
use crate::settle::resume_settle;
use crate::state_files;
use crate::switch::{self, Side};
use crate::{Outcome, multi_target, owner, undo};
use std::time::Duration;
use stillpoint_events::EventKind;
use stillpoint_migrate_apply::{Error, replication_objects};
use stillpoint_migrate_postgres::link::{Link, Purpose};

/// Moves a database. A failure before the switch leaves clients on the source, and everything that was put on the servers is
/// removed; after the switch, clients are on the target.
///
/// If the proxy is lost and another one serves in its place, the migration continues as if it were called again: from where the
/// target follows, or else from its first step.
///
/// # Errors
///
/// A [`Failure`] with its reason and the state of the service.
pub async fn run(options: &Options, observer: Observer) -> Result<Outcome, Failure> {
    let (observer, live) = LiveReport::begin(options, "migrate", observer);
    let reporter = Reporter::new(observer, "migrate");
    let attempts = retry_with_any_proxy(async |may_go_on| attempt(options, may_go_on, &reporter).await);
    let ended = Box::pin(attempts).await;
    live.end(ended.as_ref().map(|_| "clients are on the target")).await;
    ended
}

/// Makes one attempt; `None` if the proxy was lost before the switch, another one serves, and `may_go_on` is true.
async fn attempt(options: &Options, may_go_on: bool, reporter: &Reporter) -> Result<Option<Outcome>, Failure> {
    let there = state_files::peek(&options.state, &options.source.database).map_err(Failure::untouched)?;
    if let Some(record) = &there {
        refuse_other_options(options, record).map_err(Failure::untouched)?;
    }
    // Nothing is left of a migration that begins after the record's has been removed.
    let (selection, placement) = (options.selection.clone(), options.placement.clone());
    let options = &Options { selection, placement, ..options.recorded().map_err(Failure::untouched)? };
    let (mut journal, mut lock) = match there.map(|record| record.phase) {
        None => Box::pin(begin(options, reporter)).await.map_err(Failure::untouched)?,
        Some(Phase::Switched) => {
            Box::pin(resume_settle(options, reporter)).await.map_err(Failure::on_target)?;
            return Ok(Some(Outcome::AlreadyThere));
        }
        Some(Phase::Returning) => {
            return Err(State::OnTarget.refuse("a rollback is under way: run `fallback` to continue it"));
        }
        Some(_) => match Box::pin(undo::recover(options, reporter)).await? {
            undo::Recovery::Following(taken_up) => {
                options.together.iter().for_each(Member::mark_checked);
                *taken_up
            }
            undo::Recovery::Switched => return Ok(Some(Outcome::AlreadyThere)),
            undo::Recovery::Nothing => Box::pin(begin(options, reporter)).await.map_err(Failure::untouched)?,
        },
    };
    let (witness, migration) = (lock.witness(), journal.record.migration.clone());
    let shared = SharedJournal::new(&mut journal);
    let ended = tokio::select! {
        ended = Box::pin(steps(options, &shared, witness, reporter)) => ended,
        () = options.interrupt.notified() => Err(Error::Interrupted),
        lost = lock.wait_until_lost(&migration, reporter) => Err(lost),
    };
    let error = match ended {
        Ok(paused) => return Ok(Some(Outcome::Switched { paused })),
        Err(error) => Box::pin(name_long_rows(error, &options.source, &options.selection)).await,
    };
    // Another target may have taken the place of the first.
    let options = &match options.recorded_in(&journal.record) {
        Ok(recorded) => recorded,
        Err(unknown) => return Err(Failure { error, state: State::Unknown(unknown.to_string()) }),
    };
    let switched = match journal.record.phase {
        Phase::Switched => Ok(true),
        // It was interrupted between the request to switch and the record that the switch happened.
        Phase::Switching => switch::serves(options, &journal.record, Side::Target).await,
        _ => Ok(false),
    };
    match switched {
        Ok(true) => Err(Failure::on_target(error)),
        Ok(false)
            if may_go_on
                && matches!(error, Error::ProxyGone(_))
                && is_served(&options.proxy, &options.tenant).await =>
        {
            reporter.warn(format!("{error}; another proxy has taken over"));
            Ok(None)
        }
        Ok(false) => {
            reporter.report(EventKind::FellBack { transition: None, reason: error.to_string() });
            let state = Box::pin(undo::undo(options, journal)).await;
            Err(Failure { error, state })
        }
        Err(unknown) => Err(Failure { error, state: State::Unknown(unknown.to_string()) }),
    }
}

/// Refuses to continue a migration of another part of the database, or to another place.
fn refuse_other_options(options: &Options, record: &Record) -> Result<(), Error> {
    if record.phase == Phase::Returned || record.selection == options.selection && record.placement == options.placement
    {
        return Ok(());
    }
    if record.selection == options.selection {
        let why = format!(
            "the migration under way places the database otherwise: {}, and not {}; run it as it was begun, or \
             `stillpoint migrate abort` it first",
            record.placement, options.placement
        );
        return Err(Error::WrongPhase(why));
    }
    let why = format!(
        "the migration under way is of another part of the database: of {}, and not of {}; run it as it was begun, or \
         `stillpoint migrate abort` it first",
        record.selection, options.selection
    );
    Err(Error::WrongPhase(why))
}

/// Runs all phases; [`attempt`] handles their errors in one place.
async fn steps(
    options: &Options,
    journal: &SharedJournal<'_>,
    witness: Witness,
    reporter: &Reporter,
) -> Result<Duration, Error> {
    let clients = Clients::measure(options).await?;
    let moved = multi_target::migrate_clients(options, journal, witness, clients, reporter);
    let mut migration = Box::pin(moved).await?;
    let paused = migration.clean_up().await?;
    if let Err(error) = after_switch(&migration.options, paused).await {
        reporter.warn(format!("{error}; clients stay on the target"));
    }
    Ok(paused)
}

/// Checks, and records that a migration begins. Returns the lock that keeps other commands from the database, too.
async fn begin(options: &Options, reporter: &Reporter) -> Result<(Journal, CommandLock), Error> {
    let mut random = [0u8; 4];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::Journal { path: options.state.clone(), source: error.into() })?;
    let migration = hex::encode(random);
    let lock = owner::acquire_lock(&options.source, Some(&migration)).await?;
    let report = reporter.phase("check", crate::check(options)).await?;
    report.accepted()?;
    if let Some(together) = &options.together {
        together.meet_checked().await?;
    }
    let mut proxy = ProxyClient::connect(&options.proxy, &options.tenant).await?;
    let Some(served_from) = proxy.serving().await? else {
        return Err(Error::Proxy(format!("it has no tenant {}", options.tenant)));
    };
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let backends = proxy.backends().await?;
    proxy.check_backends_at(&backends, &mut link, &options.source).await?;
    // Without a journal, no command will read these slots, and they keep the source's log until its disk is full.
    for orphan in replication_objects::our_slots(&mut link, &options.source.database).await? {
        reporter.warn(format!("slot {orphan} of an abandoned migration is dropped"));
        replication_objects::drop_slot(&mut link, &orphan).await?;
    }
    let others = options.others.iter().zip(1..);
    let others = others.map(|(server, number)| OtherTarget::new(number, server.to_string())).collect();
    let record = Record {
        v: 1,
        migration,
        database: options.source.database.clone(),
        tenant: options.tenant.clone(),
        source: options.source.to_string(),
        target: options.target.to_string(),
        others,
        capture: report.source,
        roles: options.roles,
        selection: options.selection.clone(),
        placement: options.placement.clone(),
        way_back: !options.accepted.no_fallback,
        served_from: Some(served_from),
        ..Record::default()
    };
    let mut journal = Journal::begin(&options.state, record)?;
    owner::claim(options, &mut journal).await?;
    Ok((journal, lock))
}
