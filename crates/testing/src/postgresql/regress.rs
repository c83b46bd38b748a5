//! PostgreSQL's own regression tests, and a server of exactly their version.

use super::program::{Programs, version_with_source};
use crate::{Unavailable, recipes};
use std::fs;
use std::path::{Path, PathBuf};

/// Tests, expected output and library of one version. Tests of another version may name functions that the server does
/// not have.
#[derive(Debug, Clone)]
pub struct Regression {
    /// Directory of `sql`, `data`, `expected`, `parallel_schedule` and `regress.so`.
    pub tests: PathBuf,
    /// Programs of the same version, unpacked.
    pub programs: Programs,
}

impl Regression {
    /// Returns those of the newest version that the archive serves with its source. `fetch DIR VERSION` puts the tests
    /// into a directory.
    ///
    /// # Errors
    /// The archive serves no version with its source, or the tests cannot be fetched.
    pub fn fetch(fetch: &Path) -> Result<Regression, Unavailable> {
        let version = version_with_source()?;
        let tests = recipes::postgres_regress(fetch, &version)?;
        println!("tests and servers are PostgreSQL {version}");
        Ok(Regression { tests, programs: Programs::of_version(&version)? })
    }

    /// Returns the names of all tests in their order.
    pub fn schedule(&self) -> Vec<String> {
        let text = fs::read_to_string(self.tests.join("parallel_schedule")).expect("read the schedule");
        let lines = text.lines().filter_map(|line| line.strip_prefix("test: "));
        lines.flat_map(|line| line.split_whitespace().map(str::to_owned)).collect()
    }
}
