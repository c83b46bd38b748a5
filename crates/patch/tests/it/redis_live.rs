//! Debian's own redis-server, stripped and unmodified, patched under load.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::kill_injection::{KillInstant, run};
use stillpoint_patch_tests::packages::{Binary, redis as packaged, versions_with_source, with_libraries_of};
use stillpoint_patch_tests::server::{Redis, Server};
use stillpoint_patch_tests::shipped_program::{MonitoredLoad, ShippedProgram, older};
use stillpoint_patch_tests::victim::{Program, apply, residue, revert, soak, status};
use stillpoint_patch_tests::{effects, skip, wait, workspace_root};

/// Fixes that the oldest binary of the archive lacks; a request shows if the last one is active.
const DIFFS: [&str; 2] = ["CVE-2026-23631", "CVE-2026-25243"];

fn redis() -> &'static Result<ShippedProgram, stillpoint_patch_tests::Unavailable> {
    static BUILT: OnceLock<Result<ShippedProgram, stillpoint_patch_tests::Unavailable>> = OnceLock::new();
    BUILT.get_or_init(|| older("redis", &["redis-server", "redis-tools"], "usr/bin/redis-server", &DIFFS))
}

/// Sends a request and asserts that the fix is active or not.
#[track_caller]
fn assert_fixed(port: u16, fixed: bool) {
    for effect in effects::of_diff(DIFFS[1]) {
        let answer = effect.ask(port).expect("redis answers");
        assert_eq!(answer.fixed, fixed, "{}: {}", effect.request, answer.text);
    }
}

fn rounds(short: u32) -> u32 {
    if soak() { short * 20 } else { short }
}

#[track_caller]
fn there_and_back(server: &mut Server, patches: &[PathBuf], load: &MonitoredLoad) {
    let (pid, port) = (server.pid(), server.port());
    for patch in patches {
        apply(patch, pid).succeed();
    }
    server.assert_running();
    assert_fixed(port, true);
    load.answered(200);
    status(pid).succeed();
    for _ in patches {
        revert(pid).succeed();
    }
    server.assert_running();
    assert_fixed(port, false);
    load.answered(200);
    assert_eq!(residue(pid), Vec::<String>::new());
}

