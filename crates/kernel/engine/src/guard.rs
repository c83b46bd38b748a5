//! criu's own rules of nftables: what keeps peers waiting while nobody holds their connections. criu takes them away again,
//! unless it is killed: then we do, those and no others.
//!
//! A table is called by the number of the run of criu that made it, cut off at what fits into criu's buffer.

use crate::Error;
use crate::error::At;
use crate::netlink::{ACK, DONE, DUMP, ERROR, REQUEST, attributes, messages, put, put_attribute, u32_at};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::image::run_id;

/// Bytes of a file in which a run of criu's is named.
const FILE_MAX: u64 = 256 << 20;

/// `NFNL_SUBSYS_NFTABLES`.
const NFTABLES: u16 = 10;
const GET_TABLE: u16 = NFTABLES << 8 | 1;
const DEL_TABLE: u16 = NFTABLES << 8 | 2;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// `NFPROTO_INET`.
const INET: u8 = 1;
/// `NFTA_TABLE_NAME`.
const NAME: u16 = 1;
/// criu's buffer for `inet NAME`, with the end of the string.
const LONGEST: usize = 31 - "inet ".len();
/// How criu says in its logs which run it is.
const RUN: &str = "CRIU run id = ";

/// The tables of criu's that stand, whoever had them made.
pub fn guards() -> Result<Vec<String>, Error> {
    let socket = open()?;
    let mut request = Vec::new();
    put(&mut request, GET_TABLE, REQUEST | DUMP, &general(INET, 0));
    send(&socket, &request, SendFlags::empty()).doing("ask after nftables")?;
    let (mut names, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let n = recv(&socket, buffer.as_mut_slice(), RecvFlags::empty()).doing("hear of nftables")?.0;
        for (kind, payload) in messages(&buffer[..n]) {
            if kind == DONE || kind == ERROR {
                return Ok(names);
            }
            let mut found = attributes(payload.get(4..).unwrap_or_default()).filter(|(kind, _)| *kind == NAME);
            if let (Some(&INET), Some((_, name))) = (payload.first(), found.next()) {
                let name = String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
                names.extend(Some(name).filter(|name| name.starts_with("CRIU-")));
            }
        }
        if n == 0 {
            return Ok(names);
        }
    }
}

/// The table that the checkpoint in a directory had criu make, if it stands.
pub fn guard_of(dir: &Path) -> Result<Option<String>, Error> {
    let names: Vec<String> = runs(dir).iter().map(|run| table(run)).collect();
    if names.is_empty() { Ok(None) } else { Ok(guards()?.into_iter().find(|name| names.contains(name))) }
}

/// Takes away the table that the checkpoint in a directory had criu make, and tells its name if it stood.
pub(crate) fn lift(dir: &Path) -> Result<Option<String>, Error> {
    let Some(name) = guard_of(dir)? else { return Ok(None) };
    let socket = open()?;
    let mut asked = general(INET, 0);
    put_attribute(&mut asked, NAME, format!("{name}\0").as_bytes());
    let (mut request, batch) = (Vec::new(), general(0, NFTABLES));
    put(&mut request, BATCH_BEGIN, REQUEST, &batch);
    put(&mut request, DEL_TABLE, REQUEST | ACK, &asked);
    put(&mut request, BATCH_END, REQUEST, &batch);
    send(&socket, &request, SendFlags::empty()).doing("take a table of nftables away")?;
    let mut buffer = vec![0; 1 << 12];
    let n = recv(&socket, buffer.as_mut_slice(), RecvFlags::empty()).doing("hear of nftables")?.0;
    let errors = messages(&buffer[..n]).filter(|(kind, _)| *kind == ERROR);
    match errors.filter_map(|(_, payload)| u32_at(payload, 0)).find(|errno| *errno != 0) {
        None => Ok(Some(name)),
        // somebody else was faster
        Some(errno) if errno.wrapping_neg() as i32 == rustix::io::Errno::NOENT.raw_os_error() => Ok(None),
        Some(errno) => {
            Err(std::io::Error::from_raw_os_error(errno.wrapping_neg() as i32)).doing("take a table of nftables away")
        }
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

/// `struct nfgenmsg`.
fn general(family: u8, resource: u16) -> Vec<u8> {
    [&[family, 0][..], &resource.to_be_bytes()].concat()
}

fn open() -> Result<OwnedFd, Error> {
    socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::NETFILTER))
        .doing("ask after nftables")
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
