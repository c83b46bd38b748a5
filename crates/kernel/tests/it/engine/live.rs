//! Restored servers and programs: data, connections, threads, huge pages; and refusals.

use crate::engine::support::{
    KEYS, Redis, TestProgram, children, compiled, connect, criu, free_port, kernel, kill, logs, program, restore,
    scratch, until, wait_until_resident,
};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use stillpoint_testing::LineClient;
use stillpoint_testing::packages;
use stillpoint_testing::skipped;

#[test]
fn redis_comes_back_with_its_connections_and_its_data() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let mut others: Vec<LineClient> = (0..10).map(|_| connect(redis.port)).collect();
    let digest = client.ask("DEBUG DIGEST");
    let image = dir.path().join("image");
    let taken = redis.victim.checkpoint(&criu, &image, &[]).event("checkpointed");
    assert!(taken["pages"].as_u64().unwrap() > 10_000, "{taken}");
    assert!(!redis.victim.is_alive(), "it ends with the checkpoint");

    let inspected = kernel(&criu, &["inspect", image.to_str().unwrap(), "--verify"]);
    assert_eq!(inspected.code, Some(0), "{inspected}");
    let event = inspected.event("image");
    assert_eq!((event["name"].as_str(), event["verified"].as_bool()), (Some("redis-server"), Some(true)));

    let restored = restore(&criu, &image, &[]).event("restored");
    assert_eq!(restored["pid"], redis.victim.pid);
    // the same connections
    assert_eq!(client.ask("PING"), "+PONG");
    assert!(others.iter_mut().all(|other| other.ask("PING") == "+PONG"));
    assert_eq!(client.ask("DEBUG DIGEST"), digest);
    // memory that is given up and used again: a mapped image would restore its old content
    for _ in 0..3 {
        assert_eq!(client.ask("FLUSHALL"), "+OK");
        assert_eq!(client.ask(&format!("DEBUG POPULATE {KEYS} key 200")), "+OK");
        assert_eq!(client.ask("DEBUG DIGEST"), digest);
    }
    wait_until_resident(&restored);
    assert!(redis.victim.is_alive());
    // and once more, from the present state
    let second = dir.path().join("second");
    redis.victim.checkpoint(&criu, &second, &[]);
    restore(&criu, &second, &["--restore", "eager"]);
    assert_eq!(client.ask("DEBUG DIGEST"), digest);
    assert_eq!(connect(redis.port).ask("PING"), "+PONG");
}

#[test]
fn memory_is_never_zeros_though_daemon_and_keeper_are_killed() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let digest = client.ask("DEBUG DIGEST");
    let image = dir.path().join("image");
    redis.victim.checkpoint(&criu, &image, &[]);
    // slow enough that nearly all memory is still to be fetched
    let restored = restore(&criu, &image, &["--fill-rate", "1"]).event("restored");
    let keeper = restored["keeper"].as_i64().unwrap() as i32;
    let server = until("the server", || children(keeper).first().copied());
    kill(server, "KILL");
    let second = until("another server", || children(keeper).into_iter().find(|pid| *pid != server));
    // half of the keys are given up while servers die
    for half in 0..100_000 / 500 {
        let keys: Vec<String> = (0..500).map(|i| format!("key:{}", half * 500 + i)).collect();
        assert_eq!(client.ask(&format!("DEL {}", keys.join(" "))), ":500");
        if half == 50 {
            kill(keeper, "KILL");
        }
        if half == 100 {
            kill(second, "KILL");
        }
    }
    assert_eq!(client.ask("FLUSHALL"), "+OK");
    assert_eq!(client.ask("MEMORY PURGE"), "+OK");
    assert_eq!(client.ask(&format!("DEBUG POPULATE {KEYS} key 200")), "+OK");
    assert_eq!(client.ask("DEBUG DIGEST"), digest);
    let log = fs::read_to_string(image.join("lazy-pages.log")).unwrap();
    assert!(log.contains("the keeper died"), "{log}");
}

