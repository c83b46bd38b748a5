//! Debian's programs, run as `postgres`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The major version that Debian 12 has.
pub(crate) const MAJOR: u32 = 15;

/// The major version that `setup/postgresql` puts beside the system.
pub const NEWER: u32 = 17;

/// Where the programs of a major version lie: installed, or beside the system.
pub(crate) fn programs(major: u32) -> PathBuf {
    let installed = PathBuf::from(format!("/usr/lib/postgresql/{major}/bin"));
    if installed.exists() { installed } else { beside().join(format!("usr/lib/postgresql/{major}/bin")) }
}

fn beside() -> PathBuf {
    stillpoint_testing::recipes::postgresql().map_or_else(|_| PathBuf::from("/nonexistent"), |entry| entry.join("root"))
}

/// Whether clusters of [`NEWER`] can be started too; what is missing is downloaded beside the system. Says why not.
pub fn newer_available() -> bool {
    if !available() {
        return false;
    }
    if Path::new(&format!("/usr/lib/postgresql/{NEWER}/bin/postgres")).exists() {
        return true;
    }
    let made = stillpoint_testing::recipes::postgresql();
    made.inspect_err(|why| stillpoint_testing::skipped(why)).is_ok()
}

/// Whether clusters can be started here. Says why not; with `REQUIRE_ALL=1` it panics instead. The calling test has a limited
/// time from here on ([`stillpoint_testing::patience`]).
pub fn available() -> bool {
    stillpoint_testing::patience::begin();
    let why = if !rustix::process::geteuid().is_root() {
        "clusters are started as `postgres`, which takes root"
    } else if !programs(MAJOR).join("postgres").exists() {
        "postgresql-15 is not installed"
    } else {
        return true;
    };
    stillpoint_testing::skipped(why);
    false
}

/// A command that runs `program` as `postgres`; the kernel ends it should the calling thread end first.
pub(crate) fn as_postgres(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "postgres", "--regid", "postgres", "--init-groups", "--pdeathsig", "KILL", "--"]);
    // Root's home is not for postgres to look into, and libpq gives TLS up where it may not look for certificates.
    command.arg(program).env("LC_ALL", "C").env("HOME", "/nonexistent").env_remove("PGPASSWORD").stdin(Stdio::null());
    command
}
