//! Ports for servers under test.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports for servers: below those that the kernel gives to connections (32768 and up, unless configured otherwise).
const FIRST_PORT: u16 = 15_000;
const PORTS: u16 = 17_000;

/// A port of 127.0.0.1 on which nothing listens now, and another one at each call; a server that still finds it taken
/// fails to start, and says so in its log.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Not one that the kernel would choose: it might give it to somebody's connection before the server has it.
    let candidates = std::iter::repeat_with(|| {
        let number = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        FIRST_PORT + (number % u32::from(PORTS)) as u16
    });
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    candidates.take(usize::from(PORTS)).find(free).expect("127.0.0.1 has free ports")
}
