//! `stillpoint migrate`: one file per subcommand.

mod back;
mod check;
mod proxy;
mod run;
mod servers;
mod status;

use crate::output::{Failure, Output};

/// `stillpoint migrate ...`
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Serve clients of PostgreSQL servers, so that their sessions can be moved.
    Proxy(proxy::Args),
    /// What a database holds, what will become of it, and whether it can be moved.
    Check(check::Args),
    /// Move a database to another server.
    Run(Box<run::Args>),
    /// Where a migration stands.
    Status(status::Args),
    /// End a migration before clients change sides; both servers are as before.
    Abort(back::EndArgs),
    /// After a migration: bring clients back to the source, with all that was committed since.
    Fallback(back::FallbackArgs),
    /// After a migration: give up the way back.
    Finish(back::EndArgs),
}

/// Runs `stillpoint migrate ...`.
pub(crate) fn run(command: Command, output: &Output) -> Result<(), Failure> {
    match command {
        Command::Proxy(args) => proxy::run(args, output),
        Command::Check(args) => check::run(&args, output),
        Command::Run(args) => run::run(&args, output),
        Command::Status(args) => status::run(&args, output),
        Command::Abort(args) => back::abort(&args, output),
        Command::Fallback(args) => back::fallback(&args, output),
        Command::Finish(args) => back::finish(&args, output),
    }
}
