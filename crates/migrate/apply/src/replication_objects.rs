//! Objects that a migration puts on both servers and removes again: a schema, publications, slots, replica identities. Every
//! step has its inverse beside it, and every inverse is harmless if there is nothing to undo.

use crate::Error;
use crate::inventory::{Inventory, TableDef};
use crate::partial_tables::PartialTables;
use crate::pgoutput::Lsn;
use std::time::{Duration, Instant};
use stillpoint_migrate_postgres::link::{Link, Purpose, Row, Server, ServerError, identifier, literal, number, text};

/// Publications: rows of the user's tables, and our stamps, by which the way back identifies our own transactions.
pub const PUBLICATIONS: [&str; 2] = ["stillpoint_rows", "stillpoint_stamps"];
/// Lock timeout in milliseconds; after it the lock is requested again later, because a session that waits for a lock blocks
/// clients.
const LOCK_TIMEOUT_MS: u32 = 100;
/// Maximum time to wait for running commands; a command that takes longer has looked up its tables' publications long before.
const COMMANDS_TIMEOUT: Duration = Duration::from_secs(2);

/// A replica identity that was changed: the table, and its previous identity.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IdentityChange {
    table: String,
    was: String,
}

/// Creates our schema with its tables; `position` is where the replay onto this server begins. Rows without a key can be changed
/// also where another publication is for all tables.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn install(link: &mut Link, position: Lsn) -> Result<(), Error> {
    let made = "BEGIN; CREATE SCHEMA IF NOT EXISTS stillpoint; \
         CREATE TABLE IF NOT EXISTS stillpoint.applied (stamps bigint[] NOT NULL); \
         CREATE TABLE IF NOT EXISTS stillpoint.position (position bigint NOT NULL); \
         CREATE TABLE IF NOT EXISTS stillpoint.epoch (migration text NOT NULL, epoch int NOT NULL, serving bool NOT NULL); \
         ALTER TABLE stillpoint.applied REPLICA IDENTITY FULL; ALTER TABLE stillpoint.position REPLICA IDENTITY FULL; \
         ALTER TABLE stillpoint.epoch REPLICA IDENTITY FULL";
    link.query(made).await?;
    check_ownership(link, SCHEMA).await?;
    link.query(PartialTables::INSTALL).await?;
    let filled = format!(
        "TRUNCATE stillpoint.applied, stillpoint.position; INSERT INTO stillpoint.position VALUES ({position}); \
         COMMIT"
    );
    link.query(&filled).await?;
    Ok(())
}

/// Name of our schema in a database that is moved.
pub const SCHEMA: &str = "stillpoint";

/// Refuses our schema if another role created it or owns a relation in it: it could have triggers and views there that run with
/// our rights. An open transaction is rolled back in that case.
///
/// # Errors
///
/// [`Error::Refused`]; other errors if the server cannot be asked.
pub async fn check_ownership(link: &mut Link, schema: &str) -> Result<(), Error> {
    let sql = format!(
        "SELECT r.rolname, current_database() FROM pg_namespace n CROSS JOIN LATERAL (SELECT n.nspowner UNION ALL \
         SELECT c.relowner FROM pg_class c WHERE c.relnamespace = n.oid) AS part (owner) JOIN pg_roles r ON r.oid = \
         part.owner WHERE n.nspname = {} AND NOT r.rolsuper AND r.rolname <> current_user",
        literal(schema)
    );
    let Some(row) = link.query(&sql).await?.into_iter().next() else { return Ok(()) };
    let (role, database) = (text(&row, 0), text(&row, 1));
    link.query("ROLLBACK").await?;
    Err(Error::Refused(vec![format!(
        "schema {schema} of database {database} has objects of role {role}, which is not a superuser: drop or rename \
         the schema"
    )]))
}

/// Undoes [`install`] and [`publish`].
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn uninstall(link: &mut Link) -> Result<(), ServerError> {
    withdraw(link).await?;
    link.query("DROP SCHEMA IF EXISTS stillpoint CASCADE").await.map(drop)
}

