//! Guards in front of connections whose processes do not run: packets are dropped, so that peers wait. Without a guard the
//! kernel answers them with resets.
//!
//! ```text
//!  table NAME         any process may remove it (`nft flush ruleset`); it stays when its maker is killed
//!  table NAME_owned   only its owner can remove it; it ends when the owner is killed
//! ```
//!
//! Both drop the same packets. So neither a reload of a firewall nor a killed process leaves a connection unguarded:
//! that takes both. The owner makes the first table again when it has been removed. If both were missing
//! for a while, the owner reports it.
//!
//! The flag `persist` (Linux 6.9) would not replace the second table: a table without its owner can be flushed, and Debian 12 has 6.1.
//! Filters of tc or XDP would need one for each interface before it has an address. A generator of systemd ends, so a service owns the second
//! table. A drop-in for all services (`service.d`) makes each of them start after it, because any service may flush.

mod criu;
mod nftables;
mod owner;
mod ports;

pub use nftables::DropScope;
pub(crate) use owner::start_owner;
pub use owner::{GUARD_READY_LINE, Gap, LiftedGuard};
pub use ports::PortGuard;

use crate::criu_files::connections_of;
use crate::{Error, Image};
use nftables::{Filter, Nftables};
use owner::{GuardOwner, has_owner, lift_guard, owned_name, read_gaps, run_owner};
use std::net::SocketAddr;
use std::path::Path;
use stillpoint_host::trusted::Directory;

/// Prefixes of the names of guards' tables: criu's, and ours.
const PREFIXES: [&str; 2] = ["CRIU-", "stillpoint_"];
/// Name of the owner's socket in the directory of an image.
const SOCKET: &str = "guard.sock";

/// Lists the existing tables of guards: criu's, and ours.
///
/// # Errors
/// The kernel does not list its tables.
pub fn guards() -> Result<Vec<String>, Error> {
    let mut names = Nftables::open()?.tables()?;
    names.retain(|name| PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
    Ok(names)
}

/// State of the guard of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageGuard {
    /// Name of a table that exists.
    pub(crate) table: Option<String>,
    /// Reason why its connections are not guarded, or a way in which they could lose their guard.
    pub(crate) warning: Option<String>,
}

/// Examines the guard of the connections in an image.
///
/// # Errors
/// The kernel does not list its tables.
pub(crate) fn inspect_image(dir: &Path) -> Result<ImageGuard, Error> {
    let found = criu::find_table(dir)?;
    let socket = dir.join(SOCKET);
    let Some(name) = socket.exists().then(|| table_name(dir)).flatten() else {
        return Ok(ImageGuard { table: found, warning: None });
    };
    let nftables = Nftables::open()?;
    let is_active = nftables.is_active(&name)? || nftables.is_active(&owned_name(&name))?;
    let missing = read_gaps(&socket).last().map(Gap::text);
    let warning = if !is_active && found.is_none() {
        Some("the guard is missing: the kernel answers packets of peers with resets".into())
    } else if !has_owner(&socket) {
        Some("the owner process of the guard has ended: the next flush of nftables removes the guard".into())
    } else {
        missing
    };
    Ok(ImageGuard { table: found.or_else(|| is_active.then_some(name)), warning })
}

/// Removes the tables that guard the connections in an image; returns the name of one that existed.
///
/// # Errors
/// A table cannot be removed.
pub(crate) fn lift(dir: &Path) -> Result<Option<String>, Error> {
    let of_criu = criu::remove_table(dir)?;
    let socket = dir.join(SOCKET);
    let Some(name) = socket.exists().then(|| table_name(dir)).flatten() else { return Ok(of_criu) };
    let was_active = lift_guard(&socket, &name)?.was_active;
    Ok(of_criu.or_else(|| was_active.then_some(name)))
}

/// Returns the name of the table of an image, by its sealed index.
fn table_name(dir: &Path) -> Option<String> {
    let image = Image::open(dir).ok()?;
    let origin = &image.index().origin;
    Some(format!("stillpoint_{}_{}", origin.pid, origin.made_s))
}

/// Guards the connections in an image until it gets the order to lift the guard, or the image is removed. `on_ready` is
/// called when the guard is up.
///
/// # Errors
/// The kernel does not make the tables, or another owner exists.
pub fn guard_connections(image: &Path, on_ready: impl FnOnce()) -> Result<(), Error> {
    let connections = connections_of(&Directory::open(image)?)?;
    let name = table_name(image).ok_or_else(|| Error::Unsealed(image.to_owned()))?;
    let ends: Vec<(SocketAddr, SocketAddr)> = connections.iter().map(|ends| (ends.local, ends.peer)).collect();
    let (filter, socket) = (Filter::Connections(ends), image.join(SOCKET));
    run_owner(GuardOwner { name, filter, socket, was_raised: false }, on_ready)
}
