//! Files for gdb and perf that describe patched code.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::victim::{Phase, Program, Victim, apply};
use stillpoint_patch_tests::{skip, wait};

/// Returns the backtraces of all threads.
fn backtrace(victim: &Victim, script: Option<&Path>) -> String {
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-q", "-batch", "-p", &victim.pid().to_string()]);
    if let Some(script) = script {
        gdb.arg("-x").arg(script);
    }
    let output = gdb.args(["-ex", "thread apply all backtrace"]).stdin(Stdio::null()).output().expect("run gdb");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns true if a frame of `callee` is followed by one of `caller`.
fn has_call(backtrace: &str, callee: &str, caller: &str) -> bool {
    let lines: Vec<&str> = backtrace.lines().collect();
    let frame = |line: &str, name: &str| line.starts_with('#') && line.contains(&format!(" {name} ("));
    lines.windows(2).any(|pair| frame(pair[0], callee) && frame(pair[1], caller))
}

/// Starts `blocked` and stops one of its threads in the new code of `stands_here`.
fn in_new_code(program: &Program) -> Victim {
    let patch = program.patch(2);
    let mut victim = program.start(&[]);
    // Leave the old code first: the patch cannot wait for input.
    victim.stdin().write_all(b"x").expect("wake the sleeper");
    let calls = |victim: &Victim| victim.slots().iter().find(|s| s.role == "sleeper").map_or(0, |s| s.calls);
    wait::until("the sleeper to return", || (calls(&victim) == 1).then_some(()));
    victim.announce(Phase::Over(1, 2));
    apply(&patch, victim.pid()).succeed();
    victim.assert_settled(2);
    // Enter the new code, where the thread waits for the next byte.
    victim.stdin().write_all(b"x").expect("wake the sleeper");
    victim
}

#[test]
fn gdb_names_the_frames_of_patched_functions() {
    if Command::new("gdb").arg("--version").stdout(Stdio::null()).status().is_err() {
        skip!("gdb is not installed");
    }
    let program = Program::build("blocked");
    let mut victim = in_new_code(&program);
    let directory = program.dir().join("gdb");
    let files = Stillpoint::new().args(["patch", "gdb", "--pid"]).arg(victim.pid()).arg("--output").arg(&directory);
    let line = &files.json().succeed().json()[0];
    let script = Path::new(line["script"].as_str().expect("a script"));
    wait::until("gdb to see the sleeper in the new code", || {
        has_call(&backtrace(&victim, Some(script)), "stands_here", "sleeper").then_some(())
    });
    // Without our files gdb cannot: this is their purpose.
    assert!(!has_call(&backtrace(&victim, None), "stands_here", "sleeper"));
    victim.assert_answering();
    victim.assert_no_residue();
}

#[test]
fn perf_finds_the_names_of_patched_functions() {
    let program = Program::build("blocked");
    let victim = in_new_code(&program);
    let directory = program.dir().join("gdb");
    let files = Stillpoint::new().args(["patch", "gdb", "--pid"]).arg(victim.pid()).arg("--output").arg(&directory);
    let line = &files.json().succeed().json()[0];
    let map = line["perf_map"].as_str().expect("a map");
    assert!(map.ends_with(&format!("/tmp/perf-{}.map", victim.pid())), "perf looks elsewhere than {map}");
    let text = std::fs::read_to_string(map).expect("read the map");
    for function in ["leaf", "stands_here", "begin_deal", "end_deal"] {
        let named = |line: &str| {
            let mut words = line.split(' ');
            let hex = |word: Option<&str>| word.is_some_and(|word| u64::from_str_radix(word, 16).is_ok_and(|n| n > 0));
            hex(words.next()) && hex(words.next()) && words.next() == Some(function)
        };
        assert!(text.lines().any(named), "{function} is not in the map:\n{text}");
    }
}

/// Checks the location of files that gdb executes.
#[test]
fn files_for_debuggers_go_where_no_other_user_can_change_them() {
    let program = Program::build("blocked");
    let victim = in_new_code(&program);
    let place = tempfile::tempdir().expect("a directory");
    let path = |name: &str| place.path().join(name);
    std::fs::create_dir(path("foreign")).expect("make a directory");
    std::os::unix::fs::chown(path("foreign"), Some(65534), None).expect("give it away");
    std::fs::create_dir(path("real")).expect("make a directory");
    std::os::unix::fs::symlink("real", path("link")).expect("make a link");
    for (name, why) in [("foreign", "belongs to uid 65534"), ("foreign/below", "uid 65534"), ("link", "symbolic link")]
    {
        let run =
            Stillpoint::new().args(["patch", "gdb", "--pid"]).arg(victim.pid()).arg("--output").arg(path(name)).run();
        assert_eq!(run.code, Some(3), "{run}");
        assert!(run.stderr.contains(why), "{run}");
    }
    assert_eq!(std::fs::read_dir(path("real")).expect("list it").count(), 0);
    // any user can create a map of any size
    let map = format!("/tmp/perf-{}.map", victim.pid());
    std::fs::File::create(&map).and_then(|file| file.set_len(60 << 30)).expect("make a sparse file");
    let run =
        Stillpoint::new().args(["patch", "gdb", "--pid"]).arg(victim.pid()).arg("--output").arg(path("own")).run();
    std::fs::remove_file(&map).expect("remove it");
    assert!(run.code != Some(0) && run.stderr.contains("more than"), "{run}");
    victim.assert_no_residue();
}
