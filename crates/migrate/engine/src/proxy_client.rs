//! The manager's client of the proxy in front of both servers: the control socket, for one tenant.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_control::{
    Client, MirrorReport, Phase, Remark, Reply, Request, Status, TargetSpec, TenantStatus,
};
use stillpoint_migrate_postgres::link::{Link, Server, literal, text};

/// Interval between requests while sessions hold objects that cannot be moved; they may release them.
const PREPARE_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Minimum time for a prepare request to answer, even at the end: an aborted one would not report what blocks it.
const PREPARE_TIMEOUT_MIN: Duration = Duration::from_secs(2);
/// Maximum time for an answer, longer than the proxy's own limits, because the proxy falls back by itself.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Time by which a standby proxy, or one that a service manager has restarted, serves.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(5);

/// A control connection to the proxy for one tenant. Dropping it ends a pause: clients continue where they are.
pub(crate) struct ProxyClient {
    client: Client,
    path: PathBuf,
    tenant: String,
}

/// Share of the reads that are mirrored, and the number of statements that run at the same time.
#[derive(Debug, Clone, Copy)]
pub struct MirrorShare {
    /// Share in millionths.
    pub ppm: u32,
    /// Number of statements at the same time; each takes a connection to both servers.
    pub workers: u32,
}

/// Work that the proxy has done for clients.
#[derive(Debug, Clone, Default)]
pub(crate) struct StatementCounts {
    /// Number of statements that each session has sent, by session number.
    pub(crate) statements: HashMap<u32, u64>,
    /// Histogram of durations: upper bound in microseconds, and the number of statements below it and not below the previous
    /// bound.
    pub(crate) waits: Vec<(u64, u64)>,
}

impl ProxyClient {
    pub(crate) async fn connect(path: &Path, tenant: &str) -> Result<ProxyClient, Error> {
        let client = Client::connect(path).await?;
        Ok(ProxyClient { client, path: path.into(), tenant: tenant.into() })
    }

    /// Opens the same connection to the proxy that serves now.
    pub(crate) async fn reconnect(&self) -> Result<ProxyClient, Error> {
        ProxyClient::connect(&self.path, &self.tenant).await
    }

    async fn ask(&mut self, request: Request) -> Result<Reply, Error> {
        let own_limit_ms = match &request {
            Request::Prepare { limit_ms, .. } | Request::Pause { limit_ms, .. } => *limit_ms,
            _ => 0,
        };
        let limit = REPLY_TIMEOUT + Duration::from_millis(own_limit_ms);
        let answer = tokio::time::timeout(limit, self.client.ask(&request)).await;
        Ok(answer.map_err(|_| Error::Proxy(format!("no answer to {request:?}")))??)
    }

