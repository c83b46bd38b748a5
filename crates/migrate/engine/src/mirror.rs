//! Reads of clients on a target that follows, before clients are there: the proxy runs a share of them again on both servers
//! and compares answers and durations.

use crate::hold::holding;
use crate::journal::Phase;
use crate::options::Options;
use crate::proxy_client::{MirrorShare, ProxyClient};
use crate::state_files;
use crate::switch;
use crate::switch_order::FollowLoad;
use std::collections::BTreeMap;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_control::MirrorReport;
use stillpoint_migrate_postgres::link::{Link, Purpose, Server};

/// Result of a mirror.
#[derive(Debug)]
pub struct MirrorOutcome {
    /// Sums until its end.
    pub report: MirrorReport,
    /// Reason for which the proxy ended it before its time.
    pub ended: Option<String>,
}

/// Mirrors reads until `end` is ready. `observe` gets the sums about once a second, and the load of a command that holds.
///
/// # Errors
///
/// [`Error::WrongPhase`] if the target does not follow. After any error clients are where they were.
pub async fn mirror(
    options: &Options,
    share: MirrorShare,
    end: impl Future<Output = ()>,
    mut observe: impl FnMut(&MirrorReport, Option<FollowLoad>),
) -> Result<MirrorOutcome, Error> {
    let database = &options.source.database;
    let record = state_files::peek(&options.state, database)?;
    if record.as_ref().is_none_or(|record| record.phase != Phase::Following) {
        let why = format!("the target does not follow {database}: begin with `run --hold`, and wait until it holds");
        return Err(Error::WrongPhase(why));
    }
    let passwords = [stored(&options.source, options).await?, stored(&options.target, options).await?];
    let mut proxy = ProxyClient::connect(&options.proxy, &options.tenant).await?;
    let mut report = proxy.mirror(&options.target, passwords, share).await?;
    tokio::pin!(end);
    loop {
        tokio::select! {
            () = &mut end => return Ok(MirrorOutcome { report, ended: None }),
            next = proxy.next_mirror_report() => match next? {
                Ok(next) => report = next,
                Err(why) => return Ok(MirrorOutcome { report, ended: Some(why) }),
            },
        }
        observe(&report, holding(options).map(|holding| holding.load));
    }
}

/// Passwords of clients' roles on a server, as far as they are known.
async fn stored(server: &Server, options: &Options) -> Result<BTreeMap<String, String>, Error> {
    let mut link = Link::connect(server, Purpose::Statements, &[]).await?;
    switch::stored_passwords(&mut link, options).await
}
