//! `stillpoint completions`: scripts for completion in shells. The installation calls it; it has no page of its own.

use crate::output::{Failure, Output};
use clap::{ArgGroup, Command};
use clap_complete::Shell;

/// Arguments of `stillpoint completions`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell that is to read it.
    shell: Shell,
}

/// Runs `stillpoint completions` for the commands below `all`.
pub(crate) fn run(args: &Args, mut all: Command, output: &Output) -> Result<(), Failure> {
    all.build();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut shown(&all), "stillpoint", &mut script);
    output.lines(String::from_utf8_lossy(&script).trim_end());
    Ok(())
}

/// Names that the parser adds to each command that it builds.
const ADDED: [&str; 2] = ["help", "version"];

/// Returns the command without what `--help` does not show either: the generators of scripts leave nothing out.
fn shown(command: &Command) -> Command {
    let is_added = |id: &str| ADDED.contains(&id);
    let arguments =
        || command.get_arguments().filter(|argument| !argument.is_hide_set() && !is_added(argument.get_id().as_str()));
    let is_shown = |id: &&clap::Id| arguments().any(|argument| argument.get_id() == *id);
    let groups = command.get_groups().map(|group| {
        let members: Vec<clap::Id> = group.get_args().filter(is_shown).cloned().collect();
        ArgGroup::new(group.get_id().clone()).args(members).multiple(true)
    });
    // clap takes names that live as long as the process, which ends after this
    let name: &'static str = command.get_name().to_owned().leak();
    let mut shown = Command::new(name).args(arguments().cloned()).groups(groups);
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    if command.get_version().is_some() {
        shown = shown.version(env!("CARGO_PKG_VERSION"));
    }
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set() && !is_added(command.get_name()));
    shown.subcommands(commands.map(self::shown))
}
