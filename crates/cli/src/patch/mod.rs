//! `stillpoint patch`: one file per subcommand.

mod apply;
mod build;
mod building;
mod check;
mod disable;
mod enable;
mod enabled;
mod exec;
mod exec_helper;
mod gdb;
mod inspect;
mod key;
mod list;
mod outdated;
mod processes;
mod refresh;
mod revert;
mod running;
mod scan;
mod scan_text;
mod shadow_members;
mod status;
mod sweep;
mod target;
mod upgrade;
mod upgrade_report;
mod wave;

pub(crate) use processes::duration;

use crate::lazy_command::LazyCommand;
use crate::output::{Failure, Output, Success};
use std::ffi::OsString;
use stillpoint_patch_engine::IdlePriority;

/// `stillpoint patch ...`
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Build a live patch from source diffs.
    Build(Box<LazyCommand<build::Args>>),
    /// Fetch the program that a patch is for: as its package builds it, or as the archive has it.
    Target(LazyCommand<target::Args>),
    /// Show the contents of a patch file, with reasons.
    Inspect(LazyCommand<inspect::Args>),
    /// Create and show keys that sign patch files.
    Key(LazyCommand<key::Args>),
    /// Apply patches to running processes.
    Apply(Box<LazyCommand<apply::Args>>),
    /// Check that patches can be applied, and report threads that would block; changes nothing.
    Check(LazyCommand<check::Args>),
    /// Show the patches of a process, verified against its memory.
    Status(LazyCommand<status::Args>),
    /// Revert patches.
    Revert(LazyCommand<revert::Args>),
    /// List all processes of this machine that have patches.
    List(LazyCommand<list::Args>),
    /// Compare every running process with what is installed and what the archive offers.
    Scan(LazyCommand<scan::Args>),
    /// Bring every outdated program and library that runs to the newest code: scan, build, apply, verify.
    Upgrade(Box<LazyCommand<upgrade::Args>>),
    /// Run a program that is patched before its first instruction.
    Exec(Box<LazyCommand<exec::Args>>),
    /// Run the helper of `exec`, for units whose sandbox does not allow a helper of their own.
    ExecHelper(LazyCommand<exec_helper::Args>),
    /// Start a systemd unit with active patches from now on.
    Enable(Box<LazyCommand<enable::Args>>),
    /// Start a systemd unit without its patches again.
    Disable(LazyCommand<disable::Args>),
    /// Update drop-ins of units that have changed since their patches were enabled.
    Refresh(LazyCommand<refresh::Args>),
    /// List the patches that are enabled for units.
    Enabled(LazyCommand<enabled::Args>),
    /// Write files that let gdb and perf see the patched code.
    Gdb(LazyCommand<gdb::Args>),
}

/// Commands that change or inspect a running program.
const TOUCHING: [&str; 4] = ["apply", "check", "status", "revert"];

/// Lowers the priority of this process if its arguments name such a command; to be called before all else. Reading the command line, and
/// then checking and linking, must not take the processor from the database to be patched.
pub(crate) fn lower_priority(arguments: impl Iterator<Item = OsString>) {
    if touches(arguments) {
        IdlePriority::begin().keep_until_exit();
    }
}

/// Returns true if the first words that are not options name a command that changes or inspects a running program.
fn touches(arguments: impl Iterator<Item = OsString>) -> bool {
    let mut names = arguments.filter(|word| !word.as_encoded_bytes().starts_with(b"-"));
    names.next().is_some_and(|word| word == "patch")
        && names.next().is_some_and(|word| TOUCHING.iter().any(|name| word == *name))
}

/// Runs `stillpoint patch ...`.
pub(crate) fn run(command: Command, output: &Output) -> Result<Success, Failure> {
    let done = match command {
        Command::Build(args) => return build::run(args.0, output),
        Command::Scan(args) => return scan::run(args.0, output),
        Command::Upgrade(args) => return upgrade::run(args.0, output),
        Command::Target(args) => target::run(args.0, output),
        Command::Inspect(args) => inspect::run(args.0, output),
        Command::Key(args) => key::run(args.0, output),
        Command::Apply(args) => apply::run(args.0, output),
        Command::Check(args) => check::run(args.0, output),
        Command::Status(args) => status::run(args.0, output),
        Command::Revert(args) => revert::run(args.0, output),
        Command::List(args) => list::run(args.0, output),
        Command::Exec(args) => exec::run(args.0, output),
        Command::ExecHelper(args) => exec_helper::run(args.0),
        Command::Enable(args) => enable::run(&args.0, output),
        Command::Disable(args) => disable::run(&args.0, output),
        Command::Refresh(args) => refresh::run(&args.0, output),
        Command::Enabled(args) => enabled::run(&args.0, output),
        Command::Gdb(args) => gdb::run(args.0, output),
    };
    done.map(|()| Success::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_touches_a_program_is_known_before_options_are_read() {
        let touches = |line: &str| touches(line.split(' ').map(OsString::from));
        assert!(touches("patch apply --pid 1 x"));
        assert!(touches("--json patch --json revert"));
        assert!(!touches("patch"));
        assert!(!touches("patch build apply"));
        assert!(!touches("kernel apply"));
    }
}
