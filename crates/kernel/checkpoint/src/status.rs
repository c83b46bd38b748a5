//! Status of images, and of programs that were restored from them.

use crate::StaleMark;
use crate::check::Finding;
use crate::guard::{self, ImageGuard};
use crate::journal::{Journal, JournalEntry};
use crate::lazy::{Fill, State};
use crate::repair_mode::leave_repair_mode_below;
use crate::store::{SEAL_FILE, discard as remove};
use crate::{Error, Image};
use procfs::process::{Process, all_processes};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use stillpoint_host::trusted::Directory;

/// Lines of a journal that are shown.
const JOURNAL_LINES_SHOWN: usize = 8;

/// State of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// There is no image, or it was not finished.
    Unsealed,
    /// It is not as it was sealed.
    Damaged,
    /// It can be restored.
    Ready,
    /// Its program runs, and still needs memory from it: it must not be touched.
    Filling,
    /// Its program has run since: it is older than the program's files.
    Stale,
}

/// Status of one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Directory of the image.
    pub image: PathBuf,
    /// State of the image.
    pub stage: Stage,
    /// Name of the program, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The root of its processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Time of the checkpoint, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub made_s: Option<u64>,
    /// True if a process with that number, restored from the image, runs.
    pub runs: bool,
    /// Reason why it is stale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<StaleMark>,
    /// Processes that serve its memory.
    pub daemons: Vec<i32>,
    /// Progress of the restore of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fill: Option<Fill>,
    /// The table of nftables that makes its peers wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard: Option<String>,
    /// Reason why its peers do not wait, or a way in which they could lose their guard.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard_warning: Option<String>,
    /// The last lines of its journal.
    pub journal: Vec<JournalEntry>,
}

/// Returns the images whose memory is being fetched, by processes of root or this user: any process can look like a
/// daemon.
pub fn filling_images() -> BTreeMap<PathBuf, Vec<i32>> {
    let mut images: BTreeMap<PathBuf, Vec<i32>> = BTreeMap::new();
    let user = rustix::process::geteuid().as_raw();
    let is_ours = |process: &Process| process.uid().is_ok_and(|uid| uid == 0 || uid == user);
    for process in all_processes().into_iter().flatten().flatten().filter(is_ours) {
        let Ok(arguments) = process.cmdline() else { continue };
        if let Some(image) = image_of(&arguments) {
            // as the daemon itself sees it: its working directory may differ
            let dir = process.cwd().unwrap_or_default().join(image);
            images.entry(dir).or_default().push(process.pid);
        }
    }
    images
}

/// Returns the image that a daemon serves, by its arguments: `... kernel lazy-pages ... IMAGE SOCKET`.
fn image_of(arguments: &[String]) -> Option<&str> {
    let is_daemon = arguments.windows(2).any(|two| two[0] == "kernel" && two[1] == "lazy-pages");
    match arguments {
        [.., image, socket] if is_daemon && Path::new(socket).file_name()? == "lazy-pages.socket" => Some(image),
        _ => None,
    }
}

