//! Debian's own MariaDB and a redis with live patches: written into an image and restored while clients stay connected.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use stillpoint_patch_tests::checkpointed_server::{CheckpointedServer, criu};
use stillpoint_patch_tests::mariadb::client::{Answer, Client};
use stillpoint_patch_tests::patch_calls::{apply, revert, status};
use stillpoint_patch_tests::server::free_port;
use stillpoint_patch_tests::shipped_program::older;
use stillpoint_patch_tests::victim::residue;
use stillpoint_patch_tests::{effects, mariadb, skip, wait};
use tempfile::TempDir;

const WRITERS: u64 = 8;

/// Stops writers when dropped, also after a failure.
struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes rows one after another, each its own transaction over one connection, until the stop flag is set.
fn write(port: u16, writer: u64, stop: &AtomicBool, done: &AtomicU64) -> u64 {
    let mut client = Client::connect_tcp(port, "test").expect("connect");
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        n += 1;
        let insert = format!("INSERT INTO t VALUES ({writer}, {n}, REPEAT('{}', 500))", n % 10);
        // the test allows neither a lost connection nor a refused row
        assert_eq!(client.done(&insert).expect("the connection lasts"), Answer::Done(1));
        done.fetch_add(1, Ordering::Relaxed);
    }
    n
}

#[test]
fn mariadb_comes_back_twice_under_writers_who_lose_no_row_and_no_connection() {
    let criu = match criu() {
        Ok(criu) => criu,
        Err(why) => skip!(why),
    };
    let packaged = match mariadb::packaged() {
        Ok(packaged) => packaged,
        Err(why) => skip!(why),
    };
    let (dir, port) = (TempDir::new().expect("a directory"), free_port());
    let extra = [
        // criu does not support io_uring, and maps memory that is only reserved as memory that counts
        "--innodb-use-native-aio=0",
        "--loose-innodb-buffer-pool-size-max=128M",
        "--innodb-buffer-pool-size=64M",
    ];
    let (binary, arguments) = packaged.command(port, dir.path(), &extra).unwrap_or_else(|error| panic!("{error}"));
    let mut server = CheckpointedServer::start(&binary, &arguments, dir.path());
    let mut client = wait::until("mariadbd to let a client in", || Client::connect_tcp(port, "test").ok());
    client
        .done("CREATE TABLE t (writer INT, n INT, data TEXT, PRIMARY KEY (writer, n)) ENGINE=InnoDB")
        .expect("a table");
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let progress = |more: u64| {
        let begun = done.load(Ordering::Relaxed);
        wait::until("rows to be written", || (done.load(Ordering::Relaxed) >= begun + more).then_some(()));
    };
    let written: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn({
                    let (stop, done) = (&stop, &done);
                    move || write(port, writer, stop, done)
                })
            })
            .collect();
        let stopping = Stop(&stop);
        progress(500);
        for round in ["first", "second"] {
            let (taken, restored) = server.there_and_back(criu, round);
            println!("{}\n{}", taken.stdout, restored.stdout);
            progress(500);
        }
        drop(stopping);
        writers.into_iter().map(|writer| writer.join().expect("a writer that lost nothing")).collect()
    });
    let answer = client
        .done("SELECT writer, COUNT(*), MAX(n), SUM(data = REPEAT(n % 10, 500)) FROM t GROUP BY writer ORDER BY writer")
        .expect("rows");
    let Answer::Rows(rows) = answer else { panic!("{answer:?}") };
    let expected: Vec<Vec<Option<String>>> = (0..WRITERS)
        .zip(&written)
        .map(|(writer, n)| [writer, *n, *n, *n].map(|value| Some(value.to_string())).to_vec())
        .collect();
    assert_eq!(rows, expected);
    let check = client.done("CHECK TABLE t").expect("a table that is checked");
    assert!(check.to_string().ends_with("status\tOK"), "{check}");
}

/// Returns addresses and permissions of the new code's mappings.
fn executable(pid: i32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps of a running program");
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let (range, may) = (words.next()?, words.next()?);
        may.contains('x').then(|| format!("{range} {may}"))
    };
    maps.lines().filter_map(line).collect()
}

#[test]
fn live_patches_come_along_with_their_code_and_their_ledger_and_can_be_reverted() {
    let criu = match criu() {
        Ok(criu) => criu,
        Err(why) => skip!(why),
    };
    let diffs = ["CVE-2026-23631", "CVE-2026-25243"];
    let shipped = match older("redis", &["redis-server", "redis-tools"], "usr/bin/redis-server", &diffs) {
        Ok(shipped) => shipped,
        Err(why) => skip!(why),
    };
    let (dir, port) = (TempDir::new().expect("a directory"), free_port());
    let words = ["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--enable-debug-command", "yes"];
    let mut server = CheckpointedServer::start(&shipped.binary, &words.map(OsString::from), dir.path());
    let mut client = wait::until("redis to listen", || stillpoint_patch_tests::resp::Client::connect(port).ok());
    let fixed = |expected: bool| {
        for effect in effects::of_diff(diffs[1]) {
            let answer = effect.ask(port).expect("redis answers");
            assert_eq!(answer.fixed, expected, "{}: {}", effect.request, answer.text);
        }
    };
    fixed(false);
    for patch in &shipped.patches {
        apply(patch, server.pid()).succeed();
    }
    fixed(true);
    let carried = |pid| (status(pid).json().succeed().stdout, executable(pid));
    let before = carried(server.pid());
    for round in ["first", "second"] {
        server.there_and_back(criu, round);
        assert_eq!(carried(server.pid()), before, "{round}");
        fixed(true);
        assert_eq!(client.command(&["PING"]).expect("the same connection").text(), "PONG");
    }
    // one is reverted, and the other stays for a third image
    revert(server.pid()).succeed();
    fixed(false);
    let before = carried(server.pid());
    server.there_and_back(criu, "third");
    assert_eq!(carried(server.pid()), before);
    revert(server.pid()).succeed();
    apply(&shipped.patches[0], server.pid()).succeed();
    revert(server.pid()).succeed();
    assert_eq!(client.command(&["PING"]).expect("the same connection").text(), "PONG");
    assert_eq!(residue(server.pid()), Vec::<String>::new());
}
