//! Step 2 of the paper: the target is made from the snapshot: definitions, rows, then indexes and constraints.
//!
//! If the log captures changes, most rows are copied without the snapshot (see [`copy`](mod@crate::copy)). Some rows are
//! missing until the replay has passed the copy's horizon, so foreign keys are created after it, while the replay is stopped.

use crate::catalogs::Definitions;
use crate::clients::{Clients, SpeedController};
use crate::copied_pages::CopiedPages;
use crate::copy::{CopiedAmount, View, copy, make_room};
use crate::copy_resume;
use crate::definitions::{self, DeferredDefinitions, Dump, rights};
use crate::estimate::Estimate;
use crate::follow_state::{FollowState, catch_up};
use crate::journal::{Phase, SharedJournal};
use crate::options::Options;
use crate::progress::{PROGRESS_INTERVAL, Reporter};
use crate::reactions::Reactions;
use crate::snapshot::{ChangeStore, SnapshotState};
use crate::state_files::{self, CopyProgress};
use crate::weight::run_with_weight;
use crate::{Roles, redefine, roles};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stillpoint_events::migrate;
use stillpoint_migrate_apply::inventory::{Inventory, NOT_OF_EXTENSION, TableDef};
use stillpoint_migrate_apply::recording::Recording;
use stillpoint_migrate_apply::replication_objects;
use stillpoint_migrate_apply::throttle::{COPY_BOUNDS, Throttle};
use stillpoint_migrate_apply::{BARRIER_TIMEOUT, MARKER_PREFIX, SourceSnapshot};
use stillpoint_migrate_apply::{Error, Lsn};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, literal, text};
use stillpoint_operation::Side;

/// State after step 2: the target is complete, except for rows that the log brings.
pub(crate) struct CreatedTarget {
    pub(crate) inventory: Inventory,
    /// Definitions of which the target was made.
    pub(crate) definitions: Definitions,
    /// Changes that the proxy captured meanwhile, if it captures.
    pub(crate) captured: Option<(Recording, SourceSnapshot)>,
    /// Position in the source's log, see [`Record::horizon`].
    pub(crate) horizon: Lsn,
}

