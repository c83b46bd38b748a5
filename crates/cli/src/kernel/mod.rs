//! `stillpoint kernel`: one file per subcommand.

mod check;
mod checkpoint;
mod discard;
mod guard_keeper;
mod inspect;
mod lazy_pages;
mod memory;
mod program;
mod rehearse;
mod restore;
mod status;
mod switch;

use crate::output::{Exit, Failure, Output};
use stillpoint_kernel_checkpoint::Error;

/// `stillpoint kernel ...`
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Find obstacles to a checkpoint of a running program.
    Check(check::Args),
    /// Write a running program, with its connections and memory, into an image.
    Checkpoint(checkpoint::Args),
    /// Restore a program from its image.
    Restore(restore::Args),
    /// Print the contents of an image, and verify that it is unchanged since the seal.
    Inspect(inspect::Args),
    /// Print the state of images: ready, restored with memory still being fetched, stale, damaged or unfinished.
    Status(status::Args),
    /// Remove an image, and the rules that make its peers wait.
    Discard(discard::Args),
    /// Switch to another kernel; selected systemd units keep their memory and connections.
    Switch(switch::Args),
    /// Print the drop-in that a systemd unit needs before a switch of kernels.
    Dropin(switch::DropinArgs),
    /// Reserve RAM in which images outlive kernels, in the configuration of the boot loader.
    Memory(memory::Args),
    /// Prepare the boot of a kernel during a switch; systemd starts it as a generator.
    #[command(hide = true)]
    Boot(switch::BootArgs),
    /// Coordinate the restore of units after a switch; systemd starts it.
    #[command(hide = true)]
    SwitchResume(switch::ResumeArgs),
    /// Restore one unit of a switch; systemd starts it in place of the unit.
    #[command(hide = true)]
    SwitchUnit(switch::UnitArgs),
    /// Roll back a switch whose tool is killed; `switch` starts it.
    #[command(hide = true)]
    SwitchGuardian,
    /// Own the guard of connections; `checkpoint` and systemd start it.
    #[command(hide = true)]
    GuardKeeper(guard_keeper::Args),
    /// Serve the memory of a restored program; `restore` starts it.
    #[command(hide = true)]
    LazyPages(lazy_pages::Args),
}

/// Runs `stillpoint kernel ...`.
pub(crate) fn run(command: Command, output: &Output) -> Result<(), Failure> {
    match command {
        Command::Check(args) => check::run(&args, output),
        Command::Checkpoint(args) => checkpoint::run(&args, output),
        Command::Restore(args) => restore::run(&args, output),
        Command::Inspect(args) => inspect::run(&args, output),
        Command::Status(args) => status::run(&args, output),
        Command::Discard(args) => discard::run(&args, output),
        Command::Switch(args) => switch::run(&args, output),
        Command::Dropin(args) => switch::run_dropin(&args, output),
        Command::Memory(args) => memory::run(&args, output),
        Command::Boot(args) => switch::run_boot(&args),
        Command::SwitchResume(args) => switch::run_resume(&args),
        Command::SwitchUnit(args) => switch::run_unit(&args),
        Command::SwitchGuardian => switch::run_guardian(),
        Command::GuardKeeper(args) => guard_keeper::run(&args),
        Command::LazyPages(args) => lazy_pages::run(&args),
    }
}

/// Converts an error of the engine before any change.
fn untouched(error: Error) -> Failure {
    failure(error, "nothing was touched")
}

/// Converts an error of the engine; `state` describes the machine if the error is not a refusal.
fn failure(error: Error, state: &str) -> Failure {
    let state = match &error {
        Error::ProcessesLost(_) => "processes that ended must be started again; there is no image of them",
        _ => state,
    };
    let hint = match &error {
        Error::Criu { .. } => Some("--criu FILE, or STILLPOINT_CRIU=FILE, names another criu, 4.1 or newer"),
        Error::Occupied(_) => Some("another --image, or stillpoint kernel discard --image DIR"),
        Error::Unsealed(_) => Some("stillpoint kernel checkpoint --image DIR"),
        Error::Failed { .. } => Some("the logs of criu in the image's directory"),
        Error::Host(_) => Some("a directory that only you and root can change, for instance below /run/stillpoint"),
        _ => None,
    };
    let failure = match error.is_refusal() {
        true => Failure::refused(error),
        false => Failure { exit: Exit::Failed, error: error.into(), state: state.into(), hint: None },
    };
    Failure { hint: hint.map(ToOwned::to_owned), ..failure }
}
