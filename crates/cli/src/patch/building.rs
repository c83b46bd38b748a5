//! Shared code of the commands that compile: their directories, and their progress.

use crate::output::Output;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::mpsc;
use stillpoint_events::VERSION;
use stillpoint_patch_builder::{Builder, Cache, Error, Event, Integrated, Verdict};

/// Directories and number of compilers.
#[derive(clap::Args)]
pub(super) struct Workplace {
    /// Number of compilers to run at the same time [default: one for each processor].
    #[arg(short, long, value_name = "N")]
    jobs: Option<usize>,
    /// Directory for downloads, clean roots and objects [default: $STILLPOINT_CACHE; else /var/cache/stillpoint for root,
    /// ~/.cache/stillpoint for other users].
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Release of the distribution that has the package, for example `bullseye` [default: the release of this system].
    #[arg(long, value_name = "CODENAME")]
    release: Option<String>,
    /// Release whose compilers and headers build the package [default: the release of the package]. Build dependencies
    /// that it lacks are left out.
    #[arg(long, value_name = "CODENAME", requires = "release")]
    root_of: Option<String>,
}

/// Quiescence points that a package is built with.
#[derive(clap::Args)]
pub(super) struct Integration {
    /// Build the package with the quiescence points of this directory, for example `crates/patch/integrations/redis`.
    #[arg(long, value_name = "DIR", requires_all = ["debian", "library"])]
    integration: Option<PathBuf>,
    /// Directory of the `libstillpoint.so` to link with, for example `crates/patch/runtime/build`.
    #[arg(long, value_name = "DIR", requires = "integration")]
    library: Option<PathBuf>,
}

impl Integration {
    pub(super) fn integrated(&self) -> Option<Integrated> {
        let (edits, libraries) = self.integration.clone().zip(self.library.clone())?;
        Some(Integrated { edits, libraries })
    }
}

/// Runs `work` with a builder, and shows its progress on a terminal.
pub(super) fn with_builder<R: Send>(
    workplace: &Workplace,
    output: &Output,
    work: impl FnOnce(&Builder) -> Result<R, Error> + Send,
) -> Result<R, Error> {
    let cache = match &workplace.cache {
        Some(path) => Cache::at(path)?,
        None => Cache::open()?,
    };
    let jobs = workplace.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let (sender, receiver) = mpsc::channel::<Event>();
    let result = std::thread::scope(|scope| {
        let working = scope.spawn(move || {
            let tell = |event| drop(sender.send(event));
            let builder = Builder::new(cache, jobs, &tell).of_release(workplace.release.clone());
            work(&builder.in_root_of(workplace.root_of.clone()))
        });
        // ends when the builder, and with it the sender, is dropped
        for event in receiver {
            match &event {
                Event::Progress { text } => output.progress(text),
                choice if output.is_json() => output.json(&EventLine { v: VERSION, event: choice }),
                choice => output.note(choice),
            }
        }
        working.join()
    });
    output.progress_done();
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Choice of the builder, as a line of JSON.
#[derive(Serialize)]
struct EventLine<'a> {
    v: u32,
    #[serde(flatten)]
    event: &'a Event,
}

/// Proposes arguments: a version that the archive serves, when the requested one is listed and not served; and statements that an author
/// can make about files that cannot be attributed.
pub(super) fn hint(error: &Error, shipped: Option<&str>) -> Option<String> {
    match error {
        Error::Withheld { package, version, served: Some(served), .. } => Some(match shipped {
            Some(shipped) if shipped == version => format!("--shipped {served}"),
            _ => format!("--debian {package}={served}"),
        }),
        Error::Unaccounted { target, files, .. } => {
            let file = files.iter().find(|file| file.verdict == Verdict::Unaccounted)?;
            Some(format!("--leave-out {}, if it has no effect on {target}", file.path))
        }
        _ => None,
    }
}
