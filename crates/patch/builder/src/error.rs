//! Why no patch was built.

use crate::verdict::{Bounded, ChangedFile, Verdict};
use std::path::{Path, PathBuf};
use stillpoint_patch_differ::Refusal;

/// Why no patch was built. Whatever it is, the user's sources and the system's configuration are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read, written or made.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// For instance `reading`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A program could not be started.
    #[error("cannot run `{program}`: {source}; {hint}")]
    Spawn {
        /// The program.
        program: String,
        /// What the system said.
        source: std::io::Error,
        /// Which Debian package brings it.
        hint: String,
    },
    /// A program failed.
    #[error("{what} failed ({status}):\n{output}")]
    Command {
        /// What it was to do.
        what: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The end of what it printed.
        output: String,
    },
    /// The clean environment cannot be made here.
    #[error("a clean build environment cannot be made here: {0}")]
    Environment(String),
    /// The system has no source list that fits.
    #[error("no source list of this system names {0}")]
    NoSources(String),
    /// A package or version is not in the archive.
    #[error("package {package} {version} is not in the archive; it has {available}")]
    NoSuchVersion {
        /// The package.
        package: String,
        /// As asked for.
        version: String,
        /// What there is.
        available: String,
    },
    /// Version in the archive's lists of which the archive does not have the files.
    #[error("{package} {version} is listed and not served ({missing}); {}", newest(.package, .served))]
    Withheld {
        /// The package.
        package: String,
        /// As asked for, or the newest.
        version: String,
        /// First file that was not there, and the server's answer.
        missing: String,
        /// Newest other version that is served, if there is one.
        served: Option<String>,
    },
    /// A name is not in the series, or several entries fit.
    #[error("{name:?} names {found} of the series of {package}: {entries}")]
    Quilt {
        /// As asked for.
        name: String,
        /// The package and version.
        package: String,
        /// `no patch`, or how many.
        found: String,
        /// Candidates.
        entries: String,
    },
    /// Something read from a file does not have the expected form.
    #[error("{what}: {why}")]
    Malformed {
        /// Which file or text.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// A diff does not fit the source.
    #[error("diff {name} does not apply to {file}:\n{output}")]
    DoesNotApply {
        /// The diff.
        name: String,
        /// The file it does not fit.
        file: String,
        /// What `patch` printed.
        output: String,
    },
    /// A diff changes how the program is built.
    #[error("diff {name} changes {file}, which tells how the program is built: only source code can be patched live")]
    ChangesBuild {
        /// The diff.
        name: String,
        /// The file.
        file: String,
    },
    /// The target could not be told.
    #[error("which ELF file is the target: {0}")]
    Target(String),
    /// A unit changed and is no part of the target.
    #[error("{unit} changes, and none of its functions is in {target}; leave it out with --unit-filter")]
    NotInTarget {
        /// The unit.
        unit: String,
        /// The target.
        target: String,
    },
    /// Changed files may be a part of the target, and no command is known that compiles them there.
    #[error("{}", unaccounted(.target, .files, .missing, .inputs))]
    Unaccounted {
        /// The target.
        target: String,
        /// Every changed file, with its verdict.
        files: Vec<ChangedFile>,
        /// Inputs of the target's link that no recorded command made.
        missing: Vec<String>,
        /// Number of inputs of the target's link, where it is known.
        inputs: usize,
    },
    /// A unit could not be compiled.
    #[error("compiling {unit} ({side}) failed:\n{output}")]
    Compile {
        /// The unit.
        unit: String,
        /// `shipped`, `before` or `after`.
        side: &'static str,
        /// What the compiler printed.
        output: String,
    },
    /// The change breaks rules of live patching.
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// The cache or an output could not be read or written.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// Edits of our own cannot be placed in the source.
    #[error(transparent)]
    Integration(#[from] stillpoint_integrations::Error),
    /// The finished patch or a key breaks a rule of the file format.
    #[error(transparent)]
    Format(#[from] stillpoint_patch_format::Error),
}

fn newest(package: &str, served: &Option<String>) -> String {
    match served {
        Some(version) => format!("the newest version of {package} that is served is {version}"),
        None => format!("no other version of {package} is served"),
    }
}

fn list(refusals: &[Refusal]) -> String {
    let lines: Vec<String> = refusals.iter().map(|r| format!("{r} [{}]", r.code())).collect();
    match &lines[..] {
        [one] => format!("refused: {one}"),
        _ => format!("refused for {} reasons:\n  {}", lines.len(), lines.join("\n  ")),
    }
}

fn unaccounted(target: &str, files: &[ChangedFile], missing: &[String], inputs: &usize) -> String {
    let files = files.iter().filter(|file| file.verdict == Verdict::Unaccounted);
    let lines: Vec<String> = files.map(|file| format!("{}: {}", file.path, file.reason)).collect();
    let many = if lines.len() == 1 { "file" } else { "files" };
    let mut text = format!("{} changed {many} cannot be attributed to {target}: {}", lines.len(), Bounded(&lines));
    if !missing.is_empty() {
        text += &format!(
            "; no recorded command made {} of {inputs} inputs of its link: {}",
            missing.len(),
            Bounded(missing)
        );
    }
    text
}

impl Error {
    /// Returns true if the change itself is refused, as against something that did not work.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Error::Refused(_) | Error::ChangesBuild { .. } | Error::NotInTarget { .. } | Error::Unaccounted { .. }
        )
    }
}

/// Attaches a path to what the system said.
pub(crate) trait At<T> {
    fn at(self, doing: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> At<T> for Result<T, std::io::Error> {
    fn at(self, doing: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::Io { doing, path: path.to_owned(), source })
    }
}
