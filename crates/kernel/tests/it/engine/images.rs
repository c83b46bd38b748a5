//! Use of images, and the cost of making them.

use crate::engine::support::{Redis, connect, criu, kernel, restore, scratch, skip, wait_until_resident};
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn passes_before_the_freeze_leave_little_to_be_written_in_it() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    for (form, more) in [("sparse", &[][..]), ("dense", &["--dense"])] {
        let digest = client.ask("DEBUG DIGEST");
        let image = dir.path().join(form);
        let taken = redis.victim.checkpoint(&criu, &image, more).event("checkpointed");
        let pass = |at: usize| taken["passes"][at]["bytes_written"].as_u64().unwrap();
        let frozen = taken["bytes_written"].as_u64().unwrap();
        assert!(pass(0) > 40 << 20 && pass(1) < pass(0) / 10, "{taken}");
        assert!(frozen < pass(0) / 10, "{taken}");
        restore(&criu, &image, &[]);
        assert_eq!(client.ask("DEBUG DIGEST"), digest);
        assert_eq!(client.ask(&format!("SET {form} 1")), "+OK");
    }
    // and without any
    let none = dir.path().join("none");
    let taken = redis.victim.checkpoint(&criu, &none, &["--passes", "0"]).event("checkpointed");
    assert_eq!(taken["passes"].as_array().map(Vec::len), Some(0));
    assert!(taken["bytes_written"].as_u64().unwrap() > 40 << 20, "{taken}");
    assert_eq!(kernel(&criu, &["discard", "--image", none.to_str().unwrap()]).code, Some(0));
}

#[test]
fn a_rehearsal_leaves_the_program_running_and_nothing_behind() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let (digest, pid) = (client.ask("DEBUG DIGEST"), redis.victim.pid.to_string());
    let before = fs::read_dir(dir.path()).unwrap().count();
    let scratch = dir.path().to_str().unwrap();
    let run = kernel(&criu, &["check", "--pid", &pid, "--rehearse", "--scratch", scratch]);
    assert_eq!(run.code, Some(0), "{run}");
    let rehearsed = run.event("rehearsed");
    assert!(rehearsed["frozen_us"].as_u64().unwrap() > 1000, "{rehearsed}");
    assert!(rehearsed["image_bytes"].as_u64().unwrap() > 40 << 20, "{rehearsed}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before, "the image is gone");
    assert_eq!(client.ask("DEBUG DIGEST"), digest);
}

/// A disk in a file, with XFS on it.
struct Xfs(PathBuf);

impl Xfs {
    fn mounted(dir: &Path) -> Option<Xfs> {
        let (disk, at) = (dir.join("disk"), dir.join("xfs"));
        fs::File::create(&disk).and_then(|file| file.set_len(512 << 20)).expect("make a disk");
        fs::create_dir(&at).expect("make a directory");
        let ran = |command: &mut Command| command.status().is_ok_and(|status| status.success());
        let made = ran(Command::new("mkfs.xfs").arg("-q").arg(&disk));
        let mounted = made && ran(Command::new("mount").args(["-t", "xfs", "-o", "loop"]).args([&disk, &at]));
        if !mounted {
            skip("no XFS can be made and mounted here");
        }
        mounted.then_some(Xfs(at))
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn files_of_an_image_on_xfs_are_as_long_as_an_address_space_and_hold_what_was_written() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some(disk) = Xfs::mounted(dir.path()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let digest = client.ask("DEBUG DIGEST");
    let image = disk.0.join("image");
    redis.victim.checkpoint(&criu, &image, &[]);
    let inspected = kernel(&criu, &["inspect", image.to_str().unwrap(), "--verify"]).event("image");
    assert_eq!((inspected["form"].as_str(), inspected["verified"].as_bool()), (Some("sparse"), Some(true)));
    let files = fs::read_dir(&image).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
    let (long, stored) =
        files.fold((0, 0), |(long, stored), file| (file.len().max(long), file.blocks() * 512 + stored));
    assert!(long > 1 << 46 && (40 << 20..200 << 20).contains(&stored), "{long} bytes, {stored} of them stored");
    let restored = restore(&criu, &image, &[]).event("restored");
    assert_eq!(client.ask("DEBUG DIGEST"), digest);
    wait_until_resident(&restored);
}

#[test]
fn a_file_system_without_room_is_refused_before_anything_is_touched() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let small = dir.path().join("small");
    fs::create_dir(&small).unwrap();
    let mount = |arguments: &[&str]| Command::new(arguments[0]).args(&arguments[1..]).arg(&small).status();
    if !mount(&["mount", "-t", "tmpfs", "-o", "size=8m", "none"]).is_ok_and(|status| status.success()) {
        return skip("no file system can be mounted here");
    }
    let image = small.join("image");
    let (pid, path) = (redis.victim.pid.to_string(), image.to_str().unwrap());
    let refused = kernel(&criu, &["checkpoint", "--pid", &pid, "--image", path]);
    let made = image.exists();
    assert!(mount(&["umount"]).is_ok_and(|status| status.success()));
    assert_eq!((refused.code, made), (Some(3), false), "{refused}");
    assert!(refused.err.contains("MiB free, the image needs up to"), "{refused}");
    assert_eq!(client.ask("PING"), "+PONG");
}

#[test]
fn an_image_that_is_not_wanted_any_more_goes_with_the_rules_that_kept_its_peers_waiting() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some(mut redis) = Redis::start(dir.path()) else { return };
    let mut client = connect(redis.port);
    assert_eq!(client.ask("PING"), "+PONG");
    let image = dir.path().join("image");
    let path = image.to_str().unwrap();
    redis.victim.checkpoint(&criu, &image, &[]);
    let status = kernel(&criu, &["status", "--image", path]).event("kernel-status");
    let guard = status["guard"].as_str().expect("its peers wait").to_owned();
    assert_eq!(status["stage"], "ready");
    assert_eq!(kernel(&criu, &["discard", "--image", path, "--dry-run"]).code, Some(0));
    let gone = kernel(&criu, &["discard", "--image", path]);
    assert_eq!(gone.event("discarded")["guard"].as_str(), Some(guard.as_str()), "{gone}");
    let tables = kernel(&criu, &["status"]).event("kernel-guards");
    assert!(!tables["tables"].as_array().unwrap().contains(&guard.as_str().into()), "{tables}");
    // no process holds the connection, and now its peer learns that
    client.send("PING");
    assert!(matches!(client.stream.read(&mut [0; 16]), Err(_) | Ok(0)));
    assert_eq!(kernel(&criu, &["restore", "--image", path]).code, Some(3));
}
