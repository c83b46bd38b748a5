//! Compares facts outside the database that are not moved and that clients notice after the switch: the settings that both
//! servers give to sessions that set nothing themselves, and the servers' limits.

use crate::report::{Finding, Verdict};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_control::SESSION_SETTINGS;
use stillpoint_migrate_postgres::link::{Link, literal, text};

/// Query for the settings that a session gets from its server. If our own session or its role has another value, the query
/// takes the value of the configuration file.
const SETTINGS: &str = "WITH files AS MATERIALIZED (SELECT DISTINCT ON (name) name, setting FROM pg_file_settings \
     WHERE applied ORDER BY name, seqno DESC) SELECT s.name, CASE WHEN s.source IN ('client', 'session', 'user', \
     'database', 'database user') THEN coalesce(f.setting, s.boot_val) ELSE s.reset_val END \
     FROM pg_settings s LEFT JOIN files f ON lower(f.name) = lower(s.name) WHERE s.context IN ('user', 'superuser') \
     AND s.category ~ '^(Client Connection Defaults|Error Handling|Lock Management|Version and Platform|Write-Ahead \
     Log / S)' AND s.name NOT IN ('client_encoding', 'session_replication_role') ORDER BY 1";

/// The same for a role that may not read the configuration file: of settings that its own session has, the server's value is not
/// known.
const READABLE_SETTINGS: &str = "SELECT s.name, CASE WHEN s.source NOT IN ('client', 'session', 'user', 'database', 'database \
     user') THEN s.reset_val END FROM pg_settings s WHERE s.context = 'user' AND s.category ~ '^(Client Connection Defaults|Error \
     Handling|Lock Management|Version and Platform|Write-Ahead Log / S)' AND s.name <> 'client_encoding' ORDER BY 1";

/// Query for limits that clients may reach.
const LIMITS: &str = "SELECT name, setting FROM pg_settings WHERE name IN ('max_connections', \
                      'max_prepared_transactions', 'max_locks_per_transaction', 'max_worker_processes') ORDER BY 1";

/// Compares both servers. What our role may not read is told.
pub(crate) async fn compare(here: &mut Link, there: &mut Link, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let mut note = |kind: &str, name: &str, note: String| {
        findings.push(Finding::new(kind, name, Verdict::NotMoved, note));
    };
    let readable = here.rights.is_superuser && there.rights.is_superuser;
    if readable {
        for link in [&mut *here, &mut *there] {
            // The names of setting categories are translated into the server's language.
            link.query("SET lc_messages = 'C'").await?;
        }
    }
    let settings = if readable { SETTINGS } else { READABLE_SETTINGS };
    let mut unknown: Vec<String> = Vec::new();
    for (kind, question) in [("setting", settings), ("limit", LIMITS)] {
        let (ours, theirs) = (here.query(question).await?, there.query(question).await?);
        for row in &ours {
            let (name, value) = (text(row, 0), text(row, 1));
            let Some(other) = theirs.iter().find(|row| text(row, 0) == name) else { continue };
            if row[1].is_none() || other[1].is_none() {
                unknown.push(name);
                continue;
            }
            let other = text(other, 1);
            match kind {
                "setting" if value != other => {
                    let whose = if SESSION_SETTINGS.split(' ').all(|known| known != name) {
                        "sessions that do not set it themselves get the target's value"
                    } else if is_taken(there, &name, &value).await? {
                        "new sessions get the target's value; sessions that are moved keep theirs"
                    } else {
                        "all sessions get the target's value, because the target rejects the source's value"
                    };
                    note(kind, &name, format!("{value:?} on the source, and {other:?} on the target: {whose}"));
                }
                "limit" if number(&other) < number(&value) => {
                    note(kind, &name, format!("{value} on the source, and {other} on the target"));
                }
                _ => {}
            }
        }
    }
    if !readable {
        let why = format!(
            "only a superuser may read the servers' values of settings that stillpoint's own sessions have ({}), and those of \
             superusers",
            unknown.join(", ")
        );
        findings.push(Finding::new("setting", "others", Verdict::NotLookedAt, why));
    }
    Ok(())
}

/// Returns true if a server takes a value for one of its settings.
async fn is_taken(there: &mut Link, name: &str, value: &str) -> Result<bool, Error> {
    there.query("BEGIN").await?;
    let set = format!("SELECT set_config({}, {}, true)", literal(name), literal(value));
    let taken = there.query(&set).await;
    there.query("ROLLBACK").await?;
    match taken {
        Err(error) if error.sqlstate().is_none() => Err(error.into()),
        taken => Ok(taken.is_ok()),
    }
}

fn number(value: &str) -> i64 {
    value.parse().unwrap_or(0)
}
