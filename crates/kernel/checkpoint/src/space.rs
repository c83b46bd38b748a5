//! Space on a file system for the memory of processes.

use crate::Error;
use crate::error::ErrorContext;
use crate::process_tree::tree;
use std::path::Path;

/// Refuses images that do not fit on their file system: memory is written as it is, without compression.
///
/// # Errors
/// There is not enough space, or a process does not exist.
pub fn check_space(pids: impl IntoIterator<Item = i32>, image: &Path) -> Result<(), Error> {
    let nearest = nearest_existing(image);
    let room = rustix::fs::statvfs(nearest).at("examine", nearest)?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    let needed = pids.into_iter().map(memory_bytes).sum::<Result<u64, Error>>()?;
    if needed > free {
        let (needed, free) = (needed >> 20, free >> 20);
        let text = format!("{} has {free} MiB free, the image needs up to {needed}", nearest.display());
        return Err(Error::refused(text));
    }
    Ok(())
}

/// Returns the nearest directory that exists.
pub fn nearest_existing(path: &Path) -> &Path {
    let nearest = path.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    if nearest.as_os_str().is_empty() { Path::new(".") } else { nearest }
}

/// Returns the bytes of memory of a process and all below it.
///
/// # Errors
/// The process does not exist.
pub fn memory_bytes(pid: i32) -> Result<u64, Error> {
    let statuses: Vec<_> = tree(pid)?.iter().filter_map(|process| process.status().ok()).collect();
    let own = |status: &procfs::process::Status| status.rssanon.unwrap_or(0) + status.vmswap.unwrap_or(0);
    // each process counts the same shared memory
    let shared = statuses.iter().filter_map(|status| status.rssshmem).max().unwrap_or(0);
    Ok((statuses.iter().map(own).sum::<u64>() + shared) * 1024)
}
