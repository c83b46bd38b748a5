//! Triggers, rules and foreign keys, which act on rows that are repeated. Their effects are in the log, so they are kept from acting on
//! the side that follows, until it has everything, in the pause.
//!
//! | our role on the side that follows | triggers and rules | foreign keys |
//! |---|---|---|
//! | may set session_replication_role | only ENABLE ALWAYS and REPLICA are disabled | stay: they do not act |
//! | may not | all are disabled | are not there; made NOT VALID in the pause, and validated after it |
//!
//! A foreign key of a partitioned table is made on each partition; when these are valid, the key of the table itself takes them over
//! without a look at the rows.

use crate::selection::Selection;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{NOT_OF_EXTENSION, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{Link, ServerError, SessionRights, text};

/// Attempts to lock their tables beside the replay, which locks tables in another order.
const ATTEMPTS_MAX: u32 = 5;
/// The server ended a transaction because of a dead-lock.
const DEADLOCK: &str = "40P01";

/// SQL: foreign keys `k` of plain tables and partitions, without the rows that describe one key for each part of the table that it
/// refers to.
const KEYS_OF_ROWS: &str = "FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
     LEFT JOIN pg_constraint up ON up.oid = k.conparentid WHERE k.contype = 'f' AND c.relkind = 'r' AND \
     up.conrelid IS DISTINCT FROM k.conrelid";

/// SQL: the definition of a foreign key `k` without its state.
const KEY_SQL: &str =
    "format('ADD CONSTRAINT %I %s', k.conname, replace(pg_get_constraintdef(k.oid), ' NOT VALID', ''))";

/// Statements for all of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Reactions {
    /// They keep them from acting; each may also be run when it was run before.
    disable: Vec<String>,
    /// They let them act as they do on the side that was asked.
    enable: Vec<String>,
}

impl Reactions {
    /// Reads them on the side that clients use, for a side that follows with the rights `of_follower`. A partition has its own
    /// triggers, which are changed one by one.
    pub(crate) async fn read(
        link: &mut Link,
        selection: &Selection,
        of_follower: SessionRights,
    ) -> Result<Reactions, Error> {
        let selected = selection.left_out(link).await?.condition("c.oid");
        let acting = if of_follower.may_replicate { "'A', 'R'" } else { "'A', 'R', 'O'" };
        let triggers = link
            .query(&format!(
                "SELECT format('ALTER TABLE ONLY %I.%I DISABLE %s; ', n.nspname, c.relname, k.what), \
                 format('ALTER TABLE ONLY %I.%I ENABLE %s; ', n.nspname, c.relname, \
                 CASE k.enabled WHEN 'A' THEN 'ALWAYS ' WHEN 'R' THEN 'REPLICA ' ELSE '' END || k.what) FROM ( \
                 SELECT tgrelid, format('TRIGGER %I', tgname), tgenabled FROM pg_trigger WHERE NOT tgisinternal UNION ALL \
                 SELECT ev_class, format('RULE %I', rulename), ev_enabled FROM pg_rewrite) k (relation, what, enabled) \
                 JOIN pg_class c ON c.oid = k.relation JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE k.enabled IN ({acting}) AND c.relkind IN ('r', 'p') AND {selected} AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} ORDER BY 1"
            ))
            .await?;
        let keys = match of_follower.may_replicate {
            true => Vec::new(),
            false => foreign_keys(link, &selected).await?,
        };
        let all = |at: usize| {
            triggers.iter().chain(&keys).map(|row| text(row, at)).filter(|statement| !statement.is_empty()).collect()
        };
        Ok(Reactions { disable: all(0), enable: all(1) })
    }

    /// Statements that let them act, as one text.
    pub(crate) fn enable_sql(&self) -> String {
        self.enable.concat()
    }

    /// Disables them on the side that is to follow.
    pub(crate) async fn disable(&self, at: &mut Link) -> Result<(), ServerError> {
        if self.disable.is_empty() { Ok(()) } else { at.query(&self.disable.concat()).await.map(drop) }
    }

    /// Disables those that are there.
    pub(crate) async fn disable_present(&self, at: &mut Link) -> Result<(), ServerError> {
        run_each(&self.disable, at).await
    }

