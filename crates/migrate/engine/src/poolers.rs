//! Poolers among the programs that a migration connects to: their sessions are not the server's own, so locks, settings and
//! replication of a migration would be lost or mixed with those of clients.

use crate::Options;
use crate::proxy_client::ProxyClient;
use crate::report::{Finding, leave_out, refuse};
use stillpoint_migrate_apply::Error;

/// Refuses a source or a target that is reached through a pooler.
///
/// # Errors
///
/// [`Error::Refused`] with the names of all poolers, and errors of the connections.
pub(crate) async fn refuse_poolers(options: &Options) -> Result<(), Error> {
    let mut refusals = Vec::new();
    let targets = options.targets().map(|target| ("target", target.database("postgres")));
    for (side, server) in [("source", options.source.clone())].into_iter().chain(targets) {
        if let Some(pooler) = server.pooler().await? {
            refusals.push(format!(
                "pooler {side}: {server} is {pooler}; try: --{side} with the address of the server itself"
            ));
        }
    }
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// Looks for a pooler between the proxy and its server, and reports what cannot be told.
pub(crate) async fn look_behind_proxy(options: &Options, findings: &mut Vec<Finding>) {
    const KIND: &str = "pooler";
    leave_out(
        findings,
        KIND,
        "before the proxy",
        "a pooler between clients and the proxy cannot be told from other clients: state that its sessions have when they \
         are moved is that of its last client, as with any server behind it",
    );
    let Ok(mut proxy) = ProxyClient::connect(&options.proxy, &options.tenant).await else { return };
    let Ok(Some(address)) = proxy.server().await else { return };
    let database = address.database.clone().unwrap_or_else(|| options.source.database.clone());
    let mut server = options.source.database(&database);
    server.address = address;
    // It was looked at.
    if (&server.address.host, server.address.port) == (&options.source.address.host, options.source.address.port) {
        return;
    }
    match server.pooler().await {
        Ok(None) => {}
        Ok(Some(pooler)) => {
            let note = format!(
                "the proxy reaches the database through {pooler} at {}:{}; try: the server's own address in the proxy's \
                 configuration",
                server.address.host, server.address.port
            );
            refuse(findings, KIND, "behind the proxy", note);
        }
        Err(error) => {
            leave_out(findings, KIND, "behind the proxy", format!("the proxy's server cannot be asked: {error}"));
        }
    }
}
