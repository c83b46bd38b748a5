//! Examples of each command: `--help` ends with them, and the page of the command in `man/` has them too.

use clap::Command;

/// Sections of examples, separated by empty lines: the command in brackets, then the text of its help.
const SECTIONS: &str = include_str!("examples.txt");

/// Returns the examples of a command; empty without a section for it.
pub(crate) fn of(command: &str) -> &'static str {
    let mut sections = SECTIONS.split("\n\n").filter_map(|section| section.strip_prefix('[')?.split_once("]\n"));
    sections.find(|(name, _)| *name == command).map_or("", |(_, text)| text)
}

/// Makes the help of a command, and of those directly below it, end with their examples, unless it has an end of its own.
pub(crate) fn add(command: Command, name: &str) -> Command {
    let end = |command: Command, name: &str| match (command.get_after_help(), of(name)) {
        (Some(_), _) | (None, "") => command,
        (None, examples) => command.after_help(examples),
    };
    end(command, name).mut_subcommands(|below| {
        let name = format!("{name} {}", below.get_name());
        end(below, &name)
    })
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};
    use std::path::Path;

    /// Calls `look` with the words of each command that is not hidden, groups of commands included.
    fn each(words: &mut Vec<String>, look: &mut impl FnMut(&[String], &Command)) {
        let mut all = crate::Cli::command();
        let line = ["stillpoint"].into_iter().chain(words.iter().map(String::as_str)).chain(["--help"]);
        assert!(all.try_get_matches_from_mut(line).is_err_and(|end| end.exit_code() == 0), "{words:?}");
        let found = words.iter().fold(&all, |command, word| command.find_subcommand(word).expect("it was called"));
        look(words, found);
        let shown = |below: &&Command| !below.is_hide_set() && below.get_name() != "help";
        for below in found.get_subcommands().filter(shown) {
            words.push(below.get_name().to_owned());
            each(words, look);
            words.pop();
        }
    }

    fn each_command(mut look: impl FnMut(&[String], &Command)) {
        each(&mut Vec::new(), &mut look);
    }

    /// Example calls at the end of a command's help.
    fn examples(command: &Command) -> Vec<String> {
        let help = command.get_after_long_help().or(command.get_after_help());
        let help = help.map(ToString::to_string).unwrap_or_default();
        let (_, end) = help.rsplit_once("Examples:\n").unwrap_or_default();
        let calls = end.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with('#'));
        calls.map(str::to_owned).collect()
    }

    fn man_page(name: &str) -> Option<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../man").join(format!("{name}.1"));
        std::fs::read_to_string(path).ok().map(|text| text.replace("\\-", "-"))
    }

    #[test]
    fn each_help_ends_with_two_examples() {
        each_command(|words, command| {
            let (examples, call) = (examples(command), words.join(" "));
            let own = examples.iter().filter(|line| line.starts_with("stillpoint ") && line.contains(&call)).count();
            assert!(own >= 2, "{words:?}: {examples:?}");
        });
    }

    #[test]
    fn each_command_has_a_page_with_its_examples() {
        each_command(|words, command| {
            // The commands of a group below one command, as `patch key`, share its page.
            let name = [&["stillpoint".to_owned()][..], &words[..words.len().min(2)]].concat().join("-");
            let page = man_page(&name).unwrap_or_else(|| panic!("no page {name}"));
            assert!(page.contains("\n.SH EXAMPLES\n"), "{name}: no examples");
            for line in examples(command) {
                // Help without a terminal has 100 columns.
                assert!(line.len() <= 98, "`{line}` is too long");
                assert!(page.contains(&line), "{name} does not have `{line}`");
            }
        });
    }

    #[test]
    fn the_first_page_names_every_pillar() {
        let page = man_page("stillpoint").expect("stillpoint(1)");
        for pillar in crate::Cli::command().get_subcommands().filter(|pillar| !pillar.is_hide_set()) {
            assert!(page.contains(&format!("stillpoint {}", pillar.get_name())), "{}", pillar.get_name());
        }
    }
}
