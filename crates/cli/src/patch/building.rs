//! Shared code of the commands that compile: their directories, and their progress.

use crate::output::Output;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use stillpoint_events::VERSION;
use stillpoint_patch_builder::{Builder, Cache, Error, Event, Integrated, Verdict};
use stillpoint_patch_provenance::Error as Unknown;

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
    /// Directories with `.dsc` files and their sources, and with `.deb` files, in addition to the archive.
    #[arg(long, value_name = "DIR", num_args = 1..)]
    sources: Vec<PathBuf>,
}

impl Workplace {
    /// Returns the directories of the caller's packages.
    pub(super) fn sources(&self) -> &[PathBuf] {
        &self.sources
    }
}

/// Quiescence points that a package is built with.
#[derive(clap::Args)]
pub(super) struct Integration {
    /// Build the package with the quiescence points of this directory, for example `crates/patch/integrations/redis`.
    #[arg(long, value_name = "DIR", requires_all = ["debian", "libstillpoint"])]
    integration: Option<PathBuf>,
    /// Directory of the `libstillpoint.so` to link with, for example `crates/patch/runtime/build`.
    #[arg(long, value_name = "DIR", requires = "integration")]
    libstillpoint: Option<PathBuf>,
}

impl Integration {
    pub(super) fn integrated(&self) -> Option<Integrated> {
        let (edits, libraries) = self.integration.clone().zip(self.libstillpoint.clone())?;
        Some(Integrated { edits, libraries })
    }
}

