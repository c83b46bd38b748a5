//! Materialized views. No log reports their rows, so the side to which clients go makes them again with REFRESH, shortly before
//! clients change sides. One that is refreshed on the other side after that is made once more when clients have changed sides,
//! or inside the pause on request ([`Options::refresh_at_switch`](crate::Options::refresh_at_switch)).

use crate::journal::SharedJournal;
use crate::progress::Reporter;
use crate::selection::Selection;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{NOT_OF_EXTENSION, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, literal, text};

/// Name of the part of a phase, for reports.
const PART: &str = "materialized views";

/// A materialized view that has rows, or may have none because its query has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MaterializedView {
    /// Qualified name, quoted.
    name: String,
    /// Text that differs after each REFRESH that changed a row, and after a few that did not.
    mark: String,
}

impl MaterializedView {
    /// Lists those that are selected and were filled, each after those that it reads.
    pub(crate) async fn all(link: &mut Link, selection: &Selection) -> Result<Vec<MaterializedView>, Error> {
        let selected = selection.left_out(link).await?.condition("c.oid");
        let rows = link
            .query(&format!(
                "WITH RECURSIVE reads (view, of) AS (SELECT DISTINCT r.ev_class, d.refobjid FROM pg_rewrite r \
                 JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid \
                 AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> r.ev_class), \
                 below (view, of) AS (SELECT * FROM reads UNION SELECT b.view, r.of FROM below b JOIN reads r ON r.view = b.of) \
                 SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname), concat_ws(' ', c.relfilenode, \
                 pg_stat_get_tuples_inserted(c.oid), pg_stat_get_tuples_updated(c.oid), pg_stat_get_tuples_deleted(c.oid)) \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE c.relkind = 'm' AND c.relispopulated AND {selected} AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} \
                 ORDER BY (SELECT count(*) FROM below b JOIN pg_class o ON o.oid = b.of AND o.relkind = 'm' \
                 WHERE b.view = c.oid), 1"
            ))
            .await?;
        Ok(rows.iter().map(|row| MaterializedView { name: text(row, 0), mark: text(row, 1) }).collect())
    }
}

/// Makes the rows of materialized views on one side. Their queries run with the search path that sessions of the database have
/// unless a role has another one.
pub(crate) async fn refresh(at: &Server, views: &[MaterializedView]) -> Result<(), ServerError> {
    if views.is_empty() {
        return Ok(());
    }
    // A query of a view obeys the policies of the tables that its owner reads.
    let mut link = Link::connect(at, Purpose::Statements, &[("row_security", "on")]).await?;
    let path = "SELECT coalesce((SELECT substr(s, 13) FROM pg_db_role_setting r JOIN pg_database d ON d.oid = r.setdatabase, \
                unnest(r.setconfig) s WHERE d.datname = current_database() AND r.setrole = 0 AND starts_with(s, \
                'search_path=')), '\"$user\", public')";
    let path = link.text(path).await?;
    link.query(&format!("SELECT set_config('search_path', {}, false)", literal(&path))).await?;
    for MaterializedView { name, .. } in views {
        link.query(&format!("REFRESH MATERIALIZED VIEW {name}")).await?;
    }
    let names: Vec<&str> = views.iter().map(|view| view.name.as_str()).collect();
    link.query(&format!("ANALYZE {}", names.join(", "))).await.map(drop)
}

/// Makes the rows of all that are filled on the side that clients leave, and keeps in the journal what they were then.
pub(crate) async fn refresh_before_switch(
    from: &Server,
    to: &Server,
    selection: &Selection,
    journal: &SharedJournal<'_>,
    reporter: &Reporter,
) -> Result<(), Error> {
    let views = MaterializedView::all(&mut Link::connect(from, Purpose::Statements, &[]).await?, selection).await?;
    if !views.is_empty() {
        reporter.phase(PART, refresh(to, &views)).await?;
    }
    journal.lock().update(|record| record.refreshed = views.into_iter().map(|view| (view.name, view.mark)).collect())
}

/// Makes those again that were refreshed since; clients have changed sides. A failure is reported: their rows are old.
pub(crate) async fn refresh_stale(
    left: &mut Link,
    to: &Server,
    selection: &Selection,
    refreshed: &[(String, String)],
    reporter: &Reporter,
) {
    let mut views = match MaterializedView::all(left, selection).await {
        Ok(views) => views,
        Err(error) => return reporter.warn(format!("materialized views may be older than before the switch: {error}")),
    };
    views.retain(|view| !refreshed.iter().any(|(name, mark)| (name, mark) == (&view.name, &view.mark)));
    let names = views.iter().map(|view| view.name.as_str()).collect::<Vec<_>>().join(", ");
    match refresh(to, &views).await {
        Err(error) => {
            reporter.warn(format!("REFRESH failed, and these are older than before the switch: {names}: {error}"))
        }
        Ok(()) if views.is_empty() => {}
        Ok(()) => reporter.warn(format!("refreshed again, because they were refreshed during the migration: {names}")),
    }
}
