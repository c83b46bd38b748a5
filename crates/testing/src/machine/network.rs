//! A network namespace with one cable: our end of it represents the world outside of the machine.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::Error;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The machine's address on it.
pub(crate) const GUEST: [u8; 4] = [10, 77, 0, 2];
const PREFIX: &str = "stillpoint-";

pub(crate) struct Network {
    pub(crate) name: String,
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {said}", arguments.join(" "))) }
}

impl Network {
    pub(crate) fn make() -> Result<Network, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let name = format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        ip(&["netns", "add", &name])?;
        let network = Network { name };
        let name = network.name.as_str();
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        ip(&["-n", name, "tuntap", "add", "tap0", "mode", "tap"])?;
        ip(&["-n", name, "addr", "add", "10.77.0.1/24", "dev", "tap0"])?;
        ip(&["-n", name, "link", "set", "tap0", "up"])?;
        Ok(network)
    }

    /// Returns an access to one of the machine's ports.
    pub(crate) fn port_access(&self, port: u16) -> PortAccess {
        PortAccess { namespace: PathBuf::from("/run/netns").join(&self.name), port }
    }
}

/// One port of a machine, as seen from outside; any thread may use it.
#[derive(Debug, Clone)]
pub struct PortAccess {
    namespace: PathBuf,
    port: u16,
}

impl PortAccess {
    /// Connects to the machine, inside the namespace: a socket stays where it was made.
    ///
    /// # Errors
    /// The machine does not accept the connection within the time limit.
    pub fn connect(&self, timeout: Duration) -> Result<TcpStream, Error> {
        let (path, port) = (self.namespace.clone(), self.port);
        let connecting = std::thread::spawn(move || {
            let namespace = File::open(&path)?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            TcpStream::connect_timeout(&SocketAddr::from((GUEST, port)), timeout)
        });
        connecting.join().unwrap_or_else(|_| Err(Error::other("the thread that connects panicked")))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // its processes have ended; if not, `sweep` of a later test finds it
        let _ = ip(&["netns", "del", &self.name]);
    }
}

/// Removes namespaces that tests that were killed have left.
fn sweep() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()) else { continue };
        if pid.parse::<u32>().is_ok() && !PathBuf::from("/proc").join(pid).exists() {
            let _ = ip(&["netns", "del", &name]);
        }
    }
}
