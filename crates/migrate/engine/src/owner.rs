//! Exclusion on the source of a database: of a second command while one works, and of a second migration until the first has
//! ended.
//!
//! A command holds an advisory lock in the source's database `postgres` as long as it works. From a migration's first command
//! to its last, a row of a table there names the migration and the place of its journal: no command works on the database with
//! another journal. The journal's own lock does neither, because it belongs to one directory of one machine.
//!
//! ```text
//!  run: lock, row ........ lock lost? --> taken again, the row is still ours: no other command has worked in between --> goes on
//!       |                             \-> another command's, or the row is gone: ends, clients on the source
//!       +-- in the pause, before the switch: the lock is still held, or clients continue where they are
//!  fallback, finish, abort: lock ........ row gone
//! ```

use crate::Options;
use crate::fence::{SESSION_END_TIMEOUT, connect_beside};
use crate::journal::{Journal, Phase};
use crate::progress::Reporter;
use serde::Serialize;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::replication_objects::{SESSION_DESCRIPTION, check_ownership};
use stillpoint_migrate_postgres::link::{APPLICATION, Link, Server, ServerError, literal, text};

/// First halves of the keys of the locks that [`acquire_lock`] takes; the second halves are derived from the database's name, and are
/// the migration's number.
const COMMAND_LOCK_KEY: u32 = 0x0053_5443;
const MIGRATION_LOCK_KEY: u32 = 0x0053_544e;
/// Schema of the table of owners.
const SCHEMA: &str = "stillpoint_migrations";
/// Key of the lock under which the table is created and dropped; it is not a command's lock.
const TABLE_LOCK_KEY: u64 = 0x0053_544f;
/// Beginning of a transaction that changes the table. Its commit does not wait for a standby, because one that is gone would
/// block every command.
const BEGIN: &str = "BEGIN; SET LOCAL synchronous_commit = local; SELECT pg_advisory_xact_lock";
/// Time for the session of a command that has just ended to end too.
const COMMAND_END_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two attempts to take the lock.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(25);
/// Time between two checks that the lock is still held.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Migration that owns a database, as its source reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Owner {
    /// Number of the migration.
    pub migration: String,
    /// Machine and directory of its journal.
    pub journal: String,
    /// Time at which it began, by the source's clock.
    pub since: String,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "migration {}, started {}, with its journal in {}", self.migration, self.since, self.journal)
    }
}

/// Returns the owner of the server's database; `None` if it has none. `beside` is a connection to another database
/// of the
/// server.
///
/// # Errors
///
/// An error if the server cannot be asked.
pub(crate) async fn owner(beside: &mut Link, database: &str) -> Result<Option<Owner>, Error> {
    if beside.value("SELECT to_regclass('stillpoint_migrations.owners')").await?.is_none() {
        return Ok(None);
    }
    check_ownership(beside, SCHEMA).await?;
    let sql = format!(
        "SELECT migration, journal, date_trunc('second', since) FROM stillpoint_migrations.owners WHERE database = {}",
        literal(database)
    );
    let rows = match beside.query(&sql).await {
        // The last migration of the server has ended meanwhile.
        Err(error) if error.sqlstate() == Some("42P01") => return Ok(None),
        rows => rows?,
    };
    Ok(rows.first().map(|row| Owner { migration: text(row, 0), journal: text(row, 1), since: text(row, 2) }))
}

/// Machine and directory of a journal, for messages.
fn journal_place(state: &Path) -> String {
    let machine = rustix::system::uname();
    let state = std::path::absolute(state).unwrap_or_else(|_| state.into());
    format!("{}:{}", machine.nodename().to_string_lossy(), state.display())
}

/// Makes the source name the journal's migration as the owner of the database, until [`release`].
///
/// # Errors
///
/// An error if the server cannot be asked, or the journal cannot be written.
pub(crate) async fn claim(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    let mut link = connect_beside(&options.source).await?;
    let (record, journal_place) = (&journal.record, journal_place(&options.state));
    let values = [record.database.as_str(), &record.migration, &journal_place].map(literal).join(", ");
    let sql = format!(
        "SET client_min_messages = error; {BEGIN}({TABLE_LOCK_KEY}); \
         CREATE SCHEMA IF NOT EXISTS stillpoint_migrations; \
         CREATE TABLE IF NOT EXISTS stillpoint_migrations.owners (database text PRIMARY KEY, migration text NOT \
         NULL, journal text NOT NULL, since timestamptz NOT NULL DEFAULT now())"
    );
    link.query(&sql).await?;
    check_ownership(&mut link, SCHEMA).await?;
    let named =
        format!("INSERT INTO stillpoint_migrations.owners VALUES ({values}) ON CONFLICT (database) DO NOTHING; COMMIT");
    link.query(&named).await?;
    journal.update(|record| record.claimed = true)
}

