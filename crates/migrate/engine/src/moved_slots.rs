//! Logical slots of other readers (Debezium and the like): the same ones are made on the target before any client writes there.
//!
//! A slot on the target holds everything that is written there from its making on, also what is still replayed. Clients move
//! only when each reader has confirmed everything that the source had written by then: no change is in neither slot, and the
//! last ones before the switch are in both. A reader that goes on at the target from the beginning of its slot loses nothing.

use crate::journal::SharedJournal;
use crate::options::Options;
use crate::progress::Reporter;
use std::time::{Duration, Instant};
use stillpoint_events::migrate;
use stillpoint_migrate_apply::{Error, MARKER_PREFIX, replication_objects};
use stillpoint_migrate_postgres::link::{Link, ServerError, literal, text};

/// Interval at which readers are asked for what they have confirmed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Time for the trial of a plugin, which waits for running transactions of the target, in milliseconds.
const TRY_TIMEOUT_MS: u32 = 10_000;

/// Reason why a slot cannot be made.
const IS_TAKEN: &str = "the target has a slot of this name";

/// SQL condition for slots `s` of other readers in this database.
pub(crate) const OF_OTHERS: &str = "s.database = current_database() AND s.slot_type = 'logical' AND NOT s.temporary AND \
     s.slot_name !~ '^stillpoint_'";

/// Makes the source's slots on the target, and waits for their readers. A slot that an earlier attempt made is kept.
///
/// # Errors
///
/// [`Error::TimedOut`] with the slots whose readers do not follow, and errors of the servers.
pub(crate) async fn make(
    options: &Options,
    journal: &SharedJournal<'_>,
    from: &mut Link,
    to: &mut Link,
    reporter: &Reporter,
) -> Result<(), Error> {
    let slots = from
        .query(&format!(
            "SELECT s.slot_name, s.plugin, coalesce((to_jsonb(s) ->> 'two_phase')::bool, false) FROM pg_replication_slots s \
             WHERE {OF_OTHERS} ORDER BY 1"
        ))
        .await?;
    for slot in &slots {
        let (name, plugin, two_phase) = (text(slot, 0), text(slot, 1), text(slot, 2));
        let quoted = literal(&name);
        let there = format!("SELECT 1 FROM pg_replication_slots WHERE slot_name = {quoted}");
        if to.value(&there).await?.is_some() {
            if journal.record().moved_slots.contains(&name) {
                continue;
            }
            return Err(Error::Refused(vec![format!("replication slot {name}: {IS_TAKEN}")]));
        }
        // Recorded before it is made: one that is not in this database is not dropped either.
        journal.lock().update(|record| record.moved_slots.push(name.clone()))?;
        let plugin = literal(&plugin);
        let make =
            format!("SELECT lsn FROM pg_create_logical_replication_slot({quoted}, {plugin}, false, '{two_phase}')");
        let position =
            tokio::time::timeout(options.snapshot_limit, to.text(&make)).await.map_err(|_| Error::TimedOut {
                what: format!("making slot {name} on the target"),
                limit: options.snapshot_limit,
                who: Vec::new(),
            })??;
        reporter.report(migrate::Event::SlotMade { slot: name, position });
    }
    if slots.is_empty() { Ok(()) } else { wait_for_readers(options, from).await }
}

/// Waits until the readers of all slots have confirmed what is written now.
async fn wait_for_readers(options: &Options, from: &mut Link) -> Result<(), Error> {
    // A reader of a quiet database is told of a new position by this.
    let mark = format!("SELECT pg_logical_emit_message(true, {}, 'slots')", literal(MARKER_PREFIX));
    let wanted = from.text(&mark).await?;
    let behind = format!(
        "SELECT format('slot %s (%s, %s bytes behind)', s.slot_name, CASE WHEN s.active THEN 'its reader is connected' ELSE \
         'no reader is connected' END, pg_wal_lsn_diff('{wanted}', s.confirmed_flush_lsn)) FROM pg_replication_slots s \
         WHERE {OF_OTHERS} AND s.confirmed_flush_lsn < '{wanted}'"
    );
    let (begun, limit) = (Instant::now(), options.prepare_limit);
    loop {
        let rows = from.query(&behind).await?;
        if rows.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > limit {
            let who = rows.iter().map(|row| text(row, 0)).collect();
            return Err(Error::TimedOut { what: "waiting for the readers of slots".into(), limit, who });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Drops the slots that [`make`] made for a target's database, and none of another database.
///
/// # Errors
///
/// An error if the target cannot be asked, or refuses.
pub(crate) async fn drop_made(link: &mut Link, database: &str, made: &[String]) -> Result<(), Error> {
    for slot in made {
        let (name, database) = (literal(slot), literal(database));
        let ours = format!("SELECT 1 FROM pg_replication_slots WHERE slot_name = {name} AND database = {database}");
        if link.value(&ours).await?.is_some() {
            replication_objects::drop_slot(link, slot).await?;
        }
    }
    Ok(())
}

/// Reason why the target cannot have a slot of this name and plugin; `None` if it can.
///
/// # Errors
///
/// An error if the target cannot be asked.
pub(crate) async fn obstacle(there: &mut Link, name: &str, plugin: &str) -> Result<Option<String>, ServerError> {
    let taken = format!("SELECT 1 FROM pg_replication_slots WHERE slot_name = {}", literal(name));
    if there.value(&taken).await?.is_some() {
        return Ok(Some(IS_TAKEN.into()));
    }
    // A temporary slot loads the plugin and is gone with the connection, or at once.
    const TRIED: &str = "stillpoint_tries_a_plugin";
    there.query(&format!("SET statement_timeout = {TRY_TIMEOUT_MS}")).await?;
    let make = format!("SELECT pg_create_logical_replication_slot('{TRIED}', {}, true)", literal(plugin));
    let obstacle = match there.query(&make).await {
        Ok(_) => there.query(&format!("SELECT pg_drop_replication_slot('{TRIED}')")).await.map(|_| None)?,
        Err(ServerError::Sql { message, .. }) => Some(format!("the target cannot make one: {message}")),
        Err(error) => return Err(error),
    };
    there.query("RESET statement_timeout").await?;
    Ok(obstacle)
}
