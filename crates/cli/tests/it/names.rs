//! Names that a terminal would execute, or that look like lines of this program.

use std::process::{Command, Output};

/// Clears the line, moves up, and forges a line; U+009B is an escape sequence by itself.
const NAME: &str = "shop\u{1b}[2K\u{9b}A\rstate: forged\nstate: forged\u{202e}";

fn migrate(words: &[&str]) -> Output {
    let dir = std::env::temp_dir().join("stillpoint-no-such-directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillpoint"));
    command.args(words).args(["--source", "host=127.0.0.1 port=1", "--target", "host=127.0.0.1 port=2"]);
    command.args(["--database", NAME, "--proxy", "/no/such/socket", "--state"]).arg(dir);
    command.env_remove("STILLPOINT_LOG").output().expect("run stillpoint")
}

#[track_caller]
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8(bytes.to_vec()).expect("text");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'), "{text:?}");
    text
}

#[test]
fn a_name_of_a_database_is_shown_and_not_obeyed() {
    let status = migrate(&["migrate", "status"]);
    let (said, why) = (text(&status.stdout), text(&status.stderr));
    assert!(why.contains("shop\\u{1b}[2K\\u{9b}A\\rstate: forged") && why.contains("there is no journal"), "{why}");
    assert_eq!(why.lines().filter(|line| line.starts_with("state:")).count(), 1, "{why}");
    // Neither server can be reached.
    assert!(status.status.code() == Some(5) && !said.contains("no migration"), "{said}");

    let check = migrate(&["migrate", "check"]);
    assert!(!check.status.success());
    let said = text(&check.stderr);
    let states = said.lines().filter(|line| line.starts_with("state:"));
    assert_eq!(states.collect::<Vec<_>>(), ["state: nothing was touched"], "{said}");
    assert!(said.contains("shop\\u{1b}"), "{said}");

    let json = migrate(&["--json", "migrate", "check"]);
    assert_eq!(text(&json.stdout).lines().count(), 1);
}