/// Undoes [`claim`]; harmless if there is nothing to undo.
///
/// # Errors
///
/// An error if the server cannot be asked.
pub(crate) async fn release(server: &Server, migration: &str) -> Result<(), Error> {
    let mut link = connect_beside(server).await?;
    link.query(&format!("{BEGIN}({TABLE_LOCK_KEY})")).await?;
    if owner(&mut link, &server.database).await?.is_some() {
        let (database, migration) = (literal(&server.database), literal(migration));
        let table = "stillpoint_migrations.owners";
        let delete = format!("DELETE FROM {table} WHERE database = {database} AND migration = {migration}");
        let left = link.text(&format!("{delete}; SELECT count(*) FROM {table}")).await?;
        if left == "0" {
            link.query(&format!("DROP TABLE {table}; DROP SCHEMA stillpoint_migrations")).await?;
        }
    }
    link.query("COMMIT").await?;
    Ok(())
}

/// The session that holds the lock.
#[derive(Debug, Clone)]
struct Session {
    pid: i32,
    /// Start of the session: another session may later get the same number.
    since: String,
}

/// Shows other tasks if a command still holds its lock.
#[derive(Debug, Clone)]
pub(crate) struct Witness {
    server: Server,
    session: Arc<Mutex<Session>>,
}

impl Witness {
    /// Fails unless the lock is held at this moment, according to the source; `link` is any connection to it.
    ///
    /// # Errors
    ///
    /// [`Error::LockLost`]; other errors if the server cannot be asked.
    pub(crate) async fn check_held(&self, link: &mut Link) -> Result<(), Error> {
        let Session { pid, since } = self.session.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sql = format!(
            "SELECT 1 FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE {} AND l.pid = {pid} AND \
             a.backend_start = {}",
            lock_condition(&self.server.database),
            literal(&since)
        );
        match link.value(&sql).await? {
            Some(_) => Ok(()),
            None => Err(Error::LockLost { server: self.server.to_string(), why: "its session has ended".into() }),
        }
    }
}

/// SQL condition on rows of `pg_locks`: a command's lock on a database.
fn lock_condition(database: &str) -> String {
    format!(
        "l.locktype = 'advisory' AND l.classid = {COMMAND_LOCK_KEY} AND l.granted AND l.objsubid = 2 \
         AND l.objid = (hashtext({})::bigint & 4294967295)::oid",
        literal(database)
    )
}

/// The right of a command to work on the migration of a database, as long as the connection exists.
pub(crate) struct CommandLock {
    link: Link,
    witness: Witness,
    owner: Option<Owner>,
}

impl CommandLock {
    /// Returns true if the source names the migration for which the lock is held.
    pub(crate) fn is_owned(&self) -> bool {
        self.owner.is_some()
    }

    /// Returns true if the journal's migration has ended, and nothing but the journal is left of it.
    ///
    /// # Errors
    ///
    /// [`Error::WrongPhase`] if the migration was removed without its journal.
    pub(crate) fn is_over(&self, journal: &Journal) -> Result<bool, Error> {
        let record = &journal.record;
        match record.phase {
            _ if !record.claimed || self.is_owned() => Ok(false),
            // A command was interrupted at its very end.
            Phase::Returned => Ok(true),
            Phase::Switched if !record.way_back => Ok(true),
            _ => Err(Error::WrongPhase(format!(
                "migration {} was removed by its number: run `stillpoint migrate abort` to remove its journal",
                record.migration
            ))),
        }
    }

    /// Returns a witness, by which other tasks can check that the lock is still held.
    pub(crate) fn witness(&self) -> Witness {
        self.witness.clone()
    }

