//! The migration itself, as the four steps of the paper (section 4.3).
//!
//! ```text
//!  Checked --snapshot--> Snapshotted --create--> Created --follow--> Following --prepare--> Prepared --switch--> Switched
//!     |                       |                     |                    |                      |
//!     | (nothing touched)     +---------------------+---- undo: clients on the source ----------+
//! ```
//!
//! If the log captures changes, most rows are copied without the snapshot (see [`copy`](mod@crate::copy)). Some rows are
//! missing until the replay has passed the copy's horizon, so foreign keys are created after it, while the replay is stopped.

use crate::catalogs::{self, Definitions};
use crate::checksum::Comparison;
use crate::clients::{Clients, SpeedController};
use crate::copy::{CopiedAmount, View, copy, distinguishes_versions};
use crate::definitions::{self, DeferredDefinitions};
use crate::estimate::Estimate;
use crate::fault::{FaultPoint, reach};
use crate::follow::{Feed, Follower, MARKER_PREFIX, Plan, SourceSnapshot};
use crate::inventory::{Inventory, NOT_OF_EXTENSION, TableDef, number, text};
use crate::journal::{self, Capture, CopyProgress, Journal, OtherTarget, Phase, Record, SharedJournal};
use crate::link::{Link, Purpose, literal};
use crate::options::{Failure, Options, State};
use crate::owner::CommandLock;
use crate::pgoutput::Lsn;
use crate::progress::{Observer, Reporter};
use crate::proxy_client::{ProxyClient, is_served};
use crate::recording::Recording;
use crate::replication_objects::{self, PUBLICATIONS, Slot};
use crate::switch::{self, Side};
use crate::throttle::{Bounds, COPY_BOUNDS, Throttle};
use crate::weight::run_with_weight;
use crate::{Error, Roles, Server, multi_target, owner, roles, undo, values};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stillpoint_events::{EventKind, migrate};

/// Interval of progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// Lag at which a replay has caught up.
const CAUGHT_UP_LAG: Duration = Duration::from_millis(200);
/// Limits of repeated transactions a second, within what clients tolerate.
const REPLAY_BOUNDS: Bounds = Bounds::of_rate(100, 4000);
/// Maximum time until a barrier is reached.
pub(crate) const BARRIER_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of times in one run that a lost proxy may be replaced by another.
const PROXY_LOSSES_MAX: u32 = 5;

/// Result of a move there or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Clients have changed sides.
    Switched {
        /// Length of the pause.
        paused: Duration,
    },
    /// Clients had changed sides before; what an earlier attempt left undone is done.
    AlreadyThere,
}

/// State after step 1: changes are kept, the snapshot is open.
struct SnapshotState {
    store: ChangeStore,
    /// Name of the snapshot, by which other sessions take it, and the session that holds it.
    snapshot: String,
    holder: Link,
    /// The snapshot's contents, and tables that are copied without it; `None` if all are copied with it.
    since: Option<(SourceSnapshot, Vec<TableDef>)>,
    /// Session with a lock on every table against changed definitions, and without a snapshot.
    locks: Link,
    inventory: Inventory,
    /// All definitions, as the snapshot sees them.
    definitions: Definitions,
}

/// State after step 2: the target is complete, except for rows that the log brings.
struct CreatedTarget {
    inventory: Inventory,
    /// Definitions of which the target was made.
    definitions: Definitions,
    /// Changes that the proxy captured meanwhile, if it captures.
    captured: Option<(Recording, SourceSnapshot)>,
    /// Position in the source's log, see [`Record::horizon`].
    horizon: Lsn,
}

/// Place that keeps changes committed after the snapshot.
enum ChangeStore {
    /// The log, by a slot that has exported the snapshot.
    Slot(Slot),
    /// The proxy's capture, which also holds changes that the snapshot sees.
    Proxy(Recording, SourceSnapshot),
}

