//! `stillpoint patch`: one file per subcommand.

mod apply;
mod build;
mod building;
mod check;
mod enable;
mod enabled;
mod exec;
mod exec_helper;
mod gdb;
mod inspect;
mod key;
mod list;
mod processes;
mod revert;
mod status;
mod target;
mod unit_file;
mod wave;

pub(crate) use processes::duration;

use crate::output::{Failure, Output};
use std::ffi::OsString;
use stillpoint_patch_engine::GivingWay;

/// `stillpoint patch ...`
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Build a live patch from source diffs.
    Build(Box<build::Args>),
    /// Get the program that a patch is for: as its package builds it, or as the archive has it.
    Target(target::Args),
    /// Show what a patch file holds, and why.
    Inspect(inspect::Args),
    /// Make keys, and sign patch files.
    Key(key::Args),
    /// Put patches into running processes.
    Apply(Box<apply::Args>),
    /// Everything short of touching, and which threads would block.
    Check(check::Args),
    /// What a process carries, verified against its memory.
    Status(status::Args),
    /// Take patches back.
    Revert(revert::Args),
    /// Every process of this machine that carries patches.
    List(list::Args),
    /// Run a program that is patched before its first instruction.
    Exec(Box<exec::Args>),
    /// The helper of `exec` for units whose sandbox allows none of their own.
    ExecHelper(exec_helper::Args),
    /// Have a systemd unit start with patches in force.
    Enable(Box<enable::EnableArgs>),
    /// Take that back.
    Disable(enable::DisableArgs),
    /// Which patches are enabled for which units.
    Enabled(enable::ListArgs),
    /// Files that let gdb and perf see the patched code.
    Gdb(gdb::Args),
}

/// What touches a running program, or looks at one.
const TOUCHING: [&str; 4] = ["apply", "check", "status", "revert"];

/// To be called before anything else, with the words of the command line. Reading them properly, and after that checking and
/// linking, must not take the processor from the database that is to be helped.
pub(crate) fn give_way(words: impl Iterator<Item = OsString>) {
    if touches(words) {
        GivingWay::begin().to_the_end();
    }
}

/// Whether the first words that are no options name a command that touches a running program.
fn touches(words: impl Iterator<Item = OsString>) -> bool {
    let mut names = words.skip(1).filter(|word| !word.as_encoded_bytes().starts_with(b"-"));
    names.next().is_some_and(|word| word == "patch")
        && names.next().is_some_and(|word| TOUCHING.iter().any(|touching| word == *touching))
}

/// Runs `stillpoint patch ...`.
pub(crate) fn run(command: Command, output: &Output) -> Result<(), Failure> {
    match command {
        Command::Build(args) => build::run(*args, output),
        Command::Target(args) => target::run(args, output),
        Command::Inspect(args) => inspect::run(args, output),
        Command::Key(args) => key::run(args, output),
        Command::Apply(args) => apply::run(*args, output),
        Command::Check(args) => check::run(args, output),
        Command::Status(args) => status::run(args, output),
        Command::Revert(args) => revert::run(args, output),
        Command::List(args) => list::run(args, output),
        Command::Exec(args) => exec::run(*args, output),
        Command::ExecHelper(args) => exec_helper::run(args),
        Command::Enable(args) => enable::enable(*args, output),
        Command::Disable(args) => enable::disable(args, output),
        Command::Enabled(args) => enable::list(args, output),
        Command::Gdb(args) => gdb::run(args, output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_touches_a_program_gives_way_before_options_are_read() {
        let touches = |line: &str| touches(line.split(' ').map(OsString::from));
        assert!(touches("stillpoint patch apply --pid 1 x"));
        assert!(touches("stillpoint --json patch --json revert"));
        assert!(!touches("stillpoint patch"));
        assert!(!touches("stillpoint patch build apply"));
        assert!(!touches("stillpoint kernel apply"));
    }
}
