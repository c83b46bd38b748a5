//! Server settings of the source that are written to the target (`--settings copy`): those that change what statements do, and
//! how the planner and the server's own maintenance decide.
//!
//! They are written by `ALTER SYSTEM` shortly before clients move, so they hold for all databases of the target. What the target
//! had in its `postgresql.auto.conf` before is in the journal first, and is restored when the migration is aborted or rolled
//! back. Settings of the machine (memory, paths, addresses), of logging, of replication and of the log are never written;
//! those that need a restart are reported only.

use crate::journal::SharedJournal;
use crate::progress::Reporter;
use crate::report::{Finding, Verdict, refuse};
use crate::roles::setting_value_sql;
use crate::setting_changes::SettingChange;
use crate::{Options, Record};
use std::time::{Duration, Instant};
use stillpoint_events::migrate;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Link, Purpose, Row, Server, identifier, literal, text};

/// Kind of findings.
const KIND: &str = "server setting";
/// Time for the target to read its changed configuration.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A setting in which the target differs from the source.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Difference {
    name: String,
    /// Value of the source, and the present one of the target; both as the target prints them if it can.
    here: String,
    there: String,
    obstacle: Option<Obstacle>,
}

/// Reason why a setting is not written.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Obstacle {
    /// It is read when the server starts.
    Restart,
    /// The target's command line has it, which counts more than its files.
    CommandLine,
    /// The target rejects the value.
    Rejected,
    /// Our role lacks the right.
    Right,
}

/// SQL condition for settings `s` that are copied, or reported if they need a restart.
fn condition() -> String {
    const CATEGORIES: &str = "^(Client Connection Defaults / (Statement Behavior|Locale and Formatting|Other Defaults)|Query \
        Tuning|Lock Management|Version and Platform|Autovacuum|Vacuuming|Resource Usage / (Cost-Based Vacuum Delay|Disk)|\
        Statistics)";
    const MORE: &str = "work_mem hash_mem_multiplier maintenance_work_mem autovacuum_work_mem temp_buffers \
        max_parallel_workers max_parallel_workers_per_gather max_parallel_maintenance_workers parallel_leader_participation \
        synchronous_commit password_encryption scram_iterations max_prepared_transactions shared_preload_libraries";
    // Locales, files and tablespaces of the machine; its memory and disks; what never is in a file, or is ours.
    const NEVER: &str = "lc_messages lc_monetary lc_numeric lc_time client_encoding timezone_abbreviations default_tablespace \
        temp_tablespaces dynamic_library_path extension_control_path effective_cache_size session_replication_role \
        allow_alter_system event_triggers";
    let list = |names: &str| names.split_whitespace().map(literal).collect::<Vec<_>>().join(", ");
    format!("(s.category ~ '{CATEGORIES}' OR s.name IN ({})) AND s.name NOT IN ({})", list(MORE), list(NEVER))
}

/// Query for name, value, true if it is not the default, context, and true if the command line has it. Of a setting that our
/// own session or its role has, only the value of the configuration files is known.
fn settings_sql() -> String {
    format!(
        "WITH files AS MATERIALIZED (SELECT DISTINCT ON (lower(name)) lower(name) AS name, setting FROM pg_file_settings \
         WHERE applied ORDER BY lower(name), seqno DESC), \
         known AS (SELECT s.*, s.source IN ('client', 'session', 'user', 'database', 'database user') AS is_own \
         FROM pg_settings s WHERE {}) \
         SELECT s.name, CASE WHEN is_own THEN coalesce(f.setting, s.boot_val) ELSE s.reset_val END, \
         CASE WHEN is_own THEN f.name IS NOT NULL ELSE s.source IN ('configuration file', 'command line', \
         'environment variable', 'global') END, s.context, s.source = 'command line' \
         FROM known s LEFT JOIN files f ON f.name = lower(s.name) WHERE s.context <> 'internal' ORDER BY 1",
        condition()
    )
}

/// Query for one setting in the file that ALTER SYSTEM writes.
fn written_sql(name: &str) -> String {
    format!(
        "SELECT setting FROM pg_file_settings WHERE lower(name) = lower({}) AND sourcefile LIKE '%/postgresql.auto.conf' \
         ORDER BY seqno DESC LIMIT 1",
        literal(name)
    )
}