/// Runs `work` with a builder, and shows its progress.
pub(super) fn with_builder<R: Send>(
    workplace: &Workplace,
    output: &Output,
    work: impl FnOnce(Builder) -> Result<R, Error> + Send,
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
            let builder = builder.with_sources(workplace.sources.clone());
            work(builder.in_root_of(workplace.root_of.clone()))
        });
        // ends when the builder, and with it the sender, is dropped
        show(&receiver, output);
        working.join()
    });
    output.progress_done();
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Interval of the lines that report progress where no terminal shows it.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Shows the events of a builder until it ends.
fn show(receiver: &mpsc::Receiver<Event>, output: &Output) {
    let begin = Instant::now();
    let (mut next, mut current) = (begin + PROGRESS_INTERVAL, None);
    loop {
        match receiver.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(event @ Event::Progress { .. }) => {
                output.progress(&event.to_string());
                current = Some(event);
            }
            Ok(choice) if output.is_json() => output.json(&EventLine { v: VERSION, event: &choice }),
            Ok(choice) => output.note(choice),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                next += PROGRESS_INTERVAL;
                match &current {
                    Some(event) if output.is_json() => output.json(&EventLine { v: VERSION, event }),
                    Some(event) => output.progress_line(begin.elapsed(), event),
                    None => {}
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
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
    if let Some(hint) = super::shadow_members::hint(error) {
        return Some(hint);
    }
    match error {
        Error::Withheld { package, version, served: Some(served), .. }
        | Error::NoSuchVersion { package, version, proposed: Some(served), .. } => Some(match shipped {
            Some(shipped) if shipped == version => format!("--shipped {served}"),
            _ => format!("--debian {package}={served}"),
        }),
        Error::NoSuchVersion { source_package: Some(source), version, .. } => Some(match version.as_str() {
            "(any)" => format!("--debian {source}"),
            version => format!("--debian {source}={version}"),
        }),
        Error::NoSuchVersion { .. } => Some(
            "`dpkg -S PROGRAM` names the package of a program, and `apt-cache show` its source package; another --release"
                .to_owned(),
        ),
        Error::Quilt { package, .. } => {
            let package = package.replacen(' ', "=", 1);
            Some(format!("stillpoint patch target --debian {package}, which lists the series"))
        }
        Error::AlreadyShipped { .. } => {
            Some("--shipped with the version that runs; after an upgrade /var/log/dpkg.log has it".to_owned())
        }
        Error::Refused(refusals) if refusals.iter().any(|refusal| refusal.code() == "unplaced-function") => {
            Some("--shipped (or --source) with exactly the version that the target was built from".to_owned())
        }
        Error::Refused(_) | Error::ChangesBuild { .. } => Some(
            "leave out the diffs that need this, or upgrade the package; stillpoint-patch-hooks(7) can replace a change of data"
                .to_owned(),
        ),
        Error::NotInTarget { .. } => Some("--unit-filter with the directories of the target's units".to_owned()),
        Error::DoesNotApply { .. } => {
            Some("--on-top-of with the diffs that this one is based on, or the version that it was made for".to_owned())
        }
        Error::Target(_) => Some("--target with the file that runs, for example /proc/PID/exe".to_owned()),
        Error::Spawn { hint, .. } => Some(hint.clone()),
        Error::Environment(_) => Some("the same command as root".to_owned()),
        Error::NoSources(_) => {
            Some("add the archive of that release, component main, to /etc/apt/sources.list.d".to_owned())
        }
        Error::Host(error) if error.is_not_found() => Some("the path of a file that exists".to_owned()),
        Error::NoRunningSource { package, version, .. } => {
            Some(format!("--sources DIR with {package}_{}.dsc and its files, as snapshot services have them", epochless(version)))
        }
        Error::NewerThanArchive { .. } => Some("the archive that the version came from in /etc/apt/sources.list.d".to_owned()),
        Error::OtherRelease { release, .. } => Some(format!("--release {release}")),
        Error::Provenance(error) => Some(provenance_hint(error).to_owned()),
        Error::Unaccounted { target, files, .. } => {
            let file = files.iter().find(|file| file.verdict == Verdict::Unaccounted)?;
            Some(format!("--leave-out {}, if it has no effect on {target}", file.path))
        }
        _ => None,
    }
}

/// Version as file names have it.
fn epochless(version: &str) -> &str {
    version.split_once(':').map_or(version, |(_, rest)| rest)
}

fn provenance_hint(error: &Unknown) -> &'static str {
    match error {
        Unknown::NoPackage { .. } => {
            "--sources DIR with the .deb file of the version that runs; or --source for a program of your own"
        }
        Unknown::NoDatabase(_) => "--source, for a program that is of no Debian package",
        Unknown::Permission { .. } | Unknown::Unreadable { .. } => "the same command as root",
        Unknown::Mapped { .. } => "`grep r-x /proc/PID/maps` lists what a process maps",
        Unknown::Ended(_) => "`pgrep -a NAME` lists processes",
        _ => "stillpoint patch build --debian PACKAGE --shipped VERSION",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_version(version: &str, proposed: Option<&str>, source_package: Option<&str>) -> Error {
        let [proposed, source_package] = [proposed, source_package].map(|text| text.map(str::to_owned));
        let available = proposed.clone().unwrap_or("none".into());
        Error::NoSuchVersion {
            package: "redis-server".into(),
            version: version.into(),
            available,
            proposed,
            source_package,
        }
    }

    #[test]
    fn a_name_that_is_not_known_gets_the_one_that_was_meant() {
        let error = no_version("(any)", None, Some("redis"));
        assert!(error.to_string().ends_with("it is a binary package of redis"), "{error}");
        assert_eq!(hint(&error, None).as_deref(), Some("--debian redis"));
        assert_eq!(hint(&no_version("1-1", None, Some("redis")), None).as_deref(), Some("--debian redis=1-1"));
        let listed = no_version("1-0", Some("1-2"), None);
        assert_eq!(hint(&listed, Some("1-0")).as_deref(), Some("--shipped 1-2"));
        assert_eq!(hint(&listed, None).as_deref(), Some("--debian redis-server=1-2"));
        let quilt =
            Error::Quilt { name: "x".into(), package: "redis 1-2".into(), found: "".into(), entries: "".into() };
        assert!(hint(&quilt, None).is_some_and(|hint| hint.starts_with("stillpoint patch target --debian redis=1-2")));
        let shipped = Error::AlreadyShipped { package: "redis 1-2".into(), diff: "a".into() };
        assert!(hint(&shipped, None).is_some_and(|hint| hint.contains("--shipped") && hint.contains("dpkg.log")));
    }
}
