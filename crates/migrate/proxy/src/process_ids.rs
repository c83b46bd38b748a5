//! Process ids of a tenant's sessions at one server, where its clients know other ones.
//!
//! A client gets the process id that its server process has at the login. After a switch the session has another server
//! process, and the client still has the first id: by it the client recognizes its own notifications, and those of
//! others. So each notification is passed on with the id that the sender's client has. SQL functions and views
//! (`pg_backend_pid()`, `pg_stat_activity`) show the server's own ids.

use crate::mutex::lock;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time for which the id of a session that has ended is still translated: its last notifications may be under way.
const ENDED_KEEP_TIME: Duration = Duration::from_secs(60);
/// Most ended sessions that are still translated.
const ENDED_MAX: usize = 4096;

/// Process ids at one server that clients know by other ids.
#[derive(Debug, Default)]
pub(crate) struct ProcessIds {
    /// False as long as every client knows its server's own id.
    differ: AtomicBool,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// The clients' ids by the server's.
    of_server: HashMap<u32, u32>,
    of_clients: HashSet<u32>,
    /// The server's ids of ended sessions, oldest first.
    ended: VecDeque<(Instant, u32)>,
}

impl Table {
    fn remove(&mut self, server: u32) {
        if let Some(client) = self.of_server.remove(&server) {
            self.of_clients.remove(&client);
        }
        self.ended.retain(|(_, ended)| *ended != server);
    }

    /// Removes the sessions that ended long ago, and the oldest of too many.
    fn remove_ended(&mut self, now: Instant) {
        while let Some((since, server)) = self.ended.front().copied() {
            if now.saturating_duration_since(since) <= ENDED_KEEP_TIME && self.ended.len() <= ENDED_MAX {
                return;
            }
            self.remove(server);
        }
    }
}

impl ProcessIds {
    /// Id by which clients know the server process.
    #[inline]
    pub(crate) fn of_clients(&self, server: u32) -> u32 {
        if !self.differ.load(Ordering::Acquire) {
            return server;
        }
        lock(&self.table).of_server.get(&server).copied().unwrap_or(server)
    }

    /// Records the process of a session whose client has the id `client`. An earlier process of the same id has ended.
    pub(crate) fn enter(&self, server: u32, client: u32) {
        let mut table = lock(&self.table);
        table.remove(server);
        if server != client {
            table.of_server.insert(server, client);
            table.of_clients.insert(client);
            self.differ.store(true, Ordering::Release);
        }
    }

    /// Returns true if a client has this id, and its server process another one.
    pub(crate) fn is_taken(&self, client: u32) -> bool {
        let mut table = lock(&self.table);
        table.remove_ended(Instant::now());
        table.of_clients.contains(&client)
    }

    /// Records the end of a session.
    pub(crate) fn end(&self, server: u32, client: u32) {
        let mut table = lock(&self.table);
        // The server may have given the id to another process already.
        if table.of_server.get(&server) == Some(&client) && !table.ended.iter().any(|(_, ended)| *ended == server) {
            let now = Instant::now();
            table.ended.push_back((now, server));
            table.remove_ended(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_translated_until_the_server_uses_them_again() {
        let ids = ProcessIds::default();
        ids.enter(7, 7);
        assert_eq!((ids.of_clients(7), ids.is_taken(7)), (7, false));
        ids.enter(8, 7);
        assert_eq!((ids.of_clients(8), ids.of_clients(7), ids.is_taken(7)), (7, 7, true));
        // The last notifications of an ended session may still be under way.
        ids.end(8, 7);
        assert_eq!((ids.of_clients(8), ids.is_taken(7)), (7, true));
        ids.enter(8, 8);
        assert_eq!((ids.of_clients(8), ids.is_taken(7)), (8, false));
        ids.enter(8, 9);
        // A session that ends late does not end its successor.
        ids.end(8, 7);
        assert!(lock(&ids.table).ended.is_empty());
    }

    #[test]
    fn ended_sessions_take_little_memory() {
        let ids = ProcessIds::default();
        let most = ENDED_MAX as u32;
        for server in 1..=2 * most {
            ids.enter(server, server + 10 * most);
            ids.end(server, server + 10 * most);
        }
        let table = lock(&ids.table);
        assert_eq!(
            (table.of_server.len(), table.of_clients.len(), table.ended.len()),
            (ENDED_MAX, ENDED_MAX, ENDED_MAX)
        );
        drop(table);
        assert_eq!((ids.of_clients(1), ids.of_clients(2 * most)), (1, 12 * most));
        let mut table = lock(&ids.table);
        table.remove_ended(Instant::now() + ENDED_KEEP_TIME + Duration::from_secs(1));
        assert_eq!((table.of_server.len(), table.ended.len()), (0, 0));
    }
}
