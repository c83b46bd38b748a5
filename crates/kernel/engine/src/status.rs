//! What is there of images, and of programs that came out of them.

use crate::Used;
use crate::check::Finding;
use crate::guard::{self, OfImage};
use crate::journal::{Journal, Line};
use crate::lazy::{Fill, State, read_fill};
use crate::sockets::leave_repair;
use crate::store::{SEAL, discard as remove};
use crate::{Error, Image};
use procfs::process::{Process, all_processes};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use stillpoint_host::trusted::Directory;

/// Lines of a journal that are told.
const LINES: usize = 8;

/// What an image is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// There is no image, or none was finished.
    Unsealed,
    /// It is not as it was sealed.
    Damaged,
    /// It can be restored.
    Ready,
    /// Its program runs, and memory still comes out of it: it must not be touched.
    Filling,
    /// Its program has run since: it is older than the program's files.
    Stale,
}

/// One image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Where it lies.
    pub image: PathBuf,
    /// What it is good for.
    pub stage: Stage,
    /// The program, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The root of its processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// When it was made, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub made_s: Option<u64>,
    /// Whether a process with that number, out of the image, runs.
    pub runs: bool,
    /// Why it is stale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
    /// Who brings memory.
    pub daemons: Vec<i32>,
    /// How far it has come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fill: Option<Fill>,
    /// The table of nftables that keeps its peers waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard: Option<String>,
    /// Why its peers do not wait, or how they could lose their guard.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard_warning: Option<String>,
    /// The last lines of its journal.
    pub journal: Vec<Line>,
}

/// The images whose memory is being brought, by processes of root's or this user's: any process can look like one.
pub fn filling() -> BTreeMap<PathBuf, Vec<i32>> {
    let mut images: BTreeMap<PathBuf, Vec<i32>> = BTreeMap::new();
    let user = rustix::process::geteuid().as_raw();
    let is_ours = |process: &Process| process.uid().is_ok_and(|uid| uid == 0 || uid == user);
    for process in all_processes().into_iter().flatten().flatten().filter(is_ours) {
        let Ok(arguments) = process.cmdline() else { continue };
        if let Some(image) = image_of(&arguments) {
            // as the daemon itself sees it: it may have been started elsewhere
            let dir = process.cwd().unwrap_or_default().join(image);
            images.entry(dir).or_default().push(process.pid);
        }
    }
    images
}

/// The image that a daemon serves, by its arguments: `... kernel lazy-pages ... IMAGE SOCKET`.
fn image_of(arguments: &[String]) -> Option<&str> {
    let is_daemon = arguments.windows(2).any(|two| two[0] == "kernel" && two[1] == "lazy-pages");
    match arguments {
        [.., image, socket] if is_daemon && Path::new(socket).file_name()? == "lazy-pages.socket" => Some(image),
        _ => None,
    }
}

/// What is there of one image. Nothing is touched.
///
/// # Errors
/// Another user can change the directory: nothing in it is read.
pub fn status(dir: &Path) -> Result<Status, Error> {
    Directory::check(dir)?;
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let image = whole(dir);
    let daemons: Vec<i32> =
        filling().into_iter().filter(|(path, _)| whole(path) == image).flat_map(|(_, pids)| pids).collect();
    let (used, fill) = (Used::of(dir)?, read_fill(dir));
    let opened = Image::open(dir).and_then(|image| image.verify_beside().map(|()| image));
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
    journal.drain(..journal.len().saturating_sub(LINES));
    let OfImage { table, warning } = guard::of_image(dir)?;
    // a daemon that is gone brings nothing any more, whatever it said last
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

/// What a discard took away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Discarded {
    /// The rules of nftables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard: Option<String>,
    /// Connections of a program that runs on, which a checkpoint that was killed left standing.
    pub connections: usize,
}

/// What stands against taking an image away.
pub fn check_discard(dir: &Path) -> Result<Vec<Finding>, Error> {
    let found = status(dir)?;
    if found.stage == Stage::Filling {
        let text = format!("memory of {} still comes out of it", found.name.unwrap_or_else(|| "a program".into()));
        return Ok(vec![Finding::refusal(found.pid, text)]);
    }
    let is_image =
        dir.join(SEAL).exists() || !found.journal.is_empty() || dir.join(crate::checkpoint::DUMP_LOG).exists();
    if is_image { Ok(Vec::new()) } else { Ok(vec![Finding::refusal(None, format!("{} is no image", dir.display()))]) }
}

/// Takes an image away, finished or not, and the rules of nftables that its checkpoint left: peers whose connections it
/// holds are reset when they send next. Where a checkpoint was killed before it was done, with its criu, connections of the
/// program go on. Logs stay.
pub fn discard(dir: &Path) -> Result<Discarded, Error> {
    let refused: Vec<String> = check_discard(dir)?.into_iter().map(|found| found.text).collect();
    if !refused.is_empty() {
        return Err(Error::Refused(refused));
    }
    let unfinished = |line: &Line| line.operation == "checkpoint" && !dir.join(SEAL).exists();
    let killed = Journal::of(dir).lines().last().filter(|line| unfinished(line)).and_then(|line| line.pid);
    let connections = killed.map_or(0, leave_repair);
    let guard = guard::lift(dir)?;
    remove(dir);
    Journal::of(dir).note("discard", "done", None, None);
    Ok(Discarded { guard, connections })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_known_by_its_arguments() {
        let of =
            |text: &str| image_of(&text.split(' ').map(ToOwned::to_owned).collect::<Vec<_>>()).map(ToOwned::to_owned);
        let daemon = "/usr/bin/stillpoint kernel lazy-pages --fill-rate 512 /run/stillpoint/i /run/stillpoint/i/lazy-pages.socket";
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
