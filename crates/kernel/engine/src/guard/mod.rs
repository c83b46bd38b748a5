//! Guards in front of connections whose processes do not run: packets are dropped, so that peers wait. Without a guard the
//! kernel answers them with resets.
//!
//! The flag `persist` (Linux 6.9) would not replace the second table: a table without its owner can be flushed, and Debian 12 has 6.1.
//! Filters of tc or XDP would need one for each interface before it has an address. A generator of systemd ends, so a service owns the second
//! table. A drop-in for all services (`service.d`) makes each of them start after it, because any service may flush.
//!
//! ```text
//!  table NAME         any process may remove it (`nft flush ruleset`); it stays when its maker is killed
//!  table NAME_owned   only its owner can remove it; it ends when the owner is killed
//! ```
//!
//! Both drop the same packets. So neither a reload of a firewall nor a killed process leaves a connection unguarded:
//! that takes both. The owner (the *keeper*) makes the first table again when it has been removed. If both were missing
//! for a while the keeper reports it.

mod criu;
mod keeper;
mod nftables;

pub use keeper::{Gap, RAISED, keep_connections};
pub(crate) use keeper::{Keeper, keep, keep_image, lift_at};
pub(crate) use nftables::{Filter, Nftables, Wall};

use crate::{Error, Image};
use keeper::{gaps, is_kept};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::tcp::connections;

/// Prefixes of the names of guards' tables: criu's, and ours.
const PREFIXES: [&str; 2] = ["CRIU-", "stillpoint_"];
/// Name of the keeper's socket in the directory of an image.
const SOCKET: &str = "guard.sock";
/// Limit in bytes for a file of criu about connections.
const FILE_MAX: u64 = 1 << 30;

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
pub(crate) struct OfImage {
    /// Name of a table that exists.
    pub(crate) table: Option<String>,
    /// Reason why its connections are not guarded, or a way in which they could lose their guard.
    pub(crate) warning: Option<String>,
}

/// Examines the guard of the connections in an image.
///
/// # Errors
/// The kernel does not list its tables.
pub(crate) fn of_image(dir: &Path) -> Result<OfImage, Error> {
    let found = criu::table_of(dir)?;
    let socket = dir.join(SOCKET);
    let Some(name) = socket.exists().then(|| name_of(dir)).flatten() else {
        return Ok(OfImage { table: found, warning: None });
    };
    let nftables = Nftables::open()?;
    let stands = nftables.stands(&name)? || nftables.stands(&owned(&name))?;
    let missing = gaps(&socket).last().map(Gap::text);
    let warning = if !stands && found.is_none() {
        Some("the guard is missing: peers that send are answered with resets".into())
    } else if !is_kept(&socket) {
        Some("the keeper of the guard has ended: the next flush of nftables takes the guard away".into())
    } else {
        missing
    };
    Ok(OfImage { table: found.or_else(|| stands.then_some(name)), warning })
}

/// Removes the tables that guard the connections in an image; returns the name of one that existed.
///
/// # Errors
/// A table cannot be removed.
pub(crate) fn lift(dir: &Path) -> Result<Option<String>, Error> {
    let of_criu = criu::lift(dir)?;
    let socket = dir.join(SOCKET);
    let Some(name) = socket.exists().then(|| name_of(dir)).flatten() else { return Ok(of_criu) };
    let stood = lift_at(&socket, &name)?.stood;
    Ok(of_criu.or_else(|| stood.then_some(name)))
}

/// Returns the name of the table of an image, by its sealed index.
fn name_of(dir: &Path) -> Option<String> {
    let image = Image::open(dir).ok()?;
    let origin = &image.index().origin;
    Some(format!("stillpoint_{}_{}", origin.pid, origin.made_s))
}

/// Returns the name of the table that ends with its owner, beside the one of this name.
pub(crate) fn owned(name: &str) -> String {
    format!("{name}_owned")
}

/// Returns name, filter and socket of the guard of an image.
fn of_connections(dir: &Path) -> Result<(String, Filter, PathBuf), Error> {
    let directory = Directory::open(dir)?;
    let connections = connections(&directory.read("files.img", FILE_MAX)?)?;
    let name = name_of(dir).ok_or_else(|| Error::Unsealed(dir.to_owned()))?;
    let ends: Vec<(SocketAddr, SocketAddr)> = connections.iter().map(|ends| (ends.local, ends.peer)).collect();
    Ok((name, Filter::Connections(ends), dir.join(SOCKET)))
}
