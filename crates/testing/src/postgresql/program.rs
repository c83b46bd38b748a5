//! Debian's programs, run as `postgres`.

use crate::{Unavailable, packages};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The major version of Debian 12.
pub(crate) const MAJOR: u32 = 15;

/// The major version that `setup/postgresql` installs beside the system.
pub const NEWER_MAJOR: u32 = 17;

/// Programs of one version: installed, beside the system, or unpacked.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Directory of `postgres`, `psql` and the others.
    dir: PathBuf,
    environment: Vec<(&'static str, OsString)>,
    /// Directory of unpacked programs, which a cluster copies into its own directory.
    root: Option<PathBuf>,
}

impl Programs {
    /// Returns the programs of a major version: installed, or else unpacked.
    pub(crate) fn of_major(major: u32) -> Programs {
        let installed = PathBuf::from(format!("/usr/lib/postgresql/{major}/bin"));
        let dir = match installed.exists() {
            true => installed,
            false if major == MAJOR && packages::foreign_release().is_some() => match Programs::unpacked(None) {
                Ok(programs) => return programs,
                Err(why) => {
                    crate::skipped(why);
                    installed
                }
            },
            false => beside().join(format!("usr/lib/postgresql/{major}/bin")),
        };
        Programs { dir, environment: Vec::new(), root: None }
    }

    /// Unpacks the programs of one version of Debian's packages, even if others are installed.
    ///
    /// # Errors
    /// The packages cannot be downloaded.
    pub fn of_version(version: &str) -> Result<Programs, Unavailable> {
        Programs::unpacked(Some(version))
    }

    fn unpacked(version: Option<&str>) -> Result<Programs, Unavailable> {
        let path = format!("usr/lib/postgresql/{MAJOR}/bin/postgres");
        let binary = packages::binary(&PACKAGES, version, &path)?;
        let root = binary.path.ancestors().nth(6).map(Path::to_owned);
        let dir = binary.path.parent().expect("a program lies in a directory").to_owned();
        Ok(Programs { dir, environment: binary.environment(), root })
    }

    /// Copies the unpacked programs below `dir`: the user `postgres` may have no access to the cache.
    pub(crate) fn copy_below(self, dir: &Path) -> Programs {
        let Some(root) = self.root else { return self };
        let copy = dir.join("programs");
        let copied = Command::new("cp").arg("-a").arg(&root).arg(&copy).status().expect("run cp");
        assert!(copied.success(), "copy {}", root.display());
        let inside = |path: &Path| copy.join(path.strip_prefix(&root).expect("a path below what was unpacked"));
        let environment = self.environment.iter().map(|(name, paths)| {
            let paths = std::env::split_paths(paths).map(|path| inside(&path));
            (*name, std::env::join_paths(paths).expect("paths of a cluster contain no colon"))
        });
        Programs { dir: inside(&self.dir), environment: environment.collect(), root: None }
    }

    /// Returns the directory of the libraries that the server loads.
    pub(crate) fn library_dir(&self) -> PathBuf {
        self.dir.with_file_name("lib")
    }

    /// Returns a command that runs one of them as `postgres`.
    pub(crate) fn command(&self, name: &str) -> Command {
        let mut command = as_postgres(&self.dir.join(name));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    fn exist(&self) -> bool {
        self.dir.join("postgres").exists()
    }
}

/// Packages of server and clients, which must be of one version.
const PACKAGES: [&str; 2] = ["postgresql-15", "postgresql-client-15"];

/// Returns the newest version of which the archive serves server, clients, the headers for loadable libraries, and the
/// source.
pub(crate) fn version_with_source() -> Result<String, Unavailable> {
    let [server, clients] = PACKAGES;
    let versions = packages::versions_with_source(&[server, clients, "postgresql-server-dev-15"])?;
    Ok(versions.into_iter().next().expect("at least one is served"))
}

fn beside() -> PathBuf {
    crate::recipes::postgresql().map_or_else(|_| PathBuf::from("/nonexistent"), |entry| entry.join("root"))
}

/// Returns true if clusters of [`NEWER_MAJOR`] can be started too; missing files are downloaded beside the system. Prints the
/// reason if not.
pub fn newer_available() -> bool {
    if !available() {
        return false;
    }
    if Programs::of_major(NEWER_MAJOR).exist() {
        return true;
    }
    crate::recipes::postgresql().inspect_err(|why| crate::skipped(why)).is_ok()
}

/// Returns true if clusters can be started here. Prints the reason if not; with `REQUIRE_ALL=1` it panics instead. The
/// calling test has a limited time from here on ([`crate::test_timeout`]).
pub fn available() -> bool {
    crate::test_timeout::start();
    let why = if !rustix::process::geteuid().is_root() {
        "clusters are started as `postgres`, which requires root"
    } else if !Programs::of_major(MAJOR).exist() {
        "postgresql-15 is not installed"
    } else {
        return true;
    };
    crate::skipped(why);
    false
}

/// Returns a command that runs `program` as `postgres`; the kernel ends it if the calling thread ends first.
pub(crate) fn as_postgres(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "postgres", "--regid", "postgres", "--init-groups", "--pdeathsig", "KILL", "--"]);
    // `postgres` cannot read root's home, and libpq aborts TLS if it cannot look for certificates.
    command.arg(program).env("LC_ALL", "C").env("HOME", "/nonexistent").env_remove("PGPASSWORD").stdin(Stdio::null());
    command
}

/// Returns user and group id of `postgres`, from the machine's own list.
pub(crate) fn postgres_ids() -> (u32, u32) {
    let list = std::fs::read_to_string("/etc/passwd").expect("read /etc/passwd");
    let entry = list.lines().find(|line| line.starts_with("postgres:")).expect("the machine has a user postgres");
    let mut fields = entry.split(':').skip(2).map(|field| field.parse().expect("ids are numbers"));
    let mut next = || fields.next().expect("an entry has two ids");
    (next(), next())
}
