//! Removal of everything that a migration made on the servers and in the proxy: the inverses of its phases.
//!
//! Each accepts any part of what it removes, and needs nothing but the journal.

use crate::journal::{Journal, Record, SharedJournal};
use crate::options::Options;
use crate::proxy_client::ProxyClient;
use crate::{copied_settings, definitions, fence, moved_slots, owner, roles};
use std::time::Duration;
use stillpoint_migrate_apply::{Error, replication_objects};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, identifier};
use stillpoint_operation::Side;

/// Maximum time to wait for the lock of a table whose replica identity is restored.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Closes the sessions that the proxy has prepared on a target. It is not an error if there are none, or no proxy.
pub(crate) async fn abandon_sessions(options: &Options) {
    if let Ok(mut proxy) = ProxyClient::connect(&options.proxy, &options.tenant).await {
        let _ = proxy.abandon().await;
    }
}

/// Removes everything of a migration from the source, on which clients are.
///
/// # Errors
///
/// An error if the source cannot be asked, or refuses.
pub(crate) async fn clean_source(options: &Options, record: &Record) -> Result<(), Error> {
    fence::lift_if_fenced(&options.source, record.fenced.as_ref()).await?;
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    for slot in record.slots() {
        replication_objects::drop_slot(&mut link, &slot).await?;
    }
    replication_objects::uninstall(&mut link).await?;
    replication_objects::restore_identities(&mut link, &record.identities, LOCK_TIMEOUT).await?;
    Ok(())
}

/// Drops the databases that a migration made, at all its targets.
///
/// # Errors
///
/// [`Error::WrongPhase`] with the reasons of all targets at which that failed. A dropped target is no reason: the failure to
/// reach it has been reported already.
pub(crate) async fn drop_databases(options: &Options, record: &Record) -> Result<(), Error> {
    let mut problems = Vec::new();
    if record.made_database
        && let Err(error) = drop_database(&options.target, record, record.number).await
    {
        problems.push(error.to_string());
    }
    for other in record.others.iter().filter(|other| other.made_database) {
        let undone = match options.others.iter().find(|server| server.to_string() == other.server) {
            Some(server) => drop_database(server, record, other.number).await,
            None => Err(Error::WrongPhase(format!("its database at {}: name it with --target", other.server))),
        };
        if let (None, Err(error)) = (&other.dropped, undone) {
            problems.push(error.to_string());
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::WrongPhase(problems.join("; "))) }
}

/// Drops the database that was made at a target, and the roles made for it, and restores its settings.
pub(crate) async fn drop_database(target: &Server, record: &Record, number: usize) -> Result<(), Error> {
    copied_settings::restore(target, record, number).await?;
    let mut link = Link::connect(&target.database("postgres"), Purpose::Statements, &[]).await?;
    replication_objects::drop_slot(&mut link, &record.back_slot()).await?;
    moved_slots::drop_made(&mut link, &target.database, &record.moved_slots).await?;
    definitions::terminate_makers(target, &mut link).await?;
    let name = identifier(&target.database);
    link.query(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await?;
    roles::drop_created(&mut link, record.roles_of(number)).await?;
    Ok(())
}

pub(crate) fn leftover_message(server: &str, error: &Error) -> String {
    format!("the database on {server} could not be dropped; drop it by hand: {error}")
}

/// Removes, after the switch, what was made for the targets to which clients did not go. Returns messages for the
/// operator about targets that cannot be reached; no later command tries them again.
pub(crate) async fn remove_others(
    options: &Options,
    journal: &SharedJournal<'_>,
    source: &mut Link,
) -> Result<Vec<String>, Error> {
    let (mut left, record) = (Vec::new(), journal.record());
    for other in record.others.iter().filter(|other| other.dropped.is_none()) {
        replication_objects::drop_slot(source, &record.slot_of(other.number)).await?;
        let gone = match options.others.iter().find(|server| server.to_string() == other.server) {
            _ if !other.made_database => Ok(()),
            Some(server) => drop_database(server, &record, other.number).await,
            None => Err(Error::WrongPhase("no --target names it".into())),
        };
        match gone {
            Ok(()) => journal.lock().record_removal(other.number)?,
            Err(error) => {
                left.push(leftover_message(&other.server, &error));
                journal.lock().drop_target(other.number, error.to_string())?;
            }
        }
    }
    Ok(left)
}

/// Ends a migration of which nothing is left: frees the database for another migration, and removes the journal.
///
/// # Errors
///
/// An error if the source cannot be asked, or the journal cannot be removed.
pub(crate) async fn end_migration(options: &Options, journal: Journal) -> Result<(), Error> {
    owner::release(&options.source, &journal.record.migration).await?;
    options.faults.reach("release", Side::After)?;
    journal.end()
}
