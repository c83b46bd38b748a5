//! Logins under way: their clients have named their user and have not proved it. Each may hold a connection of the
//! server, and any client can begin one. So their number is limited for each address and each tenant, and the others
//! wait in line.
//!
//! ```text
//!              a place is free                       the server or proxy lets it in, or not
//! in line ──────────────────────▶ under way ───────────────────────────────────────────────▶ over
//!                                     │ its client owes an answer for GRACE, and another waits for the place
//!                                     ╰───────────────────────────────────────────────────▶ turned away
//! ```
//!
//! A client that owes an answer loses its place only to a login that could use it, and only after it had time to
//! answer. A client that waits for a server keeps its place. The next in line is the login whose address has the fewest
//! under way.

use crate::mutex::lock;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_migrate_control::{ANY, Config, Limits, Origin};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Time that a client has for an answer, no matter how many wait for its place.
const ANSWER_GRACE: Duration = Duration::from_secs(1);
/// Interval at which a login in line checks if a client has used up that time.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Group of logins with a common limit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Scope {
    All,
    /// All tenants from one address.
    Host(Origin),
    Tenant(Arc<str>),
    /// One tenant from one address.
    Address(Origin, Arc<str>),
}

/// Most logins under way at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoginLimits {
    /// All logins together.
    pub(crate) all: usize,
    /// Logins to one tenant.
    pub(crate) tenant: usize,
    /// Logins to one tenant from one address.
    pub(crate) address: usize,
}

impl LoginLimits {
    fn of(&self, scope: &Scope) -> usize {
        match scope {
            Scope::All => self.all,
            Scope::Host(_) => (self.all / 2).max(self.address),
            Scope::Tenant(_) => self.tenant,
            Scope::Address(..) => self.address,
        }
    }
}

/// Origin and tenant of a login.
#[derive(Debug, Clone)]
pub(crate) struct LoginOrigin {
    host: Origin,
    tenant: Arc<str>,
}

/// Origin and tenant of a client's login, with the limits for them; `None` if there is no such tenant.
pub(crate) fn places(config: &Config, database: &str, origin: Origin) -> Option<(LoginOrigin, LoginLimits)> {
    let tenant = config.tenant(database)?;
    // The name in the configuration: clients may use any number of names for `*`.
    let name = if config.tenants.contains_key(database) { database } else { ANY };
    let Limits { connections, logins_per_tenant, logins_per_address, .. } = config.limits;
    // The limits leave room for sessions that begin from other addresses.
    let sessions = tenant.connections.unwrap_or(connections).min(connections);
    let places = LoginLimits {
        all: (connections / 2).max(1),
        tenant: logins_per_tenant.min(sessions / 2).max(1),
        address: logins_per_address.min(sessions / 4).max(1),
    };
    Some((LoginOrigin::new(origin, name), places))
}

impl LoginOrigin {
    fn new(origin: Origin, tenant: &str) -> LoginOrigin {
        LoginOrigin { host: origin.host(), tenant: tenant.into() }
    }

    fn scopes(&self) -> [Scope; 4] {
        let tenant = || self.tenant.clone();
        [Scope::Address(self.host, tenant()), Scope::Host(self.host), Scope::Tenant(tenant()), Scope::All]
    }
}

#[derive(Debug)]
struct QueuedLogin {
    path: LoginOrigin,
    places: LoginLimits,
    admitted: Arc<Notify>,
}

#[derive(Debug)]
struct ActiveLogin {
    path: LoginOrigin,
    /// Time since which its client owes an answer.
    owes_since: Option<Instant>,
    evicted: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    queue: BTreeMap<u64, QueuedLogin>,
    active: BTreeMap<u64, ActiveLogin>,
    counts: HashMap<Scope, usize>,
}

/// All logins, in the order of their arrival.
#[derive(Debug)]
pub(crate) struct Logins {
    state: Mutex<State>,
    evictions: AtomicU64,
    grace: Duration,
}

impl Default for Logins {
    fn default() -> Self {
        Logins { state: Mutex::default(), evictions: AtomicU64::new(0), grace: ANSWER_GRACE }
    }
}

/// The place of a login, in line or under way; free again when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    of: Arc<Logins>,
    number: u64,
    admitted: Arc<Notify>,
    evicted: Arc<Notify>,
}

impl State {
    fn count(&self, scope: &Scope) -> usize {
        self.counts.get(scope).copied().unwrap_or(0)
    }

    /// The first limit that a login has to wait for, if any.
    fn full(&self, path: &LoginOrigin, places: &LoginLimits) -> Option<Scope> {
        path.scopes().into_iter().find(|scope| self.count(scope) >= places.of(scope))
    }

    fn add(&mut self, number: u64, login: ActiveLogin) {
        for scope in login.path.scopes() {
            *self.counts.entry(scope).or_default() += 1;
        }
        self.active.insert(number, login);
    }