/// Undoes [`publish`]. A client's write looks up the publications of its table, then each of these, and fails if one has been
/// dropped meanwhile (`cache lookup failed for publication`). So the tables are removed from the publications first, and the
/// publications are dropped when every command that may have looked them up before has ended.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn withdraw(link: &mut Link) -> Result<(), ServerError> {
    let [rows, stamps] = PUBLICATIONS.map(literal);
    let tables = format!(
        "SELECT pubname, string_agg(format('ONLY %I.%I', nspname, relname), ', ') FROM pg_publication p \
         JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid \
         JOIN pg_namespace n ON n.oid = c.relnamespace WHERE pubname IN ({rows}, {stamps}) GROUP BY pubname"
    );
    let published = link.query(&tables).await?;
    if !published.is_empty() {
        let leave = |row: &Row| format!("ALTER PUBLICATION {} DROP TABLE {};", identifier(&text(row, 0)), text(row, 1));
        let leave: String = published.iter().map(leave).collect();
        let sql = format!("BEGIN; SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}; {leave} COMMIT");
        match link.query(&sql).await {
            Ok(_) => wait_for_commands(link).await?,
            // Another session redefines one of these tables, or has dropped it meanwhile.
            Err(error) => {
                tracing::debug!("publications are dropped with their tables: {error}");
                link.query("ROLLBACK").await?;
            }
        }
    }
    for publication in PUBLICATIONS {
        link.query(&format!("SET client_min_messages = error; DROP PUBLICATION IF EXISTS {publication}")).await?;
    }
    Ok(())
}

/// Waits for the present commands of other sessions of the database, for two seconds at most.
async fn wait_for_commands(link: &mut Link) -> Result<(), ServerError> {
    let now = literal(&link.text("SELECT clock_timestamp()").await?);
    let older = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
         AND backend_type = 'client backend' AND state = 'active' AND query_start < {now}"
    );
    let begun = Instant::now();
    while link.text(&older).await? != "0" && begun.elapsed() < COMMANDS_TIMEOUT {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Publishes all tables of the inventory, and our stamps.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn publish(link: &mut Link, inventory: &Inventory) -> Result<(), ServerError> {
    let names: Vec<String> = inventory.tables.iter().map(TableDef::qualified).collect();
    let tables = if names.is_empty() { String::new() } else { format!(" FOR TABLE ONLY {}", names.join(", ONLY ")) };
    let [rows, stamps] = PUBLICATIONS;
    withdraw(link).await?;
    link.query(&format!(
        "CREATE PUBLICATION {rows}{tables}; CREATE PUBLICATION {stamps} FOR TABLE stillpoint.applied WITH (publish = \
         'insert')"
    ))
    .await
    .map(drop)
}

/// Publishes tables that were created after the others. Returns true if there are any: their changes are reported from now on, in
/// transactions that run now only in part.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn publish_new(link: &mut Link, inventory: &Inventory) -> Result<bool, Error> {
    let published = published(link).await?;
    let mut is_any = false;
    for table in inventory.tables.iter().filter(|table| !published.contains(&table.oid)) {
        let [rows, _] = PUBLICATIONS;
        link.query(&format!("ALTER PUBLICATION {rows} ADD TABLE ONLY {}", table.qualified())).await?;
        is_any = true;
    }
    Ok(is_any)
}

/// Removes tables from the publication that are not in the inventory any more, although they exist.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn withdraw_others(link: &mut Link, inventory: &Inventory) -> Result<(), Error> {
    for oid in published(link).await? {
        if inventory.tables.iter().any(|table| table.oid == oid) {
            continue;
        }
        let name = "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace";
        if let Some(name) = link.value(&format!("{name} WHERE c.oid = {oid}")).await? {
            let [rows, _] = PUBLICATIONS;
            link.query(&format!("ALTER PUBLICATION {rows} DROP TABLE ONLY {name}")).await?;
        }
    }
    Ok(())
}