/// Finds settings of the source that are not the default, and in which the target differs.
async fn differences(here: &mut Link, there: &mut Link) -> Result<Vec<Difference>, Error> {
    for link in [&mut *here, &mut *there] {
        // The names of setting categories are translated into the server's language.
        link.query("SET lc_messages = 'C'").await?;
    }
    let sql = settings_sql();
    let (ours, theirs) = (here.query(&sql).await?, there.query(&sql).await?);
    let is_true = |row: &Row, at: usize| text(row, at) == "t";
    let mut differences = Vec::new();
    for row in ours.iter().filter(|row| is_true(row, 2)) {
        let (name, here) = (text(row, 0), text(row, 1));
        let Some(other) = theirs.iter().find(|other| text(other, 0) == name) else { continue };
        let value = text(other, 1);
        if here == value {
            continue;
        }
        let (wanted, present) = (as_printed(there, &name, &here).await?, as_printed(there, &name, &value).await?);
        if wanted.is_some() && wanted == present {
            continue;
        }
        let obstacle = match text(other, 3).as_str() {
            "postmaster" => Some(Obstacle::Restart),
            _ if is_true(other, 4) => Some(Obstacle::CommandLine),
            "user" | "superuser" if wanted.is_none() => Some(Obstacle::Rejected),
            _ if !may_write(there, &name).await? => Some(Obstacle::Right),
            _ => None,
        };
        let (here, there) = (wanted.unwrap_or(here), present.unwrap_or(value));
        differences.push(Difference { name, here, there, obstacle });
    }
    Ok(differences)
}

