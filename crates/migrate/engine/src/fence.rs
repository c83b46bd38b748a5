//! Fences the side that clients leave: no session can connect to the database there, and no connected session can write.
//!
//! A direct session, which bypasses the proxy, may write at any moment, even after the last change that is repeated. A lock on
//! every table would conflict with autovacuum, and would end with our connection. So the order of steps prevents such writes:
//!
//! ```text
//! clients paused --> connections disabled --> direct sessions terminated --> marker in the log --> all before it applied --> clients move
//! ```
//!
//! Commits of direct sessions are in the log before the marker; their open transactions failed with an error, and so does every
//! new connection. A session that was accepted before connections were disabled is waited for and terminated like the others.
//! The proxy's own server processes stay: they do nothing until the proxy has switched, and continue if it does not switch.

use crate::proxy_client::ProxyClient;
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{
    APPLICATION, Link, Purpose, Row, Server, ServerError, identifier, literal, text,
};

/// Maximum time for sessions to end outside of a pause.
pub(crate) const SESSION_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the proxy's sessions to leave; they take less than two seconds.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);
/// First half of the key of the lock that [`connect_for_fencing`] takes; the second half is derived from the database's name.
const CONNECTIONS_LOCK_KEY: u32 = 0x0053_544d;
/// Setting of a fenced database that keeps the database's own `default_transaction_read_only`, which the fence replaces: `=`
/// and the value, or empty if the database has none.
pub(crate) const OWN_READ_ONLY: &str = "stillpoint.default_transaction_read_only";
/// Time between two searches for direct sessions.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Time between two checks for sessions that are ending.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// SQL condition for sessions `a` that our role may end: one that is no superuser may not end those of superusers and of the server.
const MAY_END: &str = "((SELECT rolsuper FROM pg_roles WHERE rolname = current_user) OR EXISTS (SELECT FROM pg_roles r WHERE \
                       r.oid = a.usesysid AND NOT r.rolsuper))";

/// Connects to another database of the server: a session inside the database could not disable its connections.
pub(crate) async fn connect_beside(server: &Server) -> Result<Link, ServerError> {
    Link::connect(&server.database("postgres"), Purpose::Statements, &[("synchronous_commit", "on")]).await
}

/// Connects to another database of the server, to enable or disable connections to this one; only one such connection exists.
///
/// A command that was interrupted, or whose network is stalled, may have sent the server such a statement, and the server may
/// execute it at any later moment. So each of these connections holds a lock, and a new one terminates the session that holds
/// it: no earlier statement is executed after that.
pub(crate) async fn connect_for_fencing(server: &Server) -> Result<Link, Error> {
    let mut link = connect_beside(server).await?;
    let name = literal(&server.database);
    let earlier = format!(
        "SELECT pg_terminate_backend(l.pid, {}) FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
         WHERE l.locktype = 'advisory' AND l.classid = {CONNECTIONS_LOCK_KEY} AND l.objid = \
         (hashtext({name})::bigint & 4294967295)::oid \
         AND l.pid <> pg_backend_pid() AND a.application_name = {} AND a.datname = current_database()",
        SESSION_END_TIMEOUT.as_millis(),
        literal(APPLICATION)
    );
    link.query(&earlier).await?;
    match link.text(&format!("SELECT pg_try_advisory_lock({CONNECTIONS_LOCK_KEY}, hashtext({name}))")).await?.as_str() {
        "t" => Ok(link),
        _ => Err(Error::WrongPhase(format!("another command is enabling or disabling connections on {server}"))),
    }
}

/// A right to connect, and how it was granted.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Grant {
    /// Grantee, quoted, or PUBLIC.
    to: String,
    /// Grantor, quoted.
    by: String,
    /// True if the database's owner granted it; superusers grant and revoke rights in the owner's name.
    by_owner: bool,
    /// True if the grantee may grant it to others.
    grantable: bool,
}

/// Returns the rights to connect to the database, which [`disable_connections`] revokes and [`lift`] grants again. A grantor comes before its
/// grantees.
pub(crate) async fn grants(beside: &mut Link, database: &str) -> Result<Vec<Grant>, Error> {
    Ok(sort_grants(&beside.query(&connect_rights_sql(database)).await?))
}