/// Waits until all transactions of other sessions that have a number now have ended.
///
/// # Errors
///
/// [`Error::TimedOut`] names them after `limit`; other errors if the server cannot be asked.
pub async fn wait_for_transactions(link: &mut Link, limit: Duration) -> Result<(), Error> {
    let end = link.text("SELECT pg_snapshot_xmax(pg_current_snapshot())").await?;
    let running = format!("SELECT pg_snapshot_xmin(pg_current_snapshot()) < '{end}'");
    let begun = Instant::now();
    while link.text(&running).await? == "t" {
        if begun.elapsed() > limit {
            let who = running_transactions(link).await?;
            return Err(Error::TimedOut { what: "waiting for older transactions to end".into(), limit, who });
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Numbers of the tables whose rows are published.
async fn published(link: &mut Link) -> Result<Vec<u32>, ServerError> {
    let rows = literal(PUBLICATIONS[0]);
    let published = link
        .query(&format!(
            "SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = \
             {rows}"
        ))
        .await?;
    Ok(published.iter().map(|row| number(row, 0)).collect())
}

/// Refuses a table that was created after the others were published, because its changes would not be reported.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn check_all_published(link: &mut Link, inventory: &Inventory) -> Result<(), Error> {
    let published = published(link).await?;
    match inventory.tables.iter().find(|table| !published.contains(&table.oid)) {
        Some(table) => Err(Error::SchemaChanged(format!("{} was created", table.display()))),
        None => Ok(()),
    }
}

/// Makes updates and deletes of tables without a key log the whole old row.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn widen_identities(
    link: &mut Link,
    inventory: &Inventory,
    limit: Duration,
    mut changed: impl FnMut(IdentityChange) -> Result<(), Error>,
) -> Result<(), Error> {
    for table in &inventory.tables {
        let Some(wanted) = table.identity_wanted() else { continue };
        let was = match table.identity {
            'n' => "NOTHING",
            _ => "DEFAULT",
        };
        // Recorded before it is done: undoing a change that was not done is harmless.
        changed(IdentityChange { table: table.qualified(), was: was.into() })?;
        set_identity(link, &table.qualified(), wanted, limit).await?;
    }
    Ok(())
}

/// Undoes [`widen_identities`].
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn restore_identities(
    link: &mut Link,
    changes: &[IdentityChange],
    limit: Duration,
) -> Result<(), ServerError> {
    for change in changes {
        match set_identity(link, &change.table, &change.was, limit).await {
            // The table was dropped: there is nothing to restore.
            Err(error) if error.sqlstate() == Some("42P01") => {}
            result => result?,
        }
    }
    Ok(())
}

async fn set_identity(link: &mut Link, table: &str, identity: &str, limit: Duration) -> Result<(), ServerError> {
    let begun = Instant::now();
    loop {
        let sql = format!(
            "BEGIN; SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}; ALTER TABLE {table} REPLICA IDENTITY {identity}; \
             COMMIT"
        );
        match link.query(&sql).await {
            Ok(_) => return Ok(()),
            Err(error) if error.sqlstate() == Some("55P03") && begun.elapsed() < limit => {
                link.query("ROLLBACK").await?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => {
                link.query("ROLLBACK").await?;
                return Err(error);
            }
        }
    }
}

/// A slot, its start position, and a snapshot of the same moment, valid while the connection does nothing else.
pub struct Slot {
    /// Connection that created the slot.
    pub link: Link,
    /// Position at which changes begin.
    pub position: Lsn,
    /// Name of the exported snapshot.
    pub snapshot: String,
}

/// Creates a slot. The server waits for all transactions that run now; after `limit` the attempt is aborted, and
/// `Error::TimedOut` names them.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn create_slot(server: &Server, name: &str, export: bool, limit: Duration) -> Result<Slot, Error> {
    let mut link = Link::connect(server, Purpose::Replication, &[]).await?;
    let kind = if export { "EXPORT_SNAPSHOT" } else { "NOEXPORT_SNAPSHOT" };
    let sql = format!("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput {kind}", identifier(name));
    let Ok(made) = tokio::time::timeout(limit, link.query(&sql)).await else {
        // An incomplete slot is removed with its connection.
        let backend = link.pid;
        drop(link);
        let mut asking = Link::connect(server, Purpose::Statements, &[]).await?;
        let who = running_transactions(&mut asking).await?;
        asking.query(&format!("SELECT pg_terminate_backend({backend})")).await?;
        return Err(Error::TimedOut { what: "waiting for older transactions to end".into(), limit, who });
    };
    let rows = made?;
    let row = rows.first().cloned().unwrap_or_default();
    Ok(Slot { position: lsn(&text(&row, 1)), snapshot: text(&row, 2), link })
}

/// Undoes [`create_slot`]: terminates readers of the slot or its copy, and drops it.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn drop_slot(link: &mut Link, name: &str) -> Result<(), Error> {
    let names = [name, &copy_of(name)].map(literal).join(", ");
    let find = format!("SELECT active_pid, slot_name FROM pg_replication_slots WHERE slot_name IN ({names})");
    for _ in 0..100 {
        let rows = link.query(&find).await?;
        if rows.is_empty() {
            return Ok(());
        }
        let (read, free): (Vec<_>, Vec<_>) = rows.iter().partition(|row| number::<i64>(row, 0) != 0);
        for row in free {
            link.query(&format!("SELECT pg_drop_replication_slot({})", literal(&text(row, 1)))).await?;
        }
        for row in &read {
            link.query(&format!("SELECT pg_terminate_backend({})", number::<i64>(row, 0))).await?;
        }
        if !read.is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Err(Error::WrongPhase(format!("slot {name} has a reader that does not end")))
}

/// Names of our slots for this database, from any command.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn our_slots(link: &mut Link, database: &str) -> Result<Vec<String>, ServerError> {
    let sql = format!(
        "SELECT slot_name FROM pg_replication_slots WHERE slot_name ~ '^stillpoint_' AND database = {}",
        literal(database)
    );
    Ok(link.query(&sql).await?.iter().map(|row| text(row, 0)).collect())
}

