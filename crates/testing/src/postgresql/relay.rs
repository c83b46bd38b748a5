//! A network between two ends that can be cut, stalled and slowed.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Bytes that are forwarded at once if the rate is limited: few, so that the rate holds over short times too.
const RATE_CHUNK_BYTES: usize = 16 << 10;

/// A port of 127.0.0.1 that forwards to another one, while the network between them works.
#[derive(Debug)]
pub struct Relay {
    port: u16,
    network: Arc<Network>,
}

#[derive(Debug)]
struct Network {
    to: u16,
    stalled: AtomicBool,
    cut: AtomicBool,
    over: AtomicBool,
    /// Bytes a second in each direction of each connection; 0 is unlimited.
    rate: AtomicU64,
    made: AtomicU64,
    /// Both ends of every connection, to be cut.
    ends: Mutex<HashMap<u64, [TcpStream; 2]>>,
}

impl Relay {
    /// Starts a working network to `port` of 127.0.0.1.
    #[track_caller]
    pub fn to(port: u16) -> Relay {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, crate::port::free_port())).expect("listen on a free port");
        let network = Arc::new(Network {
            to: port,
            stalled: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            over: AtomicBool::new(false),
            rate: AtomicU64::new(0),
            made: AtomicU64::new(0),
            ends: Mutex::default(),
        });
        let relay = Relay {
            port: listener.local_addr().expect("a listener has an address").port(),
            network: Arc::clone(&network),
        };
        std::thread::spawn(move || network.serve(&listener));
        relay
    }

    /// Returns the port on which it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Ends all connections, and allows no others until the network is restored.
    pub fn cut(&self) {
        self.network.cut.store(true, Ordering::SeqCst);
        self.network.hang_up();
    }

    /// Keeps all connections and forwards nothing until the network is restored.
    pub fn stall(&self) {
        self.network.stalled.store(true, Ordering::SeqCst);
    }

    /// Limits the bytes a second in each direction of each connection; 0 is unlimited.
    pub fn slow_down(&self, bytes_per_s: u64) {
        self.network.rate.store(bytes_per_s, Ordering::SeqCst);
    }

    /// Restores the network after [`Relay::cut`] or [`Relay::stall`]; a limited rate stays.
    pub fn restore(&self) {
        self.network.cut.store(false, Ordering::SeqCst);
        self.network.stalled.store(false, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.network.over.store(true, Ordering::SeqCst);
        self.network.hang_up();
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

impl Network {
    fn ends(&self) -> MutexGuard<'_, HashMap<u64, [TcpStream; 2]>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hang_up(&self) {
        for end in self.ends().drain().flat_map(|(_, ends)| ends) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    fn serve(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming().flatten() {
            if self.over.load(Ordering::SeqCst) {
                return;
            }
            if !self.cut.load(Ordering::SeqCst) {
                // If the other end cannot be reached, the connection is refused.
                let _ = self.join(client);
            }
        }
    }

    fn join(self: &Arc<Self>, client: TcpStream) -> std::io::Result<()> {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.to))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        self.ends().insert(number, [client.try_clone()?, server.try_clone()?]);
        for (from, to) in [(client.try_clone()?, server.try_clone()?), (server, client)] {
            let network = Arc::clone(self);
            std::thread::spawn(move || network.pass_on(number, from, to));
        }
        Ok(())
    }

    fn pass_on(&self, number: u64, mut from: TcpStream, mut to: TcpStream) {
        let mut piece = [0; RATE_CHUNK_BYTES];
        while let Ok(read @ 1..) = from.read(&mut piece) {
            while self.stalled.load(Ordering::SeqCst) && !self.over.load(Ordering::SeqCst) {
                std::thread::sleep(POLL_INTERVAL);
            }
            let rate = self.rate.load(Ordering::Relaxed);
            if rate > 0 {
                std::thread::sleep(Duration::from_secs_f64(read as f64 / rate as f64));
            }
            if to.write_all(&piece[..read]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
        self.ends().remove(&number);
    }
}