#[test]
fn a_damaged_image_is_refused_or_ends_the_program_but_is_never_served() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, _client)) = Redis::with_data(dir.path()) else { return };
    let image = dir.path().join("image");
    redis.victim.checkpoint(&criu, &image, &[]);
    let path = image.to_str().unwrap();
    // a lazy page in the middle of the largest range
    let inspected = kernel(&criu, &["inspect", path, "--extents"]).event("image");
    let extents = inspected["memories"][0]["extents"].as_array().unwrap();
    let lazy = extents.iter().filter(|extent| extent[2] == 6);
    let largest = lazy.max_by_key(|extent| extent[1].as_u64()).unwrap();
    let (start, pages) = (largest[0].as_u64().unwrap(), largest[1].as_u64().unwrap());
    let foam = image.join(format!("foam-task-{}.img", redis.victim.pid));
    let file = fs::OpenOptions::new().read(true).write(true).open(&foam).unwrap();
    let place = start + pages / 2 * 4096;
    let mut byte = [0];
    file.read_exact_at(&mut byte, place).unwrap();
    file.write_all_at(&[!byte[0]], place).unwrap();
    for arguments in
        [&["restore", "--image", path][..], &["restore", "--image", path, "--dry-run"], &["inspect", path, "--verify"]]
    {
        let refused = kernel(&criu, arguments);
        assert_eq!(refused.code, Some(3), "{refused}");
        assert!(refused.err.contains("is damaged"), "{refused}");
    }
    // found only when it is fetched: the program ends before it can read the page, sometimes before it is released
    let ended = kernel(&criu, &["restore", "--image", path, "--verify-on-demand", "--fill-rate", "0"]);
    assert!(matches!(ended.code, Some(0 | 1)), "{ended}");
    redis.victim.wait_until_reaped();
    assert!(logs(&image).contains("is damaged"), "{}", logs(&image));
    file.write_all_at(&byte, place).unwrap();
    restore(&criu, &image, &["--again"]);
    assert_eq!(connect(redis.port).ask("PING"), "+PONG");
}

#[test]
fn a_checkpoint_that_fails_lets_the_program_run_on() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let digest = client.ask("DEBUG DIGEST");
    let (pid, image) = (redis.victim.pid.to_string(), dir.path().join("image"));
    let path = image.to_str().unwrap();
    let failed = kernel(&criu, &["checkpoint", "--pid", &pid, "--image", path, "--fail-before-seal"]);
    assert_eq!(failed.code, Some(1), "{failed}");
    assert!(failed.err.contains("state: the program continues as before"), "{failed}");
    assert_eq!(client.ask("DEBUG DIGEST"), digest);
    let refused = kernel(&criu, &["restore", "--image", path]);
    assert_eq!(refused.code, Some(3), "{refused}");
    assert!(refused.err.contains("no sealed checkpoint"), "{refused}");
    let left: Vec<_> = fs::read_dir(&image).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().ends_with(".log")), "{left:?}");
}

/// Additional huge pages of the system, until dropped.
struct HugePages {
    before: String,
}

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    fn more(pages: usize) -> Option<HugePages> {
        let before = fs::read_to_string(HugePages::COUNT).ok()?;
        let wanted = before.trim().parse::<usize>().ok()? + pages;
        let _ = fs::write(HugePages::COUNT, wanted.to_string());
        let taken = HugePages { before };
        (fs::read_to_string(HugePages::COUNT).ok()?.trim() == wanted.to_string()).then_some(taken)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(HugePages::COUNT, &self.before);
    }
}

#[test]
fn huge_pages_come_back_with_who_shares_them() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    // its own, its child's copies, and those that both share
    let Some(_pages) = HugePages::more(8) else { return skipped("this machine gives no huge pages") };
    let mut victim = TestProgram::start(&compiled("huge", dir.path()), &[], dir.path());
    let says = |what: &str| fs::read_to_string(dir.path().join("out")).is_ok_and(|text| text.contains(what));
    until("the program to be ready", || says("ready").then_some(()));
    let image = dir.path().join("image");
    victim.checkpoint(&criu, &image, &[]);
    restore(&criu, &image, &[]);
    kill(victim.pid, "USR1");
    until("the program's judgement", || (says("fine") || says("wrong")).then_some(()));
    assert!(says("fine"), "{}", logs(&image));
}