/// Descriptions of other sessions' transactions that have run longest, for messages.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses.
pub async fn running_transactions(link: &mut Link) -> Result<Vec<String>, ServerError> {
    let sql = format!(
        "SELECT {SESSION_DESCRIPTION} FROM pg_stat_activity WHERE xact_start IS NOT NULL AND backend_xid IS NOT NULL \
         AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 5"
    );
    Ok(link.query(&sql).await?.iter().map(|row| text(row, 0)).collect())
}

/// SQL expression that describes a row of `pg_stat_activity` for messages: process, state, duration, and the kind of its last
/// command. It never shows the command's text, which may hold a secret, and neither a first word that is not a command.
pub const SESSION_DESCRIPTION: &str = "format('process %s (%s, %s), %s for %s s, %s', pid, coalesce(usename, \
                                              '-'), \
     coalesce(nullif(application_name, ''), '-'), coalesce(state, '-'), \
     coalesce(extract(epoch FROM clock_timestamp() - xact_start)::int, 0), coalesce(upper(substring(query FROM \
     '(?i)^\\s*(abort|alter|analyze|begin|call|checkpoint|close|cluster|comment|commit|copy|create|deallocate|declare|delete\
     |discard|do|drop|end|execute|explain|fetch|grant|import|insert|listen|lock|merge|move|notify|prepare|reassign|refresh\
     |reindex|release|reset|revoke|rollback|savepoint|security|select|set|show|start|table|truncate|unlisten|update\
     |vacuum|values|with)\\y')), 'another command'))";

/// Parses a position such as `16/B374D848`.
pub fn lsn(text: &str) -> Lsn {
    let half = |part: &str| u64::from_str_radix(part, 16).unwrap_or(0);
    text.split_once('/').map_or(0, |(high, low)| half(high) << 32 | half(low))
}

/// Name of the copy of a slot: the name marks it as ours for commands that clean up.
pub fn copy_of(slot: &str) -> String {
    format!("{slot}_copy")
}

/// Returns true if the source keeps its log for a slot.
pub async fn has_slot_log(source: &Server, slot: &str) -> bool {
    let asking = async {
        let mut link = Link::connect(source, Purpose::Statements, &[]).await?;
        let sql = format!(
            "SELECT 1 FROM pg_replication_slots WHERE slot_name = {} AND wal_status IS DISTINCT FROM 'lost'",
            literal(slot)
        );
        link.value(&sql).await
    };
    matches!(asking.await, Ok(Some(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use stillpoint_testing::postgresql::{Cluster, available};

    const WRITERS: usize = 8;
    const ROUNDS: usize = 200;

    #[test]
    fn positions_are_read() {
        assert_eq!(lsn("16/B374D848"), 0x16_B374_D848);
        assert_eq!(lsn("0/0"), 0);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writers_do_not_notice_publications_that_come_and_go() {
        if !available() {
            return;
        }
        let cluster = Cluster::start(&["wal_level=logical", "synchronous_commit=off"]);
        cluster.sql("postgres", "CREATE DATABASE shop");
        cluster.sql("shop", "CREATE TABLE stock (id int PRIMARY KEY, n int)");
        cluster.sql("shop", &format!("INSERT INTO stock SELECT i, 0 FROM generate_series(1, {WRITERS}) i"));
        let server = Server::parse("source", &cluster.conninfo("shop"), None).unwrap();
        let mut link = Link::connect(&server, Purpose::Statements, &[]).await.unwrap();
        install(&mut link, 0).await.unwrap();
        let inventory = Inventory::read(&mut link).await.unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let writers = (1..=WRITERS).map(|id| {
            let (server, over) = (server.clone(), over.clone());
            tokio::spawn(async move {
                let mut link = Link::connect(&server, Purpose::Statements, &[]).await.unwrap();
                let (mut written, update) = (0u32, format!("UPDATE public.stock SET n = n + 1 WHERE id = {id}"));
                while !over.load(Relaxed) {
                    link.query(&update).await.unwrap();
                    written += 1;
                }
                written
            })
        });
        let writers: Vec<_> = writers.collect();
        for _ in 0..ROUNDS {
            publish(&mut link, &inventory).await.unwrap();
            withdraw(&mut link).await.unwrap();
        }
        over.store(true, Relaxed);
        for writer in writers {
            assert!(writer.await.expect("no write fails") as usize > ROUNDS);
        }
        assert_eq!(cluster.sql("shop", "SELECT count(*) FROM pg_publication"), "0");
    }
}
