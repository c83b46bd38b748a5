//! Triggers and rules that fire in sessions that replay: those with ENABLE ALWAYS or ENABLE REPLICA. Their effects are in the
//! log, so they are disabled on the side that follows, and enabled in the pause, when that side has everything.

use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{NOT_OF_EXTENSION, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{Link, ServerError, text};

/// Attempts to lock their tables beside the replay, which locks tables in another order.
const ATTEMPTS_MAX: u32 = 5;
/// The server ended a transaction because of a dead-lock.
const DEADLOCK: &str = "40P01";

/// Statements for all of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ReplicaTriggers {
    /// Disables them.
    disable: String,
    /// Enables them as they are on the side that was asked.
    pub(crate) enable: String,
}

impl ReplicaTriggers {
    /// Reads them on the side that clients use. A partition has its own, which are changed one by one.
    pub(crate) async fn read(link: &mut Link) -> Result<ReplicaTriggers, ServerError> {
        let rows = link
            .query(&format!(
                "SELECT format('ALTER TABLE ONLY %I.%I DISABLE %s; ', n.nspname, c.relname, k.what), \
                 format('ALTER TABLE ONLY %I.%I ENABLE %s %s; ', n.nspname, c.relname, \
                 CASE k.enabled WHEN 'A' THEN 'ALWAYS' ELSE 'REPLICA' END, k.what) FROM ( \
                 SELECT tgrelid, format('TRIGGER %I', tgname), tgenabled FROM pg_trigger WHERE NOT tgisinternal UNION ALL \
                 SELECT ev_class, format('RULE %I', rulename), ev_enabled FROM pg_rewrite) k (relation, what, enabled) \
                 JOIN pg_class c ON c.oid = k.relation JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE k.enabled IN ('A', 'R') AND c.relkind IN ('r', 'p') AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} ORDER BY 1"
            ))
            .await?;
        let all = |at: usize| rows.iter().map(|row| text(row, at)).collect();
        Ok(ReplicaTriggers { disable: all(0), enable: all(1) })
    }

    /// Disables them on the side that is to follow.
    pub(crate) async fn disable(&self, at: &mut Link) -> Result<(), ServerError> {
        if self.disable.is_empty() { Ok(()) } else { at.query(&self.disable).await.map(drop) }
    }

    /// Disables those that are there.
    pub(crate) async fn disable_present(&self, at: &mut Link) -> Result<(), ServerError> {
        for statement in self.disable.split_inclusive("; ") {
            match at.query(statement).await {
                Ok(_) | Err(ServerError::Sql { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
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
            match at.query(&format!("BEGIN; {}", self.enable)).await {
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
