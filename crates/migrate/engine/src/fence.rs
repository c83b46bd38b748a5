//! Fencing the side that clients have left: nobody but us connects, and whoever still does cannot write.

use crate::Error;
use crate::inventory::text;
use crate::link::{Link, identifier};

/// Who can connect to the database: what [`raise`] takes and [`lift`] gives back.
pub(crate) async fn grantees(link: &mut Link) -> Result<Vec<String>, Error> {
    let rows = link
        .query(
            "SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END \
             FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a \
             WHERE d.datname = current_database() AND a.privilege_type = 'CONNECT' AND a.grantee <> d.datdba",
        )
        .await?;
    Ok(rows.iter().map(|row| text(row, 0)).collect())
}

/// Shuts the database. One commit: it stands in the pause.
///
/// Superusers pass every right, so new sessions are read-only as well; ours say otherwise when they log in.
pub(crate) async fn raise(link: &mut Link, database: &str, grantees: &[String]) -> Result<(), Error> {
    let name = identifier(database);
    let mut sql = format!("ALTER DATABASE {name} SET default_transaction_read_only = on");
    for grantee in grantees {
        sql += &format!("; REVOKE CONNECT ON DATABASE {name} FROM {grantee}");
    }
    link.query(&sql).await.map(drop)
}

/// Takes [`raise`] back.
pub(crate) async fn lift(link: &mut Link, database: &str, grantees: &[String]) -> Result<(), Error> {
    let name = identifier(database);
    let mut sql = format!("ALTER DATABASE {name} RESET default_transaction_read_only");
    for grantee in grantees {
        sql += &format!("; GRANT CONNECT ON DATABASE {name} TO {grantee}");
    }
    link.query(&sql).await.map(drop)
}

/// Ends every session that is not ours: the proxy has left them.
pub(crate) async fn clear(link: &mut Link) -> Result<(), Error> {
    link.query(&format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() \
         AND backend_type = 'client backend' AND pid <> pg_backend_pid() AND application_name <> '{}'",
        crate::APPLICATION
    ))
    .await
    .map(drop)
}