    /// Waits until the lock is lost for good. If its connection breaks, the lock is taken again. That is not a loss if the
    /// owner is still `migration`: any other command would have refused to work, or removed the owner.
    pub(crate) async fn wait_until_lost(&mut self, migration: &str, reporter: &Reporter) -> Error {
        loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            let Err(error) = self.link.query("SELECT").await else { continue };
            let server = self.witness.server.clone();
            let lost = |why: String| Error::LockLost { server: server.to_string(), why };
            match acquire_lock(&server, Some(migration)).await {
                Ok(lock) if lock.owner.is_some() => {
                    let session = lock.witness.session.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    *self.witness.session.lock().unwrap_or_else(PoisonError::into_inner) = session;
                    (self.link, self.owner) = (lock.link, lock.owner);
                    reporter.warn(format!(
                        "{error}: the command has taken its lock on {server} again, and no other command held it \
                         meanwhile"
                    ));
                }
                Ok(_) => return lost("another command has ended the migration meanwhile".into()),
                Err(why) => return lost(format!("{error}; {why}")),
            }
        }
    }
}

/// Keeps other commands from the migration of a database. The caller holds the journal of `migration`, if there is one: another
/// session that holds the migration's lock here belongs to a command that has died.
///
/// # Errors
///
/// [`Error::AtWork`] if another command works, [`Error::Owned`] if the database has another migration; other errors if the
/// server cannot be asked.
pub(crate) async fn acquire_lock(server: &Server, migration: Option<&str>) -> Result<CommandLock, Error> {
    let mut link = connect_beside(server).await?;
    let name = literal(&server.database);
    let number = migration.and_then(|migration| u32::from_str_radix(migration, 16).ok());
    if let Some(number) = number {
        let earlier = format!(
            "SELECT pg_terminate_backend(l.pid, {}) FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
             WHERE l.locktype = 'advisory' AND l.classid = {MIGRATION_LOCK_KEY} AND l.objid = {number} \
             AND l.pid <> pg_backend_pid() AND a.application_name = {} AND a.datname = current_database()",
            SESSION_END_TIMEOUT.as_millis(),
            literal(APPLICATION)
        );
        link.query(&earlier).await?;
    }
    let begun = Instant::now();
    while link.text(&format!("SELECT pg_try_advisory_lock({COMMAND_LOCK_KEY}, hashtext({name}))")).await? != "t" {
        if begun.elapsed() > COMMAND_END_TIMEOUT {
            let who = working_command(&mut link, &server.database).await?.unwrap_or_default();
            return Err(Error::AtWork { server: server.to_string(), who });
        }
        tokio::time::sleep(LOCK_RETRY_INTERVAL).await;
    }
    let owner = owner(&mut link, &server.database).await?;
    if let Some(owner) = owner.as_ref().filter(|owner| Some(owner.migration.as_str()) != migration) {
        return Err(Error::Owned { server: server.to_string(), owner: owner.to_string() });
    }
    if let Some(number) = number {
        link.query(&format!("SELECT pg_try_advisory_lock({MIGRATION_LOCK_KEY}, {})", number.cast_signed())).await?;
    }
    let since = link.text("SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()").await?;
    let session = Arc::new(Mutex::new(Session { pid: link.pid, since }));
    Ok(CommandLock { link, witness: Witness { server: server.clone(), session }, owner })
}

/// Calls [`acquire_lock`]; `None` if the server cannot be asked, and the next query reports the reason.
///
/// # Errors
///
/// [`Error::AtWork`] and [`Error::Owned`] only.
pub(crate) async fn acquire_lock_if_reachable(server: &Server, migration: &str) -> Result<Option<CommandLock>, Error> {
    match acquire_lock(server, Some(migration)).await {
        Ok(lock) => Ok(Some(lock)),
        Err(error @ (Error::AtWork { .. } | Error::Owned { .. })) => Err(error),
        Err(error) => {
            tracing::debug!(%error, "other commands are not excluded from the database");
            Ok(None)
        }
    }
}

/// Describes the session of a command that [`acquire_lock`]s a database, for messages; `beside` is a connection to
/// another database of
/// the server.
///
/// # Errors
///
/// An error if the server cannot be asked.
pub(crate) async fn working_command(beside: &mut Link, database: &str) -> Result<Option<String>, ServerError> {
    let sql = format!(
        "SELECT format('%s, since %s, from %s', {SESSION_DESCRIPTION}, date_trunc('second', backend_start), \
         coalesce(host(client_addr), 'its machine')) FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
         WHERE {} AND a.datname = current_database()",
        lock_condition(database)
    );
    beside.value(&sql).await
}
