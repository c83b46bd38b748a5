//! Retries after a failure, the same for each command that moves clients.

use crate::options::Failure;
use crate::{Selection, values};
use std::time::Duration;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Server, ServerError};

/// Number of times in one command that a lost proxy may be replaced by another.
const PROXY_LOSSES_MAX: u32 = 5;

/// Result of a move there or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Clients have changed sides.
    Switched {
        /// Length of the pause.
        paused: Duration,
    },
    /// Clients had changed sides before; what an earlier attempt left undone is done.
    AlreadyThere,
}

/// Repeats attempts until one has an outcome. An attempt without one lost its proxy; its argument is true if it may continue
/// with another.
pub(crate) async fn retry_with_any_proxy(
    attempt: impl AsyncFn(bool) -> Result<Option<Outcome>, Failure>,
) -> Result<Outcome, Failure> {
    let mut lost = 0;
    loop {
        if let Some(outcome) = attempt(lost < PROXY_LOSSES_MAX).await? {
            return Ok(outcome);
        }
        lost += 1;
    }
}

/// Returns the same error, with the names of the tables that it concerns if only a check of their rows shows them. `followed`
/// is the server that is followed.
pub(crate) async fn name_long_rows(error: Error, followed: &Server, selection: &Selection) -> Error {
    let message = match &error {
        Error::Server(told @ ServerError::Sql { server, message, .. })
            if *server == followed.to_string() && told.is_of_length() =>
        {
            message.clone()
        }
        _ => return error,
    };
    // If the server cannot be asked, the error is no worse than before.
    let tables = values::tables_with_long_values(followed, selection).await.unwrap_or_default();
    Error::TooLong { message, tables }
}
