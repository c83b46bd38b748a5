//! Ports for servers under test.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// First port for servers: below those that the kernel gives to connections (32768 and up, unless configured
/// otherwise).
const FIRST_PORT: u16 = 15_000;
const PORTS: u16 = 17_000;

/// Returns a port of 127.0.0.1 on which no process listens now, a different one at each call; a server that still finds
/// it in use fails to start, and logs so.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Not one that the kernel would choose: it might give it to another connection before the server has it.
    let candidates = std::iter::repeat_with(|| {
        let number = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        FIRST_PORT + (number % u32::from(PORTS)) as u16
    });
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    candidates.take(usize::from(PORTS)).find(free).expect("127.0.0.1 has free ports")
}
