//! `--policy signed`: only patches of a key that root trusts are accepted, and a refusal changes nothing.

use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::victim::{Phase, Program, Victim, apply, assert_refused, revert};

/// A key pair in a directory of its own.
struct Key {
    secret: PathBuf,
    public: PathBuf,
}

#[track_caller]
fn key(directory: &Path) -> Key {
    let made = Stillpoint::new().json().args(["patch", "key", "generate", "--output"]).arg(directory).succeed();
    let lines = made.json();
    let path = |name: &str| PathBuf::from(lines[0][name].as_str().expect("a path"));
    let key = Key { secret: path("secret_file"), public: path("public_file") };
    let mode = fs::metadata(&key.secret).expect("the secret key").permissions().mode();
    assert_eq!(mode & 0o077, 0, "others may read the secret key: mode {mode:o}");
    key
}

fn signed(patch: &Path, victim: &Victim, keys: &Path) -> Stillpoint {
    apply(patch, victim.pid()).args(["--policy", "signed", "--keys"]).arg(keys)
}

#[track_caller]
fn refused(patch: &Path, victim: &mut Victim, keys: &Path, thing: &str) {
    let before = victim.snapshot();
    assert_refused(&signed(patch, victim, keys).run(), thing);
    assert_eq!(victim.snapshot(), before, "a refusal touched the target");
    victim.assert_running();
}

#[test]
fn only_patches_of_a_trusted_key_are_accepted() {
    let program = Program::build("storm");
    let ours = key(&program.dir().join("ours"));
    let theirs = key(&program.dir().join("theirs"));
    let keys = program.dir().join("keys");
    fs::create_dir(&keys).expect("make the key directory");
    let mut victim = program.start(&["idle"]);
    let unsigned = program.patch(2);
    refused(&unsigned, &mut victim, &keys, "contains no *.pub file");

    fs::copy(&ours.public, keys.join("ours.pub")).expect("trust the key");
    refused(&unsigned, &mut victim, &keys, "not signed");

    let path = program.dir().join("signed.patch");
    program.builder(2, &path).arg("--sign").arg(&theirs.secret).succeed();
    refused(&path, &mut victim, &keys, "not trusted");

    program.builder(2, &path).arg("--sign").arg(&ours.secret).succeed();
    fs::set_permissions(&keys, Permissions::from_mode(0o777)).expect("open the key directory");
    refused(&path, &mut victim, &keys, &keys.display().to_string());
    fs::set_permissions(&keys, Permissions::from_mode(0o755)).expect("close the key directory");

    let mut damaged = fs::read(&path).expect("the patch");
    damaged[70] ^= 1; // inside of the signature
    let bad = program.dir().join("damaged.patch");
    fs::write(&bad, damaged).expect("write the damaged patch");
    refused(&bad, &mut victim, &keys, "signature");

    victim.announce(Phase::Over(1, 2));
    signed(&path, &victim, &keys).succeed();
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    revert(victim.pid()).succeed();
    victim.assert_settled(1);
    victim.assert_pristine();
}

/// Lets keys decide which patches root accepts: no other user controls their directory, and no file there blocks the
/// tool or fills its memory.
#[test]
fn keys_are_read_where_root_alone_decides() {
    let program = Program::build("storm");
    let ours = key(&program.dir().join("ours"));
    let mut victim = program.start(&["idle"]);
    let path = program.dir().join("signed.patch");
    program.builder(2, &path).arg("--sign").arg(&ours.secret).succeed();
    let above = program.dir().join("above");
    let (keys, link) = (above.join("keys"), program.dir().join("link"));
    symlink(&keys, &link).expect("make a link");
    let fresh = || {
        let _ = fs::remove_dir_all(&above);
        fs::create_dir_all(&keys).expect("make the key directory");
        fs::copy(&ours.public, keys.join("ours.pub")).expect("trust the key");
    };
    let other = keys.join("other.pub");
    fresh();
    refused(&path, &mut victim, &link, "symbolic link");
    symlink(&ours.public, &other).expect("make a link");
    refused(&path, &mut victim, &keys, "symbolic link");
    fresh();
    mknodat(CWD, &other, FileType::Fifo, Mode::RUSR, 0).expect("make a FIFO");
    refused(&path, &mut victim, &keys, "no regular file");
    fresh();
    File::create(&other).and_then(|file| file.set_len(60 << 30)).expect("make a sparse file");
    refused(&path, &mut victim, &keys, "more than");
    for foreign in [keys.join("ours.pub"), keys.clone(), above.clone()] {
        fresh();
        chown(&foreign, Some(65534), None).expect("give it away");
        refused(&path, &mut victim, &keys, "belongs to uid 65534");
    }
    fresh();
    victim.announce(Phase::Over(1, 2));
    signed(&path, &victim, &keys).succeed();
    victim.assert_settled(2);
}