#[test]
fn redis_is_patched_and_reverted_under_load() {
    let shipped = match redis() {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    for threads in ["1", "4"] {
        let mut redis = Redis::start(&shipped.binary, &["--io-threads", threads]);
        let load = MonitoredLoad::redis(redis.port());
        for _ in 0..rounds(5) {
            there_and_back(&mut redis, &shipped.patches, &load);
        }
        load.assert_clean();
    }
}

/// Runs in the sandbox of Debian's unit: memory is never made executable, unlisted system calls kill.
#[test]
fn redis_is_patched_in_the_sandbox_of_its_unit() {
    let shipped = match redis() {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let sandbox = Program::build("sandbox");
    for mode in ["--kernel-mdwe", "--filter-mdwe"] {
        let probe = Command::new(sandbox.elf()).args([mode, "true"]).status().expect("run the sandbox");
        if !probe.success() {
            skip!("this kernel does not offer {mode} ({probe})");
        }
        let wrapped = Binary { path: sandbox.elf().to_owned(), libraries: shipped.binary.libraries.clone() };
        let mut server = Server::start(&wrapped, |port, _| {
            let redis = shipped.binary.path.clone().into_os_string();
            let words =
                ["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--enable-debug-command", "yes"]
                    .map(OsString::from);
            [OsString::from(mode), redis].into_iter().chain(words).collect()
        });
        let load = MonitoredLoad::redis(server.port());
        for _ in 0..rounds(3) {
            there_and_back(&mut server, &shipped.patches, &load);
        }
        load.assert_clean();
    }
}

/// Saves in the background: the child of BGSAVE is a fork of a process that is being patched.
#[test]
fn background_saves_are_right_while_redis_is_patched() {
    let shipped = match redis() {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let mut redis = Redis::start(&shipped.binary, &[]);
    redis.populate(100_000);
    let load = MonitoredLoad::redis(redis.port());
    for _ in 0..rounds(4) {
        for patch in [true, false] {
            let mut client = redis.client();
            assert!(client.command(&["BGSAVE"]).expect("redis answers").text().contains("started"));
            for file in &shipped.patches {
                let step = if patch { apply(file, redis.pid()) } else { revert(redis.pid()) };
                step.succeed();
            }
            wait::until("the background save to end", || {
                let info = client.command(&["INFO", "persistence"]).expect("redis answers").text().to_owned();
                assert!(info.contains("rdb_last_bgsave_status:ok"), "{info}");
                info.contains("rdb_bgsave_in_progress:0").then_some(())
            });
            assert_fixed(redis.port(), patch);
        }
    }
    redis.assert_running();
    load.assert_clean();
}

/// Kills the tool; redis continues, and no client is affected.
#[test]
fn the_tool_dies_while_redis_serves() {
    let shipped = match redis() {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let mut redis = Redis::start(&shipped.binary, &[]);
    let (pid, port) = (redis.pid(), redis.port());
    let load = MonitoredLoad::redis(port);
    let [first, patch] = &shipped.patches[..] else { panic!("{} patches", shipped.patches.len()) };
    let file = patch.file_name().and_then(|name| name.to_str()).expect("a name in ASCII");
    let (_, name) = file.split_once('-').expect("a number and the patch's name");
    apply(first, pid).succeed();
    let applying = run(&apply(patch, pid), KillInstant::Never).syscalls;
    let reverting = run(&revert(pid), KillInstant::Never).syscalls;
    let count = u64::from(rounds(12));
    for i in 0..count {
        run(&apply(patch, pid), KillInstant::AfterSyscalls(applying * (2 * i + 1) / (2 * count)));
        load.answered(50);
        redis.assert_running();
        assert_eq!(residue(pid), Vec::<String>::new());
        apply(patch, pid).succeed();
        assert_fixed(port, true);
        run(&revert(pid), KillInstant::AfterSyscalls(reverting * (2 * i + 1) / (2 * count)));
        load.answered(50);
        redis.assert_running();
        assert_eq!(residue(pid), Vec::<String>::new());
        // Revert by name: where the killed tool had completed its work, the newest patch is the first one now.
        let again = revert(pid).args([name]).run();
        assert!(matches!(again.code, Some(0 | 3)), "{again}");
        assert_fixed(port, false);
    }
    load.assert_clean();
}

/// Asks a script, and a function that was loaded before the patch, to change what all users share.
fn changes_what_all_share(redis: &Redis) -> [String; 3] {
    let mut client = redis.client();
    let script = "getmetatable('').__probe = 1; return type(setfenv)";
    let asked: [&[&str]; 3] =
        [&["EVAL", script, "0"], &["EVAL", "return type(getfenv)", "0"], &["FCALL", "probe", "0"]];
    asked.map(|words| client.command(words).expect("redis answers").text().to_owned())
}

/// The worked example of docs/shadow-members.md: an added member, tables of another length, and the work of the start.
#[test]
#[ignore = "full tier: two builds of redis, eight minutes of a processor"]
fn a_fix_of_a_member_and_of_tables_is_applied() {
    let packages = ["redis-server", "redis-tools"];
    let (version, libraries) =
        match versions_with_source(&packages).and_then(|all| Ok((all[0].clone(), packaged(Some(&all[0]))?))) {
            Ok(found) => found,
            Err(why) => skip!(why),
        };
    let (dir, package) = (tempfile::tempdir().expect("a directory"), format!("redis={version}"));
    let target = || Stillpoint::new().args(["patch", "target"]).debian(&package);
    let series = target().json().succeed().json().pop().expect("a line");
    let names = series["series"].as_array().expect("a series").iter().filter_map(|entry| entry["name"].as_str());
    let later: Vec<&str> = names.skip_while(|name| !name.contains("CVE-2025-46818")).collect();
    let shipped = format!("without:{}", later.join(","));
    target().args(["--shipped", &shipped, "--program", "redis-server", "--output"]).arg(dir.path()).succeed();
    let program = dir.path().join("redis-server");
    let (patch, diff) =
        (dir.path().join("fix.patch"), workspace_root().join("crates/patch/tests/programs/redis-catch-up.diff"));
    let build = || {
        let call =
            Stillpoint::new().args(["patch", "build", "--shipped", &shipped, "--quilt", "CVE-2025-46818", "--target"]);
        call.arg(&program).debian(&package).arg("--output").arg(&patch)
    };
    let member = ["--shadow-member", "redisServer.lua_enable_deprecated_api"];
    build().args(member).args(["--write-data", "--diff"]).arg(&diff).succeed();

    let mut redis = Redis::start(&with_libraries_of(&program, &libraries), &[]);
    let library =
        "#!lua name=l\nredis.register_function('probe', function() getmetatable('').__probe = 1; return 'changed' end)";
    redis.client().command(&["FUNCTION", "LOAD", library]).expect("redis answers");
    assert_eq!(changes_what_all_share(&redis), ["function", "function", "changed"]);
    let all_at_once = ["--quiescence", "stop"];
    for _ in 0..2 {
        apply(&patch, redis.pid()).args(all_at_once).succeed();
        let [script, table, function] = changes_what_all_share(&redis);
        assert!(script.contains("readonly table") && function.contains("readonly table"), "{script} {function}");
        assert!(table.contains("nonexistent global variable 'getfenv'"), "{table}");
        revert(redis.pid()).args(all_at_once).succeed();
        // what the new code has locked stays locked, until redis makes another interpreter
        redis.client().command(&["SCRIPT", "FLUSH"]).expect("redis answers");
        let [script, table, _] = changes_what_all_share(&redis);
        assert_eq!([script.as_str(), &table], ["function", "function"]);
    }
    redis.assert_running();
}