/// State of step 3: the target follows.
pub(crate) struct FollowState {
    pub(crate) follower: Follower,
    pub(crate) inventory: Inventory,
    /// Definitions of which the following side was made.
    pub(crate) definitions: Definitions,
    /// Throttles the replay for clients.
    pub(crate) controller: Option<SpeedController>,
}

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
    let reporter = Reporter::new(observer, "migrate");
    retry_with_any_proxy(async |may_go_on| attempt(options, may_go_on, &reporter).await).await
}

/// Repeats attempts until one has an outcome. An attempt without one lost its proxy; its argument is true if it may continue
/// with another.
pub(crate) async fn retry_with_any_proxy(
    attempt: impl AsyncFn(bool) -> Result<Option<Outcome>, Failure>,
) -> Result<Outcome, Failure> {
    let mut lost = 0;
    loop {
        if let Some(outcome) = attempt(lost < PROXY_LOSSES_MAX).await? {
            return Ok(outcome);
        }
        lost += 1;
    }
}

/// Makes one attempt; `None` if the proxy was lost before the switch, another one serves, and `may_go_on` is true.
async fn attempt(options: &Options, may_go_on: bool, reporter: &Reporter) -> Result<Option<Outcome>, Failure> {
    let options = &options.recorded().map_err(Failure::untouched)?;
    let there = journal::peek(&options.state, &options.source.database).map_err(Failure::untouched)?;
    let (mut journal, mut lock) = match there.map(|record| record.phase) {
        None => begin(options, reporter).await.map_err(Failure::untouched)?,
        Some(Phase::Switched) => {
            switch::resume_settle(options, reporter).await.map_err(Failure::on_target)?;
            return Ok(Some(Outcome::AlreadyThere));
        }
        Some(Phase::Returning) => {
            let text = "a rollback is under way: run `fallback` to continue it";
            return Err(Failure::on_target(Error::WrongPhase(text.into())));
        }
        Some(_) => match undo::recover(options, reporter).await? {
            undo::Recovery::Following(taken_up) => *taken_up,
            undo::Recovery::Switched => return Ok(Some(Outcome::AlreadyThere)),
            undo::Recovery::Nothing => begin(options, reporter).await.map_err(Failure::untouched)?,
        },
    };
    journal.witness = Some(lock.witness());
    let migration = journal.record.migration.clone();
    let ended = tokio::select! {
        ended = steps(options, &mut journal, reporter) => ended,
        () = options.interrupt.notified() => Err(Error::Interrupted),
        lost = lock.wait_until_lost(&migration, reporter) => Err(lost),
    };
    let error = match ended {
        Ok(paused) => return Ok(Some(Outcome::Switched { paused })),
        Err(error) => name_long_rows(error, &options.source).await,
    };
    // Another target may have taken the place of the first.
    let recorded = match options.recorded_in(&journal.record) {
        Ok(recorded) => recorded,
        Err(unknown) => return Err(Failure { error, state: State::Unknown(unknown.to_string()) }),
    };
    let options = &recorded;
    let switched = match journal.record.phase {
        Phase::Switched => Ok(true),
        // It was interrupted between the request to switch and the record that the switch happened.
        Phase::Switching => switch::serves(options, &journal.record, Side::Target).await,
        _ => Ok(false),
    };
    match switched {
        Ok(true) => Err(Failure::on_target(error)),
        Ok(false) if may_go_on && matches!(error, Error::ProxyGone(_)) && is_served(options).await => {
            reporter.warn(format!("{error}; another proxy has taken over"));
            Ok(None)
        }
        Ok(false) => {
            reporter.report(EventKind::FellBack { transition: None, reason: error.to_string() });
            let state = undo::undo(options, journal).await;
            Err(Failure { error, state })
        }
        Err(unknown) => Err(Failure { error, state: State::Unknown(unknown.to_string()) }),
    }
}

/// Returns the same error, with the names of the tables that it concerns if only a check of their rows shows them. `followed`
/// is the server that is followed.
pub(crate) async fn name_long_rows(error: Error, followed: &Server) -> Error {
    let message = match &error {
        Error::Sql { server, message, .. } if *server == followed.to_string() && error.is_of_length() => {
            message.clone()
        }
        _ => return error,
    };
    // If the server cannot be asked, the error is no worse than before.
    let tables = values::tables_with_long_values(followed).await.unwrap_or_default();
    Error::TooLong { message, tables }
}