/// Query for all rights to connect.
fn connect_rights_sql(database: &str) -> String {
    format!(
        "SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, \
         quote_ident(pg_get_userbyid(a.grantor)), a.grantor = d.datdba, a.is_grantable \
         FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a \
         WHERE d.datname = {} AND a.privilege_type = 'CONNECT' ORDER BY 1, 2",
        literal(database)
    )
}

/// Sorts rights so that each comes after the one that allowed its grant.
fn sort_grants(rows: &[Row]) -> Vec<Grant> {
    let is = |row: &Row, at| text(row, at) == "t";
    let grant = |row: &Row| Grant { to: text(row, 0), by: text(row, 1), by_owner: is(row, 2), grantable: is(row, 3) };
    let mut left: Vec<Grant> = rows.iter().map(grant).collect();
    let mut grants: Vec<Grant> = Vec::new();
    while !left.is_empty() {
        let could =
            |grant: &Grant| grant.by_owner || grants.iter().any(|other| other.grantable && other.to == grant.by);
        let (mut next, rest) = left.into_iter().partition::<Vec<_>, _>(could);
        left = rest;
        if next.is_empty() {
            // A server never lets a role grant a right that it does not have.
            next.append(&mut left);
        }
        grants.append(&mut next);
    }
    grants
}

/// Returns the rights that can still be revoked and granted, and the names of roles whose rights cannot: a role that was
/// dropped or renamed meanwhile has none, and neither have its grantees.
async fn restorable_grants<'g>(
    beside: &mut Link,
    grants: &'g [Grant],
) -> Result<(Vec<&'g Grant>, Vec<&'g str>), ServerError> {
    let roles = beside.query("SELECT quote_ident(rolname) FROM pg_roles").await?;
    let roles: Vec<String> = roles.iter().map(|row| text(row, 0)).collect();
    let (mut kept, mut lost): (Vec<&Grant>, Vec<&str>) = Default::default();
    for grant in grants {
        let given = grant.by_owner || kept.iter().any(|other| other.grantable && other.to == grant.by);
        if given && (grant.to == "PUBLIC" || roles.contains(&grant.to)) {
            kept.push(grant);
        } else {
            lost.push(&grant.to);
        }
    }
    Ok((kept, lost))
}

/// Calls [`disable_connections`] with rights that were read some time before.
pub(crate) async fn disable_connections_again(
    beside: &mut Link,
    database: &str,
    grants: &[Grant],
) -> Result<(), ServerError> {
    let (kept, _) = restorable_grants(beside, grants).await?;
    let kept: Vec<Grant> = kept.into_iter().cloned().collect();
    disable_connections(beside, database, &kept).await
}

/// Disables connections, on a connection from [`connect_for_fencing`]. It is one commit, because it happens in the pause.
///
/// No right and no setting keeps a superuser out, so all connections are disabled; the rest of the fence is active while
/// connections are enabled for us.
async fn disable_connections(beside: &mut Link, database: &str, grants: &[Grant]) -> Result<(), ServerError> {
    let read_only = begin_disabling(beside, database).await?;
    beside.query(&format!("{read_only}{}COMMIT", revoke_sql(beside, database, grants))).await.map(drop)
}

/// Disables connections if the rights to connect are still `grants`. Otherwise it does nothing and returns the present rights:
/// granting the old ones later would undo a change of another session.
pub(crate) async fn disable_connections_unless_changed(
    beside: &mut Link,
    database: &str,
    grants: &[Grant],
) -> Result<Option<Vec<Grant>>, Error> {
    let read_only = begin_disabling(beside, database).await?;
    let found = sort_grants(&beside.query(&format!("{read_only}{}", connect_rights_sql(database))).await?);
    if found != grants {
        beside.query("ROLLBACK").await?;
        return Ok(Some(found));
    }
    beside.query(&format!("{}COMMIT", revoke_sql(beside, database, grants))).await?;
    Ok(None)
}

/// Begins a transaction that disables connections; until its end no other session can change rights to connect or settings of
/// the database. Returns statements that make sessions begin read-only, and keep the database's own setting beside that.
async fn begin_disabling(beside: &mut Link, database: &str) -> Result<String, ServerError> {
    let name = identifier(database);
    let lock = match beside.rights.is_superuser {
        true => "LOCK TABLE pg_db_role_setting IN SHARE ROW EXCLUSIVE MODE".to_owned(),
        // The check has refused a setting of the database's own, and this keeps others from making one.
        false => format!("ALTER DATABASE {name} SET default_transaction_read_only = on"),
    };
    let settings = read_only_settings_sql(database);
    let settings =
        beside.query(&format!("BEGIN; ALTER DATABASE {name} ALLOW_CONNECTIONS false; {lock}; {settings}")).await?;
    Ok(read_only_sql(beside, database, &settings))
}

