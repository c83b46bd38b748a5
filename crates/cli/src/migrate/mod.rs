//! `stillpoint migrate`: one file per subcommand.

mod attach;
mod check;
mod fallback;
mod guardian;
mod mirror;
mod proxy;
mod run;
mod servers;
mod status;
mod switch;

use crate::output::{Failure, Output};

/// `stillpoint migrate ...`
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Serve clients of PostgreSQL servers, so that their sessions can be moved.
    Proxy(proxy::Args),
    /// Redirect clients that connect to a server directly to the proxy, without restarting them.
    Attach(attach::AttachArgs),
    /// Stop redirecting new connections to the proxy.
    Detach(attach::DetachArgs),
    /// List the contents of a database and the effects of a migration, and check if it can be moved.
    Check(check::Args),
    /// Move a database to another server.
    Run(Box<run::Args>),
    /// Run a share of clients' reads on a target that follows too, and compare answers and durations.
    Mirror(mirror::Args),
    /// Order a command that holds to move clients, now or under conditions.
    Switch(switch::Args),
    /// Show the progress and state of a migration.
    Status(status::Args),
    /// End a migration before clients change sides, and restore both servers.
    Abort(fallback::AbortArgs),
    /// After a migration: roll clients back to the source, with everything committed meanwhile.
    Fallback(fallback::FallbackArgs),
    /// After a migration: make it final, so that `fallback` is no longer possible.
    Finish(fallback::FinishArgs),
    /// Outlive the command that starts it, and enable connections if that command is killed.
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
        Command::Mirror(args) => mirror::run(&args, output),
        Command::Switch(args) => switch::run(&args, output),
        Command::Status(args) => status::run(&args, output),
        Command::Abort(args) => fallback::abort(&args, output),
        Command::Fallback(args) => fallback::fallback(&args, output),
        Command::Finish(args) => fallback::finish(&args, output),
        Command::Guardian => guardian::run(),
    }
}
