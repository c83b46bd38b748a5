//! Images belong to root, from the directory to the last file: a restored program runs with the rights that its image
//! records.

use crate::engine::support::{Redis, connect, criu, kernel, restore, scratch};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

/// Id of a user other than root.
const OTHER_UID: u32 = 65534;

fn set(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Calls every command that reads an image; each must refuse for this reason, and touch nothing.
#[track_caller]
fn refused(criu: &Path, image: &Path, commands: &[&[&str]], why: &str) {
    for words in commands {
        let words: Vec<&str> =
            words.iter().map(|word| if *word == "IMAGE" { image.to_str().unwrap() } else { word }).collect();
        let run = kernel(criu, &words);
        assert_eq!(run.code, Some(3), "{words:?}: {run}");
        assert!(run.err.contains(why), "{words:?}: {why}: {run}");
    }
}

const RESTORE: &[&str] = &["restore", "--image", "IMAGE"];
const DRY: &[&str] = &["restore", "--image", "IMAGE", "--dry-run"];
const INSPECT: &[&str] = &["inspect", "IMAGE"];
const STATUS: &[&str] = &["status", "--image", "IMAGE"];
const DISCARD: &[&str] = &["discard", "--image", "IMAGE"];

#[test]
fn an_image_that_another_user_can_change_is_not_restored() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some(mut redis) = Redis::start(dir.path()) else { return };
    let mut client = connect(redis.port);
    assert_eq!(client.ask("SET key value"), "+OK");
    let above = dir.path().join("above");
    let image = above.join("image");
    redis.victim.checkpoint(&criu, &image, &[]);
    for entry in fs::read_dir(&image).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
    assert_eq!(mode(&image), 0o700);

    let all = [RESTORE, DRY, INSPECT, STATUS, DISCARD];
    for foreign in [&image, &above] {
        chown(foreign, Some(OTHER_UID), None).unwrap();
        refused(&criu, &image, &all, "belongs to uid 65534");
        chown(foreign, Some(0), None).unwrap();
        let before = mode(foreign);
        for open in [0o777, 0o770] {
            set(foreign, open);
            refused(&criu, &image, &all, "others can write to it");
        }
        set(foreign, before);
    }
    let link = dir.path().join("link");
    symlink(&above, &link).unwrap();
    refused(&criu, &link.join("image"), &all, "symbolic link");

    // a file in it, of ours or of criu
    let memory = format!("foam-task-{}.img", redis.victim.pid);
    for name in ["foam.seal", &memory, "inventory.img", "pstree.img"] {
        let path = image.join(name);
        chown(&path, Some(OTHER_UID), None).unwrap();
        refused(&criu, &image, &[RESTORE, DRY, INSPECT], "belongs to uid 65534");
        chown(&path, Some(0), None).unwrap();
        set(&path, 0o666);
        refused(&criu, &image, &[RESTORE, DRY, INSPECT], "others can write to it");
        set(&path, 0o600);
        let aside = dir.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        symlink(&aside, &path).unwrap();
        refused(&criu, &image, &[RESTORE, DRY, INSPECT], "symbolic link");
        fs::rename(&aside, &path).unwrap();
    }
    // criu also reads a file that was added later
    fs::copy(image.join("inventory.img"), image.join("ids-4194000.img")).unwrap();
    refused(&criu, &image, &[RESTORE, DRY, INSPECT], "is not part of the sealed image");
    fs::remove_file(image.join("ids-4194000.img")).unwrap();
    fs::write(image.join("pagemap-4194000.img"), "planted").unwrap();

    restore(&criu, &image, &[]);
    assert!(!image.join("pagemap-4194000.img").exists(), "criu could have read it");
    // criu's statistics and logs are new
    for entry in fs::read_dir(&image).unwrap() {
        let path = entry.unwrap().path();
        let open = fs::symlink_metadata(&path).is_ok_and(|file| file.is_file() && file.mode() & 0o077 != 0);
        assert!(!open, "{}", path.display());
    }
    assert_eq!(connect(redis.port).ask("GET key"), "$5");
}

