//! `stillpoint migrate`: one file per subcommand.

mod attach;
mod check;
mod fallback;
mod guardian;
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
    /// Lead clients that connect to a server directly to the proxy, without restarting them.
    Attach(attach::AttachArgs),
    /// Lead new connections to the server itself again.
    Detach(attach::DetachArgs),
    /// What a database holds, what will become of it, and whether it can be moved.
    Check(check::Args),
    /// Move a database to another server.
    Run(Box<run::Args>),
    /// Where a migration stands.
    Status(status::Args),
    /// End a migration before clients change sides; both servers are as before.
    Abort(fallback::AbortArgs),
    /// After a migration: bring clients back to the source, with all that was committed since.
    Fallback(fallback::FallbackArgs),
    /// After a migration: give up the way back.
    Finish(fallback::EndArgs),
    /// Outlive the command that starts it, and open what its death would leave shut.
    #[command(hide = true)]
    Guardian,
}

/// Runs `stillpoint migrate ...`.
pub(crate) fn run(command: Command, output: &Output) -> Result<(), Failure> {
    match command {
        Command::Proxy(args) => proxy::run(args, output),
        Command::Attach(args) => attach::run(&args, output),
        Command::Detach(args) => attach::run_detach(&args, output),
        Command::Check(args) => check::run(&args, output),
        Command::Run(args) => run::run(&args, output),
        Command::Status(args) => status::run(&args, output),
        Command::Abort(args) => fallback::abort(&args, output),
        Command::Fallback(args) => fallback::fallback(&args, output),
        Command::Finish(args) => fallback::finish(&args, output),
        Command::Guardian => guardian::run(),
    }
}
