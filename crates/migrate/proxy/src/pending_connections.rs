//! Connections that have not named their user, or have and wait in line for their login. They cost only open files, but
//! any client can open them, so their number is limited. At the limit the oldest connection of the address that has the
//! most makes way for the next. A client names its user within a few round trips.

use crate::mutex::lock;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use stillpoint_migrate_control::Origin;
use tokio::sync::{Notify, OwnedSemaphorePermit};

/// Permit that limits the connections on their way from the accepting task; released on arrival.
pub(crate) type Arrival = OwnedSemaphorePermit;

#[derive(Debug, Default)]
struct State {
    last: u64,
    /// Waiting connections of each address, in the order of their arrival.
    waiting: HashMap<Origin, BTreeMap<u64, Arc<Notify>>>,
    count: usize,
}

impl State {
    /// Removes one connection, if it is there.
    fn remove(&mut self, host: Origin, number: u64) -> Option<Arc<Notify>> {
        let of_host = self.waiting.get_mut(&host)?;
        let removed = of_host.remove(&number)?;
        if of_host.is_empty() {
            self.waiting.remove(&host);
        }
        self.count -= 1;
        Some(removed)
    }

    /// The oldest connection of the address that has the most.
    fn oldest(&self) -> Option<(Origin, u64)> {
        let first = |(host, of_host): (&Origin, &BTreeMap<u64, _>)| Some((*host, *of_host.first_key_value()?.0));
        self.waiting.iter().max_by_key(|(_, of_host)| of_host.len()).and_then(first)
    }
}

/// All such connections.
#[derive(Debug, Default)]
pub(crate) struct PendingConnections {
    state: Mutex<State>,
    evictions: AtomicU64,
}

/// The place of one connection; free again when dropped.
#[derive(Debug)]
pub(crate) struct Place<'u> {
    of: &'u PendingConnections,
    host: Origin,
    number: u64,
    notify: Arc<Notify>,
}

impl PendingConnections {
    /// Enters a place among `most`.
    pub(crate) fn enter(&self, origin: Origin, most: usize) -> Place<'_> {
        let (host, notify) = (origin.host(), Arc::new(Notify::new()));
        let mut state = lock(&self.state);
        state.last += 1;
        let number = state.last;
        state.waiting.entry(host).or_default().insert(number, notify.clone());
        state.count += 1;
        while state.count > most
            && let Some((host, number)) = state.oldest()
            && let Some(oldest) = state.remove(host, number)
        {
            self.evictions.fetch_add(1, Ordering::Relaxed);
            oldest.notify_one();
        }
        Place { of: self, host, number, notify }
    }

    /// Number of such connections.
    pub(crate) fn count(&self) -> usize {
        lock(&self.state).count
    }

    /// Number of connections that had to make way.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }
}

impl Place<'_> {
    /// Returns when this connection must make way.
    pub(crate) async fn evicted(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(&self.of.state).remove(self.host, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_longest_waiting_makes_way() {
        let unnamed = PendingConnections::default();
        let enter = |most| unnamed.enter(Origin::Local, most);
        let (first, second) = (enter(2), enter(2));
        assert_eq!((unnamed.count(), unnamed.evictions()), (2, 0));
        let third = enter(2);
        first.evicted().await;
        drop((first, third));
        assert_eq!((unnamed.count(), unnamed.evictions()), (1, 1));
        let _fourth = enter(1);
        second.evicted().await;
    }

    #[tokio::test]
    async fn of_the_address_that_has_the_most() {
        let unnamed = PendingConnections::default();
        let enter = |address: &str| unnamed.enter(Origin::Address(address.parse().unwrap()), 3);
        let alone = enter("10.0.0.1");
        let (first, _second, _third) = (enter("10.0.0.2"), enter("10.0.0.2"), enter("10.0.0.2"));
        first.evicted().await;
        let made_way = tokio::time::timeout(std::time::Duration::from_millis(1), alone.evicted());
        assert!(made_way.await.is_err());
        assert_eq!(unnamed.count(), 3);
    }
}
