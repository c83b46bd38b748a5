//! PostgreSQL's own regression tests, and a server of exactly their version.

use crate::program::{Programs, version_with_source};
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_testing::{Unavailable, cache_dir};

/// Tests, expected output and library of one version. Those of another version may name functions that the server does not have.
#[derive(Debug, Clone)]
pub struct Regression {
    /// Directory of `sql`, `data`, `expected`, `parallel_schedule` and `regress.so`.
    pub tests: PathBuf,
    /// Programs of the same version, unpacked.
    pub programs: Programs,
}

impl Regression {
    /// Those of the newest version that the archive serves with its source. `fetch DIR VERSION` puts the tests into a directory.
    pub fn fetch(fetch: &Path) -> Result<Regression, Unavailable> {
        let version = version_with_source()?;
        let tests = cache_dir().join(format!("postgres-regress_{version}"));
        let output = Command::new(fetch).arg(&tests).arg(&version).output();
        let output = output.map_err(|e| format!("run {}: {e}", fetch.display()))?;
        if !output.status.success() {
            return Err(Unavailable::of_setup(&output));
        }
        println!("tests and servers are PostgreSQL {version}");
        Ok(Regression { tests, programs: Programs::of_version(&version)? })
    }
}