/// Statements that make sessions begin read-only, and keep the database's own setting, which is among `settings`, beside that.
fn read_only_sql(beside: &Link, database: &str, settings: &[Row]) -> String {
    let name = identifier(database);
    let fence = format!("ALTER DATABASE {name} SET default_transaction_read_only = on; ");
    if !beside.rights.is_superuser {
        return fence;
    }
    match (own_read_only(settings), settings.first()) {
        // It is fenced already.
        (Some(_), _) => fence,
        (None, own) => {
            let own = own.map_or_else(String::new, |row| format!("={}", text(row, 1)));
            format!("ALTER DATABASE {name} SET {OWN_READ_ONLY} = {}; {fence}", literal(&own))
        }
    }
}

/// Statements that restore the database's own read-only setting.
fn restore_read_only_sql(beside: &Link, name: &str, own: &str) -> String {
    if !beside.rights.is_superuser {
        return format!("ALTER DATABASE {name} RESET default_transaction_read_only");
    }
    let own = own.strip_prefix('=').map(|value| format!("SET default_transaction_read_only = {}", literal(value)));
    let own = own.unwrap_or_else(|| "RESET default_transaction_read_only".into());
    format!("ALTER DATABASE {name} {own}; ALTER DATABASE {name} RESET {OWN_READ_ONLY}")
}

/// Makes sessions of others begin read-only in a database that clients will be moved to: what an extension's background processes
/// do there, they also do on the side that clients are on, and it is repeated from there.
pub(crate) async fn make_read_only(server: &Server) -> Result<(), Error> {
    let mut beside = connect_for_fencing(server).await?;
    let settings = beside.query(&read_only_settings_sql(&server.database)).await?;
    let sql = read_only_sql(&beside, &server.database, &settings);
    beside.query(&sql).await?;
    Ok(())
}

/// Undoes [`make_read_only`]; harmless if that is done already. Sessions that began before stay read-only, see
/// [`end_background_sessions`].
pub(crate) async fn lift_read_only(server: &Server) -> Result<(), Error> {
    let mut beside = connect_for_fencing(server).await?;
    let settings = beside.query(&read_only_settings_sql(&server.database)).await?;
    if let Some(own) = kept_read_only(&beside, &settings) {
        beside.query(&restore_read_only_sql(&beside, &identifier(&server.database), &own)).await?;
    }
    Ok(())
}

/// Ends background processes of extensions that connected while the database was read-only: the server starts them again.
pub(crate) async fn end_background_sessions(server: &Server) -> Result<(), ServerError> {
    let sql = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity a WHERE datname = {} AND backend_type NOT IN ('client backend', \
         'walsender', 'autovacuum worker', 'parallel worker') AND backend_type NOT LIKE 'logical replication%' AND {MAY_END}",
        literal(&server.database)
    );
    connect_beside(server).await?.query(&sql).await.map(drop)
}

/// Query for the database's read-only settings: name and value.
fn read_only_settings_sql(database: &str) -> String {
    format!(
        "SELECT split_part(s, '=', 1), substr(s, strpos(s, '=') + 1) FROM pg_db_role_setting d, unnest(d.setconfig) \
         s WHERE d.setrole = 0 AND d.setdatabase = (SELECT oid FROM pg_database WHERE datname = {}) \
         AND split_part(s, '=', 1) IN ('default_transaction_read_only', '{OWN_READ_ONLY}')",
        literal(database)
    )
}

/// The database's own setting, as the fence keeps it; `None` if there is no fence.
fn own_read_only(settings: &[Row]) -> Option<String> {
    settings.iter().find(|row| text(row, 0) == OWN_READ_ONLY).map(|row| text(row, 1))
}

/// The database's own setting, which is none if our role is no superuser: it may not keep one, and the check refuses it.
fn kept_read_only(beside: &Link, settings: &[Row]) -> Option<String> {
    let is_fenced = || settings.iter().any(|row| text(row, 0) == "default_transaction_read_only");
    if beside.rights.is_superuser { own_read_only(settings) } else { is_fenced().then(String::new) }
}