#[test]
fn an_image_is_made_only_where_no_other_user_can_change_it() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some(redis) = Redis::start(dir.path()) else { return };
    let mut client = connect(redis.port);
    assert_eq!(client.ask("PING"), "+PONG");
    let pid = redis.victim.pid.to_string();
    let take = |image: &Path, more: &[&str]| {
        kernel(&criu, &[&["checkpoint", "--pid", &pid, "--image", image.to_str().unwrap()], more].concat())
    };
    let shared = dir.path().join("shared");
    let image = shared.join("image");
    fs::create_dir(&shared).unwrap();
    set(&shared, 0o1777);
    // another user made the directory first
    fs::create_dir(&image).unwrap();
    chown(&image, Some(OTHER_UID), None).unwrap();
    let check = |why: &str| {
        for more in [&[][..], &["--dry-run"]] {
            let refused = take(&image, more);
            assert_eq!(refused.code, Some(3), "{refused}");
            assert!(refused.err.contains(why) && refused.err.contains("try: a directory that only you"), "{refused}");
        }
    };
    check("belongs to uid 65534");
    fs::remove_dir(&image).unwrap();
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    symlink(&elsewhere, &image).unwrap();
    check("symbolic link");
    fs::remove_file(&image).unwrap();
    set(&shared, 0o777);
    check("others can write to it");
    assert_eq!((fs::read_dir(&elsewhere).unwrap().count(), client.ask("PING").as_str()), (0, "+PONG"));

    // in a directory where other users can only add files, the image is made, and closed even if it was open before
    set(&shared, 0o1777);
    fs::create_dir(&image).unwrap();
    set(&image, 0o755);
    let taken = take(&image, &["--leave-running"]);
    assert_eq!((taken.code, mode(&image)), (Some(0), 0o700), "{taken}");
    assert_eq!(client.ask("PING"), "+PONG");
}

/// Files of a directory that looks like an image belong to another user, and may have any size.
#[test]
fn what_another_user_put_into_a_directory_is_not_read() {
    let Some(criu) = criu() else { return };
    let dir = scratch();
    let image = dir.path().join("image");
    fs::create_dir(&image).unwrap();
    for name in ["foam.used", "journal.log", "dump.log", "foam.fill"] {
        rustix::fs::mknodat(rustix::fs::CWD, image.join(name), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
    }
    chown(&image, Some(OTHER_UID), None).unwrap();
    refused(&criu, &image, &[RESTORE, DRY, INSPECT, STATUS, DISCARD], "belongs to uid 65534");
}

#[test]
fn an_image_that_this_machine_did_not_seal_is_restored_only_if_that_is_asked_for() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some(mut redis) = Redis::start(dir.path()) else { return };
    let mut client = connect(redis.port);
    assert_eq!(client.ask("SET key value"), "+OK");
    let image = dir.path().join("image");
    let path = image.to_str().unwrap();
    redis.victim.checkpoint(&criu, &image, &[]);
    let inspected = |verdict: bool| {
        let event = kernel(&criu, &["inspect", path]).event("image");
        assert_eq!(event["sealed_here"].as_bool(), Some(verdict), "{event}");
    };
    inspected(true);
    // the digest by the key is at the end
    let seal = image.join("foam.seal");
    let mut bytes = fs::read(&seal).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&seal, &bytes).unwrap();
    inspected(false);
    refused(&criu, &image, &[RESTORE, DRY], "this machine did not seal the image");
    refused(&criu, &image, &[RESTORE, DRY], "--trust-image restores it nevertheless");
    let warned = "this machine did not seal the image";
    let dry = kernel(&criu, &["restore", "--image", path, "--trust-image", "--dry-run"]);
    assert_eq!((dry.code, dry.err.contains(&format!("warning: {warned}"))), (Some(0), true), "{dry}");
    // this does not make damage acceptable
    let inventory = image.join("inventory.img");
    let whole = fs::read(&inventory).unwrap();
    fs::write(&inventory, [&whole[..], b"x"].concat()).unwrap();
    refused(&criu, &image, &[&["restore", "--image", "IMAGE", "--trust-image"]], "is damaged");
    fs::write(&inventory, whole).unwrap();
    let restored = restore(&criu, &image, &["--trust-image"]);
    assert!(restored.event("warning")["text"].as_str().unwrap().starts_with(warned), "{restored}");
    assert_eq!(connect(redis.port).ask("GET key"), "$5");
}