#[test]
fn a_program_that_changes_its_memory_while_it_comes_reads_what_it_should() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let mut victim = TestProgram::start(&compiled("changes", dir.path()), &[], dir.path());
    let out = dir.path().join("out");
    let says = |what: &str| fs::read_to_string(&out).is_ok_and(|text| text.contains(what)).then_some(());
    until("the program to be ready", || says("ready"));
    for (round, more) in [&["--fill-rate", "1"][..], &["--fill-rate", "0"], &["--fill-rate", "64"]].iter().enumerate() {
        let image = dir.path().join(format!("image{round}"));
        victim.checkpoint(&criu, &image, if round == 1 { &["--dense"] } else { &[] });
        let restored = restore(&criu, &image, more).event("restored");
        // each signal is one round: give up, move, fork, check in threads and in children
        kill(victim.pid, "USR1");
        until("the program's judgement", || says(&format!("round {round}: ")));
        let text = fs::read_to_string(&out).unwrap();
        assert!(text.contains(&format!("round {round}: fine")), "{text}\n{}", logs(&image));
        wait_until_resident(&restored);
    }
}

#[test]
fn what_cannot_be_taken_is_refused_by_name() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let image = dir.path().join("image");
    let path = image.to_str().unwrap();
    let refused = kernel(&criu, &["checkpoint", "--pid", "4194000", "--image", path]);
    assert_eq!(refused.code, Some(3), "{refused}");
    assert!(refused.err.contains("process 4194000 does not exist"), "{refused}");
    assert!(!image.exists(), "nothing was touched");

    let Some(redis) = Redis::start(dir.path()) else { return };
    let _client = connect(redis.port);
    let pid = redis.victim.pid.to_string();
    let dry = kernel(&criu, &["checkpoint", "--pid", &pid, "--image", path, "--dry-run"]);
    assert_eq!(dry.code, Some(0), "{dry}");
    assert!(dry.event("kernel-check")["findings"].to_string().contains("1 established TCP connections"), "{dry}");
    assert!(!image.exists(), "nothing was touched");

    // a pipe to a process outside
    let mut sleeper = Command::new("sleep");
    let mut sleeper = sleeper.arg("1000").stdout(std::process::Stdio::piped()).spawn().unwrap();
    let expected = format!("descriptor 1 is a pipe to process {}", std::process::id());
    // A process that another test starts at this moment also holds the pipe until its exec.
    until("this process to be named", || {
        let checked = kernel(&criu, &["check", "--pid", &sleeper.id().to_string()]);
        assert_eq!(checked.code, Some(3), "{checked}");
        checked.err.contains(&expected).then_some(())
    });
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();

    let old = Path::new("/usr/sbin/true");
    let absent = kernel(if old.exists() { old } else { Path::new("/bin/true") }, &["check", "--pid", &pid]);
    assert_eq!(absent.code, Some(3), "{absent}");
}

#[test]
fn memcached_comes_back_with_its_threads() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some(program) = program(packages::memcached(None)) else { return };
    let port = free_port();
    let mut victim =
        TestProgram::start(&program, &["-u", "root", "-l", "127.0.0.1", "-p", &port.to_string()], dir.path());
    let mut client = connect(port);
    for n in 0..2000 {
        client.send(&format!("set key{n} 0 0 4000\r\n{}", format!("{n:04}").repeat(1000)));
        assert_eq!(client.line(), "STORED");
    }
    let image = dir.path().join("image");
    victim.checkpoint(&criu, &image, &[]);
    restore(&criu, &image, &[]);
    for n in 0..2000 {
        assert_eq!(client.ask(&format!("get key{n}")), format!("VALUE key{n} 0 4000"));
        assert_eq!(client.line(), format!("{n:04}").repeat(1000));
        assert_eq!(client.line(), "END");
    }
    assert!(connect(port).ask("version").starts_with("VERSION"));
}

#[test]
fn memory_that_no_other_process_can_read_is_refused_by_check() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let victim = TestProgram::start(&compiled("secret", dir.path()), &[], dir.path());
    let said = until("the program to say whether it has such memory", || {
        fs::read_to_string(dir.path().join("out")).ok().filter(|said| said.ends_with('\n'))
    });
    if said != "mapped\n" {
        return skipped("this kernel has no memfd_secret");
    }
    let refused = kernel(&criu, &["check", "--pid", &victim.pid.to_string()]);
    assert_eq!(refused.code, Some(3), "{refused}");
    assert!(refused.err.contains("memfd_secret"), "{refused}");
}
