//! Commands whose options are described to the parser when it meets them.
//!
//! The parser's obvious use describes all commands at each start: 60 commands and their options, half a millisecond on a processor that a
//! server needs. Only one of them is called.

use crate::examples;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};

/// Parsed value of `T`, whose options are described when it is called.
#[derive(Debug)]
pub(crate) struct LazyCommand<T>(pub(crate) T);

/// Describes a command, keeps the text that its parent has given it, and adds its examples. The name of the program and the words before
/// its own are known while the arguments are parsed, which is when it is described.
fn described(command: Command, describe: fn(Command) -> Command) -> Command {
    let about = command.get_about().cloned();
    let words = command.get_bin_name().and_then(|name| name.split_once(' ')).map(|(_, words)| words.to_owned());
    let command = describe(command);
    let command = match words {
        Some(words) => examples::add(command, &format!("stillpoint {words}")),
        None => command,
    };
    match about {
        Some(about) => command.about(about).long_about(None),
        None => command,
    }
}

impl<T: FromArgMatches> FromArgMatches for LazyCommand<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches(matches).map(LazyCommand)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl<T: Args> Args for LazyCommand<T> {
    fn augment_args(command: Command) -> Command {
        command.defer(|command| described(command, T::augment_args))
    }

    fn augment_args_for_update(command: Command) -> Command {
        command.defer(|command| described(command, T::augment_args_for_update))
    }
}

impl<T: Subcommand> Subcommand for LazyCommand<T> {
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
