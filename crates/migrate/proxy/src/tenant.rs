//! A database behind the proxy: its server, its sessions, and its pauses for a switch-over.

use crate::capture::{Capture, Memory};
use crate::command::{Command, Reporter};
use crate::entry::Entry;
use crate::error::Refusal;
use crate::latency_histogram::LatencyHistogram;
use crate::migration_view::{MigrationView, ShownMigration};
use crate::mirror::{Mirror, MirrorOrder, RunningMirror};
use crate::mock_secret::MockSecret;
use crate::mutex::lock;
use crate::pool::Pools;
use crate::pool::connection::Connection;
use crate::process_ids::ProcessIds;
use crate::routes::{Routes, Staged};
use crate::session::state_tracker::CustomNames;
use crate::target::Target;
use crate::verifiers;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_migrate_control::{Activity, PoolConfig, PoolStatus, Progress, TenantConfig};
use stillpoint_migrate_postgres::Server;
use stillpoint_migrate_wire::scram::Verifier;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::time::Instant;

/// Time between two sessions that are prepared. Each makes both servers read catalogues for some milliseconds; clients
/// would wait if all sessions did this at once.
const PREPARE_INTERVAL: Duration = Duration::from_millis(25);

/// Time between two connections of a pool that are closed after a switch.
const CLOSE_INTERVAL: Duration = Duration::from_millis(50);

/// Admission of transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Service {
    Open,
    Paused,
}

#[derive(Debug)]
struct State {
    server: Arc<Server>,
    /// Ids of its sessions at that server.
    ids: Arc<ProcessIds>,
    /// Connections to that server that its sessions share.
    pools: Arc<Pools>,
    config: TenantConfig,
    target: Option<Arc<Target>>,
    capture: Option<Arc<Capture>>,
    mirror: Option<Arc<Mirror>>,
    service: Service,
    sessions: BTreeMap<u32, Arc<Entry>>,
}

/// A database behind the proxy.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    /// Names of settings that its sessions were seen to use.
    pub(crate) custom: CustomNames,
    /// Histogram of its statements' durations.
    pub(crate) waits: Arc<LatencyHistogram>,
    state: Mutex<State>,
    migration: Mutex<Option<ShownMigration>>,
    changed: watch::Sender<()>,
    /// A client has logged in, or a command has named the tenant.
    is_known: AtomicBool,
}

/// Sessions by their numbers, with their reports.
pub(crate) type Reports = BTreeMap<u32, Result<(), String>>;

/// Result of a pause.
#[derive(Debug)]
pub(crate) enum PauseOutcome {
    /// No transaction is open. The pause ends at the limit, or when this is dropped.
    Drained(Pause, Duration),
    /// These sessions did not stop; all sessions go on.
    Blocked(Vec<(Arc<Entry>, String)>),
}

/// A paused tenant. Dropping this lets the sessions go on at their present server.
#[derive(Debug)]
pub(crate) struct Pause {
    tenant: Arc<Tenant>,
    limit: Instant,
    over: bool,
    /// Route to the target, written before the pause.
    route: Option<(Arc<Target>, Staged)>,
}

/// Gathers reports until the limit; returns true with them if all sessions have reported, or are gone.
async fn gather(mut reports: UnboundedReceiver<(u32, Result<(), String>)>, limit: Instant) -> (Reports, bool) {
    let mut gathered = Reports::new();
    loop {
        match tokio::time::timeout_at(limit, reports.recv()).await {
            Ok(Some((id, result))) => drop(gathered.insert(id, result)),
            Ok(None) => return (gathered, true),
            Err(_) => return (gathered, false),
        }
    }
}

/// Closes connections to the server that a tenant has left, one after the other: a server process that ends has work to
/// do for which clients would wait.
async fn close_in_turn(connections: Vec<Connection>) {
    for connection in connections {
        tokio::time::sleep(CLOSE_INTERVAL).await;
        drop(connection);
    }
}