    /// Enables those that are there, and makes those that are not.
    pub(crate) async fn enable_present(&self, at: &mut Link) -> Result<(), ServerError> {
        run_each(&self.enable, at).await
    }

    /// Runs `look` in a transaction in which they are enabled, and takes that back.
    pub(crate) async fn look_enabled<T>(
        &self,
        at: &mut Link,
        mut look: impl AsyncFnMut(&mut Link) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.enable.is_empty() {
            return look(at).await;
        }
        let mut attempt = 1;
        loop {
            match at.query(&format!("BEGIN; {}", self.enable_sql())).await {
                Ok(_) => break,
                Err(ServerError::Sql { code, .. }) if code == DEADLOCK && attempt < ATTEMPTS_MAX => attempt += 1,
                Err(error) => return Err(error.into()),
            }
            at.query("ROLLBACK").await?;
        }
        let found = look(at).await;
        at.query("ROLLBACK").await?;
        found
    }
}

/// Runs each statement of a list that the server accepts.
async fn run_each(statements: &[String], at: &mut Link) -> Result<(), ServerError> {
    for statement in statements {
        match at.query(statement).await {
            Ok(_) | Err(ServerError::Sql { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Statements that drop and make the foreign keys of one side.
async fn foreign_keys(link: &mut Link, selected: &str) -> Result<Vec<Vec<Option<String>>>, ServerError> {
    let rows = format!(
        "SELECT '', format('ALTER TABLE ONLY %I.%I %s NOT VALID; ', n.nspname, c.relname, {KEY_SQL}) {KEYS_OF_ROWS} \
         AND {selected} AND {USER_SCHEMA} AND {NOT_OF_EXTENSION}"
    );
    let tables = format!(
        "SELECT format('ALTER TABLE IF EXISTS %I.%I DROP CONSTRAINT IF EXISTS %I; ', n.nspname, c.relname, k.conname), '' \
         FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE k.contype = 'f' AND k.conparentid = 0 AND {selected} AND {USER_SCHEMA} AND {NOT_OF_EXTENSION}"
    );
    link.query(&format!("{rows} UNION ALL {tables} ORDER BY 1, 2")).await
}

/// Validates the foreign keys that the pause made on the side that clients are on now, as far as they are valid on the side that they
/// left, and makes those of partitioned tables. Returns messages about keys for which that failed.
///
/// # Errors
///
/// Errors of the connections to the servers.
pub(crate) async fn complete_foreign_keys(
    left: &mut Link,
    to: &mut Link,
    selection: &Selection,
) -> Result<Vec<String>, Error> {
    if to.rights.may_replicate {
        return Ok(Vec::new());
    }
    let selected = selection.left_out(left).await?.condition("c.oid");
    let valid = format!(
        "SELECT format('ALTER TABLE ONLY %I.%I VALIDATE CONSTRAINT %I', n.nspname, c.relname, k.conname) {KEYS_OF_ROWS} AND \
         k.convalidated AND {selected} AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} ORDER BY 1"
    );
    let of_partitioned = format!(
        "SELECT format('ALTER TABLE %I.%I %s', n.nspname, c.relname, {KEY_SQL}) FROM pg_constraint k JOIN pg_class c \
         ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE k.contype = 'f' AND k.conparentid = 0 AND \
         c.relkind = 'p' AND {selected} AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} ORDER BY 1"
    );
    let comments = format!(
        "SELECT format('COMMENT ON CONSTRAINT %I ON %I.%I IS %L', k.conname, n.nspname, c.relname, d.description) \
         FROM pg_constraint k JOIN pg_description d ON d.objoid = k.oid AND d.classoid = 'pg_constraint'::regclass \
         JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE {selected} AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} ORDER BY 1"
    );
    let mut failed = Vec::new();
    for question in [valid, of_partitioned, comments] {
        for row in left.query(&question).await? {
            let statement = text(&row, 0);
            match to.query(&statement).await {
                Ok(_) => {}
                // An earlier command has made it.
                Err(error) if error.sqlstate() == Some("42710") => {}
                Err(error @ ServerError::Sql { .. }) => failed.push(format!("{statement}: {error}")),
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(failed)
}
