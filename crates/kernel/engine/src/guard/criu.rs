//! criu's own rules of nftables: packets of connections whose processes do not run are dropped. criu takes them away again. If it
//! is killed we do, those and no others.
//!
//! A table is called by the number of the run of criu that made it, cut off at what fits into criu's buffer.

use super::nftables::Nftables;
use crate::Error;
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::image::run_id;

/// Bytes of a file in which a run of criu's is named.
const FILE_MAX: u64 = 256 << 20;

/// criu's buffer for `inet NAME`, with the end of the string.
const LONGEST: usize = 31 - "inet ".len();
/// Words before the number of a run in criu's logs.
const RUN: &str = "CRIU run id = ";

/// Name of the table that the checkpoint in a directory had criu make, if it stands.
///
/// # Errors
/// The kernel does not list its tables.
pub(super) fn table_of(dir: &Path) -> Result<Option<String>, Error> {
    let names: Vec<String> = runs(dir).iter().map(|run| table(run)).collect();
    if names.is_empty() {
        return Ok(None);
    }
    Ok(Nftables::open()?.tables()?.into_iter().find(|name| names.contains(name)))
}

/// Takes away the table that the checkpoint in a directory had criu make; returns its name if it stood.
///
/// # Errors
/// The kernel does not list its tables, or does not take this one away.
pub(super) fn lift(dir: &Path) -> Result<Option<String>, Error> {
    match table_of(dir)? {
        Some(name) => Ok(Nftables::open()?.take_away(&name)?.then_some(name)),
        None => Ok(None),
    }
}

/// The runs of criu that dumped into a directory: by its log, and by what it says of itself in the image.
fn runs(dir: &Path) -> Vec<String> {
    // in another user's directory the run may be any
    let Ok(directory) = Directory::open(dir) else { return Vec::new() };
    let log = directory.read(crate::checkpoint::DUMP_LOG, FILE_MAX).unwrap_or_default();
    let inventory = directory.read("inventory.img", FILE_MAX).unwrap_or_default();
    let logged: Vec<String> = runs_in(&String::from_utf8_lossy(&log)).map(ToOwned::to_owned).collect();
    logged.into_iter().chain(run_id(&inventory).ok().flatten()).collect()
}

/// A worker says it twice: when it begins, and when it begins with the request.
fn runs_in(log: &str) -> impl Iterator<Item = &str> {
    let lines = log.lines().filter_map(|line| line.split_once(RUN));
    // others say which run the images are of
    let own = lines.filter(|(before, _)| before.trim_end().ends_with(')')).map(|(_, run)| run.trim());
    own.filter(|run| run.len() >= 8)
}

fn table(run: &str) -> String {
    format!("CRIU-{run}").chars().take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_called_by_its_run() {
        let log = [
            "(00.000000) CRIU run id = fdb3ef30-9e57",
            "(00.000000) CRIU run id = 0f8aff69-844e-41da-8f45-c8708ff22c8a",
            "(00.052135) Dump CRIU run id = b5f99c2b-f6d6",
            "(00.052136) CRIU run id = ",
        ];
        let tables: Vec<String> = runs_in(&log.join("\n")).map(table).collect();
        assert_eq!(tables, ["CRIU-fdb3ef30-9e57", "CRIU-0f8aff69-844e-41da-8f"]);
    }

    #[test]
    fn nothing_is_taken_away_for_a_directory_without_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(lift(dir.path()).unwrap(), None);
    }
}