impl Tenant {
    pub(crate) fn new(name: String, config: TenantConfig, server: Arc<Server>) -> Tenant {
        let state = State {
            server,
            ids: Arc::default(),
            pools: Arc::default(),
            config,
            target: None,
            capture: None,
            mirror: None,
            service: Service::Open,
            sessions: BTreeMap::new(),
        };
        let (custom, waits) = (CustomNames::default(), Arc::default());
        let (changed, is_known) = (watch::Sender::new(()), AtomicBool::new(false));
        Tenant { name, custom, waits, state: Mutex::new(state), migration: Mutex::default(), changed, is_known }
    }

    /// Keeps the tenant known: it is more than a name that a client has used.
    pub(crate) fn keep(&self) {
        self.is_known.store(true, Ordering::Relaxed);
    }

    /// Returns true if the tenant stays known without sessions.
    pub(crate) fn is_kept(&self) -> bool {
        self.is_known.load(Ordering::Relaxed)
    }

    /// Shows the progress of the command that moves it. Returns true if the operator has ordered the switch.
    pub(crate) fn show(&self, progress: Progress) -> bool {
        self.keep();
        ShownMigration::replace(&mut lock(&self.migration), progress)
    }

    /// The last report of a command that moves it.
    pub(crate) fn migration(&self) -> Option<MigrationView> {
        lock(&self.migration).as_ref().map(ShownMigration::view)
    }

