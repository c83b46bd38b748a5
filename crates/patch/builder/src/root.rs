//! Clean roots: the release, `build-essential` and one package's build dependencies, nothing else. A stray header
//! changes code, so no build looks at the system it runs on.

use crate::apt::{Apt, SourceStanza};
use crate::error::At;
use crate::sandbox::{Sandbox, run};
use crate::{Cache, Error};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::EntryName;

/// Where sources stand while they are built, as on the archive's own builders: the path shows in debug information
/// and, with some packages, in `__FILE__`.
pub(crate) const BUILD_PATH: &str = "/build/reproducible-path";
/// Where the recording compiler, its records and the objects lie inside.
pub(crate) const OWN_PATH: &str = "/stillpoint";

/// Where builds write into a clean root.
const CHANGING: [&str; 6] =
    ["build/reproducible-path", "stillpoint/out", "stillpoint/records", "run", "tmp", "var/tmp"];

/// Documentation and translations are no input of any compiler.
const LEAVE_OUT: [&str; 4] = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*"];

/// The root for a source package; packages with the same build dependencies share one.
pub(crate) fn for_package(cache: &Cache, apt: &Apt, stanza: &SourceStanza) -> Result<PathBuf, Error> {
    let what = format!("{}={}", stanza.package, stanza.version);
    let install = format!("DEBIAN_FRONTEND=noninteractive apt-get -q -y --arch-only build-dep '{what}'");
    make(cache, apt, stanza, &stanza.package, &install, &[])
}

/// Where a root tells what it lacks.
const LEFT_OUT: &str = "stillpoint/left-out";

/// A root of one release for a source package of another: what that release lacks of the build dependencies is left
/// out, and named. The package's own rules must do without it.
pub(crate) fn for_foreign(cache: &Cache, apt: &Apt, stanza: &SourceStanza) -> Result<PathBuf, Error> {
    let install = format!(
        "for one; do \
             if apt-get -q -q -s satisfy \"$one\" >/dev/null 2>&1; then set -- \"$@\" \"$one\"; else echo \"$one\" >> /{LEFT_OUT}; fi; \
             shift; \
         done; DEBIAN_FRONTEND=noninteractive apt-get -q -y satisfy \"$@\""
    );
    let dependencies = dependencies(&stanza.build_depends);
    let name = format!("{}-foreign", stanza.package);
    let root = make(cache, apt, stanza, &name, &install, &dependencies)?;
    for left_out in fs::read_to_string(root.join(LEFT_OUT)).unwrap_or_default().lines() {
        tracing::warn!(package = stanza.package, left_out, "this release has no such build dependency");
    }
    Ok(root)
}

/// The entries of all `Build-Depends` fields.
fn dependencies(fields: &str) -> Vec<&str> {
    let lists = fields.lines().filter(|l| l.starts_with("Build-Depends")).filter_map(|l| l.split_once(':'));
    lists.flat_map(|(_, list)| list.split(',')).map(str::trim).filter(|entry| !entry.is_empty()).collect()
}

fn make(
    cache: &Cache,
    apt: &Apt,
    stanza: &SourceStanza,
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
    let sources = apt.archives.to_text();
    let key =
        stillpoint_host::cache::key([sources.as_bytes(), stanza.package.as_bytes(), stanza.build_depends.as_bytes()]);
    let name = format!("{name}-{key}");
    cache.entry(&EntryName::new("root", &name).changing(&CHANGING), |into| {
        let base = base(cache, apt, &sources)?;
        let mut copy = Command::new("cp");
        copy.args(["-a", "--reflink=auto", "--no-target-directory"]).arg(&base).arg(into);
        run(&mut copy, "copying the clean root")?;
        for directory in [BUILD_PATH, "/stillpoint/bin", "/stillpoint/records", "/stillpoint/out"] {
            let path = into.join(directory.trim_start_matches('/'));
            fs::create_dir_all(&path).at("making", &path)?;
        }
        let resolver = into.join("etc/resolv.conf");
        if Path::new("/etc/resolv.conf").exists() {
            fs::copy("/etc/resolv.conf", &resolver).at("writing", &resolver)?;
        }
        let inside = Sandbox { root: Some(into.to_owned()), network: true, ..Sandbox::default() };
        let script = format!("apt-get -q update && {{ {install}; }} && apt-get clean");
        let argv = [&["/bin/sh", "-c", &script, "sh"], arguments].concat();
        let mut command = inside.command(Path::new("/"), &argv, &[]);
        let what = format!("installing the build dependencies of {} {}", stanza.package, stanza.version);
        run(&mut command, &what).map(drop)
    })
}

fn base(cache: &Cache, apt: &Apt, sources: &str) -> Result<PathBuf, Error> {
    let codename = &apt.archives.codename;
    let name = format!("{codename}-{}", stillpoint_host::cache::key([sources.as_bytes()]));
    cache.entry(&EntryName::new("root", &name).changing(&CHANGING), |into| {
        let list = into.with_extension("sources");
        fs::write(&list, sources).at("writing", &list)?;
        let options = into.with_extension("conf");
        fs::write(&options, apt.proxies()?).at("writing", &options)?;
        let mut command = Command::new("mmdebstrap");
        command.args(["--quiet", "--mode=root", "--variant=buildd", "--skip=check/empty"]);
        command.arg("--aptopt=Apt::Install-Recommends \"false\"").arg("--aptopt=Acquire::Languages \"none\"");
        command.arg(format!("--aptopt={}", options.display())).arg("--dpkgopt=force-unsafe-io");
        command.args(LEAVE_OUT.map(|path| format!("--dpkgopt=path-exclude={path}")));
        for ring in apt.archives.key_rings() {
            if let Some(parent) = ring.parent() {
                let (ring, parent) = (ring.display(), parent.display());
                command.arg(format!("--setup-hook=mkdir -p \"$1{parent}\"; cp -L \"{ring}\" \"$1{ring}\""));
            }
        }
        command.arg(codename).arg(into).arg(&list);
        run(&mut command, &format!("making a clean root of {codename}"))?;
        for file in [&list, &options] {
            fs::remove_file(file).at("removing", file)?;
        }
        Ok(())
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
