//! Kills of criu and of programs at the worst moments.

use crate::engine::support::{
    Redis, children, connect, criu, kernel, kernel_while, kill, logs, restore, scratch, wait_until_gone,
    wait_until_resident,
};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Calls `act` as soon as a log contains this; returns false when the `stillpoint` ended before.
fn at_log(stillpoint: i32, log: &Path, says: &str, act: impl FnOnce() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(120) {
        let stat = fs::read_to_string(format!("/proc/{stillpoint}/stat")).unwrap_or_default();
        if stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('Z')) {
            return false;
        }
        if fs::read_to_string(log).is_ok_and(|text| text.contains(says)) {
            return act();
        }
        // it is over within milliseconds
        std::thread::sleep(Duration::from_micros(100));
    }
    panic!("criu neither said {says:?} nor ended")
}

/// Returns the criu of a `stillpoint`: neither its daemon, nor a process that is being restored, which is a child too.
fn criu_of(stillpoint: i32, program: i32) -> Option<Pid> {
    let is_criu = |pid: &i32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        *pid != program && !String::from_utf8_lossy(&arguments).contains("lazy-pages")
    };
    children(stillpoint).into_iter().find(is_criu).and_then(Pid::from_raw)
}

/// Kills the criu of a `stillpoint` as soon as its log contains this; returns false when criu ended before.
fn kill_criu_at(stillpoint: i32, program: i32, log: &Path, says: &str) -> bool {
    let kill = |criu| kill_process(criu, Signal::KILL).is_ok();
    at_log(stillpoint, log, says, || criu_of(stillpoint, program).is_some_and(kill))
}

/// Returns the signals that the threads of a process block.
fn blocked(pid: i32) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let status = threads.map(|thread| fs::read_to_string(thread.path().join("status")).unwrap());
    status.map(|text| text.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()).collect()
}

#[test]
fn a_criu_that_is_killed_in_a_checkpoint_leaves_the_program_and_its_network_as_they_were() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let mut lifted = 0;
    for (round, moment) in ["Lock network", "Dumping path for", "Dumping pages", "Dumping core"].iter().enumerate() {
        let image = dir.path().join(format!("image{round}"));
        let (digest, pid) = (client.ask("DEBUG DIGEST"), redis.victim.pid.to_string());
        let blocked = blocked(redis.victim.pid);
        let path = image.to_str().unwrap();
        let arguments = ["checkpoint", "--pid", &pid, "--image", path, "--passes", "0"];
        let mut killed = false;
        let run = kernel_while(&criu, &arguments, |stillpoint| {
            killed = kill_criu_at(stillpoint, redis.victim.pid, &image.join("dump.log"), moment);
        });
        assert!(killed, "criu never said {moment:?}: {}", logs(&image));
        assert_eq!(run.code, Some(1), "{moment}: {run}");
        if run.err.contains(&format!("process {pid} ended with it")) {
            // criu's own instructions were in it: no program survives that, and the tool reports it
            assert!(run.err.contains("state: processes that ended must be started again"), "{moment}: {run}");
            redis.victim.wait_until_reaped();
            eprintln!("{moment}: the program ended with criu");
            let again = dir.path().join(format!("data{round}"));
            fs::create_dir(&again).unwrap();
            (redis, client) = Redis::with_data(&again).unwrap();
            continue;
        }
        assert!(run.err.contains("state: the program continues as before"), "{moment}: {run}");
        assert!(redis.victim.is_alive(), "{moment}");
        assert_eq!(self::blocked(redis.victim.pid), blocked, "{moment}: signals that threads block");
        // with rules of nftables in front there would be no answer
        assert_eq!(client.ask("DEBUG DIGEST"), digest, "{moment}");
        let status = kernel(&criu, &["status", "--image", path]).event("kernel-status");
        assert_eq!((status["stage"].as_str(), status["guard"].as_str()), (Some("unsealed"), None), "{status}");
        assert!(status["journal"].to_string().contains("criu could not dump"), "{status}");
        lifted += usize::from(status["journal"].to_string().contains("removed table"));
        assert_eq!(kernel(&criu, &["discard", "--image", path]).code, Some(0));
    }
    assert!(lifted > 0, "no moment was one with rules of nftables");
    assert_eq!(connect(redis.port).ask("PING"), "+PONG");
}

/// In each case either the program runs on and there is no image, or there is an image and no program.
#[test]
fn a_criu_that_is_killed_behind_the_seal_leaves_either_the_program_or_its_image() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let (digest, pid) = (client.ask("DEBUG DIGEST"), redis.victim.pid.to_string());
    for moment in ["Disconnect from the page server", "Unfreezing tasks into"] {
        let image = dir.path().join(moment.replace(' ', "-"));
        let path = image.to_str().unwrap();
        let run = kernel_while(&criu, &["checkpoint", "--pid", &pid, "--image", path, "--passes", "0"], |stillpoint| {
            kill_criu_at(stillpoint, redis.victim.pid, &image.join("dump.log"), moment);
        });
        let status = kernel(&criu, &["status", "--image", path]).event("kernel-status");
        match run.code {
            Some(0) => {
                redis.victim.wait_until_reaped();
                assert_eq!(status["stage"].as_str(), Some("ready"), "{moment}: {status}");
                restore(&criu, &image, &[]);
            }
            _ => {
                assert!(run.err.contains("state: the program continues as before"), "{moment}: {run}");
                assert_eq!(status["stage"].as_str(), Some("unsealed"), "{moment}: {status}");
                assert!(redis.victim.is_alive(), "{moment}");
            }
        }
        assert_eq!(client.ask("DEBUG DIGEST"), digest, "{moment}: {run}");
    }
}