    /// Orders the command that holds its migration to switch.
    ///
    /// # Errors
    ///
    /// No command holds one.
    pub(crate) fn order_switch(&self) -> Result<(), &'static str> {
        lock(&self.migration).as_mut().map_or(Err("no command has reported a migration"), ShownMigration::order)
    }

    /// Server that it is on.
    pub(crate) fn server(&self) -> Arc<Server> {
        lock(&self.state).server.clone()
    }

    /// Configuration of its pool, if it has one.
    pub(crate) fn pool_config(&self) -> Option<PoolConfig> {
        lock(&self.state).config.pool.clone()
    }

    /// Numbers of its pool, if it has one; `entries` are all sessions.
    pub(crate) fn pool_status(&self, entries: &[Arc<Entry>]) -> Option<PoolStatus> {
        let pools = {
            let state = lock(&self.state);
            state.config.pool.as_ref()?;
            state.pools.clone()
        };
        let kept = entries.iter().filter(|entry| entry.tenant == self.name && entry.kept().is_some()).count();
        let mut status = PoolStatus { kept, ..PoolStatus::default() };
        for counts in pools.all().iter().map(|pool| pool.counts()) {
            status.open += counts.open;
            status.idle += counts.idle;
            status.waiting += counts.waiting;
        }
        Some(status)
    }

    /// Server processes of its shared connections, with and without sessions.
    pub(crate) fn shared_backends(&self) -> Vec<u32> {
        lock(&self.state).pools.backends.pids()
    }

    /// Pools at its server, and at the one that it may move to.
    pub(crate) fn pools(&self) -> Vec<Arc<Pools>> {
        let state = lock(&self.state);
        let of_target = state.target.iter().map(|target| target.pools.clone());
        [state.pools.clone()].into_iter().chain(of_target).collect()
    }

    /// Target that it may move to.
    pub(crate) fn target(&self) -> Option<Arc<Target>> {
        lock(&self.state).target.clone()
    }

    /// Returns true if it is paused.
    pub(crate) fn is_paused(&self) -> bool {
        lock(&self.state).service == Service::Paused
    }

    /// Applies a changed configuration; running sessions stay at their server.
    pub(crate) fn reload(&self, config: TenantConfig, server: Option<Arc<Server>>) {
        let mut state = lock(&self.state);
        state.config = config;
        if let Some(server) = server {
            if *state.server != *server {
                (state.ids, state.pools) = Default::default();
            }
            state.server = server;
        }
    }

    /// Stored password of a role, or a mock one; `None` if the proxy does not have this tenant's verifiers.
    pub(crate) fn verifier(&self, user: &str, secret: &MockSecret) -> Option<Verifier> {
        let path = lock(&self.state).config.verifiers.clone()?;
        let text = verifiers::read(&path).unwrap_or_else(|error| {
            tracing::error!(path = %path.display(), %error, "cannot read verifiers");
            Default::default()
        });
        Some(verifiers::find(&text, user, secret))
    }

    /// Refuses what is not possible in a pause.
    fn must_be_open(&self, state: &State) -> Result<(), String> {
        if state.service == Service::Open { Ok(()) } else { Err(format!("tenant `{}` is paused", self.name)) }
    }

    fn sessions(&self) -> Vec<Arc<Entry>> {
        lock(&self.state).sessions.values().cloned().collect()
    }

    /// Sends every session a command with a reporter; the receiver ends when all have reported or are gone.
    fn ask_all(
        sessions: &[Arc<Entry>],
        command: impl Fn(Reporter) -> Command,
    ) -> UnboundedReceiver<(u32, Result<(), String>)> {
        let (to, reports) = unbounded_channel();
        for entry in sessions {
            entry.send(command(Reporter { id: entry.id, to: to.clone() }));
        }
        reports
    }

    /// Opens a counterpart at the target for every present and later session. With `again`, present sessions that were
    /// ready a moment ago are not asked.
    pub(crate) async fn prepare(&self, target: Arc<Target>, limit: Duration, again: bool) -> Result<Reports, String> {
        self.keep();
        let (sessions, again) = {
            let mut state = lock(&self.state);
            self.must_be_open(&state)?;
            let again = again && state.target.as_ref().is_some_and(|known| Arc::ptr_eq(known, &target));
            state.target = Some(target.clone());
            (state.sessions.values().cloned().collect::<Vec<_>>(), again)
        };
        let spacing = PREPARE_INTERVAL.min(limit / 4 / sessions.len().max(1) as u32);
        let (mut results, limit) = (Reports::new(), Instant::now() + limit);
        let (to, reports) = unbounded_channel();
        for entry in &sessions {
            let reporter = Reporter { id: entry.id, to: to.clone() };
            match again {
                true if entry.is_prepared() && entry.pinned().is_none() => {
                    results.insert(entry.id, Ok(()));
                    continue;
                }
                true => entry.send(Command::PrepareAgain(target.clone(), reporter)),
                false => entry.send(Command::Prepare(target.clone(), Some(reporter))),
            }
            tokio::time::sleep(spacing).await;
        }
        drop(to);
        results.extend(gather(reports, limit).await.0);
        let there: Vec<u32> = lock(&self.state).sessions.keys().copied().collect();
        for entry in sessions.iter().filter(|entry| there.contains(&entry.id)) {
            let why = match entry.activity() {
                Activity::Idle => "its session on the target is not ready yet",
                busy => busy.blocking_reason(),
            };
            results.entry(entry.id).or_insert_with(|| Err(format!("waiting: {why}")));
        }
        Ok(results)
    }

    /// Captures the writes of every present and later session. Once this returns, every commit is captured.
    pub(crate) async fn capture(
        &self,
        limit: Duration,
        statements: bool,
        memory: Memory,
    ) -> Result<(Arc<Capture>, usize), String> {
        self.keep();
        let capture = Arc::new(Capture::new(statements, memory));
        let (sessions, reports) = {
            let mut state = lock(&self.state);
            if state.capture.as_ref().is_some_and(|capture| capture.is_live()) {
                return Err(format!("tenant `{}` is already captured", self.name));
            }
            self.must_be_open(&state)?;
            state.capture = Some(capture.clone());
            let sessions: Vec<_> = state.sessions.values().cloned().collect();
            let arm = |reporter| Command::Capture(capture.clone(), Some(reporter));
            let reports = Tenant::ask_all(&sessions, arm);
            (sessions, reports)
        };
        let (reports, all_reported) = gather(reports, Instant::now() + limit).await;
        let why = |(id, result): (&u32, &Result<(), String>)| Some(format!("session {id}: {}", result.as_ref().err()?));
        let mut failed: Vec<String> = reports.iter().filter_map(why).collect();
        if !all_reported {
            let is_armed = |entry: &Entry| matches!(reports.get(&entry.id), Some(Ok(())));
            let busy = sessions.iter().filter(|entry| !is_armed(entry) && entry.activity() != Activity::Idle);
            failed.extend(busy.map(|entry| format!("session {}: {}", entry.id, entry.activity().blocking_reason())));
        }
        if all_reported && failed.is_empty() {
            return Ok((capture, reports.len()));
        }
        let why = failed.join(", ");
        capture.break_off(format!("the capture did not start: {why}"));
        Err(format!("not every session can be captured: {why}"))
    }

    /// Present or last capture.
    pub(crate) fn captured(&self) -> Option<Arc<Capture>> {
        lock(&self.state).capture.clone()
    }

    /// Mirrors reads of every present and later session, until the result is dropped or clients are moved.
    pub(crate) fn start_mirror(self: &Arc<Self>, order: MirrorOrder) -> Result<RunningMirror, String> {
        self.keep();
        let mut state = lock(&self.state);
        self.must_be_open(&state)?;
        if state.mirror.as_ref().is_some_and(|mirror| !mirror.is_over()) {
            return Err(format!("tenant `{}` is already mirrored", self.name));
        }
        let started =
            Mirror::start(order, self.clone()).map_err(|error| format!("a thread cannot be started: {error}"))?;
        state.mirror = Some(started.0.clone());
        state.sessions.values().for_each(|entry| entry.send(Command::Mirror(Some(started.0.clone()))));
        Ok(started)
    }

    /// Mirror that is at work.
    pub(crate) fn mirror(&self) -> Option<Arc<Mirror>> {
        lock(&self.state).mirror.clone().filter(|mirror| !mirror.is_over())
    }

    /// Ends the mirror.
    pub(crate) fn end_mirror(&self, why: &str) {
        let mut state = lock(&self.state);
        if let Some(mirror) = state.mirror.take() {
            mirror.end(why.to_owned());
            state.sessions.values().for_each(|entry| entry.send(Command::Mirror(None)));
        }
    }

    /// Forgets the target.
    pub(crate) fn abandon(&self) -> Result<(), String> {
        let mut state = lock(&self.state);
        self.must_be_open(&state)?;
        state.target = None;
        state.sessions.values().for_each(|entry| entry.send(Command::Abandon));
        Ok(())
    }

    /// Lets no transaction begin, and waits until none is open.
    pub(crate) async fn pause(self: &Arc<Self>, limit: Duration, routes: &Routes) -> Result<PauseOutcome, String> {
        self.keep();
        let route = match self.target() {
            Some(target) => {
                let staged = routes.stage(&self.name, &target.server).map_err(|error| error.to_string())?;
                Some((target, staged))
            }
            None => None,
        };
        self.end_mirror("clients are being moved");
        let begun = Instant::now();
        let (sessions, reports) = {
            let mut state = lock(&self.state);
            if state.service == Service::Paused {
                return Err(format!("tenant `{}` is already paused", self.name));
            }
            state.service = Service::Paused;
            let sessions: Vec<_> = state.sessions.values().cloned().collect();
            // The lock is held: a session that is admitted later waits, and an earlier one gets the command.
            let reports = Tenant::ask_all(&sessions, Command::Pause);
            (sessions, reports)
        };
        let pause = Pause { tenant: self.clone(), limit: begun + limit, over: false, route };
        let (reports, all_reported) = gather(reports, pause.limit).await;
        if all_reported && reports.values().all(Result::is_ok) {
            return Ok(PauseOutcome::Drained(pause, begun.elapsed()));
        }
        let mut who = Vec::new();
        for entry in sessions {
            let why = match reports.get(&entry.id) {
                Some(Ok(())) => continue,
                Some(Err(why)) => why.clone(),
                None if entry.activity() == Activity::Parked => continue,
                None => entry.activity().blocking_reason().into(),
            };
            who.push((entry, why));
        }
        Ok(PauseOutcome::Blocked(who))
    }

    /// Waits until it is not paused; returns the server in service, and enters no session.
    pub(crate) async fn server_in_service(&self) -> Result<Arc<Server>, Refusal> {
        self.when_open(|_| {}).await.map(|admitted| admitted.server)
    }

    /// Waits until it is not paused, and enters a session; returns the server in service from now on.
    pub(crate) async fn admit(&self, entry: &Arc<Entry>) -> Result<TenantAdmission, Refusal> {
        self.when_open(|state| {
            state.sessions.insert(entry.id, entry.clone());
            if let Some(target) = &state.target {
                entry.send(Command::Prepare(target.clone(), None));
            }
            if let Some(capture) = state.capture.as_ref().filter(|capture| capture.is_live()) {
                entry.send(Command::Capture(capture.clone(), None));
            }
            if let Some(mirror) = state.mirror.as_ref().filter(|mirror| !mirror.is_over()) {
                entry.send(Command::Mirror(Some(mirror.clone())));
            }
        })
        .await
    }

    async fn when_open(&self, enter: impl Fn(&mut State)) -> Result<TenantAdmission, Refusal> {
        let mut changed = self.changed.subscribe();
        let mut waited = false;
        loop {
            changed.mark_unchanged();
            {
                let mut state = lock(&self.state);
                if state.config.connections.is_some_and(|most| state.sessions.len() >= most) {
                    let message = format!("too many connections for database \"{}\"", self.name);
                    return Err(Refusal::new("53300", message));
                }
                if state.service == Service::Open {
                    enter(&mut state);
                    return Ok(TenantAdmission {
                        server: state.server.clone(),
                        ids: state.ids.clone(),
                        pools: state.pools.clone(),
                        waited,
                    });
                }
            }
            waited = true;
            if changed.changed().await.is_err() {
                return Err(Refusal::new("57P01", "the proxy is shutting down"));
            }
        }
    }

    /// Returns true until a session is removed.
    pub(crate) fn has(&self, id: u32) -> bool {
        lock(&self.state).sessions.contains_key(&id)
    }

    /// Removes a session.
    pub(crate) fn leave(&self, id: u32) {
        lock(&self.state).sessions.remove(&id);
    }

    fn resume(&self) {
        let mut state = lock(&self.state);
        state.service = Service::Open;
        state.sessions.values().for_each(|entry| entry.send(Command::Resume));
        drop(state);
        self.changed.send_replace(());
    }
}

