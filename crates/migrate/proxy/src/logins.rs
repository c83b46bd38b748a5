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

use crate::config::{ANY, Config, Limits, Origin};
use crate::entry::lock;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Time that a client has for an answer, no matter how many wait for its place.
const GRACE: Duration = Duration::from_secs(1);
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
pub(crate) struct Places {
    /// All logins together.
    pub(crate) all: usize,
    /// Logins to one tenant.
    pub(crate) tenant: usize,
    /// Logins to one tenant from one address.
    pub(crate) address: usize,
}

impl Places {
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
pub(crate) struct Path {
    host: Origin,
    tenant: Arc<str>,
}

/// Origin and tenant of a client's login, with the limits for them; `None` if there is no such tenant.
pub(crate) fn places(config: &Config, database: &str, origin: Origin) -> Option<(Path, Places)> {
    let tenant = config.tenant(database)?;
    // The name in the configuration: clients may use any number of names for `*`.
    let name = if config.tenants.contains_key(database) { database } else { ANY };
    let Limits { connections, logins_per_tenant, logins_per_address, .. } = config.limits;
    // The limits leave room for sessions that begin from other addresses.
    let sessions = tenant.connections.unwrap_or(connections).min(connections);
    let places = Places {
        all: (connections / 2).max(1),
        tenant: logins_per_tenant.min(sessions / 2).max(1),
        address: logins_per_address.min(sessions / 4).max(1),
    };
    Some((Path::new(origin, name), places))
}

impl Path {
    fn new(origin: Origin, tenant: &str) -> Path {
        Path { host: origin.host(), tenant: tenant.into() }
    }

    fn scopes(&self) -> [Scope; 4] {
        let tenant = || self.tenant.clone();
        [Scope::Address(self.host, tenant()), Scope::Host(self.host), Scope::Tenant(tenant()), Scope::All]
    }
}

#[derive(Debug)]
struct Waiting {
    path: Path,
    places: Places,
    begins: Arc<Notify>,
}

#[derive(Debug)]
struct UnderWay {
    path: Path,
    /// Time since which its client owes an answer.
    owes_since: Option<Instant>,
    makes_way: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    in_line: BTreeMap<u64, Waiting>,
    under_way: BTreeMap<u64, UnderWay>,
    counts: HashMap<Scope, usize>,
}

/// All logins, in the order of their arrival.
#[derive(Debug)]
pub(crate) struct Logins {
    state: Mutex<State>,
    turned_away: AtomicU64,
    grace: Duration,
}

impl Default for Logins {
    fn default() -> Self {
        Logins { state: Mutex::default(), turned_away: AtomicU64::new(0), grace: GRACE }
    }
}

/// The place of a login, in line or under way; free again when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    of: Arc<Logins>,
    number: u64,
    begins: Arc<Notify>,
    makes_way: Arc<Notify>,
}

impl State {
    fn count(&self, scope: &Scope) -> usize {
        self.counts.get(scope).copied().unwrap_or(0)
    }

    /// The first limit that a login has to wait for, if any.
    fn full(&self, path: &Path, places: &Places) -> Option<Scope> {
        path.scopes().into_iter().find(|scope| self.count(scope) >= places.of(scope))
    }

    fn add(&mut self, number: u64, login: UnderWay) {
        for scope in login.path.scopes() {
            *self.counts.entry(scope).or_default() += 1;
        }
        self.under_way.insert(number, login);
    }

