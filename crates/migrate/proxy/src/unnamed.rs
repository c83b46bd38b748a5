//! Connections that have not said who they are. They cost nothing but open files, and anybody can make them: there is a
//! limit, at which whoever has waited longest makes way for the next. A client says who it is within a round trip or a few.

use crate::entry::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// All of them, by the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Unnamed {
    waiting: Mutex<(u64, BTreeMap<u64, Arc<Notify>>)>,
    turned_away: AtomicU64,
}

/// The place of one; free again when dropped.
#[derive(Debug)]
pub(crate) struct Place<'u> {
    of: &'u Unnamed,
    number: u64,
    called: Arc<Notify>,
}

impl Unnamed {
    /// A place among `most`.
    pub(crate) fn enter(&self, most: usize) -> Place<'_> {
        let called = Arc::new(Notify::new());
        let mut waiting = lock(&self.waiting);
        waiting.0 += 1;
        let number = waiting.0;
        waiting.1.insert(number, called.clone());
        while waiting.1.len() > most
            && let Some((_, longest)) = waiting.1.pop_first()
        {
            self.turned_away.fetch_add(1, Ordering::Relaxed);
            longest.notify_one();
        }
        Place { of: self, number, called }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        lock(&self.waiting).1.len()
    }

    /// How many had to make way.
    pub(crate) fn turned_away(&self) -> u64 {
        self.turned_away.load(Ordering::Relaxed)
    }
}

impl Place<'_> {
    /// Comes to an end when this one must make way.
    pub(crate) async fn makes_way(&self) {
        self.called.notified().await;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(&self.of.waiting).1.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_longest_waiting_makes_way() {
        let unnamed = Unnamed::default();
        let (first, second) = (unnamed.enter(2), unnamed.enter(2));
        assert_eq!((unnamed.count(), unnamed.turned_away()), (2, 0));
        let third = unnamed.enter(2);
        first.makes_way().await;
        drop((first, third));
        assert_eq!((unnamed.count(), unnamed.turned_away()), (1, 1));
        let _fourth = unnamed.enter(1);
        second.makes_way().await;
    }
}
