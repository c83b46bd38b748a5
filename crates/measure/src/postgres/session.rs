//! Connection of a client, and transactions on it.

use std::collections::HashMap;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Config, Error, NoTls, Row, Statement};

use stillpoint_base::Random;

/// Number of retries without a pause; after them, a transaction waits before each retry.
const IMMEDIATE_RETRIES_MAX: u32 = 5;
/// Maximum pause before a retry.
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(32);

/// Connection with the statements that it has prepared.
pub(super) struct Session {
    client: Client,
    connection: JoinHandle<()>,
    prepared: HashMap<&'static str, Statement>,
}

/// Failure of a transaction.
#[derive(Debug)]
pub(super) enum Failure {
    /// The server rolled it back and the connection can be used further.
    RolledBack(Error),
    /// The connection ended; true if COMMIT had been sent.
    Lost(Error, bool),
}

impl Session {
    pub(super) async fn open(config: &Config) -> Result<Session, Error> {
        let (client, connection) = config.connect(NoTls).await?;
        let connection = tokio::task::spawn_local(async move {
            // The client that waits for an answer gets the error.
            let _ = connection.await;
        });
        Ok(Session { client, connection, prepared: HashMap::new() })
    }

    pub(super) async fn query(
        &mut self,
        text: &'static str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, Error> {
        let statement = match self.prepared.get(text) {
            Some(statement) => statement.clone(),
            None => {
                let statement = self.client.prepare(text).await?;
                self.prepared.insert(text, statement.clone());
                statement
            }
        };
        self.client.query(&statement, parameters).await
    }

    pub(super) async fn begin(&self, text: &str) -> Result<(), Failure> {
        self.client.batch_execute(text).await.map_err(|error| self.judge(error, false))
    }

    pub(super) async fn commit(&self) -> Result<(), Failure> {
        self.client.batch_execute("COMMIT").await.map_err(|error| self.judge(error, true))
    }

    /// Rolls back the transaction after a failed statement, and classifies the error.
    pub(super) async fn failed(&self, error: Error) -> Failure {
        match self.judge(error, false) {
            Failure::RolledBack(error) => match self.client.batch_execute("ROLLBACK").await {
                Ok(()) => Failure::RolledBack(error),
                Err(error) => Failure::Lost(error, false),
            },
            lost => lost,
        }
    }

    /// Classifies an error. A server that shuts down reports this and disconnects, perhaps after the commit.
    fn judge(&self, error: Error, committing: bool) -> Failure {
        let shutdown = [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN, SqlState::CANNOT_CONNECT_NOW];
        match error.code() {
            Some(code) if !shutdown.contains(code) && !self.client.is_closed() => Failure::RolledBack(error),
            _ => Failure::Lost(error, committing),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Returns true if a retry of the same transaction may succeed.
pub(super) fn is_worth_retrying(error: &Error) -> bool {
    let again = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED];
    error.code().is_some_and(|code| again.contains(code))
}

/// Returns the pause before the retry after `tries` attempts: zero at first, then a random part of a time that doubles.
pub(super) fn retry_pause(attempts: u32, random: &mut Random) -> Duration {
    let doubled = attempts.saturating_sub(IMMEDIATE_RETRIES_MAX).min(10);
    let longest = Duration::from_micros((1 << doubled) * 1000 - 1000).min(RETRY_PAUSE_MAX);
    longest.mul_f64(random.unit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_that_fails_repeatedly_waits_longer() {
        let mut random = Random::new(1);
        let mut longest = |attempts| (0..1000).map(|_| retry_pause(attempts, &mut random)).max().unwrap_or_default();
        assert_eq!(longest(IMMEDIATE_RETRIES_MAX), Duration::ZERO);
        let (early, late) = (longest(IMMEDIATE_RETRIES_MAX + 1), longest(1000));
        assert!(early < Duration::from_millis(1) && late > early && late <= RETRY_PAUSE_MAX, "{early:?} {late:?}");
    }
}
