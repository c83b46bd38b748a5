//! A copy of rows that goes on after its command was killed: pieces that are on the target are not copied again.
//!
//! The slot keeps every change since its snapshot, and most tables are copied as rows that are unchanged since that snapshot, see
//! [`copy`](mod@crate::copy): for these any later moment will do. Each piece is recorded on the target, in the transaction that
//! writes its rows. Tables that are copied with the snapshot itself, which ended with the command, are copied from the beginning,
//! when the others follow, as tables that are new then ([`redefine`](crate::redefine)).
//!
//! Between two commands no lock keeps a table as it was. So a copy goes on only if no definition has changed, and a table whose file
//! is another one (VACUUM FULL moves its rows to other pages) begins again.

use crate::copied_pages::{CopiedPages, CopyState, gaps};
use crate::journal::{Journal, Phase, SharedJournal};
use crate::options::Options;
use crate::progress::Reporter;
use crate::snapshot::{ChangeStore, LOCK_SETTINGS, SnapshotState, lock_definitions};
use crate::{catalogs, definitions};
use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::inventory::TableDef;
use stillpoint_migrate_apply::partial_tables::PartialTables;
use stillpoint_migrate_apply::{Error, SourceSnapshot, replication_objects};
use stillpoint_migrate_postgres::link::{APPLICATION, Link, Purpose, ServerError, literal, number};

/// Time for a server that was lost to come back, and between two looks.
const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
const RESTART_INTERVAL: Duration = Duration::from_millis(250);

/// Describes a copy that begins; `None` if it cannot go on later, because everything is copied with the snapshot.
pub(crate) async fn describe(snapshotted: &SnapshotState, source: &mut Link) -> Result<Option<CopyState>, Error> {
    let (ChangeStore::Slot(_), Some((seen, without))) = (&snapshotted.store, &snapshotted.since) else {
        return Ok(None);
    };
    let wanted: HashSet<u32> = without.iter().map(|table| table.oid).collect();
    let mut files = files(source).await?;
    files.retain(|oid, _| wanted.contains(oid));
    Ok(Some(CopyState { seen: seen.to_string(), files }))
}

/// Numbers of the files of all tables.
async fn files(source: &mut Link) -> Result<BTreeMap<u32, u32>, Error> {
    let rows = source.query("SELECT oid, pg_relation_filenode(oid) FROM pg_class WHERE relkind = 'r'").await?;
    Ok(rows.iter().map(|row| (number(row, 0), number(row, 1))).collect())
}

/// Returns true if the copy of an earlier command can go on: its slot and its target are there, and no definition has changed.
pub(crate) async fn is_possible(options: &Options, journal: &Journal) -> bool {
    let record = &journal.record;
    if record.phase != Phase::Copying
        || record.copy.is_none()
        || !record.others.is_empty()
        || !options.others.is_empty()
    {
        return false;
    }
    let look = async {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
        let is_there = target.value("SELECT to_regclass('stillpoint.pieces')").await?.is_some();
        // Tables that were to be copied with the snapshot are copied as new ones, which needs that program.
        let is_there = is_there && definitions::cannot_dump(target.rights.major).await.is_none();
        let now = catalogs::read(&mut source, &options.selection).await?;
        Ok::<_, Error>(is_there && catalogs::changes(&journal.definitions_of(record.number)?, &now).is_empty())
    };
    match look.await {
        Ok(is_possible) => is_possible && replication_objects::has_slot_log(&options.source, &record.slot()).await,
        Err(error) => {
            tracing::debug!(%error, "the copy cannot go on");
            false
        }
    }
}

/// Waits for a server that was lost while rows were copied, and takes the copy up. `None` if `error` has another reason, or the server
/// does not come back.
pub(crate) async fn wait_and_take_up(
    options: &Options,
    number: usize,
    journal: &SharedJournal<'_>,
    error: &Error,
    reporter: &Reporter,
) -> Option<(SnapshotState, CopiedPages)> {
    let record = journal.record();
    // A copy with several targets is not recorded.
    record.copy.as_ref()?;
    let servers = [&options.source, &options.target];
    let is_there = async || {
        for server in servers {
            if Link::connect(server, Purpose::Statements, &[]).await.is_err() {
                return false;
            }
        }
        true
    };
    if !is_of_lost_server(error) && is_there().await {
        return None;
    }
    reporter.warn(format!("{error}; the copy goes on when the server is there again"));
    let begun = Instant::now();
    loop {
        if is_there().await && replication_objects::has_slot_log(&options.source, &record.slot()).await {
            match take_up(options, number, journal).await {
                Ok(taken_up) => return Some(taken_up),
                Err(why) if is_of_lost_server(&why) => {}
                Err(why) => {
                    reporter.warn(format!("the copy cannot go on: {why}"));
                    return None;
                }
            }
        }
        if begun.elapsed() > RESTART_TIMEOUT {
            return None;
        }
        tokio::time::sleep(RESTART_INTERVAL).await;
    }
}

