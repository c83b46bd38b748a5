//! Rehearsal: creates the definitions of a database on a target as a trial, copies some rows of each table, and creates indexes
//! and constraints on them.
//!
//! A list of possible differences between servers would never be complete: a view of a system catalog whose column is gone, a
//! function that finds its tables only by the caller's search path, a locale, a setting. So the rehearsal does what a run does,
//! with the same programs and statements, in a database of another name that is dropped afterwards. It reports each definition
//! that fails.
//!
//! The name is derived from the database's name, so the next command finds and drops what a killed command left. An extension may
//! accept only a database of a certain name: then the rehearsal is repeated in a database of the real name, which a setting
//! marks as ours.

use crate::copy::{connect_for_copy, make_room, sample};
use crate::create::statistics;
use crate::definitions::{self, Dump, RejectedDefinition};
use crate::materialized_views::{self, MaterializedView};
use crate::reactions::Reactions;
use crate::report::{Finding, Report, Verdict, leave_out, refuse, short_message};
use crate::{Options, Roles, catalogs, roles, values};
use rustix::fs::MemfdFlags;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{Inventory, TableDef, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{APPLICATION, Link, Purpose, Server, ServerError, identifier, literal, text};

/// Time after which a rehearsal is aborted.
const REHEARSAL_TIMEOUT: Duration = Duration::from_secs(180);
/// Time for the rows of one table, in milliseconds.
const SAMPLE_TIMEOUT_MS: &str = "2000";
/// Maximum number of definitions that are reported one by one.
const REPORTED_MAX: usize = 30;
/// Beginning of the names of databases for rehearsals.
const SCRATCH_PREFIX: &str = "stillpoint_rehearsal_";
/// Setting of a database that was made for a rehearsal.
const REHEARSAL_MARK: &str = "stillpoint.rehearsal";
/// First half of the key of the lock on rehearsals; the second half is derived from the database's name.
const REHEARSAL_LOCK_KEY: i32 = 0x7374_7265;
/// Time between two checks for clients that may wait for a lock of pg_dump.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Kinds of refusals that also mean that a rehearsal is not possible.
const BLOCKING_KINDS: [&str; 7] = ["database", "extension", "right", "role", "selection", "server", "tablespace"];

/// Rehearses on every target, and adds the findings, or the reason why there was no rehearsal.
///
/// # Errors
///
/// [`Error::Interrupted`], and errors of the connections to the servers.
pub(crate) async fn rehearse(options: &Options, report: &mut Report) -> Result<(), Error> {
    let missing =
        |finding: &Finding| finding.verdict == Verdict::Refused && BLOCKING_KINDS.contains(&&finding.kind[..]);
    let reason = if !options.rehearse {
        Some("no rehearsal was requested (--no-rehearsal): it is not known if the target accepts all definitions")
    } else if report.findings.iter().any(missing) {
        Some("not rehearsed: the target lacks objects that are refused here")
    } else {
        None
    };
    if let Some(why) = reason {
        leave_out(&mut report.findings, DEFINITIONS_KIND, &options.source.database, why);
        return Ok(());
    }
    values::check_rows(&options.source, &options.selection, &mut report.findings).await?;
    for target in options.targets() {
        let mut found = rehearse_on_target(options, target).await?;
        if options.targets().count() > 1 {
            found.iter_mut().for_each(|finding| finding.note = format!("{target}: {}", finding.note));
        }
        report.findings.append(&mut found);
    }
    Ok(())
}

/// Kind of a finding about definitions as a whole.
const DEFINITIONS_KIND: &str = "definitions";

/// Returns the findings of the rehearsal on one target.
async fn rehearse_on_target(options: &Options, target: &Server) -> Result<Vec<Finding>, Error> {
    let name = &options.source.database;
    let mut findings = Vec::new();
    let Some((scratch, _locker)) = lock_scratch(target, name).await? else {
        leave_out(&mut findings, DEFINITIONS_KIND, name, "another command is rehearsing them on the target");
        return Ok(findings);
    };
    rehearse_once(options, &scratch, &mut findings).await?;
    let is_of_extension = |finding: &Finding| finding.kind == "definition" && finding.name.starts_with("EXTENSION ");
    if findings.iter().any(is_of_extension) {
        findings.clear();
        rehearse_once(options, target, &mut findings).await?;
    }
    let (mut refusals, mut others): (Vec<_>, Vec<_>) =
        findings.into_iter().partition(|finding| finding.verdict == Verdict::Refused);
    let rest = refusals.len().saturating_sub(REPORTED_MAX);
    if rest > 0 {
        refusals.truncate(REPORTED_MAX);
        let why = format!("{rest} more refusals of the rehearsal are left out");
        refuse(&mut refusals, DEFINITIONS_KIND, name, why);
    }
    refusals.append(&mut others);
    Ok(refusals)
}

/// Reserves the scratch database for a database, and drops what an earlier command left of it. The lock is held as long as the
/// connection exists; `None` if another command holds it.
async fn lock_scratch(target: &Server, name: &str) -> Result<Option<(Server, Link)>, ServerError> {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    let scratch = target.database(&format!("{SCRATCH_PREFIX}{:016x}", hasher.finish()));
    let mut locker = Link::connect(&target.database("postgres"), Purpose::Statements, &[]).await?;
    let lock = format!("SELECT pg_try_advisory_lock({REHEARSAL_LOCK_KEY}, hashtext({}))", literal(name));
    if locker.text(&lock).await? != "t" {
        return Ok(None);
    }
    drop_scratch(&scratch).await?;
    Ok(Some((scratch, locker)))
}

/// A database that is made from definitions alone, to compare another one with it.
pub(crate) struct ScratchDatabase {
    server: Server,
    _locker: Link,
}

impl ScratchDatabase {
    /// Makes it on the target from the dump in a file.
    ///
    /// # Errors
    ///
    /// [`Error::SchemaChanged`] if the target rejects a definition.
    pub(crate) async fn make(options: &Options, file: &Path) -> Result<ScratchDatabase, Error> {
        let name = &options.source.database;
        let begun = Instant::now();
        let (server, locker) = loop {
            match lock_scratch(&options.target, name).await? {
                Some(locked) => break locked,
                None if begun.elapsed() < REHEARSAL_TIMEOUT => tokio::time::sleep(POLL_INTERVAL).await,
                None => {
                    let why = "another command is rehearsing definitions on the target";
                    return Err(Error::WrongPhase(why.into()));
                }
            }
        };
        let made = async {
            let rights = definitions::rights(&server).await?;
            let (mut findings, dump) = (Vec::new(), Dump { target: &server, rights, file });
            let mut missing = MissingRoles::default();
            let mut rejections = Vec::new();
            if create_database(&server, name, &dump.of_database_itself().await?, &mut missing, &mut findings).await? {
                rejections = dump.attempt().await?;
                let deferred = dump.deferred().await?;
                rejections.extend(dump.attempt_most(&deferred).await?);
                rejections.extend(dump.attempt_foreign_keys(&deferred).await?);
            }
            let refused = findings.iter().map(|finding| format!("{}: {}", finding.name, finding.note));
            let rejected = rejections.iter().map(|rejected| format!("{}: {}", rejected.of, rejected.why));
            let all: Vec<String> = refused.chain(rejected).collect();
            if all.is_empty() { Ok(()) } else { Err(Error::SchemaChanged(all.join("; "))) }
        };
        let made = made.await;
        let scratch = ScratchDatabase { server, _locker: locker };
        match made {
            Ok(()) => Ok(scratch),
            Err(error) => {
                scratch.remove().await?;
                Err(error)
            }
        }
    }

    pub(crate) fn server(&self) -> &Server {
        &self.server
    }

    /// Drops it.
    pub(crate) async fn remove(self) -> Result<(), ServerError> {
        drop_scratch(&self.server).await
    }
}

/// Rehearses in one database of a target, for a limited time, and drops it.
async fn rehearse_once(options: &Options, scratch: &Server, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let name = &options.source.database;
    let rehearsal = rehearse_on_scratch(options, scratch, findings);
    let rehearsed = tokio::select! {
        rehearsed = tokio::time::timeout(REHEARSAL_TIMEOUT, rehearsal) => rehearsed,
        () = options.interrupt.notified() => Ok(Err(Error::Interrupted)),
    };
    drop_scratch(scratch).await?;
    match rehearsed {
        Ok(Ok(())) => {}
        // The side of the error does not matter: a run could have the same error.
        Ok(Err(error @ (Error::Server(ServerError::Sql { .. }) | Error::Program { .. } | Error::InTheWay(_)))) => {
            let why = format!("the rehearsal ended: {}", short_message(&error));
            leave_out(findings, DEFINITIONS_KIND, name, why);
        }
        Ok(Err(error)) => return Err(error),
        Err(_) => {
            let why =
                format!("the rehearsal took longer than {} s: the rest was not checked", REHEARSAL_TIMEOUT.as_secs());
            leave_out(findings, DEFINITIONS_KIND, name, why);
        }
    }
    Ok(())
}

/// Drops a database of the real name that a killed rehearsal left on a target. No database of another maker has the mark.
pub(crate) async fn drop_remains(options: &Options, target: &Server) -> Result<(), ServerError> {
    let name = &options.source.database;
    let mut locker = Link::connect(&target.database("postgres"), Purpose::Statements, &[]).await?;
    // Another command may be rehearsing there.
    let lock = format!("SELECT pg_try_advisory_lock({REHEARSAL_LOCK_KEY}, hashtext({}))", literal(name));
    if locker.text(&lock).await? == "t" { drop_scratch(target).await } else { Ok(()) }
}

/// Drops the database of this rehearsal or an earlier one. It uses a new connection, because an aborted rehearsal may have left
/// the others unusable.
async fn drop_scratch(scratch: &Server) -> Result<(), ServerError> {
    let mut link = Link::connect(&scratch.database("postgres"), Purpose::Statements, &[]).await?;
    let there = format!(
        "SELECT 1 FROM pg_database d WHERE datname = {} AND (datname LIKE {} OR EXISTS (SELECT FROM pg_db_role_setting s WHERE \
         s.setdatabase = d.oid AND s.setrole = 0 AND {} = ANY (s.setconfig)))",
        literal(&scratch.database),
        literal(&format!("{}%", SCRATCH_PREFIX.replace('_', "\\_"))),
        literal(&format!("{REHEARSAL_MARK}=on")),
    );
    if link.value(&there).await?.is_none() {
        return Ok(());
    }
    definitions::terminate_makers(scratch, &mut link).await?;
    let name = identifier(&scratch.database);
    // A template database cannot be dropped.
    link.query(&format!("ALTER DATABASE {name} IS_TEMPLATE false")).await?;
    link.query(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await.map(drop)
}

/// Settings of sessions whose messages are searched for names of roles, as far as our role may have them.
const ENGLISH_MESSAGES: [(&str, &str); 1] = [("lc_messages", "C")];

async fn connect_for_messages(server: &Server) -> Result<Link, ServerError> {
    Link::connect(server, Purpose::Statements, &ENGLISH_MESSAGES).await
}

/// Roles that a run creates on the target, and a rehearsal does not.
#[derive(Default)]
struct MissingRoles {
    names: Vec<String>,
    /// Number of refusals that their absence explains.
    count: usize,
    /// Kinds of entries among these, as the dump's list names them.
    kinds: HashSet<String>,
}

impl MissingRoles {
    /// Returns true if a message is about the absence of such a role.
    fn explain(&mut self, message: &str) -> bool {
        let explains = self.names.iter().any(|name| message.contains(&format!("role \"{name}\" does not exist")));
        self.count += usize::from(explains);
        explains
    }

    /// Returns true if the rejection of an entry is about the absence of such a role, or about a comment on what it kept from being
    /// created.
    fn explain_entry(&mut self, rejected: &RejectedDefinition) -> bool {
        let mut words = rejected.of.split(' ');
        let kind = words.next().unwrap_or_default();
        if self.explain(&rejected.why) {
            self.kinds.insert(kind.into());
            return true;
        }
        let is_consequence = kind == "COMMENT"
            && rejected.why.ends_with("does not exist")
            && words.next().is_some_and(|of| self.kinds.contains(of));
        self.count += usize::from(is_consequence);
        is_consequence
    }

    fn report(&self, database: &str, findings: &mut Vec<Finding>) {
        if self.count > 0 {
            let why = format!("{} of them name roles that the run creates first: these were not rehearsed", self.count);
            leave_out(findings, DEFINITIONS_KIND, database, why);
        }
    }
}

/// Creates a file in memory that ends with this process, and its path for programs that this process starts.
pub(crate) fn memory_file() -> Result<(OwnedFd, PathBuf), Error> {
    let failed = |error: rustix::io::Errno| Error::Program { program: "memfd_create".into(), why: error.to_string() };
    let file = rustix::fs::memfd_create("definitions", MemfdFlags::CLOEXEC).map_err(failed)?;
    let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
    Ok((file, path))
}

async fn rehearse_on_scratch(options: &Options, scratch: &Server, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let name = &options.source.database;
    let (from, to) = (definitions::rights(&options.source).await?, definitions::rights(scratch).await?);
    let mut holder = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    holder.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    let snapshot = holder.text("SELECT pg_export_snapshot()").await?;
    if let Err(error @ Error::Server(ServerError::Sql { .. })) = catalogs::read(&mut holder, &options.selection).await {
        let why = format!("they cannot be read: {}", short_message(&error));
        refuse(findings, DEFINITIONS_KIND, name, why);
        return Ok(());
    }
    let left_out = options.selection.left_out(&mut holder).await?;
    let inventory = options.selection.inventory(&mut holder).await?;
    let (_memory, file) = memory_file()?;
    let dumped = tokio::select! {
        dumped = definitions::dump_source(options, from, to.major, &snapshot, &left_out, &file) => dumped,
        error = wait_for_blocked_client(&options.source) => Err(error),
    };
    match dumped {
        Err(error @ Error::Program { .. }) if !short_message(&error).contains("lock timeout") => {
            let why = format!("they cannot be dumped: {}", short_message(&error));
            refuse(findings, DEFINITIONS_KIND, name, why);
            return Ok(());
        }
        dumped => dumped?,
    }
    holder.query("COMMIT").await?;

    let made_roles = match options.roles {
        Roles::Create => roles::missing(&options.source, scratch).await?,
        Roles::Check | Roles::Ignore => Vec::new(),
    };
    let mut missing = MissingRoles { names: made_roles, ..MissingRoles::default() };
    let dump = Dump { target: scratch, rights: to, file: &file };
    if !create_database(scratch, name, &dump.of_database_itself().await?, &mut missing, findings).await? {
        return Ok(());
    }
    let mut rejections = dump.attempt().await?;
    rejections.retain(|rejected| !missing.explain_entry(rejected));
    let all_there = rejections.is_empty();
    let untried = copy_samples(&options.source, scratch, &inventory, all_there, &mut missing, findings).await?;
    let deferred = dump.deferred().await?;
    rejections.extend(dump.attempt_most(&deferred).await?);
    let mut link = connect_for_copy(scratch).await?;
    // They would run with our rights.
    Reactions::read(&mut holder, &options.selection, link.rights).await?.disable_present(&mut link).await?;
    if deferred.has_foreign_keys() {
        // Rows that a sample refers to may be missing.
        for table in &inventory.tables {
            match link.query(&format!("TRUNCATE ONLY {} CASCADE", table.qualified())).await {
                Err(ServerError::Sql { .. }) if !all_there => {}
                truncated => drop(truncated?),
            }
        }
        rejections.extend(dump.attempt_foreign_keys(&deferred).await?);
    }
    rejections.retain(|rejected| !missing.explain_entry(rejected));
    if rejections.is_empty()
        && let Err(error @ ServerError::Sql { .. }) = statistics(&mut link).await
    {
        let why = format!("statistics cannot be gathered: {}", short_message(&error.into()));
        refuse(findings, DEFINITIONS_KIND, name, why);
    }
    let views = MaterializedView::all(&mut holder, &options.selection).await?;
    if rejections.is_empty()
        && let Err(error @ ServerError::Sql { .. }) = materialized_views::refresh(scratch, &views).await
    {
        let why = format!("a materialized view cannot be refreshed there: {}", short_message(&error.into()));
        refuse(findings, DEFINITIONS_KIND, name, why);
    }
    missing.report(name, findings);
    for RejectedDefinition { of, why } in rejections {
        refuse(findings, "definition", of, format!("the target rejects it: {why}"));
    }
    report_untried_functions(&mut holder, &untried, findings).await
}

/// Returns when a client waits for a lock of a session that dumps definitions: the rehearsal gives way.
async fn wait_for_blocked_client(source: &Server) -> Error {
    let waiting = format!(
        "SELECT {} FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND EXISTS (SELECT FROM pg_stat_activity h \
         WHERE h.application_name = {} AND h.pid = ANY (pg_blocking_pids(pg_stat_activity.pid)))",
        stillpoint_migrate_apply::replication_objects::SESSION_DESCRIPTION,
        literal(APPLICATION)
    );
    let watching = async {
        let mut link = Link::connect(source, Purpose::Statements, &[]).await?;
        loop {
            if let Some(who) = link.value(&waiting).await? {
                return Err(Error::InTheWay(who));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    let watched: Result<std::convert::Infallible, Error> = watching.await;
    match watched {
        Err(error) => error,
        Ok(never) => match never {},
    }
}

/// Creates the database, with its settings and rights. Returns true if it was created: a database that another role created a
/// moment before may hold code that would run with our rights.
async fn create_database(
    scratch: &Server,
    name: &str,
    script: &str,
    missing: &mut MissingRoles,
    findings: &mut Vec<Finding>,
) -> Result<bool, Error> {
    let mut link = connect_for_messages(&scratch.database("postgres")).await?;
    let statements = statements(script);
    let mut is_made = false;
    for statement in statements.iter().filter_map(|statement| renamed(statement, name, &scratch.database)) {
        match link.query(&statement).await {
            Ok(_) if !is_made && statement.starts_with("CREATE DATABASE ") => {
                is_made = true;
                // Background processes of its extensions must not act on rows that are copied for a trial.
                let name = identifier(&scratch.database);
                link.query(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).await?;
                // A role without that right makes no extension that asks for the database's own name.
                if link.rights.is_superuser {
                    link.query(&format!("ALTER DATABASE {name} SET {REHEARSAL_MARK} = on")).await?;
                }
            }
            Ok(_) => {}
            Err(ref error @ ServerError::Sql { .. }) if missing.explain(&error.to_string()) => {}
            Err(error @ ServerError::Sql { .. }) => {
                let statement = statement.replace(&identifier(&scratch.database), &identifier(name));
                let note = format!("the target rejects it: {}", short_message(&error.into()));
                refuse(findings, "definition", statement, note);
            }
            Err(error) => return Err(error.into()),
        }
        // CREATE DATABASE is the first statement.
        if !is_made {
            break;
        }
    }
    Ok(is_made)
}

/// Splits pg_restore's script about a database itself into statements, without the commands for psql.
fn statements(script: &str) -> Vec<String> {
    let (mut statements, mut statement, mut quote) = (Vec::new(), String::new(), None);
    for line in script.split_inclusive('\n') {
        if statement.is_empty() && (line.starts_with("--") || line.starts_with('\\')) {
            continue;
        }
        for character in line.chars() {
            match (quote, character) {
                (None, ';') => {
                    statements.push(std::mem::take(&mut statement));
                    continue;
                }
                (None, '\'' | '"') => quote = Some(character),
                (Some(open), _) if open == character => quote = None,
                _ => {}
            }
            if !(statement.is_empty() && character.is_whitespace()) {
                statement.push(character);
            }
        }
    }
    statements
}

/// Returns the same statement for a database of another name; `None` for a statement that is not about the database.
fn renamed(statement: &str, from: &str, to: &str) -> Option<String> {
    let to = format!("DATABASE {} ", identifier(to));
    let names = [identifier(from), from.to_owned()].map(|name| format!("DATABASE {name} "));
    let from = names.iter().find(|name| statement.contains(*name))?;
    Some(statement.replacen(from, &to, 1))
}

/// Copies some rows of each table. Returns tables of which no row was copied.
async fn copy_samples(
    source: &Server,
    scratch: &Server,
    inventory: &Inventory,
    all_there: bool,
    missing: &mut MissingRoles,
    findings: &mut Vec<Finding>,
) -> Result<Vec<u32>, Error> {
    let mut from = Link::connect(source, Purpose::Statements, &[("statement_timeout", SAMPLE_TIMEOUT_MS)]).await?;
    let mut to = connect_for_copy(scratch).await?;
    if to.rights.is_superuser {
        to.query("SET lc_messages = 'C'").await?;
    }
    if all_there {
        make_room(&mut to, &inventory.tables).await?;
    }
    let mut untried = Vec::new();
    for table in &inventory.tables {
        let there = format!("SELECT to_regclass({})", literal(&table.qualified()));
        // The failure of its definition is reported already.
        if !all_there && to.value(&there).await?.is_none() {
            continue;
        }
        match sample(&mut from, &mut to, table).await {
            Ok(true) => {}
            Ok(false) => untried.push(table.oid),
            Err(Error::Server(ref error @ ServerError::Sql { .. })) if missing.explain(&error.to_string()) => {
                untried.push(table.oid);
            }
            Err(error @ Error::Server(ServerError::Sql { .. })) => findings.extend(rows_finding(table, &error)),
            Err(error) => return Err(error),
        }
    }
    Ok(untried)
}

/// Makes a finding about rows of a table that could not be copied.
fn rows_finding(table: &TableDef, error: &Error) -> Option<Finding> {
    let is_of_source = !error.is_of_target();
    let message = short_message(error);
    let (verdict, note) = match error.sqlstate()? {
        // The query took too long, or the table is gone.
        "57014" | "42P01" if is_of_source => (Verdict::NotLookedAt, format!("no row was tested: {message}")),
        // No function, table, type or schema has that name.
        "42883" | "42P01" | "42704" | "3F000" => {
            let why = "functions in its constraints and columns must qualify all names, because they run without a \
                       search path";
            (Verdict::Refused, format!("they cannot be copied to the target: {message}; {why}"))
        }
        "42703" if table.own_rows.is_some() => {
            let why = "the versions of the extension differ; update it on the source, or install the source's version on the target";
            (Verdict::Refused, format!("they cannot be copied: {message}: {why}"))
        }
        _ => (Verdict::Refused, format!("they cannot be copied: {message}")),
    };
    Some(Finding::new("rows", table.display(), verdict, note))
}

/// Reports functions that would be called for rows, in tables of which no row was copied: they may find other objects only by
/// the caller's search path, and that shows only when a row is written.
async fn report_untried_functions(link: &mut Link, tables: &[u32], findings: &mut Vec<Finding>) -> Result<(), Error> {
    let tables: Vec<String> = tables.iter().map(u32::to_string).collect();
    let sql = format!(
        "SELECT DISTINCT n.nspname || '.' || c.relname, p.oid::regprocedure FROM pg_class c \
         JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN LATERAL ( \
         SELECT 'pg_constraint'::regclass, oid FROM pg_constraint WHERE conrelid = c.oid AND contype = 'c' UNION ALL \
         SELECT 'pg_attrdef'::regclass, d.oid FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid \
         AND a.attnum = d.adnum WHERE d.adrelid = c.oid AND a.attgenerated <> '' UNION ALL \
         SELECT 'pg_class'::regclass, indexrelid FROM pg_index WHERE indrelid = c.oid) AS part (class, oid) \
         JOIN pg_depend x ON x.classid = part.class AND x.objid = part.oid AND x.refclassid = 'pg_proc'::regclass \
         JOIN pg_proc p ON p.oid = x.refobjid JOIN pg_language l ON l.oid = p.prolang \
         WHERE c.oid = ANY ('{{{}}}') AND {USER_SCHEMA} AND l.lanname NOT IN ('internal', 'c') AND p.prosqlbody IS \
         NULL AND NOT EXISTS (SELECT FROM unnest(p.proconfig) AS s WHERE s LIKE 'search_path=%') ORDER BY 1, 2",
        tables.join(",")
    );
    for row in link.query(&sql).await? {
        let note = format!(
            "there is no row to test {} with; it must qualify all names, because it runs without a search path",
            text(&row, 1)
        );
        leave_out(findings, "rows", text(&row, 0), note);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_taken_apart_and_names_another_database() {
        let script = "--\n-- PostgreSQL database dump; x\n--\n\\restrict abc\n\nSET client_encoding = 'UTF8';\n\
                      CREATE DATABASE \"my shop\" WITH TEMPLATE = template0;\n\n\\connect -reuse-previous=on \
                      \"dbname='my shop'\"\n\
                      ALTER DATABASE \"my shop\" SET x.y TO 'a;b';\nCOMMENT ON DATABASE \"my shop\" IS 'it''s\n-- \
                      here; \"';\n\
                      ALTER ROLE me IN DATABASE \"my shop\" SET x.y TO '1';\n";
        let there: Vec<String> =
            statements(script).iter().filter_map(|statement| renamed(statement, "my shop", "s")).collect();
        assert_eq!(
            there,
            [
                "CREATE DATABASE \"s\" WITH TEMPLATE = template0",
                "ALTER DATABASE \"s\" SET x.y TO 'a;b'",
                "COMMENT ON DATABASE \"s\" IS 'it''s\n-- here; \"'",
                "ALTER ROLE me IN DATABASE \"s\" SET x.y TO '1'",
            ]
        );
        assert_eq!(renamed("ALTER DATABASE shop OWNER TO x", "shop", "s").unwrap(), "ALTER DATABASE \"s\" OWNER TO x");
        assert_eq!(renamed("ALTER DATABASE shops OWNER TO x", "shop", "s"), None);
    }
}
