//! Shared code of apply, check and revert: selection of processes and files, and conversion of the engine's failures.

use crate::output::{Exit, Failure, Output};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use stillpoint_events::Event;
use stillpoint_host::systemd::ControlGroup;
use stillpoint_patch_catalog::{PatchFile, Policy};
use stillpoint_patch_engine::fleet::{MappedFile, Search};
use stillpoint_patch_engine::{self as engine, Options, Quiescence, ServiceState, ThreadView};
use stillpoint_patch_format::{Signed, Target};
use stillpoint_patch_tracee::Pid;

/// Selection of processes.
#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct Processes {
    #[command(flatten)]
    selected: SelectedProcesses,
    /// With --library or --all: include processes in containers, which are left out otherwise.
    #[arg(long)]
    containers: bool,
    /// The service's control group, asked for once.
    #[arg(skip)]
    group: OnceLock<ControlGroup>,
}

/// Options of which one selects the processes.
#[derive(clap::Args)]
#[group(required = true, multiple = true)]
struct SelectedProcesses {
    /// Number of a process; may be given several times.
    #[arg(long, value_name = "N", value_delimiter = ',', conflicts_with_all = ["exe", "unit", "library"])]
    pid: Vec<i32>,
    /// All processes of this executable, parents before children, including those that start during the operation.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["unit", "library"])]
    exe: Option<PathBuf>,
    /// All processes of this systemd service, which must be active.
    #[arg(long, value_name = "NAME", conflicts_with = "library")]
    unit: Option<String>,
    /// All processes of this machine that map this file, even if it was deleted or replaced: a path, or a name without a slash for
    /// files of that name in every directory.
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// All processes of this machine that map the build of the file that the patch is for.
    #[arg(long)]
    all: bool,
}

impl Processes {
    /// Returns the processes at this moment.
    fn now(&self) -> Result<Vec<Pid>, Failure> {
        if let Some(path) = &self.selected.exe {
            return engine::fleet::of_executable(path).map_err(failure);
        }
        if let Some(unit) = &self.selected.unit {
            return self.group(unit).and_then(engine::fleet::of_service).map_err(failure);
        }
        Ok(self.selected.pid.iter().copied().map(Pid).collect())
    }

    fn group(&self, unit: &str) -> Result<&ControlGroup, engine::Error> {
        if let Some(group) = self.group.get() {
            return Ok(group);
        }
        let found = engine::fleet::service(unit)?;
        Ok(self.group.get_or_init(|| found))
    }

    fn describe(&self) -> String {
        match (&self.selected.exe, &self.selected.unit) {
            (Some(path), _) => format!("executable {}", path.display()),
            (_, Some(unit)) => format!("unit {unit}"),
            _ => "those".to_owned(),
        }
    }

    /// Runs `work` on every process, one after another, parents before children, until no new one has appeared. An ended process is an
    /// error only if it was given by its number.
    pub(crate) fn each(&self, mut work: impl FnMut(Pid) -> Result<(), engine::Error>) -> Result<(), Failure> {
        let named = self.given_by_number();
        let mut done = BTreeSet::new();
        // a service that forks without pause always has new processes
        for _ in 0..CHECKS_MAX {
            let Some(new) = self.new_processes(&mut done)? else { break };
            for pid in new {
                match work(pid) {
                    Err(error) if !named && ended(&error) => {}
                    other => other.map_err(|error| with_pid(failure(error), pid))?,
                }
            }
        }
        Ok(())
    }

    /// Returns true if `--all` was given.
    pub(super) fn is_all(&self) -> bool {
        self.selected.all
    }

    /// Returns true if no option but `--all` selects processes.
    pub(super) fn is_only_all(&self) -> bool {
        let SelectedProcesses { pid, exe, unit, library, all } = &self.selected;
        *all && pid.is_empty() && exe.is_none() && unit.is_none() && library.is_none()
    }

    /// Refuses `--all` beside another selection of processes.
    pub(super) fn refuse_two_selections(&self) -> Result<(), Failure> {
        let SelectedProcesses { pid, exe, unit, all, .. } = &self.selected;
        if *all && (!pid.is_empty() || exe.is_some() || unit.is_some()) {
            return Err(Failure::usage("--all selects processes, and so does another option"));
        }
        Ok(())
    }

    /// Returns the search of the whole machine, if one is requested; for the target of a patch, or for every build of the file.
    pub(super) fn search(&self, target: Option<&Target>) -> Result<Option<Search>, Failure> {
        let file = match &self.selected.library {
            Some(path) => MappedFile::parse(path).map_err(failure)?,
            None if self.is_only_all() => MappedFile::OfPatch,
            None if self.containers => {
                return Err(Failure::usage("--containers belongs to --library or --all"));
            }
            None => return Ok(None),
        };
        Ok(Some(Search::new(file, target, self.containers)))
    }