impl Pause {
    /// Time at which the pause ends by itself.
    pub(crate) fn limit(&self) -> Instant {
        self.limit
    }

    /// The paused tenant.
    pub(crate) fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }

    /// Puts the target in service: the point of no return. Sessions that cannot move are closed, and reported.
    pub(crate) async fn switch(mut self, routes: &Routes) -> Result<(usize, Reports), String> {
        let (target, staged) = self.route.take().ok_or("the tenant was not prepared before the pause")?;
        if Instant::now() >= self.limit {
            return Err("the pause is over".into());
        }
        let missing: Vec<u32> =
            self.tenant.sessions().iter().filter(|entry| !entry.is_prepared()).map(|entry| entry.id).collect();
        if !missing.is_empty() {
            return Err(format!("sessions {missing:?} have no counterpart on {}", target.server));
        }
        routes.commit(staged).map_err(|error| error.to_string())?;
        self.over = true;
        let (sessions, mut reports, left) = {
            let mut state = lock(&self.tenant.state);
            (state.server, state.ids) = (target.server.clone(), target.ids.clone());
            let left = std::mem::replace(&mut state.pools, target.pools.clone());
            state.target = None;
            state.service = Service::Open;
            if let Some(capture) = state.capture.take() {
                capture.break_off("the tenant was moved to another server".into());
            }
            let sessions: Vec<_> = state.sessions.values().cloned().collect();
            let reports = Tenant::ask_all(&sessions, Command::Switch);
            (sessions, reports, left)
        };
        tokio::spawn(close_in_turn(left.retire()));
        self.tenant.changed.send_replace(());
        let mut results = Reports::new();
        // Every session answers: its own waits have limits.
        while let Some((id, result)) = reports.recv().await {
            results.insert(id, result);
        }
        if let Err(error) = routes.sync() {
            tracing::error!(%error, "the new route is in force, but may be lost if the machine crashes");
        }
        tracing::info!(tenant = self.tenant.name, server = %target.server, sessions = sessions.len(), "switched over");
        Ok((sessions.len(), results))
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        if !self.over {
            self.tenant.resume();
        }
    }
}

/// A place in a tenant that is not paused.
#[derive(Debug)]
pub(crate) struct TenantAdmission {
    /// The server in service.
    pub(crate) server: Arc<Server>,
    /// Ids of the tenant's sessions at that server.
    pub(crate) ids: Arc<ProcessIds>,
    /// Connections to that server that its sessions share.
    pub(crate) pools: Arc<Pools>,
    /// The tenant was paused before.
    pub(crate) waited: bool,
}
