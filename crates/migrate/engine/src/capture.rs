//! Capture at the proxy, for a source whose log has no rows, and the search for sessions that bypass it.
//!
//! The proxy sees only what passes through it. Direct sessions, which bypass the proxy, are searched for all the time; one that
//! is found ends the recording, and so the migration. A session that connects, writes and leaves between two searches is not
//! found. The comparison of both sides before the switch-over finds what it wrote, if it wrote before the comparison.

use crate::fence;
use crate::options::Options;
use crate::proxy_client::ProxyClient;
use std::time::Duration;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::recording::Recording;
use stillpoint_migrate_postgres::link::{Link, text};

/// Interval of the search for direct sessions.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Makes the proxy capture everything that its clients commit from now on, with the statements if `statements` is true.
pub(crate) async fn begin(options: &Options, statements: bool) -> Result<Recording, Error> {
    let Options { state, proxy, tenant, snapshot_limit, source, .. } = options;
    let beside = fence::connect_beside(source).await?;
    let search = find_direct_session(beside, ProxyClient::connect(proxy, tenant).await?, source.database.clone());
    Recording::begin(state, proxy, tenant, *snapshot_limit, statements, search).await
}

/// Returns when it has found a direct session, or when the search fails.
async fn find_direct_session(mut beside: Link, mut proxy: ProxyClient, database: String) -> Error {
    let mut tick = tokio::time::interval(POLL_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        match fence::find_direct_sessions(&mut beside, &mut proxy, &database).await {
            Ok(found) => {
                let Some(row) = found.first() else { continue };
                return Error::Capture(format!("{} is a direct session: its writes are not captured", text(row, 1)));
            }
            Err(error) => return error,
        }
    }
}
