//! Rights that our role needs if it is not a superuser, as on servers of hosting providers.
//!
//! | right | on the source | on the target |
//! |---|---|---|
//! | member of the owners of the database and its objects | publication, replica identity, copy | definitions |
//! | BYPASSRLS | tables with FORCE ROW LEVEL SECURITY | the same |
//! | REPLICATION, found by a connection for replication | slots | slot of the way back |
//! | CREATEDB | | the database |
//! | CREATE in the database `postgres` | name of the migration | |
//! | pg_read_all_stats, pg_signal_backend | sessions that bypass the proxy | the same on the way back |
//! | SET of session_replication_role, found by trying | the way back | the replay |
//!
//! What a definition needs beside these is found by the rehearsal, and refused by name.

use crate::report::{Finding, Verdict, refuse};
use crate::{Capture, Options, fence};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{NOT_OF_EXTENSION, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, identifier, literal, number, text};

const KIND: &str = "right";
/// Roles whose rights both sides need.
const HELPERS: [(&str, &str); 2] =
    [("pg_read_all_stats", "to see all sessions"), ("pg_signal_backend", "to end sessions that bypass the proxy")];

/// Adds refusals for rights that our role lacks on the source.
///
/// # Errors
///
/// Errors of the connections to the servers.
pub(crate) async fn check_source(
    link: &mut Link,
    options: &Options,
    by: Capture,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    if link.rights.is_superuser {
        return Ok(());
    }
    const SIDE: &str = "source";
    if by != Capture::Log {
        refuse(findings, KIND, SIDE, "only capture by pgoutput (--capture log) works with a role that is no superuser");
        return Ok(());
    }
    check_helpers(link, &options.source.user, SIDE, findings).await?;
    check_replication(&options.source, SIDE, findings).await?;
    let role = identifier(&options.source.user);
    let mut beside = fence::connect_beside(&options.source).await?;
    if beside.text("SELECT has_database_privilege(current_database(), 'CREATE')").await? != "t" {
        let why = format!(
            "stillpoint's role must be able to name the migration there; try: GRANT CREATE ON DATABASE postgres TO {role}"
        );
        refuse(findings, KIND, SIDE, why);
    }
    let owners = link
        .query(&format!(
            "SELECT pg_get_userbyid(o.owner), min(o.what) FROM (SELECT datdba, 'the database' FROM pg_database \
             WHERE datname = current_database() UNION ALL SELECT c.relowner, n.nspname || '.' || c.relname FROM pg_class c \
             JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p', 'S', 'm') AND {USER_SCHEMA} AND \
             {NOT_OF_EXTENSION}) o (owner, what) WHERE NOT pg_has_role(o.owner, 'USAGE') GROUP BY 1 ORDER BY 1"
        ))
        .await?;
    let lacking: Vec<String> = owners.iter().map(|row| text(row, 0)).collect();
    for row in owners {
        let (owner, what) = (text(&row, 0), text(&row, 1));
        let why = format!("it owns {what}; try: GRANT {} TO {role}", identifier(&owner));
        refuse(findings, KIND, owner, why);
    }
    let closed = link
        .query(&format!(
            "SELECT n.nspname, pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE {USER_SCHEMA} AND NOT \
             has_schema_privilege(n.oid, 'USAGE') ORDER BY 1"
        ))
        .await?;
    for row in closed.iter().filter(|row| !lacking.contains(&text(row, 1))) {
        let schema = text(row, 0);
        let why =
            format!("stillpoint's role may not use it; try: GRANT USAGE ON SCHEMA {} TO {role}", identifier(&schema));
        refuse(findings, "schema", schema, why);
    }
    let firing = "SELECT evtname FROM pg_event_trigger WHERE evtenabled <> 'D' ORDER BY 1";
    for row in link.query(firing).await?.iter().filter(|_| !link.rights.may_replicate) {
        refuse(findings, "event trigger", text(row, 0), "it would fire on what stillpoint defines on the source");
    }
    if !link.rights.may_replicate && !options.accepted.no_fallback {
        let how = "stillpoint's role may not set session_replication_role there: `fallback` disables triggers and rules of the source \
                   and drops its foreign keys until clients are back; they are validated after that";
        findings.push(Finding::new("foreign keys", SIDE, Verdict::Changed, how));
    }
    check_hidden_rows(link, (None, &options.source.user), SIDE, findings).await?;
    let others = format!(
        "SELECT DISTINCT pg_get_userbyid(a.grantor) FROM pg_database d, aclexplode(d.datacl) a WHERE d.datname = {} AND \
         a.privilege_type = 'CONNECT' AND NOT pg_has_role(a.grantor, 'USAGE') ORDER BY 1",
        literal(&options.source.database)
    );
    for row in link.query(&others).await?.iter().filter(|row| !lacking.contains(&text(row, 0))) {
        let (grantor, database) = (text(row, 0), &options.source.database);
        let why = format!(
            "it gave others the right to connect to {database}, which is taken from them while connections are closed; try: \
             GRANT {} TO {role}",
            identifier(&grantor)
        );
        refuse(findings, KIND, grantor, why);
    }
    let own = format!(
        "SELECT 1 FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase, unnest(s.setconfig) c \
         WHERE s.setrole = 0 AND d.datname = {} AND starts_with(c, 'default_transaction_read_only=')",
        literal(&options.source.database)
    );
    if link.value(&own).await?.is_some() {
        let why = "the database sets it itself, and only a superuser can keep that setting while connections are closed: \
                   RESET it first";
        refuse(findings, "setting", "default_transaction_read_only", why);
    }
    let passwords = "stored passwords of roles are not read: only a superuser may; sessions that log in by password are moved \
                     with --client-passwords FILE";
    findings.push(Finding::new(KIND, SIDE, Verdict::NotLookedAt, passwords));
    Ok(())
}