/// Does all steps; [`attempt`] handles their errors in one place.
async fn steps(options: &Options, journal: &mut Journal, reporter: &Reporter) -> Result<Duration, Error> {
    let clients = Clients::measure(options).await?;
    let (paused, source) = multi_target::migrate_clients(options, journal, clients, reporter).await?;
    let options = options.recorded_in(&journal.record)?;
    reporter.phase("settle", switch::settle(&options, journal, Some(source), reporter)).await?;
    Ok(paused)
}

/// Does steps 1 to 3 for one target: when it returns, the target follows and holds the same data as the source.
pub(crate) async fn set_up_target(
    options: &Options,
    number: usize,
    journal: &SharedJournal<'_>,
    mut clients: Option<Clients>,
    reporter: &Reporter,
) -> Result<FollowState, Error> {
    let followed = {
        let journal = journal.lock();
        let follows = journal.record.is_followed_by(number);
        follows
            .then(|| journal.definitions_of(number).map(|made_of| (made_of, journal.record.horizon_of(number))))
            .transpose()?
    };
    let CreatedTarget { inventory, definitions, captured, horizon } = if let Some((definitions, horizon)) = followed {
        CreatedTarget { inventory: read_inventory(&options.source).await?, definitions, captured: None, horizon }
    } else {
        let snapshotted = reporter.phase("snapshot", snapshot(options, number, journal)).await?;
        reporter.phase("copy", create(options, number, journal, snapshotted, clients.as_mut(), reporter)).await?
    };
    let (slot, capture) = {
        let journal = journal.lock();
        (journal.record.slot_of(number), journal.record.capture)
    };
    let schedule = (capture == Capture::Statements).then_some(options.schedule);
    let feed = match captured {
        Some((recording, seen)) => Feed::Proxy(recording, seen, schedule),
        None => Feed::Log { slot: &slot, publications: &PUBLICATIONS, from: 0, horizon },
    };
    let following = follow(options, feed, inventory, definitions, clients, reporter);
    let mut following = reporter.phase("catch-up", following).await?;
    if horizon > 0 {
        let dump = journal.lock().dump_path(number);
        create_foreign_keys(options, &mut following, &dump, reporter).await?;
        journal.lock().record_horizon_passed(number)?;
    }
    reporter.phase("compare", compare_sides(options, following, reporter)).await
}

/// Checks, and records that a migration begins. Returns the lock that keeps other commands from the database, too.
async fn begin(options: &Options, reporter: &Reporter) -> Result<(Journal, CommandLock), Error> {
    let mut random = [0u8; 4];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::Journal { path: options.state.clone(), source: error.into() })?;
    let migration = hex::encode(random);
    let lock = owner::acquire_lock(&options.source, Some(&migration)).await?;
    let checking = crate::check(options);
    let report = reporter.phase("check", checking).await?;
    report.accepted()?;
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
        number: 0,
        others,
        capture: report.source,
        phase: Phase::Begun,
        made_database: false,
        made_roles: Vec::new(),
        roles: options.roles,
        way_back: !options.accepted.no_fallback,
        claimed: false,
        back_from: 0,
        settled: false,
        served_from: Some(served_from),
        leads_to: None,
        horizon: 0,
        identities: Vec::new(),
        fenced: None,
        fenced_target: None,
    };
    let mut journal = Journal::begin(&options.state, record)?;
    owner::claim(options, &mut journal).await?;
    Ok((journal, lock))
}

/// Creates on the source what all targets need.
pub(crate) async fn prepare_source(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    replication_objects::install(&mut link, 0).await?;
    let before = Inventory::read(&mut link).await?;
    let patience = options.snapshot_limit;
    replication_objects::widen_identities(&mut link, &before, patience, |change| {
        journal.update(|record| record.identities.push(change))
    })
    .await?;
    if journal.record.capture == Capture::Log {
        let inventory = Inventory::read(&mut link).await?;
        replication_objects::publish(&mut link, &inventory).await?;
    }
    Ok(())
}