    fn remove(&mut self, number: u64) -> Option<ActiveLogin> {
        let login = self.active.remove(&number)?;
        for scope in login.path.scopes() {
            if let Some(count) = self.counts.get_mut(&scope) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&scope);
                }
            }
        }
        Some(login)
    }

    /// Gives free places to logins in line.
    fn admit_queued(&mut self) {
        loop {
            let able = self.queue.iter().filter(|(_, waiting)| self.full(&waiting.path, &waiting.places).is_none());
            let first = able.min_by_key(|(number, waiting)| (self.count(&Scope::Host(waiting.path.host)), **number));
            let Some(number) = first.map(|(number, _)| *number) else { return };
            let Some(waiting) = self.queue.remove(&number) else { return };
            waiting.admitted.notify_one();
            self.add(number, ActiveLogin { path: waiting.path, owes_since: None, evicted: Arc::default() });
        }
    }

    /// Finds the login that must make way for the one in line: of the address with the most logins, the one whose
    /// client has owed its answer longest.
    fn eviction_candidate(&self, number: u64, grace: Duration) -> Option<u64> {
        let waiting = self.queue.get(&number)?;
        let full = self.full(&waiting.path, &waiting.places)?;
        let now = Instant::now();
        let counts_to = |login: &ActiveLogin| login.path.scopes().contains(&full);
        let owing = self.active.iter().filter(|(_, login)| counts_to(login)).filter_map(|(number, login)| {
            let owes_for = now.saturating_duration_since(login.owes_since?);
            (owes_for >= grace).then(|| (self.count(&Scope::Host(login.path.host)), owes_for, *number))
        });
        owing.max().map(|(_, _, number)| number)
    }
}

impl Logins {
    /// Waits in line until the login may begin.
    pub(crate) async fn enter(self: &Arc<Self>, path: LoginOrigin, places: LoginLimits) -> Place {
        let mut place = self.enqueue(path, places);
        loop {
            if let Some(login) = lock(&self.state).active.get(&place.number) {
                place.evicted = login.evicted.clone();
                break;
            }
            let _ = tokio::time::timeout(CHECK_INTERVAL, place.admitted.notified()).await;
            self.evict_for(place.number);
        }
        place
    }

    fn enqueue(self: &Arc<Self>, path: LoginOrigin, places: LoginLimits) -> Place {
        let admitted = Arc::new(Notify::new());
        let mut state = lock(&self.state);
        state.last += 1;
        let number = state.last;
        state.queue.insert(number, QueuedLogin { path, places, admitted: admitted.clone() });
        state.admit_queued();
        Place { of: self.clone(), number, admitted, evicted: Arc::default() }
    }

    /// Makes one login end for the one in line, if one has used up its time.
    fn evict_for(&self, number: u64) {
        let mut state = lock(&self.state);
        if let Some(eviction_candidate) = state.eviction_candidate(number, self.grace)
            && let Some(login) = state.remove(eviction_candidate)
        {
            self.evictions.fetch_add(1, Ordering::Relaxed);
            login.evicted.notify_one();
            state.admit_queued();
        }
    }

    /// Number of logins under way.
    pub(crate) fn count(&self) -> usize {
        lock(&self.state).active.len()
    }

    /// Number of logins that had to make way.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }
}

impl Place {
    /// Records if the client owes an answer from now on.
    pub(crate) fn client_owes(&self, owes: bool) {
        if let Some(login) = lock(&self.of.state).active.get_mut(&self.number) {
            login.owes_since = owes.then(Instant::now);
        }
    }

    /// Returns when the client has to make way.
    pub(crate) async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = lock(&self.of.state);
        state.queue.remove(&self.number);
        state.remove(self.number);
        state.admit_queued();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: LoginLimits = LoginLimits { all: 100, tenant: 6, address: 2 };
    /// Long enough never to pass in a test.
    const LONG: Duration = Duration::from_secs(3600);

    fn logins(grace: Duration) -> Arc<Logins> {
        Arc::new(Logins { grace, ..Logins::default() })
    }

    fn path(address: &str, tenant: &str) -> LoginOrigin {
        LoginOrigin::new(Origin::Address(address.parse().unwrap()), tenant)
    }

    /// Returns the place if it is free at once.
    async fn now(logins: &Arc<Logins>, address: &str, tenant: &str) -> Option<Place> {
        let entering = logins.enter(path(address, tenant), PLACES);
        tokio::time::timeout(Duration::from_millis(1), entering).await.ok()
    }

    /// Waits for the place.
    async fn soon(logins: &Arc<Logins>, address: &str, tenant: &str) -> Place {
        let entering = logins.enter(path(address, tenant), PLACES);
        tokio::time::timeout(Duration::from_secs(30), entering).await.expect("a place")
    }

