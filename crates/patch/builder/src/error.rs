//! Errors of the builder.

use crate::verdict::{Bounded, ChangedFile, Verdict};
use stillpoint_patch_differ::Refusal;

/// Reason why no patch was built. After every error the user's sources and the system's configuration are unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program could not be started.
    #[error("cannot run `{program}`: {source}; {hint}")]
    Spawn {
        /// Name of the program.
        program: String,
        /// Error of the system.
        source: std::io::Error,
        /// Debian package that contains the program.
        hint: String,
    },
    /// A program failed.
    #[error("{what} failed ({status}):\n{output}")]
    Command {
        /// Task of the program.
        what: String,
        /// Exit status.
        status: std::process::ExitStatus,
        /// The end of the program's output.
        output: String,
    },
    /// The clean environment cannot be made here.
    #[error("a clean build environment cannot be made here: {0}")]
    Environment(String),
    /// The system has no source list that fits.
    #[error("no source list of this system names {0}")]
    NoSources(String),
    /// A package or version is not in the archive.
    #[error("{}", not_in_archive(.package, .version, .available, .source_package))]
    NoSuchVersion {
        /// The package.
        package: String,
        /// Version that the caller requested.
        version: String,
        /// Versions that exist.
        available: String,
        /// Newest version that exists and is not known to be withheld.
        proposed: Option<String>,
        /// Source package of the binary package that has this name.
        source_package: Option<String>,
    },
    /// The archive lists a version and does not have its files.
    #[error("{package} {version} is listed and not served ({missing}); {}", newest(.package, .served))]
    Withheld {
        /// The package.
        package: String,
        /// Version that the caller requested, or the newest.
        version: String,
        /// First absent file, and the server's answer.
        missing: String,
        /// Newest other version that is served, if there is one.
        served: Option<String>,
    },
    /// A name is not in the series, or several entries fit.
    #[error("{name:?} names {found} of the series of {package}: {entries}")]
    Quilt {
        /// Name that the caller gave.
        name: String,
        /// The package and version.
        package: String,
        /// `no patch`, or the number of patches.
        found: String,
        /// Candidates.
        entries: String,
    },
    /// A diff is part of the source that the running binary was built from.
    #[error("{package}: {diff} is part of the running binary already")]
    AlreadyShipped {
        /// The package and version.
        package: String,
        /// Name of the diff.
        diff: String,
    },
    /// Text of a file does not have the expected form.
    #[error("{what}: {why}")]
    Malformed {
        /// The file or text.
        what: String,
        /// The fault.
        why: String,
    },
    /// A diff does not fit the source.
    #[error("diff {name} does not apply to {file}:\n{output}")]
    DoesNotApply {
        /// The diff.
        name: String,
        /// The file that it does not fit.
        file: String,
        /// The output of `patch`.
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
    /// The target could not be determined.
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
    /// The package compiles a unit in several ways, and the change makes different code of them.
    #[error(
        "{unit} is compiled in several ways that make other code of the change, and {target} may have been made by any of them"
    )]
    Ambiguous {
        /// The unit.
        unit: String,
        /// The target.
        target: String,
    },
    /// Changed files may be a part of the target, and no known command compiles them there.
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
    /// The program was optimised when it was linked, and its link was put off.
    #[error("{0} was optimised when it was linked, and the build has put off its link")]
    LinkPutOff(String),
    /// A unit could not be compiled.
    #[error("compiling {unit} ({side}) failed:\n{output}")]
    Compile {
        /// The unit.
        unit: String,
        /// `shipped`, `before` or `after`.
        side: &'static str,
        /// The output of the compiler.
        output: String,
    },
    /// The change breaks rules of live patching.
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// Members cannot be moved into shadow variables.
    #[error("{}", list_members(.0))]
    ShadowMembers(Vec<stillpoint_patch_shadow::Refusal>),
    /// The package and version of a running program are not known.
    #[error(transparent)]
    Provenance(#[from] stillpoint_patch_provenance::Error),
    /// A file of a kind that cannot be patched.
    #[error("{path} {why}")]
    Kind {
        /// The file.
        path: String,
        /// The kind, which continues the sentence.
        why: &'static str,
    },
    /// A running program is newer than what the archive serves.
    #[error("{package} {version} runs, and the newest version that the archive serves is {newest}")]
    NewerThanArchive {
        /// Source package.
        package: String,
        /// Version that runs.
        version: String,
        /// Newest version of the archive.
        newest: String,
    },
    /// A running program is of another release of the distribution.
    #[error("{path} runs in a root file system of {release}, and packages are taken from {own}")]
    OtherRelease {
        /// The program.
        path: String,
        /// Its release.
        release: String,
        /// Release of this system, or the one that the caller requested.
        own: String,
    },
    /// The source of the version that runs is nowhere.
    #[error("the source of {package} {version}, which runs, was not found{}: {source}", searched(.directories))]
    NoRunningSource {
        /// Source package.
        package: String,
        /// Version that runs.
        version: String,
        /// Directories of the caller that were searched.
        directories: Vec<std::path::PathBuf>,
        /// Answer of the archive.
        source: Box<Error>,
    },
    /// The cache or an output could not be read or written.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// Edits of an integration cannot be placed in the source.
    #[error(transparent)]
    Integration(#[from] stillpoint_integrations::Error),
    /// The finished patch or a key breaks a rule of the file format.
    #[error(transparent)]
    Format(#[from] stillpoint_patch_format::Error),
}

fn not_in_archive(package: &str, version: &str, available: &str, source_package: &Option<String>) -> String {
    match source_package {
        Some(source) => format!("source package {package} is not in the archive: it is a binary package of {source}"),
        None if available == NO_VERSION => format!("package {package} is not in the archive"),
        None => format!("package {package} {version} is not in the archive; it has {available}"),
    }
}

/// Text for a package of which the archive has no version.
pub(crate) const NO_VERSION: &str = "none";

fn searched(directories: &[std::path::PathBuf]) -> String {
    match directories {
        [] => String::new(),
        all => format!(
            " in {}, nor in the archive",
            all.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ")
        ),
    }
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

fn list_members(refusals: &[stillpoint_patch_shadow::Refusal]) -> String {
    let lines: Vec<String> = refusals.iter().map(|r| format!("{r} [{}]", r.code())).collect();
    format!("no shadow variable can hold the added member: {}", Bounded(&lines))
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
    /// Returns true if other diffs may have another result.
    pub(crate) fn is_about_diffs(&self) -> bool {
        let of_after = matches!(self, Error::DoesNotApply { .. } | Error::Compile { side: "after", .. });
        let of_code = matches!(
            self,
            Error::Refused(_) | Error::ChangesBuild { .. } | Error::NotInTarget { .. } | Error::Unaccounted { .. }
        );
        of_after || of_code
    }

    /// Returns the kinds of the reasons, for programs.
    pub fn codes(&self) -> Vec<String> {
        let code = match self {
            Error::Refused(refusals) => return refusals.iter().map(Refusal::code).collect(),
            Error::ShadowMembers(refusals) => return refusals.iter().map(|r| r.code().to_owned()).collect(),
            Error::Unaccounted { .. } => "unaccounted-file",
            Error::ChangesBuild { .. } => "build-changed",
            Error::NotInTarget { .. } => "not-in-target",
            Error::Ambiguous { .. } => "ambiguous",
            Error::DoesNotApply { .. } => "does-not-apply",
            Error::Compile { .. } => "does-not-compile",
            Error::Target(_) => "target",
            Error::Kind { .. } => "kind",
            Error::Provenance(_) => "origin-unknown",
            Error::NewerThanArchive { .. } => "newer-than-archive",
            Error::OtherRelease { .. } => "other-release",
            Error::NoRunningSource { .. } => "no-source",
            Error::NoSuchVersion { .. } | Error::Withheld { .. } => "not-served",
            _ => "failed",
        };
        vec![code.to_owned()]
    }

    /// Returns true if the change itself is refused, in contrast to a failed operation.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Error::Refused(_)
                | Error::ShadowMembers(_)
                | Error::ChangesBuild { .. }
                | Error::NotInTarget { .. }
                | Error::Ambiguous { .. }
                | Error::Unaccounted { .. }
                | Error::Provenance(_)
                | Error::Kind { .. }
                | Error::NewerThanArchive { .. }
                | Error::OtherRelease { .. }
                | Error::NoRunningSource { .. }
        )
    }
}