/// Step 1: from here on the source keeps every change for us.
async fn snapshot(options: &Options, number: usize, journal: &SharedJournal<'_>) -> Result<SnapshotState, Error> {
    let mut holder = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let mut locks = Link::connect(&options.source, Purpose::Statements, &[("lock_timeout", "2000")]).await?;
    const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
    let (capture, name) = {
        let journal = journal.lock();
        (journal.record.capture, journal.record.slot_of(number))
    };
    let (store, snapshot) = match capture {
        Capture::Log => {
            let slot = replication_objects::create_slot(&options.source, &name, true, options.snapshot_limit).await?;
            holder.query(BEGIN).await?;
            holder.query(&format!("SET TRANSACTION SNAPSHOT {}", literal(&slot.snapshot))).await?;
            let snapshot = slot.snapshot.clone();
            (ChangeStore::Slot(slot), snapshot)
        }
        Capture::Rows | Capture::Statements => {
            // Every transaction that was not captured has ended by now, so the snapshot sees it.
            let recording = Recording::begin(options, capture == Capture::Statements).await?;
            holder.query(BEGIN).await?;
            let told = holder.query("SELECT pg_export_snapshot(), pg_current_snapshot()").await?;
            let row = told.into_iter().next().unwrap_or_default();
            (ChangeStore::Proxy(recording, SourceSnapshot::parse(&text(&row, 1))?), text(&row, 0))
        }
    };
    let mut inventory = Inventory::read(&mut holder).await?;
    locks.query("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY").await?;
    for table in &inventory.tables {
        locks.query(&format!("LOCK TABLE ONLY {} IN ACCESS SHARE MODE", table.qualified())).await?;
    }
    let definitions = catalogs::read(&mut holder).await?;
    catalogs::fail_if_changed(catalogs::changes(&definitions, &catalogs::read(&mut locks).await?))?;
    if capture == Capture::Log {
        replication_objects::check_all_published(&mut locks, &inventory).await?;
    }
    // While the snapshot is held, no value that it sees is removed: a table without large values now had none then.
    let plain = inventory.measure(&mut locks).await?;
    let since = match &store {
        ChangeStore::Slot(_) => {
            let seen = SourceSnapshot::parse(&holder.text("SELECT pg_current_snapshot()").await?)?;
            let without = inventory.tables.iter().filter(|table| table.upserts() && plain.contains(&table.oid));
            distinguishes_versions(&seen).then(|| (seen, without.cloned().collect()))
        }
        ChangeStore::Proxy(..) => None,
    };
    journal.lock().record_phase(number, Phase::Snapshotted)?;
    reach(&options.faults, FaultPoint::Snapshotted)?;
    Ok(SnapshotState { store, snapshot, holder, since, locks, inventory, definitions })
}