    fn remove(&mut self, number: u64) -> Option<UnderWay> {
        let login = self.under_way.remove(&number)?;
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
    fn give(&mut self) {
        loop {
            let able = self.in_line.iter().filter(|(_, waiting)| self.full(&waiting.path, &waiting.places).is_none());
            let first = able.min_by_key(|(number, waiting)| (self.count(&Scope::Host(waiting.path.host)), **number));
            let Some(number) = first.map(|(number, _)| *number) else { return };
            let Some(waiting) = self.in_line.remove(&number) else { return };
            waiting.begins.notify_one();
            self.add(number, UnderWay { path: waiting.path, owes_since: None, makes_way: Arc::default() });
        }
    }

    /// Finds the login that must make way for the one in line: of the address with the most logins, the one whose
    /// client has owed its answer longest.
    fn victim(&self, number: u64, grace: Duration) -> Option<u64> {
        let waiting = self.in_line.get(&number)?;
        let full = self.full(&waiting.path, &waiting.places)?;
        let now = Instant::now();
        let counts_to = |login: &UnderWay| login.path.scopes().contains(&full);
        let owing = self.under_way.iter().filter(|(_, login)| counts_to(login)).filter_map(|(number, login)| {
            let owes_for = now.saturating_duration_since(login.owes_since?);
            (owes_for >= grace).then(|| (self.count(&Scope::Host(login.path.host)), owes_for, *number))
        });
        owing.max().map(|(_, _, number)| number)
    }
}

impl Logins {
    /// Waits in line until the login may begin.
    pub(crate) async fn enter(self: &Arc<Self>, path: Path, places: Places) -> Place {
        let mut place = self.line_up(path, places);
        loop {
            if let Some(login) = lock(&self.state).under_way.get(&place.number) {
                place.makes_way = login.makes_way.clone();
                break;
            }
            let _ = tokio::time::timeout(CHECK_INTERVAL, place.begins.notified()).await;
            self.relieve(place.number);
        }
        place
    }

    fn line_up(self: &Arc<Self>, path: Path, places: Places) -> Place {
        let begins = Arc::new(Notify::new());
        let mut state = lock(&self.state);
        state.last += 1;
        let number = state.last;
        state.in_line.insert(number, Waiting { path, places, begins: begins.clone() });
        state.give();
        Place { of: self.clone(), number, begins, makes_way: Arc::default() }
    }

    /// Makes one login end for the one in line, if one has used up its time.
    fn relieve(&self, number: u64) {
        let mut state = lock(&self.state);
        if let Some(victim) = state.victim(number, self.grace)
            && let Some(login) = state.remove(victim)
        {
            self.turned_away.fetch_add(1, Ordering::Relaxed);
            login.makes_way.notify_one();
            state.give();
        }
    }

    /// Number of logins under way.
    pub(crate) fn count(&self) -> usize {
        lock(&self.state).under_way.len()
    }

    /// Number of logins that had to make way.
    pub(crate) fn turned_away(&self) -> u64 {
        self.turned_away.load(Ordering::Relaxed)
    }
}

impl Place {
    /// Records if the client owes an answer from now on.
    pub(crate) fn client_owes(&self, owes: bool) {
        if let Some(login) = lock(&self.of.state).under_way.get_mut(&self.number) {
            login.owes_since = owes.then(Instant::now);
        }
    }

    /// Returns when the client has to make way.
    pub(crate) async fn makes_way(&self) {
        self.makes_way.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = lock(&self.of.state);
        state.in_line.remove(&self.number);
        state.remove(self.number);
        state.give();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: Places = Places { all: 100, tenant: 6, address: 2 };
    /// Long enough never to pass in a test.
    const LONG: Duration = Duration::from_secs(3600);

    fn logins(grace: Duration) -> Arc<Logins> {
        Arc::new(Logins { grace, ..Logins::default() })
    }

    fn path(address: &str, tenant: &str) -> Path {
        Path::new(Origin::Address(address.parse().unwrap()), tenant)
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
        silent.makes_way().await;
        // A login that has made way gives nothing back a second time.
        drop(silent);
        assert_eq!((logins.count(), logins.turned_away()), (2, 1));
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
        assert_eq!(logins.turned_away(), 0);
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
        assert_eq!(logins.turned_away(), 1);
        assert!(lock(&logins.state).under_way.contains_key(&honest.number), "it has waited longest, and is alone");
    }
}
