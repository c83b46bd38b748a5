//! Patches with an effect that every client can see, for the server with quiescence points.

use super::annotation::Annotated;
use super::client::Client;
use super::{MariaDb, change};
use crate::cli::{Run, Stillpoint};
use crate::patch_calls::{apply, revert};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Edit that makes `RAND()` always one half.
const HALF: &str = "file mysys/my_rnd.c\nin my_rnd\n  begin\n    | if (rand_st) return 0.5;\n";
/// The smallest change of a C++ function that every statement runs: one more instruction, without effect.
const NOTHING: &str = "file sql/sql_parse.cc\nin dispatch_command\n  begin\n    | __asm__ volatile (\"nop\");\n";

/// Directory of the patches that this process has built.
fn shelf() -> &'static Path {
    static SHELF: OnceLock<TempDir> = OnceLock::new();
    SHELF.get_or_init(|| TempDir::with_prefix("stillpoint-mariadb-").expect("make a directory")).path()
}

#[track_caller]
fn built(server: &Annotated, name: &str, edits: &str) -> PathBuf {
    let path = shelf().join(format!("{name}.patch"));
    let run = server.patch(edits, &path);
    assert_eq!(run.code, Some(0), "{run}");
    path
}

/// Returns a patch that makes `RAND()` answer 0.5, see [`is_half`].
pub fn half(server: &Annotated) -> &'static Path {
    static PATCH: OnceLock<PathBuf> = OnceLock::new();
    PATCH.get_or_init(|| built(server, "half", HALF))
}

/// Returns a patch without effect, of a function under every statement.
pub fn nothing(server: &Annotated) -> &'static Path {
    static PATCH: OnceLock<PathBuf> = OnceLock::new();
    PATCH.get_or_init(|| built(server, "nothing", NOTHING))
}

/// Returns a patch of one of the changes in `crates/patch/tests/patches/mariadb`.
pub fn of_change(server: &Annotated, name: &str) -> PathBuf {
    built(server, name, change::named(name).edits())
}

/// Returns the edits of [`half`], and those of changes in `crates/patch/tests/patches/mariadb`.
pub fn edits_of_half_and(changes: &[&str]) -> Vec<String> {
    let changes = changes.iter().map(|name| change::named(name).edits().to_owned());
    [HALF.to_owned()].into_iter().chain(changes).collect()
}

/// Returns true if [`half`] is active for this client.
#[track_caller]
pub fn is_half(client: &mut Client) -> bool {
    client.done("SELECT RAND()").expect("the server answers").to_string() == "0.5"
}

/// Makes a call with this quiescence.
pub fn in_mode(call: Stillpoint, mode: &str, timeout: &str) -> Run {
    call.args(["--quiescence", mode, "--timeout", timeout]).run()
}

/// Applies [`half`] and reverts it in one mode; an existing connection and a new one see both.
#[track_caller]
pub fn there_and_back(mariadb: &MariaDb, patch: &Path, client: &mut Client, mode: &str) {
    for (call, wanted) in [(apply(patch, mariadb.pid()), true), (revert(mariadb.pid()), false)] {
        let run = in_mode(call, mode, "60s");
        assert_eq!(run.code, Some(0), "{mode}: {run}");
        assert!(is_half(client) == wanted && is_half(&mut mariadb.client()) == wanted, "{mode}");
    }
}