    /// Describes the file that the search is for.
    pub(super) fn subject(&self, target: Option<&Target>) -> String {
        match (&self.selected.library, target) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(target)) if target.build_id.0.is_empty() => target.file_name.clone(),
            (None, Some(target)) => format!("{} (build-id {})", target.file_name, target.build_id),
            (None, None) => "a patched file".to_owned(),
        }
    }

    /// Returns true if each was given by its number.
    pub(super) fn given_by_number(&self) -> bool {
        self.selected.exe.is_none() && self.selected.unit.is_none()
    }

    /// Returns processes that are not in `seen`; `None` if there are none.
    pub(super) fn new_processes(&self, seen: &mut BTreeSet<Pid>) -> Result<Option<Vec<Pid>>, Failure> {
        let new: Vec<Pid> = self.now()?.into_iter().filter(|pid| seen.insert(*pid)).collect();
        if seen.is_empty() {
            let error = anyhow::anyhow!("no process of {} runs", self.describe());
            let hint = match (&self.selected.exe, &self.selected.unit) {
                (Some(path), _) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    format!(
                        "`pgrep -a {name}` lists processes, and `ls -l /proc/PID/exe` shows the path that --exe needs"
                    )
                }
                (None, Some(unit)) => format!("systemctl start {unit}"),
                _ => "stillpoint patch list".to_owned(),
            };
            return Err(Failure::refused(error).hint(hint));
        }
        Ok((!new.is_empty()).then_some(new))
    }
}

/// Limit of checks for new processes.
const CHECKS_MAX: u32 = 3;

/// Returns true if it failed because the process has ended.
pub(super) fn ended(error: &engine::Error) -> bool {
    use stillpoint_patch_tracee::Error as Edge;
    matches!(error, engine::Error::Ended(_) | engine::Error::Tracee(Edge::Gone(_) | Edge::Zombie(_) | Edge::Exec(_)))
}

pub(super) fn with_pid(failure: Failure, pid: Pid) -> Failure {
    Failure { error: failure.error.context(format!("process {pid}")), ..failure }
}

/// Converts a failure of the engine to that of the command.
pub(crate) fn failure(error: engine::Error) -> Failure {
    let hint = error.hint();
    let (exit, state) = match error.service_state() {
        ServiceState::Untouched => (Exit::Refused, "nothing was touched"),
        ServiceState::OldSide => (Exit::Failed, "the target runs the code that it ran before"),
        ServiceState::Ended => (Exit::Failed, "the process has ended"),
        ServiceState::RolledBack => (Exit::FellBack, "every thread runs the code that it ran before"),
        ServiceState::Unfinished => {
            (Exit::Unknown, "the target runs, each thread consistently old or new; a transition is open")
        }
    };
    Failure { exit, error: error.into(), state: state.to_owned(), hint }
}

/// Options for the migration of threads.
#[derive(clap::Args)]
pub(crate) struct MigrationOptions {
    /// Quiescence of threads before they migrate: `probe` (each by itself, when no patched function is on its stack), `local` (each by
    /// itself at its next quiescence point), `group:NAME` (the threads of a group together at theirs, the others as
    /// local), `global` (all together at theirs) or `stop` (all at once, stopped from outside).
    #[arg(long, value_name = "MODE", value_parser = quiescence, default_value = "probe")]
    quiescence: Quiescence,
    /// Mechanism by which each thread sees its version of the code: `trampoline` (jumps, on every kernel) or `generation`
    /// (pages of its own, on a kernel with address-space generations).
    #[arg(long, value_enum, default_value_t = ThreadView::Trampoline)]
    view: ThreadView,
    /// Continue in a program with its own coroutines, although old code may continue to run in suspended ones.
    #[arg(long)]
    allow_suspended_frames: bool,
}

impl MigrationOptions {
    /// Returns options of the engine with these.
    pub(crate) fn options(&self) -> Options {
        Options {
            quiescence: self.quiescence,
            view: self.view,
            allow_suspended_frames: self.allow_suspended_frames,
            ..Options::default()
        }
    }
}

fn quiescence(text: &str) -> Result<Quiescence, String> {
    let unknown = || format!("`{text}` is none of probe, local, group:NAME (up to 15 bytes), global, stop");
    Quiescence::parse(text).ok_or_else(unknown)
}

/// Parses a time with its unit: `500ms`, `10s`, `2m`; a bare number is seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let value: f64 = digits.parse().map_err(|_| format!("`{text}` is not a time such as 10s or 500ms"))?;
    let seconds = match &text[digits.len()..] {
        "ms" => value / 1000.0,
        "" | "s" => value,
        "m" | "min" => value * 60.0,
        "h" => value * 3600.0,
        unit => return Err(format!("unknown unit `{unit}`; use ms, s, m or h")),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("`{text}` is not a time"))
}

