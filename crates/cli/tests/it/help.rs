//! Every command has help, and refuses unknown options. (Because of these tests cargo builds the binary together with all tests, once.)

use std::process::{Command, Output};

fn stillpoint(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillpoint"));
    command.args(words).env_remove("STILLPOINT_LOG").output().expect("run stillpoint")
}

/// The commands that a help text lists.
fn listed(help: &str) -> Vec<String> {
    let (_, below) = help.split_once("Commands:\n").unwrap_or_default();
    let lines = below.lines().take_while(|line| !line.is_empty());
    // descriptions continue in lines that are indented further
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next().map(str::to_owned));
    names.filter(|name| !name.is_empty() && name != "help").collect()
}

/// Calls `look` with the words of each command that runs something.
fn each(words: &[&str], look: &mut impl FnMut(&[&str], &str)) {
    let output = stillpoint(&[words, &["--help"]].concat());
    let help = String::from_utf8(output.stdout).expect("help is text");
    assert!(output.status.success() && help.contains("Usage: stillpoint"), "{words:?}: {help}");
    let commands = listed(&help);
    if commands.is_empty() {
        return look(words, &help);
    }
    for command in &commands {
        each(&[words, &[command.as_str()]].concat(), look);
    }
}

#[test]
fn each_command_says_what_it_is_for_and_what_each_option_does() {
    let mut seen = Vec::new();
    each(&[], &mut |words, help| {
        let first = help.lines().next().unwrap_or_default();
        assert!(first.contains(' ') && !first.starts_with("Usage"), "{words:?} begins with {first:?}");
        let lines: Vec<&str> = help.lines().collect();
        let is_option = |line: &str| line.trim_start().starts_with('-') && !line.trim_start().starts_with("- ");
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| is_option(line)) {
            let indented = |line: &str| line.len() - line.trim_start().len();
            let beside = line.trim_start().contains("  ");
            let below = lines.get(at + 1).is_some_and(|next| indented(next) > indented(line));
            assert!(beside || below, "{words:?} says nothing of {line:?}");
        }
        seen.push(words.join(" "));
    });
    for known in ["patch apply", "patch exec", "migrate run", "kernel switch", "measure postgres"] {
        assert!(seen.iter().any(|words| words == known), "{known} is not among {seen:?}");
    }
}

#[test]
fn an_unknown_option_is_refused_by_name_with_the_code_for_usage() {
    each(&[], &mut |words, _| {
        let output = stillpoint(&[words, &["--no-such-option"]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        // the program of `exec` has options of its own, which follow the program's name
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        assert!(said.contains("--no-such-option"), "{words:?}: {said}");
        assert!(output.stdout.is_empty(), "{words:?}");
    });
}

#[test]
fn each_shell_gets_every_command_and_its_options() {
    for shell in ["bash", "zsh", "fish"] {
        let output = stillpoint(&["completions", shell]);
        let script = String::from_utf8(output.stdout).expect("a script is text");
        assert!(output.status.success(), "{shell}: {}", String::from_utf8_lossy(&output.stderr));
        for word in ["patch", "migrate", "kernel", "measure", "fallback", "quiescence", "dry-run", "json"] {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
        for hidden in ["switch-guardian", "switch-unit", "completions"] {
            assert!(!script.contains(hidden), "{shell} completes {hidden}");
        }
    }
}