#[test]
fn what_a_checkpoint_leaves_that_is_killed_with_its_criu_is_said_and_taken_away() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let (digest, pid) = (client.ask("DEBUG DIGEST"), redis.victim.pid.to_string());
    let image = dir.path().join("image");
    let path = image.to_str().unwrap();
    let run = kernel_while(&criu, &["checkpoint", "--pid", &pid, "--image", path, "--passes", "0"], |stillpoint| {
        let tool = Pid::from_raw(stillpoint).unwrap();
        let killed = at_log(stillpoint, &image.join("dump.log"), "Dumping pages", || {
            let criu = criu_of(stillpoint, redis.victim.pid);
            kill_process(tool, Signal::STOP).unwrap();
            let killed = criu.is_some_and(|criu| kill_process(criu, Signal::KILL).is_ok());
            kill_process(tool, Signal::KILL).unwrap();
            killed
        });
        assert!(killed, "it was done before");
    });
    assert_eq!(run.code, None, "{run}");
    let status = kernel(&criu, &["status", "--image", path]).event("kernel-status");
    assert_eq!((status["stage"].as_str(), status["guard"].is_string()), (Some("unsealed"), true), "{status}");
    let refused = kernel(&criu, &["checkpoint", "--pid", &pid, "--image", path]);
    assert_eq!(refused.code, Some(3), "{refused}");
    let gone = kernel(&criu, &["discard", "--image", path]).event("discarded");
    assert_eq!((gone["guard"].is_string(), gone["connections"].as_u64()), (true, Some(1)), "{gone}");
    assert_eq!(client.ask("DEBUG DIGEST"), digest);
}

/// Nothing of the restore is left, except on a busy machine: there criu may have ended, or the programs may already
/// run.
#[test]
fn a_criu_that_is_killed_in_a_restore_leaves_an_image_that_can_be_restored() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let digest = client.ask("DEBUG DIGEST");
    for moment in ["Forking task with", "lazy-pages: register", "Restoring scheduler params"] {
        let image = dir.path().join(moment.replace([' ', ':'], "-"));
        let path = image.to_str().unwrap();
        redis.victim.checkpoint(&criu, &image, &[]);
        let mut killed = false;
        let run = kernel_while(&criu, &["restore", "--image", path], |stillpoint| {
            killed = kill_criu_at(stillpoint, redis.victim.pid, &image.join("restore.log"), moment);
        });
        assert!(killed, "criu was done before it was killed at {moment:?}: {}", logs(&image));
        let restored = if run.code == Some(0) {
            run
        } else {
            assert_eq!(run.code, Some(1), "{moment}: {run}\n{}", logs(&image));
            wait_until_gone(redis.victim.pid);
            let status = kernel(&criu, &["status", "--image", path]).event("kernel-status");
            let stage = if status["used"].is_null() { "ready" } else { "stale" };
            assert_eq!(run.err.contains("with --again"), stage == "stale", "{moment}: {run}");
            assert_eq!(
                (status["stage"].as_str(), status["guard"].is_string()),
                (Some(stage), true),
                "{moment}: {status}"
            );
            restore(&criu, &image, if stage == "stale" { &["--again"] } else { &[] })
        };
        assert_eq!(client.ask("DEBUG DIGEST"), digest);
        wait_until_resident(&restored.event("restored"));
    }
}

#[test]
fn a_program_that_dies_while_its_memory_comes_is_said_and_its_image_not_restored_by_chance() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let image = dir.path().join("image");
    let path = image.to_str().unwrap();
    redis.victim.checkpoint(&criu, &image, &[]);
    let keeper = restore(&criu, &image, &["--fill-rate", "1"]).event("restored")["keeper"].as_i64().unwrap() as i32;
    assert_eq!(client.ask("PING"), "+PONG");
    let status = kernel(&criu, &["status", "--image", path]).event("kernel-status");
    assert_eq!((status["stage"].as_str(), status["runs"].as_bool()), (Some("filling"), Some(true)), "{status}");
    assert!(status["daemons"].as_array().unwrap().contains(&keeper.into()), "{status}");
    let all = kernel(&criu, &["status"]);
    assert!(all.out.contains(path), "without images it names those that are being filled: {all}");
    let refused = kernel(&criu, &["discard", "--image", path]);
    assert_eq!(refused.code, Some(3), "{refused}");
    assert!(refused.err.contains("is still being fetched from it"), "{refused}");

    kill(redis.victim.pid, "KILL");
    wait_until_gone(keeper);
    let status = kernel(&criu, &["status", "--image", path]).event("kernel-status");
    assert_eq!((status["stage"].as_str(), status["fill"]["ended"].as_u64()), (Some("stale"), Some(1)), "{status}");
    assert!(logs(&image).contains("ended before all of its memory was resident"), "{}", logs(&image));
    redis.victim.wait_until_reaped();
    let refused = kernel(&criu, &["restore", "--image", path]);
    assert_eq!(refused.code, Some(3), "{refused}");
    assert!(refused.err.contains("older than the files of its program"), "{refused}");
    restore(&criu, &image, &["--again"]);
    assert_eq!(connect(redis.port).ask("PING"), "+PONG");
}
