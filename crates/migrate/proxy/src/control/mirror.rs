//! Mirrors over the control socket.

use super::{find, send_reply, target_server, wiped};
use crate::mirror::{MirrorOrder, RunningMirror, WHOLE_PPM, WORKERS_MAX};
use crate::proxy::Proxy;
use crate::target::Target;
use crate::tenant::Tenant;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_control::{Reply, TargetSpec};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixStream;

/// Interval of reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Checks a request.
pub(super) fn order(
    proxy: &Proxy,
    tenant: &str,
    target: TargetSpec,
    verifiers: [BTreeMap<String, String>; 2],
    share_ppm: u32,
    workers: u32,
) -> Result<(Arc<Tenant>, MirrorOrder), String> {
    if !(1..=WHOLE_PPM).contains(&share_ppm.into()) || !(1..=WORKERS_MAX).contains(&workers) {
        return Err(format!("the share must be 1 to {WHOLE_PPM} millionths, and the workers 1 to {WORKERS_MAX}"));
    }
    let tenant = find(proxy, tenant)?;
    let target = target_server(proxy, &tenant, target)?;
    let [of_source, of_target] = verifiers.map(wiped);
    let source = Target::new((*tenant.server()).clone(), of_source);
    let servers = [Arc::new(source), Arc::new(Target::new(target, of_target))];
    let connect_limit = proxy.settings().config.limits.connect();
    Ok((tenant, MirrorOrder { servers, share_ppm, workers, connect_limit }))
}

/// Sends reports until the mirror is over or the caller is gone.
pub(super) async fn stream_reports(mut stream: BufReader<UnixStream>, started: &RunningMirror, tenant: &Tenant) {
    let mut nothing = String::new();
    let mut tick = tokio::time::interval(REPORT_INTERVAL);
    let over = loop {
        let over = tokio::select! {
            _ = tick.tick() => None,
            why = started.0.over() => Some(why),
            // The caller sends nothing more: any read is its end.
            _ = stream.read_line(&mut nothing) => break "the caller disconnected".to_owned(),
        };
        let report = Reply::Mirrored(Box::new(started.0.report()));
        let sent = tokio::time::timeout(super::REPLY_TIMEOUT, send_reply(stream.get_mut(), &report)).await;
        match (sent, over) {
            (Ok(Ok(())), None) => {}
            (_, Some(why)) => break why,
            _ => break "the caller does not read".to_owned(),
        }
    };
    tenant.end_mirror(&over);
    let _ = tokio::time::timeout(super::REPLY_TIMEOUT, send_reply(stream.get_mut(), &Reply::MirrorOver { why: over }))
        .await;
}
