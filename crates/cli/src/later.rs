//! Commands whose options are described to the parser when it meets them.
//!
//! The parser's obvious use describes all commands at each start: 60 commands and their options, half a millisecond on a processor that a
//! server needs. Only one of them is called.

use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};

/// Result of parsing a `T`.
#[derive(Debug)]
pub(crate) struct Later<T>(pub(crate) T);

/// Describes a command, and keeps the text that its parent has given it.
fn described(command: Command, describe: fn(Command) -> Command) -> Command {
    let about = command.get_about().cloned();
    let command = describe(command);
    match about {
        Some(about) => command.about(about).long_about(None),
        None => command,
    }
}

impl<T: FromArgMatches> FromArgMatches for Later<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches(matches).map(Later)
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches_mut(matches).map(Later)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }

    fn update_from_arg_matches_mut(&mut self, matches: &mut ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches_mut(matches)
    }
}

impl<T: Args> Args for Later<T> {
    fn augment_args(command: Command) -> Command {
        command.defer(|command| described(command, T::augment_args))
    }

    fn augment_args_for_update(command: Command) -> Command {
        command.defer(|command| described(command, T::augment_args_for_update))
    }
}

impl<T: Subcommand> Subcommand for Later<T> {
    fn augment_subcommands(command: Command) -> Command {
        command.defer(|command| described(command, T::augment_subcommands))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        command.defer(|command| described(command, T::augment_subcommands_for_update))
    }

    fn has_subcommand(name: &str) -> bool {
        T::has_subcommand(name)
    }
}
