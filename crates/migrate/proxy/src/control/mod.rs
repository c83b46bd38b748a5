//! Server side of the control socket.

mod mirror;
mod rows;

use crate::capture::{Capture, Next};
use crate::entry::Entry;
use crate::proxy::Proxy;
use crate::standby;
use crate::target::Target;
use crate::tenant::{Pause, PauseOutcome, Reports, Tenant};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use stillpoint_migrate_control::{
    CounterStatus, Phase, Remark, Reply, Request, SessionStatus, Status, TargetSpec, TenantStatus,
};
use stillpoint_migrate_postgres::Server;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::Instant;
use zeroize::{Zeroize, Zeroizing};

/// Longest request line in bytes.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Longest time to take a reply; after it the connection is closed.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest pause of a tenant.
const PAUSE_TIME_MAX: Duration = Duration::from_secs(60);

/// Answers one connection until it ends.
pub(crate) async fn serve(stream: UnixStream, proxy: Arc<Proxy>) {
    let permitted = stream.peer_cred().is_ok_and(|peer| {
        let own = rustix::process::geteuid().as_raw();
        peer.uid() == own || peer.uid() == 0
    });
    if !permitted {
        return tracing::warn!("rejected a control connection from a process of another user");
    }
    let mut stream = BufReader::new(stream);
    let mut pause: Option<Pause> = None;
    // The end of a pause may cut a read off: the bytes read so far are the beginning of the next line.
    let mut line = Zeroizing::new(Vec::new());
    loop {
        let read = {
            let mut limited = (&mut stream).take(LINE_BYTES_MAX.saturating_sub(line.len() as u64));
            let reading = limited.read_until(b'\n', &mut line);
            match &pause {
                None => reading.await,
                Some(held) => tokio::select! {
                    read = reading => read,
                    () = tokio::time::sleep_until(held.limit()) => {
                        end_pause(&mut pause);
                        continue;
                    }
                },
            }
        };
        match read {
            Ok(_) if line.ends_with(b"\n") => {}
            _ => return,
        }
        let request = serde_json::from_slice::<Request>(&line);
        let drains = matches!(request, Ok(Request::Drain));
        line.zeroize();
        let reply = match request {
            Ok(Request::Capture { tenant, limit_ms, statements }) => {
                tracing::debug!(tenant, statements, "capture");
                match capture(&proxy, &tenant, Duration::from_millis(limit_ms), statements).await {
                    Ok((capture, reply)) => return stream_rows(stream, &capture, &reply).await,
                    Err(why) => Err(why),
                }
            }
            Ok(Request::Mirror { tenant, target, verifiers, share_ppm, workers }) => {
                let order = mirror::order(&proxy, &tenant, target, verifiers, share_ppm, workers);
                match order.and_then(|(tenant, order)| Ok((tenant.start_mirror(order)?, tenant))) {
                    Ok((started, tenant)) => return mirror::stream_reports(stream, &started, &tenant).await,
                    Err(why) => Err(why),
                }
            }
            Ok(Request::StandBy { config }) => match standby::keep(&mut stream, &proxy, &config).await {
                Ok(()) => return,
                Err(why) => Err(why),
            },
            Ok(request) => {
                tracing::debug!(?request, "control");
                answer(&proxy, request, &mut pause).await
            }
            Err(error) => Err(format!("not a request: {error}")),
        };
        let reply = reply.unwrap_or_else(|message| Reply::Error { message });
        // A caller that does not read its reply cannot hold the pause for longer either.
        let limit = pause.as_ref().map_or_else(|| Instant::now() + REPLY_TIMEOUT, Pause::limit);
        match tokio::time::timeout_at(limit, send_reply(stream.get_mut(), &reply)).await {
            // Not before the reply: this connection ends with the proxy.
            Ok(Ok(())) if drains => proxy.drain.notify_one(),
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => return end_pause(&mut pause),
        }
    }
}

fn end_pause(pause: &mut Option<Pause>) {
    if let Some(held) = pause.take() {
        tracing::warn!(
            tenant = held.tenant().name,
            "the pause reached its time limit: sessions continue on the source"
        );
    }
}

