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

mod criu;
mod nftables;
mod owner;

pub(crate) use nftables::{DropScope, Filter, Nftables};
pub use owner::{GUARD_READY_LINE, Gap, guard_connections};
pub(crate) use owner::{GuardOwner, lift_guard, run_owner, start_owner};

use crate::criu_files::connections_of;
use crate::{Error, Image};
use owner::{has_owner, read_gaps};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
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

/// Returns the name of the table that ends with its owner, beside the one of this name.
pub(crate) fn owned_name(name: &str) -> String {
    format!("{name}_owned")
}

/// Returns name, filter and socket of the guard of an image.
fn connections_guard(dir: &Path) -> Result<(String, Filter, PathBuf), Error> {
    let directory = Directory::open(dir)?;
    let connections = connections_of(&directory)?;
    let name = table_name(dir).ok_or_else(|| Error::Unsealed(dir.to_owned()))?;
    let ends: Vec<(SocketAddr, SocketAddr)> = connections.iter().map(|ends| (ends.local, ends.peer)).collect();
    Ok((name, Filter::Connections(ends), dir.join(SOCKET)))
}
