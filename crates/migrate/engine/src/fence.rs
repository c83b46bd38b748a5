//! Fencing the side that clients leave: nobody connects to the database there any more, and nobody who is connected writes.
//!
//! Whoever does not come through the proxy may write at any moment, also behind the last change that is repeated. A lock
//! on every table would meet autovacuum, and end with our connection; so the order of things sees to it:
//!
//! ```text
//! clients stand --> door shut --> strangers ended --> marker in the log --> all before it applied --> clients go over
//! ```
//!
//! What strangers committed is in the log before the marker; what they had not committed failed with an error, as does
//! every new connection. Who was let in before the door was shut is waited for, and ended like the others. The
//! proxy's own server processes stay: they do nothing until it has switched, and go on should it not switch.

use crate::front::Front;
use crate::inventory::text;
use crate::link::{Link, Purpose, Row, identifier, literal};
use crate::{APPLICATION, Error, Server};
use std::time::{Duration, Instant};

/// How long sessions may take to end outside of a pause.
pub(crate) const ENDING: Duration = Duration::from_secs(10);
/// How long the proxy has for leaving; it takes less than two seconds.
const LEAVING: Duration = Duration::from_secs(3);
/// First half of the key of the lock that [`at_the_door`] takes; the other is made of the database's name.
const DOOR: u32 = 0x0053_544d;
/// Setting of a database that is shut, in which the database's own `default_transaction_read_only` is kept, which is the fence's then: `=` and
/// the value, or nothing where it has none.
pub(crate) const OWN_READ_ONLY: &str = "stillpoint.default_transaction_read_only";
/// Between two looks at who bypasses the proxy.
const LOOKING_AGAIN: Duration = Duration::from_millis(250);
/// Between two looks at sessions that end.
const LOOKING: Duration = Duration::from_millis(1);

/// A connection beside the database: whoever is in it cannot shut its door.
pub(crate) async fn beside(server: &Server) -> Result<Link, Error> {
    Link::connect(&server.database("postgres"), Purpose::Statements, &[("synchronous_commit", "on")]).await
}

/// A connection beside the database that alone shuts and opens its door.
///
/// A command that was cut off, or whose network stands still, may have told the server what to do with the door, and the
/// server may do it at any later moment. So each of these connections holds a lock, and whoever comes next ends the one who
/// holds it: nothing that was said before is done after.
pub(crate) async fn at_the_door(server: &Server) -> Result<Link, Error> {
    let mut link = beside(server).await?;
    let name = literal(&server.database);
    let earlier = format!(
        "SELECT pg_terminate_backend(l.pid, {}) FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
         WHERE l.locktype = 'advisory' AND l.classid = {DOOR} AND l.objid = (hashtext({name})::bigint & 4294967295)::oid \
         AND l.pid <> pg_backend_pid() AND a.application_name = {} AND a.datname = current_database()",
        ENDING.as_millis(),
        literal(APPLICATION)
    );
    link.query(&earlier).await?;
    match link.text(&format!("SELECT pg_try_advisory_lock({DOOR}, hashtext({name}))")).await?.as_str() {
        "t" => Ok(link),
        _ => Err(Error::WrongPhase(format!("another command is at the door of {server}"))),
    }
}

/// A right to connect, as it was given.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Grant {
    /// To whom, quoted, or PUBLIC.
    to: String,
    /// By whom, quoted.
    by: String,
    /// By the database's owner, in whose name superusers give rights and take them.
    by_owner: bool,
    /// It may be passed on.
    grantable: bool,
}

/// Who can connect to the database: what [`shut`] takes and [`lift`] gives back. Whoever passed a right on comes behind whoever
/// gave it to him.
pub(crate) async fn grants(beside: &mut Link, database: &str) -> Result<Vec<Grant>, Error> {
    Ok(in_order(&beside.query(&rights(database)).await?))
}

/// A question for all rights to connect.
fn rights(database: &str) -> String {
    format!(
        "SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, \
         quote_ident(pg_get_userbyid(a.grantor)), a.grantor = d.datdba, a.is_grantable \
         FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a \
         WHERE d.datname = {} AND a.privilege_type = 'CONNECT' ORDER BY 1, 2",
        literal(database)
    )
}

/// Rights of which none comes before the one from which it was passed on.
fn in_order(rows: &[Row]) -> Vec<Grant> {
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
            // The server lets nobody pass on what he has not got.
            next.append(&mut left);
        }
        grants.append(&mut next);
    }
    grants
}

