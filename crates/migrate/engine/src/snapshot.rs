//! Step 1 of the paper: from the snapshot on, the source keeps every change.

use crate::catalogs::{self, Definitions};
use crate::copy::distinguishes_versions;
use crate::journal::{Capture, Phase, SharedJournal};
use crate::options::Options;
use crate::selection::LeftOut;
use stillpoint_migrate_apply::inventory::{Inventory, TableDef};
use stillpoint_migrate_apply::recording::Recording;
use stillpoint_migrate_apply::replication_objects::{self, Slot};
use stillpoint_migrate_apply::{Error, SourceSnapshot};
use stillpoint_migrate_postgres::link::{Link, Purpose, literal, text};

/// State after step 1: changes are kept, the snapshot is open.
pub(crate) struct SnapshotState {
    pub(crate) store: ChangeStore,
    /// Name of the snapshot, by which other sessions take it, and the session that holds it.
    pub(crate) snapshot: String,
    pub(crate) holder: Link,
    /// The snapshot's contents, and tables that are copied without it; `None` if all are copied with it.
    pub(crate) since: Option<(SourceSnapshot, Vec<TableDef>)>,
    /// Session with a lock on every table against changed definitions, and without a snapshot.
    pub(crate) locks: Link,
    pub(crate) inventory: Inventory,
    /// Objects that are left out, as the snapshot sees them.
    pub(crate) left_out: LeftOut,
    /// All definitions, as the snapshot sees them.
    pub(crate) definitions: Definitions,
}

/// Place that keeps changes committed after the snapshot.
pub(crate) enum ChangeStore {
    /// The log, by a slot that has exported the snapshot.
    Slot(Slot),
    /// The log, by the slot of an earlier command; its snapshot has ended.
    Kept,
    /// The proxy's capture, which also holds changes that the snapshot sees.
    Proxy(Recording, SourceSnapshot),
}

/// Creates on the source what all targets need.
pub(crate) async fn prepare_source(options: &Options, journal: &SharedJournal<'_>) -> Result<(), Error> {
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    replication_objects::install(&mut link, 0).await?;
    let before = options.selection.inventory(&mut link).await?;
    let patience = options.snapshot_limit;
    replication_objects::widen_identities(&mut link, &before, patience, |change| {
        journal.lock().update(|record| record.identities.push(change))
    })
    .await?;
    if journal.record().capture == Capture::Log {
        let inventory = options.selection.inventory(&mut link).await?;
        replication_objects::publish(&mut link, &inventory).await?;
    }
    Ok(())
}

/// Options of the session that [`lock_definitions`] uses.
pub(crate) const LOCK_SETTINGS: [(&str, &str); 1] = [("lock_timeout", "2000")];

/// Locks every table against changed definitions, until the session's transaction ends. The session has no snapshot.
pub(crate) async fn lock_definitions(locks: &mut Link, inventory: &Inventory) -> Result<(), Error> {
    locks.query("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY").await?;
    for table in &inventory.tables {
        locks.query(&format!("LOCK TABLE ONLY {} IN ACCESS SHARE MODE", table.qualified())).await?;
    }
    Ok(())
}

/// Takes the snapshot for one target.
pub(crate) async fn snapshot(
    options: &Options,
    number: usize,
    journal: &SharedJournal<'_>,
) -> Result<SnapshotState, Error> {
    let mut holder = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let mut locks = Link::connect(&options.source, Purpose::Statements, &LOCK_SETTINGS).await?;
    const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
    let record = journal.record();
    let (capture, name) = (record.capture, record.slot_of(number));
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
            let recording = crate::capture::begin(options, capture == Capture::Statements).await?;
            holder.query(BEGIN).await?;
            let told = holder.query("SELECT pg_export_snapshot(), pg_current_snapshot()").await?;
            let row = told.into_iter().next().unwrap_or_default();
            (ChangeStore::Proxy(recording, SourceSnapshot::parse(&text(&row, 1))?), text(&row, 0))
        }
    };
    let mut inventory = options.selection.inventory(&mut holder).await?;
    let left_out = options.selection.left_out(&mut holder).await?;
    lock_definitions(&mut locks, &inventory).await?;
    let selection = &options.selection;
    let definitions = catalogs::read(&mut holder, selection).await?;
    catalogs::fail_if_changed(catalogs::changes(&definitions, &catalogs::read(&mut locks, selection).await?))?;
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
        ChangeStore::Kept | ChangeStore::Proxy(..) => None,
    };
    journal.lock().record_phase(number, Phase::Snapshotted)?;
    Ok(SnapshotState { store, snapshot, holder, since, locks, inventory, left_out, definitions })
}
