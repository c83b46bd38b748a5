//! Local addresses that sockets of an image are bound to. A restore needs them, and on a machine that starts they may
//! be late: from DHCP, on a bond, or after IPv6 has checked for duplicates.
//!
//! The test uses `bind`, as criu does later. The kernel refuses an address that is tentative, and accepts one that may
//! be bound without being there (`ip_nonlocal_bind`).

use crate::criu_files::read_files_image;
use crate::{Error, Image};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::time::{Duration, Instant};
use stillpoint_kernel_criu::tcp::{Local, locals};

/// Time for which a restore waits for addresses, unless another one is given: DHCP has retried several times by then.
pub const ADDRESS_TIMEOUT: Duration = Duration::from_secs(120);

/// Time between two tests.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Lists the addresses of an image that this machine does not have, or not yet.
///
/// # Errors
/// The image does not list its sockets.
pub(crate) fn missing_addresses(image: &Image) -> Result<Vec<String>, Error> {
    Ok(missing(&locals(&read_files_image(image.directory())?)?))
}

/// Waits until all addresses of an image are there. `report` is called once, with the addresses that are missing.
///
/// # Errors
/// An address is not there within the limit; nothing has been restored.
pub(crate) fn wait(image: &Image, limit: Duration, report: impl Fn(String)) -> Result<(), Error> {
    let locals = locals(&read_files_image(image.directory())?)?;
    let begun = Instant::now();
    let mut is_reported = false;
    loop {
        let missing = missing(&locals);
        if missing.is_empty() {
            return Ok(());
        }
        let missing = missing.join(", ");
        if begun.elapsed() >= limit {
            let why = format!("{missing} is not an address of this machine, after {} s", limit.as_secs());
            return Err(Error::Step { what: "restore sockets", why });
        }
        if !std::mem::replace(&mut is_reported, true) {
            report(format!("waits up to {} s for the addresses that the image needs: {missing}", limit.as_secs()));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn missing(locals: &[Local]) -> Vec<String> {
    locals.iter().filter(|local| !is_bindable(local)).map(display_text).collect()
}

fn display_text(local: &Local) -> String {
    match &local.interface {
        Some(interface) => format!("{}%{interface}", local.address),
        None => local.address.to_string(),
    }
}

/// Returns true if a socket can be bound to an address now, or if `bind` fails for a reason that is left to criu.
fn is_bindable(local: &Local) -> bool {
    let to: SocketAddr = match (local.address, &local.interface) {
        (IpAddr::V6(address), Some(interface)) => match index(interface) {
            Some(index) => SocketAddrV6::new(address, 0, 0, index).into(),
            None => return false,
        },
        (address, _) => SocketAddr::new(address, 0),
    };
    !UdpSocket::bind(to).is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
}

fn index(interface: &str) -> Option<u32> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None).ok()?;
    rustix::net::netdevice::name_to_index(socket, interface).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_there_when_it_can_be_bound() {
        let there = |address: &str, interface: Option<&str>| {
            is_bindable(&Local { address: address.parse().unwrap(), interface: interface.map(ToOwned::to_owned) })
        };
        assert!(there("127.0.0.1", None));
        // 192.0.2.0/24 is for documentation (RFC 5737)
        assert!(!there("192.0.2.1", None));
        assert!(!there("fe80::1", Some("no-such-if")));
    }
}
