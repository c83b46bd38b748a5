//! Definitions: `pg_dump` reads them from the snapshot, `pg_restore` makes them, indexes and constraints after the rows.

use crate::{Error, Server};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::process::Command;

/// Reads all definitions as the snapshot sees them.
pub(crate) async fn dump(source: &Server, major: u32, snapshot: &str, into: &Path) -> Result<(), Error> {
    let mut command = Command::new(program("pg_dump", major));
    command.args(["--format=custom", "--schema-only", "--no-publications", "--no-subscriptions"]);
    command.args(["--exclude-schema=stillpoint", "--lock-wait-timeout=2000"]).arg(format!("--snapshot={snapshot}"));
    command.arg("--file").arg(into).arg(&source.database).envs(source.environment());
    run(command, "pg_dump").await
}

/// Makes the database with its types, tables and functions, without indexes.
pub(crate) async fn create(target: &Server, major: u32, dump: &Path) -> Result<(), Error> {
    let mut command = Command::new(program("pg_restore", major));
    command.args(["--create", "--section=pre-data", "--exit-on-error", "--dbname=postgres"]).arg(dump);
    command.envs(target.environment()).env("PGOPTIONS", LAZY);
    run(command, "pg_restore").await
}

/// Nothing waits for the disk: a later commit does, before anything is made of what was written.
const LAZY: &str = "-c synchronous_commit=off";

/// Makes indexes, constraints and triggers, several at a time; `alone` by one process of the server, which leaves the other
/// processors to clients.
pub(crate) async fn complete(target: &Server, major: u32, dump: &Path, jobs: usize, alone: bool) -> Result<(), Error> {
    let mut command = Command::new(program("pg_restore", major));
    let jobs = if alone { 1 } else { jobs };
    command.args(["--section=post-data", "--exit-on-error"]).arg(format!("--jobs={jobs}"));
    command.arg(format!("--dbname={}", target.database)).arg(dump).envs(target.environment());
    let processes = if alone { " -c max_parallel_maintenance_workers=0" } else { "" };
    command.env("PGOPTIONS", format!("{LAZY}{processes}"));
    run(command, "pg_restore").await
}

/// The program of one major version where Debian puts it, else the one on the path.
fn program(name: &str, major: u32) -> PathBuf {
    let path = PathBuf::from(format!("/usr/lib/postgresql/{major}/bin/{name}"));
    if path.exists() { path } else { name.into() }
}

async fn run(mut command: Command, program: &str) -> Result<(), Error> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let failed = |why: String| Error::Program { program: program.into(), why };
    let output = command.output().await.map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(failed(text.lines().find(|line| line.contains("error")).unwrap_or(text.trim()).to_owned()))
}