/// Makes one target; the copy of an earlier command goes on if `copied` are pages that it has brought. Its parts are `definitions` (the definitions are on the target), `rows` (the rows are too, indexes are not),
/// `indexes` and `statistics`.
pub(crate) async fn create(
    options: &Options,
    number: usize,
    journal: &SharedJournal<'_>,
    mut snapshotted: SnapshotState,
    copied: Option<CopiedPages>,
    clients: Option<&mut Clients>,
    reporter: &Reporter,
) -> Result<CreatedTarget, Error> {
    let clients = clients.filter(|clients| clients.is_significant());
    if let Some(copied) = copied {
        return fill(options, number, journal, snapshotted, &copied, clients, reporter).await;
    }
    let file = journal.lock().create_dump(number)?;
    let (rights, from) = (rights(&options.target).await?, rights(&options.source).await?);
    let SnapshotState { snapshot, left_out, .. } = &snapshotted;
    definitions::dump_source(options, from, rights.major, snapshot, left_out, &file).await?;
    let dump = Dump { target: &options.target, rights, file: &file };
    journal.lock().record_phase(number, Phase::Copying)?;
    if options.roles == Roles::Create {
        let made = journal.lock().record.roles_of(number).to_vec();
        roles::create_and_update(&options.source, &options.target, &made, |made| {
            journal.lock().record_roles(number, made)
        })
        .await?;
    }
    dump.create().await?;
    let mut target = Link::connect(&options.target, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
    let position = if let ChangeStore::Slot(slot) = &snapshotted.store { slot.position } else { 0 };
    replication_objects::install(&mut target, position).await?;
    make_room(&mut target, &snapshotted.inventory.tables).await?;
    if matches!(snapshotted.store, ChangeStore::Slot(_)) {
        redefine::keep_first_shapes(&mut snapshotted.holder, &snapshotted.left_out, &mut target).await?;
    }
    if journal.record().others.is_empty() {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        if let Some(copy) = copy_resume::describe(&snapshotted, &mut source).await? {
            journal.lock().record_copy(number, &snapshotted.definitions, copy)?;
        }
    }
    options.faults.reach("definitions", Side::After)?;
    fill(options, number, journal, snapshotted, &CopiedPages::new(), clients, reporter).await
}

/// Fills a target that has its definitions: rows, without those that are `done`, then indexes.
async fn fill(
    options: &Options,
    number: usize,
    journal: &SharedJournal<'_>,
    mut snapshotted: SnapshotState,
    done: &CopiedPages,
    mut clients: Option<&mut Clients>,
    reporter: &Reporter,
) -> Result<CreatedTarget, Error> {
    let is_kept = matches!(snapshotted.store, ChangeStore::Kept);
    // The creation of indexes cannot be throttled as the copy of rows can.
    let gently = clients.is_some() && options.source.shares_machine_with(&options.target);
    let file = journal.lock().dump_path(number);
    let rights = rights(&options.target).await?;
    let dump = Dump { target: &options.target, rights, file: &file };
    let mut target = Link::connect(&options.target, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
    let copied = copy_rows(options, &mut snapshotted, done, clients.as_deref_mut(), reporter).await;
    state_files::remove_copying(&options.state, &options.source.database, number);
    let horizon = copied?;
    let SnapshotState { store, mut locks, inventory, definitions, .. } = snapshotted;
    locks.query("COMMIT").await?;
    options.faults.reach("rows", Side::After)?;
    let mut deferred = dump.deferred().await?;
    if is_kept {
        let archive = journal.lock().read_dump(number)?;
        deferred.keep_missing(&redefine::missing_on(&dump, &archive).await?);
    }
    let controller = match clients.filter(|_| gently) {
        Some(clients) => {
            let nothing = Arc::new(Throttle::unlimited());
            Some(SpeedController::start(clients.reconnect().await?, options, nothing, None, reporter.clone()).await?)
        }
        None => None,
    };
    let weight = controller.as_ref().map(|controller| &*controller.weight);
    let indexes = Box::pin(dump.complete(&deferred, options.copy_jobs, horizon == 0 && rights.may_replicate, gently));
    let makers = definitions::makers_condition(&options.target);
    reporter.phase("indexes", run_with_weight(&options.target, &makers, weight, reporter, indexes)).await?;
    let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let reactions = Reactions::read(&mut source, &options.selection, target.rights).await?;
    drop(source);
    reactions.disable(&mut target).await?;
    let ours = format!("pid = {}", target.pid);
    let statistics = async { Ok(statistics(&mut target).await?) };
    reporter.phase("statistics", run_with_weight(&options.target, &ours, weight, reporter, statistics)).await?;
    flush_target(&mut target).await?;
    journal.lock().record_following(number, &definitions, horizon)?;
    let captured = if let ChangeStore::Proxy(recording, seen) = store { Some((recording, seen)) } else { None };
    Ok(CreatedTarget { inventory, definitions, captured, horizon })
}

/// Gathers planner statistics of all tables, except those with foreign tables as parts: the server would have to ask a third
/// one, which may refuse us.
pub(crate) async fn statistics(link: &mut Link) -> Result<(), ServerError> {
    let names = link
        .value(
            "WITH RECURSIVE apart (oid) AS (SELECT i.inhparent FROM pg_inherits i JOIN pg_class c ON c.oid = \
             i.inhrelid \
             WHERE c.relkind = 'f' UNION SELECT i.inhparent FROM pg_inherits i JOIN apart ON apart.oid = i.inhrelid) \
             SELECT string_agg(format('%I.%I', n.nspname, c.relname), ', ') FROM pg_class c \
             JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'm', 'p') AND c.relpersistence \
             <> 't' AND c.oid NOT IN (SELECT oid FROM apart)",
        )
        .await?;
    match names {
        Some(names) => link.query(&format!("ANALYZE {names}")).await.map(drop),
        None => Ok(()),
    }
}

/// Commits synchronously: after it, everything written on the target is on disk.
async fn flush_target(target: &mut Link) -> Result<(), ServerError> {
    target.query("UPDATE stillpoint.position SET position = position").await.map(drop)
}

/// Copies all rows except those that the log brings. Returns the position by which all of these are in the log, see
/// [`Record::horizon`].
async fn copy_rows(
    options: &Options,
    snapshotted: &mut SnapshotState,
    done: &CopiedPages,
    mut clients: Option<&mut Clients>,
    reporter: &Reporter,
) -> Result<Lsn, Error> {
    let SnapshotState { store, snapshot, holder, since, locks, inventory, .. } = snapshotted;
    let (slot, recording) = match store {
        ChangeStore::Slot(slot) => (Some(slot), None),
        ChangeStore::Proxy(recording, _) => (None, Some(&*recording)),
        ChangeStore::Kept => (None, None),
    };
    let has_snapshot = !snapshot.is_empty();
    let copied = Arc::new(CopiedAmount::default());
    let throttle = Arc::new(if clients.is_some() { Throttle::new(COPY_BOUNDS) } else { Throttle::unlimited() });
    let mut watch = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let (source, target, locker) = (&options.source, &options.target, locks.pid);
    let (seen, without) = since.as_ref().map(|(seen, without)| (seen, without.as_slice())).unzip();
    let without = without.unwrap_or_default();
    // Without the snapshot the others are copied later, or are on the target.
    let with = inventory.tables.iter().filter(|_| has_snapshot);
    let with = with.filter(|table| without.iter().all(|other| other.oid != table.oid));
    let with: Vec<TableDef> = with.cloned().collect();
    let copying = async {
        let copy = |view, tables| copy([source, target], view, tables, done, options.copy_jobs, &copied, &throttle);
        copy(View::Snapshot(snapshot.clone()), &with).await?;
        if has_snapshot {
            holder.query("COMMIT").await?;
        }
        if let Some(slot) = slot {
            slot.link.query("IDENTIFY_SYSTEM").await?;
        }
        let Some(seen) = seen else { return Ok(0) };
        wait_until_seen(seen, locks, options.snapshot_limit).await?;
        copy(View::Unchanged(seen.clone()), without).await?;
        horizon(source).await
    };
    tokio::pin!(copying);
    let (mut tick, mut last) = (tokio::time::interval(PROGRESS_INTERVAL), (Instant::now(), 0));
    let mut estimate = Estimate::begin(last.0);
    loop {
        tokio::select! {
            result = &mut copying => return result,
            _ = tick.tick() => {
                give_way_to_waiters(&mut watch, locker).await?;
                if let Some(error) = recording.and_then(Recording::failure) {
                    return Err(error);
                }
                if let Some(clients) = &mut clients {
                    clients.adjust_speed(&[&throttle], reporter).await?;
                }
                let bytes = copied.bytes.load(Ordering::Relaxed);
                let per_s = (bytes - last.1) as f64 / last.0.elapsed().as_secs_f64().max(0.001);
                last = (Instant::now(), bytes);
                let bytes_total = inventory.bytes();
                let bytes_per_s = per_s as u64;
                let estimate_s = estimate.remaining_s(last.0, copied.table_bytes().await, bytes_total);
                let told = CopyProgress { bytes, bytes_total, bytes_per_s, estimate_s };
                state_files::publish_copying(&options.state, &options.source.database, reporter.number(), &told);
                reporter.report(migrate::Event::Copying { bytes, bytes_total, bytes_per_s, estimate_s });
            }
        }
    }
}

/// Waits until a new snapshot on the source sees everything that a snapshot of its log saw.
async fn wait_until_seen(snapshot: &SourceSnapshot, link: &mut Link, limit: Duration) -> Result<(), Error> {
    let begun = Instant::now();
    loop {
        let now = SourceSnapshot::parse(&link.text("SELECT pg_current_snapshot()").await?)?;
        if now.contains(snapshot) {
            return Ok(());
        }
        if begun.elapsed() > limit {
            let (what, who) = (
                "waiting until commits in the log become visible".into(),
                replication_objects::running_transactions(link).await?,
            );
            return Err(Error::TimedOut { what, limit, who });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns a position in the source's log, on disk, after every commit that any session has seen there.
async fn horizon(source: &Server) -> Result<Lsn, Error> {
    let mut link = Link::connect(source, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
    let snapshot = SourceSnapshot::parse(&link.text("SELECT pg_current_snapshot()").await?)?;
    if snapshot.end > u64::from(u32::MAX) {
        return Err(Error::WrongPhase("the source used up its transaction numbers while rows were copied".into()));
    }
    let message = format!("SELECT pg_logical_emit_message(true, {}, 'mark')", literal(MARKER_PREFIX));
    Ok(replication_objects::lsn(&link.text(&message).await?))
}

/// Creates foreign keys: every row is present by now, and the replay is stopped meanwhile at a position where they hold.
pub(crate) async fn create_foreign_keys(
    options: &Options,
    following: &mut FollowState,
    file: &Path,
    reporter: &Reporter,
) -> Result<(), Error> {
    let dump = Dump { target: &options.target, rights: rights(&options.target).await?, file };
    let deferred = dump.deferred().await?;
    let mut target = Link::connect(&options.target, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
    if deferred.has_foreign_keys() && target.rights.may_replicate {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let gently = following.controller.is_some() && options.source.shares_machine_with(&options.target);
        let weight = following.controller.as_ref().filter(|_| gently).map(|controller| Arc::clone(&controller.weight));
        let makers = definitions::makers_condition(&options.target);
        let created = create_foreign_keys_while_paused(following, &dump, &deferred, gently, &mut source, &mut target);
        let created = Box::pin(created);
        let created = run_with_weight(&options.target, &makers, weight.as_deref(), reporter, created);
        reporter.phase("foreign keys", created).await?;
        catch_up(following, &mut source, reporter).await?;
    }
    flush_target(&mut target).await?;
    Ok(())
}

async fn create_foreign_keys_while_paused(
    following: &mut FollowState,
    dump: &Dump<'_>,
    deferred: &DeferredDefinitions,
    gently: bool,
    source: &mut Link,
    target: &mut Link,
) -> Result<(), Error> {
    // Sessions of a command that was killed.
    definitions::terminate_makers(dump.target, target).await?;
    let there = format!(
        "SELECT 1 FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid WHERE k.contype = 'f' AND \
         {NOT_OF_EXTENSION}"
    );
    if target.value(&there).await?.is_some() {
        return Ok(());
    }
    let created = async {
        following.follower.pause_at_snapshot(source, BARRIER_TIMEOUT).await?;
        source.query("ROLLBACK").await?;
        dump.create_foreign_keys(deferred, gently).await
    };
    let created = created.await;
    let gone_on = following.follower.resume().await;
    created.and(gone_on)
}

/// A session that waits for a lock behind ours would block all sessions behind it, so the copy gives way.
async fn give_way_to_waiters(watch: &mut Link, holder: i32) -> Result<(), Error> {
    let sql = format!(
        "SELECT {} FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND {holder} = ANY (pg_blocking_pids(pid))",
        replication_objects::SESSION_DESCRIPTION
    );
    watch.query(&sql).await?.first().map_or(Ok(()), |row| Err(Error::InTheWay(text(row, 0))))
}
