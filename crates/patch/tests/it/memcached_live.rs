//! Debian's own memcached, stripped and without any dynamic symbol of its own, patched under load.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::OnceLock;
use stillpoint_patch_tests::kill_at::{Moment, run};
use stillpoint_patch_tests::server::Memcached;
use stillpoint_patch_tests::shipped::{self, Shipped, Watched, older};
use stillpoint_patch_tests::victim::{apply, residue, revert, soak, status};
use stillpoint_patch_tests::{packages, skip, wait};

fn memcached() -> &'static Result<Shipped, stillpoint_patch_tests::Unavailable> {
    static BUILT: OnceLock<Result<Shipped, stillpoint_patch_tests::Unavailable>> = OnceLock::new();
    BUILT.get_or_init(shipped::memcached)
}

/// Returns memcached's answer to `version`.
#[track_caller]
fn version(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect to memcached");
    stream.set_read_timeout(Some(wait::WAIT_TIMEOUT)).expect("set a time-out");
    stream.write_all(b"version\r\n").expect("ask memcached");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("memcached answers");
    line.trim_end().to_owned()
}

#[test]
fn memcached_is_patched_and_reverted_under_load() {
    let shipped = match memcached() {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let mut memcached = Memcached::start(&shipped.binary, &["-t", "4"]);
    let (pid, port) = (memcached.pid(), memcached.port());
    let load = Watched::memcached(port);
    let before = version(port);
    assert!(before.starts_with("VERSION 1."), "{before}");
    for _ in 0..if soak() { 100 } else { 6 } {
        apply(&shipped.patches[0], pid).succeed();
        load.answered(100);
        memcached.assert_running();
        assert_eq!(version(port), "VERSION stillpoint");
        status(pid).succeed();
        revert(pid).succeed();
        load.answered(100);
        memcached.assert_running();
        assert_eq!(version(port), before);
        assert_eq!(residue(pid), Vec::<String>::new());
    }
    load.assert_clean();
}

/// Patches Debian's libevent, stripped, under Debian's memcached: the library is the target, the process is
/// memcached's.
#[test]
fn the_library_that_memcached_runs_on_is_patched() {
    const LIBRARY: &str = "usr/lib/x86_64-linux-gnu/libevent-2.1.so.7";
    let built = older("libevent", &["libevent-2.1-7"], LIBRARY, &[]).and_then(|library| {
        let mut memcached = packages::memcached(None)?;
        memcached.libraries.insert(0, library.binary.path.parent().expect("a directory").to_owned());
        Ok((library, memcached))
    });
    let (library, binary) = match built {
        Ok(built) => built,
        Err(why) => skip!(why),
    };
    let mut memcached = Memcached::start(&binary, &["-t", "4"]);
    let pid = memcached.pid();
    let load = Watched::memcached(memcached.port());
    for _ in 0..if soak() { 50 } else { 2 } {
        for patch in &library.patches {
            apply(patch, pid).succeed();
            load.answered(100);
            memcached.assert_running();
        }
        for _ in &library.patches {
            revert(pid).succeed();
            load.answered(100);
            memcached.assert_running();
        }
        assert_eq!(residue(pid), Vec::<String>::new());
    }
    load.assert_clean();
}

#[test]
fn the_tool_dies_while_memcached_serves() {
    let shipped = match memcached() {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let mut memcached = Memcached::start(&shipped.binary, &["-t", "4"]);
    let pid = memcached.pid();
    let load = Watched::memcached(memcached.port());
    let patch = &shipped.patches[0];
    let total = run(&apply(patch, pid), Moment::Never).syscalls;
    let count = if soak() { 200 } else { 8 };
    for i in 0..count {
        revert(pid).succeed();
        run(&apply(patch, pid), Moment::AfterSyscalls(total * (2 * i + 1) / (2 * count)));
        load.answered(50);
        memcached.assert_running();
        assert_eq!(residue(pid), Vec::<String>::new());
        apply(patch, pid).succeed();
    }
    revert(pid).succeed();
    load.assert_clean();
}