    async fn status(&mut self) -> Result<Status, Error> {
        match self.ask(Request::Status).await? {
            Reply::Status(status) => Ok(status),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    /// State of the tenant; `None` if the proxy does not know it.
    pub(crate) async fn tenant_status(&mut self) -> Result<Option<TenantStatus>, Error> {
        let find = |status: Status, name: &str| status.tenants.into_iter().find(|tenant| tenant.name == name);
        if let Some(tenant) = find(self.status().await?, &self.tenant) {
            return Ok(Some(tenant));
        }
        // The tenant may match `*`, and none of its clients may have come yet.
        match self.ask(Request::Know { tenant: self.tenant.clone() }).await {
            Ok(Reply::Known) => Ok(find(self.status().await?, &self.tenant)),
            Ok(reply) => Err(unexpected_reply(&reply)),
            Err(Error::Proxy(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the server that serves the tenant now, as the proxy reaches it; `None` if the proxy does not know the tenant.
    pub(crate) async fn server(&mut self) -> Result<Option<stillpoint_migrate_postgres::Server>, Error> {
        Ok(self.tenant_status().await?.map(|tenant| tenant.server))
    }

    /// Returns the server that serves the tenant now; `None` if the proxy does not know the tenant.
    pub(crate) async fn serving(&mut self) -> Result<Option<(String, u16)>, Error> {
        Ok(self.tenant_status().await?.map(|tenant| (tenant.server.host, tenant.server.port)))
    }

    /// Returns the same after any pause has ended: until then, an interrupted request to switch may still be carried out.
    pub(crate) async fn serving_after_pause(&mut self) -> Result<Option<(String, u16)>, Error> {
        let begun = tokio::time::Instant::now();
        while self.tenant_status().await?.is_some_and(|tenant| tenant.phase == Phase::Paused) {
            if begun.elapsed() > REPLY_TIMEOUT {
                return Err(Error::Proxy(format!("tenant {} is paused by another connection", self.tenant)));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.serving().await
    }

    /// Process ids of the tenant's server processes, which its clients and a mirror use.
    pub(crate) async fn backends(&mut self) -> Result<Vec<u32>, Error> {
        let Status { sessions, tenants, .. } = self.status().await?;
        let own = sessions.into_iter().filter(|session| session.tenant == self.tenant).filter_map(|s| s.backend);
        let mut all: BTreeSet<u32> = own.collect();
        if let Some(tenant) = tenants.into_iter().find(|tenant| tenant.name == self.tenant) {
            all.extend(tenant.shared_backends);
            all.extend(tenant.mirror.into_iter().flat_map(|mirror| mirror.source_processes));
        }
        Ok(all.into_iter().collect())
    }

    /// Begins to mirror the tenant's reads. `passwords` are those of roles on the source and on the target.
    pub(crate) async fn mirror(
        &mut self,
        target: &Server,
        passwords: [BTreeMap<String, String>; 2],
        share: MirrorShare,
    ) -> Result<MirrorReport, Error> {
        let request = Request::Mirror {
            tenant: self.tenant.clone(),
            target: TargetSpec::Server(target.address.clone()),
            verifiers: passwords,
            share_ppm: share.ppm,
            workers: share.workers,
        };
        match self.ask(request).await? {
            Reply::Mirrored(report) => Ok(*report),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    /// Waits for the next report of the mirror; the inner error is the reason for its end.
    pub(crate) async fn next_mirror_report(&mut self) -> Result<Result<MirrorReport, String>, Error> {
        match tokio::time::timeout(REPLY_TIMEOUT, self.client.next()).await {
            Ok(Ok(Reply::Mirrored(report))) => Ok(Ok(*report)),
            Ok(Ok(Reply::MirrorOver { why })) => Ok(Err(why)),
            Ok(Ok(reply)) => Err(unexpected_reply(&reply)),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(Error::Proxy("no report of the mirror".into())),
        }
    }

    /// Refuses `server` unless `backends`, which the proxy has just reported, are processes of it: clients' writes on another
    /// server would not be moved. `link` is connected to it.
    pub(crate) async fn check_backends_at(
        &mut self,
        backends: &[u32],
        link: &mut Link,
        server: &Server,
    ) -> Result<(), Error> {
        let list = backends.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let sql = format!(
            "SELECT pid FROM unnest('{{{list}}}'::int[]) AS pid \
             WHERE NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = pid.pid AND a.datname = {})",
            literal(&server.database)
        );
        let missing: Vec<u32> = link.query(&sql).await?.iter().filter_map(|row| text(row, 0).parse().ok()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        // A session that has ended meanwhile is at no server.
        let there = self.backends().await?;
        match missing.into_iter().find(|pid| there.contains(pid)) {
            Some(pid) => Err(Error::ServedElsewhere { server: server.to_string(), pid }),
            None => Ok(()),
        }
    }

    /// Work that the proxy has done so far for the tenant's clients.
    pub(crate) async fn served(&mut self) -> Result<StatementCounts, Error> {
        let Status { sessions, tenants, .. } = self.status().await?;
        let statements =
            sessions.into_iter().filter(|s| s.tenant == self.tenant).map(|s| (s.id, s.statements)).collect();
        let tenant = tenants.into_iter().find(|tenant| tenant.name == self.tenant);
        Ok(StatementCounts { statements, waits: tenant.map(|tenant| tenant.waits).unwrap_or_default() })
    }

    /// Opens a session on the target for each of the tenant's sessions, waits until all are ready, and returns their number. `verifiers` are stored
    /// passwords by role, for a target that requires them.
    pub(crate) async fn prepare(
        &mut self,
        target: &Server,
        verifiers: &BTreeMap<String, String>,
        limit: Duration,
    ) -> Result<u64, Error> {
        let begun = tokio::time::Instant::now();
        let mut again = false;
        loop {
            let request = Request::Prepare {
                tenant: self.tenant.clone(),
                target: TargetSpec::Server(target.address.clone()),
                verifiers: verifiers.clone(),
                limit_ms: limit.saturating_sub(begun.elapsed()).max(PREPARE_TIMEOUT_MIN).as_millis() as u64,
                again: std::mem::replace(&mut again, true),
            };
            let reply = self.ask(request).await?;
            let Reply::Prepared { sessions, waiting, pinned, failed } = reply else {
                return Err(unexpected_reply(&reply));
            };
            if [&waiting, &pinned, &failed].iter().all(|list| list.is_empty()) {
                return Ok(sessions as u64);
            }
            if begun.elapsed() >= limit || !failed.is_empty() {
                let who = [pinned, failed, waiting].iter().flatten().map(remark).collect();
                return Err(Error::TimedOut { what: "preparing sessions on the target".into(), limit, who });
            }
            tokio::time::sleep(PREPARE_RETRY_INTERVAL).await;
        }
    }

    /// Stops new transactions and waits until none runs. After `limit`, which counts until the switch, clients continue by
    /// themselves.
    pub(crate) async fn pause(&mut self, limit: Duration) -> Result<(), Error> {
        let request = Request::Pause { tenant: self.tenant.clone(), limit_ms: limit.as_millis() as u64 };
        match self.ask(request).await? {
            Reply::Drained { .. } => Ok(()),
            Reply::Blocked { sessions } => {
                let who = sessions.iter().map(remark).collect();
                Err(Error::TimedOut { what: "waiting for running transactions to end".into(), limit, who })
            }
            reply => Err(unexpected_reply(&reply)),
        }
    }

    /// Moves clients to the target; allowed only in a pause.
    pub(crate) async fn switch(&mut self) -> Result<(), Error> {
        self.ask(Request::Switch { tenant: self.tenant.clone() }).await.map(drop)
    }

    /// Ends the pause: clients continue where they were.
    pub(crate) async fn resume(&mut self) -> Result<(), Error> {
        self.ask(Request::Resume { tenant: self.tenant.clone() }).await.map(drop)
    }

    /// Closes the sessions on the target.
    pub(crate) async fn abandon(&mut self) -> Result<(), Error> {
        self.ask(Request::Abandon { tenant: self.tenant.clone() }).await.map(drop)
    }
}

/// Asks a proxy; if there is none, waits as long as another one may take its place.
pub(crate) async fn retry_until_takeover<T, F: Future<Output = Result<T, Error>>>(
    ask: impl Fn() -> F,
) -> Result<T, Error> {
    let begun = tokio::time::Instant::now();
    loop {
        match ask().await {
            Err(Error::ProxyGone(_)) if begun.elapsed() < TAKEOVER_TIMEOUT => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            answered => return answered,
        }
    }
}

/// Returns true if a proxy that knows the tenant serves, now or soon.
pub(crate) async fn is_served(proxy: &Path, tenant: &str) -> bool {
    let serving = || async { ProxyClient::connect(proxy, tenant).await?.serving().await };
    matches!(retry_until_takeover(serving).await, Ok(Some(_)))
}

fn unexpected_reply(reply: &Reply) -> Error {
    Error::Proxy(format!("unexpected reply {reply:?}"))
}

/// Describes a session and the remark about it, for messages.
fn remark(remark: &Remark) -> String {
    let since = remark.transaction_ms.map_or_else(String::new, |ms| format!(" for {ms} ms"));
    format!("session {} of {}: {}{since}", remark.id, remark.user, remark.why)
}
