//! The release of Debian whose packages are tested. On a system of another release its lists are read beside the
//! system's own, from the same archive, and no package counts as installed: a package is unpacked with all that it
//! depends on.

use super::run;
use crate::{recipes, workspace_root};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use stillpoint_host::cache;

const TESTED_RELEASE: &str = "bookworm";

/// Time after which lists are read again.
pub(super) const LISTS_MAX_AGE: Duration = Duration::from_secs(3600);

/// Returns the release whose packages are tested, if the system is of another one.
pub fn foreign_release() -> Option<&'static str> {
    let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    (!is_release(&system, TESTED_RELEASE)).then_some(TESTED_RELEASE)
}

fn is_release(os_release: &str, codename: &str) -> bool {
    let named = os_release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    named.is_some_and(|name| name.trim_matches('"') == codename)
}

/// Returns a command of apt that uses the tested release.
pub(super) fn command(program: impl AsRef<std::ffi::OsStr>) -> Result<Command, String> {
    let mut command = Command::new(program);
    if let Some(release) = foreign_release() {
        command.env("APT_CONFIG", configuration(release)?);
    }
    Ok(command)
}

/// Returns the lines of a list of `release`, at the archives that the system's own lists name.
pub(super) fn list(release: &str) -> Result<String, String> {
    run(Command::new(workspace_root().join("setup/archive")).arg(release))
}

/// Returns a configuration of apt for `release`, whose lists are at most an hour old.
fn configuration(release: &str) -> Result<PathBuf, String> {
    let dir = recipes::directory("lists", release)?;
    let file = dir.join("apt.conf");
    fresh(&dir, || {
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).map_err(|e| format!("write {}: {e}", path.display()))
        };
        write("release.list", &list(release)?)?;
        write("status", "")?;
        write("apt.conf", &settings(&dir))?;
        run(Command::new("apt-get").env("APT_CONFIG", &file).args(["-qq", "update"])).map(drop)
    })?;
    Ok(file)
}

fn settings(dir: &Path) -> String {
    let place = |name: &str, file: &str| format!("{name} \"{}\";\n", dir.join(file).display());
    [
        place("Dir::Etc::sourcelist", "release.list"),
        place("Dir::State::lists", "lists"),
        place("Dir::State::status", "status"),
        "Dir::Etc::sourceparts \"/dev/null\";\nDir::Etc::preferencesparts \"/dev/null\";\n".into(),
        "Dir::Cache::pkgcache \"\";\nDir::Cache::srcpkgcache \"\";\nAPT::Sandbox::User \"\";\n".into(),
    ]
    .concat()
}

/// Calls `fetch`, which fills `lists` in `dir`, unless it succeeded here within the last hour and all of that is there.
/// Callers wait for each other.
pub(super) fn fresh(dir: &Path, fetch: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let failed = |what: &str, path: &Path, error: std::io::Error| format!("{what} {}: {error}", path.display());
    let lists = dir.join("lists");
    let lock = dir.join("lock");
    let file = File::create(&lock).map_err(|e| failed("make", &lock, e))?;
    flock(&file, FlockOperation::LockExclusive).map_err(|e| failed("lock", &lock, e.into()))?;
    let stamp = dir.join("fetched");
    let age = std::fs::metadata(&stamp).and_then(|data| data.modified()).map(|at| at.elapsed().unwrap_or_default());
    let whole = cache::is_sealed(&lists);
    if whole && age.is_ok_and(|age| age < LISTS_MAX_AGE) {
        return Ok(());
    }
    if !whole {
        // apt trusts the size and the time of an existing list, which may have been truncated.
        cache::remove(&lists).map_err(|e| e.to_string())?;
    }
    let partial = lists.join("partial");
    std::fs::create_dir_all(&partial).map_err(|e| failed("make", &partial, e))?;
    fetch()?;
    cache::seal(&lists, &["partial"]).map_err(|e| e.to_string())?;
    std::fs::write(&stamp, "").map_err(|e| failed("write", &stamp, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_of_a_system_is_read() {
        let trixie = "NAME=\"Debian GNU/Linux\"\nVERSION_CODENAME=trixie\nID=debian\n";
        assert!(is_release(trixie, "trixie") && !is_release(trixie, "bookworm") && !is_release("", "bookworm"));
        assert!(is_release("VERSION_CODENAME=\"bookworm\"\n", "bookworm"));
    }

    #[test]
    fn what_is_fresh_is_not_fetched_again_and_a_failure_is() {
        let dir = tempfile::tempdir().expect("a directory");
        fresh(dir.path(), || Err("no network".into())).expect_err("the failure is told");
        let mut fetched = 0;
        for _ in 0..2 {
            fresh(dir.path(), || {
                fetched += 1;
                Ok(())
            })
            .expect("it is fetched");
        }
        assert_eq!(fetched, 1);
    }
}