/// Step 2: definitions, rows, then indexes and constraints.
async fn create(
    options: &Options,
    number: usize,
    journal: &SharedJournal<'_>,
    mut snapshotted: SnapshotState,
    clients: Option<&mut Clients>,
    reporter: &Reporter,
) -> Result<CreatedTarget, Error> {
    let mut clients = clients.filter(|clients| clients.is_significant());
    // The creation of indexes cannot be throttled as the copy of rows can.
    let gently = clients.is_some() && options.source.shares_machine_with(&options.target);
    let dump = journal.lock().create_dump(number)?;
    let major = major(&options.target).await?;
    let from = self::major(&options.source).await?;
    definitions::dump(&options.source, from, major, &snapshotted.snapshot, &dump).await?;
    journal.lock().record_phase(number, Phase::Copying)?;
    if options.roles == Roles::Create {
        let made = journal.lock().record.roles_of(number).to_vec();
        roles::create_and_update(&options.source, &options.target, &made, |made| {
            journal.lock().record_roles(number, made)
        })
        .await?;
    }
    definitions::create(&options.target, major, &dump).await?;
    let mut target = Link::connect(&options.target, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
    let position = if let ChangeStore::Slot(slot) = &snapshotted.store { slot.position } else { 0 };
    replication_objects::install(&mut target, position).await?;
    reach(&options.faults, FaultPoint::Defined)?;
    let copied = copy_rows(options, &mut snapshotted, clients.as_deref_mut(), reporter).await;
    journal::remove_copying(&options.state, &options.source.database, number);
    let horizon = copied?;
    let SnapshotState { store, mut locks, inventory, definitions, .. } = snapshotted;
    locks.query("COMMIT").await?;
    reach(&options.faults, FaultPoint::Copied)?;
    let deferred = DeferredDefinitions::read(major, &dump).await?;
    let controller = match clients.filter(|_| gently) {
        Some(clients) => {
            let nothing = Arc::new(Throttle::unlimited());
            Some(SpeedController::start(clients.reconnect().await?, options, nothing, None, reporter.clone()).await?)
        }
        None => None,
    };
    let weight = controller.as_ref().map(|controller| &*controller.weight);
    let indexes = deferred.complete(&options.target, major, &dump, options.copy_jobs, horizon == 0, gently);
    let makers = definitions::makers_condition(&options.target);
    reporter.phase("indexes", run_with_weight(&options.target, &makers, weight, reporter, indexes)).await?;
    let ours = format!("pid = {}", target.pid);
    let statistics = statistics(&mut target);
    reporter.phase("statistics", run_with_weight(&options.target, &ours, weight, reporter, statistics)).await?;
    flush_target(&mut target).await?;
    journal.lock().record_following(number, &definitions, horizon)?;
    let captured = if let ChangeStore::Proxy(recording, seen) = store { Some((recording, seen)) } else { None };
    Ok(CreatedTarget { inventory, definitions, captured, horizon })
}

/// Gathers planner statistics of all tables, except those with foreign tables as parts: the server would have to ask a third
/// one, which may refuse us.
pub(crate) async fn statistics(link: &mut Link) -> Result<(), Error> {
    let names = link
        .value(
            "WITH RECURSIVE apart (oid) AS (SELECT i.inhparent FROM pg_inherits i JOIN pg_class c ON c.oid = \
             i.inhrelid \
             WHERE c.relkind = 'f' UNION SELECT i.inhparent FROM pg_inherits i JOIN apart ON apart.oid = i.inhrelid) \
             SELECT string_agg(format('%I.%I', n.nspname, c.relname), ', ') FROM pg_class c \
             JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'm', 'p') AND c.relpersistence \
             <> 't' \
             AND c.oid NOT IN (SELECT oid FROM apart)",
        )
        .await?;
    match names {
        Some(names) => link.query(&format!("ANALYZE {names}")).await.map(drop),
        None => Ok(()),
    }
}

pub(crate) async fn major(server: &Server) -> Result<u32, Error> {
    let mut link = Link::connect(&server.database("postgres"), Purpose::Statements, &[]).await?;
    let major = link.text("SELECT current_setting('server_version_num')::int / 10000").await?;
    Ok(major.parse().unwrap_or(0))
}

/// Commits synchronously: after it, everything written on the target is on disk.
async fn flush_target(target: &mut Link) -> Result<(), Error> {
    target.query("UPDATE stillpoint.position SET position = position").await.map(drop)
}

/// Copies all rows except those that the log brings. Returns the position by which all of these are in the log, see
/// [`Record::horizon`].
async fn copy_rows(
    options: &Options,
    snapshotted: &mut SnapshotState,
    mut clients: Option<&mut Clients>,
    reporter: &Reporter,
) -> Result<Lsn, Error> {
    let SnapshotState { store, snapshot, holder, since, locks, inventory, .. } = snapshotted;
    let (slot, recording) = match store {
        ChangeStore::Slot(slot) => (Some(slot), None),
        ChangeStore::Proxy(recording, _) => (None, Some(&*recording)),
    };
    let copied = Arc::new(CopiedAmount::default());
    let throttle = Arc::new(if clients.is_some() { Throttle::new(COPY_BOUNDS) } else { Throttle::unlimited() });
    let mut watch = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let (source, target, locker) = (&options.source, &options.target, locks.pid);
    let (seen, without) = since.as_ref().map(|(seen, without)| (seen, without.as_slice())).unzip();
    let without = without.unwrap_or_default();
    let with = inventory.tables.iter().filter(|table| without.iter().all(|other| other.oid != table.oid));
    let with: Vec<TableDef> = with.cloned().collect();
    let copying = async {
        let copy = |view, tables| copy(source, target, view, tables, options.copy_jobs, &copied, &throttle);
        copy(View::Snapshot(snapshot.clone()), &with).await?;
        holder.query("COMMIT").await?;
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
                journal::publish_copying(&options.state, &options.source.database, reporter.number(), &told);
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
async fn create_foreign_keys(
    options: &Options,
    following: &mut FollowState,
    dump: &Path,
    reporter: &Reporter,
) -> Result<(), Error> {
    let major = major(&options.target).await?;
    let deferred = DeferredDefinitions::read(major, dump).await?;
    let mut target = Link::connect(&options.target, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
    if deferred.has_foreign_keys() {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let gently = following.controller.is_some() && options.source.shares_machine_with(&options.target);
        let weight = following.controller.as_ref().filter(|_| gently).map(|controller| Arc::clone(&controller.weight));
        let makers = definitions::makers_condition(&options.target);
        let created = create_foreign_keys_while_paused(
            options,
            following,
            &deferred,
            (dump, major),
            gently,
            &mut source,
            &mut target,
        );
        let created = run_with_weight(&options.target, &makers, weight.as_deref(), reporter, created);
        reporter.phase("foreign keys", created).await?;
        catch_up(following, &mut source, reporter).await?;
    }
    flush_target(&mut target).await
}

async fn create_foreign_keys_while_paused(
    options: &Options,
    following: &mut FollowState,
    deferred: &DeferredDefinitions,
    (dump, major): (&Path, u32),
    gently: bool,
    source: &mut Link,
    target: &mut Link,
) -> Result<(), Error> {
    // Sessions of a command that was killed.
    definitions::terminate_makers(&options.target, target).await?;
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
        deferred.create_foreign_keys(&options.target, major, dump, gently).await
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
    match watch.query(&sql).await?.first() {
        Some(row) => Err(Error::InTheWay(text(row, 0))),
        None => Ok(()),
    }
}

async fn read_inventory(server: &Server) -> Result<Inventory, Error> {
    Inventory::read(&mut Link::connect(server, Purpose::Statements, &[]).await?).await
}

/// Step 3: repeats what was committed since the snapshot, until the lag is short.
async fn follow(
    options: &Options,
    feed: Feed<'_>,
    inventory: Inventory,
    definitions: Definitions,
    clients: Option<Clients>,
    reporter: &Reporter,
) -> Result<FollowState, Error> {
    let clients = clients.filter(Clients::is_significant);
    let pace = Arc::new(if clients.is_some() { Throttle::new(REPLAY_BOUNDS) } else { Throttle::unlimited() });
    let follower = Follower::start(Plan {
        source: &options.source,
        target: &options.target,
        feed,
        inventory: &inventory,
        players: options.players,
        pace: Arc::clone(&pace),
    })
    .await?;
    let controller = match clients {
        Some(clients) => {
            let status = (!follower.is_by_proxy()).then(|| follower.watch());
            Some(SpeedController::start(clients, options, pace, status, reporter.clone()).await?)
        }
        None => None,
    };
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let mut following = FollowState { follower, inventory, definitions, controller };
    catch_up(&mut following, &mut link, reporter).await?;
    reach(&options.faults, FaultPoint::CaughtUp)?;
    Ok(following)
}

/// Waits until the replay's lag is short, and reports its progress.
pub(crate) async fn catch_up(following: &mut FollowState, source: &mut Link, reporter: &Reporter) -> Result<(), Error> {
    let mut told = (Instant::now(), following.follower.status().applied, 0.0);
    let mut warned = false;
    loop {
        let (begun, wanted) = (Instant::now(), following.follower.mark().await?);
        while following.follower.status().position < wanted && begun.elapsed() < CAUGHT_UP_LAG {
            if let Some(error) = following.follower.failure().await {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let status = following.follower.status();
        let caught_up = status.position >= wanted;
        if told.0.elapsed() >= PROGRESS_INTERVAL || caught_up {
            let lag_bytes = following.follower.lag_bytes(source).await?;
            let seconds = told.0.elapsed().as_secs_f64().max(0.001);
            let tps = ((status.applied - told.1) as f64 / seconds) as u64;
            let gained = (told.2 - lag_bytes as f64) / seconds;
            let estimate_s = (gained > 0.0 && told.2 > 0.0).then(|| (lag_bytes as f64 / gained) as u64);
            let lag_ms = begun.elapsed().as_millis() as u64;
            reporter.report(migrate::Event::Following { lag_ms, lag_bytes, tps, estimate_s });
            if gained < 0.0 && told.2 > 64e6 && !warned {
                warned = true;
                reporter.warn(format!(
                    "the source outruns the target: {lag_bytes} bytes behind, {tps} transactions a second applied"
                ));
            }
            told = (Instant::now(), status.applied, lag_bytes as f64);
        }
        if caught_up {
            return Ok(());
        }
    }
}

/// Compares both sides, each part at one moment, while clients continue.
pub(crate) async fn compare_sides(
    options: &Options,
    following: FollowState,
    reporter: &Reporter,
) -> Result<FollowState, Error> {
    compare_between(options, following, &options.source, &options.target, reporter).await
}

pub(crate) async fn compare_between(
    options: &Options,
    mut following: FollowState,
    from: &Server,
    to: &Server,
    reporter: &Reporter,
) -> Result<FollowState, Error> {
    if !options.compare {
        return Ok(following);
    }
    let mut link = Link::connect(from, Purpose::Statements, &[]).await?;
    // Changes since it had caught up may be more than a barrier waits for.
    catch_up(&mut following, &mut link, reporter).await?;
    let reading = following
        .controller
        .as_ref()
        .map_or_else(|| Arc::new(Throttle::unlimited()), |controller| Arc::clone(&controller.reading));
    let in_turn = following.controller.is_some() && from.shares_machine_with(to);
    let comparison = Comparison::between(from, to, &mut following.follower, &reading, in_turn).await?;
    let compared = comparison.run(&following.inventory).await.map_err(|error| match error.sqlstate() {
        // No table, or no column, has that name.
        Some("42P01" | "42703") => Error::SchemaChanged(error.to_string()),
        _ => error,
    })?;
    reporter.report(migrate::Event::Compared { tables: compared.tables as u64, rows: compared.rows });
    catch_up(&mut following, &mut link, reporter).await?;
    Ok(following)
}

/// Statements that set every sequence to its value on this side; empty if there are no sequences.
pub(crate) async fn sequences(from: &mut Link, inventory: &Inventory) -> Result<String, Error> {
    if inventory.sequences.is_empty() {
        return Ok(String::new());
    }
    let each = inventory.sequences.iter();
    let reads: Vec<String> =
        each.map(|name| format!("SELECT {} AS name, last_value, is_called FROM {name}", literal(name))).collect();
    let rows = from.query(&reads.join(" UNION ALL ")).await?;
    let writes = rows.iter().map(|row| {
        format!("SELECT setval({}, {}, {}); ", literal(&text(row, 0)), number::<i64>(row, 1), text(row, 2) == "t")
    });
    Ok(writes.collect())
}

/// Makes the state after a failure in which both servers were reached and cleaned.
pub(crate) fn state_after_cleanup(problems: Vec<String>) -> State {
    if problems.is_empty() { State::OnSource } else { State::OnSourceWithRemains(problems.join("; ")) }
}
