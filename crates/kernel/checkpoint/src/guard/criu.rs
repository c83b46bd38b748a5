//! criu's own rules of nftables: they drop packets of connections whose processes do not run. criu removes them itself.
//! If criu is killed this module removes its rules, and no others.
//!
//! The name of a table is the id of the criu run that made it, truncated to criu's buffer.

use super::nftables::Nftables;
use crate::Error;
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::image::run_id;

/// Limit in bytes for a file that names a run of criu.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Longest name: criu's buffer for `inet NAME`, without the end of the string.
const NAME_BYTES_MAX: usize = 31 - "inet ".len();
/// Words before the id of a run in criu's logs.
const RUN_ID_PREFIX: &str = "CRIU run id = ";

/// Returns the name of the table that criu made for the checkpoint in a directory, if it exists.
///
/// # Errors
/// The kernel does not list its tables.
pub(super) fn find_table(dir: &Path) -> Result<Option<String>, Error> {
    let names: Vec<String> = run_ids(dir).iter().map(|run| table_name(run)).collect();
    if names.is_empty() {
        return Ok(None);
    }
    Ok(Nftables::open()?.tables()?.into_iter().find(|name| names.contains(name)))
}

/// Removes the table that criu made for the checkpoint in a directory; returns its name if it existed.
///
/// # Errors
/// The kernel does not list its tables, or refuses to remove this one.
pub(super) fn remove_table(dir: &Path) -> Result<Option<String>, Error> {
    match find_table(dir)? {
        Some(name) => Ok(Nftables::open()?.remove_if_exists(&name)?.then_some(name)),
        None => Ok(None),
    }
}

/// Returns the runs of criu that dumped into a directory, by its log and by its inventory in the image.
fn run_ids(dir: &Path) -> Vec<String> {
    // in another user's directory the id may be that of any run
    let Ok(directory) = Directory::open(dir) else { return Vec::new() };
    let log = directory.read(crate::criu::DUMP_LOG, FILE_BYTES_MAX).unwrap_or_default();
    let inventory = directory.read("inventory.img", FILE_BYTES_MAX).unwrap_or_default();
    let logged: Vec<String> = run_ids_in_log(&String::from_utf8_lossy(&log)).map(ToOwned::to_owned).collect();
    logged.into_iter().chain(run_id(&inventory).ok().flatten()).collect()
}

/// Finds the ids of runs in a log. A worker logs its id twice: when it begins, and when it begins with the request.
fn run_ids_in_log(log: &str) -> impl Iterator<Item = &str> {
    let lines = log.lines().filter_map(|line| line.split_once(RUN_ID_PREFIX));
    // other lines name the run that the images are of
    let own = lines.filter(|(before, _)| before.trim_end().ends_with(')')).map(|(_, run)| run.trim());
    own.filter(|run| run.len() >= 8)
}

fn table_name(run: &str) -> String {
    format!("CRIU-{run}").chars().take(NAME_BYTES_MAX).collect()
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
        let tables: Vec<String> = run_ids_in_log(&log.join("\n")).map(table_name).collect();
        assert_eq!(tables, ["CRIU-fdb3ef30-9e57", "CRIU-0f8aff69-844e-41da-8f"]);
    }

    #[test]
    fn nothing_is_taken_away_for_a_directory_without_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(remove_table(dir.path()).unwrap(), None);
    }
}