/// Returns true if a server was shut down or could not be reached.
fn is_of_lost_server(error: &Error) -> bool {
    let Error::Server(error) = error else { return false };
    match error {
        ServerError::Lost { .. } | ServerError::Connect { .. } | ServerError::TimedOut { .. } => true,
        // It is being shut down, or started.
        ServerError::Sql { code, .. } => code.starts_with("57P0"),
        _ => false,
    }
}

/// Takes up the copy of an earlier command. Returns the state in which it goes on, and the pages that are on the target.
///
/// # Errors
///
/// Errors of the connections to the servers; [`Error::SchemaChanged`] if definitions have changed since.
pub(crate) async fn take_up(
    options: &Options,
    number_of_target: usize,
    journal: &SharedJournal<'_>,
) -> Result<(SnapshotState, CopiedPages), Error> {
    let record = journal.record();
    let state = record.copy.ok_or_else(|| Error::WrongPhase("no copy was begun".into()))?;
    let seen = SourceSnapshot::parse(&state.seen)?;
    let mut holder = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let mut locks = Link::connect(&options.source, Purpose::Statements, &LOCK_SETTINGS).await?;
    let inventory = options.selection.inventory(&mut holder).await?;
    let left_out = options.selection.left_out(&mut holder).await?;
    lock_definitions(&mut locks, &inventory).await?;
    let definitions = journal.lock().definitions_of(number_of_target)?;
    catalogs::fail_if_changed(catalogs::changes(&definitions, &catalogs::read(&mut locks, &options.selection).await?))?;
    let files = files(&mut locks).await?;

    let mut target = Link::connect(&options.target, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
    end_sessions(options, &mut target).await?;
    let mut copied = read_pieces(&mut target).await?;
    let is_plain = |table: &TableDef| state.files.contains_key(&table.oid);
    let (mut again, mut partial) = (Vec::new(), Vec::new());
    for table in &inventory.tables {
        let is_whole = copied.get(&table.oid).is_some_and(|pages| gaps(pages).is_empty());
        if !is_plain(table) && !is_whole {
            partial.push(table);
        } else if is_plain(table) && files.get(&table.oid) != state.files.get(&table.oid) {
            again.push(table);
        }
    }
    let mut sql = "BEGIN; ".to_owned();
    for table in again.iter().chain(&partial) {
        copied.remove(&table.oid);
        // Rows that its extension makes stay.
        sql += &match table.own_rows {
            Some(_) => format!("DELETE FROM ONLY {} WHERE {}; ", table.qualified(), table.moved_rows()),
            None => format!("TRUNCATE ONLY {}; ", table.qualified()),
        };
        sql += &format!("DELETE FROM stillpoint.pieces WHERE relation = {}; ", table.oid);
    }
    sql += &PartialTables::record_copying(partial.iter().map(|table| table.oid));
    target.query(&format!("{sql}COMMIT")).await?;
    tracing::debug!(again = again.len(), partial = partial.len(), "the copy goes on");
    let without = inventory.tables.iter().filter(|table| is_plain(table)).cloned().collect();
    let state = SnapshotState {
        store: ChangeStore::Kept,
        snapshot: String::new(),
        holder,
        since: Some((seen, without)),
        locks,
        left_out,
        inventory,
        definitions,
    };
    Ok((state, copied))
}

/// Ends sessions of the earlier command on the target: a piece whose end was on its way could otherwise be recorded later.
async fn end_sessions(options: &Options, target: &mut Link) -> Result<(), Error> {
    target
        .query(&format!(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = {} AND application_name = {} AND pid <> \
             pg_backend_pid()",
            literal(&options.target.database),
            literal(APPLICATION)
        ))
        .await?;
    crate::definitions::terminate_makers(&options.target, target).await?;
    Ok(())
}

async fn read_pieces(target: &mut Link) -> Result<CopiedPages, Error> {
    let mut copied = CopiedPages::new();
    for row in target.query("SELECT relation, first, last FROM stillpoint.pieces").await? {
        let end = row[2].is_some().then(|| number(&row, 2));
        copied.entry(number(&row, 0)).or_default().push((number(&row, 1), end));
    }
    Ok(copied)
}