/// Statements that revoke rights to connect, and the grants that depend on each.
fn revoke_sql(beside: &Link, database: &str, grants: &[Grant]) -> String {
    let name = identifier(database);
    let given = grants.iter().filter(|grant| grant.by_owner);
    let revoked = given.map(|Grant { to, .. }| format!("REVOKE CONNECT ON DATABASE {name} FROM {to} CASCADE; "));
    // A superuser needs no right to connect.
    let ours = (!beside.rights.is_superuser).then(|| format!("GRANT CONNECT ON DATABASE {name} TO CURRENT_USER; "));
    revoked.chain(ours).collect()
}

/// Removes the fence that an earlier attempt may have set; harmless if connections are enabled already. Returns a message about
/// roles that do not get their right back.
pub(crate) async fn lift_if_fenced(server: &Server, fenced: Option<&Vec<Grant>>) -> Result<Option<String>, Error> {
    match fenced {
        Some(grants) => lift(server, grants).await,
        None => Ok(None),
    }
}

/// Undoes [`disable_connections`], and ensures that an interrupted command does not finish it later. Returns a message about roles that do not
/// get their right back.
pub(crate) async fn lift(server: &Server, grants: &[Grant]) -> Result<Option<String>, Error> {
    let name = identifier(&server.database);
    let mut beside = connect_for_fencing(server).await?;
    let mut sql = format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true");
    let settings = beside.query(&read_only_settings_sql(&server.database)).await?;
    if let Some(own) = kept_read_only(&beside, &settings) {
        sql += &format!("; {}", restore_read_only_sql(&beside, &name, &own));
    }
    if !beside.rights.is_superuser {
        sql += &format!("; REVOKE CONNECT ON DATABASE {name} FROM CURRENT_USER");
    }
    let (kept, lost) = restorable_grants(&mut beside, grants).await?;
    for Grant { to, by, by_owner, grantable } in kept {
        let grantable = if *grantable { " WITH GRANT OPTION" } else { "" };
        let grant = format!("GRANT CONNECT ON DATABASE {name} TO {to}{grantable}");
        sql += &if *by_owner { format!("; {grant}") } else { format!("; SET ROLE {by}; {grant}; RESET ROLE") };
    }
    beside.query(&sql).await?;
    let told = format!(
        "{server}: CONNECT could not be granted again to {}: the role or its grantor was dropped or renamed",
        lost.join(", ")
    );
    Ok((!lost.is_empty()).then_some(told))
}

