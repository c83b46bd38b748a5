//! The `stillpoint` binary: arguments, output and exit codes; all else is in the engines.
//!
//! One file per subcommand. A subcommand is a clap `Args` type and a `run(args, &Output) -> Result<(), Failure>`, with [`output::Success`]
//! in place of `()` where success has more than one exit code. It reports through [`output::Output`] and returns errors as
//! [`output::Failure`], which carries the exit code, the state of the service and the next step. No other code prints or exits.

mod completions;
mod examples;
mod kernel;
mod lazy_command;
mod measure;
mod migrate;
mod output;
mod patch;

use clap::{CommandFactory, Parser, Subcommand};
use lazy_command::LazyCommand;
use output::{Output, Success};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::Directive;

/// Keeps databases running through patches, migrations and kernel updates.
#[derive(Parser)]
#[command(name = "stillpoint", version, propagate_version = true, max_term_width = 120, after_help = examples::of("stillpoint"))]
struct Cli {
    /// Print versioned JSON on stdout instead of text, one object per line.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build live patches, and apply them to running programs.
    #[command(subcommand, after_help = examples::of("stillpoint patch"))]
    Patch(Box<LazyCommand<patch::Command>>),
    /// Move a database to another server while its clients work.
    #[command(subcommand, after_help = examples::of("stillpoint migrate"))]
    Migrate(LazyCommand<migrate::Command>),
    /// Checkpoint and restore running programs with their connections and memory, and switch kernels below them.
    #[command(subcommand, after_help = examples::of("stillpoint kernel"))]
    Kernel(LazyCommand<kernel::Command>),
    /// Put load on a server, record every latency, and report.
    Measure(LazyCommand<measure::Args>),
    /// Print what a shell completes.
    #[command(hide = true)]
    Completions(completions::Args),
}

fn main() -> ExitCode {
    patch::lower_priority(std::env::args_os().skip(1));
    stillpoint_host::names::use_files_and_dns();
    // The SQL parser logs every text that it gets, with the values of clients in it.
    let silent: Option<Directive> = "sqlparser=off".parse().ok();
    let filter = silent.into_iter().fold(EnvFilter::from_env("STILLPOINT_LOG"), EnvFilter::add_directive);
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(|| output::Log).init();
    let cli = Cli::parse();
    let output = Output::new(cli.json);
    let result = match cli.command {
        Command::Patch(command) => patch::run(command.0, &output),
        Command::Migrate(command) => migrate::run(command.0, &output).map(|()| Success::Done),
        Command::Kernel(command) => kernel::run(command.0, &output).map(|()| Success::Done),
        Command::Measure(args) => measure::run(args.0, &output).map(|()| Success::Done),
        Command::Completions(args) => completions::run(&args, Cli::command(), &output).map(|()| Success::Done),
    };
    match result {
        Ok(success) => success.into(),
        Err(failure) => output.failure(&failure),
    }
}
