//! Selection of a running program to build for: by process, executable or service, and a library of it.

use super::processes::failure;
use crate::output::Failure;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use stillpoint_patch_builder::{Builder, Error};
use stillpoint_patch_engine::fleet;
use stillpoint_patch_provenance::{Program, SeenPackages};
use stillpoint_patch_tracee::Pid;

/// Running program.
#[derive(Clone, clap::Args)]
pub(super) struct RunningTarget {
    #[command(flatten)]
    selection: Selection,
    /// Patch this library that the program maps, for example `libssl.so.3`, instead of the executable.
    #[arg(long, value_name = "NAME", requires = "running", help_heading = "From a running program")]
    library: Option<String>,
}

#[derive(Clone, clap::Args)]
#[group(id = "running", multiple = false)]
struct Selection {
    /// Build for the program of this process, from the version that it runs to the newest one.
    #[arg(long, value_name = "N", help_heading = "From a running program")]
    pid: Option<i32>,
    /// Build for the processes of this executable; without one, for the file.
    #[arg(long, value_name = "PATH", help_heading = "From a running program")]
    exe: Option<PathBuf>,
    /// Build for the processes of this systemd service.
    #[arg(long, value_name = "NAME", help_heading = "From a running program")]
    unit: Option<String>,
}

/// Options that select a running program, for groups of arguments.
pub(super) const SELECTING: [&str; 3] = ["pid", "exe", "unit"];

/// Selected program, before it is looked at.
pub(super) enum Selected {
    /// Processes.
    Processes(Vec<Pid>),
    /// File that no process executes.
    File(PathBuf),
}

impl RunningTarget {
    /// Returns the selected processes or file; `None` if no option selects one.
    pub(super) fn selected(&self) -> Result<Option<Selected>, Failure> {
        let Selection { pid, exe, unit } = &self.selection;
        let processes = match (pid, exe, unit) {
            (Some(pid), ..) => vec![Pid(*pid)],
            (_, Some(path), _) => match fleet::of_executable(path).map_err(failure)? {
                none if none.is_empty() => return Ok(Some(Selected::File(path.clone()))),
                found => found,
            },
            (.., Some(unit)) => fleet::service(unit).and_then(|group| fleet::of_service(&group)).map_err(failure)?,
            _ => return Ok(None),
        };
        if processes.is_empty() {
            let unit = unit.clone().unwrap_or_default();
            return Err(Failure::refused(anyhow::anyhow!("no process of unit {unit} runs"))
                .hint(format!("systemctl start {unit}")));
        }
        Ok(Some(Selected::Processes(processes)))
    }

    /// Looks at the selected program. All processes must run the same file.
    pub(super) fn program(&self, selected: &Selected, builder: &Builder<'_>) -> Result<Program, Error> {
        let (seen, library) = (builder.seen_packages(), self.library.as_deref());
        match selected {
            Selected::File(path) if library.is_some() => {
                Err(Error::Target(format!("no process executes {}, so none maps a library", path.display())))
            }
            Selected::File(path) => Ok(Program::of_file(path, &seen)?),
            Selected::Processes(pids) => one_of(pids, library, &seen),
        }
    }
}

fn one_of(pids: &[Pid], library: Option<&str>, seen: &SeenPackages) -> Result<Program, Error> {
    let mut programs: Vec<Program> = Vec::new();
    let mut by_file: BTreeMap<(PathBuf, String), Vec<String>> = BTreeMap::new();
    let mut refused = None;
    for pid in pids {
        match Program::of_process(*pid, library, seen) {
            Ok(program) => {
                let build_id = program.origin.identity.as_ref().and_then(|identity| identity.build_id.as_ref());
                let id = build_id.map_or_else(|| "no build-id".to_owned(), |id| format!("build-id {id}"));
                by_file.entry((program.path.clone(), id)).or_default().push(pid.to_string());
                // the bytes of one are enough
                if programs.is_empty() || by_file.len() > 1 {
                    programs.push(program);
                }
            }
            // a service may consist of several programs, of which one maps the library
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match (by_file.len(), programs.into_iter().next(), refused) {
        (1, Some(program), _) => Ok(program),
        (0, _, Some(error)) => Err(error.into()),
        _ => {
            let name = |path: &Path, id: &str, pids: &[String]| {
                format!("{} ({id}) in process {}", path.display(), pids.join(", "))
            };
            let all: Vec<String> = by_file.iter().map(|((path, id), pids)| name(path, id, pids)).collect();
            Err(Error::Target(format!("the processes run different files: {}; say which with --pid", all.join("; "))))
        }
    }
}
