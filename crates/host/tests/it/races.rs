//! Races in which another user exchanges the target of a path while root walks it. 300 rounds of each kind in the long form.

use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use stillpoint_host::Error;
use stillpoint_host::trusted::Directory;
use stillpoint_testing::soak::rounds;
use tempfile::TempDir;

/// Limit of rounds: a race that one side wins so often is not a race.
const ROUNDS_MAX: usize = 100_000;

/// Ends the thread that exchanges the names, also when a check fails.
struct End<'e>(&'e AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Calls `check` while a thread exchanges two names, until it has run the required rounds, and has both succeeded and failed. Each result
/// of a success must satisfy `ours`.
fn race<T>(one: &Path, other: &Path, mut check: impl FnMut() -> Result<T, Error>, ours: impl Fn(T) -> bool) {
    let (end, wanted) = (AtomicBool::new(false), rounds(30, 300));
    std::thread::scope(|scope| {
        let exchange = || {
            while !end.load(Ordering::Relaxed) {
                renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).expect("exchange");
            }
        };
        scope.spawn(exchange);
        let _end = End(&end);
        let (mut good, mut refused) = (0, 0);
        for _ in 0..ROUNDS_MAX {
            match check() {
                Ok(found) => {
                    assert!(ours(found), "what another user put there was taken");
                    good += 1;
                }
                Err(_) => refused += 1,
            }
            if good + refused >= wanted && good > 0 && refused > 0 {
                return;
            }
        }
        panic!("no race: {good} succeeded, {refused} were refused");
    });
}

/// Makes our directory and another user's, each with a file `text`, and a link to the other one.
fn place() -> TempDir {
    let dir = tempfile::tempdir().expect("make a directory");
    for name in ["ours", "theirs"] {
        let made = Directory::make(&dir.path().join("way").join(name)).expect("make a directory");
        made.write("text", name.as_bytes()).expect("write a file");
    }
    symlink("theirs", dir.path().join("way/link")).expect("make a link");
    dir
}

#[test]
fn a_directory_that_becomes_a_link_is_not_read() {
    let dir = place();
    let (ours, link) = (dir.path().join("way/ours"), dir.path().join("way/link"));
    race(&ours, &link, || Directory::open(&ours)?.read("text", 100), |text| text == b"ours");
}

#[test]
fn a_directory_that_becomes_a_link_is_not_written_to() {
    let dir = place();
    let (ours, link, theirs) =
        (dir.path().join("way/ours"), dir.path().join("way/link"), dir.path().join("way/theirs"));
    let mut number = 0;
    let write = || {
        number += 1;
        Directory::make(&ours)?.write_new(&format!("file-{number}"), b"secret")
    };
    race(&ours, &link, write, |made| made);
    assert_eq!(fs::read_dir(theirs).expect("list it").count(), 1, "a file of ours went elsewhere");
}

#[test]
fn a_file_that_becomes_a_link_is_not_read() {
    let dir = place();
    let ours = dir.path().join("way/ours");
    symlink("../theirs/text", ours.join("link")).expect("make a link");
    let opened = Directory::open(&ours).expect("open it");
    race(&ours.join("text"), &ours.join("link"), || opened.read("text", 100), |text| text == b"ours");
}

#[test]
fn a_file_that_becomes_a_pipe_holds_nothing_up() {
    let dir = place();
    let ours = dir.path().join("way/ours");
    mknodat(CWD, ours.join("pipe"), FileType::Fifo, Mode::RUSR, 0).expect("make a pipe");
    let opened = Directory::open(&ours).expect("open it");
    race(&ours.join("text"), &ours.join("pipe"), || opened.read("text", 100), |text| text == b"ours");
}

/// Checks and reads use the same open file.
#[test]
fn a_file_that_others_can_write_to_is_not_read_in_the_place_of_ours() {
    use std::os::unix::fs::PermissionsExt;
    let dir = place();
    let ours = dir.path().join("way/ours");
    fs::write(ours.join("open"), "theirs").expect("write a file");
    fs::set_permissions(ours.join("open"), fs::Permissions::from_mode(0o666)).expect("open it to others");
    let opened = Directory::open(&ours).expect("open it");
    race(&ours.join("text"), &ours.join("open"), || opened.read("text", 100), |text| text == b"ours");
}