    #[test]
    fn logins_leave_room_for_others() {
        const TEXT: &str = "listen = ['/s']\ncontrol = '/c'\nroutes = '/r'\n";
        let config = |limits: &str, connections: &str| {
            let limits = format!("limits = {{ {limits} }}\n[servers.a]\nhost = 'h'\n");
            Config::parse(&format!("{TEXT}{limits}[tenants.shop]\nserver = 'a'\n{connections}")).unwrap()
        };
        let limits = |limits: &str, connections: &str| {
            let (_, places) = places(&config(limits, connections), "shop", Origin::Local).unwrap();
            (places.all, places.tenant, places.address)
        };
        assert_eq!(limits("", ""), (500, 64, 16));
        assert_eq!(limits("", "connections = 8"), (500, 4, 2));
        assert_eq!(limits("connections = 1", ""), (1, 1, 1));
        assert_eq!(limits("logins_per_tenant = 3, logins_per_address = 2", ""), (500, 3, 2));
        assert!(places(&config("", ""), "other", Origin::Local).is_none());
    }

    #[tokio::test]
    async fn one_address_and_one_tenant_have_so_many_and_others_are_not_kept() {
        let logins = logins(LONG);
        let mut held = Vec::new();
        for address in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
            for _ in 0..2 {
                held.push(now(&logins, address, "shop").await.expect("a place"));
            }
            assert!(now(&logins, address, "shop").await.is_none(), "{address}");
        }
        // The tenant is full, for other addresses too; other tenants are free, for those addresses too.
        assert!(now(&logins, "10.0.0.4", "shop").await.is_none());
        assert!(now(&logins, "10.0.0.1", "blog").await.is_some());
        assert_eq!(logins.count(), 6);
        held.pop();
        assert!(now(&logins, "10.0.0.4", "shop").await.is_some());
        held.clear();
        assert_eq!((logins.count(), lock(&logins.state).counts.len()), (0, 0));
    }

    #[tokio::test]
    async fn addresses_of_one_host_are_one() {
        let logins = logins(LONG);
        let _held = [
            now(&logins, "2001:db8::1", "shop").await.expect("a place"),
            now(&logins, "2001:db8::2:1", "shop").await.expect("a place"),
        ];
        assert!(now(&logins, "2001:db8::ffff:3", "shop").await.is_none());
        assert!(now(&logins, "2001:db8:0:1::3", "shop").await.is_some());
        let _more = [
            now(&logins, "10.0.0.1", "shop").await.expect("a place"),
            now(&logins, "::ffff:10.0.0.1", "shop").await.expect("a place"),
        ];
        assert!(now(&logins, "10.0.0.1", "shop").await.is_none());
    }

    #[tokio::test]
    async fn whose_client_is_silent_makes_way_and_whose_server_is_slow_does_not() {
        let logins = logins(Duration::ZERO);
        let (silent, slow) =
            (now(&logins, "10.0.0.1", "shop").await.unwrap(), now(&logins, "10.0.0.1", "shop").await.unwrap());
        assert!(now(&logins, "10.0.0.1", "shop").await.is_none());
        silent.client_owes(true);
        let third = soon(&logins, "10.0.0.1", "shop").await;
        silent.evicted().await;
        // A login that has made way gives nothing back a second time.
        drop(silent);
        assert_eq!((logins.count(), logins.evictions()), (2, 1));
        third.client_owes(true);
        third.client_owes(false);
        let waiting = logins.enter(path("10.0.0.1", "shop"), PLACES);
        assert!(tokio::time::timeout(CHECK_INTERVAL * 3, waiting).await.is_err());
        drop((third, slow));
        assert_eq!(logins.count(), 0);
    }

    #[tokio::test]
    async fn a_client_has_time_to_answer() {
        let logins = logins(LONG);
        let held = [now(&logins, "10.0.0.1", "shop").await.unwrap(), now(&logins, "10.0.0.1", "shop").await.unwrap()];
        held.iter().for_each(|place| place.client_owes(true));
        let waiting = logins.enter(path("10.0.0.1", "shop"), PLACES);
        assert!(tokio::time::timeout(CHECK_INTERVAL * 3, waiting).await.is_err());
        assert_eq!(logins.evictions(), 0);
    }

    #[tokio::test]
    async fn a_full_tenant_is_relieved_of_those_who_have_the_most() {
        let logins = logins(Duration::ZERO);
        let honest = now(&logins, "10.0.0.9", "shop").await.unwrap();
        honest.client_owes(true);
        let mut silent = Vec::new();
        for address in ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.3"] {
            let place = now(&logins, address, "shop").await.unwrap();
            place.client_owes(true);
            silent.push(place);
        }
        let _fresh = soon(&logins, "10.0.0.4", "shop").await;
        assert_eq!(logins.evictions(), 1);
        assert!(lock(&logins.state).active.contains_key(&honest.number), "it has waited longest, and is alone");
    }
}