/// Adds refusals for rights that our role lacks on a target.
///
/// # Errors
///
/// Errors of the connections to the servers.
pub(crate) async fn check_target(
    link: &mut Link,
    there: &mut Link,
    target: &Server,
    with_way_back: bool,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    if there.rights.is_superuser {
        return Ok(());
    }
    const SIDE: &str = "target";
    check_helpers(there, &target.user, SIDE, findings).await?;
    if !there.rights.may_replicate {
        let how = "stillpoint's role may not set session_replication_role there: triggers and rules are disabled until the \
                   switch-over, foreign keys are made NOT VALID in the pause and validated after it";
        findings.push(Finding::new("foreign keys", SIDE, Verdict::Moved, how));
    }
    if with_way_back {
        check_replication(&target.database("postgres"), SIDE, findings).await?;
    }
    check_owners_there(link, there, target, findings).await?;
    check_hidden_rows(link, (Some(there), &target.user), SIDE, findings).await?;
    let role = identifier(&target.user);
    if there.text("SELECT rolcreatedb FROM pg_roles WHERE rolname = current_user").await? != "t" {
        refuse(
            findings,
            KIND,
            SIDE,
            format!("stillpoint's role must create the database; try: ALTER ROLE {role} CREATEDB"),
        );
    }
    Ok(())
}

/// Connections of a command beside those that copy and replay: it watches, fences and compares.
const OWN_CONNECTIONS: i64 = 8;

/// Refuses a side on which the migration and the clients that it moves would have too few connections. `link` is a connection to
/// that side, and `wanted` are connections that copy or replay and those of clients that come.
///
/// # Errors
///
/// An error if the server cannot be asked.
pub(crate) async fn check_connections(
    link: &mut Link,
    side: &str,
    (wanted, clients): (i64, i64),
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let sql = "SELECT current_setting('max_connections')::int - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = \
               'client backend') - CASE WHEN r.rolsuper THEN 0 ELSE current_setting('superuser_reserved_connections')::int + \
               coalesce(current_setting('reserved_connections', true), '0')::int END, r.rolconnlimit - (SELECT count(*) FROM \
               pg_stat_activity WHERE usesysid = r.oid), r.rolconnlimit >= 0 AND NOT r.rolsuper \
               FROM pg_roles r WHERE r.rolname = current_user";
    let row = link.query(sql).await?.into_iter().next().unwrap_or_default();
    let (free, of_role): (i64, i64) = (number(&row, 0), number(&row, 1));
    let ours = wanted + OWN_CONNECTIONS;
    if free < ours + clients {
        let why = format!("{free} are free, and {ours} of stillpoint and {clients} of clients are needed");
        refuse(findings, "connections", side, why);
    }
    if text(&row, 2) == "t" && of_role < ours {
        let why = format!("stillpoint's role may have {of_role} more (CONNECTION LIMIT), and {ours} are needed");
        refuse(findings, "connections", side, why);
    }
    Ok(())
}

