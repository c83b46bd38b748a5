//! Clean roots: the release, `build-essential` and one package's build dependencies, nothing else. A stray header
//! changes code, so no build reads headers of the system on which it runs.

use crate::apt::{Apt, text_of};
use crate::fetch_failure::all_absent;
use crate::package::SourcePackage;
use crate::sandbox::{Sandbox, output, run, tail};
use crate::{Builder, Error, Event};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use stillpoint_host::EntryName;
use stillpoint_host::file::read_regular;
use stillpoint_host::untrusted::{FILE_MAX, Tree};

/// Directory of sources during a build, as on the archive's own builders: the path is part of debug information and,
/// with some packages, of `__FILE__`.
pub(crate) const BUILD_PATH: &str = "/build/reproducible-path";
/// Directory of the recording compiler, its records and the objects, inside the root.
pub(crate) const OWN_PATH: &str = "/stillpoint";

/// Directories of a clean root that builds write to.
const CHANGING: [&str; 7] =
    ["build/reproducible-path", "stillpoint/out", "stillpoint/real", "stillpoint/records", "run", "tmp", "var/tmp"];

/// Documentation and translations: no compiler reads them.
const LEAVE_OUT: [&str; 4] = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*"];

/// Programs of packages' installation that no build needs, and that take minutes: modules of Python work without their
/// compiled form.
const NOT_RUN: [&str; 1] = ["/usr/bin/py3compile"];

/// Path of apt's preferences, inside the root, for versions that the archive does not serve.
const PREFERENCES: &str = "etc/apt/preferences.d/stillpoint";
/// Limit of attempts to make a root, each without the versions that were not served before. One attempt finds all
/// withheld versions that it needs; versions that replace these may be withheld as well.
const ATTEMPTS_MAX: usize = 8;

/// Makes the root for a source package; packages with the same build dependencies share one.
pub(crate) fn for_package(builder: &Builder, apt: &Apt, source: &SourcePackage) -> Result<PathBuf, Error> {
    // from the description: the root's own lists may not have this version
    // with what only the package's tests need: its rules may look for that all the same
    let install = format!("DEBIAN_FRONTEND=noninteractive apt-get -q -y --arch-only build-dep /{DESCRIPTION}");
    make(builder, apt, source, source.name(), &install, &[])
}

/// Path of the source package's description, inside the root.
const DESCRIPTION: &str = "stillpoint/source.dsc";

/// Path, inside the root, of the list of absent dependencies.
const LEFT_OUT: &str = "stillpoint/left-out";

/// Makes a root of one release for a source package of another. Build dependencies that the release lacks are left out
/// and listed; the package's own rules must work without them.
pub(crate) fn for_foreign(builder: &Builder, apt: &Apt, source: &SourcePackage) -> Result<PathBuf, Error> {
    let stanza = &source.stanza;
    let install = format!(
        "rm -f /{LEFT_OUT}; for one; do \
             if apt-get -q -q -s satisfy \"$one\" >/dev/null 2>&1; then set -- \"$@\" \"$one\"; else echo \"$one\" >> /{LEFT_OUT}; fi; \
             shift; \
         done; DEBIAN_FRONTEND=noninteractive apt-get -q -y satisfy \"$@\""
    );
    let dependencies = dependencies(&stanza.build_depends);
    let name = format!("{}-foreign", stanza.package);
    let root = make(builder, apt, source, &name, &install, &dependencies)?;
    let left_out = Tree::open(&root)?.read_existing(LEFT_OUT)?.unwrap_or_default();
    for left_out in String::from_utf8_lossy(&left_out).lines() {
        tracing::warn!(package = stanza.package, left_out, "this release has no such build dependency");
    }
    Ok(root)
}

/// Returns the entries of all `Build-Depends` fields.
fn dependencies(fields: &str) -> Vec<&str> {
    let lists = fields.lines().filter(|l| l.starts_with("Build-Depends")).filter_map(|l| l.split_once(':'));
    lists.flat_map(|(_, list)| list.split(',')).map(str::trim).filter(|entry| !entry.is_empty()).collect()
}

fn make(
    builder: &Builder,
    apt: &Apt,
    source: &SourcePackage,
    name: &str,
    install: &str,
    arguments: &[&str],
) -> Result<PathBuf, Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Environment(
            "it needs root, for mounts and for the package manager; as a user, unpack and configure the source \
             yourself and use --source"
                .into(),
        ));
    }
    let stanza = &source.stanza;
    let sources = apt.archives.to_text();
    let parts = [&sources, &stanza.package, &stanza.build_depends, install];
    let name = format!("{name}-{}", stillpoint_host::cache::key(parts.map(|part| part.as_bytes())));
    builder.entry(&EntryName::new("root", &name).changing(&CHANGING), |into| {
        let base = base(builder, apt, &sources)?;
        let mut copy = Command::new("cp");
        copy.args(["-a", "--reflink=auto", "--no-target-directory"]).arg(&base).arg(into);
        run(&mut copy, "copying the clean root")?;
        let root = Tree::open(into)?.known_as(Path::new("/"));
        root.write(DESCRIPTION, &read_regular(&source.description, FILE_MAX)?)?;
        let resolver = Path::new("/etc/resolv.conf");
        if resolver.exists() {
            root.write(resolver, &read_regular(resolver, FILE_MAX)?)?;
        }
        let inside = Sandbox { root: Some(into.to_owned()), network: true, ..Sandbox::default() };
        let script = format!("apt-get -q update && {{ {install}; }} && apt-get clean");
        let argv = [&["/bin/sh", "-c", &script, "sh"], arguments].concat();
        let what = format!("installing the build dependencies of {} {}", stanza.package, stanza.version);
        with_served(builder, apt, &what, |preferences| {
            root.write(PREFERENCES, preferences.as_bytes())?;
            output(&mut inside.command(Path::new("/"), &argv, &[]))
        })
    })
}