/// Those rights that can be taken and given still, and for people whose others are: who was dropped or renamed meanwhile has
/// none, nor has whoever had it from him.
async fn remaining<'g>(beside: &mut Link, grants: &'g [Grant]) -> Result<(Vec<&'g Grant>, Vec<&'g str>), Error> {
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

/// [`shut`] with rights that were read a while ago.
pub(crate) async fn shut_again(beside: &mut Link, database: &str, grants: &[Grant]) -> Result<(), Error> {
    let (kept, _) = remaining(beside, grants).await?;
    let kept: Vec<Grant> = kept.into_iter().cloned().collect();
    shut(beside, database, &kept).await
}

/// Shuts the door, on a connection [`at_the_door`]. One commit: it stands in the pause.
///
/// No right and no setting keeps a superuser out, so connections are not allowed at all; the rest holds while the door is
/// open for us.
async fn shut(beside: &mut Link, database: &str, grants: &[Grant]) -> Result<(), Error> {
    let read_only = begin_to_shut(beside, database).await?;
    beside.query(&format!("{read_only}{}COMMIT", revoking(database, grants))).await.map(drop)
}

/// The same where rights to connect still are these. Otherwise nothing is done, and they are returned as they are now: giving
/// back the old ones later would undo what another session did.
pub(crate) async fn shut_unless_changed(
    beside: &mut Link,
    database: &str,
    grants: &[Grant],
) -> Result<Option<Vec<Grant>>, Error> {
    let read_only = begin_to_shut(beside, database).await?;
    let found = in_order(&beside.query(&format!("{read_only}{}", rights(database))).await?);
    if found != grants {
        beside.query("ROLLBACK").await?;
        return Ok(Some(found));
    }
    beside.query(&format!("{}COMMIT", revoking(database, grants))).await?;
    Ok(None)
}

/// Begins a transaction in which the door is shut, and in which no other session can give or take a right to connect, or set the
/// database something. Statements that have sessions begin read-only, and keep the database's own setting beside that.
async fn begin_to_shut(beside: &mut Link, database: &str) -> Result<String, Error> {
    let name = identifier(database);
    let settings = beside
        .query(&format!(
            "BEGIN; ALTER DATABASE {name} ALLOW_CONNECTIONS false; \
             LOCK TABLE pg_db_role_setting IN SHARE ROW EXCLUSIVE MODE; {}",
            read_only(database)
        ))
        .await?;
    let fence = format!("ALTER DATABASE {name} SET default_transaction_read_only = on; ");
    Ok(match (own_read_only(&settings), settings.first()) {
        // It is shut already.
        (Some(_), _) => fence,
        (None, own) => {
            let own = own.map_or_else(String::new, |row| format!("={}", text(row, 1)));
            format!("ALTER DATABASE {name} SET {OWN_READ_ONLY} = {}; {fence}", literal(&own))
        }
    })
}

/// A question for the database's settings of read-only: name and value.
fn read_only(database: &str) -> String {
    format!(
        "SELECT split_part(s, '=', 1), substr(s, strpos(s, '=') + 1) FROM pg_db_role_setting d, unnest(d.setconfig) s \
         WHERE d.setrole = 0 AND d.setdatabase = (SELECT oid FROM pg_database WHERE datname = {}) \
         AND split_part(s, '=', 1) IN ('default_transaction_read_only', '{OWN_READ_ONLY}')",
        literal(database)
    )
}

/// The database's own setting, as the fence keeps it; none where there is no fence.
fn own_read_only(settings: &[Row]) -> Option<String> {
    settings.iter().find(|row| text(row, 0) == OWN_READ_ONLY).map(|row| text(row, 1))
}

/// Takes rights to connect, and with each what was passed on of it.
fn revoking(database: &str, grants: &[Grant]) -> String {
    let name = identifier(database);
    let given = grants.iter().filter(|grant| grant.by_owner);
    given.map(|Grant { to, .. }| format!("REVOKE CONNECT ON DATABASE {name} FROM {to} CASCADE; ")).collect()
}

/// Takes back what an earlier attempt has shut, if it came to that; harmless where the door is open again already. For people,
/// who does not get his right back.
pub(crate) async fn lift_if_shut(server: &Server, fenced: Option<&Vec<Grant>>) -> Result<Option<String>, Error> {
    match fenced {
        Some(grants) => lift(server, grants).await,
        None => Ok(None),
    }
}

/// Takes [`shut`] back, and whoever was at it when it was cut off does not finish it later. For people, who does not get his
/// right back.
pub(crate) async fn lift(server: &Server, grants: &[Grant]) -> Result<Option<String>, Error> {
    let name = identifier(&server.database);
    let mut beside = at_the_door(server).await?;
    let mut sql = format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true");
    let settings = beside.query(&read_only(&server.database)).await?;
    if let Some(own) = own_read_only(&settings) {
        let own = own.strip_prefix('=').map(|value| format!("SET default_transaction_read_only = {}", literal(value)));
        let own = own.unwrap_or_else(|| "RESET default_transaction_read_only".into());
        sql += &format!("; ALTER DATABASE {name} {own}; ALTER DATABASE {name} RESET {OWN_READ_ONLY}");
    }
    let (kept, lost) = remaining(&mut beside, grants).await?;
    for Grant { to, by, by_owner, grantable } in kept {
        let grantable = if *grantable { " WITH GRANT OPTION" } else { "" };
        let grant = format!("GRANT CONNECT ON DATABASE {name} TO {to}{grantable}");
        sql += &if *by_owner { format!("; {grant}") } else { format!("; SET ROLE {by}; {grant}; RESET ROLE") };
    }
    beside.query(&sql).await?;
    let told = format!(
        "{server}: CONNECT is not given back to {}: the role, or who gave it the right, was dropped or renamed",
        lost.join(", ")
    );
    Ok((!lost.is_empty()).then_some(told))
}

/// Opens the door for us: rights are not given back, and new sessions stay read-only unless they say otherwise, as ours do.
pub(crate) async fn open(server: &Server) -> Result<(), Error> {
    let name = identifier(&server.database);
    at_the_door(server).await?.query(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true")).await.map(drop)
}

/// Connects to a database whose door is shut: it is open while we step through, and whoever came along is ended. A superuser
/// who tries all the time and overrides what keeps him from writing may write in that moment: only for what comes after a
/// crash, or when the migration ends.
pub(crate) async fn enter(server: &Server) -> Result<Link, Error> {
    open(server).await?;
    let link = Link::connect(server, Purpose::Statements, &[]).await;
    let mut beside = at_the_door(server).await?;
    beside.query(&format!("ALTER DATABASE {} ALLOW_CONNECTIONS false", identifier(&server.database))).await?;
    empty(&mut beside, &server.database, &[], ENDING).await?;
    link
}

/// Sessions of the database that are neither ours nor come through the proxy, whose server processes are `proxied`: number
/// of the process, and a description for people. Workers of the server itself are none.
pub(crate) fn strangers(database: &str, proxied: &[u32]) -> String {
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

/// [`strangers`] while the door is open. A server process of the proxy shows among the server's before the proxy knows of
/// it: who is found is looked for again.
pub(crate) async fn bypassing(link: &mut Link, front: &mut Front, database: &str) -> Result<Vec<Row>, Error> {
    let mut found: Option<Vec<Row>> = None;
    loop {
        let all = link.query(&strangers(database, &[])).await?;
        let proxied = if all.is_empty() { Vec::new() } else { front.backends().await? };
        let is_proxied = |row: &Row| text(row, 0).parse().is_ok_and(|pid: u32| proxied.contains(&pid));
        let now: Vec<Row> = all.into_iter().filter(|row| !is_proxied(row)).collect();
        match &found {
            Some(before) => return Ok(now.into_iter().filter(|row| before.contains(row)).collect()),
            None if now.is_empty() => return Ok(now),
            None => found = Some(now),
        }
        tokio::time::sleep(LOOKING_AGAIN).await;
    }
}

/// Ends all strangers behind a shut door, and tells who they were. When it returns, nobody but us and the proxy is left.
pub(crate) async fn empty(
    beside: &mut Link,
    database: &str,
    proxied: &[u32],
    limit: Duration,
) -> Result<Vec<String>, Error> {
    // A session that logs in shows among the activities at the end of that, and holds a lock on its database from before
    // it looks whether it may.
    let sql = format!(
        "SELECT pid, who, pg_terminate_backend(pid) FROM ({}) AS strangers (pid, who) UNION ALL \
         SELECT l.pid, '', false FROM pg_locks l WHERE l.locktype = 'object' AND l.mode = 'RowExclusiveLock' \
         AND l.classid = 'pg_database'::regclass AND l.pid <> pg_backend_pid() \
         AND l.objid = (SELECT oid FROM pg_database WHERE datname = {})",
        strangers(database, proxied),
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
            return Err(Error::TimedOut { what: "ending sessions that bypass the proxy".into(), limit, who });
        }
        tokio::time::sleep(LOOKING).await;
    }
}

/// Ends every session that is not ours. The proxy's end by themselves, one after another: all at once would take the
/// machine from the clients, who have just begun elsewhere.
pub(crate) async fn leave(server: &Server) -> Result<(), Error> {
    let mut beside = beside(server).await?;
    let begun = Instant::now();
    while begun.elapsed() < LEAVING && !beside.query(&strangers(&server.database, &[])).await?.is_empty() {
        tokio::time::sleep(LEAVING / 60).await;
    }
    empty(&mut beside, &server.database, &[], ENDING).await.map(drop)
}

/// Ends every session that is not ours, at once.
pub(crate) async fn clear(beside: &mut Link, database: &str) -> Result<(), Error> {
    empty(beside, database, &[], ENDING).await.map(drop)
}

/// Transactions that are prepared and not decided would be left behind.
pub(crate) async fn undecided(beside: &mut Link, database: &str, limit: Duration) -> Result<(), Error> {
    let sql = format!("SELECT gid FROM pg_prepared_xacts WHERE database = {}", literal(database));
    let who: Vec<String> = beside.query(&sql).await?.iter().map(|row| text(row, 0)).collect();
    let what = "deciding prepared transactions".into();
    if who.is_empty() { Ok(()) } else { Err(Error::TimedOut { what, limit, who }) }
}