async fn check_helpers(link: &mut Link, user: &str, side: &str, findings: &mut Vec<Finding>) -> Result<(), Error> {
    for (helper, why) in HELPERS {
        if link.text(&format!("SELECT pg_has_role('{helper}', 'USAGE')")).await? != "t" {
            let role = identifier(user);
            refuse(
                findings,
                KIND,
                side,
                format!("stillpoint's role must be able {why}; try: GRANT {helper} TO {role}"),
            );
        }
    }
    Ok(())
}

/// Connects for replication: hosting providers grant that in ways of their own, so only trying shows it.
async fn check_replication(server: &Server, side: &str, findings: &mut Vec<Finding>) -> Result<(), Error> {
    match Link::connect(server, Purpose::Replication, &[]).await {
        Ok(_) => Ok(()),
        Err(error @ ServerError::Sql { .. }) => {
            let why = format!(
                "stillpoint's role must be able to read the log: {error}; try: ALTER ROLE {} REPLICATION, or what the provider has \
                 for that",
                identifier(&server.user)
            );
            refuse(findings, KIND, side, why);
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses tables of the source whose policies hide rows even from their owner, if `who` may not see these.
async fn check_hidden_rows(
    source: &mut Link,
    (who, user): (Option<&mut Link>, &str),
    side: &str,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let hidden = source
        .query(&format!(
            "SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.relrowsecurity AND c.relforcerowsecurity AND {USER_SCHEMA} ORDER BY 1"
        ))
        .await?;
    let bypasses = "SELECT rolbypassrls FROM pg_roles WHERE rolname = current_user";
    let bypasses = who.unwrap_or(source).text(bypasses).await? == "t";
    for row in hidden.iter().filter(|_| !bypasses) {
        let why = format!(
            "its policies apply to its owner too (FORCE ROW LEVEL SECURITY); on the {side} try: ALTER ROLE {} BYPASSRLS",
            identifier(user)
        );
        refuse(findings, "table", text(row, 0), why);
    }
    Ok(())
}

/// Refuses roles that own something in the source's database, and of which our role is no member on the target.
async fn check_owners_there(
    link: &mut Link,
    there: &mut Link,
    target: &Server,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let owners = link
        .query(
            "SELECT DISTINCT pg_get_userbyid(s.refobjid) FROM pg_shdepend s JOIN pg_database d ON d.datname = current_database() \
             WHERE s.refclassid = 'pg_authid'::regclass AND s.deptype = 'o' AND (s.dbid = d.oid OR s.classid = \
             'pg_database'::regclass AND s.objid = d.oid) ORDER BY 1",
        )
        .await?;
    // A member that may not take the place of an owner cannot give it anything.
    let right = if there.rights.major >= 16 { "SET" } else { "MEMBER" };
    for row in owners {
        let owner = text(&row, 0);
        let is = format!(
            "SELECT 1 FROM pg_roles WHERE rolname = {} AND NOT (pg_has_role(oid, 'USAGE') AND pg_has_role(oid, '{right}'))",
            literal(&owner)
        );
        if there.value(&is).await?.is_some() {
            let why = format!(
                "stillpoint's role must make what {owner} owns; try: GRANT {} TO {}",
                identifier(&owner),
                identifier(&target.user)
            );
            refuse(findings, KIND, "target", why);
        }
    }
    Ok(())
}