/// Policy for the makers of patches.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PolicyName {
    /// Any file.
    Any,
    /// Files signed by a key whose public key is in the key directory.
    Signed,
}

/// Policy and keys by which patches are accepted.
#[derive(Clone, clap::Args)]
pub(crate) struct Trust {
    /// Patches to accept.
    #[arg(long, value_enum, default_value = "any")]
    pub(crate) policy: PolicyName,
    /// Directory of trusted public keys; only root may be able to change it and all directories above it. No symbolic
    /// links.
    #[arg(long, value_name = "DIR", default_value = "/etc/stillpoint/keys")]
    pub(crate) keys: PathBuf,
}

impl Trust {
    /// Returns the policy with its keys.
    pub(crate) fn policy(&self) -> Policy {
        match self.policy {
            PolicyName::Any => Policy::Any,
            PolicyName::Signed => Policy::Signed(self.keys.clone()),
        }
    }
}

/// Patch files and the policy for their makers.
#[derive(clap::Args)]
pub(crate) struct Files {
    /// Patch files in the order to be applied.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    trust: Trust,
}

impl Files {
    /// Reads all files; returns with each the key that signed it, verified.
    pub(crate) fn read(&self) -> Result<Vec<(Signed, Option<String>)>, Failure> {
        let keys = self.trust.policy().keys().map_err(|error| {
            let keys = self.trust.keys.display();
            Failure::refused(error).hint(format!(
                "stillpoint patch key generate --output DIR, and its stillpoint-ID.pub in {keys}, which only root may change"
            ))
        })?;
        let one = |path: &PathBuf| keys.check(&PatchFile::read(path)?);
        self.files.iter().map(|path| one(path).map_err(unusable_file)).collect()
    }
}

/// Converts the reason why a patch file is not used.
pub(super) fn unusable_file(error: impl Into<anyhow::Error>) -> Failure {
    use stillpoint_patch_format::Error as Format;
    let error = error.into();
    let host = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref() {
        Some(stillpoint_patch_catalog::Error::Host(error)) => Some(error.is_not_found()),
        _ => cause.downcast_ref().map(stillpoint_host::Error::is_not_found),
    };
    let hint = error.chain().find_map(|cause| match (cause.downcast_ref(), host(cause)) {
        (Some(Format::Magic), _) => Some("a file that `stillpoint patch build` wrote: it makes patches from diffs"),
        (Some(Format::Version(_)), _) => Some("stillpoint patch build, by the version of stillpoint that is used here"),
        (Some(Format::Unsigned), _) => Some("stillpoint patch build --sign KEYFILE; or --policy any"),
        (Some(Format::UnknownKey(_)), _) => {
            Some("put the key's stillpoint-ID.pub into the directory of --keys, if its owner is to be trusted")
        }
        (Some(_), _) => Some("copy the file again, or build it again: it is not as `stillpoint patch build` wrote it"),
        (None, Some(true)) => Some("the path of a patch file"),
        (None, Some(false)) => Some("the path of a patch file that is a regular file and that this user can read"),
        (None, None) => None,
    });
    Failure { hint: hint.map(str::to_owned), ..Failure::refused(error) }
}

/// Passes the engine's events to the output.
pub(crate) fn observer(output: &Output) -> impl FnMut(Event) + Send {
    |event| output.event(&event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn modes_are_read_as_they_are_written() {
        for text in ["probe", "local", "group:workers", "global", "stop"] {
            assert_eq!(quiescence(text).map(|mode| mode.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "group:", "group", "group:a name of sixteen", "all"] {
            assert!(quiescence(text).is_err(), "{text}");
        }
    }

    #[test]
    fn files_that_are_no_patches_get_a_next_step() {
        let hint = |bytes: &[u8]| {
            let file = PatchFile { path: "x.patch".into(), bytes: bytes.to_vec() };
            unusable_file(Policy::Any.check(&file).unwrap_err()).hint.unwrap_or_default()
        };
        assert!(hint(&[b'-'; 400]).contains("patch build"), "{}", hint(&[b'-'; 400]));
        assert!(hint(b"").contains("again"), "{}", hint(b""));
        let absent = unusable_file(PatchFile::read(Path::new("/nonexistent/x.patch")).unwrap_err());
        assert_eq!(absent.hint.as_deref(), Some("the path of a patch file"));
    }

    #[test]
    fn times_have_units() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1.5h").unwrap(), Duration::from_secs(5400));
        assert!(duration("10d").is_err() && duration("").is_err() && duration("-1s").is_err());
    }
}
