//! Clients that repeat one step until one fails or the test ends them.

use super::MariaDb;
use super::client::Client;
use crate::wait;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Step that a client repeats; an error ends the client.
pub type Step = Box<dyn FnMut() -> Result<(), String> + Send>;

/// Threads that repeat a step.
#[derive(Debug)]
pub struct ClientLoop {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<(), String>>>,
}

impl ClientLoop {
    /// Starts `count` of them, each with a step of its own.
    pub fn start(count: usize, make: impl Fn(usize) -> Step) -> ClientLoop {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let start = |number| {
            let (mut step, stop, done) = (make(number), Arc::clone(&stop), Arc::clone(&done));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    step()?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        let threads = (0..count).map(start).collect();
        ClientLoop { stop, done, threads }
    }

    /// Starts clients that connect, send one request, and disconnect.
    pub fn visitors(mariadb: &MariaDb) -> ClientLoop {
        let socket = mariadb.socket();
        ClientLoop::start(2, |_| {
            let socket = socket.clone();
            Box::new(move || {
                let mut client = Client::connect(&socket, "test").map_err(|e| format!("a new connection: {e}"))?;
                client.done("SELECT 1").map(drop).map_err(|e| format!("a new connection's statement: {e}"))
            })
        })
    }

    /// Waits until the clients together have made the step `count` times more.
    #[track_caller]
    pub fn more(&self, count: u64) {
        let before = self.done.load(Ordering::Relaxed);
        wait::until("clients to get on", || {
            let ended = self.threads.iter().any(JoinHandle::is_finished);
            (ended || self.done.load(Ordering::Relaxed) >= before + count).then_some(())
        });
    }

    /// Ends it, panics if a step failed, and returns the number of steps.
    #[track_caller]
    pub fn assert_clean(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a client does not panic").unwrap_or_else(|e| panic!("{e}"));
        }
        self.done.load(Ordering::Relaxed)
    }
}