/// Runs an installation of packages, and repeats it without the versions that the archive lists and does not serve,
/// until all packages are served. `attempt` gets the text of apt's preferences.
fn with_served(
    builder: &Builder,
    apt: &Apt,
    what: &str,
    mut attempt: impl FnMut(&str) -> Result<Output, Error>,
) -> Result<(), Error> {
    apt.need_lists()?;
    let known = apt.exclusions().packages();
    for _ in 0..ATTEMPTS_MAX {
        let exclusions = apt.exclusions();
        let output = attempt(&exclusions.preferences())?;
        let left_out = exclusions.packages();
        if output.status.success() {
            if !left_out.is_empty() {
                builder.report(Event::DependenciesLeftOut { packages: left_out });
            }
            return Ok(());
        }
        let absent = all_absent(&text_of(&output)).unwrap_or_default();
        if absent.is_empty() || !apt.exclude_binaries(&absent)? {
            let mut what = what.to_owned();
            if !left_out.is_empty() {
                what = format!("{what} without {}, which are listed and not served,", left_out.join(", "));
            }
            return Err(Error::Command { what, status: output.status, output: tail(&output) });
        }
        builder.progress(&format!("{what} once more: the archive does not serve {}", absent[0].file));
    }
    let added: Vec<String> = apt.exclusions().packages().into_iter().filter(|p| !known.contains(p)).collect();
    let why = format!("after {ATTEMPTS_MAX} attempts versions are still listed and not served: {}", added.join(", "));
    Err(Error::Malformed { what: what.to_owned(), why })
}

fn base(builder: &Builder, apt: &Apt, sources: &str) -> Result<PathBuf, Error> {
    let codename = &apt.archives.codename;
    let not_run = NOT_RUN.map(|path| {
        let divert = "dpkg-divert --quiet --local --rename --add";
        format!("--customize-hook=chroot \"$1\" {divert} {path} && ln -s ../../bin/true \"$1{path}\"")
    });
    let parts = [sources].into_iter().chain(not_run.iter().map(String::as_str)).map(str::as_bytes);
    let name = format!("{codename}-{}", stillpoint_host::cache::key(parts));
    builder.entry(&EntryName::new("root", &name).changing(&CHANGING), |into| {
        let scratch = builder.cache.scratch()?;
        let own = Tree::open(scratch.path())?;
        own.write("archive.sources", sources.as_bytes())?;
        own.write("apt.conf", apt.proxies()?.as_bytes())?;
        let [list, options, preferences] =
            ["archive.sources", "apt.conf", "preferences"].map(|name| scratch.path().join(name));
        let mut command = Command::new("mmdebstrap");
        command.args(["--mode=root", "--variant=buildd", "--skip=check/empty"]);
        command.arg("--aptopt=Apt::Install-Recommends \"false\"").arg("--aptopt=Acquire::Languages \"none\"");
        command.arg(format!("--aptopt={}", options.display())).arg("--dpkgopt=force-unsafe-io");
        command.args(LEAVE_OUT.map(|path| format!("--dpkgopt=path-exclude={path}"))).args(&not_run);
        command.arg(format!("--setup-hook=install -D -m 644 \"{}\" \"$1/{PREFERENCES}\"", preferences.display()));
        for ring in apt.archives.key_rings() {
            if let Some(parent) = ring.parent() {
                let (ring, parent) = (ring.display(), parent.display());
                command.arg(format!("--setup-hook=mkdir -p \"$1{parent}\"; cp -L \"{ring}\" \"$1{ring}\""));
            }
        }
        command.arg(codename).arg(into).arg(&list);
        with_served(builder, apt, &format!("making a clean root of {codename}"), |text| {
            stillpoint_host::cache::remove(into)?;
            Tree::make(into)?;
            own.write("preferences", text.as_bytes())?;
            output(&mut command)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_taken_apart() {
        let fields = "Build-Depends: a (>= 1), b [!alpha] | c,\nBuild-Depends-Arch: d <!nocheck>\nBuild-Conflicts: e\n";
        assert_eq!(dependencies(fields), ["a (>= 1)", "b [!alpha] | c", "d <!nocheck>"]);
    }
}