/// The text of a value as a server prints it, with its unit; `None` if no session can have it.
async fn as_printed(there: &mut Link, name: &str, value: &str) -> Result<Option<String>, Error> {
    there.query("BEGIN").await?;
    let set = format!("SELECT set_config({}, {}, true)", literal(name), literal(value));
    let printed = there.query(&set).await;
    there.query("ROLLBACK").await?;
    match printed {
        Ok(rows) => Ok(rows.first().map(|row| text(row, 0))),
        Err(error) if error.sqlstate().is_some() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns true if our role may write a setting of the server, and make the server read it.
async fn may_write(there: &mut Link, name: &str) -> Result<bool, Error> {
    // Rights on single settings exist since version 15.
    let of_setting = match there.text("SELECT current_setting('server_version_num')::int >= 150000").await?.as_str() {
        "t" => format!("has_parameter_privilege({}, 'ALTER SYSTEM')", literal(name)),
        _ => "(SELECT rolsuper FROM pg_roles WHERE rolname = current_user)".to_owned(),
    };
    let allowed = format!(
        "SELECT {of_setting} AND has_function_privilege('pg_reload_conf()', 'EXECUTE') AND \
         coalesce(current_setting('allow_alter_system', true), 'on') = 'on'"
    );
    Ok(there.text(&allowed).await? == "t")
}

/// Returns true if our role may read the configuration files of a server.
async fn may_read(link: &mut Link) -> Result<bool, Error> {
    let allowed = "SELECT has_table_privilege('pg_file_settings', 'SELECT') AND \
                   has_function_privilege('pg_show_all_file_settings()', 'EXECUTE')";
    Ok(link.text(allowed).await? == "t")
}

/// Adds findings about the settings that would be written; removes those that the comparison made of the same settings.
///
/// # Errors
///
/// Errors of the connections to the servers.
pub(crate) async fn check(here: &mut Link, there: &mut Link, findings: &mut Vec<Finding>) -> Result<(), Error> {
    for (side, link) in [("source", &mut *here), ("target", &mut *there)] {
        if !may_read(link).await? {
            let why = "stillpoint's role may not read pg_file_settings there; try: GRANT SELECT ON pg_file_settings and GRANT \
                       EXECUTE ON FUNCTION pg_show_all_file_settings to it, or --settings compare";
            refuse(findings, KIND, side, why);
            return Ok(());
        }
    }
    let others = there
        .value(
            "SELECT string_agg(datname, ', ' ORDER BY datname) FROM pg_database WHERE NOT datistemplate AND datname <> 'postgres'",
        )
        .await?;
    let also = others.map_or_else(String::new, |names| format!("; it holds for the databases there too: {names}"));
    for Difference { name, here, there, obstacle } in differences(here, there).await? {
        findings.retain(|finding| finding.kind != "setting" || finding.name != name);
        let both = format!("{here:?} on the source, and {there:?} on the target");
        let (verdict, note) = match obstacle {
            None => (
                Verdict::Moved,
                format!("{both}: the source's value is written by ALTER SYSTEM before the switch-over{also}"),
            ),
            Some(Obstacle::Restart) => (
                Verdict::NotMoved,
                format!(
                    "{both}: it needs a restart of the target, which only the operator does; try: ALTER SYSTEM SET {name}"
                ),
            ),
            Some(Obstacle::CommandLine) => (
                Verdict::NotMoved,
                format!("{both}: the command line of the target has it, which counts more than ALTER SYSTEM"),
            ),
            Some(Obstacle::Rejected) => (Verdict::NotMoved, format!("{both}: the target rejects the source's value")),
            Some(Obstacle::Right) => (
                Verdict::Refused,
                format!(
                    "{both}: stillpoint's role may not write it; try: GRANT ALTER SYSTEM ON PARAMETER {name} and EXECUTE ON \
                         FUNCTION pg_reload_conf to it, allow_alter_system, or --settings compare"
                ),
            ),
        };
        findings.push(Finding::new(KIND, name, verdict, note));
    }
    Ok(())
}

/// Writes the source's settings to the target, and waits until the target has read them. What an earlier attempt wrote is kept.
///
/// # Errors
///
/// [`Error::Refused`] without the rights; [`Error::TimedOut`] if the target does not read its configuration; errors of the
/// connections to the servers.
pub(crate) async fn write(
    options: &Options,
    journal: &SharedJournal<'_>,
    here: &mut Link,
    reporter: &Reporter,
) -> Result<(), Error> {
    let mut there = Link::connect(&options.target.database("postgres"), Purpose::Statements, &[]).await?;
    let wanted = differences(here, &mut there).await?;
    let lacks = |difference: &&Difference| difference.obstacle == Some(Obstacle::Right);
    let refused: Vec<String> =
        wanted.iter().filter(lacks).map(|it| format!("{KIND} {}: no right to write it", it.name)).collect();
    if !refused.is_empty() {
        return Err(Error::Refused(refused));
    }
    let wanted: Vec<Difference> = wanted.into_iter().filter(|difference| difference.obstacle.is_none()).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let number = journal.record().number;
    for Difference { name, here, .. } in &wanted {
        let before = there.value(&written_sql(name)).await?;
        // Recorded before it is done.
        journal.lock().update(|record| {
            let changes = record.settings_written.entry(number).or_default();
            if changes.iter().all(|known| known.name != *name) {
                changes.push(SettingChange { name: name.clone(), before, made: None });
            }
        })?;
        there.query(&format!("ALTER SYSTEM SET {} TO {}", identifier(name), setting_value_sql(name, here))).await?;
        let made = there.value(&written_sql(name)).await?;
        journal.lock().update(|record| {
            let changes = record.settings_written.entry(number).or_default();
            changes.iter_mut().filter(|known| known.name == *name).for_each(|known| known.made.clone_from(&made));
        })?;
    }
    reload(&options.target).await?;
    let names: Vec<String> = wanted.into_iter().map(|difference| difference.name).collect();
    let failed = there
        .value(&format!(
            "SELECT string_agg(concat(name, ': ', error), ', ') FROM pg_file_settings WHERE error IS NOT NULL AND name IN ({})",
            names.iter().map(|name| literal(name)).collect::<Vec<_>>().join(", ")
        ))
        .await?;
    if let Some(why) = failed {
        return Err(Error::Refused(vec![format!("{KIND}: the target did not take {why}")]));
    }
    reporter.report(migrate::Event::SettingsWritten { names });
    Ok(())
}

/// Makes a server read its configuration, and waits until new sessions have it.
async fn reload(server: &Server) -> Result<(), Error> {
    let at = server.database("postgres");
    let mut link = Link::connect(&at, Purpose::Statements, &[]).await?;
    let before = link.text("SELECT clock_timestamp()").await?;
    link.query("SELECT pg_reload_conf()").await?;
    let is_read = format!("SELECT pg_conf_load_time() >= {}", literal(&before));
    let begun = Instant::now();
    while Link::connect(&at, Purpose::Statements, &[]).await?.text(&is_read).await? != "t" {
        if begun.elapsed() > RELOAD_TIMEOUT {
            let what = "waiting until the target reads its changed configuration".into();
            return Err(Error::TimedOut { what, limit: RELOAD_TIMEOUT, who: Vec::new() });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Restores the settings of a target; harmless if that is done already. One that was changed since stays.
///
/// # Errors
///
/// Errors of the connection to the server.
pub(crate) async fn restore(target: &Server, record: &Record, number: usize) -> Result<(), Error> {
    let Some(changes) = record.settings_written.get(&number).filter(|changes| !changes.is_empty()) else {
        return Ok(());
    };
    let mut there = Link::connect(&target.database("postgres"), Purpose::Statements, &[]).await?;
    for SettingChange { name, before, made } in changes {
        let now = there.value(&written_sql(name)).await?;
        if now == *before || made.is_some() && now != *made {
            continue;
        }
        let name_sql = identifier(name);
        let sql = match before {
            Some(value) => format!("ALTER SYSTEM SET {name_sql} TO {}", setting_value_sql(name, value)),
            None => format!("ALTER SYSTEM RESET {name_sql}"),
        };
        there.query(&sql).await?;
    }
    reload(target).await
}
