//! Checks of the tree itself, and the runner of all tests: `cargo run -p xtask -- COMMAND`.
//!
//! | command | what it does |
//! |---|---|
//! | `tidy` | checks the rules of the tree: layers, purity, words, documents |
//! | `check` | formatting, lints, tidy, repeated code |
//! | `test` | every test of the tree, quick ones first, one line each, and the count as the last line |
//! | `test-full` | every test in its long form, in any tier; resumes where it stopped |
//! | `soak` | the long form of the end-to-end tests, round after round for `SOAK_HOURS` (8); resumes where it stopped |
//! | `fuzz` | every decoder under a coverage-guided fuzzer, `STILLPOINT_FUZZ_SECONDS` each (12) |
//! | `generations` | a kernel with address-space generations, and its tests in an emulated machine |
//! | `generations-short` | the same with those tests that `test` runs |
//! | `cache` | `list`, `clean`, `evict`, `root`; `path NAME` makes what tests take from outside the tree and prints where it is |
//!
//! Guarantees: exit code 0 only when every requested check ran and passed; nothing outside `target/`, the cache,
//! `fuzz/findings/` and (by `soak`) `experiments/` is written. It builds nothing that a user runs.

mod background_build;
mod cache;
mod full_tier;
mod fuzz;
mod generations;
mod process;
mod programs;
mod record;
mod result_cache;
mod runner;
mod schedule;
mod soak;
mod summary;
mod tidy;

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(std::env::args().nth(1).as_deref()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Option<&str>) -> Result<bool> {
    let root = root();
    match command {
        Some("tidy") => tidy::run(&root),
        Some("check") => runner::check(&root),
        Some("test") => runner::test(&root),
        Some("test-full") => full_tier::run(&root),
        Some("soak") => soak::run(&root),
        Some("fuzz") => runner::alone(&root, fuzz::test),
        Some("generations") => runner::alone(&root, generations::test),
        Some("generations-short") => runner::alone(&root, generations::short),
        Some("cache") => cache::run(&std::env::args().skip(2).collect::<Vec<_>>()),
        _ => bail!(
            "usage: xtask tidy | check | test | test-full | soak | fuzz | generations | generations-short | cache"
        ),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// Runs `cargo metadata` for the workspace's own packages.
fn metadata(root: &Path) -> Result<cargo_metadata::Metadata> {
    metadata_command(root).no_deps().exec().context("cargo metadata")
}

/// Runs `cargo metadata` with the dependencies of each package that are built here: cargo downloads no crates for other platforms.
fn resolved_metadata(root: &Path) -> Result<cargo_metadata::Metadata> {
    let mut command = metadata_command(root);
    command.other_options(["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"].map(str::to_owned));
    command.exec().context("cargo metadata")
}

fn metadata_command(root: &Path) -> cargo_metadata::MetadataCommand {
    let mut command = cargo_metadata::MetadataCommand::new();
    command.manifest_path(root.join("Cargo.toml")).other_options(["--locked".to_owned(), "--offline".to_owned()]);
    command
}