/// Enables connections for us: rights are not granted again, and new sessions stay read-only unless they override it, as ours
/// do.
pub(crate) async fn enable_for_us(server: &Server) -> Result<(), Error> {
    let name = identifier(&server.database);
    connect_for_fencing(server).await?.query(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true")).await?;
    Ok(())
}

/// Connects to a fenced database: enables connections for that moment, and terminates other sessions that connected too. A
/// superuser's session that tries all the time and overrides the read-only setting may write in that moment; so this is used
/// only after a crash, or when the migration ends.
pub(crate) async fn connect_to_fenced(server: &Server) -> Result<Link, Error> {
    enable_for_us(server).await?;
    let link = Link::connect(server, Purpose::Statements, &[]).await;
    let mut beside = connect_for_fencing(server).await?;
    beside.query(&format!("ALTER DATABASE {} ALLOW_CONNECTIONS false", identifier(&server.database))).await?;
    terminate_direct_sessions(&mut beside, &server.database, &[], SESSION_END_TIMEOUT).await?;
    Ok(link?)
}

/// Query for direct sessions: those of the database that are neither ours nor the proxy's, whose server processes are
/// `proxied`. Returns process id and description. Workers of the server itself do not count.
pub(crate) fn direct_sessions_sql(database: &str, proxied: &[u32]) -> String {
    format!(
        "SELECT pid, format('%s of %s from %s', coalesce(nullif(application_name, ''), backend_type), \
         coalesce(usename, '-'), coalesce(host(client_addr), 'this machine')) \
         FROM pg_stat_activity WHERE datname = {} AND pid <> ALL ('{{{}}}') \
         AND backend_type NOT IN ('autovacuum worker', 'parallel worker') \
         AND application_name IS DISTINCT FROM {}",
        literal(database),
        proxied.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        literal(APPLICATION)
    )
}

/// Finds direct sessions while connections are enabled. The server shows a server process of the proxy before the proxy knows
/// of it, so sessions that are found are checked again.
pub(crate) async fn find_direct_sessions(
    link: &mut Link,
    proxy: &mut ProxyClient,
    database: &str,
) -> Result<Vec<Row>, Error> {
    let mut found: Option<Vec<Row>> = None;
    loop {
        let all = link.query(&direct_sessions_sql(database, &[])).await?;
        let proxied = if all.is_empty() { Vec::new() } else { proxy.backends().await? };
        let is_proxied = |row: &Row| text(row, 0).parse().is_ok_and(|pid: u32| proxied.contains(&pid));
        let now: Vec<Row> = all.into_iter().filter(|row| !is_proxied(row)).collect();
        match &found {
            Some(before) => return Ok(now.into_iter().filter(|row| before.contains(row)).collect()),
            None if now.is_empty() => return Ok(now),
            None => found = Some(now),
        }
        tokio::time::sleep(RECHECK_INTERVAL).await;
    }
}

/// Terminates all direct sessions while connections are disabled, and returns their descriptions. When it returns, only our
/// sessions and the proxy's are left.
pub(crate) async fn terminate_direct_sessions(
    beside: &mut Link,
    database: &str,
    proxied: &[u32],
    limit: Duration,
) -> Result<Vec<String>, Error> {
    // A session appears in `pg_stat_activity` only at the end of its login, but holds a lock on its database from before the
    // server checks its rights.
    let sql = format!(
        "SELECT pid, who, CASE WHEN EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = strangers.pid AND {MAY_END}) THEN \
         pg_terminate_backend(pid) END FROM ({}) AS strangers (pid, who) UNION ALL \
         SELECT l.pid, '', false FROM pg_locks l WHERE l.locktype = 'object' AND l.mode = 'RowExclusiveLock' \
         AND l.classid = 'pg_database'::regclass AND l.pid <> pg_backend_pid() \
         AND l.objid = (SELECT oid FROM pg_database WHERE datname = {})",
        direct_sessions_sql(database, proxied),
        literal(database)
    );
    let begun = Instant::now();
    let mut ended: Vec<(String, String)> = Vec::new();
    loop {
        let rows = beside.query(&sql).await?;
        for row in &rows {
            let known = ended.iter().any(|(pid, _)| *pid == text(row, 0));
            if !known && !text(row, 1).is_empty() {
                ended.push((text(row, 0), text(row, 1)));
            }
        }
        if rows.is_empty() {
            return Ok(ended.into_iter().map(|(_, who)| who).collect());
        }
        if begun.elapsed() >= limit {
            let who = ended.into_iter().map(|(_, who)| who).collect();
            return Err(Error::TimedOut { what: "terminating direct sessions".into(), limit, who });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Terminates every session that is not ours. The proxy's sessions first get time to end by themselves, one after another: all
/// at once would take processor time from clients that have just begun on the other side.
pub(crate) async fn wait_and_terminate_sessions(server: &Server) -> Result<(), Error> {
    let mut beside = connect_beside(server).await?;
    let begun = Instant::now();
    while begun.elapsed() < LEAVE_TIMEOUT
        && !beside.query(&direct_sessions_sql(&server.database, &[])).await?.is_empty()
    {
        tokio::time::sleep(LEAVE_TIMEOUT / 60).await;
    }
    terminate_direct_sessions(&mut beside, &server.database, &[], SESSION_END_TIMEOUT).await.map(drop)
}

/// Terminates every session that is not ours, without delay.
pub(crate) async fn terminate_sessions(beside: &mut Link, database: &str) -> Result<(), Error> {
    terminate_direct_sessions(beside, database, &[], SESSION_END_TIMEOUT).await.map(drop)
}

/// Fails if there are prepared transactions that are not decided, because they would be left behind.
pub(crate) async fn check_prepared_transactions(
    beside: &mut Link,
    database: &str,
    limit: Duration,
) -> Result<(), Error> {
    let sql = format!("SELECT gid FROM pg_prepared_xacts WHERE database = {}", literal(database));
    let who: Vec<String> = beside.query(&sql).await?.iter().map(|row| text(row, 0)).collect();
    let what = "waiting for prepared transactions to be committed or rolled back".into();
    if who.is_empty() { Ok(()) } else { Err(Error::TimedOut { what, limit, who }) }
}