async fn send_reply(stream: &mut UnixStream, reply: &Reply) -> std::io::Result<()> {
    let mut text =
        serde_json::to_string(reply).unwrap_or_else(|error| format!(r#"{{"reply":"error","message":"{error}"}}"#));
    text.push('\n');
    stream.write_all(text.as_bytes()).await
}

async fn capture(
    proxy: &Proxy,
    tenant: &str,
    limit: Duration,
    statements: bool,
) -> Result<(Arc<Capture>, Reply), String> {
    let (capture, sessions) = find(proxy, tenant)?.capture(limit, statements, proxy.memory()).await?;
    let uncovered = capture.uncovered();
    Ok((capture, Reply::Capturing { sessions, uncovered }))
}

/// Sends the captured transactions until the capture is over or the follower disconnected.
async fn stream_rows(mut stream: BufReader<UnixStream>, capture: &Capture, reply: &Reply) {
    if send_reply(stream.get_mut(), reply).await.is_err() {
        return capture.break_off("the follower disconnected".into());
    }
    let mut known = BTreeMap::new();
    let mut nothing = String::new();
    loop {
        let next = tokio::select! {
            next = capture.next() => next,
            // The follower sends nothing more: any read is its end.
            _ = stream.read_line(&mut nothing) => return capture.break_off("the follower disconnected".into()),
        };
        let lines = match next {
            Next::Written(stamp, written) => rows::lines(stamp, written, &mut known),
            Next::RunningReport(report) => vec![report],
            Next::Over(why) => {
                let _ = send_reply(stream.get_mut(), &Reply::CaptureOver { why }).await;
                return;
            }
        };
        for line in &lines {
            if send_reply(stream.get_mut(), line).await.is_err() {
                return capture.break_off("the follower disconnected".into());
            }
        }
    }
}

async fn answer(proxy: &Arc<Proxy>, request: Request, pause: &mut Option<Pause>) -> Result<Reply, String> {
    Ok(match request {
        Request::Status => Reply::Status(status(proxy)),
        Request::Know { tenant } => {
            find(proxy, &tenant)?.keep();
            Reply::Known
        }
        Request::Prepare { tenant, target, verifiers, limit_ms, again } => {
            prepare(proxy, &tenant, target, verifiers, Duration::from_millis(limit_ms), again).await?
        }
        // The task that reads the connection answers these three.
        Request::Capture { tenant, .. } => {
            return Err(format!("a capture of tenant `{tenant}` requires a connection of its own"));
        }
        Request::StandBy { .. } | Request::Mirror { .. } => {
            return Err("this request requires a connection of its own".into());
        }
        Request::Captured { tenant } => {
            let captured = find(proxy, &tenant)?.captured();
            let capture = captured.ok_or_else(|| format!("tenant `{tenant}` is not captured"))?;
            Reply::Captured { stamp: capture.last(), over: capture.end_reason() }
        }
        Request::Pause { tenant, limit_ms } => {
            begin_pause(proxy, &tenant, Duration::from_millis(limit_ms).min(PAUSE_TIME_MAX), pause).await?
        }
        Request::Switch { tenant } => {
            let (held, entries) = (take_pause(pause, &tenant)?, entries(proxy));
            let (sessions, reports) = held.switch(&proxy.routes).await?;
            Reply::Switched { sessions, failed: remarks(&entries, failures(reports)) }
        }
        Request::Resume { tenant } => {
            drop(take_pause(pause, &tenant)?);
            Reply::Resumed
        }
        Request::Abandon { tenant } => {
            find(proxy, &tenant)?.abandon()?;
            Reply::Abandoned
        }
        Request::Drain => {
            Reply::Draining { sessions: proxy.directory.all().len(), limit_ms: proxy.settings().config.limits.drain_ms }
        }
        Request::Progress { tenant, progress } => Reply::Shown { switch: find(proxy, &tenant)?.show(*progress) },
    })
}

fn find(proxy: &Proxy, tenant: &str) -> Result<Arc<Tenant>, String> {
    proxy.tenant(tenant).ok_or_else(|| format!("there is no tenant `{tenant}`"))
}

fn take_pause(pause: &mut Option<Pause>, tenant: &str) -> Result<Pause, String> {
    let held = pause.take_if(|held| held.tenant().name == tenant);
    held.ok_or_else(|| format!("this connection does not hold a pause of tenant `{tenant}`"))
}

fn entries(proxy: &Proxy) -> BTreeMap<u32, Arc<Entry>> {
    proxy.directory.all().into_iter().map(|entry| (entry.id, entry)).collect()
}

fn failures(reports: Reports) -> Vec<(u32, String)> {
    reports.into_iter().filter_map(|(id, result)| result.err().map(|why| (id, why))).collect()
}

fn remarks(entries: &BTreeMap<u32, Arc<Entry>>, reports: Vec<(u32, String)>) -> Vec<Remark> {
    let user = |id: u32| entries.get(&id).map(|entry| entry.user.clone()).unwrap_or_default();
    reports.into_iter().map(|(id, why)| Remark { id, user: user(id), why, transaction_ms: None }).collect()
}

async fn prepare(
    proxy: &Arc<Proxy>,
    tenant: &str,
    target: TargetSpec,
    verifiers: BTreeMap<String, String>,
    limit: Duration,
    again: bool,
) -> Result<Reply, String> {
    let tenant = find(proxy, tenant)?;
    let server = target_server(proxy, &tenant, target)?;
    let verifiers = wiped(verifiers);
    let target = match tenant.target() {
        Some(known) if *known.server == server && known.verifiers == verifiers => known,
        _ => Arc::new(Target::new(server, verifiers)),
    };
    let reports = tenant.prepare(target, limit, again).await?;
    let entries = entries(proxy);
    let ready = reports.values().filter(|result| result.is_ok()).count();
    let (mut waiting, mut pinned, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    for (id, why) in failures(reports) {
        let list = match entries.get(&id) {
            _ if why.starts_with("waiting") => &mut waiting,
            Some(entry) if entry.pinned().is_some() => &mut pinned,
            Some(_) => &mut failed,
            None => continue,
        };
        list.push((id, why));
    }
    let [waiting, pinned, failed] = [waiting, pinned, failed].map(|reports| remarks(&entries, reports));
    Ok(Reply::Prepared { sessions: ready, waiting, pinned, failed })
}

/// Stored passwords that are wiped when they are dropped.
fn wiped(verifiers: BTreeMap<String, String>) -> BTreeMap<String, Zeroizing<String>> {
    verifiers.into_iter().map(|(user, stored)| (user, Zeroizing::new(stored))).collect()
}

/// The server that a request names or describes, with the tenant's database.
fn target_server(proxy: &Proxy, tenant: &Tenant, target: TargetSpec) -> Result<Server, String> {
    let mut server = match target {
        TargetSpec::Server(server) => server,
        TargetSpec::Name(name) => {
            let settings = proxy.settings();
            settings.config.servers.get(&name).cloned().ok_or_else(|| format!("there is no server `{name}`"))?
        }
    };
    if server.database.is_none() {
        server.database.clone_from(&tenant.server().database);
    }
    Ok(server)
}

async fn begin_pause(
    proxy: &Arc<Proxy>,
    tenant: &str,
    limit: Duration,
    pause: &mut Option<Pause>,
) -> Result<Reply, String> {
    if let Some(held) = pause {
        return Err(format!("this connection holds a pause of tenant `{}`", held.tenant().name));
    }
    let tenant = find(proxy, tenant)?;
    Ok(match tenant.pause(limit, &proxy.routes).await? {
        PauseOutcome::Drained(held, waited) => {
            *pause = Some(held);
            Reply::Drained { waited_us: waited.as_micros() as u64 }
        }
        PauseOutcome::Blocked(who) => {
            let remark = |(entry, why): (Arc<Entry>, String)| Remark {
                id: entry.id,
                user: entry.user.clone(),
                why,
                transaction_ms: entry.busy_for().map(|busy| busy.as_millis() as u64),
            };
            Reply::Blocked { sessions: who.into_iter().map(remark).collect() }
        }
    })
}

fn status(proxy: &Proxy) -> Status {
    let tenants = proxy.tenants().into_iter().map(|tenant| {
        let target = tenant.target().map(|target| (*target.server).clone());
        let phase = match &target {
            _ if tenant.is_paused() => Phase::Paused,
            Some(_) => Phase::Prepared,
            None => Phase::Serving,
        };
        let (waits, pool) = (tenant.waits.counts(), tenant.pool_status(&proxy.directory.all()));
        let shared_backends = tenant.shared_backends();
        let mirror = tenant.mirror().map(|mirror| Box::new(mirror.report()));
        let (name, server) = (tenant.name.clone(), (*tenant.server()).clone());
        TenantStatus { name, server, phase, target, waits, mirror, pool, shared_backends }
    });
    let session = |entry: Arc<Entry>| SessionStatus {
        id: entry.id,
        tenant: entry.tenant.clone(),
        user: entry.user.clone(),
        database: entry.database.clone(),
        client: entry.origin.clone(),
        state: entry.activity(),
        pinned: entry.pinned(),
        kept: entry.kept(),
        process: entry.client_process(),
        backend: entry.backend(),
        prepared: entry.is_prepared(),
        transaction_ms: entry.busy_for().map(|busy| busy.as_millis() as u64),
        statements: entry.counters.statements.load(Ordering::Relaxed),
    };
    let entries = proxy.directory.all();
    let counters = proxy.sum();
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    Status {
        tenants: tenants.collect(),
        sessions: entries.into_iter().map(session).collect(),
        counters: CounterStatus {
            statements: load(&counters.statements),
            bytes_up: load(&counters.bytes_up),
            bytes_down: load(&counters.bytes_down),
            reloads: *proxy.reloads.borrow(),
        },
        standby: proxy.standby.taken_by(),
    }
}
