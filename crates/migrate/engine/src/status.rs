//! State of a migration, as its journal and both servers report it.

use crate::hold::{self, Holding};
use crate::journal::{Phase, Record};
use crate::options::Options;
use crate::owner::{self, Owner};
use crate::proxy_client::ProxyClient;
use crate::state_files::{self, CopyProgress};
use crate::switch::{Side, side_of};
use crate::{ddl_changes, fence};
use serde::Serialize;
use std::collections::BTreeMap;
use std::error::Error as _;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_control::{MirrorReport, TenantStatus};
use stillpoint_migrate_postgres::link::{Server, literal, number, text};

/// Names of the databases of a server that accept connections, without `postgres` and templates.
///
/// # Errors
///
/// Errors of the connection to the server.
pub async fn databases(server: &Server) -> Result<Vec<String>, Error> {
    let sql =
        "SELECT datname FROM pg_database WHERE datallowconn AND NOT datistemplate AND datname <> 'postgres' ORDER BY 1";
    let rows = fence::connect_beside(server).await?.query(sql).await?;
    Ok(rows.iter().map(|row| text(row, 0)).collect())
}

/// State of a migration, as its journal and both servers report it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Status {
    /// The journal's record; `None` if there is no migration.
    pub record: Option<Record>,
    /// `source` or `target`: the side from which the proxy serves the tenant; `None` if the proxy cannot be asked.
    pub serving: Option<&'static str>,
    /// Progress of the copy of rows, by server, while a command copies.
    pub copying: BTreeMap<String, CopyProgress>,
    /// The command that holds it, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holding: Option<Holding>,
    /// Reads of clients that are compared with the target, while a command does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Box<MirrorReport>>,
    /// Log that the source keeps for other targets, in bytes, by server.
    pub kept_for_others: BTreeMap<String, u64>,
    /// Log that the slot in use keeps on its server, in bytes.
    pub kept_bytes: Option<u64>,
    /// Names of our slots that this journal does not know.
    pub orphans: Vec<String>,
    /// The migration that owns the database according to the source: that of the record, or one of another journal.
    pub owner: Option<Owner>,
    /// Session on the source of the command that works on the database, possibly with another journal.
    pub at_work: Option<String>,
    /// Error of the server that would know the rest and could not be asked.
    pub unasked: Option<String>,
    /// Definitions made on the target since the switch, which `fallback` would drop.
    pub defined_since: Vec<String>,
}

impl Status {
    /// Returns true if the presence or absence of a migration is certain; false if only a server would know, and it could not
    /// be asked.
    pub fn is_known(&self) -> bool {
        self.record.is_some() || self.unasked.is_none()
    }

    /// Commands that are possible now, as text for the operator; `None` if there is no migration.
    pub fn advice(&self) -> Option<&'static str> {
        let record = self.record.as_ref()?;
        Some(match record.phase {
            Phase::Begun | Phase::Snapshotted | Phase::Copying => {
                "unless a command is running: `run` removes this migration and starts again, `abort` removes it"
            }
            Phase::Following | Phase::Switching => {
                "unless a command is running: `run` continues the migration, `abort` removes it"
            }
            Phase::Switched if record.way_back => "`fallback` rolls back to the source, `finish` ends the migration",
            Phase::Switched => "`finish` ends the migration; `fallback` is not possible",
            Phase::Returning => "unless a command is running: `fallback` continues the rollback",
            Phase::Returned => {
                "unless a command is running: `fallback` or `abort` removes what is left, `run` also starts again"
            }
        })
    }
}

/// Reports the state of a migration. It changes nothing, and leaves out what cannot be asked.
///
/// # Errors
///
/// [`Error::Journal`] or [`Error::ForeignJournal`] if the journal cannot be used; a server that cannot be reached is not
/// an error ([`Status::unasked`]).
pub async fn status(options: &Options) -> Result<Status, Error> {
    let options = &options.recorded()?;
    let record = state_files::peek(&options.state, &options.source.database)?;
    let tenant = match ProxyClient::connect(&options.proxy, &options.tenant).await {
        Ok(mut proxy) => proxy.tenant_status().await.ok().flatten(),
        Err(_) => None,
    };
    let (serving, mirror) = match tenant {
        Some(TenantStatus { server, mirror, .. }) => (Some((server.host, server.port)), mirror),
        None => (None, None),
    };
    let side = |place: (String, u16)| match &record {
        Some(record) => side_of(options, record, &place),
        None if place == options.source.host_and_port() => Some(Side::Source),
        None if place == options.target.host_and_port() => Some(Side::Target),
        None => None,
    };
    let serving = serving.and_then(side).map(|side| if side == Side::Source { "source" } else { "target" });
    let mut status = Status { record, serving, mirror, holding: hold::holding(options), ..Status::default() };
    if let Some(record) = &status.record {
        let others = record.others.iter().map(|other| (other.number, &other.server));
        for (number, server) in std::iter::once((record.number, &record.target)).chain(others) {
            let told = state_files::copying(&options.state, &options.source.database, number);
            status.copying.extend(told.map(|told| (server.clone(), told)));
        }
        status.defined_since = ddl_changes::changes_of(options, record).await.unwrap_or_default();
    }
    // If clients are to stay on the source, both slots only wait to be dropped; the one on the source matters, because it can
    // fill a disk in use.
    let back = status.record.as_ref().is_some_and(|record| matches!(record.phase, Phase::Switched | Phase::Returning));
    let slot = status.record.as_ref().map(|record| if back { record.back_slot() } else { record.slot() });
    let others = status
        .record
        .iter()
        .filter(|_| !back)
        .flat_map(|record| record.others.iter().map(|other| (record.slot_of(other.number), other.server.clone())));
    let others: BTreeMap<String, String> = others.collect();
    let server = if back { &options.target } else { &options.source };
    let mut link = match fence::connect_beside(server).await {
        Ok(link) => link,
        Err(error) => {
            let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
            status.unasked = Some(format!("{error}{cause}"));
            return Ok(status);
        }
    };
    // The lock and the owner are on the source, whichever side serves.
    let mut elsewhere = if back { fence::connect_beside(&options.source).await.ok() } else { None };
    if let Some(source) = if back { elsewhere.as_mut() } else { Some(&mut link) } {
        status.owner = owner::owner(source, &options.source.database).await?;
        status.at_work = owner::working_command(source, &options.source.database).await?;
    }
    let rows = link
        .query(&format!(
            "SELECT slot_name, pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint FROM pg_replication_slots \
             WHERE slot_name ~ '^stillpoint_' AND database = {}",
            literal(&server.database)
        ))
        .await?;
    for row in rows {
        if Some(text(&row, 0)) == slot {
            status.kept_bytes = Some(number(&row, 1));
        } else if let Some(server) = others.get(&text(&row, 0)) {
            status.kept_for_others.insert(server.clone(), number(&row, 1));
        } else {
            status.orphans.push(text(&row, 0));
        }
    }
    Ok(status)
}