/// Returns the status of one image. Nothing is touched.
///
/// # Errors
/// Another user can change the directory: nothing in it is read.
pub fn status(dir: &Path) -> Result<Status, Error> {
    Directory::check(dir)?;
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let image = canonical(dir);
    let daemons: Vec<i32> =
        filling_images().into_iter().filter(|(path, _)| canonical(path) == image).flat_map(|(_, pids)| pids).collect();
    let (used, fill) = (StaleMark::of(dir)?, Fill::read(dir));
    let opened = Image::open(dir).and_then(|image| image.verify_criu_files().map(|()| image));
    let stage = match (&opened, &used) {
        _ if !daemons.is_empty() => Stage::Filling,
        (Err(Error::Unsealed(_)), _) => Stage::Unsealed,
        (Err(_), _) => Stage::Damaged,
        (Ok(_), Some(_)) => Stage::Stale,
        (Ok(_), None) => Stage::Ready,
    };
    let origin = opened.ok().map(|image| image.index().origin.clone());
    let runs = origin.as_ref().is_some_and(|origin| {
        Process::new(origin.pid).and_then(|p| p.stat()).is_ok_and(|stat| stat.comm == origin.name && stat.state != 'Z')
    });
    let mut journal = Journal::of(dir).lines();
    journal.drain(..journal.len().saturating_sub(JOURNAL_LINES_SHOWN));
    let ImageGuard { table, warning } = guard::inspect_image(dir)?;
    // a daemon that is gone fetches nothing any more, even if its last report says so
    let fill = fill.filter(|fill| fill.state != State::Filling || !daemons.is_empty());
    Ok(Status {
        image,
        stage,
        name: origin.as_ref().map(|origin| origin.name.clone()),
        pid: origin.as_ref().map(|origin| origin.pid),
        made_s: origin.as_ref().map(|origin| origin.made_s),
        runs,
        used,
        daemons,
        fill,
        guard: table,
        guard_warning: warning,
        journal,
    })
}

/// Result of a discard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiscardOutcome {
    /// The table of nftables that was removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard: Option<String>,
    /// Number of connections of a running program that a killed checkpoint had left stopped.
    pub connections: usize,
}

/// Returns the obstacles to removing an image.
///
/// # Errors
/// Another user can change the directory, or the kernel does not list its tables.
pub fn check_discard(dir: &Path) -> Result<Vec<Finding>, Error> {
    let found = status(dir)?;
    if found.stage == Stage::Filling {
        let text =
            format!("memory of {} is still being fetched from it", found.name.unwrap_or_else(|| "a program".into()));
        return Ok(vec![Finding::refusal(found.pid, text)]);
    }
    let is_image =
        dir.join(SEAL_FILE).exists() || !found.journal.is_empty() || dir.join(crate::criu::DUMP_LOG).exists();
    let refusal = (!is_image).then(|| Finding::refusal(None, format!("{} is not an image", dir.display())));
    Ok(refusal.into_iter().collect())
}

/// Removes an image, finished or not, and the rules of nftables that its checkpoint left: peers whose connections it
/// holds are reset when they send next. Where a checkpoint and its criu were killed before the end, connections of the
/// program continue. Logs stay.
///
/// # Errors
/// Memory is still being fetched from the image, the directory is not an image, or a rule of nftables cannot be
/// removed.
pub fn discard(dir: &Path) -> Result<DiscardOutcome, Error> {
    Finding::require_no_refusal(check_discard(dir)?)?;
    let unfinished = |line: &JournalEntry| line.operation == "checkpoint" && !dir.join(SEAL_FILE).exists();
    let killed = Journal::of(dir).lines().last().filter(|line| unfinished(line)).and_then(|line| line.pid);
    let connections = killed.map_or(0, leave_repair_mode_below);
    let guard = guard::lift(dir)?;
    remove(dir);
    Journal::of(dir).note("discard", "done", None, None);
    Ok(DiscardOutcome { guard, connections })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_known_by_its_arguments() {
        let of =
            |text: &str| image_of(&text.split(' ').map(ToOwned::to_owned).collect::<Vec<_>>()).map(ToOwned::to_owned);
        let daemon = "/usr/bin/stillpoint kernel lazy-pages --fill-rate 512 /run/stillpoint/i \
                      /run/stillpoint/i/lazy-pages.socket";
        assert_eq!(of(daemon).as_deref(), Some("/run/stillpoint/i"));
        assert_eq!(of("stillpoint kernel restore --image /run/stillpoint/i"), None);
        assert_eq!(of("less kernel lazy-pages.socket"), None);
    }

    #[test]
    fn what_is_no_image_is_said_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("precious"), "x").unwrap();
        assert_eq!(status(dir.path()).unwrap().stage, Stage::Unsealed);
        assert!(discard(dir.path()).unwrap_err().is_refusal());
        assert!(dir.path().join("precious").exists());
    }
}
