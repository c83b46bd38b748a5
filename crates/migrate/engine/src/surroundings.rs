//! Comparison of what is outside of a database, stays where it is, and is noticed by clients when they go over: what both servers give to
//! sessions that set nothing themselves, their limits, and the roles that log in.

use crate::check::{Finding, Verdict};
use crate::inventory::text;
use crate::link::{Link, Row, literal};
use crate::{Error, Server};

/// A question for the settings that a session has from its server: where our own session, or its role, has another value,
/// what the configuration file says.
const SETTINGS: &str = "WITH files AS MATERIALIZED (SELECT DISTINCT ON (name) name, setting FROM pg_file_settings \
     WHERE applied ORDER BY name, seqno DESC) SELECT s.name, CASE WHEN s.source IN ('client', 'session', 'user', \
     'database', 'database user') THEN coalesce(f.setting, s.boot_val) ELSE s.reset_val END \
     FROM pg_settings s LEFT JOIN files f ON lower(f.name) = lower(s.name) WHERE s.context IN ('user', 'superuser') \
     AND s.category ~ '^(Client Connection Defaults|Error Handling|Lock Management|Version and Platform|Write-Ahead Log / S)' \
     AND s.name NOT IN ('client_encoding', 'session_replication_role') ORDER BY 1";

/// A question for limits that clients may reach.
const LIMITS: &str = "SELECT name, setting FROM pg_settings WHERE name IN ('max_connections', 'max_prepared_transactions', \
     'max_locks_per_transaction', 'max_worker_processes') ORDER BY 1";

/// A question for the roles that may log in and connect to a database: what each may, and what it knows.
fn roles(database: &str) -> String {
    format!(
        "SELECT r.rolname, r.rolcanlogin, r.rolconnlimit, coalesce(r.rolvaliduntil::text, 'ever'), \
         md5(coalesce(r.rolpassword, '')), (SELECT coalesce(string_agg(g.rolname, ', ' ORDER BY g.rolname), 'none') \
         FROM pg_auth_members m JOIN pg_authid g ON g.oid = m.roleid WHERE m.member = r.oid), \
         (SELECT coalesce(string_agg(s, ', ' ORDER BY s), 'none') FROM pg_db_role_setting d, unnest(d.setconfig) s \
         WHERE d.setrole = r.oid AND d.setdatabase = 0), r.rolcanlogin AND coalesce(has_database_privilege(r.oid, \
         (SELECT oid FROM pg_database WHERE datname = {}), 'CONNECT'), false) \
         FROM pg_authid r WHERE r.rolname !~ '^pg_' ORDER BY 1",
        literal(database)
    )
}

/// Kinds of what [`roles`] asks for, for people; of a password it is said only that it is another one.
const OF_ROLE: [&str; 6] = ["LOGIN", "CONNECTION LIMIT", "VALID UNTIL", "password", "memberships", "settings"];
const PASSWORD: usize = 3;

/// Compares both servers; `here` and `there` are sessions of superusers on them.
pub(crate) async fn compare(
    here: &mut Link,
    there: &mut Link,
    source: &Server,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let mut note = |kind: &str, name: &str, note: String| {
        findings.push(Finding { kind: kind.into(), name: name.into(), verdict: Verdict::NotMoved, note });
    };
    for (kind, question) in [("setting", SETTINGS), ("limit", LIMITS)] {
        let (ours, theirs) = (here.query(question).await?, there.query(question).await?);
        for row in &ours {
            let (name, value) = (text(row, 0), text(row, 1));
            let Some(other) = of(&theirs, &name).map(|row| text(row, 1)) else { continue };
            match kind {
                "setting" if value != other => note(
                    kind,
                    &name,
                    format!(
                        "{value:?} on the source, and {other:?} on the target: sessions get it that set none themselves"
                    ),
                ),
                "limit" if number(&other) < number(&value) => {
                    note(kind, &name, format!("{value} on the source, and {other} on the target"));
                }
                _ => {}
            }
        }
    }
    let roles = roles(&source.database);
    let (ours, theirs) = (here.query(&roles).await?, there.query(&roles).await?);
    for row in ours.iter().filter(|row| text(row, OF_ROLE.len() + 1) == "t") {
        let name = text(row, 0);
        let Some(other) = of(&theirs, &name) else {
            note("role", &name, "it may log in, and is not on the target".into());
            continue;
        };
        let differs = |at: &usize| text(row, at + 1) != text(other, at + 1);
        let each = (0..OF_ROLE.len()).filter(differs).map(|at| match at {
            PASSWORD => "another password".to_owned(),
            _ => format!("{} {} instead of {}", OF_ROLE[at], text(other, at + 1), text(row, at + 1)),
        });
        let each: Vec<String> = each.collect();
        if !each.is_empty() {
            note("role", &name, format!("on the target it has {}", each.join("; ")));
        }
    }
    Ok(())
}

fn of<'r>(rows: &'r [Row], name: &str) -> Option<&'r Row> {
    rows.iter().find(|row| text(row, 0) == name)
}

fn number(value: &str) -> i64 {
    value.parse().unwrap_or(0)
}
